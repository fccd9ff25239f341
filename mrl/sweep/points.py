"""Points of a sweep: their overrides, their file, their state, the result table, and the process that runs one point.

A point is a tuple of overrides. Point N runs in FOLDER/N as `mrl train` with these overrides. All its state is in that folder,
so points on this machine and points in Slurm jobs are read in the same way.

`python -m mrl.sweep.points FOLDER INDEX [OVERRIDE ...]` runs one point. Its terminal output goes to terminal.log in the
point's folder and its exit status to status.json, unless the point was preempted and has to be started again.
"""

import csv
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from rich.table import Table

from mrl.config import hydra_entry
from mrl.config.hydra_entry import format_override, override_key
from mrl.core.jsonl import last_lines, write_json
from mrl.core.run_errors import REQUEUE
from mrl.launch import supervisor

Point = tuple[str, ...]
SWEEP_FILE = "sweep.json"  # in the sweep's folder
STATUS_FILE = "status.json"  # in a point's folder, once it has ended: {"status": exit status, "seconds": ...}
METRIC_STEPS = 5  # last steps over which a metric is averaged
RECENT_EVALUATIONS = 20  # last lines of eval.jsonl in which the metric is searched
NOISE = ("restart ", "HYDRA_FULL_ERROR")  # words of log lines that do not tell the cause of a failure


CSV_FILE = "sweep.csv"  # in the sweep's folder


class PointState(StrEnum):
    """State of a point."""

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"

    @property
    def ended(self) -> bool:
        return self in (PointState.done, PointState.failed)


STYLES = {PointState.done: "green", PointState.failed: "red", PointState.running: "yellow"}


@dataclass(frozen=True)
class PointResult:
    """State of one point, and what it has reached so far."""

    index: int
    point: Point
    folder: Path
    state: PointState
    steps: int  # trained
    value: float | None  # of the sweep's metric
    seconds: float  # duration of its last start; 0 until it has ended
    reason: str = ""  # why it failed


