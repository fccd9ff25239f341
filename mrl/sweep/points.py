"""Points of a sweep: their overrides, their state on disk, the result table, and the process that runs one point.

A point is one run of a sweep, given by the overrides of the swept keys. FOLDER is the folder of the sweep. Point N runs as
`mrl train` with run.dir=FOLDER/N. All state of point N is in FOLDER/N, for points on this machine and for points in Slurm jobs.

`python -m mrl.sweep.points FOLDER INDEX [OVERRIDE ...]` runs one point. It writes the terminal output to terminal.log in the
point's folder. At the end it writes the exit status to status.json. A preempted point writes no status.json: it must run again.
"""

import csv
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
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
from mrl.config.search_path import SEARCH_PATH
from mrl.core.jsonl import last_lines, write_json
from mrl.core.run_errors import REQUEUE_STATUS
from mrl.launch import supervisor

PointOverrides = tuple[str, ...]
"""Overrides in a run of a sweep, usually of the swept keys, such as `("optim.lr=1e-4", "run.seed=0")`."""
SWEEP_FILE = "sweep.json"  # file in the sweep's folder that describes the sweep
STATUS_FILE = "status.json"  # file in the folder of an ended point: {"status": exit status, "seconds": duration}
METRIC_STEPS = 5  # number of last steps over which a metric is averaged
RECENT_EVALUATIONS = 20  # number of last lines of eval.jsonl in which a metric is searched
NOISE_WORDS = ("restart ", "HYDRA_FULL_ERROR")  # log lines with these words do not contain the cause of a failure
CSV_FILE = "sweep.csv"  # file in the sweep's folder with the result table


class PointState(StrEnum):
    """State of a point."""

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"

    @property
    def ended(self) -> bool:
        return self in (PointState.done, PointState.failed)


STYLES = {PointState.done: "green", PointState.failed: "red", PointState.running: "yellow"}  # colors in the table


@dataclass(frozen=True)
class PointResult:
    """State of one point and its results so far."""

    index: int
    point: PointOverrides
    folder: Path
    state: PointState
    steps: int  # number of completed training steps
    value: float | None  # value of the sweep's metric
    seconds: float  # duration of the last call of `run_point`; 0 until the point has ended
    reason: str = ""  # why the point failed


@dataclass(frozen=True)
class Sweep:
    """All points of a sweep. Each point has a folder: FOLDER/0, FOLDER/1, ..."""

    folder: Path
    group: str  # name of the group in wandb
    metric: str  # name of the metric that ranks the points
    maximize: bool  # True: the point with the largest value is the best. False: the point with the smallest value.
    shared_overrides: PointOverrides  # overrides that all points share
    points: tuple[PointOverrides, ...]

    def point_folder(self, index: int) -> Path:
        """Return the folder of a point."""
        return self.folder / str(index)

    def overrides(self, index: int) -> list[str]:
        """Return all overrides with which `mrl train` runs a point."""
        run_dir = format_override("run.dir", self.point_folder(index))
        return [*self.shared_overrides, *self.points[index], run_dir, format_override("tracking.group", self.group)]

    def command(self, index: int) -> str:
        """Return a shell command that runs the point again, in a new run directory."""
        left_out = ("run.dir", "sweep", "hydra", "cluster.dry_run")
        own = [
            each
            for each in self.shared_overrides
            if override_key(each) == SEARCH_PATH or not override_key(each).startswith(left_out)
        ]
        return shlex.join(["mrl", "train", *own, *self.points[index]])

    def results(self) -> list[PointResult]:
        """Return the current states of all points, in order."""
        return [self.result(index) for index in range(len(self.points))]

    def result(self, index: int) -> PointResult:
        """Return the current state of a point."""
        return read_result(index, self.points[index], self.point_folder(index), self.metric)

    def clear_status(self, index: int) -> None:
        """Delete the exit status of a point before it runs again."""
        (self.point_folder(index) / STATUS_FILE).unlink(missing_ok=True)

    def write(self) -> None:
        """Write SWEEP_FILE."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / SWEEP_FILE, asdict(self))


def split_overrides(overrides: Sequence[str]) -> tuple[PointOverrides, tuple[Override, ...]]:
    """Return (overrides with one value, overrides with several values).

    Several values are given as `a=1,2`, `a=range(1,4)`, `a=choice(x,y)` or `a=interval(0,1)`. If a key has several overrides, the
    last one counts. Raises ValueError for an override that Hydra cannot parse.
    """
    parser, parsed = OverridesParser.create(), dict[str, Override]()
    for text in overrides:
        try:
            parsed[override_key(text)] = parser.parse_override(text)
        except HydraException as error:
            raise ValueError(f"{text!r} cannot be parsed: {str(error).splitlines()[0]}") from None
    shared_overrides = tuple(each.input_line or "" for each in parsed.values() if not each.is_sweep_override())
    return shared_overrides, tuple(each for each in parsed.values() if each.is_sweep_override())


def params_to_overrides(params: Mapping[Any, Any], search_path: Sequence[str] = ()) -> list[str]:
    """Return the overrides `key=values` that correspond to `hydra.sweeper.params`. A list of values becomes `key=1,2,3`.

    `search_path`: the override of hydra.searchpath if there is one, to find a user's own config groups.
    """
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in params.items()
    }
    # check_overrides also adds the prefixes + and ++ that Hydra needs
    checked = hydra_entry.check_overrides([*search_path, *(f"{key}={value}" for key, value in texts.items())])
    return checked[len(search_path) :]


def grid_points(swept: Sequence[Override]) -> list[PointOverrides]:
    """Return all combinations of the values. The last key of the command line changes fastest.

    Raises ValueError for an interval, because an interval has no list of values.
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
    """Read the sweep in `folder`. The folder may have been moved.

    Raises ValueError if the folder contains no sweep, or if SWEEP_FILE lacks a key.
    """
    try:
        content = json.loads((folder / SWEEP_FILE).read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: contains no sweep ({SWEEP_FILE} is missing); name the run.dir of a sweep."
        ) from None
    if missing := {field.name for field in fields(Sweep)} - {"folder"} - content.keys():
        raise ValueError(
            f"{folder / SWEEP_FILE}: lacks {', '.join(sorted(missing))}, so another version of mrl wrote it; start the sweep "
            "again, in a new run.dir."
        )
    points = tuple(tuple(point) for point in content["points"])
    shared_overrides = tuple(content["shared_overrides"])
    return Sweep(folder, content["group"], content["metric"], content["maximize"], shared_overrides, points)


