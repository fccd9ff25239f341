"""Registry of a run's processes. Each process registers itself, records its current activities, and dumps its stacks on a signal.

The registry is a folder of the run. A process has these files there: `<name>.json` (ProcessRecord), `<name>.txt` (stack dumps),
`<name>.activities` and, for a trainer rank, `<name>.ops` and `<name>.ops.json` (parallel.collective_log). Another process reads
these files for a hang report, even if the registered process is stopped or dead.
"""

import faulthandler
import json
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.core.jsonl import write_json

# faulthandler handles this signal in C, so a dump works even inside a collective and while another thread holds the GIL.
DUMP_SIGNAL = signal.SIGUSR2
# Environment variables that tell the processes of an engine where and under which name to register
REGISTRY_FOLDER_ENV = "MRL_PROCESS_REGISTRY"
REGISTRY_NAME_ENV = "MRL_PROCESS_NAME"
ACTIVITY_FILE_BYTES = 4096  # size of the file with the activities of a process; text that does not fit is cut


def registry_folder(run_dir: str | Path) -> Path:
    """Return the folder in which the processes of a run register."""
    return Path(run_dir) / "logs" / "stacks"


# The files stay open until the process ends, because faulthandler writes to their file descriptors.
_dump_files: dict[str, Any] = {}


@dataclass(frozen=True)
class ProcessRecord:
    """Identity of one registered process."""

    name: str  # stem of its files, unique in a run
    title: str  # name in messages: "rank 3 (tp 1, dp 0)"
    role: str  # rank, rollout or engine
    host: str
    pid: int
    # Start time in clock ticks since boot. Together with the pid, it identifies a process, because pids are reused.
    started: int
    model: str = ""  # name of a trainer rank's model; "" for the actor and for other processes
    rank: int = -1  # index of a trainer rank among the ranks of its model; -1 for other processes


def register_process(folder: str | Path, name: str, title: str, role: str, **fields: Any) -> Path:
    """Register this process in `folder`. Returns the common path of the process's files, without suffix.

    `fields`: values of further fields of ProcessRecord.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    unregister_processes(folder, name)  # removes the files of an earlier process with the same name
    pid, path = os.getpid(), folder / name
    dump_stacks_on_signal(path.with_name(f"{name}.txt"))
    _activities.open(path.with_name(f"{name}.activities"))
    record = ProcessRecord(name, title, role, socket.gethostname(), pid, process_start_ticks(pid), **fields)
    write_json(path.with_name(f"{name}.json"), asdict(record))
    return path


def dump_stacks_on_signal(path: Path) -> None:
    """Append the stacks of all threads to `path` on DUMP_SIGNAL and on a crash."""
    dump = _dump_files[str(path)] = path.open("a")  # append, because the processes of one engine share the file
    faulthandler.register(DUMP_SIGNAL, dump, all_threads=True)
    faulthandler.enable(dump)


def unregister_processes(folder: str | Path, name: str) -> None:
    """Remove the files of processes, so that hang reports do not list them. `name` may be a glob pattern."""
    for path in Path(folder).glob(f"{name}.*"):
        with suppress(OSError):
            path.unlink()


def read_process_records(folder: str | Path) -> list[ProcessRecord]:
    """Return the registered processes: trainer ranks first, then the rollout worker, then engines."""
    records: list[ProcessRecord] = []
    for path in Path(folder).glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # the file belongs to a collective log, or was just removed
            records.append(ProcessRecord(**json.loads(path.read_text())))
    order = {"rank": 0, "rollout": 1, "engine": 2}
    return sorted(
        records, key=lambda record: (order.get(record.role, len(order)), record.model, record.rank, record.name)
    )


def process_start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; raises OSError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@dataclass(frozen=True)
class Activity:
    """Work that a process has begun and not finished."""

    text: str
    since: float  # value of time.time() when the work began


class _ActivityLog:
    """Current activities of all threads of this process, in a memory-mapped file that remains when the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[int, Activity] = {}  # serial number -> activity
        self._last_number = 0  # serial number of the newest activity
        self._memory: mmap.mmap | None = None

    def open(self, path: Path) -> None:
        """Create the file `path`, and write the activities to it from now on."""
        with path.open("wb+") as file:
            file.truncate(ACTIVITY_FILE_BYTES)
            self._memory = mmap.mmap(file.fileno(), ACTIVITY_FILE_BYTES)
        self._write()

    def begin(self, text: str) -> int:
        """Add an activity. Returns its serial number, the argument of `end`."""
        with self._lock:
            self._last_number += 1
            self._active[self._last_number] = Activity(text, time.time())
            self._write()
            return self._last_number

    def end(self, serial_number: int) -> None:
        """Remove an activity."""
        with self._lock:
            del self._active[serial_number]
            self._write()

    def _write(self) -> None:
        if self._memory is None:
            return
        lines = [json.dumps([activity.text[:500], activity.since]) for activity in self._active.values()]
        size = ACTIVITY_FILE_BYTES
        self._memory[:] = "\n".join(lines).encode()[: size - 1].ljust(size, b"\0")


_activities = _ActivityLog()


@contextmanager
def track_activity(text: str) -> Iterator[None]:
    """Record `text` as an activity of this process for the duration of the context. This costs microseconds."""
    serial_number = _activities.begin(text)
    try:
        yield
    finally:
        _activities.end(serial_number)


def read_activities(path: Path) -> list[Activity]:
    """Return the activities that a process had not finished when it last wrote the file, oldest first."""
    activities = []
    with suppress(OSError):
        for line in path.read_bytes().rstrip(b"\0").splitlines():
            with suppress(ValueError):  # the line was cut, or is being written right now
                activities.append(Activity(*json.loads(line)))
    return activities
