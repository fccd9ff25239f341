"""Process groups of the trainer ranks. No other module uses Megatron's global parallel state."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from parallel.device import backend as communication_backend
from parallel.device import device
from parallel.dims import ParallelDims

MIN_NCCL_FOR_SUSPEND = (2, 29, 7)
"""First NCCL version that can release the memory of communicators."""

_HOOK_ID = 0x737064  # torch identifies each hook by an integer; this integer is "spd" in ASCII
_suspended: list[ProcessGroup] = []  # groups on which a collective raises an error
_suspended_backends: list[dist.ProcessGroupNCCL] = []  # in the same order on all ranks


def initialize(dims: ParallelDims, seed: int) -> None:
    """Create Megatron's process groups for `dims` and seed Megatron's RNG tracker. Needs an initialized torch.distributed."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


@contextmanager
def one_process() -> Iterator[None]:
    """Context with process groups of only this process, destroyed at the end. Does nothing if process groups exist already."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(communication_backend(), store=dist.HashStore(), rank=0, world_size=1)
    try:
        initialize(ParallelDims(), seed=0)
        yield
    finally:
        dist.destroy_process_group()


def _require[G](group: G | None) -> G:
    assert group is not None, "call parallel.groups.initialize() first"
    return group


def tp_group() -> ProcessGroup:
    """Return the tensor-parallel group: ranks that hold the shards of the same matrices."""
    return _require(parallel_state.get_tensor_model_parallel_group())


def cp_group() -> ProcessGroup:
    """Return the context-parallel group: ranks that hold chunks of the same sequences."""
    return _require(parallel_state.get_context_parallel_group())


def pp_group() -> ProcessGroup:
    """Return the pipeline-parallel group: ranks that hold the pipeline stages of one replica."""
    return _require(parallel_state.get_pipeline_model_parallel_group())


def dp_cp_group() -> ProcessGroup:
    """Return the data- and context-parallel group: ranks that hold the same weights (except experts) and sum their gradients."""
    return _require(parallel_state.get_data_parallel_group(with_context_parallel=True))


def ep_group() -> ProcessGroup:
    """Return the expert-parallel group: ranks that hold different experts of the same layers."""
    return _require(parallel_state.get_expert_model_parallel_group())


def etp_group() -> ProcessGroup:
    """Return the expert-tensor-parallel group: ranks that hold the shards of the same expert."""
    return _require(parallel_state.get_expert_tensor_parallel_group())


def expert_dp_group() -> ProcessGroup:
    """Return the data-parallel group of experts: ranks that hold the same shards of the same experts."""
    return _require(parallel_state.get_expert_data_parallel_group())


def is_first_stage(vp_stage: int | None = None) -> bool:
    """Whether virtual stage `vp_stage` of this process (None: any of its virtual stages) holds the embedding."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def is_last_stage(vp_stage: int | None = None) -> bool:
    """Whether virtual stage `vp_stage` of this process (None: any of its virtual stages) holds the output layer."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def free_scratch_memory() -> None:
    """Free the scratch memory that Megatron keeps for its next gather."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def suspend_communicators() -> None:
    """Release the device memory of all NCCL communicators until `resume_communicators()`. Every rank calls this.

    Between the two calls, a collective or a message on one of Megatron's groups or on the default group raises RuntimeError,
    because it would fail or hang on a suspended NCCL communicator. The group of `parallel.collectives.object_group()` stays
    usable. On a CPU, or with an NCCL older than MIN_NCCL_FOR_SUSPEND, no memory is released, but collectives still raise
    RuntimeError.
    """
    for backend in _suspendable_backends():
        backend.suspend()
        _suspended_backends.append(backend)
    for group in _all_groups():
        group.register_pre_hook(_HOOK_ID, _make_refusal(group))
        _suspended.append(group)
    atexit.register(_allow_collectives)  # torch crashes if hooks remain when the interpreter exits


def resume_communicators() -> None:
    """Undo `suspend_communicators()`. Every rank calls this."""
    while _suspended_backends:
        _suspended_backends.pop(0).resume()
    _allow_collectives()
    atexit.unregister(_allow_collectives)


def _make_refusal(group: ProcessGroup) -> Any:
    def refuse(call: Any) -> None:
        raise RuntimeError(
            f"{call.name.name.lower()} on the process group {group.group_desc}: its communicators are suspended, because the "
            "model is offloaded. Load the model first, or use parallel.collectives.object_group()."
        )

    return refuse


def _allow_collectives() -> None:
    while _suspended:
        with suppress(RuntimeError):  # the group was destroyed meanwhile
            _suspended.pop().unregister_pre_hook(_HOOK_ID)


def _all_groups() -> list[ProcessGroup]:
    """Return Megatron's groups and the default group in the order of their creation, which is the same on all ranks."""
    created = parallel_state._global_process_group_list or [None]  # None is the default group
    groups = [_require(group or dist.group.WORLD) for group in created]
    return list({id(group): group for group in groups}.values())


def _suspendable_backends() -> list[dist.ProcessGroupNCCL]:
    """Return the NCCL backends of this process that have a communicator, in the same order on all ranks.

    NCCL creates the communicator of a group at its first collective. `suspend()` of a backend without communicator would raise
    RuntimeError.
    """
    if device().type != "cuda" or torch.cuda.nccl.version() < MIN_NCCL_FOR_SUSPEND:
        return []
    backends = [group._get_backend(device()) for group in _all_groups()]
    nccl = {id(backend): backend for backend in backends if isinstance(backend, dist.ProcessGroupNCCL)}
    return [backend for backend in nccl.values() if hasattr(backend, "suspend") and backend._is_initialized()]
