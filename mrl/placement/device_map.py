"""Device maps show which process is on which device of a real or planned cluster, as text or as a PNG file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mrl.placement.resource_pools import POOLS_KEY, Pool, Pools, SlotDemand, order_by_tp_groups, pluralize
from parallel.durable_files import atomic_file


@dataclass(frozen=True)
class DeviceCell:
    """A slot (a GPU, or a CPU if there are no GPUs), and the processes that time-share this slot."""

    pool: str
    processes: Mapping[str, str]  # role -> its process: "actor 3" is trainer rank 3, "engine 1.0" is rank 0 of engine 1


@dataclass(frozen=True)
class NodeDevices:
    """The devices of one node."""

    name: str
    cells: tuple[DeviceCell | None, ...]  # None: the device is in no pool


@dataclass(frozen=True)
class DeviceMap:
    """All nodes with their processes, and warnings about idle devices and about groups of processes on several nodes."""

    pools: Pools
    nodes: tuple[NodeDevices, ...]
    unit: str  # name of a slot in messages: GPU or CPU slot
    warnings: tuple[str, ...]


def planned_device_map(pools: Pools, gpus_per_node: int, num_nodes: int = 0) -> DeviceMap:
    """Return a map that places the pools on nodes with `gpus_per_node` GPUs.

    The pools are placed in the order of Pools.strictest_first. A placement strategy of Ray, such as STRICT_SPREAD, may need more
    nodes than the number of slots requires. The map has at least `num_nodes` nodes: the nodes that the pools do not need have
    idle GPUs. Raises ValueError if a pool with strategy STRICT_PACK has more slots than a node.
    """
    node_of_slots = _fill_nodes(pools, gpus_per_node)
    named = {pool: [f"node {number}" for number in numbers] for pool, numbers in node_of_slots.items()}
    num_used = 1 + max(max(numbers) for numbers in node_of_slots.values())
    nodes = {f"node {number}": [] for number in range(max(num_used, num_nodes))}
    for name, _, cell in _cells(pools, named):
        nodes[name].append(cell)
    padded = {name: [*cells, *[None] * (gpus_per_node - len(cells))] for name, cells in nodes.items()}
    devices = _device_map(pools, named, padded, "GPU")
    return replace(devices, warnings=(*devices.warnings, *idle_gpus(padded)))


def locate_ranks(devices: DeviceMap, role: str) -> list[tuple[str, str]]:
    """Return the node and the device of each rank of a role, in the order of the ranks."""
    places = {
        tuple(map(int, re.findall(r"\d+", cell.processes[role]))): (
            node.name,
            f"{devices.unit} {number} of {node.name}",
        )
        for node in devices.nodes
        for number, cell in enumerate(node.cells)
        if cell and role in cell.processes
    }
    return [places[rank] for rank in sorted(places)]


def idle_gpus(nodes: Mapping[str, Sequence[DeviceCell | None]]) -> Iterator[str]:
    """Yield a warning that names the job's GPUs that are in no pool, if there are any. `nodes`: node -> a cell for each GPU."""
    idle = {name: [gpu for gpu, cell in enumerate(cells) if cell is None] for name, cells in nodes.items()}
    if count := sum(map(len, idle.values())):
        places = [f"{name} GPU {_ranges(gpus)}" for name, gpus in idle.items() if gpus]
        yield (
            f"{count} of the job's {sum(map(len, nodes.values()))} GPUs stay{'s' * (count == 1)} idle in the whole run, "
            f"because no role uses them: {'; '.join(places)}. Use them (parallel.dp, rollout.num_engines), or request "
            "fewer (cluster.nodes, cluster.gpus_per_node)."
        )


def idle_gpus_of_job(pools: Pools, gpus_of_nodes: Sequence[int]) -> list[str]:
    """Return the warning of `idle_gpus` for a job on nodes with these numbers of GPUs, or [] if no GPU stays idle.

    If the nodes differ in their numbers of GPUs, the warning only says how many GPUs stay idle.
    """
    if len(set(gpus_of_nodes)) == 1 and gpus_of_nodes[0]:
        devices = planned_device_map(pools, gpus_of_nodes[0], len(gpus_of_nodes))
        return list(idle_gpus({node.name: node.cells for node in devices.nodes}))
    idle = sum(gpus_of_nodes) - pools.size
    stay = f"GPUs stay{'s' * (idle == 1)} idle in the whole run, because no role uses them."
    return [f"{idle} of the job's {sum(gpus_of_nodes)} {stay}"] * (idle > 0)


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, with a dash for consecutive ones: 0, 4-7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def actual_device_map(pools: Pools, devices: Mapping[str, Sequence[tuple[str, str]]], unit: str) -> DeviceMap:
    """Return the map of pools that Ray has placed.

    `devices`: pool -> (node, id of the GPU) of each slot. For a CPU slot, the id is "". `unit`: name of a slot in messages.
    """
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
    """Yield (node, index of the slot in its pool, cell) for every slot. `node_of_slots`: pool -> node of each of its slots."""
    for pool in pools.pools:
        nodes = node_of_slots[pool.name]
        processes: list[dict[str, str]] = [{} for _ in nodes]
        for role, demand in pool.demands.items():
            for rank, slot in enumerate(order_by_tp_groups(nodes, demand.tp_size)[: demand.slots]):
                processes[slot][role] = _process_name(role, demand, rank)
        for slot, (node, slot_processes) in enumerate(zip(nodes, processes, strict=True)):
            yield node, slot, DeviceCell(pool.name, slot_processes)


