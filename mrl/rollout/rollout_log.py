"""Sampled data on disk: the rollout log, the completion cache, recorded steps, and text samples.

- `RolloutLog` holds the scored groups of every step since the last checkpoint. A run that resumes from this checkpoint trains
  on the same responses again.
- `CompletionCache` holds the completions of groups that no step has taken yet. If a process fails, these completions are not
  sampled again.
- Recorded steps hold tokens and the columns that the driver sees. With `rollout.record`, a run writes them. With
  `rollout.replay`, a run trains on them instead of new samples, under any parallel layout.
- Text samples are the responses that samples.jsonl keeps, with the text, log-probability and advantage of each token.

mrl.core.types explains the letters in shapes such as [R] and [B].
"""

import json
import logging
import math
import os
import re
import shutil
import struct
import threading
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from mrl.core.sample_file import MAX_TOKENS, TextSample, shortened
from mrl.core.types import Column, TokenBlock
from mrl.data.prompts import PromptDataset
from mrl.rollout.client import Completion
from mrl.rollout.trajectory import Group, Sample, StepGroups, Trajectory
from parallel.durable_files import fsync_path

logger = logging.getLogger(__name__)

ZSTD_LEVEL = 1  # compression level; 1 is fast
_STEP_FILE = re.compile(r"step_(\d+)\.msgpack\.zst")  # file name in the rollout log
_CACHE_SUFFIX = ".completions"
_CACHE_FILE = re.compile(rf"step_(\d+)-\w+\{_CACHE_SUFFIX}")  # file name in the completion cache
_DIGEST_BYTES = 8  # length of a hash of `_digest`
_RECORD_LENGTH = struct.Struct("<Q")  # first field of each record: the length of its compressed content in bytes


