"""Sizes of the parallel axes (tp, pp, cp, dp, ...), checks of these sizes, and the coordinates of each rank.

This module does not import torch.
"""

from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any


@dataclass(frozen=True)
class RankCoords:
    """Position of one global rank on each parallel axis, counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks on each parallel axis; `tp * cp * dp * pp` processes train one model.

    Global ranks are in Megatron's order `tp-cp-ep-dp-pp`: the tp position changes fastest, and the pp position changes
    slowest. Experts have their own layout on the same processes. A pipeline stage has `tp * cp * dp` ranks, and each group of
    `ep * etp` of these ranks holds one copy of the stage's experts.
    """

    tp: int = 1  # tensor parallel: the matrices of a layer are split over tp ranks
    pp: int = 1  # pipeline parallel: the layers are divided into pp stages of consecutive layers
    vpp: int = 1  # virtual pipeline parallel: each rank has vpp virtual stages, and each of them has consecutive layers
    cp: int = 1  # context parallel: every sequence is split over cp ranks
    dp: int = 1  # data parallel: dp replicas of the model train on different samples
    ep: int = 1  # expert parallel: the experts of a layer are distributed over ep ranks
    etp: int | None = None  # expert tensor parallel: the matrices of an expert are split over etp ranks; None: over tp
    # sequence parallel: the activations outside the tensor-parallel matrices (norms, residuals) are also split over the tp
    # ranks, along the sequence; None: on if tp > 1
    sp: bool | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name}={getattr(self, name)}: a parallel size must be 1 or more.")
        if self.etp is not None and self.etp < 1:
            raise ValueError(f"parallel.etp={self.etp}: a parallel size must be 1 or more, or null for parallel.tp.")
        if self.sp and self.tp == 1:
            raise ValueError(
                "parallel.sp=true needs parallel.tp greater than 1: sequence parallelism splits activations over the "
                "tensor-parallel ranks."
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"parallel.vpp={self.vpp} needs parallel.pp greater than 1: virtual stages subdivide pipeline stages."
            )
        self._check_experts()

    def _check_experts(self) -> None:
        ranks, ranks_per_copy = self.tp * self.cp * self.dp, self.ep * self.expert_tp
        if ranks % ranks_per_copy:
            valid_sizes = [
                f"ep={ep} etp={etp}"
                for ep in _divisors(ranks)
                for etp in _divisors(ranks // ep)
                if ep == self.ep or etp == self.expert_tp
            ]
            raise ValueError(
                f"parallel.ep={self.ep} x etp={self.expert_tp}{' (= tp)' if self.etp is None else ''} is {ranks_per_copy} "
                f"ranks for one copy of the experts, which does not divide the {ranks} ranks of a pipeline stage "
                f"(tp={self.tp} x cp={self.cp} x dp={self.dp}); use {'; '.join(valid_sizes or ['ep=1 etp=1'])}."
            )

    @classmethod
    def from_world_size(cls, world_size: int | None, dp: int | None, **axes: Any) -> "ParallelDims":
        """Return the layout of `world_size` processes: dp = world_size / (tp * cp * pp).

        If the argument `dp` is given, the layout has `dp` replicas, and `world_size` must match. If both arguments are None, dp
        is the smallest number of replicas whose ranks can be divided into whole copies of the experts. Raises ValueError if
        the sizes do not fit together.
        """
        if world_size is None or dp is not None:
            dims = cls(dp=_min_replicas(**axes) if dp is None else dp, **axes)
            if world_size not in (None, dims.world_size):
                raise ValueError(
                    f"parallel.world_size={world_size}, but tp={dims.tp} x cp={dims.cp} x pp={dims.pp} x dp={dims.dp} is "
                    f"{dims.world_size} processes; leave out parallel.dp or parallel.world_size."
                )
            return dims
        sizes: dict[str, Any] = {name: axes.get(name, 1) for name in ("tp", "cp", "pp")}
        cls(**sizes)  # raises ValueError if a size is below 1, before the division by the sizes
        replica_size = prod(sizes.values())
        if world_size < 1 or world_size % replica_size:
            nearest = sorted(
                {
                    max(1, world_size // replica_size) * replica_size,
                    (max(0, world_size // replica_size) + 1) * replica_size,
                }
            )
            raise ValueError(
                f"parallel.world_size={world_size} is not a multiple of a replica: one replica is tp={sizes['tp']} x "
                f"cp={sizes['cp']} x pp={sizes['pp']} = {replica_size} processes; use {' or '.join(map(str, nearest))}."
            )
        return cls(dp=world_size // replica_size, **axes)

    @property
    def world_size(self) -> int:
        """Number of trainer processes."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Number of ranks over which the matrices of each expert are split."""
        return self.tp if self.etp is None else self.etp

    @property
    def sequence_parallel(self) -> bool:
        """Whether the activations outside the tensor-parallel matrices are split over the tensor-parallel ranks (`sp`)."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def equal_micro_batch_counts(self) -> bool:
        """Whether all replicas must run the same number of micro-batches, because they send tokens to each other's experts."""
        return self.tp * self.cp % (self.ep * self.expert_tp) != 0

    def coords(self, rank: int) -> RankCoords:
        """Return the position of global `rank` on each axis."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoords(tp, cp, dp, pp)

    def expert_coords(self, rank: int) -> tuple[int, int]:
        """Return the positions of global `rank` in its expert-tensor-parallel group and in its expert-parallel group."""
        rest, etp = divmod(rank % (self.world_size // self.pp), self.expert_tp)
        return etp, rest % self.ep

    def describe_rank(self, rank: int) -> str:
        """Return a name of global `rank` for messages, such as "rank 3 (tp 1, dp 0)"."""
        coords = self.coords(rank)
        axes = [f"{name} {getattr(coords, name)}" for name in ("tp", "cp", "dp", "pp") if getattr(self, name) > 1]
        return f"rank {rank} ({', '.join(axes)})" if axes else f"rank {rank}"

    def single_process(self) -> "ParallelDims":
        """Return the layout of a single process. All other layouts must compute the same results as this one."""
        return replace(self, tp=1, pp=1, vpp=1, cp=1, dp=1, ep=1, etp=None, sp=None)

    def __str__(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "dp", "ep")
        sizes = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) > 1]
        sizes += [f"etp{self.etp}"] if self.etp not in (None, self.tp) else []
        sizes += ["sp"] if self.sequence_parallel else []
        return " ".join(sizes) or "one process"


def _min_replicas(*, tp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, **others: Any) -> int:
    """Return the smallest number of replicas whose ranks can be divided into whole copies of the experts."""
    ranks_per_copy = ep * (tp if etp is None else etp)
    if min(ranks_per_copy, tp, cp) < 1:
        return 1  # ParallelDims raises ValueError if a size is below 1
    return ranks_per_copy // gcd(ranks_per_copy, tp * cp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
