"""What was sampled since the last checkpoint, on disk: a run that goes back trains the very same responses again.

One file for each step, compressed, without pickle; it appears when it is complete, and whoever wrote it first is
right: a process that outlives its run cannot replace what the next one trains on.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from mrl.rollout.trajectory import Group, Sample

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step_(\d+)\.msgpack\.zst")
ZSTD_LEVEL = 1


@dataclass(frozen=True)
class Entry:
    """What a step took from the stream of prompts."""

    numbers: list[int]  # of the groups trained, in the order of drawing
    groups: list[Group]
    refused_numbers: list[int]
    refused: list[Group]
    dropped: list[int]  # numbers of groups that were given up

    @property
    def all_numbers(self) -> list[int]:
        """Of every prompt that is done with."""
        return [*self.numbers, *self.refused_numbers, *self.dropped]

    @property
    def rows(self) -> list[int]:
        """Of the groups, refused ones behind."""
        return [group.samples[0].row for group in [*self.groups, *self.refused]]


class Journal:
    """The groups that each step took, scored.

    Samples belong to what decided them: the settings, the data, the weights the run began with. What is known by another
    `key` is not seen; it stays until a checkpoint is written, should the user have mistyped a setting.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.folder = root, root / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, step: int, entry: Entry) -> Entry:
        """Keep a step; returns what is in the journal now: an earlier one of the same prompts, if there is.

        Where the disk does not take it, the run goes on without.
        """
        content = msgspec.msgpack.encode(entry, enc_hook=to_bytes)
        path, partial = self._path(step), self.folder / f".partial-{uuid.uuid4().hex[:8]}"
        try:
            partial.write_bytes(zstandard.compress(content, ZSTD_LEVEL))
            os.link(partial, path)  # fails where the name is taken
        except FileExistsError:
            return self._settle(step, entry)
        except OSError as error:
            logger.warning("what step %d sampled is not in the journal: %s", step, error)
        finally:
            partial.unlink(missing_ok=True)
        return entry

    def _settle(self, step: int, entry: Entry) -> Entry:
        """The name is taken: what is there counts if it is of the same prompts; else ours replaces it."""
        there = self.get(step)
        if there is not None and (there.all_numbers, there.rows) == (entry.all_numbers, entry.rows):
            return there
        self.remove(step, "answers other prompts than the run draws now")
        return self.put(step, entry)

    def get(self, step: int) -> Entry | None:
        """What the step took; an entry that is torn is removed."""
        try:
            return _decoder.decode(zstandard.decompress(self._path(step).read_bytes()))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, zstandard.ZstdError) as error:
            self.remove(step, f"cannot be read: {error}")
            return None

    def remove(self, step: int, why: str) -> None:
        """Have no entry of this step."""
        logger.warning("%s %s, and is removed", self._path(step), why)
        self._path(step).unlink(missing_ok=True)

    def forget(self, before: int) -> None:
        """Remove the steps before this one, and samples of other settings: a checkpoint holds what they did.

        Answers to prompts that no step has taken stay (mrl/rollout/answers.py).
        """
        for folder in self.root.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if path.suffix != ".answers" and (name is None or int(name[1]) < before):
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.msgpack.zst"


def digests(samples: Sequence[Sample]) -> NDArray[np.uint64]:
    """[B] a hash of each prompt with its response: what the ledger knows a sample by."""
    return np.array(
        [
            xxhash.xxh3_64_intdigest(np.array([*sample.prompt, -1, *sample.trajectory.token_ids], np.int64).tobytes())
            for sample in samples
        ],
        np.uint64,
    )


def to_bytes(value: Any) -> Any:
    """For msgspec: numbers of numpy, and arrays of experts."""
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray) and value.dtype == np.int16, f"a {type(value)} in a trajectory"
    return dict(shape=value.shape, data=value.tobytes())


def from_bytes(kind: Any, value: Any) -> NDArray[np.int16]:
    """The array that `to_bytes` took apart."""
    return np.frombuffer(value["data"], np.int16).reshape(value["shape"]).copy()


_decoder = msgspec.msgpack.Decoder(Entry, dec_hook=from_bytes)
