"""A run that loads a checkpoint continues exactly: weights, optimizer state, random number generators and reference."""

import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from models_for_layouts import make
from test_layouts import make_actor, ragged_block, share_of

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy, ValueLoss
from parallel import durable_files
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

LR = 1e-2


def with_adam(rank: int, adam: str, function, *args):
    """Return function(rank, *args). With `adam="torch"`, Megatron uses Adam as on a GPU without Transformer Engine and Apex."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if adam == "torch":
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
        distrib_optimizer.Adam = torch.optim.Adam
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = False
    return function(rank, *args)


def make_model(kind: str, path, dims: ParallelDims):
    from mrl.workers.actor_critic import MegatronCritic

    if kind != "critic":
        return make_actor(path, dims)
    return MegatronCritic(ModelSpec(str(path), dims, "float32", OptimConfig(lr=LR, betas=(0.9, 0.98), eps=1e-6), {}))


def train(model, dims: ParallelDims, rank: int, steps: int) -> list[float]:
    """Run the next training steps, and return this rank's part of each loss."""
    from mrl.workers.actor_critic import MegatronActor

    block = ragged_block(40)
    block = block.with_columns(returns=block.columns["advantages"])
    share = share_of(block, dims, 40, rank)
    loss = CrossEntropy() if isinstance(model, MegatronActor) else ValueLoss()
    reports = [model.update(block, [share], loss, [LR])[0] for _ in range(steps)]
    return [report.sums.get("loss", 0.0) if dims.coords(rank).tp == 0 else 0.0 for report in reports]


