"""Which process is on which device: on a cluster where Ray has placed the pools, or on a planned one. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from mrl.placement.resource_pools import KEY, Pool, Pools, SlotDemand, order_by_groups


@dataclass(frozen=True)
class DeviceCell:
    """A slot and the processes that time-share it."""

    pool: str
    processes: Mapping[str, str]  # role -> name of its process: "actor 3", "engine 1.0"


@dataclass(frozen=True)
class NodeDevices:
    """The devices of one node."""

    name: str
    cells: tuple[DeviceCell | None, ...]  # None: the device is in no pool


@dataclass(frozen=True)
class DeviceMap:
    """All nodes with their processes, and warnings about idle devices and slow links."""

    pools: Pools
    nodes: tuple[NodeDevices, ...]
    unit: str  # what a slot is: GPU or CPU slot
    warnings: tuple[str, ...]


def planned_device_map(pools: Pools, gpus_per_node: int) -> DeviceMap:
    """Place the pools on as few nodes of this size as possible. Raises ValueError if a pool's strategy cannot be met."""
    node_of_slots = _fill_nodes(pools, gpus_per_node)
    named = {pool: [f"node {number}" for number in numbers] for pool, numbers in node_of_slots.items()}
    nodes = {f"node {number}": [] for number in range(1 + max(max(numbers) for numbers in node_of_slots.values()))}
    for name, _, cell in _cells(pools, named):
        nodes[name].append(cell)
    padded = {name: [*cells, *[None] * (gpus_per_node - len(cells))] for name, cells in nodes.items()}
    return _device_map(pools, named, padded, "GPU")


def actual_device_map(pools: Pools, devices: Mapping[str, Sequence[tuple[str, str]]], unit: str) -> DeviceMap:
    """Return the map of pools that Ray has placed. `devices`: pool -> (node, GPU) of each slot; GPU "" if it is unknown."""
    named = {pool: [node for node, _ in slots] for pool, slots in devices.items()}
    nodes: dict[str, dict[int, DeviceCell]] = {}
    for name, slot, cell in _cells(pools, named):
        cells, device = nodes.setdefault(name, {}), devices[cell.pool][slot][1]
        cells[int(device) if device.isdecimal() else len(cells)] = cell
    padded = {name: [cells.get(number) for number in range(1 + max(cells))] for name, cells in nodes.items()}
    return _device_map(pools, named, padded, unit)


def _device_map(
    pools: Pools,
    node_of_slots: Mapping[str, Sequence[str]],
    nodes: Mapping[str, Sequence[DeviceCell | None]],
    unit: str,
) -> DeviceMap:
    warnings = [*_unused_slots(pools, unit), *_idle_pools(pools, unit), *_crossing_groups(pools, node_of_slots)]
    rows = tuple(NodeDevices(name, tuple(cells)) for name, cells in nodes.items())
    return DeviceMap(pools, rows, unit, tuple(warnings))


def _cells(pools: Pools, node_of_slots: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, int, DeviceCell]]:
    """Yield (node, index in its pool, cell) of every slot."""
    for pool in pools.pools:
        nodes = node_of_slots[pool.name]
        processes: list[dict[str, str]] = [{} for _ in nodes]
        for role, demand in pool.needs.items():
            for rank, slot in enumerate(order_by_groups(nodes, demand.group_size)[: demand.slots]):
                processes[slot][role] = _process_name(role, demand, rank)
        for slot, (node, of_slot) in enumerate(zip(nodes, processes, strict=True)):
            yield node, slot, DeviceCell(pool.name, of_slot)


def _process_name(role: str, demand: SlotDemand, rank: int) -> str:
    if role != "engines":
        return f"{role} {rank}"
    engine, engine_rank = divmod(rank, demand.group_size)
    return f"engine {engine}" + (f".{engine_rank}" if demand.group_size > 1 else "")


