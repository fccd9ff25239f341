"""Training with offloading between steps is bit-equal to training without it."""

import pytest
import torch
from models_for_layouts import make
from test_checkpoints import with_adam
from test_layouts import ragged_block, share_of

from models.architecture import ModelSpec
from mrl.algorithms.losses import CrossEntropy
from parallel.dims import ParallelDims
from parallel.trainer_config import OffloadLevel, OptimConfig

LR, STEPS = 1e-2, 3
LAYOUTS = [
    ("dense", ParallelDims(), "bfloat16"),
    ("dense", ParallelDims(tp=2, pp=2), "float32"),
    ("tied", ParallelDims(pp=2, dp=2), "bfloat16"),
    ("dense", ParallelDims(pp=2, vpp=2), "bfloat16"),
    ("moe", ParallelDims(dp=2, ep=2), "bfloat16"),
    ("moe", ParallelDims(tp=2, ep=2, etp=1), "float32"),
    ("deepseek", ParallelDims(dp=2, ep=2), "bfloat16"),  # its router has a correction bias, which is a buffer
    ("sparse", ParallelDims(dp=2, ep=2), "bfloat16"),  # its indexers are frozen, and their norms are in float32
]


def make_actor(path, dims: ParallelDims, dtype: str, trained: bool = True):
    from mrl.workers.actor_critic import MegatronActor

    optimizer = OptimConfig(lr=LR, betas=(0.9, 0.98), eps=1e-6) if trained else None
    return MegatronActor(ModelSpec(str(path), dims, dtype, optimizer, {}))


def train(actor, dims: ParallelDims, rank: int) -> dict[str, str]:
    """Train one step, and return all reported numbers as texts, because some are NaN: no engine sampled these tokens."""
    block = ragged_block(40)
    report = actor.update(block, [share_of(block, dims, 40, rank)], CrossEntropy(), [LR])[0]
    numbers = {**report.sums, **report.maxima}
    return {name: float(value).hex() for name, value in numbers.items() if name != "seconds"}


