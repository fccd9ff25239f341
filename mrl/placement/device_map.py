"""Which process is on which device: of a cluster that Ray has filled, or of one that is only imagined. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from mrl.placement.resource_pools import KEY, Need, Pool, Pools, arranged


@dataclass(frozen=True)
class Cell:
    """A slot and the processes on it, each by role: they use it by turns."""

    pool: str
    tenants: Mapping[str, str]  # role -> the process in words: "actor 3", "engine 1.0"


@dataclass(frozen=True)
class Node:
    """A machine; None where no pool has the device."""

    name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Layout:
    """Nodes, and what is worth knowing before GPUs are paid for."""

    pools: Pools
    nodes: tuple[Node, ...]
    unit: str  # what a slot is: GPU or CPU slot
    warnings: tuple[str, ...]


def imagined(pools: Pools, gpus_per_node: int) -> Layout:
    """The pools on as few nodes of this size as they fit on. Raises ValueError where a pool's strategy cannot be met."""
    where = _filled(pools, gpus_per_node)
    named = {pool: [f"node {number}" for number in numbers] for pool, numbers in where.items()}
    nodes = {f"node {number}": [] for number in range(1 + max(max(numbers) for numbers in where.values()))}
    for name, _, cell in _cells(pools, named):
        nodes[name].append(cell)
    full = {name: [*cells, *[None] * (gpus_per_node - len(cells))] for name, cells in nodes.items()}
    return _layout(pools, named, full, "GPU")


def found(pools: Pools, where: Mapping[str, Sequence[tuple[str, str]]], unit: str) -> Layout:
    """The pools where Ray has put them: by pool, (node, GPU) of every slot in the order of slots; GPU "" is any."""
    named = {pool: [node for node, _ in slots] for pool, slots in where.items()}
    nodes: dict[str, dict[int, Cell]] = {}
    for name, slot, cell in _cells(pools, named):
        cells, device = nodes.setdefault(name, {}), where[cell.pool][slot][1]
        cells[int(device) if device.isdecimal() else len(cells)] = cell
    full = {name: [cells.get(number) for number in range(1 + max(cells))] for name, cells in nodes.items()}
    return _layout(pools, named, full, unit)


def _layout(
    pools: Pools, where: Mapping[str, Sequence[str]], nodes: Mapping[str, Sequence[Cell | None]], unit: str
) -> Layout:
    warnings = [*_unused(pools, unit), *_waiting(pools, unit), *_crossing(pools, where)]
    return Layout(pools, tuple(Node(name, tuple(cells)) for name, cells in nodes.items()), unit, tuple(warnings))


def _cells(pools: Pools, where: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, int, Cell]]:
    """(node, number in its pool, cell) of every slot."""
    for pool in pools.pools:
        nodes = where[pool.name]
        tenants: list[dict[str, str]] = [{} for _ in nodes]
        for role, need in pool.needs.items():
            for rank, slot in enumerate(arranged(nodes, need.together)[: need.slots]):
                tenants[slot][role] = _process(role, need, rank)
        for slot, (node, those) in enumerate(zip(nodes, tenants, strict=True)):
            yield node, slot, Cell(pool.name, those)


def _process(role: str, need: Need, rank: int) -> str:
    if role != "engines":
        return f"{role} {rank}"
    number, part = divmod(rank, need.together)
    return f"engine {number}" + (f".{part}" if need.together > 1 else "")


def _filled(pools: Pools, gpus_per_node: int) -> dict[str, list[int]]:
    """The node of every slot, by pool; of each the fullest first."""
    room = [gpus_per_node] * ceil(pools.size / gpus_per_node)
    where = {}
    for pool in pools.strictest_first:
        fill = _spread if "SPREAD" in pool.strategy else _packed
        nodes = fill(pool, room, gpus_per_node)
        where[pool.name] = sorted(nodes, key=lambda node: (-nodes.count(node), node))
    return where


def _packed(pool: Pool, room: list[int], gpus_per_node: int) -> list[int]:
    """Takes from `room`, and adds nodes to it: the tightest node that has room for all, else the emptiest ones."""
    if pool.strategy == "STRICT_PACK" and pool.size > gpus_per_node:
        raise ValueError(
            f"{KEY}.{pool.name}.strategy=STRICT_PACK: its {pool.size} slots are more than a node has "
            f"(cluster.gpus_per_node={gpus_per_node}); use PACK."
        )
    nodes: list[int] = []
    while left := pool.size - len(nodes):
        fits = [node for node, free in enumerate(room) if free >= left]
        if not fits and (pool.strategy == "STRICT_PACK" or not any(room)):
            room.append(gpus_per_node)
            continue
        node = min(fits, key=room.__getitem__) if fits else max(range(len(room)), key=room.__getitem__)
        taken = min(left, room[node])
        room[node] -= taken
        nodes += [node] * taken
    return nodes


def _spread(pool: Pool, room: list[int], gpus_per_node: int) -> list[int]:
    nodes: list[int] = []
    for _ in range(pool.size):
        strict = pool.strategy == "STRICT_SPREAD"
        fits = [node for node, free in enumerate(room) if free and not (strict and node in nodes)]
        if not fits:
            room.append(gpus_per_node)
            fits = [len(room) - 1]
        node = min(fits, key=lambda node: (nodes.count(node), -room[node]))
        room[node] -= 1
        nodes.append(node)
    return nodes


def _unused(pools: Pools, unit: str) -> Iterator[str]:
    """Slots of a pool that one of its roles does not use."""
    for pool in pools.pools:
        for role, need in pool.needs.items():
            if need.slots < pool.size:
                more = pool.size // need.together
                whole = role == "engines" and more * need.together == pool.size
                cure = f"; rollout.num_engines={more} would use all" if whole else ""
                yield f"pool {pool.name}: {role} on {need.slots} of its {pool.size} {unit}s, the others never serve it{cure}."


def _waiting(pools: Pools, unit: str) -> Iterator[str]:
    """Slots of other pools, while a role works and the others wait for it."""
    if len(pools.pools) > 1:
        turns = [
            f"{pools.size - pool.size} while {role} work{'' if role == 'engines' else 's'}"
            for role, pool in pools.roles.items()
        ]
        yield (
            f"where roles wait for each other, so do {unit}s: of {pools.size}, {', '.join(turns)}; placement=colocated needs "
            f"{pools.least}."
        )


def _crossing(pools: Pools, where: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Neighbours that are not on one node."""
    for pool in pools.pools:
        for role, need in pool.needs.items():
            nodes = [where[pool.name][slot] for slot in arranged(where[pool.name], need.together)[: need.slots]]
            runs = [set(nodes[at : at + need.together]) for at in range(0, len(nodes), need.together)]
            if crossing := sum(len(run) > 1 for run in runs):
                what = "engines are" if role == "engines" else f"tensor-parallel groups of the {role} are"
                yield f"{crossing} of {len(runs)} {what} on more than one node: their traffic leaves it in every layer."
