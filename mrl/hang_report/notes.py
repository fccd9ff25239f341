"""What this process is doing, in words, where others can read it even when it is stopped or dead."""

import json
import mmap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SIZE = 4096  # bytes; what does not fit is cut


@dataclass(frozen=True)
class Note:
    """Something a process has begun and not ended."""

    text: str
    since: float  # time.time()


class _Notes:
    """The notes of this process. Several threads may be doing something."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[int, Note] = {}
        self._next = 0
        self._memory: mmap.mmap | None = None

    def keep(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(SIZE)
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._write()

    def begin(self, text: str) -> int:
        with self._lock:
            self._next += 1
            self._active[self._next] = Note(text, time.time())
            self._write()
            return self._next

    def end(self, number: int) -> None:
        with self._lock:
            del self._active[number]
            self._write()

    def _write(self) -> None:
        if self._memory is None:
            return
        lines = [json.dumps([note.text[:500], note.since]) for note in self._active.values()]
        self._memory[:] = "\n".join(lines).encode()[: SIZE - 1].ljust(SIZE, b"\0")


_notes = _Notes()
keep = _notes.keep


@contextmanager
def doing(text: str) -> Iterator[None]:
    """Say that this process is doing `text` while the context lasts; costs microseconds."""
    number = _notes.begin(text)
    try:
        yield
    finally:
        _notes.end(number)


def read(path: Path) -> list[Note]:
    """What a process was doing when it wrote last, oldest first."""
    found = []
    with suppress(OSError):
        for line in path.read_bytes().rstrip(b"\0").splitlines():
            with suppress(ValueError):  # cut, or in the middle of being written
                found.append(Note(*json.loads(line)))
    return found
