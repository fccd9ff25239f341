"""Sinks of metrics: Weights & Biases (wandb), and a picture of the learning curve."""

import logging
import netrc
import os
import queue
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import orjson
import psutil
import xxhash

from mrl.config.secrets import redacted
from mrl.core import metrics as declared
from mrl.tracking.tracker import Metrics
from parallel.durable_files import atomic_file, write_file

logger = logging.getLogger(__name__)

_ID_LENGTH = 12  # characters of a wandb run id before its hash


class WandbSink:
    """Logs to Weights & Biases from a thread: online if a login is configured, otherwise offline in `folder`.

    It never asks for a login. The id of the wandb run is stored in `folder`, so a resumed run continues the same wandb run.
    Repeated steps are not sent to wandb again. If wandb fails, one warning is logged. `close` waits at most `deadline_s` seconds
    for wandb.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        group: str | None = None,
        labels: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        """`labels`: more arguments of wandb.init, such as entity, tags and notes."""
        self.deadline_s = deadline_s
        self._run: dict[str, Any] = {
            **(labels or {}),
            "project": project,
            "name": name,
            "group": group,
            "config": redacted(config or {}),
            "dir": folder,
        }
        self._run |= {"id": _stored_run_id(folder / "wandb_run_id"), "resume": "allow"}
        if wandb_mode() == "offline" and not os.environ.get("WANDB_MODE"):
            logger.warning(
                "tracking.wandb=true, but there is no API key (WANDB_API_KEY or `wandb login`): metrics are recorded offline. "
                "`wandb sync %s/wandb/offline-run-*` uploads them; tracking.wandb=false turns wandb off.",
                folder,
            )
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self._queue.put((step, dict(metrics)))

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Do nothing: wandb accepts each step once."""

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self.deadline_s)
        if self._thread.is_alive():
            logger.warning("wandb did not finish within %.0f s; the run ends without waiting for it", self.deadline_s)
            _kill_wandb_service()

    def _work(self) -> None:
        try:
            run = self._start()
            while (item := self._queue.get()) is not None:
                step, metrics = item
                if step >= run.step:  # wandb warns about earlier steps
                    run.log(metrics, step=step)
            run.finish()
        except Exception as error:
            logger.warning("wandb failed and gets no more metrics of this run: %s: %s", type(error).__name__, error)
            _kill_wandb_service()

    def _start(self) -> Any:
        import wandb  # takes seconds, so it is imported in the thread

        settings = wandb.Settings(console="off", silent=True, init_timeout=self.deadline_s)
        return wandb.init(**self._run, mode=cast(Any, wandb_mode()), settings=settings)


def default_run_name(name: str, folder: Path) -> str:
    """Return a name for wandb that tells runs apart: the run's name, and the last parts of its folder's path.

    The folder of a sweep's point is a number, so the name of the sweep's folder stands before it.
    """
    folder = folder.resolve()
    parts = [folder.parent.name, folder.name] if folder.name.isdigit() else [folder.name]
    return "/".join(part for part in [name, *parts] if part)


def _stored_run_id(path: Path) -> str:
    """Return the run id that is stored in `path`. If there is none or it is damaged, first store a new id."""
    stored = path.read_text(errors="replace") if path.exists() else None
    if stored is not None and stored == _with_check(stored[:_ID_LENGTH]):
        return stored
    if stored is not None:
        logger.warning("%s is damaged: it has %r instead of a run id; wandb gets a new run", path, stored[:100])
    write_file(path, run_id := _with_check(uuid.uuid4().hex[:_ID_LENGTH]))
    return run_id


def _with_check(text: str) -> str:
    """Return `text` with its hash, so that a damaged id is found."""
    return f"{text}-{xxhash.xxh32_hexdigest(text.encode())}"


def wandb_mode() -> str:
    """Return WANDB_MODE if it is set; otherwise online if an API key or a netrc login exists, else offline."""
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


def _kill_wandb_service() -> None:
    """Kill wandb's helper process. Otherwise this process could not exit before the wandb server answers."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb"):
            child.kill()


Points = dict[int, float]  # step -> value
SMOOTHED_STEPS = 10  # number of steps in the moving average of the curve
_HELD_OUT_STYLES = {"eval/reward_sampled": ("#E45756", "o"), "eval/reward_greedy": ("#54A24B", "D")}


class CurveSink:
    """Draws `metric` and held-out reward over the steps. A separate thread draws, after every `every` steps and at the end."""

    def __init__(self, path: Path, *, metric: str = "reward/mean", title: str = "", every: int = 25) -> None:
        self.path, self.metric, self.title, self.every = path, metric, title, every
        self._values: Points = {}
        self._held_out: dict[str, Points] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="curve")  # matplotlib takes a second to import
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

    def close(self) -> None:
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
    """Write a PNG of `values` over the steps, raw and smoothed, with the rewards on held-out prompts on the same axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, raw = list(values), list(values.values())
    axes.plot(steps, raw, color="#4C78A8", alpha=0.3, linewidth=1, label=declared.find(metric).meaning)
    axes.plot(steps, _smooth(raw), color="#4C78A8", linewidth=2.2, label=f"mean of the last {SMOOTHED_STEPS} steps")
    for name, (colour, marker) in _HELD_OUT_STYLES.items():
        if points := held_out.get(name):
            _draw_held_out(axes, points, colour, marker, label=f"held-out reward, {declared.label(name)}")
    axes.set(xlabel="step", ylabel=metric)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.08)
    axes.legend(frameon=False, loc="best", fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")


def _draw_held_out(axes: Any, points: Points, colour: str, marker: str, label: str) -> None:
    axes.plot(list(points), list(points.values()), f"{marker}:", markersize=7, color=colour, label=label)
    style = {"textcoords": "offset points", "va": "center", "color": colour, "fontsize": 10}
    first, last = min(points), max(points)
    axes.annotate(f"{points[first]:.2f}", (first, points[first]), xytext=(-8, 0), ha="right", **style)
    if last != first:
        axes.annotate(f"{points[last]:.2f}", (last, points[last]), xytext=(8, 0), ha="left", **style)


def _smooth(values: Sequence[float], window: int = SMOOTHED_STEPS) -> list[float]:
    """Return the moving average over the last `window` values."""
    return [sum(part) / len(part) for part in (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))]