def draws() -> list[float]:
    """Draw the next number of every generator of this process; the last three are Megatron's."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = [random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    for name in sorted(get_cuda_rng_tracker().get_states()):
        with get_cuda_rng_tracker().fork(name):
            found.append(torch.rand(()).item())
    return found


def weights_of(model) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in model._weights()]


def hold_writers(gate) -> None:
    """Make the writers of a save wait until `gate` exists."""
    from parallel import checkpoint_writer

    def write_later(write, *args):
        while not gate.exists():
            time.sleep(0.01)
        return write(*args)

    checkpoint_writer._write_files = partial(write_later, checkpoint_writer._write_files)


def save_and_go_on(rank: int, path, folder, dims: ParallelDims, steps_before: int, asynchronous: bool):
    """Save, and return (losses, random numbers, weights) of the next steps. An asynchronous save writes after these steps."""
    actor, gate = make_actor(path, dims), folder.with_name("gate")
    train(actor, dims, rank, steps_before)
    random.seed(100 + rank), np.random.seed(200 + rank), torch.manual_seed(300 + rank)
    draws()
    if asynchronous:
        hold_writers(gate)
    actor.begin_save(folder, asynchronous)
    found = train(actor, dims, rank, 2), draws(), weights_of(actor)
    assert actor.save_has_ended() != asynchronous
    torch.distributed.barrier()  # no rank opens the gate before all ranks have checked
    gate.touch()
    actor.finish_save(60)
    assert weights_of(actor) == found[2]
    return found


def load_and_go_on(rank: int, path, folder, dims: ParallelDims):
    actor = make_actor(path, dims)
    assert actor.load(folder)
    return train(actor, dims, rank, 2), draws(), weights_of(actor)


@pytest.mark.extended_except("dense-tp2 pp2 sp-1-True-fused")
@pytest.mark.parametrize("adam", ["fused", "torch"])
@pytest.mark.parametrize(
    ("kind", "dims", "steps_before", "asynchronous"),
    [
        ("dense", ParallelDims(tp=2, pp=2), 1, True),
        ("moe", ParallelDims(dp=4, ep=2), 1, True),
        ("tied", ParallelDims(dp=2), 0, True),
        ("tied", ParallelDims(cp=2), 0, False),
    ],
    ids=str,
)
def test_the_same_layout_continues_bit_exactly(run_ranks, tmp_path, kind, dims, steps_before, asynchronous, adam):
    """Every rank restores its own random number generators. Training during an asynchronous save changes no saved file."""
    path, folder = tmp_path / "model", tmp_path / "checkpoint"
    make(kind, path)
    expected = run_ranks(dims, with_adam, adam, save_and_go_on, path, folder, dims, steps_before, asynchronous)
    names = {file.name for file in folder.iterdir()} - {durable_files.HASHES_FILE}
    assert durable_files.read_hashes(folder).keys() == names and len(names) > 2 * dims.world_size
    durable_files.check_folder(folder)
    assert run_ranks(dims, with_adam, adam, load_and_go_on, path, folder, dims) == expected
    tracked = [tuple(numbers[-3:]) for _, numbers, _ in expected]
    assert len(set(tracked)) == max(dims.tp, dims.ep)


def save_and_continue(rank: int, kind: str, path, folder, dims: ParallelDims):
    model = make_model(kind, path, dims)
    train(model, dims, rank, 1)
    model.save(folder)
    return train(model, dims, rank, 2), exported(model)


def load_and_continue(rank: int, kind: str, path, folder, before: ParallelDims, dims: ParallelDims):
    model = make_model(kind, path, dims)
    assert model.load(folder) == (before == dims)
    return train(model, dims, rank, 2), exported(model)


def exported(model) -> dict[str, np.ndarray]:
    return {name: tensor.clone().numpy() for name, tensor in model.export()} if model.participates_in_export else {}


one = ParallelDims()


@pytest.mark.extended_except(
    "dense-tp2 pp2 sp-cp2 dp2, one process-fused to fused",
)
@pytest.mark.parametrize("adams", ["fused to fused", "fused to torch", "torch to fused"])
@pytest.mark.parametrize(
    ("kind", "before", "afters"),
    [
        ("dense", one, [ParallelDims(tp=2)]),
        ("dense", ParallelDims(dp=2), [ParallelDims(dp=4), ParallelDims(tp=2, dp=2)]),
        ("dense", ParallelDims(tp=2, pp=2), [ParallelDims(dp=2, cp=2), one]),
        ("tied", ParallelDims(dp=2), [ParallelDims(pp=2, vpp=2)]),
        ("tied", ParallelDims(pp=2), [ParallelDims(tp=2), ParallelDims(pp=2)]),
        ("dense", ParallelDims(pp=2, vpp=2), [ParallelDims(tp=2), ParallelDims(dp=2)]),
        ("biased", ParallelDims(tp=2), [ParallelDims(pp=2)]),
        ("critic", ParallelDims(tp=2, pp=2), [ParallelDims(dp=2)]),
        ("moe", one, [ParallelDims(dp=2, ep=2)]),
        ("moe", ParallelDims(dp=2, ep=2), [one, ParallelDims(pp=2), ParallelDims(tp=2, pp=2, ep=2, etp=1)]),
        ("moe", ParallelDims(dp=4, ep=2), [ParallelDims(dp=2, ep=2), ParallelDims(tp=2, ep=1, etp=2)]),
        ("deepseek", ParallelDims(dp=2, ep=2), [ParallelDims(tp=2, pp=2)]),
        ("shared_sparse", ParallelDims(dp=2, ep=2), [ParallelDims(tp=2, pp=2)]),
    ],
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_a_checkpoint_continues_under_another_layout(run_ranks, tmp_path, kind, before, afters, adams):
    """With one layout, the test trains a step, saves, and trains two more. With others, it loads, and trains the same two."""
    (adam, other_adam), path, folder = adams.split(" to "), tmp_path / "model", tmp_path / "checkpoint"
    make("dense" if kind == "critic" else kind, path)
    expected = run_ranks(before, with_adam, adam, save_and_continue, kind, path, folder, before)
    for after in afters:
        found = run_ranks(after, with_adam, other_adam, load_and_continue, kind, path, folder, before, after)
        losses, its_losses = (np.sum([losses for losses, _ in ranks], 0) for ranks in (expected, found))
        np.testing.assert_allclose(its_losses, losses, atol=2e-5, rtol=0, err_msg=str(after))
        for name, tensor in expected[0][1].items():
            np.testing.assert_allclose(found[0][1][name], tensor, atol=2e-5, err_msg=f"{after}: {name}")


def give_extra_state(actor, value: int) -> torch.nn.Module:
    """Give the last norm an extra state, as the layers of Transformer Engine have it, and return the norm."""
    norm = actor.chunks[0].module.decoder.final_layernorm

    def set_extra_state(self, state):
        self.extra = state

    methods = dict(get_extra_state=lambda self: self.extra, set_extra_state=set_extra_state)
    norm.__class__ = type("NormWithExtraState", (type(norm),), methods)
    norm.extra = torch.tensor([value], dtype=torch.uint8)
    return norm


def load_extra_states(rank: int, path, folder):
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from parallel import checkpoint

    actor = make_actor(path, one)
    train(actor, one, rank, 1)
    weights = weights_of(actor)
    actor.save(folder / "without")
    norm = give_extra_state(actor, 3)
    actor.save(folder / "with")
    other = make_actor(path, one)
    other_norm = give_extra_state(other, 7)
    assert other.load(folder / "without") and weights_of(other) == weights
    assert other_norm.extra.item() == 7
    assert other.load(folder / "with") and other_norm.extra.item() == 3 == norm.extra.item()
    other_norm.register_buffer("scale", torch.ones(1))
    with pytest.raises(ValueError, match=r"decoder.final_layernorm.scale is missing"):
        other.load(folder / "with")
    missing = checkpoint._describe_mismatch(ShardedObject("decoder.other_state", None, (1,), (0,)), {})
    assert missing == "decoder.other_state/shard_0_1 is missing"


@pytest.mark.extended
def test_only_extra_states_may_be_missing_in_a_checkpoint(run_ranks, tmp_path):
    """Transformer Engine's layers have extra states, and a checkpoint that was written without Transformer Engine has none."""
    make("dense", tmp_path / "model")
    run_ranks(one, load_extra_states, tmp_path / "model", tmp_path)
