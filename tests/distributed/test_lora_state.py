"""State of a model with LoRA adapters: merged export, PEFT folders, reference policy, checkpoints and optimizer state."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from models_for_layouts import make
from safetensors.torch import load_file
from test_distillation_memory import HeldBytes
from test_layouts import ragged_block, share_of
from test_lora import ALPHA, LR, ONE, RANK, linear_layers, lora_spec, write_adapters

from models.architecture import ModelSpec
from models.conversion.mapping import Box
from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.losses import CrossEntropy
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_state_bytes import StateBytes, largest_state, pipeline_stages, state_of_rank
from parallel.dims import ParallelDims
from parallel.trainer_config import MAX_MERGED_ELEMENTS

SCALE = ALPHA / RANK
TP2PP2 = ParallelDims(tp=2, pp=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return (folder of a dense model, PEFT folder with random adapters)."""
    folder = tmp_path_factory.mktemp("lora")
    make("dense", folder / "model")
    write_adapters(folder / "adapters", folder / "model")
    return folder / "model", folder / "adapters"


def build(spec: ModelSpec):
    from mrl.workers.actor_critic import MegatronActor

    return MegatronActor(spec)


def train(actor, rank: int, steps: int) -> list[float]:
    """Run the next optimizer steps, and return this rank's part of each loss."""
    block = ragged_block(40)
    share = share_of(block, actor.spec.dims, 40, rank)
    reports = [actor.update(block, [share], CrossEntropy(), [LR])[0] for _ in range(steps)]
    return [report.sums.get("loss", 0.0) for report in reports]


def logprobs(actor, rank: int, compute: str = "compute_logprobs") -> list[bytes]:
    block = ragged_block(40)
    values = getattr(actor, compute)(block, share_of(block, actor.spec.dims, 40, rank))
    return [value.numpy().tobytes() for value in values]


def adapter_bytes(actor) -> dict[str, bytes]:
    return {name: param.detach().numpy().tobytes() for name, param in actor.adapters.params.items()}


def arrays(tensors) -> dict[str, np.ndarray]:
    """Return the tensors as arrays, which a rank can return to the test. The conversion to float32 is exact."""
    return {name: tensor.detach().float().numpy().copy() for name, tensor in tensors}


def export(rank: int, spec: ModelSpec) -> dict[str, np.ndarray]:
    actor = build(spec)
    exported = {name: tensor.clone() for name, tensor in actor.export()} if actor.participates_in_export else {}
    assert all(tensor.dtype == getattr(torch, spec.dtype) for tensor in exported.values())
    if spec.dims.world_size == 1:
        read = actor.bridge.reader()  # weight sync reads the weights with it
        assert all(torch.equal(read(name, Box.whole(t.shape)), t) for name, t in exported.items())
    return arrays(exported.items())


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dims", [ONE, ParallelDims(tp=2)], ids=str)
def test_the_export_equals_w_plus_scaled_b_a_byte_for_byte(run_ranks, folders, dims, dtype):
    model, adapters = folders
    weights, pairs = ({n: t.to(getattr(torch, dtype)) for n, t in load_file(f).items()} for f in
                      (model / "model.safetensors", adapters / "adapter_model.safetensors"))  # fmt: skip
    for name in linear_layers(model):
        a, b = (pairs[f"base_model.model.{name.removesuffix('weight')}lora_{m}.weight"].float() for m in "AB")
        weights[name] = (weights[name].float() + SCALE * (b @ a)).to(weights[name].dtype)
    found = run_ranks(dims, export, lora_spec(model, dims, adapters, dtype=dtype))[0]
    assert found.keys() == weights.keys()
    different = [name for name, tensor in weights.items() if found[name].tobytes() != tensor.float().numpy().tobytes()]
    assert not different, different[:5]