def _process_name(role: str, demand: SlotDemand, rank: int) -> str:
    if role != "engines":
        return f"{role} {rank}"
    engine, engine_rank = divmod(rank, demand.tp_size)
    return f"engine {engine}" + (f".{engine_rank}" if demand.tp_size > 1 else "")


def _fill_nodes(pools: Pools, gpus_per_node: int) -> dict[str, list[int]]:
    """Return pool -> node of each slot of the pool. The node with the most slots of the pool comes first."""
    free_slots = [gpus_per_node] * ceil(pools.size / gpus_per_node)
    node_of_slots = {}
    for pool in pools.strictest_first:
        fill = _spread if "SPREAD" in pool.strategy else _pack
        nodes = fill(pool, free_slots, gpus_per_node)
        node_of_slots[pool.name] = sorted(nodes, key=lambda node: (-nodes.count(node), node))
    return node_of_slots


def _pack(pool: Pool, free_slots: list[int], gpus_per_node: int) -> list[int]:
    """Return the node of each slot: the fullest node that has room for the whole pool.

    If no node has room, the emptiest node is filled, and the same rule places the remaining slots.

    `free_slots`: number of free slots of each node. The function updates this list, and may append nodes.
    """
    if pool.strategy == "STRICT_PACK" and pool.size > gpus_per_node:
        raise ValueError(
            f"{POOLS_KEY}.{pool.name}.strategy=STRICT_PACK: the pool has {pool.size} slots, and a node has fewer "
            f"(cluster.gpus_per_node={gpus_per_node}); use PACK."
        )
    nodes: list[int] = []
    while missing := pool.size - len(nodes):
        fitting = [node for node, free in enumerate(free_slots) if free >= missing]
        if not fitting and (pool.strategy == "STRICT_PACK" or not any(free_slots)):
            free_slots.append(gpus_per_node)
            continue
        by_free_slots = free_slots.__getitem__
        node = min(fitting, key=by_free_slots) if fitting else max(range(len(free_slots)), key=by_free_slots)
        count = min(missing, free_slots[node])
        free_slots[node] -= count
        nodes += [node] * count
    return nodes


def _spread(pool: Pool, free_slots: list[int], gpus_per_node: int) -> list[int]:
    """Return the node of each slot: the node that has the fewest slots of the pool so far.

    `free_slots`: number of free slots of each node. The function updates this list, and may append nodes.
    """
    nodes: list[int] = []
    for _ in range(pool.size):
        strict = pool.strategy == "STRICT_SPREAD"
        fitting = [node for node, free in enumerate(free_slots) if free and not (strict and node in nodes)]
        if not fitting:
            free_slots.append(gpus_per_node)
            fitting = [len(free_slots) - 1]
        node = min(fitting, key=lambda node: (nodes.count(node), -free_slots[node]))
        free_slots[node] -= 1
        nodes.append(node)
    return nodes


def _unused_slots(pools: Pools, unit: str) -> Iterator[str]:
    """Yield a warning for each role that uses only some slots of its pool."""
    for pool in pools.pools:
        for role, demand in pool.demands.items():
            if demand.slots < pool.size:
                engines = pool.size // demand.tp_size
                all_used = role == "engines" and engines * demand.tp_size == pool.size
                fix = f"; rollout.num_engines={engines} would use all of them" if all_used else ""
                verb = "use" if role == "engines" else "uses"
                yield f"pool {pool.name}: {role} {verb} only {demand.slots} of the pool's {pool.size} {unit}s{fix}."


