"""Trackers of tracking.backends: Weights & Biases (wandb), TensorBoard and MLflow.

Each tracker has its own thread, so that a slow or failing tracker never slows or stops training. The end of a run waits for each
tracker, at most 30 s. If a tracker fails, its thread logs one warning, and the tracker gets no more metrics.
"""

import logging
import netrc
import os
import queue
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import orjson
import psutil
import xxhash

from mrl.config.secrets import flatten_config
from mrl.core.jsonl import check_lines
from mrl.core.sample_file import TextSample
from mrl.tracking.tracker import Metrics
from parallel.durable_files import write_file

logger = logging.getLogger(__name__)

_ID_LENGTH = 12  # number of characters of a wandb run id before the hash at its end
_BLOCK_BYTES, _CHUNK_HEADER_BYTES = 1 << 15, 7  # sizes in an offline file of wandb
_WHOLE, _FIRST, _LAST = 1, 2, 4  # kinds of chunks: a whole record, or its first or last part
PACKAGES = {
    "wandb": ("wandb", "wandb"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow-skinny"),
}
"""Name of a backend -> (module, package on PyPI)."""


def check_installed(backends: Iterable[str]) -> None:
    """Raise ValueError if the package of a backend is not installed."""
    for name in backends:
        module, package = PACKAGES[name]
        if find_spec(module) is None:
            raise ValueError(
                f"tracking.backends has {name}, but its package is not installed; install it with `pip install {package}`, or "
                f"remove {name} from tracking.backends."
            )


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The data of a run that a tracker needs in addition to the metrics."""

    folder: Path  # the run directory
    project: str  # in MLflow, the experiment
    name: str
    group: str | None = None
    entity: str | None = None  # user or team that owns the run; only wandb uses this field
    tags: Sequence[str] = ()
    notes: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  # result of config_as_json, which replaces secrets
    last_step: int = 0  # step from which the run resumes; 0: the run is new
    samples_every: int = 0  # number of steps between two tables of samples; 0: no tables
    read_samples: Callable[[int], Sequence[TextSample]] | None = None  # step -> its samples, or [] if it has none


class ThreadedSink(ABC):
    """A sink that passes metrics to a tracker from a thread. `close` waits at most `deadline_s` seconds for the tracker."""

    name: str

    def __init__(self, run: TrackedRun, *, deadline_s: float = 30.0) -> None:
        self.run, self.deadline_s = run, deadline_s
        # The meaning of an item: (step, metrics): write them; a step: discard all later steps; None: end the thread.
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | int | None] = queue.SimpleQueue()
        self._takes_samples, self._failed = True, False  # whether to write samples; whether the run ends with an error
        run.folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self._put((step, dict(metrics)))

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Let the tracker discard the steps after `last_step`, if it can.

        `evaluated` has no effect: trackers keep the metrics eval/* of `last_step`.
        """
        self._put(last_step)

    def _put(self, item: tuple[int, Metrics] | int) -> None:
        """Pass an item to the thread. If the thread has ended after a failure, drop the item, because nothing would read it."""
        if self._thread.is_alive():
            self._queue.put(item)

    def close(self, failed: bool = False) -> None:
        self._failed = failed
        self._queue.put(None)
        self._thread.join(self.deadline_s)
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish within %.0f s; the run ends without waiting for it", self.name, self.deadline_s
            )
            self._abandon()

    def _work(self) -> None:
        try:
            self._start()
            for step, metrics in self._earlier_metrics():
                self._write(step, metrics)
            while (item := self._queue.get()) is not None:
                if isinstance(item, int):
                    self._rewind(item)
                else:
                    self._write(*item)
                    self._write_due_samples(*item)
            self._finish()
        except Exception as error:
            logger.warning(
                "%s failed and gets no more metrics of this run: %s: %s", self.name, type(error).__name__, error
            )
            self._abandon()

    def _earlier_metrics(self) -> list[tuple[int, Metrics]]:
        """Return metrics in the run directory that the tracker may lack, because a process was killed before it sent them.

        Returns only steps up to the checkpoint from which the run resumes, because the run repeats later steps.
        """
        if not (last := self.run.last_step) or (first := self._first_possibly_missing_step()) > last:
            return []
        found: dict[int, dict[str, float]] = {}
        for name in ("metrics.jsonl", "eval.jsonl"):
            # check_lines leaves out an incomplete last line, which the run may be writing now.
            for step, line in check_lines(self.run.folder / name).lines:
                if first <= step <= last:
                    known = {key: value for key, value in orjson.loads(line).items() if value is not None}
                    found.setdefault(step, {}).update(known)
                    del found[step]["step"]
        return sorted(found.items())

    def _write_due_samples(self, step: int, metrics: Metrics) -> None:
        """Write the samples of a step if they are due. If this fails, the tracker still gets metrics, but no more samples."""
        every, read = self.run.samples_every, self.run.read_samples
        # Only the metrics of a training step contain reward/mean.
        if not (read and every and self._takes_samples) or step % every or "reward/mean" not in metrics:
            return
        try:
            if samples := read(step):
                self._write_samples(step, samples)
        except Exception as error:  # for example, the tracker's artifact store needs another package or another login
            self._takes_samples = False
            logger.warning("%s gets no more samples of this run: %s: %s", self.name, type(error).__name__, error)

    @abstractmethod
    def _start(self) -> None:
        """Import the tracker's package, which takes seconds, and begin or continue the tracker's run."""

    def _first_possibly_missing_step(self) -> int:
        """Return the first step that the tracker may lack. Called after `_start`."""
        return self.run.last_step

    @abstractmethod
    def _write(self, step: int, metrics: Metrics) -> None: ...

    def _write_samples(self, step: int, samples: Sequence[TextSample]) -> None:  # noqa: B027
        """Write samples of a step as a table or as text."""

    def _rewind(self, last_step: int) -> None:  # noqa: B027
        """Let the tracker discard steps after `last_step`, if it can."""

    @abstractmethod
    def _finish(self) -> None: ...

    def _abandon(self) -> None:  # noqa: B027
        """Kill helper processes that would keep this process from exiting."""