def differences(stored: Sweep, wanted: Sweep) -> list[str]:
    """Return the differences between two sweeps in words. Additional points at the end of one sweep do not count."""
    found = [
        f"{name}: {_shortened(getattr(stored, name))} in the folder, {_shortened(getattr(wanted, name))} in this command"
        for name in ("shared_overrides", "metric", "maximize")
        if getattr(stored, name) != getattr(wanted, name)
    ]
    common = min(len(stored.points), len(wanted.points))
    if stored.points[:common] != wanted.points[:common]:
        found.append(f"points: {_shortened(stored.points)} in the folder, {_shortened(wanted.points)} in this command")
    return found


def _shortened(value: object) -> str:
    if isinstance(value, tuple):
        value = [" ".join(item) if isinstance(item, tuple) else str(item) for item in value]
    return f"{value}"[:200]


def read_result(index: int, point: PointOverrides, folder: Path, metric: str) -> PointResult:
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
    """Return a metric of the run in `folder`, or None if the run has not reported the metric yet.

    For a metric eval/*, return the value of the last evaluation. Other metrics are averaged over the last METRIC_STEPS steps.
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
    """Return the log line that most likely explains why a point failed.

    The result is the last line that starts with `mrl: `, or the last line of the log if no line starts with `mrl: `. Lines with
    NOISE_WORDS are ignored.
    """
    log = folder / "terminal.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [
        line.strip() for line in text.splitlines() if line.strip() and not any(word in line for word in NOISE_WORDS)
    ]
    own = [line for line in lines if line.startswith("mrl: ")]
    return (own or lines or ["terminal.log is empty"])[-1][:300]


def best_point(results: Iterable[PointResult], maximize: bool) -> PointResult | None:
    """Return the point with the best value among the points that are done. If values are equal, the first point wins."""
    done = [result for result in results if result.state == PointState.done and result.value is not None]
    return max(done, key=lambda result: (result.value or 0.0) * (1 if maximize else -1), default=None)


def swept_keys(sweep: Sweep) -> list[str]:
    """Return the keys in which the points differ."""
    return list(dict.fromkeys(override_key(override) for point in sweep.points for override in point))


def render_table(sweep: Sweep, results: Sequence[PointResult]) -> Table:
    """Return a table with a row for each point. A * marks the best point."""
    best = best_point(results, sweep.maximize)
    table = Table("point", *swept_keys(sweep), "state", title=str(sweep.folder), title_justify="left")
    for name in ("steps", sweep.metric):
        table.add_column(name, justify="right")
    for result in results:
        mark = " *" if result is best else ""
        state = f"[{STYLES[result.state]}]{result.state}[/]" if result.state in STYLES else result.state
        value = f"{_format_number(result.value)}{mark}"
        table.add_row(str(result.index), *_swept_values(sweep, result), state, str(result.steps or ""), value)
    return table


def summary_text(sweep: Sweep, results: Sequence[PointResult]) -> str:
    """Return the text below the table: why points failed, the best point, and a command that runs the best point again."""
    failed = [
        f"point {result.index} failed, {result.reason}\n  {result.folder / 'terminal.log'}"
        for result in results
        if result.state == PointState.failed
    ]
    best = best_point(results, sweep.maximize)
    if best is None:
        return "\n".join([*failed, f"no point that ended has a value of {sweep.metric}"])
    found = f"best: point {best.index}, {sweep.metric} {_format_number(best.value)}, {' '.join(best.point)}"
    return "\n".join([*failed, found, f"  {sweep.command(best.index)}"])


def write_csv(sweep: Sweep, results: Sequence[PointResult]) -> Path:
    """Write the table as a CSV file, and return the path of this file."""
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
    own = {override_key(override): override.split("=", 1)[1] for override in result.point}
    return [own.get(key, "") for key in swept_keys(sweep)]


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def run_point(folder: Path, index: int, overrides: Sequence[str]) -> int:
    """Run a point in a child process, and return its exit status. A point that is done does not run again.

    The supervisor restarts a child process that crashes.
    """
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
    if status != REQUEUE_STATUS:
        write_status(point_folder, status, time.monotonic() - start)
    return status


if __name__ == "__main__":
    sys.exit(run_point(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