class RolloutLog:
    """The scored groups of each step, in one compressed file per step, without pickle. A file ends with its hash.

    A file appears only when it is complete and on the disk. A file with the same prompts is not overwritten, so a process that
    outlives its run cannot replace samples of the next run. `key` is a hash of the settings, the data and the initial model
    weights. Entries with other keys are not read. They are deleted only at the next checkpoint, because the user may have
    mistyped a setting, and may start the run again with the right one.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.folder = root, root / key
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, step: int, groups: StepGroups[Group]) -> StepGroups[Group]:
        """Write the groups of a step, and return the groups on which the step must train.

        If the log already has the step with the same prompts, returns the groups in the log. Otherwise, returns `groups`. If the
        file cannot be written, a warning is logged and the run continues.
        """
        content = msgspec.msgpack.encode(groups, enc_hook=_encode_numpy)
        path, partial = self._path(step), self.folder / f".partial-{uuid.uuid4().hex[:8]}"
        try:
            frame = zstandard.compress(content, ZSTD_LEVEL)
            partial.write_bytes(frame + _digest(frame, step))
            fsync_path(partial)  # before the step trains, because a resumed run must train on the same groups
            os.link(partial, path)  # fails if `path` exists
            fsync_path(self.folder)
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
        """Return the groups of a step, or None if there is no valid entry. A damaged entry is deleted with a warning."""
        try:
            content = self._path(step).read_bytes()
            frame, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
            if digest != _digest(frame, step):
                self.remove(step, "is damaged, or it is the entry of another step")
                return None
            return _step_decoder.decode(zstandard.decompress(frame))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, zstandard.ZstdError) as error:
            self.remove(step, f"cannot be read: {error}")
            return None

    def remove(self, step: int, reason: str) -> None:
        """Delete the entry of a step, and log the reason."""
        logger.warning("%s %s; it is removed", self._path(step), reason)
        self._path(step).unlink(missing_ok=True)

    def discard(self, before_step: int) -> None:
        """Delete the entries of steps before `before_step`, and all entries with other keys.

        The cached completions with the key of this log stay.
        """
        for folder in self.root.iterdir():
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)
        for path in self.folder.iterdir():
            name = _STEP_FILE.fullmatch(path.name)
            if path.suffix != _CACHE_SUFFIX and (name is None or int(name[1]) < before_step):
                path.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.msgpack.zst"


def _digest(frame: bytes, step: int) -> bytes:
    """Return a hash of the compressed content and of the step. A file of another step therefore has another hash."""
    return xxhash.xxh3_64_digest(frame, seed=step)


def _rows(groups: StepGroups[Group]) -> list[int]:
    """Return, for each group, its row in the data set."""
    return [group.row for group in [*groups.groups, *groups.filtered]]


class CompletionCache:
    """Finished completions on disk. A completion is identified by the serial number of its response and by its input tokens.

    Each turn of a multi-turn response is one completion. There is one file per process and step. A file is a sequence of
    records: length, hash, compressed content. A damaged or truncated record is skipped with a warning. If the disk is full, a
    warning is logged and the run continues.

    The thread of the engines' requests calls `get` and `put` while other threads call the other methods, so a lock guards the
    file.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        """Read the completions of earlier processes. New completions belong to `step` until `begin_step` is called."""
        self._folder, self._step = folder, step
        self._completions: dict[int, dict[str, Completion]] = {}  # step -> result of `_key` -> completion
        self._file: BinaryIO | None = None
        self._file_lock = threading.Lock()
        self._write_failed = False
        self.read()

    def read(self) -> None:
        """Read all files, including those of this process, so that `get` finds their completions."""
        completions: dict[int, dict[str, Completion]] = {}
        for step, path in self._paths():
            completions.setdefault(step, {}).update(_read_records(path, step))
        self._completions = completions

    def begin_step(self, step: int) -> None:
        """Let all later completions belong to `step`."""
        with self._file_lock:
            if step != self._step and self._file is not None:
                self._file.close()
                self._file = None
            self._step = step

    def __len__(self) -> int:
        return sum(map(len, self._completions.values()))

    def get(self, number: int, inputs: Sequence[int]) -> Completion | None:
        """Return the completion for these input tokens, or None if `read` found no such completion.

        `number`: serial number of the response in the run.
        """
        key = _key(number, inputs)
        return next((of_step[key] for of_step in self._completions.values() if key in of_step), None)

    def put(self, numbers: Sequence[int], inputs: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Append the completions of one HTTP request to the file of this step. Aborted completions are not stored."""
        items = zip(numbers, inputs, completions, strict=True)
        found = {_key(number, tokens): done for number, tokens, done in items if done.finish_reason != "abort"}
        content = msgspec.msgpack.encode(found, enc_hook=_encode_numpy)
        frame = zstandard.compress(content, ZSTD_LEVEL)
        try:
            with self._file_lock:
                self._append(frame)
        except OSError as error:
            self._write_failed = True  # the last record may be truncated; a reader would not find records after it
            logger.warning("completions are no longer cached on disk: %s", error)

    def _append(self, frame: bytes) -> None:
        if self._file is None:
            name = f"step_{self._step:06d}-{uuid.uuid4().hex[:8]}{_CACHE_SUFFIX}"
            self._file = (self._folder / name).open("ab", buffering=0)
        if not self._write_failed:
            self._file.write(_RECORD_LENGTH.pack(len(frame)) + _digest(frame, self._step) + frame)

    def discard(self, before_step: int) -> None:
        """Delete the completions of steps before `before_step`, because no later step needs the groups of these steps."""
        for step, path in self._paths():
            if step < before_step:
                path.unlink(missing_ok=True)
        self._completions = {step: found for step, found in self._completions.items() if step >= before_step}

    def _paths(self) -> list[tuple[int, Path]]:
        """Return (step, path) of each file of the cache."""
        named = ((_CACHE_FILE.fullmatch(path.name), path) for path in sorted(self._folder.glob(f"*{_CACHE_SUFFIX}")))
        return [(int(name[1]), path) for name, path in named if name]


def _key(number: int, inputs: Sequence[int]) -> str:
    """Return the identifier of a completion: the serial number of its response, and a hash of its input tokens."""
    return f"{number}:{xxhash.xxh3_128_hexdigest(np.array(inputs, np.int64).tobytes())}"


def _read_records(path: Path, step: int) -> Iterator[tuple[str, Completion]]:
    """Yield (result of `_key`, completion) for each completion in a file of the cache."""
    content, start = path.read_bytes(), 0
    num_damaged = int(not content)  # `put` creates a file for a record, so an empty file has lost this record
    while start < len(content):
        begin = start + _RECORD_LENGTH.size + _DIGEST_BYTES
        length = _RECORD_LENGTH.unpack_from(content, start)[0] if begin <= len(content) else len(content)
        digest, frame = content[start + _RECORD_LENGTH.size : begin], content[begin : begin + length]
        start = begin + length
        if digest == _digest(frame, step):
            yield from _cache_decoder.decode(zstandard.decompress(frame)).items()
        else:  # if the length is damaged, all later records are lost too
            num_damaged += 1
    if num_damaged:
        logger.warning("%s: %d damaged or truncated records; their responses are sampled again", path, num_damaged)


def _recording_path(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.npz"


def write_recording(folder: str | Path, step: int, block: TokenBlock, **columns: NDArray) -> None:
    """Write the tokens of a step and the columns that the driver sees. The file appears only when it is complete."""
    path = _recording_path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    block.save(path, **columns)


def read_recording(folder: str | Path, step: int) -> tuple[TokenBlock, dict[str, NDArray]]:
    """Return the tokens of a recorded step and the columns that the driver sees."""
    return TokenBlock.load(_recording_path(folder, step))


def check_recording(folder: str | Path, num_steps: int, *, routing: bool = False) -> None:
    """Raise ValueError if one of the first `num_steps` steps is not recorded or is damaged.

    With `routing`, also raise ValueError if a step has no routed experts.
    """
    for step in range(num_steps):
        path = _recording_path(folder, step)
        if not path.is_file():
            count = len(list(Path(folder).glob("step_*.npz")))
            raise ValueError(
                f"rollout.replay={folder}: {path.name} is missing ({count} recorded steps, trainer.max_steps="
                f"{num_steps}); record more steps with rollout.record=true, or lower trainer.max_steps."
            )
        if damage := _find_damage(path):
            raise ValueError(
                f"rollout.replay={folder}: {path.name} is damaged ({damage}); record the steps again with rollout.record=true."
            )
        with np.load(path) as file:
            if routing and "routed_experts" not in file.files:
                raise ValueError(
                    f"rollout.routing_replay=true: {path} has no routed experts; record the steps again with "
                    "rollout.routing_replay=true, or set rollout.routing_replay=false."
                )


def _find_damage(path: Path) -> str | None:
    """Return how an .npz file is damaged, or None. The archive has a checksum (CRC-32) of each array."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return f"the checksum of {damaged} is wrong" if damaged else None


def sample_digests(samples: Sequence[Sample]) -> NDArray[np.uint64]:
    """Return one hash for each prompt with its response. For each group, the ledger (ledger.jsonl) has a hash of these hashes."""
    return np.array(
        [
            xxhash.xxh3_64_intdigest(np.array([*sample.prompt, -1, *sample.trajectory.token_ids], np.int64).tobytes())
            for sample in samples
        ],
        np.uint64,
    )


def _encode_numpy(value: Any) -> Any:
    """Return a numpy scalar, or an array of routed experts, as a value that msgspec can encode."""
    if isinstance(value, np.generic):
        return value.item()
    assert isinstance(value, np.ndarray) and value.dtype == np.int16, f"a trajectory holds a {type(value)}"
    return dict(shape=value.shape, data=value.tobytes())


def _decode_routing(kind: Any, value: Any) -> NDArray[np.int16]:
    """Return the array that `_encode_numpy` encoded."""
    return np.frombuffer(value["data"], np.int16).reshape(value["shape"]).copy()


_step_decoder = msgspec.msgpack.Decoder(StepGroups[Group], dec_hook=_decode_routing)
_cache_decoder = msgspec.msgpack.Decoder(dict[str, Completion], dec_hook=_decode_routing)


DIGITS = 6  # digits after the decimal point of log-probabilities and advantages


def text_samples(
    groups: Sequence[Group], chosen: Sequence[int], data: PromptDataset, columns: Mapping[str, Column]
) -> list[TextSample]:
    """Return the `chosen` responses as text.

    Args:
        groups: the groups of a step, with B responses in all.
        chosen: indices among the B responses.
        data: decodes tokens, and has the data source and the ground truth of each row.
        columns: name of a column -> values [R] of all sampled tokens of the step. Only "advantages" and "old_logprobs" are used.
    """
    samples = [(index, sample) for index, group in enumerate(groups) for sample in group.samples]
    ends = np.cumsum([sample.trajectory.num_sampled for _, sample in samples])
    return [
        replace(
            _text_sample(*samples[index], data, {name: _part(column, ends, index) for name, column in columns.items()}),
            group_rewards=[float(reward) for reward in groups[samples[index][0]].rewards],
        )
        for index in chosen
    ]


def _part(column: Column, ends: NDArray[np.int64], index: int) -> Column:
    """Return the values of response `index`. `ends` [B]: end of each response in the column."""
    return column[ends[index - 1] if index else 0 : ends[index]]


def _text_sample(group: int, sample: Sample, data: PromptDataset, columns: Mapping[str, Column]) -> TextSample:
    """Return a response as text. `columns`: name of a column -> values of the sampled tokens of this response."""
    trajectory = sample.trajectory
    prompt, response = data.decode([sample.prompt, trajectory.token_ids])
    return TextSample(
        prompt=shortened(prompt),
        response=shortened(response),
        reward=float(sample.score.value),
        row=int(sample.row),
        weight_version=int(trajectory.weight_version),
        num_tokens=trajectory.num_sampled,
        truncated=bool(trajectory.truncated),
        parts={name: float(value) for name, value in sample.score.parts.items()},
        failure=sample.score.failure and sample.score.failure.encode(errors="replace").decode(),  # no lone surrogates
        group=group,
        source=data.data_source(sample.row) or None,
        ground_truth=_ground_truth_text(data.ground_truth(sample.row)),
        turns=[{"role": turn.role, "text": shortened(turn.text)} for turn in trajectory.texts(data.decode)],
        **_token_lists(trajectory, data, columns),
    )


def _ground_truth_text(value: Any) -> str | None:
    """Return a ground truth as shortened text; None if the row has none. Lists and objects become JSON."""
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text.encode(errors="replace").decode())