def merge_without_values(rank: int) -> tuple[int, int]:
    """Merge a bfloat16 weight on the device "meta". Return (its bytes, peak of the bytes of the created tensors)."""
    from parallel.lora import LinearSplit, LoraAdapter, LowRankPair

    rows, width = 8192, 16384
    split = LinearSplit(0, dict(q=rows // 2, k=rows // 4, v=rows // 4), torch.cat, sequence_parallel=False)
    pairs = {
        name: LowRankPair(torch.empty(8, width, device="meta"), torch.empty(count, 8, device="meta"), split)
        for name, count in split.rows.items()
        if name != "k"
    }
    weight = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    with HeldBytes() as held:
        merged = LoraAdapter(pairs, split, 2.0).merged(weight)
    assert (merged.shape, merged.dtype) == (weight.shape, weight.dtype)
    return merged.nbytes, held.peak


def test_merged_weights_need_few_float32_tensors(run_ranks):
    ((nbytes, peak),) = run_ranks(ONE, merge_without_values)
    limited = 4 * 4 * MAX_MERGED_ELEMENTS
    assert nbytes < peak <= nbytes + limited < 2 * nbytes


def merge_in_slices(rank: int) -> None:
    from parallel import lora

    lora.MAX_MERGED_ELEMENTS = 7 * 6  # six columns
    split = lora.LinearSplit(1, dict(a=4, b=3), torch.cat, sequence_parallel=False)
    pair = lora.LowRankPair(torch.randn(2, 20), torch.randn(3, 2), split)
    weight = torch.randn(7, 20)
    expected = weight.clone()
    expected[4:] += 0.5 * (pair.lora_b.detach() @ pair.lora_a.detach())
    torch.testing.assert_close(lora.LoraAdapter({"b": pair}, split, 0.5).merged(weight), expected)


def test_weights_are_merged_in_slices_of_columns(run_ranks):
    run_ranks(ONE, merge_in_slices)


def describe_initial_model(rank: int, spec: ModelSpec):
    actor, base = build(spec), build(replace(spec, lora=None))
    assert logprobs(actor, rank) == logprobs(base, rank), "B is 0, so new adapters change nothing"
    frozen = [p for chunk in actor.chunks for n, p in chunk.named_parameters() if ".lora." not in n]
    assert frozen and not any(p.requires_grad for p in frozen)
    return arrays(actor.adapters.export())


@pytest.mark.extended
def test_new_adapters_are_the_same_in_every_layout_and_change_nothing(run_ranks, folders):
    model, _ = folders
    expected = run_ranks(ONE, describe_initial_model, lora_spec(model, ONE))[0]
    a, b = (dict((n, t) for n, t in expected.items() if part in n) for part in ("lora_A", "lora_B"))
    assert len(a) == len(b) == len(linear_layers(model)) and not any(t.any() for t in b.values())
    assert all(0.9 < np.abs(t).max() * t.shape[1] ** 0.5 <= 1 for t in a.values())
    assert len({t.tobytes() for t in a.values()}) == len(a), "each matrix has its own random numbers"
    found = run_ranks(TP2PP2, describe_initial_model, lora_spec(model, TP2PP2))[0]
    assert found.keys() == expected.keys() and all(found[n].tobytes() == expected[n].tobytes() for n in found)


def use_reference(rank: int, spec: ModelSpec):
    actor, base = build(spec), logprobs(build(replace(spec, lora=None)), rank)
    actor.copy_weights_to_reference()
    train(actor, rank, 1)
    trained = logprobs(actor, rank)
    assert logprobs(actor, rank, "compute_reference_logprobs") == base
    assert trained == logprobs(actor, rank) and (not trained or trained != base)
    num_trained = sum(p.numel() for chunk in actor.chunks for p in chunk.parameters() if p.requires_grad)
    padding = 64 * 4 * len(actor.adapters.params) + 4096  # Megatron aligns parameters and buckets
    assert 4 * num_trained <= actor._reference._memory.used <= 4 * num_trained + padding, "only adapters are copied"


@pytest.mark.extended
@pytest.mark.parametrize("dims", [ONE, TP2PP2], ids=str)
def test_the_reference_policy_is_the_base_model_without_a_second_copy(run_ranks, folders, dims):
    run_ranks(dims, use_reference, lora_spec(folders[0], dims))


def save_and_continue(rank: int, spec: ModelSpec, folder):
    actor = build(spec)
    train(actor, rank, 1)
    actor.save(folder)
    return train(actor, rank, 2), adapter_bytes(actor), logprobs(actor, rank)


def load_and_continue(rank: int, spec: ModelSpec, folder):
    actor = build(replace(spec, seed=5))  # other random adapters, which the checkpoint must replace
    actor.load(folder)
    return train(actor, rank, 2), adapter_bytes(actor), logprobs(actor, rank)


@pytest.mark.extended_except("tp2 pp2 sp")
@pytest.mark.parametrize("dims", [ONE, TP2PP2, ParallelDims(dp=2, pp=2, vpp=2)], ids=str)
def test_a_checkpoint_of_adapters_resumes_bit_for_bit(run_ranks, folders, tmp_path, dims):
    from torch.distributed.checkpoint import FileSystemReader

    spec = lora_spec(folders[0], dims)
    expected = run_ranks(dims, save_and_continue, spec, tmp_path / "checkpoint")
    assert run_ranks(dims, load_and_continue, spec, tmp_path / "checkpoint") == expected
    stored = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    tensors = [key for key, entry in stored.items() if hasattr(entry, "size")]
    matrices = 2 * len(linear_layers(folders[0]))
    assert len(tensors) == 4 * matrices and all(".lora." in key for key in tensors), "weight, main weight, two moments"


@pytest.mark.extended
def test_another_layout_loads_a_checkpoint_of_adapters(run_ranks, folders, tmp_path):
    spec = lora_spec(folders[0], TP2PP2)
    run_ranks(TP2PP2, save_and_continue, spec, tmp_path / "checkpoint")
    expected = run_ranks(ONE, train_on, lora_spec(folders[0], ONE), None)[0]
    found = run_ranks(ONE, train_on, lora_spec(folders[0], ONE), tmp_path / "checkpoint")[0]
    for name, values in expected.items():  # Adam divides small gradients, with their round-off, by their magnitude
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-2 * np.abs(values).max(), err_msg=name)


def train_on(rank: int, spec: ModelSpec, folder):
    """Return the adapters after three steps. The first step is replaced by the checkpoint `folder` if it is given."""
    actor = build(spec)
    if folder is None:
        train(actor, rank, 1)
    else:
        actor.load(folder)
    train(actor, rank, 2)
    return arrays(actor.adapters.export())


def train_and_export(rank: int, spec: ModelSpec, folder):
    actor = build(spec)
    train(actor, rank, 2)
    actor.export_hf(folder, {})
    exported = arrays(actor.adapters.export())
    return exported, [np.frombuffer(values, np.float32) for values in logprobs(actor, rank)]


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("dims", [ONE, ParallelDims(tp=2)], ids=str)
def test_transformers_with_the_exported_adapters_computes_the_same_logprobs(run_ranks, folders, tmp_path, dims):
    """Adds (alpha / r) B A x to each linear layer by hand, as PEFT does, and also loads the merged folder."""
    model = folders[0]
    exported, outputs = run_ranks(dims, train_and_export, lora_spec(model, dims), tmp_path / "hf")[0]
    stored = load_file(tmp_path / "hf" / "adapter" / "adapter_model.safetensors")
    assert stored.keys() == exported.keys()
    assert all(stored[name].numpy().tobytes() == values.tobytes() for name, values in exported.items())
    fields = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["peft_type"]) == (RANK, ALPHA, "LORA")
    assert {f"{name}.weight" for name in fields["target_modules"]} == set(linear_layers(model))
    block = ragged_block(40)
    rows = share_of(block, dims, 40, 0).micro_batches
    for path, adapters in ((model, stored), (tmp_path / "hf", {})):
        expected = logprobs_of_transformers(path, adapters, block)
        for of_pack, found in zip(rows, outputs, strict=True):
            np.testing.assert_allclose(found, np.concatenate([expected[row] for row in of_pack]), atol=1e-5)


