"""Data types of one training step, and the letters that name array dimensions.

    N  number of prompts in a step
    G  number of responses to each prompt; these responses are a group. With rollout.group_sizes, the mean size of a group
    B  number of responses in a step: N * G, plus the number of rows from data.offline.path
    S  number of tokens in a batch: all prompts and responses, concatenated without padding
    R  number of sampled tokens: tokens that the policy sampled, response tokens of offline rows, tokens in a supervised loss
    L  number of tokens of a micro-batch on one trainer rank, padding included
    V  size of the vocabulary
    H  hidden size of the model

A response is everything after its prompt. It may contain tool results. Their tokens are neither sampled nor trained.

The driver holds only metrics, handles, and some numbers for each response (`Rollouts`, `AdvantageResult`). A handle refers to
an object in Ray's object store. The driver never reads that object. Only the rollout worker and the trainer ranks read the tokens
and the columns [R] (`TokenBlock`), which are in the object store.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.durable_files import atomic_file

_COLUMN_PREFIX = "column."  # begins the name of each column in the file of a TokenBlock
_IMAGE_PREFIX, _IMAGE_ROWS = "image.", "image_rows"  # prefix of image arrays, name of the array of (row, image) pairs
OFFLINE = "offline"
"""Name of the column that marks rows of data.offline.path in a TokenBlock: 1 for their tokens, 0 for other sampled tokens."""
Handle = Any  # reference to an object in Ray's object store; only workers read the object
Column = NDArray[np.float32]  # [R] one number per sampled token


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """All images of one prompt, as the vision tower of the model expects them."""

    # [patches of all images, channels * frames * patch height * patch width] colors, normalized by the model's image processor
    pixel_values: NDArray[np.float32]
    grid_thw: NDArray[np.int64]  # [images, 3] number of patches of each image along time, height and width


@dataclass(frozen=True)
class TokenBlock:
    """B sequences, concatenated without padding. Each sequence is a prompt followed by its response."""

    tokens: NDArray[np.int32]  # [S]
    cu_seqlens: NDArray[np.int64]  # [B+1] start of each sequence, and the end of the last
    prompt_lengths: NDArray[np.int64]  # [B] number of tokens
    rollout_logprobs: NDArray[np.float32]  # [R] log-probability of each sampled token, as the engine computed it
    # [S, layers, topk] experts to which the engine routed each token; -1 where the experts are unknown, as for the last token of
    # a sequence. None: the engine reported no experts
    routed_experts: NDArray[np.int16] | None = None
    # [S] whether the token is a sampled token. None: all response tokens are sampled tokens
    sampled: NDArray[np.bool_] | None = None
    # name -> column [R]; names are, for example, advantages and old_logprobs
    columns: Mapping[str, Column] = field(default_factory=dict)
    # teacher -> index of a row -> the teacher's outputs for this row
    teachers: Mapping[str, Mapping[int, "TeacherOutputs"]] = field(default_factory=dict)
    # index of a row -> images of its prompt, for the rows that have images. Responses to one prompt share the same object
    images: Mapping[int, ImageInputs] = field(default_factory=dict)

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]] | None = None,
        routed_experts: Sequence[NDArray[np.int16]] | None = None,
        sampled: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenBlock":
        """Concatenate B prompts and responses.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each response.
            logprobs: for each response, the log-probabilities of its sampled tokens. None: `rollout_logprobs` is NaN.
            routed_experts: for each sequence, an array [n, layers, topk] with the experts of its first n tokens.
            sampled: for each response, whether each token is a sampled token. None: all of them are.
        """
        prompt_lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        response_lengths = np.fromiter(map(len, responses), np.int64, len(responses))
        cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths)])
        flat = [token for pair in zip(prompts, responses, strict=True) for part in pair for token in part]
        is_sampled = None if sampled is None else _is_sampled(prompts, responses, sampled)
        num_sampled = response_lengths.sum() if is_sampled is None else is_sampled.sum()
        if logprobs is None:
            column = np.full(num_sampled, np.nan, np.float32)
        else:
            column = np.fromiter((x for row in logprobs for x in row), np.float32)
        assert len(column) == num_sampled, f"{len(column)} logprobs for {num_sampled} sampled tokens"
        routing = None if routed_experts is None else _concatenate_experts(routed_experts, cu_seqlens)
        return cls(np.array(flat, np.int32), cu_seqlens, prompt_lengths, column, routing, is_sampled)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] number of tokens of each sequence, prompt included."""
        return np.diff(self.cu_seqlens)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B] number of tokens of each response, tool results included."""
        return self.lengths - self.prompt_lengths

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[B] number of sampled tokens of each response. The sum is R."""
        if self.sampled is None:
            return self.response_lengths
        return np.add.reduceat(self.sampled, self.cu_seqlens[:-1], dtype=np.int64)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[S] position of each token in its own sequence, from 0."""
        return np.arange(len(self.tokens)) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @property
    def sampled_index(self) -> NDArray[np.int64]:
        """[R] index of each sampled token in the array `tokens` [S]."""
        if self.sampled is not None:
            return np.flatnonzero(self.sampled)
        return np.flatnonzero(self.positions >= np.repeat(self.prompt_lengths, self.lengths))

    def with_columns(self, **columns: Column) -> "TokenBlock":
        """Return the block with these columns [R] added."""
        num_sampled = int(self.sampled_lengths.sum())
        for name, column in columns.items():
            assert column.shape == (num_sampled,), f"{name} has shape {column.shape} for {num_sampled} sampled tokens"
        return replace(self, columns={**self.columns, **columns})

    def response(self, row: int) -> NDArray[np.int32]:
        """Return the response tokens of the sequence with index `row`."""
        start, end = self.cu_seqlens[row], self.cu_seqlens[row + 1]
        return self.tokens[start + self.prompt_lengths[row] : end]

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Return the prompt tokens of the sequence with index `row`."""
        start = self.cu_seqlens[row]
        return self.tokens[start : start + self.prompt_lengths[row]]

    def select(self, rows: NDArray[np.int64]) -> "TokenBlock":
        """Return a block of the sequences with the indices `rows`, in this order."""
        cu_sampled = np.concatenate([[0], np.cumsum(self.sampled_lengths)])
        spans = [slice(self.cu_seqlens[r], self.cu_seqlens[r + 1]) for r in rows]
        sampled_spans = [slice(cu_sampled[r], cu_sampled[r + 1]) for r in rows]

        def pick(values: NDArray, slices: Sequence[slice]) -> NDArray:
            return np.concatenate([values[each] for each in slices]) if slices else values[:0]

        return TokenBlock(
            pick(self.tokens, spans),
            np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            self.prompt_lengths[rows],
            pick(self.rollout_logprobs, sampled_spans),
            None if self.routed_experts is None else pick(self.routed_experts, spans),
            None if self.sampled is None else pick(self.sampled, spans),
            {name: pick(column, sampled_spans) for name, column in self.columns.items()},
            {
                teacher: {new: by_row[old] for new, old in enumerate(rows.tolist()) if old in by_row}
                for teacher, by_row in self.teachers.items()
            },
            {new: self.images[old] for new, old in enumerate(rows.tolist()) if old in self.images},
        )

    def save(self, path: Path, **extra: NDArray) -> None:
        """Write the block (without `teachers`) and the arrays `extra` to one .npz file, without pickle.

        The file appears at `path` only when it is complete.
        """
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns = {f"{_COLUMN_PREFIX}{name}": column for name, column in self.columns.items()}
        with atomic_file(path) as partial, partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **columns, **_image_arrays(self.images), **extra)

    @classmethod
    def load(cls, path: Path) -> "tuple[TokenBlock, dict[str, NDArray]]":
        """Read a file that `save` has written. Return the block, and a dict with the extra arrays."""
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        columns = {
            name.removeprefix(_COLUMN_PREFIX): arrays.pop(name)
            for name in list(arrays)
            if name.startswith(_COLUMN_PREFIX)
        }
        names = cls.__dataclass_fields__.keys() & arrays.keys()
        images = _read_images(arrays)
        block = cls(**{name: arrays.pop(name) for name in names}, columns=columns, images=images)
        return block, arrays


