"""Makes a process known to autopsies: its name, and a signal on which it writes its stacks."""

import faulthandler
import json
import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.core.durable_files import write_json
from mrl.hang_report import notes

SIGNAL = signal.SIGUSR2  # answered in C, whatever Python or a collective is doing
FOLDER, NAME = "MRL_STACKS", "MRL_STACKS_NAME"  # environment of an engine


def stacks(run_dir: str | Path) -> Path:
    """Where the processes of a run are known."""
    return Path(run_dir) / "logs" / "stacks"


_dumps: dict[str, Any] = {}  # open for as long as the process lives: faulthandler writes to their descriptors


@dataclass(frozen=True)
class Record:
    """One process of a run."""

    name: str  # of its files, unique in a run
    title: str  # in sentences: "rank 3 (tp 1, dp 0)"
    role: str  # rank, rollout or engine
    host: str
    pid: int
    started: int  # clock ticks after boot: a pid may be given again, a pid and its start may not
    group: str = ""  # of a rank: which model's
    rank: int = -1


def register(folder: str | Path, name: str, title: str, role: str, **more: Any) -> Path:
    """Make this process known in `folder`; returns the path, less its suffix, of the files that it has there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    forget(folder, name)  # an earlier process of that name
    pid, path = os.getpid(), folder / name
    dump_on_signal(path.with_name(f"{name}.txt"))
    notes.keep(path.with_name(f"{name}.notes"))
    record = Record(name, title, role, socket.gethostname(), pid, start_ticks(pid), **more)
    write_json(path.with_name(f"{name}.json"), asdict(record))
    return path


def dump_on_signal(path: Path) -> None:
    """Write the stacks of all threads to `path` on SIGNAL, and on a crash."""
    dump = _dumps[str(path)] = path.open("a")  # an engine's processes share one
    faulthandler.register(SIGNAL, dump, all_threads=True)
    faulthandler.enable(dump)


def forget(folder: str | Path, name: str) -> None:
    """No longer count processes that were ended on purpose; `name` may be a pattern."""
    for path in Path(folder).glob(f"{name}.*"):
        with suppress(OSError):
            path.unlink()


def records(folder: str | Path) -> list[Record]:
    """The processes known in `folder`, ranks first, in order."""
    found: list[Record] = []
    for path in Path(folder).glob("*.json"):
        with suppress(OSError, ValueError, TypeError):  # another suffix, or gone this moment
            found.append(Record(**json.loads(path.read_text())))
    order = {"rank": 0, "rollout": 1, "engine": 2}
    return sorted(found, key=lambda record: (order[record.role], record.group, record.rank, record.name))


def start_ticks(pid: int) -> int:
    """When a process started; raises OSError where there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