def logprobs(actor, dims: ParallelDims, rank: int) -> list[bytes]:
    block = ragged_block(40)
    return [raw(column) for column in actor.compute_logprobs(block, share_of(block, dims, 40, rank))]


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a copy, so that the memory of the tensor itself can still be offloaded."""
    return tensor.detach().clone().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def weights(actor) -> list[torch.Tensor]:
    return list(actor._weights())


def state(actor) -> list[torch.Tensor]:
    from parallel.optimizer import optimizer_tensors

    return list(optimizer_tensors(actor.optimizer))


def gradients(actor) -> list[torch.Tensor]:
    return [b.grad_data for c in actor.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]


def nbytes(tensors) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


def places(tensors) -> list[tuple]:
    """Return the storage, offset, shape and strides of each tensor."""
    return [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in tensors]


def everything(actor) -> list[bytes]:
    return [raw(tensor) for tensor in (*weights(actor), *state(actor))]


def train_awake(rank: int, path, dims: ParallelDims, dtype: str):
    actor = make_actor(path, dims, dtype)
    found = [(train(actor, dims, rank), logprobs(actor, dims, rank)) for _ in range(STEPS)]
    return found, everything(actor)


def train_between_sleeps(rank: int, path, dims: ParallelDims, dtype: str):
    actor, found = make_actor(path, dims, dtype), []
    for _ in range(STEPS):
        offload_and_load(actor)  # the first time before any optimizer state exists
        losses = train(actor, dims, rank)
        assert actor.offload(keep_weights=True) > 0
        found.append((losses, logprobs(actor, dims, rank)))
        actor.load_to_device()
    return found, everything(actor)


def offload_and_load(actor) -> None:
    before, where = everything(actor), places([*weights(actor), *state(actor)])
    sizes = nbytes(gradients(actor))
    assert actor.offload(keep_weights=False) == 0 == actor.offload(keep_weights=False)
    assert not any(nbytes([*weights(actor), *state(actor), *gradients(actor)]))
    assert actor.offloader.level is OffloadLevel.FULLY_OFFLOADED
    actor.load_to_device()
    actor.load_to_device()
    assert actor.offloader.level is OffloadLevel.FULLY_LOADED
    assert everything(actor) == before and places([*weights(actor), *state(actor)]) == where
    assert nbytes(gradients(actor)) == sizes and min(sizes, default=1) > 0


@pytest.mark.extended_except("dense-tp2 pp2 sp-float32-fused")
@pytest.mark.parametrize("adam", ["fused", "torch"])
@pytest.mark.parametrize(("kind", "dims", "dtype"), LAYOUTS, ids=str)
def test_training_with_offloading_between_steps_is_bit_exact(run_ranks, tmp_path, kind, dims, dtype, adam):
    make(kind, tmp_path)
    expected = run_ranks(dims, with_adam, adam, train_awake, tmp_path, dims, dtype)
    assert run_ranks(dims, with_adam, adam, train_between_sleeps, tmp_path, dims, dtype) == expected
    losses = [sum(float.fromhex(found[step][0].get("loss", "0")) for found, _ in expected) for step in range(STEPS)]
    assert losses[-1] < losses[0]  # training has an effect


def levels(rank: int, path, dims: ParallelDims, dtype: str):
    """Move from every offload level to every level, and check that exactly the data of the level is on the device."""
    actor = make_actor(path, dims, dtype)
    train(actor, dims, rank)
    before, held = everything(actor), sum(set_of_bytes(weights(actor)))
    moves = {
        OffloadLevel.FULLY_OFFLOADED: lambda: actor.offload(keep_weights=False),
        OffloadLevel.WEIGHTS_LOADED: lambda: actor.offload(keep_weights=True),
        OffloadLevel.FULLY_LOADED: actor.load_to_device,
    }
    for first in moves:
        for second in moves:
            moves[first]()
            left = moves[second]()
            assert actor.offloader.level is second
            assert bool(min(nbytes(weights(actor)))) == (second >= OffloadLevel.WEIGHTS_LOADED)
            own = [t for t in state(actor) if t.untyped_storage()._cdata not in storages(weights(actor))]
            assert own and all(
                bool(n) == (second is OffloadLevel.FULLY_LOADED) for n in nbytes([*own, *gradients(actor)])
            )
            if second is not OffloadLevel.FULLY_LOADED:
                assert left == (held if second is OffloadLevel.WEIGHTS_LOADED else 0)
    actor.load_to_device()
    assert everything(actor) == before


def storages(tensors) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def set_of_bytes(tensors) -> list[int]:
    return list({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.extended
def test_every_level_is_reached_from_every_other(run_ranks, tmp_path):
    make("moe", tmp_path)
    dims = ParallelDims(dp=2, ep=2)
    run_ranks(dims, levels, tmp_path, dims, "bfloat16")


def host_memory(rank: int, path, dims: ParallelDims):
    actor = make_actor(path, dims, "bfloat16")
    train(actor, dims, rank)
    parts, blocks = (actor.offloader._weights, actor.offloader._state), []
    for _ in range(3):
        actor.offload(keep_weights=True)  # the optimizer state is offloaded first and loaded last
        actor.offload(keep_weights=False)
        actor.offload(keep_weights=True)
        actor.offload(keep_weights=False)
        blocks.append([[block.data_ptr() for block in part._blocks] for part in parts])
        actor.load_to_device()
    actor.reset_optimizer(OptimConfig(lr=LR))  # new storages of the same size
    train(actor, dims, rank)
    before = everything(actor)
    actor.offload(keep_weights=False)
    blocks.append([[block.data_ptr() for block in part._blocks] for part in parts])
    actor.load_to_device()
    assert everything(actor) == before
    return blocks


@pytest.mark.extended
def test_host_memory_is_allocated_once(run_ranks, tmp_path, monkeypatch):
    from parallel import offload

    monkeypatch.setattr(offload, "BLOCK_BYTES", 1000)  # storages span many blocks
    make("dense", tmp_path)
    for blocks in run_ranks(ParallelDims(tp=2), host_memory, tmp_path, ParallelDims(tp=2)):
        assert len(blocks[0][0]) > 10 and all(later == blocks[0] for later in blocks)


def failing_moves(rank: int, path):
    """Check that the model survives moves that fail because host or device memory is missing."""
    from parallel import offload

    actor = make_actor(path, ParallelDims(), "bfloat16")
    train(actor, ParallelDims(), rank)
    before, real = everything(actor), offload.host_memory
    left = [2]

    def refuse(nbytes: int):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory")
        return real(nbytes)

    offload.host_memory = refuse
    with pytest.raises(MemoryError):
        actor.offload(keep_weights=False)
    offload.host_memory = real
    actor.load_to_device()
    assert everything(actor) == before
    actor.offload(keep_weights=False)
    pieces, calls = offload._pieces, [0]

    def refuse_some(storage, host_pieces):
        calls[0] += 1
        if calls[0] == 5:
            raise MemoryError("no memory")
        return pieces(storage, host_pieces)

    offload._pieces = refuse_some
    with pytest.raises(MemoryError):
        actor.load_to_device()
    assert actor.offloader.level is not OffloadLevel.FULLY_LOADED
    offload._pieces = pieces
    actor.offload(keep_weights=False)
    assert not any(nbytes([*weights(actor), *state(actor)]))
    actor.load_to_device()
    assert everything(actor) == before


@pytest.mark.extended
def test_a_failed_move_can_be_repeated_or_reverted(run_ranks, tmp_path, monkeypatch):
    from parallel import offload

    monkeypatch.setattr(offload, "BLOCK_BYTES", 1000)
    make("dense", tmp_path)
    run_ranks(ParallelDims(), failing_moves, tmp_path)


def frozen(rank: int, path, dims: ParallelDims):
    model = make_actor(path, dims, "bfloat16", trained=False)
    before = logprobs(model, dims, rank)
    assert model.offload(keep_weights=True) > 0 and logprobs(model, dims, rank) == before
    assert model.offload(keep_weights=False) == 0
    model.load_to_device()
    assert logprobs(model, dims, rank) == before


@pytest.mark.extended
def test_a_model_without_an_optimizer_can_be_offloaded(run_ranks, tmp_path):
    make("moe", tmp_path)
    run_ranks(ParallelDims(tp=2), frozen, tmp_path, ParallelDims(tp=2))


def reference(rank: int, path, dims: ParallelDims):
    actor = make_actor(path, dims, "bfloat16")
    actor.copy_weights_to_reference()
    block = ragged_block(40)
    share = share_of(block, dims, 40, rank)
    before = [raw(column) for column in actor.compute_reference_logprobs(block, share)]
    for _ in range(2):
        train(actor, dims, rank)
        actor.offload(keep_weights=False)
        actor.load_to_device()
    assert [raw(column) for column in actor.compute_reference_logprobs(block, share)] == before
    return before != logprobs(actor, dims, rank)


@pytest.mark.extended
def test_the_reference_weights_survive_offloading(run_ranks, tmp_path):
    make("dense", tmp_path)
    assert any(run_ranks(ParallelDims(tp=2), reference, tmp_path, ParallelDims(tp=2)))


def exchange_weights(rank: int, path, dims: ParallelDims) -> dict[str, list[int]]:
    """Return, for two uses of the reference, the numbers of copied storages and of allocated blocks of host memory."""
    from parallel import offload

    actor = make_actor(path, dims, "bfloat16")
    actor.copy_weights_to_reference()
    reference = [raw(weight) for weight in weights(actor)]
    train(actor, dims, rank)
    own = [raw(weight) for weight in weights(actor)]
    counts: dict[str, list[int]] = {}

    def count(name: str) -> None:
        function = getattr(offload, name)

        def counted(*args):
            counts[name][-1] += 1
            return function(*args)

        counts[name] = []
        setattr(offload, name, counted)

    for name in ("_copy_to_host", "_copy_from_host", "host_memory"):
        count(name)
    storages = len(offload._storages(offload._weight_tensors(actor.chunks)))
    for _ in range(2):
        for numbers in counts.values():
            numbers.append(0)
        with actor.reference_weights():
            assert [raw(weight) for weight in weights(actor)] == reference
            for weight in weights(actor):
                weight.zero_()  # the copy of the reference does not change
        assert [raw(weight) for weight in weights(actor)] == own
    assert counts["_copy_to_host"] == [storages] * 2 and counts["_copy_from_host"] == [2 * storages] * 2
    return counts


def test_the_copy_of_the_reference_is_only_read_and_its_memory_is_used_again(run_ranks, tmp_path):
    make("dense", tmp_path)
    (counts,) = run_ranks(ParallelDims(), exchange_weights, tmp_path, ParallelDims())
    assert counts["host_memory"] == [1, 0]


def save_then_sleep(rank: int, path, folder, dims: ParallelDims):
    """Save asynchronously. The writers start only after the model has been offloaded."""
    from test_checkpoints import hold_writers

    from parallel.collectives import object_group

    gate = folder.with_name("gate")
    actor = make_actor(path, dims, "bfloat16")
    train(actor, dims, rank)
    before = everything(actor)
    hold_writers(gate)
    actor.begin_save(folder, asynchronous=True)
    assert actor.offload(keep_weights=False) == 0
    torch.distributed.barrier(group=object_group())
    gate.touch()
    actor.finish_save(60)
    actor.load_to_device()
    train(actor, dims, rank)
    assert actor.load(folder)
    assert everything(actor) == before
    actor.export_hf(folder.with_name("hf"), {})
    assert actor.offload(keep_weights=False) == 0  # reading weights leaves nothing on the device


@pytest.mark.extended
def test_offloading_during_an_asynchronous_save_frees_memory_and_keeps_the_checkpoint_intact(run_ranks, tmp_path):
    make("dense", tmp_path / "model")
    dims = ParallelDims(tp=2, dp=2)
    run_ranks(dims, save_then_sleep, tmp_path / "model", tmp_path / "checkpoint", dims)


def use_suspended_groups(rank: int, path, folder, dims: ParallelDims):
    """Finish an asynchronous save while the model is offloaded; return the errors of collectives on its process groups."""
    from parallel import groups

    actor, errors = make_actor(path, dims, "bfloat16"), []
    actor.begin_save(folder, asynchronous=True)
    for group in (None, groups.tp_group(), groups.dp_cp_group()):
        actor.offload(keep_weights=False)
        with pytest.raises(RuntimeError) as caught:
            torch.distributed.all_reduce(torch.ones(1), group=group)
        errors.append(str(caught.value))
        if group is None:
            actor.finish_save(60)
            with pytest.raises(RuntimeError, match="barrier on the process group default_pg"):
                torch.distributed.barrier()
        actor.offload(keep_weights=True)
        torch.distributed.all_reduce(total := torch.ones(1), group=group)
        assert total == torch.distributed.get_world_size(group)
    actor.load_to_device()
    assert actor.load(folder)
    return errors


@pytest.mark.extended
def test_a_save_ends_while_the_communicators_of_the_offloaded_model_are_suspended(run_ranks, tmp_path):
    """NCCL cannot use a suspended communicator. A collective on a suspended group therefore raises an error on a CPU, too."""
    make("dense", tmp_path / "model")
    dims = ParallelDims(dp=2)
    for errors in run_ranks(dims, use_suspended_groups, tmp_path / "model", tmp_path / "checkpoint", dims):
        names = ("default_pg", "TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP")
        for name, error in zip(names, errors, strict=True):
            assert error.startswith(f"allreduce on the process group {name}: its communicators are suspended")


class Backend:
    """Stand-in for torch's NCCL backend of a group. Like that backend, it can suspend only a communicator that exists."""

    def __init__(self, initialized: bool) -> None:
        self.initialized, self.calls = initialized, []

    def _is_initialized(self) -> bool:
        return self.initialized

    def suspend(self) -> None:
        if not self.initialized:
            raise RuntimeError("NCCL communicator not initialized.")
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")