SAMPLE_COLUMNS = (
    "step",
    "reward",
    "prompt",
    "response",
    "ground_truth",
    "tokens",
    "truncated",
    "source",
    "reward_parts",
)
"""Columns of a table of samples. reward_parts: the named parts of the reward, as text."""


def sample_rows(step: int, samples: Sequence[TextSample]) -> list[Iterable[Any]]:
    """Return one row for each sample, with the columns SAMPLE_COLUMNS."""
    return [
        [
            step,
            sample.reward,
            sample.prompt,
            sample.response,
            sample.ground_truth or "",
            sample.num_tokens,
            sample.truncated,
            sample.source or "",
            ", ".join(f"{name} {value:.4g}" for name, value in sample.parts.items()),
        ]
        for sample in samples
    ]


class WandbSink(ThreadedSink):
    """Logs to Weights & Biases: online if a login is configured, otherwise offline in the run directory.

    The sink never asks for a login. The id of the wandb run is stored in the run directory, so a resumed run continues the same
    wandb run. Online, the sink does not send again what wandb already has. If a run was preempted before the evaluation of
    a step, wandb shows the metrics eval/* of this step at the next step. Offline, wandb writes a new folder for each process, and
    two folders may contain the same step.
    """

    name = "wandb"

    def __init__(self, run: TrackedRun, *, deadline_s: float = 30.0) -> None:
        if wandb_mode() == "offline" and not os.environ.get("WANDB_MODE"):
            logger.warning(
                "tracking.backends has wandb, but there is no API key (WANDB_API_KEY or `wandb login`): metrics are recorded "
                "offline. `wandb sync %s/wandb/offline-run-*` uploads them; tracking.backends=[] turns trackers off.",
                run.folder,
            )
        super().__init__(run, deadline_s=deadline_s)

    def _start(self) -> None:
        import wandb

        run = self.run
        self._wandb_run = wandb.init(
            project=run.project,
            name=run.name,
            group=run.group,
            entity=run.entity,
            tags=list(run.tags),
            notes=run.notes,
            config=dict(run.config),
            dir=run.folder,
            id=(run_id := _stored_run_id(run.folder / "wandb_run_id")),
            resume="allow",
            mode=cast(Any, wandb_mode()),
            settings=wandb.Settings(console="off", silent=True, init_timeout=self.deadline_s),
        )
        self._offline_files = sorted(run.folder.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))

    def _first_possibly_missing_step(self) -> int:
        """Return the first step that wandb may lack.

        Online, this is the step after the last step that wandb has. Offline, wandb does not know the steps of earlier processes,
        so this method reads their files. The file of a killed process may lack its last steps, because wandb writes only whole
        blocks. The file has no steps if the process was killed in wandb.init.
        """
        if wandb_mode() == "online":
            return self._wandb_run.step
        last = max((step for file in self._offline_files for step in _recorded_steps(file)), default=-1)
        return min(last + 1, self.run.last_step)  # the last step may lack the metrics eval/*

    def _write(self, step: int, metrics: Metrics) -> None:
        first = self._wandb_run.step  # wandb ignores metrics of a step before this one
        if 0 < self.run.last_step == step == first - 1:
            # The process that wrote the checkpoint ended before the evaluation of its last step, so wandb has this step without
            # the metrics eval/*. Only the next step can still take them.
            step, metrics = first, {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if metrics and step >= first:
            self._wandb_run.log(dict(metrics), step=step)

    def _write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        import wandb

        if step >= self._wandb_run.step:
            table = wandb.Table(columns=list(SAMPLE_COLUMNS), data=[*sample_rows(step, samples)])
            self._wandb_run.log({"samples": table}, step=step)

    def _finish(self) -> None:
        import wandb

        if (curve := self.run.folder / "curve.png").exists():
            self._wandb_run.summary["curve"] = wandb.Image(str(curve))
        self._wandb_run.finish(exit_code=int(self._failed))

    def _abandon(self) -> None:
        _kill_wandb_service()


class TensorBoardSink(ThreadedSink):
    """Writes event files for TensorBoard into the folder `tensorboard` of the run directory."""

    name = "tensorboard"

    def _start(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = self.run.folder / "tensorboard"
        self._has_steps = folder.exists()  # whether an earlier process of the run wrote steps
        self._writer = EventFileWriter(str(folder))
        if self._has_steps:  # it is unknown whether the files have the last step, so discard it and write it again
            self._rewind(self.run.last_step - 1)
        lines = (f"    {key}: {value}" for key, value in flatten_config(self.run.config))
        self._write_text("config", self.run.last_step, "\n".join(lines))

    def _first_possibly_missing_step(self) -> int:
        return self.run.last_step if self._has_steps else 0

    def _write(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto import summary_pb2

        summary = cast(Any, summary_pb2).Summary  # generated class without types
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step=step, summary=summary(value=values))
        self._writer.flush()

    def _write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        self._write_text("samples", step, "\n\n".join(sample.text() for sample in samples))

    def _write_text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.plugins.text.summary import text_pb

        indented = "\n".join(f"    {line}" for line in text.splitlines())  # a code block in Markdown
        self._add(step=step, summary=text_pb(tag, indented))

    def _rewind(self, last_step: int) -> None:
        """Write a session start for step `last_step` + 1.

        TensorBoard then discards all events of this step and of later steps that are already in the files.
        """
        from tensorboard.compat.proto import event_pb2

        session_log = cast(Any, event_pb2).SessionLog
        self._add(step=last_step + 1, session_log=session_log(status=session_log.START))

    def _add(self, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._writer.add_event(cast(Any, event_pb2).Event(wall_time=time.time(), **content))

    def _finish(self) -> None:
        self._writer.close()


class MlflowSink(ThreadedSink):
    """Logs to the MLflow server of MLFLOW_TRACKING_URI, or else to the folder `mlflow` of the run directory.

    The id of the MLflow run is stored in the run directory, so a resumed run continues the same MLflow run. The sink does not
    send again what MLflow already has.
    """

    name = "mlflow"
    METRICS_PER_REQUEST = 1000  # limit of MLflow
    PARAMETERS_PER_REQUEST = 100  # limit of MLflow
    VALUE_CHARACTERS = 6000  # limit of MLflow

    def _start(self) -> None:
        # Without this variable, MLflow refuses a folder as its store. mlflow-skinny supports no database, so a folder is the only
        # local store.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        folder = self.run.folder.resolve() / "mlflow"
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or folder.as_uri())
        self._metric = Metric
        stored = self.run.folder / "mlflow_run_id"
        self._last: dict[str, int] = {}  # metric -> last step that MLflow has
        if stored.exists() and self._continue(stored.read_text().strip()):
            return
        found = self._client.get_experiment_by_name(self.run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(self.run.project)
        tags = {tag: "true" for tag in self.run.tags} | {"mlflow.note.content": self.run.notes or ""}
        tags |= {"group": self.run.group} if self.run.group else {}
        self._id = self._client.create_run(experiment, run_name=self.run.name, tags=tags).info.run_id
        write_file(stored, self._id)
        values = flatten_config(self.run.config)
        parameters = [Param(key, str(value)[: self.VALUE_CHARACTERS]) for key, value in values]
        for start in range(0, len(parameters), self.PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._id, params=parameters[start : start + self.PARAMETERS_PER_REQUEST])

    def _continue(self, run_id: str) -> bool:
        """Continue the MLflow run `run_id`. Returns False if the server has no such run, for example because it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, "RUNNING")
            metrics = self._client.get_run(run_id).data.metrics
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning(
                "MLflow no longer has the run %s, whose id is in mlflow_run_id; a new MLflow run is created", run_id
            )
            return False
        self._id = run_id
        for name in metrics:
            self._last[name] = max(point.step for point in self._client.get_metric_history(run_id, name))
        return True

    def _first_possibly_missing_step(self) -> int:
        return max(self._last.values(), default=0)

    def _write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        new = {name: value for name, value in metrics.items() if step > self._last.get(name, -1)}
        points = [self._metric(name, value, now, step) for name, value in new.items()]
        self._last |= dict.fromkeys(new, step)
        for start in range(0, len(points), self.METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics=points[start : start + self.METRICS_PER_REQUEST])

    def _write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        text = "\n\n".join(sample.text() for sample in samples)
        self._client.log_text(self._id, text, f"samples/step_{step:06d}.txt")

    def _finish(self) -> None:
        self._client.set_terminated(self._id, "FAILED" if self._failed else "FINISHED")


TRACKER_SINKS: dict[str, type[ThreadedSink]] = {sink.name: sink for sink in (WandbSink, TensorBoardSink, MlflowSink)}


def default_run_name(name: str, folder: Path) -> str:
    """Return a name that distinguishes runs in a tracker: the name of the run, and the name of its folder.

    In a sweep, the name of a run's folder is only a number, so the result also contains the name of the sweep's folder.
    """
    folder = folder.resolve()
    parts = [folder.parent.name, folder.name] if folder.name.isdigit() else [folder.name]
    return "/".join(part for part in [name, *parts] if part)


def _stored_run_id(path: Path) -> str:
    """Return the run id that is stored in `path`. If the file is missing or damaged, first store a new id."""
    stored = path.read_text(errors="replace") if path.exists() else None
    if stored is not None and stored == _with_check(stored[:_ID_LENGTH]):
        return stored
    if stored is not None:
        logger.warning("%s is damaged: it has %r instead of a run id; wandb gets a new run", path, stored[:100])
    write_file(path, run_id := _with_check(uuid.uuid4().hex[:_ID_LENGTH]))
    return run_id


def _with_check(text: str) -> str:
    """Append its hash to `text`. The hash shows later whether a stored id is damaged."""
    return f"{text}-{xxhash.xxh32_hexdigest(text.encode())}"


def _recorded_steps(file: Path) -> Iterator[int]:
    """Yield the steps whose metrics are in an offline file of wandb (0.31), which has the block format of a LevelDB log.

    A block contains chunks of records. A chunk begins with a checksum (4 bytes), its length (2) and its kind (1). wandb writes
    only whole blocks until the run ends, so the last record of the file may be incomplete.
    """
    from wandb.proto import wandb_internal_pb2

    parse = cast(Any, wandb_internal_pb2).Record.FromString  # the class is generated and has no types
    data, record, position = file.read_bytes(), b"", _CHUNK_HEADER_BYTES  # the file header is as long as a chunk header
    while position + _CHUNK_HEADER_BYTES <= len(data):
        if (left := _BLOCK_BYTES - position % _BLOCK_BYTES) < _CHUNK_HEADER_BYTES:
            position += left  # padding
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        start = position + _CHUNK_HEADER_BYTES
        position = start + size
        record = data[start:position] if kind in (_WHOLE, _FIRST) else record + data[start:position]
        if kind in (_WHOLE, _LAST) and (parsed := parse(record)).HasField("history"):
            yield parsed.history.step.num


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
    """Kill wandb's helper process. Otherwise this process could not exit until the wandb server answers."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb"):
            child.kill()
