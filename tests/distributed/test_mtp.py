"""MTP layers: loss and gradients against transformers in float64, parallel layouts, checkpoints and exports."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from models_for_layouts import make
from safetensors.torch import load_file, save_file
from test_convert_layouts import Silent
from test_layouts import ragged_block
from tiny_families import SIZES, add_mtp_layers

from models.architecture import ModelSpec
from mrl.algorithms.losses import PPOClip
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, partition_step
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

KINDS = ("deepseek", "glm", "recurrent_moe", "recurrent")
COEF = 0.3


def make_with_mtp(kind: str, folder, count: int = 1) -> dict[str, torch.Tensor]:
    make(kind, folder)
    return add_mtp_layers(folder, count)


def make_actor(folder, dims: ParallelDims, coef: float | None = COEF, clip_grad: float = 0.0, overrides=None):
    from mrl.workers.actor_critic import MegatronActor

    optimizer = OptimConfig(lr=1e-2, betas=(0.9, 0.98), eps=1e-6, clip_grad=clip_grad)
    return MegatronActor(ModelSpec(str(folder), dims, "float32", optimizer, overrides or {}, mtp_loss_coef=coef))


def share_of(block: TokenBlock, dims: ParallelDims, rank: int):
    return partition_step(TrainBatch.of(block, None), dims, Packing(40, False)).replica_batches[dims.coords(rank).dp]


def gradients(rank: int, folder, dims: ParallelDims, coef: float | None = COEF, overrides=None):
    """Return (gradients by Hugging Face name, sum of the losses of the MTP layers, number of their targets) of this rank."""
    actor, block = make_actor(folder, dims, coef, overrides=overrides), ragged_block(SIZES["vocab_size"])
    share = share_of(block, dims, rank)
    head, loss = actor.head_and_loss(PPOClip())
    micros = actor.micro_batches(block, share, trains_mtp=True)
    statistics = actor.accumulate_gradients(micros, head, loss, share, all_reduce=True)
    exported = actor.export_gradients() if actor.participates_in_export else ()
    found = {name: tensor.clone().numpy() for name, tensor in exported}
    counts = actor.spec.dims.coords(rank).tp == 0
    sums = [sum(s.sums.get(name, torch.zeros(())).item() for s in statistics) for name in ("mtp_nll", "mtp_tokens")]
    return found, *(value if counts else 0.0 for value in sums)


def as_decoder(folder, target, depth: int) -> None:
    """Write a model of one decoder layer, which is the MTP layer `depth`, with the norm of its output as last norm."""
    target.mkdir()
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    is_qwen = any(name.startswith("mtp.") for name in tensors)
    prefix = "mtp.layers.0." if is_qwen else f"model.layers.{config['num_hidden_layers'] + depth}."
    norm = "mtp.norm.weight" if is_qwen else f"{prefix}shared_head.norm.weight"
    own = {name.replace(prefix, "model.layers.0."): t for name, t in tensors.items() if name.startswith(prefix)}
    kept = ("model.embed_tokens.weight", "lm_head.weight")
    own = {
        name: t
        for name, t in own.items()
        if ".input_layernorm." in name or ".post_att" in name or "attn" in name or "mlp" in name
    }
    save_file(
        own | {name: tensors[name] for name in kept if name in tensors} | {"model.norm.weight": tensors[norm]},
        target / "model.safetensors",
        {"format": "pt"},
    )
    config |= dict(num_hidden_layers=1, layer_types=["full_attention"], first_k_dense_replace=0, mlp_only_layers=[])
    (target / "config.json").write_text(json.dumps(config))


class Reference:
    """The model and its MTP layers in transformers, in float64, one sequence at a time."""

    def __init__(self, folder, count: int) -> None:
        from transformers import AutoModelForCausalLM

        load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float64, experts_implementation="eager")
        self.model, self.depths = load(folder), []
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        is_qwen = any(name.startswith("mtp.") for name in tensors)
        self.zero_centered, self.eps = is_qwen, config["rms_norm_eps"]
        for depth in range(count):
            as_decoder(folder, folder.with_name(f"depth_{depth}"), depth)
            prefix = "mtp." if is_qwen else f"model.layers.{config['num_hidden_layers'] + depth}."
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc") if is_qwen else ("enorm", "hnorm", "eh_proj")
            outer = {
                f"{prefix}{name}.weight": tensors[f"{prefix}{name}.weight"].double().requires_grad_() for name in names
            }
            self.depths.append((outer, load(folder.with_name(f"depth_{depth}")), prefix))

    def norm(self, x, weight):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * (1 + weight if self.zero_centered else weight)

    def losses(self, tokens: torch.Tensor, prompt_length: int) -> tuple[torch.Tensor, int]:
        """Return (sum of -log P over the targets of all depths, number of targets) of one sequence."""
        with torch.no_grad():
            hidden = self.model.model(tokens[None]).last_hidden_state
            embeddings = self.model.get_input_embeddings()(tokens)[None]
        total, number = torch.zeros((), dtype=torch.float64), 0
        for depth, (outer, decoder, _) in enumerate(self.depths, 1):
            if len(tokens) <= depth + 1:
                continue
            enorm, hnorm, projection = outer.values()
            both = torch.cat(
                [self.norm(embeddings[:, depth:], enorm), self.norm(hidden[:, : len(tokens) - depth], hnorm)], -1
            )
            states = decoder.model(inputs_embeds=both @ projection.T).last_hidden_state
            logprobs = decoder.lm_head(states)[0, :-1].log_softmax(-1)  # of the tokens depth + 1, depth + 2, ...
            chosen = logprobs.gather(1, tokens[depth + 1 :, None])[:, 0]
            first = max(0, prompt_length - depth - 1)
            total, number = total - chosen[first:].sum(), number + len(chosen[first:])
            hidden = states
        return total, number

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients by the names of the input folder."""
        found = {}
        for outer, decoder, prefix in self.depths:
            found |= {name: weight.grad.numpy() for name, weight in outer.items()}
            layer = "mtp.layers.0." if prefix == "mtp." else prefix
            for name, weight in decoder.model.layers[0].named_parameters():
                if name.endswith("experts.gate_up_proj"):
                    for expert, both in enumerate(weight.grad):
                        for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                            found[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] = half.numpy()
                elif name.endswith("experts.down_proj"):
                    found |= {f"{layer}mlp.experts.{e}.down_proj.weight": g.numpy() for e, g in enumerate(weight.grad)}
                else:
                    found[f"{layer}{name}"] = weight.grad.numpy()
            norm = "mtp.norm.weight" if prefix == "mtp." else f"{prefix}shared_head.norm.weight"
            found[norm] = decoder.model.norm.weight.grad.numpy()
        return found


