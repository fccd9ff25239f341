"""Tracker: passes the metrics of each step to sinks.

JsonlSink writes JSON Lines files, and CurveSink draws the learning curve of a run as a picture. Other modules contain the other
sinks: mrl.tracking.console for the terminal, and mrl.tracking.backends for trackers such as wandb. A sink must not slow or stop
training. For this reason, separate threads import matplotlib and the packages of trackers after the run has started.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import orjson

from mrl.core import metrics as declared
from mrl.core.jsonl import JsonLinesFile
from mrl.core.run_errors import PreemptedError
from parallel.durable_files import atomic_file

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Discard the metrics of steps after `last_step`, because the run repeats these steps.

        If `evaluated` is False, the metrics eval/* of `last_step` are discarded too.
        """
        ...

    def close(self, failed: bool = False) -> None:
        """End the output. `failed`: whether the run ends with an error. Preemption is not an error."""
        ...


class Tracker:
    """Passes metrics to all sinks. At the end of a `with` block, the tracker closes the sinks, also after an error.

    with Tracker([JsonlSink(folder / "metrics.jsonl"), ConsoleSink(total=200)]) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step. Raises ValueError for a name that mrl/core/metrics.py does not declare."""
        declared.check(metrics)
        if not metrics:
            return
        for sink in self.sinks:
            sink.log(step, metrics)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Rewind all sinks to `last_step`; see Sink.rewind."""
        for sink in self.sinks:
            sink.rewind(last_step, evaluated)

    def close(self, failed: bool = False) -> None:
        """Close all sinks in order, even if closing one of them fails."""
        for sink in self.sinks:
            try:
                sink.close(failed)
            except Exception:
                logger.exception("closing %s failed", type(sink).__name__)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, PreemptedError))


class JsonlSink:
    """Writes one JSON object per step to a file. If the file exists, the sink first removes lines of steps after `last_step`.

    If `evaluations` is True, the sink writes only the metrics eval/*. Otherwise it writes only the other metrics. A step with
    no metrics to write gets no line.
    """

    def __init__(self, path: Path, *, evaluations: bool = False, last_step: int = 0) -> None:
        self._evaluations = evaluations
        self._file = JsonLinesFile(path, last_step, every_step=not evaluations)

    def log(self, step: int, metrics: Metrics) -> None:
        chosen = {name: value for name, value in metrics.items() if name.startswith("eval/") == self._evaluations}
        if chosen:
            self._file.write(step, chosen)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        self._file.rewind(last_step - 1 if self._evaluations and not evaluated else last_step)

    def close(self, failed: bool = False) -> None:
        self._file.close()


Points = dict[int, float]  # step -> value
SMOOTHED_STEPS = 10  # number of steps in the moving average of the curve
HELD_OUT = ("eval/reward_sampled", "eval/reward_greedy")  # mean rewards of all held-out prompts
STYLES = (("#E45756", "o"), ("#54A24B", "D"), ("#F58518", "s"), ("#B279A2", "^"), ("#72B7B2", "v"), ("#9D755D", "P"))
"""(color, marker) of each curve of a held-out reward. The picture has at most as many of these curves as STYLES has entries."""


class CurveSink:
    """Draws `metric` and the held-out rewards over the steps: every `every` steps and at the end, in a separate thread."""

    def __init__(self, path: Path, *, metric: str = "reward/mean", title: str = "", every: int = 25) -> None:
        self.path, self.metric, self.title, self.every = path, metric, title, every
        self._values: Points = {}
        self._held_out: dict[str, Points] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="curve")  # the import of matplotlib takes a second
        self._drawing: Future[None] | None = None
        self._has_warned = False

    def read_logs(self, paths: Sequence[Path]) -> None:
        """Read the metrics that JsonlSinks wrote before the run was resumed."""
        for path in paths:
            for line in path.read_bytes().splitlines():
                numbers = orjson.loads(line)
                step = numbers.pop("step")
                self._record(step, {name: value for name, value in numbers.items() if value is not None})

    def log(self, step: int, metrics: Metrics) -> None:
        self._record(step, metrics)
        due = self.metric in metrics and len(self._values) % self.every == 0
        if due and (self._drawing is None or self._drawing.done()):
            self._drawing = self._pool.submit(self._draw_and_log_failure, *self._snapshot())

    def _record(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name.startswith("eval/"):
                self._held_out.setdefault(name, {})[step] = value
        if self.metric in metrics:
            self._values[step] = metrics[self.metric]

    def rewind(self, last_step: int, evaluated: bool) -> None:
        for points in (self._values, *self._held_out.values()):
            for step in [step for step in points if step > last_step]:
                del points[step]

    def close(self, failed: bool = False) -> None:
        if self._values:
            self._pool.submit(self._draw_and_log_failure, *self._snapshot())
        self._pool.shutdown(wait=True)

    def _snapshot(self) -> tuple[Points, dict[str, Points]]:
        return dict(self._values), {name: dict(points) for name, points in self._held_out.items()}

    def _draw_and_log_failure(self, values: Points, held_out: dict[str, Points]) -> None:
        try:
            draw_curve(self.path, values, held_out, metric=self.metric, title=self.title)
        except Exception as error:
            if not self._has_warned:
                logger.warning("drawing %s failed: %s: %s", self.path, type(error).__name__, error)
            self._has_warned = True


def draw_curve(path: Path, values: Points, held_out: dict[str, Points], *, metric: str, title: str = "") -> None:
    """Write a PNG of `values` over the steps, raw and smoothed, with the rewards on held-out prompts on the same axis.

    `held_out`: metric eval/* -> its points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, raw = list(values), list(values.values())
    axes.plot(steps, raw, color="#4C78A8", alpha=0.3, linewidth=1, label=declared.find(metric).meaning)
    axes.plot(steps, _smooth(raw), color="#4C78A8", linewidth=2.2, label=f"mean of the last {SMOOTHED_STEPS} steps")
    for name, (color, marker) in zip(drawn_evaluations(held_out), STYLES, strict=False):
        _draw_held_out(axes, held_out[name], color, marker, label=f"held-out reward, {declared.label(name)}")
    axes.set(xlabel="step", ylabel=metric)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False, loc="best", fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def drawn_evaluations(held_out: dict[str, Points]) -> list[str]:
    """Return the metrics to draw: the mean rewards of all held-out prompts; if there are none, those of each held-out set."""
    measured = [name for name, points in held_out.items() if points]
    found = [name for name in HELD_OUT if name in measured]
    return found or [name for name in measured if name.rpartition("/")[2].startswith("reward")]


def _draw_held_out(axes: Any, points: Points, color: str, marker: str, label: str) -> None:
    axes.plot(list(points), list(points.values()), f"{marker}:", markersize=7, color=color, label=label)
    style = {"textcoords": "offset points", "va": "center", "color": color, "fontsize": 10}
    first, last = min(points), max(points)
    axes.annotate(f"{points[first]:.2f}", (first, points[first]), xytext=(-8, 0), ha="right", **style)
    if last != first:
        axes.annotate(f"{points[last]:.2f}", (last, points[last]), xytext=(8, 0), ha="left", **style)


def _smooth(values: Sequence[float], window: int = SMOOTHED_STEPS) -> list[float]:
    """Return the moving average over the last `window` values."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
