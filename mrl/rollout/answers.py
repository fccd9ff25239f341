"""What engines have answered of a round that is not whole yet, on disk: whatever ends a process, it is not sampled again."""

import logging
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


class Answers:
    """Completions of one round of a step, known by the response's number in the round and the tokens it continues.

    Each turn of a conversation is one. A file for each process that samples: records that are appended whole, a torn last one
    is not read. A disk that takes no more is a warning, and the run goes on.
    """

    def __init__(self, folder: Path, step: int, number: int) -> None:
        """Read what earlier processes left of the round."""
        self._folder, self._stem = folder, f"step_{step:06d}_round_{number}-"
        self._known = {key: done for path in self._paths() for key, done in _records(path)}
        self._file: BinaryIO | None = None
        self._full = False

    def __len__(self) -> int:
        return len(self._known)

    def get(self, number: int, inputs: Sequence[int]) -> Completion | None:
        """What was answered; None where nothing was."""
        return self._known.get(_key(number, inputs))

    def put(self, numbers: Sequence[int], inputs: Sequence[Sequence[int]], answers: Sequence[Completion]) -> None:
        """Keep answers of one request; those that an engine cut off are none."""
        whole = zip(numbers, inputs, answers, strict=True)
        found = {_key(number, tokens): done for number, tokens, done in whole if done.finish_reason != "abort"}
        content = msgspec.msgpack.encode(found, enc_hook=to_bytes)
        record = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(content)
        try:
            if self._file is None:
                self._file = (self._folder / f"{self._stem}{uuid.uuid4().hex[:8]}.answers").open("ab", buffering=0)
            if not self._full:
                self._file.write(_LENGTH.pack(len(record)) + record)
        except OSError as error:  # a torn record ends the file
            self._full = True
            logger.warning("answers are not kept until the round is whole: %s", error)

    def remove(self) -> None:
        """The round is whole, and kept elsewhere."""
        if self._file is not None:
            self._file.close()
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._stem}*.answers"))


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