def _fill_nodes(pools: Pools, gpus_per_node: int) -> dict[str, list[int]]:
    """Return the node of every slot, by pool; in each pool the fullest node first."""
    room = [gpus_per_node] * ceil(pools.size / gpus_per_node)
    node_of_slots = {}
    for pool in pools.strictest_first:
        fill = _spread if "SPREAD" in pool.strategy else _pack
        nodes = fill(pool, room, gpus_per_node)
        node_of_slots[pool.name] = sorted(nodes, key=lambda node: (-nodes.count(node), node))
    return node_of_slots


def _pack(pool: Pool, room: list[int], gpus_per_node: int) -> list[int]:
    """Choose the fullest node that has room for the whole pool, else the emptiest nodes. Updates `room`, and may add nodes."""
    if pool.strategy == "STRICT_PACK" and pool.size > gpus_per_node:
        raise ValueError(
            f"{KEY}.{pool.name}.strategy=STRICT_PACK: its {pool.size} slots are more than a node has "
            f"(cluster.gpus_per_node={gpus_per_node}); use PACK."
        )
    nodes: list[int] = []
    while missing := pool.size - len(nodes):
        fitting = [node for node, free in enumerate(room) if free >= missing]
        if not fitting and (pool.strategy == "STRICT_PACK" or not any(room)):
            room.append(gpus_per_node)
            continue
        node = min(fitting, key=room.__getitem__) if fitting else max(range(len(room)), key=room.__getitem__)
        count = min(missing, room[node])
        room[node] -= count
        nodes += [node] * count
    return nodes


def _spread(pool: Pool, room: list[int], gpus_per_node: int) -> list[int]:
    """Choose for each slot the node with the fewest slots of the pool. Updates `room`, and may add nodes."""
    nodes: list[int] = []
    for _ in range(pool.size):
        strict = pool.strategy == "STRICT_SPREAD"
        fitting = [node for node, free in enumerate(room) if free and not (strict and node in nodes)]
        if not fitting:
            room.append(gpus_per_node)
            fitting = [len(room) - 1]
        node = min(fitting, key=lambda node: (nodes.count(node), -room[node]))
        room[node] -= 1
        nodes.append(node)
    return nodes


def _unused_slots(pools: Pools, unit: str) -> Iterator[str]:
    """Warn of roles that use only some slots of their pool."""
    for pool in pools.pools:
        for role, demand in pool.needs.items():
            if demand.slots < pool.size:
                engines = pool.size // demand.group_size
                all_used = role == "engines" and engines * demand.group_size == pool.size
                fix = f"; rollout.num_engines={engines} would use all" if all_used else ""
                yield f"pool {pool.name}: {role} on {demand.slots} of its {pool.size} {unit}s, the others never serve it{fix}."


def _idle_pools(pools: Pools, unit: str) -> Iterator[str]:
    """Warn of pools that are idle while a role in another pool works."""
    if len(pools.pools) > 1:
        idle = [
            f"{pools.size - pool.size} while {role} work{'' if role == 'engines' else 's'}"
            for role, pool in pools.by_role.items()
        ]
        yield (
            f"where roles wait for each other, {unit}s are idle: of {pools.size}, {', '.join(idle)}; placement=colocated needs "
            f"{pools.colocated_size}."
        )


def _crossing_groups(pools: Pools, node_of_slots: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Warn of engines and tensor-parallel groups that are on more than one node."""
    for pool in pools.pools:
        for role, demand in pool.needs.items():
            size, slots = demand.group_size, node_of_slots[pool.name]
            nodes = [slots[slot] for slot in order_by_groups(slots, size)[: demand.slots]]
            groups = [set(nodes[start : start + size]) for start in range(0, len(nodes), size)]
            if crossing := sum(len(group) > 1 for group in groups):
                what = "engines are" if role == "engines" else f"tensor-parallel groups of the {role} are"
                yield f"{crossing} of {len(groups)} {what} on more than one node: their traffic leaves it in every layer."
