"""What was sampled since the last checkpoint, on disk: a run that goes back trains the very same responses again.

One file for each round of a step, compressed, without pickle; it appears when it is complete, and whoever wrote it first is
right: a process that outlives its run cannot replace what the next one trains on.
"""

import logging
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from mrl.rollout.trajectory import Group, Sample

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step_(\d+)_round_\d+(\.msgpack\.zst|-\w+\.answers)")
ZSTD_LEVEL = 1


class Journal:
    """The groups of each (step, round), refused ones included, scored.

    Samples belong to what decided them: the settings, the data, the weights the run began with. What is known by another
    `key` is not seen; it stays until a checkpoint is written, should the user have mistyped a setting.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.folder = root, root / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, step: int, number: int, groups: Sequence[Group]) -> list[Group]:
        """Keep a round; returns what is in the journal now: an earlier one of these prompts, if there is.

        Where the disk does not take it, the run goes on without.
        """
        content = msgspec.msgpack.encode(list(groups), enc_hook=to_bytes)
        path, partial = self._path(step, number), self.folder / f".partial-{uuid.uuid4().hex[:8]}"
        try:
            partial.write_bytes(zstandard.compress(content, ZSTD_LEVEL))
            os.link(partial, path)  # fails where the name is taken
        except FileExistsError:
            return self.get(step, number, _rows(groups)) or list(groups)
        except OSError as error:
            logger.warning("what step %d sampled is not in the journal: %s", step, error)
        finally:
            partial.unlink(missing_ok=True)
        return list(groups)

    def get(self, step: int, number: int, rows: Sequence[int]) -> list[Group] | None:
        """The groups of a round, if they answer these rows; one that does not, or is torn, is removed."""
        path = self._path(step, number)
        if not path.exists():
            return None
        try:
            groups = _decoder.decode(zstandard.decompress(path.read_bytes()))
        except (msgspec.MsgspecError, zstandard.ZstdError) as error:
            logger.warning("%s cannot be read and is removed: %s", path, error)
        else:
            if _rows(groups) == list(rows):
                return groups
            logger.warning("%s answers other prompts than the run draws now, and is removed", path)
        path.unlink(missing_ok=True)
        return None

    def forget(self, before: int) -> None:
        """Remove the steps before this one, and samples of other settings: a checkpoint holds what they did."""
        for folder in self.root.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is None or int(name[1]) < before:
                path.unlink(missing_ok=True)

    def _path(self, step: int, number: int) -> Path:
        return self.folder / f"step_{step:06d}_round_{number}.msgpack.zst"


def digests(samples: Sequence[Sample]) -> NDArray[np.uint64]:
    """[B] a hash of each prompt with its response: what the ledger knows a sample by."""
    return np.array(
        [
            xxhash.xxh3_64_intdigest(np.array([*sample.prompt, -1, *sample.trajectory.token_ids], np.int64).tobytes())
            for sample in samples
        ],
        np.uint64,
    )


def _rows(groups: Sequence[Group]) -> list[int]:
    return [group.samples[0].row for group in groups]


def to_bytes(value: Any) -> Any:
    """For msgspec: numbers of numpy, and arrays of experts."""
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray) and value.dtype == np.int16, f"a {type(value)} in a trajectory"
    return dict(shape=value.shape, data=value.tobytes())


def from_bytes(kind: Any, value: Any) -> NDArray[np.int16]:
    """The array that `to_bytes` took apart."""
    return np.frombuffer(value["data"], np.int16).reshape(value["shape"]).copy()


_decoder = msgspec.msgpack.Decoder(list[Group], dec_hook=from_bytes)
