"""Sampled data on disk: the rollout log of each step, the cache of single completions, and recorded steps for replay.

- `RolloutLog`: the scored groups of every step since the last checkpoint. A run that resumes from it trains the same
  responses again.
- `CompletionCache`: completions of groups that no step has taken yet. They are not sampled again after a failure of any process.
- Recorded steps (`rollout.record`, `rollout.replay`): tokens and control columns, which can be trained under any layout.
"""

import logging
import os
import re
import shutil
import struct
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from mrl.core.types import TokenBlock
from mrl.rollout.client import Completion
from mrl.rollout.trajectory import Group, Sample, StepGroups

logger = logging.getLogger(__name__)

ZSTD_LEVEL = 1
_STEP_FILE = re.compile(r"step_(\d+)\.msgpack\.zst")
_CACHE_SUFFIX = ".completions"
_CACHE_FILE = re.compile(rf"step_(\d+)-\w+\{_CACHE_SUFFIX}")
_RECORD_LENGTH = struct.Struct("<Q")  # bytes of the compressed record that follows


class RolloutLog:
    """The scored groups of each step: one compressed file per step, without pickle.

    A file appears only when it is complete. A file with the same prompts is not overwritten, so a process that outlives its
    run cannot replace samples of the next run. `key` is a hash of the settings, the data and the initial weights. Entries of
    another key are not read. They are kept until the next checkpoint, because the user may have mistyped a setting.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.folder = root, root / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, step: int, groups: StepGroups[Group]) -> StepGroups[Group]:
        """Write the groups of a step; return `groups`, or the logged groups if the step was logged before with the same prompts.

        If the file cannot be written, a warning is logged and the run goes on without it.
        """
        content = msgspec.msgpack.encode(groups, enc_hook=_to_plain)
        path, partial = self._path(step), self.folder / f".partial-{uuid.uuid4().hex[:8]}"
        try:
            partial.write_bytes(zstandard.compress(content, ZSTD_LEVEL))
            os.link(partial, path)  # fails if the file exists
        except FileExistsError:
            logged = self.get(step)
            if logged is not None and (logged.all_numbers, _rows(logged)) == (groups.all_numbers, _rows(groups)):
                return logged
            self.remove(step, "holds other prompts than the run draws now")
            return self.put(step, groups)
        except OSError as error:
            logger.warning("the samples of step %d are not in the rollout log: %s", step, error)
        finally:
            partial.unlink(missing_ok=True)
        return groups

    def get(self, step: int) -> StepGroups[Group] | None:
        """Read the groups of a step; None if there is no entry. A damaged entry is removed."""
        try:
            return _step_decoder.decode(zstandard.decompress(self._path(step).read_bytes()))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, zstandard.ZstdError) as error:
            self.remove(step, f"cannot be read: {error}")
            return None

    def remove(self, step: int, reason: str) -> None:
        """Delete the entry of a step, and log why."""
        logger.warning("%s %s; it is removed", self._path(step), reason)
        self._path(step).unlink(missing_ok=True)

    def discard(self, before_step: int) -> None:
        """Delete the entries of earlier steps, which a checkpoint covers, and those of other keys. Cached completions stay."""
        for folder in self.root.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.iterdir():
            name = _STEP_FILE.fullmatch(path.name)
            if path.suffix != _CACHE_SUFFIX and (name is None or int(name[1]) < before_step):
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.msgpack.zst"


def _rows(groups: StepGroups[Group]) -> list[int]:
    return [group.row for group in [*groups.groups, *groups.filtered]]


class CompletionCache:
    """Completions on disk, by the number of the response in the run and the input tokens.

    Each turn of a multi-turn response is one completion. There is one file per process and step. Each record is one write; a
    truncated last record is not read. If the disk is full, a warning is logged and the run goes on.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        """Read the completions of earlier processes. `step`: see `start_step`."""
        self._folder, self._step = folder, step
        self._known: dict[int, dict[str, Completion]] = {}  # step -> completions by key
        self._file: BinaryIO | None = None
        self._full = False
        self.read()

    def read(self) -> None:
        """Read all files, including those of this process, so that `get` finds their completions."""
        self._known = {}
        for step, path in self._paths():
            self._known.setdefault(step, {}).update(_read_records(path))

    def start_step(self, step: int) -> None:
        """Store the following completions as those of `step`."""
        if step != self._step and self._file is not None:
            self._file.close()
            self._file = None
        self._step = step

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def get(self, number: int, inputs: Sequence[int]) -> Completion | None:
        """Return the completion of response `number` for these input tokens, if `read` found one."""
        key = _key(number, inputs)
        return next((known[key] for known in self._known.values() if key in known), None)

    def put(self, numbers: Sequence[int], inputs: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Append the completions of one request; aborted ones are left out."""
        items = zip(numbers, inputs, completions, strict=True)
        found = {_key(number, tokens): done for number, tokens, done in items if done.finish_reason != "abort"}
        content = msgspec.msgpack.encode(found, enc_hook=_to_plain)
        record = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(content)
        try:
            if self._file is None:
                name = f"step_{self._step:06d}-{uuid.uuid4().hex[:8]}{_CACHE_SUFFIX}"
                self._file = (self._folder / name).open("ab", buffering=0)
            if not self._full:
                self._file.write(_RECORD_LENGTH.pack(len(record)) + record)
        except OSError as error:
            self._full = True  # a reader stops at the truncated record, so nothing may follow it
            logger.warning("completions are no longer cached on disk: %s", error)

    def discard(self, before_step: int) -> None:
        """Delete the completions of earlier steps: the rollout log has them, or they were trained."""
        for step, path in self._paths():
            if step < before_step:
                path.unlink(missing_ok=True)
        self._known = {step: known for step, known in self._known.items() if step >= before_step}

    def _paths(self) -> list[tuple[int, Path]]:
        """Return (step, file) of all cached completions."""
        named = ((_CACHE_FILE.fullmatch(path.name), path) for path in sorted(self._folder.glob(f"*{_CACHE_SUFFIX}")))
        return [(int(name[1]), path) for name, path in named if name]


def _key(number: int, inputs: Sequence[int]) -> str:
    return f"{number}:{xxhash.xxh3_128_hexdigest(np.array(inputs, np.int64).tobytes())}"


def _read_records(path: Path) -> Iterator[tuple[str, Completion]]:
    content, start = path.read_bytes(), 0
    while start + _RECORD_LENGTH.size <= len(content):
        (length,) = _RECORD_LENGTH.unpack_from(content, start)
        record = content[start + _RECORD_LENGTH.size : start + _RECORD_LENGTH.size + length]
        start += _RECORD_LENGTH.size + length
        try:
            yield from _cache_decoder.decode(zstandard.decompress(record)).items()
        except (zstandard.ZstdError, msgspec.MsgspecError):
            logger.warning("%s ends in a truncated record", path)
            return


def _recording_path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.npz"


def write_recording(folder: str | Path, step: int, block: TokenBlock, **columns: NDArray) -> None:
    """Record a step's tokens and control columns. The file appears when it is complete."""
    path = _recording_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    block.save(path, **columns)


def read_recording(folder: str | Path, step: int) -> tuple[TokenBlock, dict[str, NDArray]]:
    """Read the tokens and control columns of a recorded step."""
    return TokenBlock.load(_recording_path(folder, step))


def check_recording(folder: str | Path, num_steps: int, *, routing: bool = False) -> None:
    """Raise ValueError unless the first `num_steps` steps are recorded, with routed experts if `routing`."""
    for step in range(num_steps):
        path = _recording_path(folder, step)
        if not path.is_file():
            count = len(list(Path(folder).glob("step_*.npz")))
            raise ValueError(
                f"rollout.replay={folder}: {path.name} is missing ({count} recorded steps, trainer.max_steps="
                f"{num_steps}); record with rollout.record=true, or lower trainer.max_steps."
            )
        with np.load(path) as file:
            if routing and "routed_experts" not in file.files:
                raise ValueError(
                    f"rollout.routing_replay=true: {path} has no routing; record with rollout.routing_replay=true, or turn "
                    "it off."
                )


def sample_digests(samples: Sequence[Sample]) -> NDArray[np.uint64]:
    """Return [B] a hash of each prompt with its response; the ledger identifies samples by it."""
    return np.array(
        [
            xxhash.xxh3_64_intdigest(np.array([*sample.prompt, -1, *sample.trajectory.token_ids], np.int64).tobytes())
            for sample in samples
        ],
        np.uint64,
    )


def _to_plain(value: Any) -> Any:
    """Encode for msgspec: numpy scalars, and arrays of routed experts."""
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray) and value.dtype == np.int16, f"a {type(value)} in a trajectory"
    return dict(shape=value.shape, data=value.tobytes())


def _from_plain(kind: Any, value: Any) -> NDArray[np.int16]:
    """Rebuild an array that `_to_plain` encoded."""
    return np.frombuffer(value["data"], np.int16).reshape(value["shape"]).copy()


_step_decoder = msgspec.msgpack.Decoder(StepGroups[Group], dec_hook=_from_plain)
_cache_decoder = msgspec.msgpack.Decoder(dict[str, Completion], dec_hook=_from_plain)
