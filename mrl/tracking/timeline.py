"""Reads the timeline of a run (the spans of all its processes) and merges it into one file.

The file has Chrome's trace event format, which the document "Trace Event Format" by the Chromium authors describes. Perfetto
(ui.perfetto.dev) and chrome://tracing show such files. All times come from the clocks of the machines. The module assumes that
these clocks are synchronized.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from parallel.durable_files import write_file
from parallel.spans import FOLDER

logger = logging.getLogger(__name__)

ROLES = ("driver", "rollout", "engine", "actor", "critic", "teacher")
"""Order of the processes in the merged file. Processes with other roles, such as `reference`, come last."""
MAIN_THREAD = "main"
MICROSECONDS = 1e6  # in a second


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a process."""

    name: str
    kind: str  # see parallel.spans.Kind
    start: float  # seconds since 1970
    seconds: float
    step: int  # training step; 0: before the first step
    args: Mapping[str, Any] = field(default_factory=dict)
    thread: str = MAIN_THREAD

    @property
    def end(self) -> float:
        """Seconds since 1970."""
        return self.start + self.seconds


@dataclass
class ProcessTimeline:
    """The spans of one process, and of the processes that it replaced after a restart or a resume."""

    process: str  # such as "actor rank 0"
    role: str  # driver, rollout, engine, or the role of the model, such as actor
    rank: int
    host: str = ""
    coords: Mapping[str, int] = field(default_factory=dict)  # of a trainer rank: its index on each parallel axis
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0  # number of spans that were not recorded

    def of_kind(self, *kinds: str) -> list[Span]:
        """Return the spans of these kinds."""
        return [span for span in self.spans if span.kind in kinds]


def read_timeline(run_dir: Path, steps: range | None = None) -> list[ProcessTimeline]:
    """Return the timelines of all processes, in the order of ROLES. `steps`: steps to return; None: everything.

    If a run repeated steps, because it was resumed or lost processes, only the spans of the last attempt are returned. Raises
    ValueError if the run has no timeline, or if the timeline has no span of `steps`.
    """
    folder = run_dir / FOLDER
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise ValueError(f"{run_dir}: no timeline was recorded; start the run with tracking.timeline=true.")
    timelines = [timeline for path in files if (timeline := _read_file(path)) is not None]
    recorded = {span.step for timeline in timelines for span in timeline.spans}
    if steps is not None:
        if recorded.isdisjoint(steps):
            raise ValueError(
                f"{run_dir}: no span of the steps {steps.start} to {steps.stop - 1} was recorded; the timeline has the steps "
                f"{min(recorded, default=0)} to {max(recorded, default=0)}."
            )
        for timeline in timelines:
            timeline.spans = [span for span in timeline.spans if span.step in steps]
    order = {role: index for index, role in enumerate(ROLES)}
    return sorted(timelines, key=lambda each: (order.get(each.role, len(ROLES)), each.role, each.rank))


def _read_file(path: Path) -> ProcessTimeline | None:
    """Read the file of one process. Lines that a killed process left incomplete are skipped."""
    timeline: ProcessTimeline | None = None
    new: list[Span] = []  # spans of the last process in the file
    for line in path.read_bytes().splitlines():
        try:
            values = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if "process" in values:
            old = _without_repeated(timeline.spans, new) if timeline else []
            known = {name: values[name] for name in ("process", "role", "rank", "host", "coords") if name in values}
            timeline, new = ProcessTimeline(**known, spans=old, dropped=timeline.dropped if timeline else 0), []
        elif timeline is not None and "dropped" in values:
            timeline.dropped += values["dropped"]
        elif "repeats" in values:
            new = [span for span in new if span.step < values["repeats"]]
        elif "kind" in values:
            new.append(Span(**values))
    if timeline is not None:
        timeline.spans = _without_repeated(timeline.spans, new)
    return timeline


def _without_repeated(old: list[Span], new: list[Span]) -> list[Span]:
    """Return the old spans of the steps before the first step of `new`, and all spans of `new`."""
    first = min((span.step for span in new if span.step), default=None)
    return [span for span in old if first is None or span.step < first] + new


def write_trace(timelines: Sequence[ProcessTimeline], path: Path) -> None:
    """Write the timelines to `path` in the trace event format."""
    trace = dict(traceEvents=list(trace_events(timelines)), displayTimeUnit="ms")
    write_file(path, orjson.dumps(trace).decode())


def trace_events(timelines: Sequence[ProcessTimeline]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace. Times are in microseconds since the first span."""
    origin = min((span.start for timeline in timelines for span in timeline.spans), default=0.0)
    for pid, timeline in enumerate(timelines, start=1):
        yield _metadata("process_name", pid, 0, name=timeline.process)
        yield _metadata("process_labels", pid, 0, labels=timeline.host)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for tid, (name, spans) in enumerate(_rows_of(timeline.spans)):
            yield _metadata("thread_name", pid, tid, name=name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            for span in spans:
                yield dict(
                    name=span.name,
                    cat=span.kind,
                    ph="X",  # a complete event, with start and duration
                    ts=round((span.start - origin) * MICROSECONDS),
                    dur=round(span.seconds * MICROSECONDS),
                    pid=pid,
                    tid=tid,
                    args={"step": span.step, **span.args},
                )


def _metadata(event: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return dict(name=event, ph="M", pid=pid, tid=tid, args=args)


def _rows_of(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    """Yield the rows of a process in the trace, as (name, spans). The main thread comes first.

    The format requires that two spans of a row either nest or do not overlap. The requests of an event loop overlap, and so does
    work in the background. A thread with such spans gets several rows.
    """
    rows: dict[str, list[_Row]] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
        group = "requests" if span.kind == "request" else "background" if "in_background" in span.args else span.thread
        of_group = rows.setdefault(group, [])
        if not any(row.add(span) for row in of_group):
            of_group.append(_Row([span], [span.end]))
    for group in sorted(rows, key=lambda group: (group != MAIN_THREAD, group)):
        for index, row in enumerate(rows[group]):
            yield (group if index == 0 else f"{group} {index + 1}"), row.spans


@dataclass
class _Row:
    """A row of the trace. Spans are added in the order of their start times."""

    spans: list[Span]
    open_ends: list[float]  # ends of the spans that may contain the next span, innermost last

    def add(self, span: Span) -> bool:
        """Add a span if each span of the row that overlaps it also contains it. Returns whether the span was added."""
        while self.open_ends and self.open_ends[-1] <= span.start:
            self.open_ends.pop()
        if self.open_ends and span.end > self.open_ends[-1]:
            return False
        self.spans.append(span)
        self.open_ends.append(span.end)
        return True