def _token_lists(trajectory: Trajectory, data: PromptDataset, columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the fields of TextSample that are lists with one entry for each kept token, and the field `omitted_tokens`.

    If a response has more than MAX_TOKENS tokens, only the first MAX_TOKENS // 2 and the last MAX_TOKENS // 2 tokens are kept.
    """
    total = len(trajectory.token_ids)
    kept = list(range(total))
    if total > MAX_TOKENS:
        kept = [*kept[: MAX_TOKENS // 2], *kept[total - MAX_TOKENS // 2 :]]
    sampled = trajectory.sampled or [True] * total
    position = (np.cumsum(sampled) - 1).tolist()  # index of each sampled token in a column
    spans = trajectory.versions or ((trajectory.weight_version, trajectory.num_sampled),)
    versions = [version for version, tokens in spans for _ in range(tokens)]

    def values(column: Sequence[float] | Column | None) -> list[float | None]:
        if column is None:
            return [None] * len(kept)
        rounded = np.round(np.asarray(column, np.float64), DIGITS).tolist()
        found = [rounded[position[index]] if sampled[index] else math.nan for index in kept]
        return [None if math.isnan(value) else value for value in found]

    return dict(
        tokens=data.token_texts([trajectory.token_ids[index] for index in kept]),
        trained=[int(sampled[index]) for index in kept],
        logprobs=values(trajectory.logprobs),
        trainer_logprobs=values(columns.get("old_logprobs")),
        advantages=values(columns.get("advantages")),
        versions=[versions[position[index]] if sampled[index] else None for index in kept],
        omitted_tokens=total - len(kept),
    )
