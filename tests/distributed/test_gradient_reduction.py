"""Reductions during the backward pass give the same gradients as reductions after it, for every layout and batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from models_for_layouts import make
from test_layouts import ragged_block, share_of

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy, ValueLoss
from mrl.core.types import ReplicaBatch
from parallel.dims import ParallelDims
from parallel.trainer_config import OptimConfig

BUCKET = 1000  # elements: the first virtual stage of each model has several buckets
LRS = [1e-2, 1e-2, 1e-2]


def make_model(kind: str, path, dims: ParallelDims, overlap: bool, bucket_size: int | None = None):
    from mrl.workers.actor_critic import MegatronActor, MegatronCritic

    optim = OptimConfig(lr=1e-2, betas=(0.9, 0.98), eps=1e-4)
    spec = ModelSpec(
        str(path), dims, "float32", optim, {}, overlap_grad_reduce=overlap, ddp=dict(bucket_size=bucket_size)
    )
    return MegatronCritic(spec) if kind == "critic" else MegatronActor(spec)


def batches_of(dims: ParallelDims, rank: int, idle: bool) -> tuple:
    """Return (block, one batch for each step).

    If `idle`, the last replica has no micro-batch in the first step, and replica 0 has none in the second step.
    """
    block = ragged_block(40)
    block = block.with_columns(returns=block.columns["advantages"])
    share = share_of(block, dims, 40, rank)
    empty = replace(share, micro_batches=())
    idle_replicas = [dims.dp - 1, 0, None] if idle else [None] * len(LRS)
    return block, [empty if dims.coords(rank).dp == replica else share for replica in idle_replicas]


def train(model, kind: str, block, batches: list[ReplicaBatch]) -> list[float]:
    """Run an optimizer step for each batch; return the norms of the gradients."""
    loss = ValueLoss() if kind == "critic" else CrossEntropy()
    reports = model.update(block, batches, loss, LRS[: len(batches)])
    return [value for report in reports for name, value in report.maxima.items() if name.endswith("grad_norm")]


def state_of(model) -> list[np.ndarray]:
    """Return copies of the weights, the reduced gradients and the optimizer state of this rank."""
    from parallel.optimizer import optimizer_tensors

    gradients = [shard for part in _parts(model) for shard in _gradient_shards(part)]
    tensors = [*model._weights(), *gradients, *optimizer_tensors(model.optimizer)]
    return [tensor.detach().clone().numpy() for tensor in tensors]


def _parts(model) -> list:
    from parallel.optimizer import _optimizers

    return _optimizers(model.optimizer)


def _gradient_shards(part):
    """Yield the gradients that the optimizer of this rank reads."""
    for of_buffer in part.gbuf_ranges:
        (buckets,) = of_buffer.values()
        for bucket in buckets:
            for param, of_param in bucket["param_map"].items():
                yield param.main_grad.flatten()[of_param["param"].start : of_param["param"].end]


def count_early_starts(model) -> list[int]:
    """Return a list to which each step appends the number of reductions that its backward pass has started."""
    from parallel.optimizer import GradientReducer

    found, reducer = [], model.chunks[0].config.no_sync_func.__self__
    assert isinstance(reducer, GradientReducer)
    start_remaining = reducer.start_remaining

    def counted() -> None:
        found.append(reducer._num_started)
        start_remaining()

    reducer.start_remaining = counted
    return found


def never_start_early(model) -> None:
    """Make the model start all reductions after the backward pass, as in a replica without a micro-batch."""
    for group in model.chunks[0].config.no_sync_func.__self__._groups:
        group.is_complete = lambda: False


def compare_modes(rank: int, kind: str, path, dims: ParallelDims, idle: bool):
    """Train with several modes, and return (gradient norms by mode, early starts by step, number of buckets)."""
    block, batches = batches_of(dims, rank, idle)
    norms, states, early, buckets = {}, {}, [], 0
    for mode, overlap, size in [
        ("after", False, None), ("one bucket", True, None), ("during", True, BUCKET), ("small after", True, BUCKET),
    ]:  # fmt: skip
        model = make_model(kind, path, dims, overlap, size)
        if mode == "small after":
            never_start_early(model)
        if mode == "during":
            early = count_early_starts(model)
            buckets = sum(len(b.buckets) for c in model.chunks for b in (*c.buffers, *c.expert_parallel_buffers))
        norms[mode], states[mode] = train(model, kind, block, batches), state_of(model)
    assert norms["one bucket"] == norms["after"] and norms["during"] == norms["small after"]
    for mode, same in [("one bucket", "after"), ("during", "small after")]:
        for ours, theirs in zip(states[mode], states[same], strict=True):
            assert ours.tobytes() == theirs.tobytes(), f"{mode}: not bit-equal to {same}"
    return norms, early, buckets


CASES = [
    *[("dense", ParallelDims(**d)) for d in (dict(dp=2), dict(dp=4), dict(tp=2, dp=2), dict(cp=2, dp=2))],
    *[("dense", ParallelDims(**d)) for d in (dict(pp=2, dp=2), dict(pp=2, vpp=2, dp=2))],
    *[("tied", ParallelDims(**d)) for d in (dict(dp=2), dict(pp=2, dp=2), dict(pp=2, vpp=2, dp=2))],
    *[("moe", ParallelDims(**d)) for d in (dict(dp=2), dict(dp=2, ep=2), dict(dp=4, ep=2))],
    *[("moe", ParallelDims(**d)) for d in (dict(tp=2, dp=2, ep=2, etp=1), dict(tp=2, dp=2, etp=1))],
    ("critic", ParallelDims(pp=2, dp=2)),
]


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "dims"), CASES, ids=str)
def test_a_reduction_during_the_backward_pass_changes_no_bit(run_ranks, tmp_path, kind, dims):
    """Replicas without a micro-batch also take part in reductions. Other bucket sizes change only the order of summation."""
    make("dense" if kind == "critic" else kind, tmp_path)
    idle = not dims.equal_micro_batch_counts
    ranks = run_ranks(dims, compare_modes, kind, tmp_path, dims, idle, timeout_s=300)
    for norms, _, _ in ranks:
        np.testing.assert_allclose(norms["during"], norms["after"], rtol=1e-5)
    early = np.array([early for _, early, _ in ranks])
    assert not early[:, 0].any(), "the first step learns how many gradients a parameter has"
    assert early[:, -1].any(), "the backward pass starts reductions"
    if kind != "critic":
        assert max(buckets for _, _, buckets in ranks) > 4
    if idle:
        replica = [dims.coords(rank).dp for rank in range(dims.world_size)]
        assert not early[np.array(replica) == 0, 1].any()


def save_and_go_on(rank: int, kind: str, path, folder, dims: ParallelDims, mode: tuple):
    model, (block, batches) = make_model(kind, path, dims, *mode), batches_of(dims, rank, False)
    train(model, kind, block, batches[:2])
    model.save(folder)
    return train(model, kind, block, batches[:2]), state_of(model)


def load_and_go_on(rank: int, kind: str, path, folder, dims: ParallelDims, mode: tuple):
    model, (block, batches) = make_model(kind, path, dims, *mode), batches_of(dims, rank, False)
    assert model.load(folder)
    return train(model, kind, block, batches[:2]), state_of(model)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("dense", ParallelDims(dp=4)),
        ("tied", ParallelDims(pp=2, dp=2)),
        ("moe", ParallelDims(tp=2, dp=2, ep=2, etp=1)),
        ("critic", ParallelDims(tp=2, dp=2)),
    ],
    ids=str,
)
def test_a_run_resumes_with_other_buckets(run_ranks, tmp_path, kind, dims):
    """With the same buckets, the continuation is bit-equal. With other buckets, only the order of summation differs."""
    path, one, many = tmp_path / "model", (False,), (True, BUCKET)
    make("dense" if kind == "critic" else kind, path)
    for before, after in [(one, many), (many, one)]:
        folder = tmp_path / f"from {len(before)}"
        expected = run_ranks(dims, save_and_go_on, kind, path, folder, dims, before)
        same = run_ranks(dims, load_and_go_on, kind, path, folder, dims, before)
        other = run_ranks(dims, load_and_go_on, kind, path, folder, dims, after)
        for (norms, state), (same_norms, same_state), (other_norms, _) in zip(expected, same, other, strict=True):
            assert same_norms == norms
            assert [x.tobytes() for x in same_state] == [x.tobytes() for x in state]
            np.testing.assert_allclose(other_norms, norms, rtol=1e-5)


def megatrons_own_state(rank: int, path):
    """Return [one bucket, several buckets]: whether Megatron's functions describe the master copies of all weights correctly."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    found = []
    for mode in [(False,), (True, BUCKET)]:
        model = make_model("dense", path, ParallelDims(dp=2), *mode)
        train(model, "dense", *batches_of(ParallelDims(dp=2), rank, False))
        (part,) = _parts(model)
        weights = model.chunks[0].module.sharded_state_dict()
        described = part.sharded_param_state_fully_reshardable(weights, metadata={}).values()
        params = [param for buffer in part.buffers for param in buffer.param_index_map]
        equal = [torch.equal(of["param"].data, p) for of, p in zip(described, params, strict=True)
                 if isinstance(of["param"], ShardedTensor)]  # fmt: skip
        found.append(all(equal))
    return found


