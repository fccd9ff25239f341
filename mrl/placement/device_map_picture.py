"""A picture of a layout, for a terminal, a log, or as a PNG: nodes, their devices, and who uses them by turns."""

from collections.abc import Iterator
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mrl.placement.device_map import Cell, Layout, Node

COLOURS = {"engines": "#54A24B", "teacher": "#B279A2", "critic": "#F58518", "actor": "#4C78A8"}
"""By role, in the order of their turns in a step."""
MANY = 16  # nodes, beyond which like ones are drawn as one


def text(layout: Layout, width: int = 160) -> str:
    """For a log."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(rendered(layout))
    return console.file.getvalue()  # type: ignore[attr-defined]


def rendered(layout: Layout) -> Group:
    """For a terminal: a table of nodes and devices, one of pools, then what is worth knowing."""
    rows = list(_rows(layout))
    nodes = Table(box=None, padding=(0, 1, 1, 0), show_header=True, header_style="dim")
    nodes.add_column("")
    for number in range(max(len(row.cells) for row in rows)):
        nodes.add_column(f"{layout.unit} {number}")
    for row in rows:
        nodes.add_row(Text(row.name, style="bold"), *map(_cell, row.cells))
    notes = [Text(f"! {warning}", style="yellow") for warning in layout.warnings]
    return Group(nodes, _pools(layout), Text(summary(layout)), *notes)


def summary(layout: Layout) -> str:
    """Totals in a line."""
    devices = sum(len(node.cells) for node in layout.nodes)
    used = f"{layout.pools.size} of {devices}" if devices > layout.pools.size else str(devices)
    return f"{used} {layout.unit}s on {len(layout.nodes)} node{'s' if len(layout.nodes) > 1 else ''}"


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("·", style="dim")
    if not cell.tenants:
        return Text("idle", style="dim")
    lines = [Text(cell.tenants[role], style=COLOURS[role]) for role in COLOURS if role in cell.tenants]
    return Text("\n").join(lines)


def _pools(layout: Layout) -> Table:
    """Who works when: a row for each pool, a column for each role in the order of turns."""
    present = [role for role in COLOURS if role in layout.pools.roles]
    table = Table("pool", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(f"{layout.unit}s", justify="right")
    for role in present:
        table.add_column(f"{role}' turn" if role == "engines" else f"{role}'s turn")
    for pool in layout.pools.pools:
        turns = [
            Text(f"{pool.needs[role].slots} work", style=COLOURS[role])
            if role in pool.needs
            else Text("–", style="dim")
            for role in present
        ]
        table.add_row(Text(pool.name, style="bold"), str(pool.size), *turns)
    return table


def _rows(layout: Layout) -> Iterator[Node]:
    """All nodes; of many, neighbours that are alike in one row, without ranks."""
    if len(layout.nodes) <= MANY:
        yield from layout.nodes
        return
    for _, alike in groupby(
        layout.nodes, key=lambda node: [(c.pool, set(c.tenants)) if c else None for c in node.cells]
    ):
        first, *more = alike
        name = f"{first.name} … {more[-1].name} ({1 + len(more)})" if more else first.name
        yield Node(
            name, tuple(c and Cell(c.pool, {r: p.split()[0] for r, p in c.tenants.items()}) for c in first.cells)
        )


def draw(path: Path, layout: Layout, *, title: str) -> None:
    """Nodes and devices above, pools and turns below; writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second
    from matplotlib.figure import Figure

    rows, pools = list(_rows(layout)), layout.pools.pools
    columns = max(len(row.cells) for row in rows)
    names = max(len(row.name) for row in rows) * 0.09
    heights = [0.9 * len(rows) + 0.35, 0.42 * len(pools) + 0.45, 0.26 * max(1, len(layout.warnings))]
    figure = Figure(figsize=(max(8.0, 1.15 * columns + names + 0.6), sum(heights) + 1.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid, turns, notes = figure.subplots(3, 1, height_ratios=heights)
    figure.suptitle(title, x=0.015, ha="left", fontweight="bold")
    _draw_nodes(grid, rows, columns, layout.unit)
    _draw_turns(turns, layout)
    for number, warning in enumerate(layout.warnings):
        notes.text(0, -number, f"!  {warning}", color="#9A6700", fontsize=8.5, va="center")
    notes.set(xlim=(0, 1), ylim=(0.5 - max(1, len(layout.warnings)), 0.5))
    notes.axis("off")
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)


def _draw_nodes(axes: Any, rows: list[Node], columns: int, unit: str) -> None:
    for y, row in enumerate(rows):
        for x, cell in enumerate(row.cells):
            _draw_cell(axes, x, y, cell)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(columns), [f"{unit} {x}" for x in range(columns)], color="#777777", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=9)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_cell(axes: Any, x: int, y: int, cell: Cell | None) -> None:
    """A box with a band for each process."""
    from matplotlib.patches import FancyBboxPatch

    here = [role for role in COLOURS if cell and role in cell.tenants]
    shape = "round,pad=0,rounding_size=0.06"
    edge = dict(edgecolor="#CCCCCC", linewidth=0.8, linestyle="-" if here else ":")
    box = FancyBboxPatch((x - 0.46, y - 0.43), 0.92, 0.86, boxstyle=shape, facecolor="#FAFAFA", **edge)
    axes.add_patch(box)
    if cell is not None and not here:
        axes.text(x, y, "idle", ha="center", va="center", color="#999999", fontsize=7.5)
    for number, role in enumerate(here):
        height = 0.86 / len(here)
        low = y - 0.43 + number * height
        band = FancyBboxPatch(
            (x - 0.46 + 0.03, low + 0.03),
            0.86,
            height - 0.06,
            boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=COLOURS[role],
            edgecolor="none",
        )
        axes.add_patch(band)
        assert cell is not None, "it has processes"
        axes.text(x, low + height / 2, cell.tenants[role], ha="center", va="center", color="white", fontsize=8)


def _draw_turns(axes: Any, layout: Layout) -> None:
    """A row for each pool, a column for each role's turn: what of the pool works, the rest waits."""
    present, pools = [role for role in COLOURS if role in layout.pools.roles], layout.pools.pools
    for y, pool in enumerate(pools):
        for x, role in enumerate(present):
            share = pool.needs[role].slots / pool.size if role in pool.needs else 0.0
            axes.barh(y, 0.96, left=x, height=0.7, color="#EEEEEE")
            axes.barh(y, 0.96 * share, left=x, height=0.7, color=COLOURS[role])
            said = f"{role}: {pool.needs[role].slots} of {pool.size}" if share else f"{pool.size} wait"
            colour = "white" if share > 0.5 else "#888888"
            axes.text(x + 0.48, y, said, ha="center", va="center", fontsize=8, color=colour)
    names = ["engines' turn" if role == "engines" else f"{role}'s turn" for role in present]
    axes.set_xticks([x + 0.48 for x in range(len(present))], names, color="#777777", fontsize=8)
    axes.set_yticks(range(len(pools)), [f"pool {pool.name}" for pool in pools], fontsize=9)
    axes.set(xlim=(0, len(present)), ylim=(len(pools) - 0.5, -0.5))
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