def logprobs_of_transformers(path, adapters, block) -> list[np.ndarray]:
    """Return the log-probabilities of the sampled tokens of each row."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, module in model.named_modules():
        if (a := adapters.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            b = adapters[f"base_model.model.{name}.lora_B.weight"]
            module.register_forward_hook(lambda _, args, y, a=a, b=b: y + SCALE * (args[0] @ a.T @ b.T))
    found = []
    for start, end, sampled in zip(block.cu_seqlens[:-1], block.cu_seqlens[1:], block.sampled_lengths, strict=True):
        tokens = torch.from_numpy(block.tokens[start:end].astype(np.int64))
        with torch.no_grad():
            of_tokens = model(tokens[None]).logits[0].log_softmax(-1)
        predicted = of_tokens[:-1].gather(1, tokens[1:, None])[:, 0]
        found.append(predicted[-int(sampled) :].numpy())
    return found


def import_and_export(rank: int, spec: ModelSpec, folder):
    actor = build(spec)
    actor.export_adapters(folder)


def test_an_imported_peft_folder_is_exported_unchanged(run_ranks, folders, tmp_path):
    model, adapters = folders
    dims = ParallelDims(tp=2)
    run_ranks(dims, import_and_export, lora_spec(model, dims, adapters), tmp_path / "adapters")
    expected, found = (load_file(path / "adapter_model.safetensors") for path in (adapters, tmp_path / "adapters"))
    assert expected.keys() == found.keys() and all(torch.equal(expected[n], found[n]) for n in found)


def only_some_targets(rank: int, spec: ModelSpec):
    actor = build(spec)
    before = {name: t.clone() for name, t in actor.export()}
    train(actor, rank, 1)
    return [name for name, tensor in actor.export() if not torch.equal(tensor, before[name])]


def test_only_the_targets_change(run_ranks, folders):
    """Adapters of q_proj and v_proj leave the keys in the same fused matrix unchanged."""
    model = folders[0]
    found = run_ranks(ONE, only_some_targets, lora_spec(model, ONE, targets=["q_proj", "v_proj"]))[0]
    assert sorted(found) == sorted(n for n in linear_layers(model) if n.split(".")[-2] in ("q_proj", "v_proj"))


def optimizer_state_bytes(rank: int, spec: ModelSpec):
    from parallel.optimizer import initialize_optimizer_state, optimizer_tensors

    actor = build(spec)
    initialize_optimizer_state(actor.optimizer)
    own = {p.untyped_storage()._cdata for chunk in actor.chunks for p in chunk.parameters()}
    state = {t.untyped_storage()._cdata: t for t in optimizer_tensors(actor.optimizer)}
    gradients = sum(buffer.grad_data.nbytes for chunk in actor.chunks for buffer in chunk.buffers)
    num_trained = sum(p.numel() for p in actor.adapters.params.values())
    return sum(t.untyped_storage().nbytes() for key, t in state.items() if key not in own), gradients, num_trained


@pytest.mark.parametrize(("dtype", "per_parameter"), [("float32", 8), ("bfloat16", 12)])
def test_only_adapters_have_gradients_and_optimizer_state(run_ranks, folders, dtype, per_parameter):
    dims = ParallelDims(dp=2)
    found = run_ranks(dims, optimizer_state_bytes, lora_spec(folders[0], dims, dtype=dtype))
    num_trained = found[0][2]
    assert sum(state for state, _, _ in found) == per_parameter * num_trained
    padding = 64 * 2 * len(linear_layers(folders[0])) + 256
    assert all(4 * num_trained <= gradients <= 4 * (num_trained + padding) for _, gradients, _ in found)


def held_bytes(rank: int, spec: ModelSpec) -> StateBytes:
    from parallel.optimizer import initialize_optimizer_state, optimizer_tensors

    actor = build(spec)
    initialize_optimizer_state(actor.optimizer)
    own = [t for chunk in actor.chunks for t in (*chunk.module.parameters(), *chunk.module.buffers())]
    weights = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}
    state = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in optimizer_tensors(actor.optimizer)}
    gradients = sum(buffer.grad_data.nbytes for chunk in actor.chunks for buffer in chunk.buffers)
    return StateBytes(sum(weights.values()), gradients, sum(n for key, n in state.items() if key not in weights))


@pytest.mark.extended_except("dense-tp2 pp2 sp")
@pytest.mark.parametrize("dims", [ParallelDims(dp=3), TP2PP2, ParallelDims(pp=2, vpp=2, dp=2)], ids=str)
@pytest.mark.parametrize(
    "kind", ["dense", "tied", "moe", "deepseek", "sparse", "recurrent", "recurrent_moe", "mamba_moe"]
)
def test_every_rank_holds_the_planned_bytes(run_ranks, tmp_path, kind, dims):
    make(kind, tmp_path / "model")
    spec = lora_spec(tmp_path / "model", dims, dtype="bfloat16")
    assert spec.lora is not None
    hf = HFConfig.load(spec.model_path)
    family = family_of(hf)
    shape, adapters = (
        ModelShape.of(family, family.read(hf)),
        ModelShape.of_adapters(family, family.read(hf), spec.lora),
    )
    found = run_ranks(dims, held_bytes, spec)
    for rank, held in enumerate(found):
        planned = state_of_rank(shape, dims, rank, 2, trained=False) + state_of_rank(adapters, dims, rank, 2)
        assert held == planned, rank
    for stage, virtual in enumerate(pipeline_stages(shape.num_layers, dims)):
        bound = largest_state(shape, dims, virtual, 2, "vocabulary", False)
        bound += largest_state(adapters, dims, virtual, 2, "vocabulary", True)
        of_stage = [held for rank, held in enumerate(found) if dims.coords(rank).pp == stage]
        assert all(max(vars(held)[part] for held in of_stage) <= vars(bound)[part] for part in vars(bound))
