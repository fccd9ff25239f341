"""Crash-safe files: JSON files that are replaced atomically, and JSON Lines files with a hash of each line."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from mrl.core.run_errors import check_in_place
from parallel.durable_files import write_file

logger = logging.getLogger(__name__)


CHUNK_BYTES = 1 << 14  # `last_lines` first reads this many bytes at the end of the file


def write_json(path: Path, content: object) -> None:
    """Write `content` to a JSON file, atomically. Values that JSON cannot express are written as `str(value)`."""
    write_file(path, json.dumps(content, indent=1, default=str) + "\n")


def last_lines(path: Path, count: int) -> list[bytes]:
    """Return the last `count` complete lines in order, or [] if there is no file. Only the end of the file is read.

    Lines whose hash (see JsonLinesFile) differs or is missing are not returned, unless the file has no hashes at all. A warning
    is logged if this concerns a line before the last line.
    """
    if not path.exists():
        return []
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), CHUNK_BYTES
        while True:
            file.seek(max(0, end - size))
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith(b"\n")]
            if len(lines) > count or size >= end:  # the first line may be incomplete
                return _undamaged(path, lines[-count:])
            size *= 4


def _undamaged(path: Path, lines: list[bytes]) -> list[bytes]:
    expected = _read_hashes(_hashes_path(path))
    damaged = [line for line in lines if expected and _hash_entry(_step_of(line), line) not in expected]
    if damaged and damaged != lines[-1:]:  # another process may not have written the hash of the last line yet
        logger.warning("%s: %d of its last %d lines are damaged and are not used", path, len(damaged), len(lines))
    return [line for line in lines if line not in damaged]


class _AppendedFile:
    """A file to which lines are appended. When the disk is full, new lines stay in memory, and one warning is logged."""

    def __init__(self, path: Path) -> None:
        self.path, self.unwritten = path, b""
        self._file, self._disk_full = path.open("ab", buffering=0), False

    def append(self, line: bytes) -> None:
        """Append a complete line. Raises RunDirMovedError if `path` no longer leads to the opened file."""
        check_in_place(self._file.fileno(), self.path)
        self.unwritten += line
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(self.unwritten)
            if written != len(self.unwritten):
                raise OSError(f"only {written} of {len(self.unwritten)} bytes were written")
            self.unwritten, self._disk_full = b"", False
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)  # remove an incomplete line
            if not self._disk_full:
                logger.warning("%s: lines cannot be written; they are kept in memory: %s", self.path, error)
            self._disk_full = True

    def replace(self, lines: Iterable[bytes]) -> None:
        """Replace the content of the file."""
        self.close()
        write_file(self.path, b"".join(lines))
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()


class JsonLinesFile:
    """Append-only file of JSON objects `{"step": 1, ...}`, one per line. NaN is written as null.

    A second file, `.NAME.hashes`, contains `STEP HASH` for each of these lines. When the file is opened again, the hashes show
    which lines are damaged or missing, and a warning names the steps of these lines. Damaged lines are moved to the file
    `NAME.damaged`. When the disk is full, lines are kept in memory until there is space again.
    """

    def __init__(self, path: Path, last_step: int = 0, *, every_step: bool = False) -> None:
        """Open the file. If it exists, remove the lines of steps after `last_step`, and an incomplete last line.

        `every_step`: whether each step of a run has a line. If so, a missing line is noticed even if its hash is missing, too.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._every_step = path, every_step
        self._lines, self._hashes = _AppendedFile(path), _AppendedFile(_hashes_path(path))
        self._keep_until(last_step)

    def write(self, step: int, content: Mapping[str, Any]) -> None:
        """Append a line. When this function returns, the line is in the file or, if the disk is full, in memory.

        Raises RunDirMovedError if the file was moved, deleted or replaced.
        """
        line = orjson.dumps({"step": step, **content}, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        self._lines.append(line)
        self._hashes.append(_hash_entry(step, line))

    def rewind(self, last_step: int) -> None:
        """Remove the lines of steps after `last_step`."""
        waiting = self._lines.unwritten.splitlines(keepends=True)
        self._lines.unwritten = b"".join(line for line in waiting if _step_of(line) <= last_step)
        self._keep_until(last_step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
        self._hashes.close()

    def _keep_until(self, last_step: int) -> None:
        """Remove the lines of steps after `last_step`, and move damaged lines to NAME.damaged. Unwritten lines stay in memory."""
        checked = check_lines(self.path)
        kept = {line: step for step, line in checked.lines if step <= last_step}
        waiting = {line: _step_of(line) for line in self._lines.unwritten.splitlines(keepends=True)}
        # Damaged lines are copied before `replace` removes them. So none is lost if the process is killed or the disk is full.
        if checked.damaged:
            self._set_aside(checked.damaged)
        self._lines.replace(kept)
        self._hashes.unwritten = b""  # `kept` and `waiting` have all lines
        self._hashes.replace(_hash_entry(step, line) for line, step in (kept | waiting).items())
        if unchecked := sorted(step for step in checked.unchecked_steps if step <= last_step):
            logger.warning("%s: the lines of these steps have no hash and are used unchecked: %s", self.path, unchecked)
        lost = {step for step in checked.lost_steps if step <= last_step}
        if self._every_step and kept:
            lost |= set(range(min(kept.values()), last_step + 1)) - set(kept.values())
        if lost := lost - set(waiting.values()):
            logger.warning("%s: the lines of these steps are damaged or missing: %s", self.path, sorted(lost))

    def _set_aside(self, damaged: list[bytes]) -> None:
        """Append damaged lines to the file NAME.damaged."""
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with aside.open("ab") as file:
            file.writelines(damaged)
        logger.warning("%s: %d damaged lines were moved to %s", self.path, len(damaged), aside.name)


class CheckedLines(NamedTuple):
    """The lines of a JsonLinesFile, compared with their hashes."""

    lines: list[tuple[int, bytes]]  # (step, line) of the intact lines
    damaged: list[bytes]
    lost_steps: list[int]  # steps whose lines are damaged or missing
    unchecked_steps: list[int]  # steps of those `lines` that have no hash yet, because they come after the last hash


def check_lines(path: Path) -> CheckedLines:
    """Read a file that JsonLinesFile wrote, and compare each line with its hash. An incomplete last line is left out.

    Lines after the last hash are used unchecked: the writer was killed before it wrote their hashes, or is about to write them.
    A file without hashes is used unchecked, and a warning is logged: an older version of mrl wrote it, or the hashes were lost.
    """
    # The hashes are read first: a running writer writes each line before its hash, so the line of every hash is found.
    expected = _read_hashes(_hashes_path(path))
    content = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if content and not content[-1].endswith(b"\n"):
        logger.warning("%s: the last line is incomplete and is removed", path)
        content.pop()
    if content and not expected:
        logger.warning("%s: there are no hashes of its %d lines, so they are used unchecked", path, len(content))
    last_step = max(expected.values(), default=0)
    lines, damaged, unchecked = [], [], []
    for index, line in enumerate(content):
        step = _step_of(line)
        # If the last line with a hash is damaged, its step may be read as a later step. The index shows that the line has a hash.
        has_no_hash = index >= len(expected) and step > last_step
        if step == _UNREADABLE or (expected and not has_no_hash and _hash_entry(step, line) not in expected):
            damaged.append(line)
        else:
            lines.append((step, line))
            unchecked += [step] if expected and has_no_hash else []
    found = {_hash_entry(step, line) for step, line in lines}
    lost = sorted(step for entry, step in expected.items() if entry not in found)
    return CheckedLines(lines, damaged, lost, unchecked)


_UNREADABLE = 1 << 62  # result of `_step_of` for a line that is damaged; larger than every step


def _step_of(line: bytes) -> int:
    """Return the step of a line of JSON, or of an entry in a file of hashes; _UNREADABLE if the line is damaged."""
    try:
        return int(line.split()[0]) if line[:1].isdigit() else int(orjson.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return _UNREADABLE


def _hashes_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.hashes")


def _hash_entry(step: int, line: bytes) -> bytes:
    return f"{step} {xxhash.xxh3_64_hexdigest(line)}\n".encode()


def _read_hashes(path: Path) -> dict[bytes, int]:
    """Return entry -> step for each complete entry in a file of hashes. Entries that cannot be read are ignored."""
    entries = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = {entry: _step_of(entry) for entry in entries if entry.endswith(b"\n")}
    readable = {entry: step for entry, step in found.items() if step != _UNREADABLE}
    if damaged := sum(entry not in readable for entry in entries):
        logger.warning("%s: %d hashes are damaged and are not used", path, damaged)
    return readable
