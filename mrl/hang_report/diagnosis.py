"""Diagnosis of a hang: reads snapshots of all processes, finds the processes for which others wait, and composes the report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mrl.hang_report.process_snapshot import ProcessSnapshot
from parallel.collective_log import LastCollective

MAX_SHOWN_ACTIVITIES = 3
# Crash message of SIGABRT, with which NCCL's watchdog ends a rank that has waited too long for another rank
ABORTED = "Aborted"
NO_CRASH_MESSAGE = "no error message; killed by SIGKILL (possibly out of memory), or ended by os._exit"


@dataclass(frozen=True)
class HangDiagnosis:
    """The processes for which the other processes wait, and a description of what the processes are doing."""

    blamed: tuple[ProcessSnapshot, ...]  # empty if no process differs from the others
    sentence: str  # describes each blamed process and each process that was called and has not answered


def diagnose(snapshots: Sequence[ProcessSnapshot], is_pending: Callable[[ProcessSnapshot], bool]) -> HangDiagnosis:
    """Find the processes to blame. `is_pending` tells whether a process is pending: it was called and has not answered.

    The first of these rules that finds processes decides which processes are blamed:
    1. pending processes that died, except ranks that NCCL's watchdog ended because they waited for another rank;
    2. pending processes that do not wait and have entered fewer collectives than a rank that the watchdog ended; that rank
       probably waited for such a process;
    3. pending ranks that the watchdog ended;
    4. processes that died and are not pending;
    5. stopped processes;
    6. pending processes that do not wait;
    7. pending processes that wait, but neither for other ranks nor for a call;
    8. pending ranks that have entered fewer collectives than other members of a process group;
    9. pending processes that wait for their next call although their last call has not ended.
    """
    pending = [snapshot for snapshot in snapshots if is_pending(snapshot)]
    blamed = _find_blamed(snapshots, pending)
    others = [snapshot for snapshot in pending if snapshot not in blamed]
    parts = [describe_process(snapshot, describe_collective_lag(snapshot, snapshots)) for snapshot in blamed]
    parts += [f"{_join_titles(group)} {_to_plural(text, group)}" for text, group in _group_alike(others)]
    return HangDiagnosis(
        tuple(blamed), "; ".join(parts) or "no process has died, is stopped, or has an unanswered call"
    )


def _find_blamed(snapshots: Sequence[ProcessSnapshot], pending: Sequence[ProcessSnapshot]) -> list[ProcessSnapshot]:
    aborted = [snapshot for snapshot in pending if snapshot.crash == ABORTED]
    rules: list[tuple[Sequence[ProcessSnapshot], Callable[[ProcessSnapshot], bool]]] = [
        (pending, lambda one: one.dead and one.crash != ABORTED),
        (pending, lambda one: not one.dead and _is_working(one) and bool(describe_collective_lag(one, aborted))),
        (pending, lambda one: one.dead),
        (snapshots, lambda one: one.dead),
        (snapshots, lambda one: one.stopped),
        (pending, _is_working),
        (pending, lambda one: one.summary.waits_for not in ("", "other ranks", "a call")),
        (pending, lambda one: bool(describe_collective_lag(one, snapshots))),
        (pending, lambda one: one.summary.waits_for == "a call"),
    ]
    for candidates, is_blamed in rules:
        if blamed := [snapshot for snapshot in candidates if is_blamed(snapshot)]:
            return blamed
    return []


def _is_working(snapshot: ProcessSnapshot) -> bool:
    return bool(snapshot.stacks) and not snapshot.summary.waits_for


def describe_process(snapshot: ProcessSnapshot, lag: str = "") -> str:
    """Describe in a sentence what a process is doing. `lag`: result of `describe_collective_lag`."""
    activities = f" while {_join_activities(snapshot)}" if snapshot.activities and not snapshot.dead else ""
    return f"{snapshot.title} {_describe_state(snapshot)}{activities}{lag}"


def _describe_state(snapshot: ProcessSnapshot) -> str:
    if snapshot.dead:
        activities = f" while {_join_activities(snapshot)}" if snapshot.activities else ""
        return f"died{activities}: {snapshot.crash or NO_CRASH_MESSAGE}"
    if snapshot.stopped:
        pid = snapshot.record.pid
        return f"is {snapshot.state} (pid {pid}; `kill -CONT {pid}` resumes it)"
    return f"{snapshot.summary}" if snapshot.stacks else f"is {snapshot.state}, and its stack could not be read"


def describe_collective_lag(snapshot: ProcessSnapshot, snapshots: Sequence[ProcessSnapshot]) -> str:
    """Describe in which process groups a rank has entered fewer collectives than other members; "" if there are none."""
    lags = []
    for own in snapshot.collectives:
        others = [
            log
            for other in snapshots
            if other.record.model == snapshot.record.model
            for log in _logs_of_group(own, other)
        ]
        most = max((log.num_collectives for log in others), default=0)
        if most > own.num_collectives:
            last = next(_describe_operation(log) for log in others if log.num_collectives == most)
            lags.append(
                f"has entered {own.num_collectives} collectives of the {describe_group(own)}, "
                f"but another member has entered {most} (the last: {last})"
            )
    return f"; it {'; it '.join(lags)}" if lags else ""


def _logs_of_group(own: LastCollective, other: ProcessSnapshot) -> list[LastCollective]:
    return [log for log in other.collectives if (log.group, log.ranks) == (own.group, own.ranks)]


def describe_group(last: LastCollective) -> str:
    """Return the name of a process group, such as 'process group "data parallel" (ranks 0, 1)'."""
    ranks = ", ".join(map(str, last.ranks[:8])) + (", ..." if len(last.ranks) > 8 else "")
    purpose = last.purpose.lower().replace("_", " ").replace(" group", "").replace("model parallel", "parallel")
    return f'process group "{purpose if purpose not in ("", "undefined") else last.group}" (ranks {ranks})'


def _describe_operation(last: LastCollective) -> str:
    return f"{last.operation}, {format_bytes(last.nbytes)}"


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes with a decimal unit, such as "1.2 MB"."""
    amount = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"


