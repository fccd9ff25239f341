"""Process groups: the only place that touches Megatron's global parallel state."""

from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from parallel.dims import ParallelDims


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
