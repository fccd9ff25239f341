"""How far two layouts are apart, place by place."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mrl.workers.sketch import PlaceDifference


def draw(path: Path, places: Sequence[PlaceDifference], *, title: str) -> None:
    """The largest difference at each place, with its tolerance, on a logarithmic scale; crosses: not finite. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    floor = 1e-9  # where equal numbers are drawn
    sizes = np.array([max(p.largest, floor) if np.isfinite(p.largest) else np.nan for p in places])
    tolerances = np.array([p.tolerance for p in places])
    numbers = np.arange(len(places))
    axes.plot(numbers, sizes, "o-", color="#4C78A8", label="largest difference of a token")
    axes.step(numbers, tolerances, where="mid", color="#79706E", linestyle="--", linewidth=1, label="tolerance")
    wrong = np.array([not p.within and p.finite for p in places])
    broken = np.array([not p.finite for p in places])
    for chosen, heights, marker, label in ((wrong, sizes, "o", "differs"), (broken, tolerances, "x", "not finite")):
        if chosen.any():
            axes.plot(numbers[chosen], heights[chosen], marker, color="#E45756", label=label)
    axes.set_yscale("log")
    every = max(1, len(places) // 16)
    axes.set_xticks(numbers[::every], [p.name for p in places][::every], rotation=40, ha="right")
    axes.set(ylabel="share of the hidden state's length; last: nats")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)
