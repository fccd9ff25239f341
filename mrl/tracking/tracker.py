"""Where a run's numbers go: a JSONL file, wandb, the terminal and a picture. All get the same `log(step, metrics)`.

Nothing here may slow or stop a run: wandb and matplotlib are imported in threads of their own, after the start.
"""

import contextlib
import logging
import netrc
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import urlparse

import orjson
import psutil

from mrl.config.secrets import redacted
from mrl.core import metrics as declared
from mrl.core.durable_files import StepLines

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Sink(Protocol):
    """One place that numbers go to."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """The run goes back: what was logged after `last_step` will be logged again, and its eval/* unless `evaluated`."""
        ...

    def close(self) -> None: ...


class Tracker:
    """Hands every step's metrics to all sinks; as a context manager it closes them, also after an error.

    with Tracker([JsonlSink(folder / "metrics.jsonl"), ConsoleSink(total=200)]) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record `metrics`, if any, under `step`. Raises: ValueError for a name not declared in mrl/core/metrics.py."""
        declared.check(metrics)
        if not metrics:
            return
        for sink in self.sinks:
            sink.log(step, metrics)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Have every sink forget what will be logged again, as far as it can."""
        for sink in self.sinks:
            sink.rewind(last_step, evaluated)

    def close(self) -> None:
        """Close every sink, in order; one that fails does not keep the others from closing."""
        for sink in self.sinks:
            try:
                sink.close()
            except Exception:
                logger.exception("closing %s failed", type(sink).__name__)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JsonlSink:
    """One JSON object per call, see StepLines; a file that is there goes on after `last_step`.

    `evaluations`: of eval/* only; else of all but those. A call without any leaves no line.
    """

    def __init__(self, path: Path, *, evaluations: bool = False, last_step: int = 0) -> None:
        self._lines, self._evaluations = StepLines(path, last_step), evaluations

    def log(self, step: int, metrics: Metrics) -> None:
        chosen = {name: value for name, value in metrics.items() if name.startswith("eval/") == self._evaluations}
        if chosen:
            self._lines.write(step, chosen)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        self._lines.rewind(last_step - 1 if self._evaluations and not evaluated else last_step)

    def close(self) -> None:
        self._lines.close()


class WandbSink:
    """Weights & Biases, in a thread: online where a login is at hand, else offline in `folder`; it never asks for one.

    The run's id is kept in `folder`: what is resumed there goes on as the same run, and steps taken again change nothing.
    Whatever goes wrong in wandb is one warning and the run goes on; closing waits `deadline_s` at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.deadline_s = deadline_s
        self._run: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "config": redacted(config or {}),
            "dir": folder,
        }
        self._run |= {"id": _run_id(folder / "wandb_run_id"), "resume": "allow"}
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self._queue.put((step, dict(metrics)))

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """wandb takes no step twice."""

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self.deadline_s)
        if self._thread.is_alive():
            logger.warning("wandb did not finish in %.0f s and was left behind", self.deadline_s)
            _end_wandb_service()

    def _work(self) -> None:
        try:
            run = self._start()
            while (item := self._queue.get()) is not None:
                step, metrics = item
                if step >= run.step:  # wandb would warn of every other one
                    run.log(metrics, step=step)
            run.finish()
        except Exception as error:
            logger.warning("wandb failed and is off for this run: %s: %s", type(error).__name__, error)
            _end_wandb_service()

    def _start(self) -> Any:
        import wandb  # heavy: seconds that the run's start need not wait for

        settings = wandb.Settings(console="off", silent=True, init_timeout=self.deadline_s)
        return wandb.init(**self._run, mode=cast(Any, wandb_mode()), settings=settings)


def _run_id(path: Path) -> str:
    """The id that is kept in `path`, or a new one."""
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(uuid.uuid4().hex[:12])
    return path.read_text()


def wandb_mode() -> str:
    """WANDB_MODE where it is set; else online where a key or a netrc login is present, offline where not."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        logins = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc")
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return "offline"
    return "online" if logins.authenticators(host) else "offline"


def _end_wandb_service() -> None:
    """End wandb's helper process, which would hold up our exit for as long as its server does not answer."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb"):
            child.kill()


class ConsoleSink:
    """Progress for a person: a live display on a terminal, elsewhere one line every `every_s` seconds.

    Held-out accuracy is always printed when it is measured, and before/after at the end.
    """

    def __init__(self, total: int, *, title: str = "", every_s: float = 10.0, console: Any = None) -> None:
        from rich.console import Console  # not needed in the processes that only import this module

        self.total, self.title, self.every_s = total, title, every_s
        self.console = console or Console(file=sys.stdout)
        self._evaluations: list[Metrics] = []
        self._latest: dict[str, float] = {}
        self._printed_s = float("-inf")
        self._display = _Display(self.console, total, title) if self.console.is_terminal else None

    def log(self, step: int, metrics: Metrics) -> None:
        self._latest |= metrics
        evaluation = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if evaluation:
            self._evaluations.append(evaluation)
            self._line(f"step {step:>4}  held-out {_text(evaluation)}")
        if self._display:
            self._display.update(step, self._latest)
        elif len(evaluation) < len(metrics) and (self._due() or step == self.total):
            self._line(f"step {step:>4}/{self.total}  {_headline(metrics)}  {_phases(metrics)}".rstrip())

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """A person sees the steps again."""

    def close(self) -> None:
        if self._display:
            self._display.stop()
        if len(self._evaluations) > 1:
            before, after = self._evaluations[0], self._evaluations[-1]
            changes = [
                f"{declared.label(name)} {before[name]:.3f} -> {after[name]:.3f} ({after[name] - before[name]:+.3f})"
                for name in before
                if name in after
            ]
            self._line("held-out accuracy, before -> after: " + ", ".join(changes))

    def _due(self) -> bool:
        now = time.monotonic()
        if now - self._printed_s < self.every_s:
            return False
        self._printed_s = now
        return True

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Startup:
    """Tells a person what a run is waiting for before its first step, and how long each part took."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console  # not needed in the processes that only import this module

        self.console = console or Console(file=sys.stdout)
        self._begun = time.monotonic()

    def ready(self, what: str) -> None:
        """`what` is up."""
        text = f"{what} after {time.monotonic() - self._begun:.1f} s"
        logger.info(text)
        self.console.print(text, markup=False, highlight=False)


class _Display:
    """The live part of ConsoleSink: a progress bar over two lines of numbers."""

    def __init__(self, console: Any, total: int, title: str) -> None:
        from rich import progress
        from rich.live import Live

        self.progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("[dim]left"),
            progress.TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task(title, total=total)
        self.live = Live(self.progress, console=console, refresh_per_second=2)
        self.live.start()

    def update(self, step: int, latest: Metrics) -> None:
        from rich.console import Group
        from rich.text import Text

        self.progress.update(self.task, completed=step)
        lines = [Text(_headline(latest), style="bold green"), Text(_phases(latest), style="cyan")]
        self.live.update(Group(self.progress, *lines))

    def stop(self) -> None:
        self.live.stop()


HEADLINE = (
    "reward/mean",
    "loss/sft",
    "eval/accuracy_sampled",
    "eval/accuracy_greedy",
    "rollout/response_length_mean_tokens",
    "mismatch/logprob_abs_max",
)


def _text(metrics: Metrics) -> str:
    return "  ".join(f"{declared.label(name)} {declared.find(name).text(value)}" for name, value in metrics.items())


def _headline(metrics: Metrics) -> str:
    return _text({name: metrics[name] for name in HEADLINE if name in metrics})


def _phases(metrics: Metrics) -> str:
    """`1.02 s a step, 4,210 tokens/s (rollout 0.55, update 0.38)`, phases below a hundredth of a second left out."""
    if "time/step_s" not in metrics:
        return ""
    seconds = {name: value for name, value in metrics.items() if name.startswith("time/") and name != "time/step_s"}
    shares = ", ".join(f"{declared.label(name)} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    rate = f", {metrics['throughput/tokens_per_s']:,.0f} tokens/s" if "throughput/tokens_per_s" in metrics else ""
    return f"{metrics['time/step_s']:.2f} s a step{rate}" + (f" ({shares})" if shares else "")


class CurveSink:
    """A learning curve: `metric` at every step, held-out accuracy where measured; drawn now and then and at the end."""

    def __init__(self, path: Path, *, metric: str = "reward/mean", title: str = "", every: int = 25) -> None:
        self.path, self.metric, self.title, self.every = path, metric, title, every
        self._values: dict[int, float] = {}
        self._accuracies: dict[str, dict[int, float]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="curve")  # matplotlib takes a second to import
        self._drawing: Future[None] | None = None
        self._failed = False

    def read(self, paths: Sequence[Path]) -> None:
        """Take up what JsonlSinks of an earlier part of the run wrote."""
        for path in paths:
            for line in path.read_bytes().splitlines():
                numbers = orjson.loads(line)
                step = numbers.pop("step")
                self._note(step, {name: value for name, value in numbers.items() if value is not None})

    def log(self, step: int, metrics: Metrics) -> None:
        self._note(step, metrics)
        due = self.metric in metrics and len(self._values) % self.every == 0
        if due and (self._drawing is None or self._drawing.done()):
            self._drawing = self._pool.submit(self._draw_safely, *self._snapshot())

    def _note(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name.startswith("eval/"):
                self._accuracies.setdefault(name, {})[step] = value
        if self.metric in metrics:
            self._values[step] = metrics[self.metric]

    def rewind(self, last_step: int, evaluated: bool) -> None:
        for points in (self._values, *self._accuracies.values()):
            for step in [step for step in points if step > last_step]:
                del points[step]

    def close(self) -> None:
        if self._values:
            self._pool.submit(self._draw_safely, *self._snapshot())
        self._pool.shutdown(wait=True)

    def _snapshot(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        return dict(self._values), {name: dict(points) for name, points in self._accuracies.items()}

    def _draw_safely(self, values: dict[int, float], accuracies: dict[str, dict[int, float]]) -> None:
        try:
            draw_curve(self.path, values, accuracies, metric=self.metric, title=self.title)
        except Exception as error:
            if not self._failed:
                logger.warning("drawing %s failed: %s: %s", self.path, type(error).__name__, error)
            self._failed = True


Points = dict[int, float]  # step -> value


def draw_curve(path: Path, values: Points, accuracies: dict[str, Points], *, metric: str, title: str = "") -> None:
    """Draw `values` over steps, raw and smoothed, with the held-out accuracies on the same scale; writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, raw = list(values), list(values.values())
    axes.plot(steps, raw, color="#4C78A8", alpha=0.3, linewidth=1)
    axes.plot(steps, _smooth(raw), color="#4C78A8", linewidth=2.2, label=declared.find(metric).meaning)
    for name, (colour, marker) in _ACCURACY_STYLES.items():
        if points := accuracies.get(name):
            _draw_accuracy(axes, points, colour, marker, label=f"held-out accuracy, {declared.label(name)}")
    axes.set(xlabel="step", ylabel=metric)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False, loc="best", fontsize=9)
    unfinished = path.with_suffix(".part.png")
    figure.savefig(unfinished)
    unfinished.replace(path)


_ACCURACY_STYLES = {"eval/accuracy_sampled": ("#E45756", "o"), "eval/accuracy_greedy": ("#54A24B", "D")}


def _draw_accuracy(axes: Any, points: Points, colour: str, marker: str, label: str) -> None:
    axes.plot(list(points), list(points.values()), f"{marker}:", markersize=7, color=colour, label=label)
    style = {"textcoords": "offset points", "va": "center", "color": colour, "fontsize": 10}
    first, last = min(points), max(points)
    axes.annotate(f"{points[first]:.2f}", (first, points[first]), xytext=(-8, 0), ha="right", **style)
    if last != first:
        axes.annotate(f"{points[last]:.2f}", (last, points[last]), xytext=(8, 0), ha="left", **style)


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Mean of the last `window` values at each place."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