@pytest.mark.extended
def test_megatrons_own_checkpoint_format_shifts_state_with_several_buckets(run_ranks, tmp_path):
    """Therefore mrl describes the optimizer state itself. If this test fails, Megatron has corrected the offsets."""
    make("dense", tmp_path)
    assert run_ranks(ParallelDims(dp=2), megatrons_own_state, tmp_path) == [[True, False]] * 2


def train_without_a_micro_batch(rank: int, path):
    """Train with Megatron's own overlap. In the third step, replica 1 has no micro-batch."""
    dims = ParallelDims(dp=2)
    model = make_model("dense", path, dims, True, BUCKET)
    config = model.chunks[0].config
    config.finalize_model_grads_func = lambda chunks, *args, **kwargs: [chunk.finish_grad_sync() for chunk in chunks]
    for group in config.no_sync_func.__self__._groups:
        group.is_complete = lambda: False
    config.no_sync_func = model.chunks[0].no_sync
    block, batches = batches_of(dims, rank, False)
    train(model, "dense", block, batches[:2])
    if rank == 1:
        with pytest.raises(AssertionError, match="Communication call has not been issued"):
            train(model, "dense", block, [replace(batches[0], micro_batches=())])


@pytest.mark.extended
def test_megatrons_own_overlap_needs_a_micro_batch_on_every_replica(run_ranks, tmp_path):
    """Therefore mrl starts the reductions itself. If this test fails, Megatron also starts reductions without a micro-batch."""
    make("dense", tmp_path)
    run_ranks(ParallelDims(dp=2), train_without_a_micro_batch, tmp_path)


def fail_in_the_backward_pass(rank: int, path):
    """On rank 1, the last gradient of the third step raises an error, after other reductions have already started."""
    dims = ParallelDims(dp=2)
    model = make_model("dense", path, dims, True, BUCKET)
    early = count_early_starts(model)
    block, batches = batches_of(dims, rank, False)
    train(model, "dense", block, batches[:2])
    assert early[1] > 0
    if rank == 1:

        def fail(gradient) -> None:
            raise FileNotFoundError("injected")

        next(model.chunks[0].module.parameters()).register_hook(fail)
    train(model, "dense", block, batches[:1])


def test_a_fault_during_the_backward_pass_is_reported_at_once(run_ranks, tmp_path):
    make("dense", tmp_path)
    with pytest.raises(Exception, match="injected"):
        run_ranks(ParallelDims(dp=2), fail_in_the_backward_pass, tmp_path)