@dataclass(frozen=True)
class Sweep:
    """All points of a sweep; each has a folder: FOLDER/0, FOLDER/1, ..."""

    folder: Path
    group: str  # in wandb
    metric: str
    maximize: bool
    fixed: Point  # overrides that all points share
    points: tuple[Point, ...]

    def point_folder(self, index: int) -> Path:
        """Return the folder of a point."""
        return self.folder / str(index)

    def overrides(self, index: int) -> list[str]:
        """Return the overrides with which `mrl train` runs a point."""
        run_dir = format_override("run.dir", self.point_folder(index))
        return [*self.fixed, *self.points[index], run_dir, format_override("tracking.group", self.group)]

    def command(self, index: int) -> str:
        """Return a shell command that trains the point again, in a new run directory."""
        own = [line for line in self.fixed if not override_key(line).startswith(("run.dir", "sweep", "hydra"))]
        return shlex.join(["mrl", "train", *own, *self.points[index]])

    def results(self) -> list[PointResult]:
        """Return the current state of all points, in order."""
        return [self.result(index) for index in range(len(self.points))]

    def result(self, index: int) -> PointResult:
        """Return the current state of a point."""
        return read_result(index, self.points[index], self.point_folder(index), self.metric)

    def clear_status(self, index: int) -> None:
        """Delete the exit status of a point before it runs again."""
        (self.point_folder(index) / STATUS_FILE).unlink(missing_ok=True)

    def write(self) -> None:
        """Write the sweep's file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / SWEEP_FILE, asdict(self))


def split_overrides(lines: Sequence[str]) -> tuple[Point, tuple[Override, ...]]:
    """Split overrides into fixed ones and swept ones (`a=1,2`, `a=range(1,4)`, `a=choice(x,y)`, `a=interval(0,1)`).

    A later override of a key replaces earlier ones. Raises ValueError for a line that Hydra cannot parse.
    """
    parser, parsed = OverridesParser.create(), dict[str, Override]()
    for line in lines:
        try:
            override = parser.parse_override(line)
        except HydraException as error:
            raise ValueError(f"{line!r} cannot be parsed: {str(error).splitlines()[0]}") from None
        parsed[override_key(line)] = override
    fixed = tuple(each.input_line or "" for each in parsed.values() if not each.is_sweep_override())
    return fixed, tuple(each for each in parsed.values() if each.is_sweep_override())


def params_to_overrides(params: Mapping[Any, Any]) -> list[str]:
    """Return `hydra.sweeper.params` as overrides; a list becomes its elements."""
    lines = {
        key: ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in params.items()
    }
    return hydra_entry.check_overrides([f"{key}={value}" for key, value in lines.items()])


def grid_points(swept: Sequence[Override]) -> list[Point]:
    """Return all combinations, in the order of the command line: the last key changes fastest.

    Raises ValueError for an interval, which has no list of values.
    """
    for override in swept:
        if not override.is_discrete_sweep():
            raise ValueError(
                f"{override.input_line!r}: an interval has no list of values; list the values, or add hydra/sweeper=optuna."
            )
    values = [
        [f"{(override.input_line or '').split('=')[0]}={value}" for value in override.sweep_string_iterator()]
        for override in swept
    ]
    return list(itertools.product(*values))


def load_sweep(folder: Path) -> Sweep:
    """Read the sweep in `folder`, which may have been moved; raises ValueError if there is none."""
    try:
        content = json.loads((folder / SWEEP_FILE).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder}: holds no sweep ({SWEEP_FILE} is missing); name the run.dir of one.") from None
    points = tuple(tuple(point) for point in content["points"])
    return Sweep(folder, content["group"], content["metric"], content["maximize"], tuple(content["fixed"]), points)


def differences(stored: Sweep, wanted: Sweep) -> list[str]:
    """Return how the wanted sweep differs from the stored one, in words; additional points at the end are no difference."""
    found = [
        f"{name}: {_shown(getattr(stored, name))} there, {_shown(getattr(wanted, name))} now"
        for name in ("fixed", "metric", "maximize")
        if getattr(stored, name) != getattr(wanted, name)
    ]
    common = min(len(stored.points), len(wanted.points))
    if stored.points[:common] != wanted.points[:common]:
        found.append(f"points: {_shown(stored.points)} there, {_shown(wanted.points)} now")
    return found


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        value = [" ".join(item) if isinstance(item, tuple) else str(item) for item in value]
    return f"{value}"[:200]


def read_result(index: int, point: Point, folder: Path, metric: str) -> PointResult:
    """Read the current state of the point in `folder`."""
    steps = [json.loads(line)["step"] for line in last_lines(folder / "metrics.jsonl", 1)]
    ended = json.loads((folder / STATUS_FILE).read_text()) if (folder / STATUS_FILE).exists() else None
    state, reason = PointState.waiting, ""
    if ended:
        state = PointState.failed if ended["status"] else PointState.done
        reason = f"exit status {ended['status']}: {last_message(folder)}" if ended["status"] else ""
    elif (folder / "terminal.log").exists():
        state = PointState.running
    seconds = float(ended["seconds"]) if ended else 0.0
    return PointResult(index, point, folder, state, sum(steps), metric_value(folder, metric), seconds, reason)


def write_status(folder: Path, status: int, seconds: float) -> None:
    """Record that a point has ended."""
    folder.mkdir(exist_ok=True)
    write_json(folder / STATUS_FILE, {"status": status, "seconds": round(seconds, 1)})


def metric_value(folder: Path, metric: str) -> float | None:
    """Return a metric of the run in `folder`: eval/* of the last evaluation, others averaged over the last METRIC_STEPS steps.

    None if the run has not reported it yet.
    """
    if metric.startswith("eval/"):
        values = _logged_values(folder / "eval.jsonl", metric, RECENT_EVALUATIONS)[-1:]
    else:
        values = _logged_values(folder / "metrics.jsonl", metric, METRIC_STEPS)
    return fmean(values) if values else None


def _logged_values(path: Path, metric: str, count: int) -> list[float]:
    steps = map(json.loads, last_lines(path, count))
    return [step[metric] for step in steps if step.get(metric) is not None]


def last_message(folder: Path) -> str:
    """Return the line of a point's log that most likely explains its failure: the last line of mrl, else the last line."""
    log = folder / "terminal.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not any(word in line for word in NOISE)]
    own = [line for line in lines if line.startswith("mrl: ")]
    return (own or lines or ["terminal.log is empty"])[-1][:300]


def best_point(results: Iterable[PointResult], maximize: bool) -> PointResult | None:
    """Return the point with the best value among those that are done; the first of equal ones."""
    done = [result for result in results if result.state == PointState.done and result.value is not None]
    return max(done, key=lambda result: (result.value or 0.0) * (1 if maximize else -1), default=None)


def swept_keys(sweep: Sweep) -> list[str]:
    """Return the keys in which the points differ."""
    return list(dict.fromkeys(override_key(line) for point in sweep.points for line in point))


def render_table(sweep: Sweep, results: Sequence[PointResult]) -> Table:
    """Return a table with a row for each point; the best point is marked with *."""
    best = best_point(results, sweep.maximize)
    table = Table("point", *swept_keys(sweep), "state", title=str(sweep.folder), title_justify="left")
    for name in ("steps", sweep.metric):
        table.add_column(name, justify="right")
    for result in results:
        mark = " *" if result is best else ""
        state = f"[{STYLES[result.state]}]{result.state}[/]" if result.state in STYLES else result.state
        value = f"{_number(result.value)}{mark}"
        table.add_row(str(result.index), *_swept_values(sweep, result), state, str(result.steps or ""), value)
    return table


def summary_text(sweep: Sweep, results: Sequence[PointResult]) -> str:
    """Return the text below the table: why points failed, which point is the best, and the command that trains it again."""
    failed = [
        f"point {result.index} failed, {result.reason}\n  {result.folder / 'terminal.log'}"
        for result in results
        if result.state == PointState.failed
    ]
    best = best_point(results, sweep.maximize)
    if best is None:
        return "\n".join([*failed, f"no point has ended with {sweep.metric}"])
    found = f"best: point {best.index}, {sweep.metric} {_number(best.value)}, {' '.join(best.point)}"
    return "\n".join([*failed, found, f"  {sweep.command(best.index)}"])


def write_csv(sweep: Sweep, results: Sequence[PointResult]) -> Path:
    """Write the table as CSV; returns its path."""
    path = sweep.folder / CSV_FILE
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", *swept_keys(sweep), "state", "steps", sweep.metric, "seconds", "reason"])
        for each in results:
            value = "" if each.value is None else each.value
            own = _swept_values(sweep, each)
            writer.writerow([each.index, *own, each.state, each.steps, value, each.seconds, each.reason])
    return path


def _swept_values(sweep: Sweep, result: PointResult) -> list[str]:
    own = {override_key(line): line.split("=", 1)[1] for line in result.point}
    return [own.get(key, "") for key in swept_keys(sweep)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def run_point(folder: Path, index: int, overrides: Sequence[str]) -> int:
    """Run a point in a supervised process; returns its exit status. A point that is done does not run again."""
    sweep, start = load_sweep(folder), time.monotonic()
    point_folder = sweep.point_folder(index)
    point_folder.mkdir(exist_ok=True)
    status_file = point_folder / STATUS_FILE
    if status_file.exists() and json.loads(status_file.read_text())["status"] == 0:
        return 0
    status_file.unlink(missing_ok=True)
    with (point_folder / "terminal.log").open("a") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    status = supervisor.supervise("mrl.commands.train_process", [*sweep.overrides(index), *overrides])
    if status != REQUEUE:
        write_status(point_folder, status, time.monotonic() - start)
    return status


if __name__ == "__main__":
    sys.exit(run_point(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
