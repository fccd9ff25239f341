"""Reads the timeline of a run (the spans of all its processes), merges it into one file, and summarizes it.

The file has Chrome's trace event format, which the document "Trace Event Format" by the Chromium authors describes. Perfetto
(ui.perfetto.dev) and chrome://tracing show such files. All times come from the clocks of the machines. The module assumes that
these clocks are synchronized.

The summary consists of sentences. They say how a step's time is divided among its phases, and which rank is slowest.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from parallel.durable_files import write_file
from parallel.spans import FOLDER

logger = logging.getLogger(__name__)

ROLES = ("driver", "rollout", "engine", "actor", "critic", "teacher")
"""Order of the processes in the merged file. Processes with other roles, such as `reference`, come last."""
MAIN_THREAD = "main"  # thread of a span that names no thread
MICROSECONDS = 1e6  # in a second


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of a process."""

    name: str
    kind: str  # such as "phase", "micro_batch" or "request"; parallel.spans.Kind has all values
    start: float  # seconds since 1970
    seconds: float
    step: int  # training step; 0: before the first step
    args: Mapping[str, Any] = field(default_factory=dict)  # further values, such as tokens
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
    new: list[Span] = []  # spans of the process whose header came last
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
        elif "repeats" in values:  # the process begins this step again
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

    The format requires that two spans of a row either nest or do not overlap. Requests of an event loop overlap, and so does
    background work. The requests of all threads therefore get rows of their own (requests, requests 2, ...), and so does the
    background work of all threads.
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
        """Add the span and return True. If it partly overlaps a span of the row, do not add it and return False."""
        while self.open_ends and self.open_ends[-1] <= span.start:
            self.open_ends.pop()
        if self.open_ends and span.end > self.open_ends[-1]:
            return False
        self.spans.append(span)
        self.open_ends.append(span.end)
        return True


NOISE = 0.03  # a rank is called slow if it computes longer than the others by more than this fraction
PASSES = "forward and backward"  # name of the span that contains the micro-batches of one optimizer step
SMALLEST_SHARE = 0.005  # phases with a smaller share of the time are not named
LAST_PHASE = "weight_sync"  # a step is complete if the driver has finished this phase
BETWEEN_STEPS = ("evaluate", "checkpoint")  # phases that are not part of a step's duration


def summarize(timelines: Sequence[ProcessTimeline]) -> list[str]:
    """Return the summary of the complete steps in `timelines`. Raises ValueError if there is no complete step."""
    phases = [span for timeline in timelines if timeline.role == "driver" for span in timeline.of_kind("phase")]
    complete = {span.step for span in phases if span.name == LAST_PHASE}
    if not complete:
        raise ValueError("The timeline has no complete step yet, so there is no summary.")
    phases = [span for span in phases if span.step in complete]
    timelines = [_only_steps(timeline, complete) for timeline in timelines]
    seconds = _seconds_by_name(span for span in phases if span.name not in BETWEEN_STEPS)
    total, longest_phase = sum(seconds.values()), max(seconds, key=lambda name: seconds[name])
    shares = ", ".join(
        f"{name} {percent(part / total)}" for name, part in _largest_first(seconds) if part >= SMALLEST_SHARE * total
    )
    count = f"{len(complete)} step{'s' if len(complete) > 1 else ''}"
    found = [f"{count} took {total / len(complete):.2f} s on average, without evaluation and checkpoints: {shares}."]
    found += between_steps_text(_seconds_by_name(span for span in phases if span.name in BETWEEN_STEPS))
    rollout = _rollout_sentences(timelines, [span for span in phases if span.name == "rollout"])
    trainer = [sentence for role in ("actor", "critic") for sentence in _trainer_sentences(timelines, role)]
    sync = _sync_sentences(timelines, seconds.get(LAST_PHASE, 0.0))
    reasons = {"rollout": rollout, "update": trainer, "weight_sync": sync}.get(longest_phase, [])
    found.append(f"The phase {longest_phase} takes the most time" + (f": {_as_clause(reasons[0])}" if reasons else "."))
    return found + [sentence for part in (rollout, trainer, sync) for sentence in part if sentence not in reasons[:1]]


def between_steps_text(seconds: Mapping[str, float]) -> list[str]:
    """Say how long evaluations and checkpoints take. `seconds`: phase of BETWEEN_STEPS -> its seconds in all steps."""
    words = {"evaluate": "evaluations took", "checkpoint": "checkpoints took"}
    parts = [f"{words[name]} {seconds[name]:.2f} s" for name in BETWEEN_STEPS if seconds.get(name, 0.0) >= 0.005]
    return [f"Between the steps, {' and '.join(parts)} in all."] if parts else []


