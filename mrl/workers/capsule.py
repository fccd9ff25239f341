"""What trainer ranks put into a step's capsule, and the error that makes one."""

from pathlib import Path

from mrl.core.types import TokenBlock
from parallel.dims import ParallelDims

BATCH, WEIGHTS = "batch.npz", "weights"  # a file, a Hugging Face folder


class NonFiniteGradientError(FloatingPointError):
    """The gradient of a mini-batch is NaN or infinite; no weight has changed."""

    def __init__(self, mini_batch: int, norm: float) -> None:
        super().__init__(mini_batch, norm)
        self.mini_batch, self.norm = mini_batch, norm

    def __str__(self) -> str:
        return (
            f"the gradient of mini-batch {self.mini_batch} is not finite (norm {self.norm}); the run ends before engines "
            "see it."
        )


def keep(folder: Path, block: TokenBlock, dims: ParallelDims) -> None:
    """Write this rank's states of random numbers, and on rank 0 the batch; every rank calls this."""
    import torch.distributed as dist

    from parallel import rng_state  # Megatron: in the process that computes

    rank = dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rng_state.file_name(rank)).write_bytes(rng_state.snapshot(dims))
    if rank == 0:
        block.save(folder / BATCH)