def expected_of(folder, count: int) -> tuple[dict[str, np.ndarray], float, int]:
    """Return what `gradients` returns for one process, computed by Reference."""
    reference, block = Reference(folder, count), ragged_block(SIZES["vocab_size"])
    total, number = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(block.lengths)):
        tokens = torch.tensor(np.concatenate([block.prompt(row), block.response(row)]).astype(np.int64))
        nll, targets = reference.losses(tokens, int(block.prompt_lengths[row]))
        total, number = total + nll, number + targets
    (COEF * total / count / block.sampled_lengths.sum()).backward()
    return reference.gradients(), total.item(), number


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, gradient in expected.items():
        limit = tolerance * max(np.abs(gradient).max(), 1e-3)
        np.testing.assert_allclose(found[name], gradient, atol=limit, rtol=0, err_msg=name)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "count"), [*((kind, 1) for kind in KINDS), ("deepseek", 2), ("glm", 2)])
def test_loss_and_gradients_equal_those_of_transformers_in_float64(run_ranks, tmp_path, kind, count):
    added = make_with_mtp(kind, tmp_path / "model", count)
    expected, nll, number = expected_of(tmp_path / "model", count)
    ((found, found_nll, found_number),) = run_ranks(ParallelDims(), gradients, tmp_path / "model", ParallelDims())
    assert found_number == number and abs(found_nll - nll) < 1e-4 * nll
    copies = ("embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias")
    assert {name for name in added if not name.endswith(copies)} == {name for name in expected if name in found}
    assert all(np.abs(gradient).max() > 1e-6 for name, gradient in expected.items() if "experts" not in name)
    assert_close(found, {name: expected[name] for name in added if not name.endswith(copies)}, 2e-4)


def merged(ranks) -> tuple[dict[str, np.ndarray], float, float]:
    """Return the gradients of rank 0, and the sums over the ranks."""
    return ranks[0][0], sum(rank[1] for rank in ranks), sum(rank[2] for rank in ranks)


def assert_equals_one_process(run_ranks, folder, dims: ParallelDims, overrides=None) -> None:
    ((expected, nll, number),) = run_ranks(ParallelDims(), gradients, folder, ParallelDims())
    found, found_nll, found_number = merged(run_ranks(dims, gradients, folder, dims, COEF, overrides))
    assert found_number == number and abs(found_nll - nll) < 1e-4 * nll
    assert found.keys() == expected.keys()
    assert_close(found, expected, 5e-4)


LAYOUTS = [
    *((kind, dict(pp=2)) for kind in KINDS),
    *((kind, dict(cp=2)) for kind in KINDS),
    *((kind, dict(tp=2)) for kind in KINDS),
    ("recurrent", dict(tp=2, sp=False)),
    ("glm", dict(pp=2, vpp=2)),
    ("glm", dict(dp=2, ep=2)),
    ("deepseek", dict(tp=2, ep=2, etp=1)),
    ("deepseek", dict(tp=2, pp=2, cp=2)),
    ("recurrent_moe", dict(dp=2, pp=2, ep=2)),
    ("recurrent_biased", dict(pp=2)),  # tied embeddings
]


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "dims"), LAYOUTS)
def test_every_layout_computes_the_gradients_of_one_process(run_ranks, tmp_path, kind, dims):
    make_with_mtp(kind, tmp_path / "model", 1 if "recurrent" in kind else 2)
    assert_equals_one_process(run_ranks, tmp_path / "model", ParallelDims(**dims))