def _only_steps(timeline: ProcessTimeline, steps: Iterable[int]) -> ProcessTimeline:
    spans = [span for span in timeline.spans if span.step in steps]
    return ProcessTimeline(timeline.process, timeline.role, timeline.rank, timeline.host, timeline.coords, spans)


# Rollout.


def _rollout_sentences(timelines: Sequence[ProcessTimeline], phases: Sequence[Span]) -> list[str]:
    """Say how much of the rollout's time the engines, the tail and rewards take, and how many tokens are sampled.

    `phases`: the driver's spans of the rollout. The tail begins when half of a step's requests have ended.
    """
    intervals, found = [(span.start, span.end) for span in phases], []
    total = sum(span.seconds for span in phases)
    engines = [timeline for timeline in timelines if timeline.role == "engine" and timeline.of_kind("engine_batch")]
    if not total:
        return []
    if engines:
        busy = [
            overlap_seconds([(span.start, span.end) for span in engine.of_kind("engine_batch")], intervals) / total
            for engine in engines
        ]
        least, most = percent(min(busy)), percent(max(busy))
        share = most if least == most else f"{least} to {most}"
        found.append(f"The engines compute during {share} of the rollout.")
    ends_inside = [
        span
        for timeline in timelines
        for span in timeline.of_kind("request")
        if any(start < span.end <= end for start, end in intervals)
    ]
    if requests := ends_inside:
        tail_s = sum(_tail_seconds(requests, interval) for interval in intervals)
        tokens = sum(span.args.get("tokens", 0) for span in requests)
        found.append(
            f"In all, requests sampled {tokens:,} tokens. The tail of the rollout, in which the slower half of a step's "
            f"requests ends, takes {percent(tail_s / total)} of the rollout."
        )
    rewards = [(span.start, span.end) for timeline in timelines for span in timeline.of_kind("reward")]
    if rewards:
        found.append(
            f"Rewards are computed during {percent(overlap_seconds(rewards, intervals) / total)} of the rollout."
        )
    return found


