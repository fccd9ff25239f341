"""Crash-safe files: JSON files that are replaced atomically, and append-only JSON Lines files with one line per step."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from parallel.durable_files import write_file

logger = logging.getLogger(__name__)


CHUNK_BYTES = 1 << 14  # `last_lines` first reads this many bytes at the end of the file


def write_json(path: Path, content: object) -> None:
    """Write `content` to a JSON file, atomically. Values that JSON cannot express are written as `str(value)`."""
    write_file(path, json.dumps(content, indent=1, default=str) + "\n")


def last_lines(path: Path, count: int) -> list[bytes]:
    """Return the last `count` complete lines in order, or [] if there is no file. Only the end of the file is read."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), CHUNK_BYTES
        while True:
            file.seek(max(0, end - size))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            if len(lines) > count or size >= end:  # the first line may be incomplete
                return lines[-count:]
            size *= 4


class JsonLinesFile:
    """Append-only file of JSON objects `{"step": 1, ...}`, one per line. NaN is written as null.

    When the disk is full, lines are kept in memory until there is space again, and one warning is logged.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        """Open the file. If it exists, remove the lines of steps after `last_step`, and an incomplete last line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._unwritten, self._disk_full = path, b"", False
        self._open(last_step)

    def _open(self, last_step: int) -> None:
        if self.path.exists():
            lines = [line for line in self.path.read_bytes().splitlines(keepends=True) if _is_valid(line, last_step)]
            write_file(self.path, b"".join(lines))
        self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """Append a line. The line is in the file when this function returns, except if the disk is full."""
        self._unwritten += orjson.dumps(
            {"step": step, **content}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        )
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(self._unwritten)
            if written != len(self._unwritten):
                raise OSError(f"only {written} of {len(self._unwritten)} bytes were written")
            self._unwritten, self._disk_full = b"", False
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # remove an incomplete line
            if not self._disk_full:
                logger.warning("%s: lines cannot be written; they are kept in memory: %s", self.path, error)
            self._disk_full = True

    def rewind(self, last_step: int) -> None:
        """Remove the lines of steps after `last_step`."""
        self._unwritten = b"".join(
            line for line in self._unwritten.splitlines(keepends=True) if _is_valid(line, last_step)
        )
        self._file.close()
        self._open(last_step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _is_valid(line: bytes, last_step: int) -> bool:
    """Return whether a line is complete, and its step is not after `last_step`."""
    try:
        return line.endswith(b"\n") and orjson.loads(line)["step"] <= last_step
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
