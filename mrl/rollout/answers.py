"""What engines have answered of groups that no step has taken yet, on disk: whatever ends a process, it is not sampled again."""

import logging
import re
import struct
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash
import zstandard

from mrl.rollout.client import Completion
from mrl.rollout.journal import from_bytes, to_bytes

logger = logging.getLogger(__name__)
_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"step_(\d+)-\w+\.answers")


class Answers:
    """Completions, known by the response's number in the run and the tokens it continues.

    Each turn of a conversation is one. A file for each process and step in which it samples: records that are appended whole, a
    torn last one is not read. A disk that takes no more is a warning, and the run goes on.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        """Read what earlier processes left; `step` see `turn`."""
        self._folder, self._step = folder, step
        self._known: dict[int, dict[str, Completion]] = {}  # step -> what was answered in it
        self._file: BinaryIO | None = None
        self._full = False
        self.read()

    def read(self) -> None:
        """Read all that is there, this process's own answers included: they are to be taken up."""
        self._known = {}
        for step, path in self._paths():
            self._known.setdefault(step, {}).update(_records(path))

    def turn(self, step: int) -> None:
        """What is answered from now on belongs to this step."""
        if step != self._step and self._file is not None:
            self._file.close()
            self._file = None
        self._step = step

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def get(self, number: int, inputs: Sequence[int]) -> Completion | None:
        """What was answered, as far as it was read; None where nothing was."""
        key = _key(number, inputs)
        return next((known[key] for known in self._known.values() if key in known), None)

    def put(self, numbers: Sequence[int], inputs: Sequence[Sequence[int]], answers: Sequence[Completion]) -> None:
        """Keep answers of one request; those that an engine cut off are none."""
        whole = zip(numbers, inputs, answers, strict=True)
        found = {_key(number, tokens): done for number, tokens, done in whole if done.finish_reason != "abort"}
        content = msgspec.msgpack.encode(found, enc_hook=to_bytes)
        record = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content)
        try:
            if self._file is None:
                name = f"step_{self._step:06d}-{uuid.uuid4().hex[:8]}.answers"
                self._file = (self._folder / name).open("ab", buffering=0)
            if not self._full:
                self._file.write(_LENGTH.pack(len(record)) + record)
        except OSError as error:  # a torn record ends the file
            self._full = True
            logger.warning("answers are not kept until the round is whole: %s", error)

    def forget(self, before: int) -> None:
        """What was answered in the steps before this one is kept elsewhere, or trained."""
        for step, path in self._paths():
            if step < before:
                path.unlink(missing_ok=True)
        self._known = {step: known for step, known in self._known.items() if step >= before}

    def _paths(self) -> list[tuple[int, Path]]:
        """(step, file) of all answers."""
        named = ((_NAME.fullmatch(path.name), path) for path in sorted(self._folder.glob("*.answers")))
        return [(int(name[1]), path) for name, path in named if name]


def _key(number: int, inputs: Sequence[int]) -> str:
    return f"{number}:{xxhash.xxh3_128_hexdigest(np.array(inputs, np.int64).tobytes())}"


def _records(path: Path) -> Iterator[tuple[str, Completion]]:
    content, start = path.read_bytes(), 0
    while start + _LENGTH.size <= len(content):
        (length,) = _LENGTH.unpack_from(content, start)
        record = content[start + _LENGTH.size : start + _LENGTH.size + length]
        start += _LENGTH.size + length
        try:
            yield from _decoder.decode(zstandard.decompress(record)).items()
        except (zstandard.ZstdError, msgspec.MsgspecError):
            logger.warning("%s ends in a record that is not whole", path)
            return


_decoder = msgspec.msgpack.Decoder(dict[str, Completion], dec_hook=from_bytes)
