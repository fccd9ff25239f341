"""Which trainer ranks talk to each other, and which of these groups are spread over hosts."""

from collections.abc import Iterator, Mapping, Sequence

from parallel.dims import ParallelDims

AXES = ("tp", "cp", "dp", "pp")


def groups_of(dims: ParallelDims) -> dict[str, tuple[int, ...]]:
    """Name -> global ranks of every group of more than one rank."""
    found: dict[str, tuple[int, ...]] = {}
    for axis in AXES:
        if getattr(dims, axis) > 1:
            found |= _numbered(axis, _along(dims, axis))
    if dims.ep > 1:
        found |= _numbered("ep", _experts(dims))
    return found


def _numbered(name: str, groups: Iterator[tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"{name} {number}": ranks for number, ranks in enumerate(groups)}


def _along(dims: ParallelDims, axis: str) -> Iterator[tuple[int, ...]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dims.world_size):
        coords = dims.coords(rank)
        groups.setdefault(tuple(getattr(coords, other) for other in AXES if other != axis), []).append(rank)
    yield from map(tuple, groups.values())


def _experts(dims: ParallelDims) -> Iterator[tuple[int, ...]]:
    """Ranks that hold different experts of one copy."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    stage = dims.world_size // dims.pp
    for rank in range(dims.world_size):
        etp, _ = dims.expert_coords(rank)
        groups.setdefault((rank // stage, rank % stage // (dims.expert_tp * dims.ep), etp), []).append(rank)
    yield from map(tuple, groups.values())


def spread(groups: Mapping[str, Sequence[int]], host_of: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Of `groups`, those with members on several hosts, once for each set of ranks; `host_of` [ranks]."""
    found: dict[tuple[int, ...], str] = {}
    for name, ranks in groups.items():
        if max(ranks) < len(host_of) and len({host_of[rank] for rank in ranks}) > 1:
            found.setdefault(tuple(ranks), name)
    return {name: ranks for ranks, name in found.items()}