def _tail_seconds(requests: Sequence[Span], interval: tuple[float, float]) -> float:
    """Return the seconds from the median end to the last end of the requests that end in `interval`."""
    start, end = interval
    ends = sorted(span.end for span in requests if start < span.end <= end)
    return ends[-1] - ends[(len(ends) - 1) // 2] if ends else 0.0


# Trainer ranks.


@dataclass(frozen=True)
class RankWork:
    """Times of one trainer rank in its forward and backward passes."""

    timeline: ProcessTimeline
    passes_s: float  # forward and backward passes, with all waits
    computing_s: float  # micro-batches; with tp or cp, this includes waits for ranks that compute the same micro-batch
    reducing_s: float  # gradient reduction, with the wait for the slowest rank
    tokens: int  # tokens of all forward passes

    @property
    def other_s(self) -> float:
        """Seconds of the passes in which the rank neither computes a micro-batch nor reduces gradients.

        With several pipeline stages, the rank mostly waits for other stages during this time.
        """
        return max(0.0, self.passes_s - self.computing_s - self.reducing_s)


def rank_work(timeline: ProcessTimeline) -> RankWork:
    """Return the times of a trainer rank in its forward and backward passes."""
    passes = [span for span in timeline.spans if span.name == PASSES]
    inside = _contained(timeline.of_kind("micro_batch", "collective"), passes)
    computing = [span for span in inside if span.kind == "micro_batch"]
    return RankWork(
        timeline,
        passes_s=sum(span.seconds for span in passes),
        computing_s=sum(span.seconds for span in computing),
        reducing_s=sum(span.seconds for span in inside if span.name == "gradient reduction"),
        tokens=sum(span.args.get("tokens", 0) for span in computing if span.name == "forward"),
    )


def trainer_ranks(timelines: Sequence[ProcessTimeline]) -> list[RankWork]:
    """Return the times of each rank of the actor and of the critic. The result omits ranks without passes."""
    work = [rank_work(timeline) for role in ("actor", "critic") for timeline in timelines if timeline.role == role]
    return [rank for rank in work if rank.passes_s]


def _contained(spans: Iterable[Span], containers: Sequence[Span]) -> list[Span]:
    """Return the spans that begin inside one of `containers`. The containers must not overlap."""
    found, index, ordered = [], 0, sorted(containers, key=lambda span: span.start)
    for span in sorted(spans, key=lambda span: span.start):
        while index < len(ordered) and ordered[index].end <= span.start:
            index += 1
        if index < len(ordered) and ordered[index].start <= span.start:
            found.append(span)
    return found


def _trainer_sentences(timelines: Sequence[ProcessTimeline], role: str) -> list[str]:
    """Say what the ranks of a model do in forward and backward passes, and which rank the others wait for."""
    work = [rank for rank in map(rank_work, (each for each in timelines if each.role == role)) if rank.passes_s]
    if not work:
        return []
    passes_s = sum(rank.passes_s for rank in work)
    computing, reducing, other = (
        percent(sum(getattr(rank, name) for rank in work) / passes_s)
        for name in ("computing_s", "reducing_s", "other_s")
    )
    has_stages = any(rank.timeline.coords.get("pp", 0) for rank in work)
    found = [
        f"In forward and backward passes, the {role} ranks spend {computing} of the time on micro-batches, {reducing} on "
        f"gradient reduction and {other} on {'waits for other pipeline stages' if has_stages else 'other work'}."
    ]
    stages = defaultdict(list)
    for rank in work:
        stages[rank.timeline.coords.get("pp", 0)].append(rank)
    return found + [sentence for ranks in stages.values() if (sentence := _slowest_rank_sentence(ranks))]


def _slowest_rank_sentence(ranks: Sequence[RankWork]) -> str:
    """Say which rank of a pipeline stage computes longest, and why. Returns "" if no rank is slower by more than NOISE."""
    if len(ranks) < 2:
        return ""
    slowest = max(ranks, key=lambda rank: rank.computing_s)
    others = [rank for rank in ranks if rank is not slowest]
    usual_s = median(rank.computing_s for rank in others)
    if slowest.computing_s <= (1 + NOISE) * usual_s or not usual_s:
        return ""
    excess = slowest.computing_s / usual_s - 1
    more_tokens = slowest.tokens / max(1.0, median(rank.tokens for rank in others)) - 1
    if more_tokens > NOISE:
        why = f"its micro-batches have {percent(more_tokens)} more tokens"
    elif slowest.timeline.host not in {rank.timeline.host for rank in others}:
        why = f"it has no more tokens than the others, so its host {slowest.timeline.host} is slower"
    else:
        why = f"it has no more tokens than others on {slowest.timeline.host}, so its device is slower or shared"
    return f"{slowest.timeline.process} computes {percent(excess)} longer than the others: {why}."


# Weight sync.


def _sync_sentences(timelines: Sequence[ProcessTimeline], total_s: float) -> list[str]:
    """Say which fraction of the weight sync is spent on sending, and which on waiting for engines.

    Each of the two fractions is the maximum over the ranks. `total_s`: seconds of the weight syncs of all steps.
    """
    senders = [
        [span for span in timeline.of_kind("weight_sync") if span.name in ("send bucket", "wait for engines")]
        for timeline in timelines
        if timeline.role == "actor"
    ]
    senders = [spans for spans in senders if spans]
    if not senders or not total_s:
        return []
    seconds = [_seconds_by_name(spans) for spans in senders]
    sending = max(each.get("send bucket", 0.0) for each in seconds)
    waiting = max(each.get("wait for engines", 0.0) for each in seconds)
    return [
        f"On the rank that sends longest, sending takes {percent(sending / total_s)} of the weight sync. On the rank that waits "
        f"longest for engines, waiting takes {percent(waiting / total_s)}."
    ]


# Helpers.


def overlap_seconds(spans: Sequence[tuple[float, float]], intervals: Sequence[tuple[float, float]]) -> float:
    """Return for how many seconds of `intervals` at least one of `spans` runs. The intervals must not overlap.

    Intervals and spans are pairs (start, end).
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    seconds, index, ordered = 0.0, 0, sorted(intervals)
    for start, end in merged:
        while index < len(ordered) and ordered[index][1] <= start:
            index += 1
        for first, last in ordered[index:]:
            if first >= end:
                break
            seconds += min(end, last) - max(start, first)
    return seconds


def _seconds_by_name(spans: Iterable[Span]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.name] += span.seconds
    return dict(seconds)


def _largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def percent(fraction: float) -> str:
    """Return a fraction as text for a sentence, such as 42%. A positive fraction below 1 % becomes <1%."""
    return "<1%" if 0 < fraction < 0.01 else f"{fraction:.0%}"


def _as_clause(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