def _image_arrays(images: Mapping[int, ImageInputs]) -> dict[str, NDArray]:
    """Return the arrays with which a file stores these images. Images that several rows share are stored once."""
    distinct = {id(each): each for each in images.values()}
    numbers = {identity: number for number, identity in enumerate(distinct)}
    arrays = {f"{_IMAGE_PREFIX}{n}.{k}": v for n, each in enumerate(distinct.values()) for k, v in vars(each).items()}
    rows = np.array([(row, numbers[id(each)]) for row, each in images.items()], np.int64)
    return arrays | ({_IMAGE_ROWS: rows} if images else {})


def _read_images(arrays: dict[str, NDArray]) -> dict[int, ImageInputs]:
    """Remove the arrays of `_image_arrays` from `arrays`, and return the images."""
    rows = arrays.pop(_IMAGE_ROWS, np.empty((0, 2), np.int64)).tolist()
    names = ImageInputs.__dataclass_fields__
    distinct = [
        ImageInputs(**{name: arrays.pop(f"{_IMAGE_PREFIX}{number}.{name}") for name in names})
        for number in range(len({number for _, number in rows}))
    ]
    return {row: distinct[number] for row, number in rows}


def _is_sampled(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], sampled: Sequence[Sequence[bool]]
) -> NDArray[np.bool_]:
    """Return [S] whether each token is a sampled token. Prompt tokens are never sampled."""
    for response, flags in zip(responses, sampled, strict=True):
        assert len(flags) == len(response), (
            f"`sampled` has {len(flags)} values for a response of {len(response)} tokens"
        )
    pairs = zip(prompts, sampled, strict=True)
    return np.fromiter((x for prompt, flags in pairs for x in [*[False] * len(prompt), *flags]), np.bool_)