@pytest.mark.extended
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_recomputed_layers_give_the_same_gradients(run_ranks, tmp_path, method):
    make_with_mtp("deepseek", tmp_path / "model", 2)
    recompute = dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=1)
    assert_equals_one_process(run_ranks, tmp_path / "model", ParallelDims(), recompute)


def step(rank: int, folder, dims: ParallelDims, coef: float | None, export=None, checkpoint=None):
    """Return (report of one optimizer step, weights after it). The gradients are clipped."""
    actor, block = make_actor(folder, dims, coef, clip_grad=1e-3), ragged_block(SIZES["vocab_size"])
    (report,) = actor.update(block, [share_of(block, dims, rank)], PPOClip(), [1e-2])
    if checkpoint is not None:
        actor.save(checkpoint)
    if export is not None:
        actor.export_hf(export, {})
    return report, {name: tensor.clone().numpy() for name, tensor in actor.export()} if dims.world_size == 1 else {}


@pytest.mark.extended
def test_the_policy_learns_the_same_with_and_without_training_of_its_mtp_layers(run_ranks, tmp_path):
    added = make_with_mtp("glm", tmp_path / "model")
    ((report, trained),) = run_ranks(ParallelDims(), step, tmp_path / "model", ParallelDims(), COEF)
    ((without, alone),) = run_ranks(ParallelDims(), step, tmp_path / "model", ParallelDims(), None)
    for name, weight in alone.items():
        assert trained[name].tobytes() == weight.tobytes(), name
    assert report.maxima["optim/grad_norm"] == without.maxima["optim/grad_norm"] > 1e-3
    assert report.sums["loss"] == without.sums["loss"]
    assert report.sums["mtp_tokens"] > 0 and "mtp_tokens" not in without.sums
    of_mtp = {name for name in trained if name not in alone}
    copies = {name for name in added if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert of_mtp == added.keys() - copies
    changed = {name for name in of_mtp if not np.array_equal(trained[name], added[name].numpy())}
    assert {name for name in of_mtp - changed if "experts" not in name} == {
        name for name in of_mtp if name.endswith("e_score_correction_bias")
    }


@pytest.mark.extended
def test_the_mtp_layers_learn_to_predict_the_responses(run_ranks, tmp_path):
    make_with_mtp("glm", tmp_path / "model")
    ((first, last),) = run_ranks(ParallelDims(), many_steps, tmp_path / "model")
    assert last < 0.7 * first


def many_steps(rank: int, folder) -> tuple[float, float]:
    """Return the loss per token of the MTP layers in the first and in the last of 20 optimizer steps without policy gradient."""
    actor, block = make_actor(folder, ParallelDims()), ragged_block(SIZES["vocab_size"])
    block = block.with_columns(advantages=np.zeros(int(block.sampled_lengths.sum()), np.float32))
    reports = actor.update(block, [share_of(block, ParallelDims(), rank)] * 20, PPOClip(), [1e-2] * 20)
    losses = [report.sums["mtp_nll"] / report.sums["mtp_tokens"] for report in reports]
    return losses[0], losses[-1]


def weights_of_checkpoint(rank: int, folder, dims: ParallelDims, checkpoint):
    actor = make_actor(folder, dims)
    actor.load(checkpoint)
    return {name: t.clone().numpy() for name, t in actor.export()} if actor.participates_in_export else {}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("glm", dict(), dict(dp=2, ep=2)),
        ("deepseek", dict(tp=2, pp=2), dict(cp=2)),
        ("recurrent_moe", dict(pp=2), dict(tp=2)),
        ("recurrent", dict(tp=2), dict()),
    ],
)
def test_checkpoints_exports_and_conversions_contain_the_trained_mtp_layers(run_ranks, tmp_path, kind, first, second):
    from models.conversion import convert_checkpoint
    from models.conversion.hf_reader import check_hf_folder
    from models.hf_config import HFConfig

    added = make_with_mtp(kind, tmp_path / "model")
    folder, checkpoint, export = tmp_path / "model", tmp_path / "checkpoint", tmp_path / "export"
    first, second = ParallelDims(**first), ParallelDims(**second)
    run_ranks(first, step, folder, first, COEF, export, checkpoint)
    check_hf_folder(export, train_mtp=True)
    exported = load_file(export / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    assert any(not torch.equal(exported[name], tensor) for name, tensor in added.items())
    for name in added:
        for copy, source in (("embed_tokens.weight", "model.embed_tokens.weight"), ("head.weight", "lm_head.weight")):
            assert not name.endswith(copy) or torch.equal(exported[name], exported[source])
    loaded = run_ranks(second, weights_of_checkpoint, folder, second, checkpoint)[0]
    for name, weight in loaded.items():
        assert weight.tobytes() == exported[name].numpy().tobytes(), name
    convert_checkpoint.to_hf(checkpoint, HFConfig.load(folder), tmp_path / "converted", Silent())
    converted = load_file(tmp_path / "converted/model.safetensors")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
    assert convert_checkpoint.check_against_checkpoint(HFConfig.load(export), checkpoint).passed