def _idle_pools(pools: Pools, unit: str) -> Iterator[str]:
    """Yield a warning if there are several pools, because a pool is idle while its roles wait for a role in another pool."""
    if len(pools.pools) > 1:
        idle = [
            f"{pools.size - pool.size} while {role} work{'' if role == 'engines' else 's'}"
            for role, pool in pools.by_role.items()
        ]
        yield (
            f"if roles wait for each other, some of the {pools.size} {unit}s are idle: {', '.join(idle)}; placement=colocated "
            f"needs only {pluralize(pools.colocated_size, unit)}."
        )


def _crossing_groups(pools: Pools, node_of_slots: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a warning for each role whose engines or tensor-parallel groups are on more than one node."""
    for pool in pools.pools:
        for role, demand in pool.demands.items():
            size, slots = demand.tp_size, node_of_slots[pool.name]
            nodes = [slots[slot] for slot in order_by_tp_groups(slots, size)[: demand.slots]]
            groups = [set(nodes[start : start + size]) for start in range(0, len(nodes), size)]
            if crossing := sum(len(group) > 1 for group in groups):
                what = "engines" if role == "engines" else f"tensor-parallel groups of the {role}"
                are = "is" if crossing == 1 else "are"
                yield f"{crossing} of {len(groups)} {what} {are} on more than one node; this adds network traffic in every layer."


ROLE_COLORS = {
    "engines": "#54A24B",
    "reward_model": "#E45756",
    "reference": "#72B7B2",
    "teacher": "#B279A2",
    "critic": "#F58518",
    "actor": "#4C78A8",
}
"""Color of each role, in the order in which the roles work during a step. Other roles are sorted just before the critic."""
OTHER_COLOR = "#9D755D"  # color of the other roles: models in the key `roles`
MAX_NODE_ROWS = 16  # if a map has more nodes, consecutive nodes with the same pools and roles share a row


def device_map_text(devices: DeviceMap, width: int = 160) -> str:
    """Return the map as plain text for a log."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(render_device_map(devices))
    return console.file.getvalue()  # type: ignore[attr-defined]


def render_device_map(devices: DeviceMap) -> Group:
    """Return the map for a terminal: a table of nodes and devices, a table of pools, the totals, and the warnings."""
    rows = list(_node_rows(devices))
    nodes = Table(box=None, padding=(0, 1, 1, 0), show_header=True, header_style="dim")
    nodes.add_column("")
    for number in range(max(len(row.cells) for row in rows)):
        nodes.add_column(f"{devices.unit} {number}")
    for row in rows:
        nodes.add_row(Text(row.name, style="bold"), *map(_render_cell, row.cells))
    warnings = [Text(f"! {warning}", style="yellow") for warning in devices.warnings]
    return Group(nodes, _pool_table(devices), Text(summarize(devices)), *warnings)


def summarize(devices: DeviceMap) -> str:
    """Return one line: `8 GPUs on 2 nodes`, or, if only 6 of the 8 GPUs are in a pool, `6 of 8 GPUs on 2 nodes`."""
    count, size = sum(len(node.cells) for node in devices.nodes), devices.pools.size
    used = f"{size} of " if count > size else ""
    return f"{used}{pluralize(count, devices.unit)} on {pluralize(len(devices.nodes), 'node')}"


def _render_cell(cell: DeviceCell | None) -> Text:
    if cell is None:
        return Text("·", style="dim")
    if not cell.processes:
        return Text("idle", style="dim")
    return Text("\n").join(Text(cell.processes[role], style=_color(role)) for role in _roles_on(cell))


def _roles_on(cell: DeviceCell | None) -> list[str]:
    return sorted(cell.processes, key=_work_order) if cell else []


def _present_roles(devices: DeviceMap) -> list[str]:
    return sorted(devices.pools.by_role, key=_work_order)


def _work_order(role: str) -> tuple[float, str]:
    known = list(ROLE_COLORS)
    return known.index(role) if role in known else known.index("critic") - 0.5, role


def _color(role: str) -> str:
    return ROLE_COLORS.get(role, OTHER_COLOR)


def _phase_name(role: str) -> str:
    """Return the heading of the phase in which this role works."""
    return f"{role} work" if role == "engines" else f"{role} works"


def _pool_table(devices: DeviceMap) -> Table:
    """Return a table with a row for each pool and a column for each role. A cell has the number of slots that the role uses."""
    roles = _present_roles(devices)
    table = Table("pool", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{devices.unit}s", justify="right")
    for role in roles:
        table.add_column(_phase_name(role))
    for pool in devices.pools.pools:
        cells = [
            Text(f"{pool.demands[role].slots} work", style=_color(role))
            if role in pool.demands
            else Text("–", style="dim")
            for role in roles
        ]
        table.add_row(Text(pool.name, style="bold"), str(pool.size), *cells)
    return table


def _node_rows(devices: DeviceMap) -> Iterator[NodeDevices]:
    """Yield the rows of a map: one row for each node.

    If there are more than MAX_NODE_ROWS nodes, consecutive nodes with the same pools and roles share a row.
    """
    if len(devices.nodes) <= MAX_NODE_ROWS:
        yield from devices.nodes
        return
    for _, equal in groupby(
        devices.nodes, key=lambda node: [(c.pool, set(c.processes)) if c else None for c in node.cells]
    ):
        first, *others = equal
        name = f"{first.name} … {others[-1].name} ({1 + len(others)})" if others else first.name
        cells = (
            c and DeviceCell(c.pool, {role: process.split()[0] for role, process in c.processes.items()})
            for c in first.cells
        )
        yield NodeDevices(name, tuple(cells))


def draw_device_map(path: Path, devices: DeviceMap, *, title: str) -> None:
    """Draw a PNG file: at the top the nodes and devices, below them a bar for each pool and role, at the bottom the warnings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    rows, pools = list(_node_rows(devices)), devices.pools.pools
    columns = max(len(row.cells) for row in rows)
    names = max(len(row.name) for row in rows) * 0.09
    heights = [0.9 * len(rows) + 0.35, 0.42 * len(pools) + 0.45, 0.26 * max(1, len(devices.warnings))]
    figure = Figure(figsize=(max(8.0, 1.15 * columns + names + 0.6), sum(heights) + 1.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid, phases, notes = figure.subplots(3, 1, height_ratios=heights)
    figure.suptitle(title, x=0.015, ha="left", fontweight="bold")
    _draw_nodes(grid, rows, columns, devices.unit)
    _draw_phases(phases, devices)
    for number, warning in enumerate(devices.warnings):
        notes.text(0, -number, f"!  {warning}", color="#9A6700", fontsize=8.5, va="center")
    notes.set(xlim=(0, 1), ylim=(0.5 - max(1, len(devices.warnings)), 0.5))
    notes.axis("off")
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def _draw_nodes(axes: Any, rows: list[NodeDevices], columns: int, unit: str) -> None:
    for y, row in enumerate(rows):
        for x, cell in enumerate(row.cells):
            _draw_cell(axes, x, y, cell)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(columns), [f"{unit} {x}" for x in range(columns)], color="#777777", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_cell(axes: Any, x: int, y: int, cell: DeviceCell | None) -> None:
    """Draw a box with one colored band for each process of the device."""
    from matplotlib.patches import FancyBboxPatch

    roles = _roles_on(cell)
    box_style = "round,pad=0,rounding_size=0.06"
    edge = dict(edgecolor="#CCCCCC", linewidth=0.8, linestyle="-" if roles else ":")
    box = FancyBboxPatch((x - 0.46, y - 0.43), 0.92, 0.86, boxstyle=box_style, facecolor="#FAFAFA", **edge)
    axes.add_patch(box)
    if cell is None:
        return
    if not roles:
        axes.text(x, y, "idle", ha="center", va="center", color="#999999", fontsize=7.5)
    for number, role in enumerate(roles):
        height = 0.86 / len(roles)
        low = y - 0.43 + number * height
        band = FancyBboxPatch(
            (x - 0.46 + 0.03, low + 0.03),
            0.86,
            height - 0.06,
            boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=_color(role),
            edgecolor="none",
        )
        axes.add_patch(band)
        axes.text(x, low + height / 2, cell.processes[role], ha="center", va="center", color="white", fontsize=8)


def _draw_phases(axes: Any, devices: DeviceMap) -> None:
    """Draw a row for each pool and a column for each role. A bar shows the fraction of the pool's slots that the role uses."""
    roles, pools = _present_roles(devices), devices.pools.pools
    for y, pool in enumerate(pools):
        for x, role in enumerate(roles):
            share = pool.demands[role].slots / pool.size if role in pool.demands else 0.0
            axes.barh(y, 0.96, left=x, height=0.7, color="#EEEEEE")
            axes.barh(y, 0.96 * share, left=x, height=0.7, color=_color(role))
            text = f"{role}: {pool.demands[role].slots} of {pool.size}" if share else f"{pool.size} idle"
            color = "white" if share > 0.5 else "#888888"
            axes.text(x + 0.48, y, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(
        [x + 0.48 for x in range(len(roles))], [_phase_name(role) for role in roles], color="#777777", fontsize=8
    )
    axes.set_yticks(range(len(pools)), [f"pool {pool.name}" for pool in pools], fontsize=9)
    axes.set(xlim=(0, len(roles)), ylim=(len(pools) - 0.5, -0.5))
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
