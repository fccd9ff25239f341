"""Draws a device map for a terminal, a log or a PNG file: nodes, their devices, and the roles that share them."""

from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mrl.placement.device_map import DeviceCell, DeviceMap, NodeDevices

ROLE_COLORS = {"engines": "#54A24B", "teacher": "#B279A2", "critic": "#F58518", "actor": "#4C78A8"}
"""Color of each role, in the order in which roles work during a step."""
MAX_NODE_ROWS = 16  # with more nodes, equal neighbors share a row


def device_map_text(devices: DeviceMap, width: int = 160) -> str:
    """Return the map as plain text for a log."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(render_device_map(devices))
    return console.file.getvalue()  # type: ignore[attr-defined]


def render_device_map(devices: DeviceMap) -> Group:
    """Return the map for a terminal: a table of nodes and devices, a table of pools, totals and warnings."""
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
    """Return the total numbers of devices and nodes in one line."""
    count, size = sum(len(node.cells) for node in devices.nodes), devices.pools.size
    used = f"{size} of {count}" if count > size else str(count)
    return f"{used} {devices.unit}s on {len(devices.nodes)} node{'s' if len(devices.nodes) > 1 else ''}"


def _render_cell(cell: DeviceCell | None) -> Text:
    if cell is None:
        return Text("·", style="dim")
    if not cell.processes:
        return Text("idle", style="dim")
    return Text("\n").join(Text(cell.processes[role], style=ROLE_COLORS[role]) for role in _roles_on(cell))


def _roles_on(cell: DeviceCell | None) -> list[str]:
    return [role for role in ROLE_COLORS if cell and role in cell.processes]


def _present_roles(devices: DeviceMap) -> list[str]:
    return [role for role in ROLE_COLORS if role in devices.pools.by_role]


def _phase_name(role: str) -> str:
    """Return the heading of the phase in which this role works."""
    return f"{role} work" if role == "engines" else f"{role} works"


def _pool_table(devices: DeviceMap) -> Table:
    """Return a table with a row for each pool and a column for each role: slots of the pool that work in the role's phase."""
    roles = _present_roles(devices)
    table = Table("pool", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{devices.unit}s", justify="right")
    for role in roles:
        table.add_column(_phase_name(role))
    for pool in devices.pools.pools:
        cells = [
            Text(f"{pool.needs[role].slots} work", style=ROLE_COLORS[role])
            if role in pool.needs
            else Text("–", style="dim")
            for role in roles
        ]
        table.add_row(Text(pool.name, style="bold"), str(pool.size), *cells)
    return table


def _node_rows(devices: DeviceMap) -> Iterator[NodeDevices]:
    """Yield all nodes. With more than MAX_NODE_ROWS, neighbors with equal roles share a row, in which ranks are left out."""
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
    """Draw nodes and devices above, pools and phases below, into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes a second to import
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
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)


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
    """Draw a box with one band for each process."""
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
            facecolor=ROLE_COLORS[role],
            edgecolor="none",
        )
        axes.add_patch(band)
        axes.text(x, low + height / 2, cell.processes[role], ha="center", va="center", color="white", fontsize=8)


def _draw_phases(axes: Any, devices: DeviceMap) -> None:
    """Draw a row for each pool and a column for each role: the share of the pool that works in the role's phase."""
    roles, pools = _present_roles(devices), devices.pools.pools
    for y, pool in enumerate(pools):
        for x, role in enumerate(roles):
            share = pool.needs[role].slots / pool.size if role in pool.needs else 0.0
            axes.barh(y, 0.96, left=x, height=0.7, color="#EEEEEE")
            axes.barh(y, 0.96 * share, left=x, height=0.7, color=ROLE_COLORS[role])
            text = f"{role}: {pool.needs[role].slots} of {pool.size}" if share else f"{pool.size} idle"
            color = "white" if share > 0.5 else "#888888"
            axes.text(x + 0.48, y, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(
        [x + 0.48 for x in range(len(roles))], [_phase_name(role) for role in roles], color="#777777", fontsize=8
    )
    axes.set_yticks(range(len(pools)), [f"pool {pool.name}" for pool in pools], fontsize=9)
    axes.set(xlim=(0, len(roles)), ylim=(len(pools) - 0.5, -0.5))
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
