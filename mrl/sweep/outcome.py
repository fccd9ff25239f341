"""What became of a point, read from its folder alone: the same whether it ran here or in a job of its own."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mrl.core.durable_files import last_lines, write_json
from mrl.sweep.points import Point

STATUS = "status.json"  # in a point's folder: {"status": exit status, "seconds": ...}, when it has ended
WINDOW = 5  # last steps, whose mean counts
EVALUATIONS = 20  # last ones, of which the latest with the metric counts
NOISE = ("new start", "HYDRA_FULL_ERROR")  # in lines that say nothing of a cause
WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"


@dataclass(frozen=True)
class Outcome:
    """A point at this moment."""

    index: int
    point: Point
    folder: Path
    state: str  # waiting, running, done or failed
    steps: int  # trained
    value: float | None  # of the sweep's metric, so far
    seconds: float  # of its last start, once it has ended
    reason: str = ""  # why it failed


def read(index: int, point: Point, folder: Path, metric: str) -> Outcome:
    """Where the point in `folder` is now."""
    steps = [json.loads(line)["step"] for line in last_lines(folder / "metrics.jsonl", 1)]
    ended = json.loads((folder / STATUS).read_text()) if (folder / STATUS).exists() else None
    state, reason = WAITING, ""
    if ended:
        state = FAILED if ended["status"] else DONE
        reason = f"exit status {ended['status']}: {last_words(folder)}" if ended["status"] else ""
    elif (folder / "terminal.log").exists():
        state = RUNNING
    seconds = float(ended["seconds"]) if ended else 0.0
    return Outcome(index, point, folder, state, sum(steps), value_of(folder, metric), seconds, reason)


def write_status(folder: Path, status: int, seconds: float) -> None:
    """A point has ended."""
    folder.mkdir(exist_ok=True)
    write_json(folder / STATUS, {"status": status, "seconds": round(seconds, 1)})


def value_of(folder: Path, metric: str) -> float | None:
    """A held-out metric: of the last evaluation. Any other: the mean over the last WINDOW steps. None: not there yet."""
    if metric.startswith("eval/"):
        found = _values(folder / "eval.jsonl", metric, EVALUATIONS)[-1:]
    else:
        found = _values(folder / "metrics.jsonl", metric, WINDOW)
    return fmean(found) if found else None


def _values(path: Path, metric: str, count: int) -> list[float]:
    steps = map(json.loads, last_lines(path, count))
    return [step[metric] for step in steps if step.get(metric) is not None]


def last_words(folder: Path) -> str:
    """The line that a person would look at first."""
    log = folder / "terminal.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    said = [line.strip() for line in text.splitlines() if line.strip() and not any(word in line for word in NOISE)]
    named = [line for line in said if line.startswith("mrl: ")]
    return (named or said or ["nothing was said"])[-1][:300]


def best(outcomes: Iterable[Outcome], maximize: bool) -> Outcome | None:
    """Of those that are done, the first with the best value."""
    done = [outcome for outcome in outcomes if outcome.state == DONE and outcome.value is not None]
    return max(done, key=lambda outcome: (outcome.value or 0.0) * (1 if maximize else -1), default=None)
