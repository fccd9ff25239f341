"""Looks at the processes of a run on this host, from outside: stacks, kernel state, notes and last collectives."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from mrl.hang_report import notes
from mrl.hang_report.frames import Frame, Place, place, threads
from mrl.hang_report.notes import Note
from mrl.hang_report.register import SIGNAL, Record, start_ticks
from parallel.collective_log import LastCollective, read

DUMP_S = 2.0  # until the stacks of a process have been written
POLL_S = 0.02
FATAL = "Fatal Python error: "
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, where no signal reaches it",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "dead",
    "X": "dead",
}
STOPPED, DEAD = ("stopped", "held by a debugger"), "dead"


@dataclass(frozen=True)
class Seen:
    """One process as it was found."""

    record: Record
    state: str  # a value of STATES, or "out of reach" where its host did not answer
    wchan: str = ""  # the kernel's function that it sleeps in
    stacks: tuple[tuple[Frame, ...], ...] = ()  # of its threads, the main one first
    notes: tuple[Note, ...] = ()
    collectives: tuple[LastCollective, ...] = ()
    crash: str = ""  # of a dead one: how Python says it ended; "" when it had no time to say

    @property
    def place(self) -> Place:
        """Where it is, in words."""
        return place([list(stack) for stack in self.stacks])

    @property
    def dead(self) -> bool:
        return self.state == DEAD

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED

    @property
    def title(self) -> str:
        return self.record.title


def probe(folder: str, records: list[Record]) -> list[Seen]:
    """Look at these processes of this host, known in `folder`; whatever they do it takes seconds at most."""
    children = [child for record in records if record.role == "engine" for child in _children(record)]
    return [_look(Path(folder), record) for record in [*records, *children]]


def _children(server: Record) -> list[Record]:
    """An engine's processes below its server. SGLang names them; forked ones write their stacks where the server does."""
    found = []
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(server.pid).children() if _state(server) != DEAD else ():
            title = " ".join(child.cmdline()).strip()
            if title.startswith("sglang::"):
                name = f"{server.title.removesuffix(' server')} {title.removeprefix('sglang::')}"
                found.append(replace(server, title=name, pid=child.pid, started=start_ticks(child.pid)))
    return found


def _look(folder: Path, record: Record) -> Seen:
    files = folder / record.name
    said, collectives = tuple(notes.read(files.with_suffix(".notes"))), tuple(read(files.with_suffix(".ops")))
    state = _state(record)
    if state == DEAD:
        return Seen(record, state, notes=said, collectives=collectives, crash=_crash(files.with_suffix(".txt")))
    text = "" if state in STOPPED else _dump(record, files.with_suffix(".txt"))
    stacks = tuple(tuple(stack) for stack in threads(text))
    return Seen(record, _state(record), _wchan(record.pid), stacks, said, collectives)


def _state(record: Record) -> str:
    with suppress(OSError, IndexError):
        if start_ticks(record.pid) == record.started:
            letter = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return STATES.get(letter, "sleeping")
    return DEAD


def _wchan(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip("0")
    return ""


def _dump(record: Record, path: Path) -> str:
    """Ask a process for its stacks and read them; "" when it does not take the signal, or does not write.

    Its file may go at any moment: of an engine that is replaced, or with the run's folder.
    """
    with suppress(OSError):
        if not _catches(record.pid):
            return ""
        before = size = path.stat().st_size
        deadline = time.monotonic() + DUMP_S
        with suppress(ProcessLookupError):
            os.kill(record.pid, SIGNAL)
        while time.monotonic() < deadline and _state(record) not in (*STOPPED, DEAD):
            time.sleep(POLL_S)
            last, size = size, path.stat().st_size
            if size == last > before:  # nothing was added since the last look
                break
        with path.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    return ""


def _catches(pid: int) -> bool:
    """Whether a process handles SIGNAL, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _crash(path: Path) -> str:
    with suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith(FATAL)]
        return lines[-1].removeprefix(FATAL) if lines else ""
    return ""
