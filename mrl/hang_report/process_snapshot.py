"""Takes snapshots of a run's other processes on this host: kernel state, stacks, activities and last collectives."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mrl.hang_report.process_registry import (
    DUMP_SIGNAL,
    Activity,
    ProcessRecord,
    process_start_ticks,
    read_activities,
)
from mrl.hang_report.stack_frames import StackFrame, StackSummary, parse_stack_dump, summarize_stacks
from parallel.collective_log import LastCollective, read_collective_log

DUMP_TIMEOUT_S = 2.0  # longest wait for a process to write its stacks
POLL_S = 0.02  # time between two reads of the size of the file with the stacks
FATAL_ERROR = "Fatal Python error: "  # prefix of faulthandler's line on a crash
# letter of the state in /proc/PID/stat -> state in reports
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
STOPPED, DEAD = ("stopped", "stopped by a debugger"), "dead"
UNREACHABLE = "unreachable"  # state of a process whose host did not answer


@dataclass(frozen=True)
class ProcessSnapshot:
    """State of one process at the time of a hang report."""

    record: ProcessRecord
    state: str  # a value of STATES, or UNREACHABLE
    wchan: str = ""  # kernel function in which the process sleeps
    stacks: tuple[tuple[StackFrame, ...], ...] = ()  # one stack per thread, the stack of the main thread first
    activities: tuple[Activity, ...] = ()  # work that the process has begun and not finished
    collectives: tuple[LastCollective, ...] = ()  # the last collective in each process group of a trainer rank
    crash: str = ""  # crash message that a dead process left; "" if it left none

    @property
    def summary(self) -> StackSummary:
        """What the process is doing and waiting for."""
        return summarize_stacks([list(stack) for stack in self.stacks])

    @property
    def dead(self) -> bool:
        return self.state == DEAD

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED

    @property
    def title(self) -> str:
        return self.record.title


def snapshot_processes(folder: str, records: list[ProcessRecord]) -> list[ProcessSnapshot]:
    """Take snapshots of these processes, which run on this host and are registered in `folder`.

    The result includes the child processes of engines. Each snapshot takes at most DUMP_TIMEOUT_S, even if the process hangs.
    """
    children = [child for record in records if record.role == "engine" for child in _engine_children(record)]
    return [_snapshot(Path(folder), record) for record in [*records, *children]]


def _engine_children(server: ProcessRecord) -> list[ProcessRecord]:
    """Return those child processes of an engine's server whose titles begin with `sglang::`. SGLang sets these titles.

    The children write their stacks to the server's file.
    """
    children = []
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(server.pid).children() if _process_state(server) != DEAD else ():
            title = " ".join(child.cmdline()).strip()
            if title.startswith("sglang::"):
                name = f"{server.title.removesuffix(' server')} {title.removeprefix('sglang::')}"
                children.append(replace(server, title=name, pid=child.pid, started=process_start_ticks(child.pid)))
    return children


def _snapshot(folder: Path, record: ProcessRecord) -> ProcessSnapshot:
    files = folder / record.name
    activities = tuple(read_activities(files.with_suffix(".activities")))
    collectives = tuple(read_collective_log(files.with_suffix(".ops")))
    state = _process_state(record)
    if state == DEAD:
        crash = _crash_message(files.with_suffix(".txt"))
        return ProcessSnapshot(record, state, activities=activities, collectives=collectives, crash=crash)
    dump = "" if state in STOPPED else _request_stack_dump(record, files.with_suffix(".txt"))
    stacks = tuple(tuple(stack) for stack in parse_stack_dump(dump))
    return ProcessSnapshot(record, _process_state(record), _wchan(record.pid), stacks, activities, collectives)


def _process_state(record: ProcessRecord) -> str:
    with suppress(OSError, IndexError):
        if process_start_ticks(record.pid) == record.started:
            letter = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return STATES.get(letter, "sleeping")
    return DEAD


def _wchan(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0")
    return ""


def _request_stack_dump(record: ProcessRecord, path: Path) -> str:
    """Send a process the signal to write its stacks, and return the text that it writes.

    Returns "" if the process does not handle the signal or writes nothing. The file may disappear at any moment, for
    example because an engine is replaced.
    """
    with suppress(OSError):
        if not _handles_dump_signal(record.pid):
            return ""
        before = size = path.stat().st_size
        deadline = time.monotonic() + DUMP_TIMEOUT_S
        with suppress(ProcessLookupError):
            os.kill(record.pid, DUMP_SIGNAL)
        while time.monotonic() < deadline and _process_state(record) not in (*STOPPED, DEAD):
            time.sleep(POLL_S)
            last, size = size, path.stat().st_size
            if size == last > before:  # the file has stopped growing
                break
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    return ""


def _handles_dump_signal(pid: int) -> bool:
    """Return whether a process handles DUMP_SIGNAL. The signal would kill a process that does not handle it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)
    return False


def _crash_message(path: Path) -> str:
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith(FATAL_ERROR)]
        return lines[-1].removeprefix(FATAL_ERROR) if lines else ""
    return ""
