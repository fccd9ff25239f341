"""Process groups: the only place that touches Megatron's global parallel state."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from parallel.device import device
from parallel.dims import ParallelDims

SUSPENDS = (2, 29, 7)
"""The first NCCL whose communicators can give their memory back."""


def initialize(dims: ParallelDims, seed: int) -> None:
    """Create Megatron's groups for `dims` and seed its RNG tracker; torch.distributed must be initialised."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tp,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _made[G](group: G | None) -> G:
    assert group is not None, "parallel.groups.initialize() comes first"
    return group


def tp_group() -> ProcessGroup:
    """Ranks that hold the shards of one replica's matrices."""
    return _made(parallel_state.get_tensor_model_parallel_group())


def cp_group() -> ProcessGroup:
    """Ranks that hold the parts of one replica's sequences."""
    return _made(parallel_state.get_context_parallel_group())


def pp_group() -> ProcessGroup:
    """Ranks that hold the stages of one replica's layers."""
    return _made(parallel_state.get_pipeline_model_parallel_group())


def dp_cp_group() -> ProcessGroup:
    """Ranks that hold the same shard of the weights: gradients are summed over them."""
    return _made(parallel_state.get_data_parallel_group(with_context_parallel=True))


def ep_group() -> ProcessGroup:
    """Ranks that hold different experts."""
    return _made(parallel_state.get_expert_model_parallel_group())


def etp_group() -> ProcessGroup:
    """Ranks that hold the shards of one expert's matrices."""
    return _made(parallel_state.get_expert_tensor_parallel_group())


def is_first_stage(vp_stage: int | None = None) -> bool:
    """Whether this process (its virtual stage `vp_stage`) holds the embedding."""
    return parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def is_last_stage(vp_stage: int | None = None) -> bool:
    """Whether this process (its virtual stage `vp_stage`) holds the output layer."""
    return parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)


def drop_scratch() -> None:
    """Let go of the scratch memory that Megatron keeps for the next gather."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def suspend() -> None:
    """Have NCCL give back the device memory of all communicators, until `resume()`; nothing where it cannot, or on a CPU.

    Every rank calls this; no collective on a GPU may come before `resume()`.
    """
    for backend in _backends():
        backend.suspend()


def resume() -> None:
    """Undo `suspend()`; every rank calls this."""
    for backend in _backends():
        backend.resume()


def _backends() -> list[dist.ProcessGroupNCCL]:
    """NCCL's communicators of this process, in the order in which all ranks made them; none where they cannot be suspended."""
    if device().type != "cuda" or torch.cuda.nccl.version() < SUSPENDS:
        return []
    made = parallel_state._global_process_group_list or [None]  # None is the default group
    found = [_made(group or dist.group.WORLD)._get_backend(device()) for group in made]
    nccl = {id(backend): backend for backend in found if isinstance(backend, dist.ProcessGroupNCCL)}
    return [backend for backend in nccl.values() if hasattr(backend, "suspend")]
