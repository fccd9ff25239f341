"""Small files that others may read at any moment: whole ones, and ones with a line for each step.

Of the latter a run that goes back to a checkpoint keeps the beginning.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)


CHUNK = 1 << 14  # bytes


def write_json(path: Path, content: object) -> None:
    """Write a file that is whole whenever it is there; what JSON has no word for becomes text."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n")
    partial.replace(path)


def last_lines(path: Path, count: int) -> list[bytes]:
    """The last `count` lines that are whole, in order, read from the end of the file; none where there is no file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), CHUNK
        while True:
            file.seek(max(0, end - size))
            found = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            if len(found) > count or size >= end:  # the first may lack its beginning
                return found[-count:]
            size *= 4


class StepLines:
    """JSON objects `{"step": 1, ...}`, one per call, in the file before `write` returns; NaN becomes null.

    A disk that is full keeps lines waiting in memory, with one warning; they are written when it takes them again.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Lines that are there stay up to `last_step`; later ones, and a torn one, are removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._waiting, self._full = path, b"", False
        self._open(last_step)

    def _open(self, last_step: int) -> None:
        if self.path.exists():
            kept = [line for line in self.path.read_bytes().splitlines(keepends=True) if _stays(line, last_step)]
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_bytes(b"".join(kept))
            partial.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """Append a line."""
        self._waiting += orjson.dumps(
            {"step": step, **content}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        )
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(self._waiting)
            if written != len(self._waiting):
                raise OSError(f"{written} of {len(self._waiting)} bytes were taken")
            self._waiting, self._full = b"", False
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # no half line
            if not self._full:
                logger.warning("%s takes no more lines; they wait in memory: %s", self.path, error)
            self._full = True

    def rewind(self, last_step: int) -> None:
        """Go on as if nothing had been written after `last_step`."""
        self._waiting = b"".join(line for line in self._waiting.splitlines(keepends=True) if _stays(line, last_step))
        self._file.close()
        self._open(last_step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _stays(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and orjson.loads(line)["step"] <= last_step
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
