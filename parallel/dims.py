"""Sizes of the parallel dimensions and the rank arithmetic between them: pure, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis; `tp * dp` processes train one model.

    Rank order is Megatron's `tp-cp-ep-dp-pp`: tensor-parallel ranks are neighbours.
    """

    tp: int = 1  # tensor parallel: a layer's matrices are cut over tp ranks
    dp: int = 1  # data parallel: each replica trains its own samples

    def __post_init__(self) -> None:
        for name in ("tp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)}: a parallel size must be 1 or more.")

    @property
    def world_size(self) -> int:
        """Number of trainer processes."""
        return self.tp * self.dp

    def tp_rank(self, rank: int) -> int:
        """Position of global `rank` inside its tensor-parallel group."""
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        """Which data-parallel replica global `rank` belongs to."""
        return rank // self.tp % self.dp