def offload_with_nccl(rank: int, path) -> list[list[str]]:
    """Offload and load a model whose first and last group have a communicator. Return the calls of each group's backend."""
    from types import SimpleNamespace

    from parallel import groups

    actor, all_groups = make_actor(path, ParallelDims(), "bfloat16"), groups._all_groups()
    backends = [Backend(initialized=place in (0, len(all_groups) - 1)) for place in range(len(all_groups))]
    groups.device = lambda: torch.device("cuda")
    groups.dist = SimpleNamespace(ProcessGroupNCCL=Backend)
    torch.cuda.nccl.version = lambda: groups.MIN_NCCL_FOR_SUSPEND
    groups._all_groups = lambda: [OfGroup(backend) for backend in backends]
    actor.offload(keep_weights=False)
    actor.load_to_device()
    return [backend.calls for backend in backends]


class OfGroup:
    """Stand-in for a process group with an NCCL backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.group_desc = backend, "group"

    def _get_backend(self, device) -> Backend:
        return self.backend

    def register_pre_hook(self, *_) -> None: ...

    def unregister_pre_hook(self, *_) -> None: ...


def test_groups_that_have_not_communicated_yet_are_not_suspended(run_ranks, tmp_path):
    """NCCL creates the communicator of a group at its first collective. At the first offload, most groups have none."""
    make("dense", tmp_path / "model")
    (calls,) = run_ranks(ParallelDims(), offload_with_nccl, tmp_path / "model")
    assert len(calls) > 2 and calls[0] == calls[-1] == ["suspend", "resume"]
    assert not any(calls[1:-1])


METHODS_OF_LEVEL = {
    OffloadLevel.FULLY_LOADED: "reset_optimizer update trace_step trace_layers load_step_dump save load begin_save",
    OffloadLevel.WEIGHTS_LOADED: "copy_weights_to_reference compute_columns compute_reference_logprobs compute_values "
    "compute_teacher_outputs evaluate forward_outputs dump_step push_weights export_hf save_reference load_reference "
    "trace_forward store_weights",
}


def refusals(rank: int, path) -> dict[OffloadLevel, list[tuple[str, str]]]:
    """Return, by level, (method, error message) of every method that needs more of the model on the device."""
    from mrl.workers.worker import TrainWorker, required_level

    worker = object.__new__(TrainWorker)  # as after setup(), but without Ray
    worker.model = make_actor(path, ParallelDims(), "float32")
    methods = {name: required_level(method) for name, method in vars(TrainWorker).items() if callable(method)}
    messages: dict[OffloadLevel, list[tuple[str, str]]] = {}
    for level in (OffloadLevel.FULLY_OFFLOADED, OffloadLevel.WEIGHTS_LOADED):
        worker.offload(keep_weights=level is OffloadLevel.WEIGHTS_LOADED)
        for name in [name for name, required in methods.items() if required > level]:
            with pytest.raises(RuntimeError) as caught:
                getattr(worker, name)()
            messages.setdefault(level, []).append((name, str(caught.value)))
    worker.load_to_device()
    with pytest.raises(TypeError):  # the loaded model's method itself refuses missing arguments
        worker.update()
    return messages


def test_an_offloaded_model_refuses_methods_that_need_it_on_the_device(run_ranks, tiny_qwen3):
    (messages,) = run_ranks(ParallelDims(), refusals, tiny_qwen3())
    full, weights = (
        set(METHODS_OF_LEVEL[level].split()) for level in (OffloadLevel.FULLY_LOADED, OffloadLevel.WEIGHTS_LOADED)
    )
    assert {name for name, _ in messages[OffloadLevel.WEIGHTS_LOADED]} == full
    assert {name for name, _ in messages[OffloadLevel.FULLY_OFFLOADED]} == full | weights
    for level, lines in messages.items():
        for name, line in lines:
            assert line.startswith(f"{name}() needs offload level ") and f"the model is at {level.name};" in line


def drop_fp8_weights(rank: int, path) -> tuple[list[str], list[str]]:
    """Return the names of the copies of weights in FP8, as Transformer Engine keeps them, after each of two offloads."""
    actor = make_actor(path, ParallelDims(), "bfloat16")
    layer = actor.chunks[0].module.decoder.layers[0]
    layer._fp8_workspaces = {"weight": torch.zeros(8)}
    actor.offloader.move_to(OffloadLevel.WEIGHTS_LOADED)
    partly = list(layer._fp8_workspaces)
    actor.offloader.move_to(OffloadLevel.FULLY_OFFLOADED)
    return partly, list(layer._fp8_workspaces)


def test_an_offloaded_model_keeps_no_weights_in_fp8(run_ranks, tmp_path):
    make("dense", tmp_path)
    ((partly, fully),) = run_ranks(ParallelDims(), drop_fp8_weights, tmp_path)
    assert partly == ["weight"] and not fully