def _join_activities(snapshot: ProcessSnapshot) -> str:
    return ", ".join(activity.text for activity in snapshot.activities[-MAX_SHOWN_ACTIVITIES:])


def _group_alike(snapshots: Sequence[ProcessSnapshot]) -> list[tuple[str, list[ProcessSnapshot]]]:
    """Group processes of one model and role that do the same work. Returns (description, members) of each group."""

    def key(one: ProcessSnapshot) -> tuple[str, ...]:
        work = (one.summary.purpose, one.summary.waits_for) if one.stacks else (one.state,)
        return (*work, one.record.role, one.record.model)

    groups = (list(part) for _, part in groupby(sorted(snapshots, key=key), key))
    return [(_describe_alike(group), group) for group in groups]


def _describe_alike(snapshots: Sequence[ProcessSnapshot]) -> str:
    """Describe processes that do the same work. The result omits file and line if they differ between the processes."""
    texts = [_describe_state(snapshot) for snapshot in snapshots]
    return texts[0] if len(set(texts)) == 1 else texts[0].partition(" (")[0]


def _join_titles(snapshots: Sequence[ProcessSnapshot]) -> str:
    if len(snapshots) == 1 or snapshots[0].record.role != "rank":
        return ", ".join(snapshot.title for snapshot in snapshots)
    model = f"{snapshots[0].record.model} " if snapshots[0].record.model else ""
    return f"{model}ranks {format_ranks(sorted(snapshot.record.rank for snapshot in snapshots))}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format sorted ranks as ranges, such as "0-2, 4, 6-7"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)


def _to_plural(text: str, snapshots: Sequence[ProcessSnapshot]) -> str:
    """Put the first word of `text`, a verb, into the plural if there are several snapshots."""
    if len(snapshots) == 1:
        return text
    verb, _, rest = text.partition(" ")
    return f"{ {'is': 'are', 'waits': 'wait', 'has': 'have'}.get(verb, verb) } {rest}"


def report_text(
    reason: str,
    diagnosis: HangDiagnosis,
    snapshots: Sequence[ProcessSnapshot],
    host_lines: Sequence[str] = (),
    extra_lines: Sequence[str] = (),
) -> str:
    """Compose the text of a hang report.

    `reason`: its first line. `host_lines`: lines about the hosts of the processes. `extra_lines`: its last lines.
    """
    lines = [reason, "", f"Diagnosis: {diagnosis.sentence}.", ""]
    lines += [*host_lines, ""] if host_lines else []
    lines += ["Processes", *(f"  {describe_process(snapshot)}" for snapshot in snapshots), ""]
    lines += ["Last collectives of each rank", *_collective_lines(snapshots), ""]
    for snapshot in snapshots:
        lines += _stack_lines(snapshot)
    return "\n".join([*lines, *extra_lines]) + "\n"


def _collective_lines(snapshots: Sequence[ProcessSnapshot]) -> list[str]:
    lines, now = [], time.time()
    for snapshot in snapshots:
        for last in snapshot.collectives:
            messages = f", {last.num_messages} messages" if last.num_messages else ""
            lag = "   <- behind" if describe_group(last) in describe_collective_lag(snapshot, snapshots) else ""
            lines.append(
                f"  {snapshot.title}: {describe_group(last)}: {last.num_collectives} collectives{messages}; "
                f"the last: {_describe_operation(last)}, {max(0.0, now - last.issued_at):.1f} s ago{lag}"
            )
    return lines


def _stack_lines(snapshot: ProcessSnapshot) -> list[str]:
    kernel = f", in {snapshot.wchan}" if snapshot.wchan else ""
    lines = [f"{snapshot.title}: pid {snapshot.record.pid} on {snapshot.record.host}, {snapshot.state}{kernel}"]
    lines += [f"  for {time.time() - activity.since:.1f} s: {activity.text}" for activity in snapshot.activities]
    for index, stack in enumerate(snapshot.stacks):
        lines.append("  main thread, most recent call first" if index == 0 else f"  thread {index}")
        lines += [f"    {frame.file}:{frame.line} {frame.function}" for frame in stack]
    return [*lines, ""]
