"""What a sweep shows: a table of its points while they run and at the end, and the same as a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from mrl.config.overrides import key_of
from mrl.sweep.outcome import DONE, FAILED, RUNNING, Outcome, best
from mrl.sweep.plan import Sweep

STYLES = {DONE: "green", FAILED: "red", RUNNING: "yellow"}
FILE = "sweep.csv"


def keys(sweep: Sweep) -> list[str]:
    """What is swept."""
    return list(dict.fromkeys(key_of(line) for point in sweep.points for line in point))


def rendered(sweep: Sweep, outcomes: Sequence[Outcome]) -> Table:
    """A line for each point, the best marked."""
    leader = best(outcomes, sweep.maximize)
    table = Table("point", *keys(sweep), "state", title=str(sweep.folder), title_justify="left")
    for name in ("steps", sweep.metric):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        mark = " *" if outcome is leader else ""
        state = f"[{STYLES[outcome.state]}]{outcome.state}[/]" if outcome.state in STYLES else outcome.state
        table.add_row(
            str(outcome.index),
            *_values(sweep, outcome),
            state,
            str(outcome.steps or ""),
            f"{_number(outcome.value)}{mark}",
        )
    return table


def closing(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """Below the table: why points failed, which one is the best, and the line that trains it again."""
    ended = [one for one in outcomes if one.state == FAILED]
    failed = [f"point {one.index} failed, {one.reason}\n  {one.folder / 'terminal.log'}" for one in ended]
    leader = best(outcomes, sweep.maximize)
    if leader is None:
        return "\n".join([*failed, f"no point has ended with {sweep.metric}"])
    found = f"best: point {leader.index}, {sweep.metric} {_number(leader.value)}, {' '.join(leader.point)}"
    return "\n".join([*failed, found, f"  {sweep.command(leader.index)}"])


def write_csv(sweep: Sweep, outcomes: Sequence[Outcome]) -> Path:
    """The table for other programs."""
    path = sweep.folder / FILE
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", *keys(sweep), "state", "steps", sweep.metric, "seconds", "reason"])
        for one in outcomes:
            value = "" if one.value is None else one.value
            writer.writerow([one.index, *_values(sweep, one), one.state, one.steps, value, one.seconds, one.reason])
    return path


def _values(sweep: Sweep, outcome: Outcome) -> list[str]:
    own = {key_of(line): line.split("=", 1)[1] for line in outcome.point}
    return [own.get(key, "") for key in keys(sweep)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
