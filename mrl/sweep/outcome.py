"""What became of a point, read from its folder alone: the same whether it ran here or in a job of its own."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mrl.sweep.points import Point

STATUS = "status.json"  # in a point's folder: {"status": exit status, "seconds": ...}, when it has ended
WINDOW = 5  # last steps, whose mean counts
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
    steps = lines(folder / "metrics.jsonl")
    ended = json.loads((folder / STATUS).read_text()) if (folder / STATUS).exists() else None
    state, reason = WAITING, ""
    if ended:
        state = FAILED if ended["status"] else DONE
        reason = f"exit status {ended['status']}: {last_words(folder)}" if ended["status"] else ""
    elif (folder / "terminal.log").exists():
        state = RUNNING
    number = int(steps[-1]["step"]) if steps else 0
    seconds = float(ended["seconds"]) if ended else 0.0
    return Outcome(index, point, folder, state, number, value_of(folder, steps, metric), seconds, reason)


def write_status(folder: Path, status: int, seconds: float) -> None:
    """A point has ended."""
    partial = folder / f"{STATUS}.partial"
    partial.write_text(json.dumps({"status": status, "seconds": round(seconds, 1)}))
    partial.replace(folder / STATUS)


def value_of(folder: Path, steps: Sequence[dict[str, Any]], metric: str) -> float | None:
    """A held-out metric: of the last evaluation. Any other: the mean over the last WINDOW steps. None: not there yet."""
    if metric.startswith("eval/"):
        found = [line[metric] for line in lines(folder / "eval.jsonl") if line.get(metric) is not None][-1:]
    else:
        found = [step[metric] for step in steps[-WINDOW:] if step.get(metric) is not None]
    return fmean(found) if found else None


def lines(path: Path) -> list[dict[str, Any]]:
    """Of a file with a JSON object in each line, one of which may just be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def last_words(folder: Path) -> str:
    """The line that a person would look at first."""
    log = folder / "terminal.log"
    said = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    )
    named = [line for line in said if line.startswith("mrl: ") and "new start" not in line]
    return (named or said or ["nothing was said"])[-1][:300]


def best(outcomes: Iterable[Outcome], maximize: bool) -> Outcome | None:
    """Of those that are done, the first with the best value."""
    done = [outcome for outcome in outcomes if outcome.state == DONE and outcome.value is not None]
    return max(done, key=lambda outcome: (outcome.value or 0.0) * (1 if maximize else -1), default=None)