def _concatenate_experts(parts: Sequence[NDArray[np.int16]], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int16]:
    """Return the routed experts [S, layers, topk] of all sequences. Tokens with unknown experts get -1."""
    assert len(parts) == len(cu_seqlens) - 1, f"routed experts of {len(parts)} of {len(cu_seqlens) - 1} sequences"
    column = np.full((cu_seqlens[-1], *parts[0].shape[1:]), -1, np.int16)
    for part, start, end in zip(parts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        assert len(part) <= end - start, f"routed experts of {len(part)} tokens for a sequence of {end - start}"
        column[start : start + len(part)] = part
    return column


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the driver knows about B scored responses. The last `num_offline` of them come from data.offline.path."""

    block: Handle  # refers to the TokenBlock
    prompt_lengths: NDArray[np.int64]  # [B] number of tokens
    response_lengths: NDArray[np.int64]  # [B] number of tokens, tool results included
    sampled_lengths: NDArray[np.int64]  # [B] number of sampled tokens; the sum is R
    rows: NDArray[np.int64]  # [B] index of the prompt's row in the data set; -1 - n for row n of data.offline.path
    # [B] index of the prompt. The step's N prompts have the first indices, followed by the prompts of data.offline.path
    groups: NDArray[np.int64]
    digests: NDArray[np.uint64]  # [B] hash of prompt and response, by which the ledger identifies samples
    truncated: NDArray[np.bool_]  # [B] whether the token limit or the turn limit ended the response
    # [B] oldest weight version that sampled a token of the response; for offline rows, the weight version at the step's start
    weight_versions: NDArray[np.int64]
    rewards: NDArray[np.float64]  # [B]
    # [M, 3] one row for each of M spans of consecutive tokens that one weight version sampled: index of the response, weight
    # version, number of tokens; see mrl.rollout.trajectory.version_spans
    version_spans: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    # [N] serial number of each prompt request: its position, from 0, in the order in which the run draws prompts
    request_numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # (serial number, row in the data set, lowest weight version that may sample, number of responses) of each prompt request on
    # which no step has trained yet; without rollout.group_sizes, the number of responses is left out
    untrained_requests: Sequence[tuple[int, ...]] = ()
    num_drawn_requests: int = 0  # number of prompt requests since the start of the run
    # (row in the data set, mean reward) of each sampled group, including those that the rollout filter rejected
    prompt_rewards: Sequence[tuple[int, float]] = ()
    num_offline: int = 0  # number of responses from data.offline.path
    # whether the rollout filter rejected all sampled groups, so that no update may train on them
    all_filtered: bool = False
    sampling_metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of sampling and scoring
    # teacher -> locations of its outputs
    teachers: Mapping[str, Sequence["TeacherPart"]] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Number of these responses that the policy sampled. They come before the responses of data.offline.path."""
        return len(self.groups) - self.num_offline

    @property
    def mean_reward(self) -> float:
        """Mean of the mean rewards of all sampled groups. For groups of equal size, it is the mean over all responses."""
        rewards, groups = self.rewards[: self.num_sampled], self.groups[: self.num_sampled]
        sizes = np.bincount(groups)[groups]
        return float(np.average(rewards, weights=1 / sizes)) if np.ptp(sizes) else float(rewards.mean())

    def metrics(self, version: int) -> dict[str, float]:
        """Return the metrics of the batch. `version` is the weight version that is trained on the batch.

        Except for batch/offline_*, the metrics describe the policy, so they do not include the responses of data.offline.path.
        """
        sampled = slice(self.num_sampled)
        ages, tokens = version - self.weight_versions[sampled], self.version_spans[:, 2]
        token_age = (
            float(np.average(version - self.version_spans[:, 1], weights=tokens))
            if tokens.any()
            else float(ages.mean())
        )
        return {
            "reward/mean": self.mean_reward,
            "rollout/samples": float(self.num_sampled),
            "rollout/tokens": float(self.sampled_lengths[sampled].sum()),
            "rollout/response_length_mean_tokens": float(self.response_lengths[sampled].mean()),
            "rollout/truncated_fraction": float(self.truncated[sampled].mean()),
            "rollout/weight_version": float(self.weight_versions[sampled].min()),
            "rollout/staleness_mean": float(ages.mean()),
            "rollout/staleness_max": float(ages.max()),
            "rollout/token_staleness_mean": token_age,
            "rollout/mixed_versions_fraction": float((np.bincount(self.version_spans[:, 0]) > 1).mean())
            if len(tokens)
            else 0.0,
            **self._offline_metrics(),
            **self.sampling_metrics,
        }

    def _offline_metrics(self) -> dict[str, float]:
        if not self.num_offline:
            return {}
        return {
            "batch/offline_samples": float(self.num_offline),
            "batch/offline_reward_mean": float(self.rewards[self.num_sampled :].mean()),
        }


@dataclass(frozen=True)
class ColumnPart:
    """The part of a column that one trainer rank computed: the values of some rows of a block."""

    rows: NDArray[np.int64]  # [n] indices of rows of the block
    values: Column  # values of the sampled tokens of these rows, concatenated

    def by_row(self, lengths: NDArray[np.int64]) -> dict[int, Column]:
        """Return a dict: index of a row -> values of the row. `lengths` [B] are the numbers of sampled tokens of all rows."""
        pieces = np.split(self.values, np.cumsum(lengths[self.rows]))
        return dict(zip(self.rows.tolist(), pieces[:-1], strict=True))


TeacherOutputs = Mapping[str, NDArray]
"""The outputs of a teacher that distillation reads: several numbers for each of n sampled tokens, by name.

    hidden        [n, H] final hidden states of the teacher. NumPy has no bfloat16, so bfloat16 is stored as int16 with equal bits
    top_logprobs  [n, k + 1] log-probabilities of the teacher's k most probable tokens, in descending order, and of all other
                  tokens together
    top_ids       [n, k] int32 ids of the k tokens
"""


@dataclass(frozen=True)
class TeacherPart:
    """The outputs of a teacher for some rows of a block. The driver knows the rows, and the trainer ranks read the outputs."""

    rows: NDArray[np.int64]  # [n] indices of rows of the block
    outputs: Handle  # refers to TeacherOutputs of the sampled tokens of these rows, concatenated


def teacher_outputs_by_row(
    rows: NDArray[np.int64], outputs: TeacherOutputs, lengths: NDArray[np.int64]
) -> dict[int, TeacherOutputs]:
    """Return index of a row -> outputs of this row, for all `rows`. `lengths` [B]: numbers of sampled tokens. Copies nothing."""
    ends = np.cumsum(lengths[rows])
    spans = zip(rows.tolist(), ends - lengths[rows], ends, strict=True)
    return {row: {name: values[start:end] for name, values in outputs.items()} for row, start, end in spans}


@dataclass(frozen=True)
class RankColumns:
    """Results of a forward pass on one trainer rank."""

    parts: Mapping[str, Handle]  # name of a column -> handle of a ColumnPart; only one rank of a replica has parts
    seconds: float  # duration of the pass on this rank
    teacher_parts: Sequence[TeacherPart] = ()  # outputs of a teacher; only one rank of a replica has them


def assemble_column(parts: Iterable[ColumnPart], lengths: NDArray[np.int64], fill: float | None = None) -> Column:
    """Return the whole column [R]. `lengths` [B] are the numbers of sampled tokens of all rows of the block.

    `fill`: value for the tokens of rows that are in no part. None: every row must be in a part.
    """
    rows: dict[int, Column] = {}
    for part in parts:
        rows |= part.by_row(lengths)
    if fill is not None:
        missing = {
            row: np.full(length, fill, np.float32) for row, length in enumerate(lengths.tolist()) if row not in rows
        }
        rows |= missing
    assert len(rows) == len(lengths), f"the parts have {len(rows)} rows, but the block has {len(lengths)}"
    return np.concatenate([np.empty(0, np.float32), *(rows[row] for row in range(len(lengths)))])


@dataclass(frozen=True)
class AdvantageResult:
    """What the driver knows about the advantages of B responses."""

    columns: Handle  # refers to a dict, name -> column [R]: the advantages, and other columns that the losses need
    zero_advantage: NDArray[np.bool_]  # [B] whether the advantage of every token is zero
    excluded: NDArray[np.bool_]  # [B] whether the response is excluded from the loss and from the loss's denominators
    metrics: Mapping[str, float]
    counts: NDArray[np.int64] | None = None  # [B] how often the response counts in the loss; None: once
    has_returns: bool = True  # whether the columns have the returns that a critic learns


@dataclass(frozen=True)
class TrainBatch:
    """What the driver knows about the rows of a block on which one optimizer step trains."""

    block: Handle  # refers to the TokenBlock, which has B rows
    prompt_lengths: NDArray[np.int64]  # [B] number of tokens
    response_lengths: NDArray[np.int64]  # [B] number of tokens
    sampled_lengths: NDArray[np.int64]  # [B] number of tokens in the loss
    # [B] index of the prompt; for rows with the same index, the prompt may be computed once. None: the indices are unknown
    groups: NDArray[np.int64] | None
    rows: NDArray[np.int64]  # indices of the rows on which the step trains
    # Indices of the rows that count in the denominators of the loss: `rows`, and rows whose loss is known to be 0. If a row
    # occurs n times in this array, its tokens have n times the weight
    denominator_rows: NDArray[np.int64]
    columns: Handle = None  # refers to a dict, name -> column [R] of the block
    # teacher -> locations of its outputs
    teachers: Mapping[str, Sequence[TeacherPart]] = field(default_factory=dict)
    # whether all rows of a group are in one micro-batch, for a loss that compares the responses of a group
    whole_groups: bool = False

    @classmethod
    def of(cls, block: TokenBlock, groups: NDArray[np.int64] | None) -> "TrainBatch":
        """Return a batch of all rows of a block."""
        rows = np.arange(len(block.lengths))
        return cls(block, block.prompt_lengths, block.response_lengths, block.sampled_lengths, groups, rows, rows)


@dataclass(frozen=True)
class SupervisedRows:
    """What the driver knows about the rows of a supervised data set.

    Row i of the file has the sequences i * sequences_per_row, i * sequences_per_row + 1, ... of the block. For KTO, num_rows
    sequences may follow (one for each row): sequence num_rows + i is the prompt of row i with the response to another prompt.
    """

    block: Handle  # refers to the TokenBlock with B sequences
    lengths: NDArray[np.int64]  # [B] number of tokens
    response_lengths: NDArray[np.int64]  # [B] number of tokens
    sampled_lengths: NDArray[np.int64]  # [B] number of tokens in the loss
    num_rows: int  # rows of the file
    sequences_per_row: int  # 2: each row is a pair, otherwise 1

    def sequences_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the sequences of these rows of the file, in the order of `rows`."""
        return (rows[:, None] * self.sequences_per_row + np.arange(self.sequences_per_row)).ravel()

    def mismatched_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each row's sequence with the response to another prompt; empty if there are no such sequences."""
        return rows + self.num_rows if len(self.lengths) > self.num_rows * self.sequences_per_row else rows[:0]

    def batch(self, sequences: NDArray[np.int64]) -> TrainBatch:
        """Return a batch of these sequences. The sequences of a pair have the same group."""
        is_paired = self.sequences_per_row > 1
        groups = np.arange(len(self.lengths)) // self.sequences_per_row if is_paired else None
        lengths = (self.lengths - self.response_lengths, self.response_lengths, self.sampled_lengths)
        return TrainBatch(self.block, *lengths, groups, sequences, sequences, whole_groups=is_paired)


@dataclass(frozen=True)
class ReplicaBatch:
    """The rows on which one data-parallel replica trains in one optimizer step, divided into micro-batches."""

    # Rows of each micro-batch. Some micro-batches may have no rows if vpp > 1 or ParallelDims.equal_micro_batch_counts is true
    micro_batches: tuple[NDArray[np.int64], ...]
    weights: NDArray[np.float64]  # [B] token weight in the loss; all tokens of a row have the same token weight
    # [B] index of the prompt. Rows of a micro-batch with the same index share one copy of the prompt. None: no rows share one
    groups: NDArray[np.int64] | None = None
    step_tokens: int = 1  # number of tokens that all replicas together compute in this optimizer step
    sampled_tokens: int = 1  # number of sampled tokens among the `step_tokens`


@dataclass(frozen=True)
class SyncReport:
    """Report of one sender on one weight push. Without engines, all values are 0."""

    bytes: int = 0  # number of bytes sent, summed over all receivers; for disk and adapters: bytes written
    uncompressed_bytes: int = 0  # size of the same data before compression
    tensors: int = 0  # number of Hugging Face tensors of which this rank sent parts
    buckets: int = 0  # number of buckets sent, counted once for each receiver
    seconds: float = 0.0  # duration of the push
    engine_wait_seconds: float = 0.0  # the part of `seconds` in which the sender waited for engines
    failed: dict[str, str] = field(default_factory=dict)  # URL of a failed engine -> reason of the failure
    must_repeat: bool = False  # True: the engines did not accept the version, so the driver pushes it again
    # name of the LoRA adapters that the engines have loaded; each request must give this name. None: requests give no name
    adapter: str | None = None


@dataclass(frozen=True)
class UpdateReport:
    """Metrics of one optimizer step from one rank. The driver combines the reports of all replicas."""

    sums: dict[str, float] = field(default_factory=dict)  # the driver adds these values
    maxima: dict[str, float] = field(default_factory=dict)  # the driver takes the largest of these values


@dataclass(frozen=True)
class DeviceSlot:
    """A device of the cluster that is reserved for a process of one role."""

    node: str  # Ray's node id
    host: str  # address of the node
    device: str  # id of the GPU on its node; empty for a CPU
    options: Mapping[str, Any]  # Ray actor options that start a process on the device
