"""The same work in other shapes: a table of what steps would take, and a picture of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.planner.simulate import Groups, Prediction, Setup, Speeds, simulate

STALENESSES = (0, 1, 2, 4, 8)
OVER_SAMPLINGS = (0.25, 0.5)  # shares of a step's groups
MOST_SPLITS = 7


@dataclass(frozen=True)
class Gpus:
    """What a run has."""

    engine: int  # of each engine
    trainer: int

    def total(self, engines: int) -> int:
        """GPUs of so many engines and the trainer."""
        return engines * self.engine + self.trainer


@dataclass(frozen=True)
class Row:
    """A shape of the run and what it would do."""

    name: str
    setup: Setup
    found: Prediction
    skip: int  # first steps, in which the window fills, and what is then ahead is used up

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.found.seconds(self.skip)

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens."""
        return self.found.tokens_per_s(self.skip)

    @property
    def of_best(self) -> float:
        """Share of what engines that are always full, or trainers that never wait, would do; of the whole run.

        What was sampled in the first steps may be trained in later ones, which may then be quicker than both.
        """
        return self.found.best_possible_s / self.found.seconds()


def what_if(groups: Groups, speeds: Speeds, setup: Setup, gpus: Gpus, steps: int) -> list[Row]:
    """The run as it is first, then with one thing changed in each row."""
    skip = steps // 2
    named = [("as it is", setup), *_stale(setup), *_over_sampled(setup), *_split(setup, gpus)]
    return [Row(name, shape, simulate(groups, speeds, shape, steps), skip) for name, shape in named]


def _stale(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """By turns nothing is sampled while something is trained."""
    for staleness in () if setup.colocated else STALENESSES:
        ordered = setup.in_order if setup.staleness > 1 else staleness < 2
        changed = replace(setup, staleness=staleness, in_order=ordered and not setup.extra)
        if changed != setup:
            yield f"staleness {staleness}{', as drawn' if changed.in_order and staleness else ''}", changed


def _over_sampled(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for share in OVER_SAMPLINGS:
        changed = replace(setup, extra=round(share * setup.prompts_per_step), in_order=False)
        if changed != setup:
            yield f"over-sampling {share:g}", changed


def _split(setup: Setup, gpus: Gpus) -> Iterator[tuple[str, Setup]]:
    """Other shares of the same GPUs; a trainer of other size takes a token's time in proportion."""
    apart = gpus.total(setup.num_engines)
    total = max(gpus.trainer, apart - gpus.trainer) if setup.colocated else apart
    possible = [count for count in range(1, total) if total - count * gpus.engine > 0]
    every = -(-len(possible) // MOST_SPLITS) if possible else 1
    for engines in possible[::every]:
        left = total - engines * gpus.engine
        changed = replace(setup, num_engines=engines, train_scale=gpus.trainer / left, colocated=False)
        if changed != setup:
            yield f"{engines} engines, {left} GPUs to train", changed
    if not setup.colocated and total >= gpus.engine:
        shared = replace(setup, num_engines=total // gpus.engine, train_scale=gpus.trainer / total, colocated=True)
        yield f"by turns on {total} GPUs, synchronous", replace(shared, staleness=0, in_order=not setup.extra)


def draw(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Seconds of a step in each shape, and the least they could be. Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(rows))
    colours = ["#E45756" if not place else "#4C78A8" for place in places]
    axes.barh(places, [row.seconds for row in rows], color=colours, label="predicted")
    best = [row.found.best_possible_s for row in rows]
    axes.plot(best, places, "|", color="black", markersize=12, markeredgewidth=2, label="best possible")
    axes.set_yticks(places, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)
