"""Process groups: the only place that touches Megatron's global parallel state."""

from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from parallel.dims import ParallelDims


def initialize(dims: ParallelDims, seed: int) -> None:
    """Create Megatron's groups for `dims` and seed its RNG tracker; torch.distributed must be initialised."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dims.tp)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def tp_group() -> ProcessGroup:
    """Ranks that hold the shards of one replica's matrices."""
    group = parallel_state.get_tensor_model_parallel_group()
    assert group is not None, "parallel.groups.initialize() comes first"
    return group


def dp_group() -> ProcessGroup:
    """Ranks that hold the same shard of different replicas."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
