"""Live models of any layout load and save converted checkpoints bit-exactly."""

import pytest
from models_for_layouts import make
from test_checkpoints import with_adam
from tiny_families import FAMILIES, make_family

from parallel.dims import ParallelDims


class Silent:
    """Progress display that shows nothing."""

    def begin(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


def to_megatron(folder, output, **options) -> None:
    from models.conversion import convert_checkpoint
    from models.hf_config import HFConfig

    convert_checkpoint.to_megatron(HFConfig.load(folder), output, Silent(), **options)


def to_hf(checkpoint, folder, output) -> None:
    from models.conversion import convert_checkpoint
    from models.hf_config import HFConfig

    convert_checkpoint.to_hf(checkpoint, HFConfig.load(folder), output, Silent())


def assert_same_files(found, expected) -> None:
    from safetensors.numpy import load_file

    a, b = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert a[name].dtype == tensor.dtype and a[name].tobytes() == tensor.tobytes(), name


def empty_model(folder, dims: ParallelDims):
    """Build this rank's virtual stages with zero weights."""
    import torch

    from models.hf_config import HFConfig
    from models.model_builder import build_model

    chunks = build_model(HFConfig.load(folder), dims, torch.float32)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    return chunks


def load_and_save(rank: int, folders, dims: ParallelDims) -> None:
    from parallel import checkpoint

    for folder in folders:
        chunks = empty_model(folder, dims)
        checkpoint.load_weights(folder.with_name(folder.name + "_megatron"), chunks)
        checkpoint.save_weights(folder.with_name(folder.name + "_saved"), chunks)


def assert_they_come_back(run_ranks, folders, dims: ParallelDims) -> None:
    for folder in folders:
        to_megatron(folder, folder.with_name(folder.name + "_megatron"))
    run_ranks(dims, load_and_save, folders, dims)
    for folder in folders:
        back = folder.with_name(folder.name + "_back")
        to_hf(folder.with_name(folder.name + "_saved"), folder, back)
        assert_same_files(back, folder)


@pytest.mark.extended_except("qwen3_moe-tp2 pp2 vpp2 ep2 etp1 sp")
@pytest.mark.parametrize(
    ("name", "dims"),
    [
        ("qwen3", ParallelDims(tp=2, pp=2)),
        ("qwen3", ParallelDims(tp=4)),
        ("qwen3", ParallelDims(pp=2, vpp=2)),
        ("llama_tied_multi_head", ParallelDims(tp=2, pp=2)),
        ("phi3", ParallelDims(tp=2)),
        ("qwen3_moe", ParallelDims(dp=2, ep=2)),
        ("qwen3_moe", ParallelDims(dp=4, ep=2, etp=2)),
        ("qwen3_moe", ParallelDims(tp=2, pp=2, vpp=2, ep=2, etp=1)),
        ("gpt_oss", ParallelDims(tp=2)),
        ("gpt_oss", ParallelDims(tp=2, pp=2, ep=2, etp=1)),
        ("nemotron_h", ParallelDims(tp=4)),
        ("nemotron_h_moe", ParallelDims(tp=2, pp=2, ep=2, etp=1)),
    ],
    ids=str,
)
def test_every_layout_loads_and_saves_converted_weights_bit_exactly(run_ranks, tmp_path, name, dims):
    folder = make_family(name, tmp_path / name, num_hidden_layers=4, num_key_value_heads=4)
    assert_they_come_back(run_ranks, [folder], dims)


@pytest.mark.extended
def test_every_family_is_loaded_and_saved_bit_exactly_with_tensor_parallelism(run_ranks, tmp_path):
    folders = [make_family(name, tmp_path / name) for name in FAMILIES]
    assert_they_come_back(run_ranks, folders, ParallelDims(tp=2))


def read_every_shard(rank: int, folder, dims: ParallelDims) -> int:
    """Check that this rank reads its part of every Hugging Face tensor. Returns the number of parts."""
    import torch

    from models.conversion.hf_reader import HFWeights
    from models.conversion.weight_bridge import WeightBridge
    from models.hf_config import HFConfig

    hf, weights = HFConfig.load(folder), HFWeights(folder)
    bridge = WeightBridge(hf, empty_model(folder, dims), dims)
    bridge.load(weights)
    read, count = bridge.reader(), 0
    for row in bridge.rows:
        for name, boxes_of_ranks in row.split_over_ranks(bridge.sizes, dims.tp).items():
            for box in boxes_of_ranks[rank if len(boxes_of_ranks) > 1 else 0]:
                for part in box.chunks(max(1, box.numel // 3)):
                    assert torch.equal(read(name, part), weights[name][part.slices]), (name, part)
                    count += 1
    return count


@pytest.mark.extended_except("phi3")
@pytest.mark.parametrize(
    "name", ["phi3", "glm4", "olmo2_biased", "qwen3", "qwen3_5_biased", "qwen3_next", "gpt_oss", "nemotron_h"]
)
def test_a_rank_reads_its_part_of_every_tensor(run_ranks, tmp_path, name):
    folder = make_family(name, tmp_path)
    counts = run_ranks(ParallelDims(tp=2), read_every_shard, folder, ParallelDims(tp=2))
    assert min(counts) > 30


def as_megatron_loads(rank: int, folder, checkpoint) -> None:
    """Check that Megatron's strict load, with extra states, gives the weights that the bridge loads from Hugging Face."""
    import torch
    from megatron.core import dist_checkpointing

    from models.conversion.hf_reader import HFWeights
    from models.conversion.weight_bridge import WeightBridge
    from models.hf_config import HFConfig
    from models.model_builder import build_model

    hf, dims = HFConfig.load(folder), ParallelDims()
    found, expected = (build_model(hf, dims, torch.bfloat16) for _ in range(2))
    WeightBridge(hf, expected, dims).load(HFWeights(folder))
    state = dist_checkpointing.load(found[0].sharded_state_dict(), str(checkpoint), strict="raise_unexpected")
    found[0].load_state_dict(state)
    parameters = dict(found[0].named_parameters())
    for name, parameter in expected[0].named_parameters():
        assert torch.equal(parameters[name], parameter), name


@pytest.mark.extended_except("qwen3_moe")
@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_loads_a_converted_checkpoint_strictly(run_ranks, tmp_path, name):
    import torch

    make_family(name, tmp_path / "model")
    to_megatron(tmp_path / "model", tmp_path / "checkpoint", dtype=torch.bfloat16)
    run_ranks(ParallelDims(), as_megatron_loads, tmp_path / "model", tmp_path / "checkpoint")


def train_and_save(rank: int, folder, dims: ParallelDims) -> None:
    from test_layouts import make_actor, ragged_block, share_of

    from mrl.algorithms.losses import PPOClip

    actor, block = make_actor(folder, dims), ragged_block(40)
    actor.update(block, [share_of(block, dims, 40, rank)], PPOClip(), [1e-2])
    actor.save(folder.with_name("checkpoint"))
    actor.export_hf(folder.with_name("export"), {})


@pytest.mark.extended_except("tied-tp2 pp2 sp-fused")
@pytest.mark.parametrize("adam", ["fused", "torch"])
@pytest.mark.parametrize(
    ("kind", "dims"), [("tied", ParallelDims(tp=2, pp=2)), ("moe", ParallelDims(dp=2, ep=2))], ids=str
)
def test_converting_a_training_checkpoint_gives_the_export_of_the_run(run_ranks, tmp_path, kind, dims, adam):
    make(kind, tmp_path / "model")
    run_ranks(dims, with_adam, adam, train_and_save, tmp_path / "model", dims)
    to_hf(tmp_path / "checkpoint", tmp_path / "model", tmp_path / "converted")
    assert_same_files(tmp_path / "converted", tmp_path / "export")


def logits_finding(rank: int, folder, limit: float):
    from models.conversion import convert_checkpoint
    from models.hf_config import HFConfig

    convert_checkpoint.LOGITS_LIMIT = limit
    return convert_checkpoint.check_logits(HFConfig.load(folder))


def test_check_computes_mamba_2_without_a_smallest_step(run_ranks, tmp_path):
    """transformers raises the steps of Nemotron-H to at least time_step_min, but models are trained without this limit."""
    make_family("nemotron_h", tmp_path / "model", time_step_min=0.5)
    (found,) = run_ranks(ParallelDims(), logits_finding, tmp_path / "model", 1e-5)
    assert found.passed, found


@pytest.mark.extended
def test_check_detects_different_logits(run_ranks, tmp_path):
    make("moe", tmp_path / "model")
    (within,) = run_ranks(ParallelDims(), logits_finding, tmp_path / "model", 1e-5)
    (beyond,) = run_ranks(ParallelDims(), logits_finding, tmp_path / "model", 1e-12)
    assert within.passed and not beyond.passed
