"""Data types of one training step, and the legend of shapes.

    N  prompts of a step                 G  responses per prompt            B = N * G  responses
    S  tokens of a ragged batch: all prompts and responses, concatenated    R  those of the S tokens that the policy sampled
    V  vocabulary

A response is everything after its prompt. A response of several turns contains tool results too; they are neither sampled nor
trained. The data plane (`TokenBlock` and columns [R]) stays in Ray's object store, with the rollout worker and the trainer
ranks. The driver sees only the control plane (`Rollouts`, `AdvantageResult`): lengths, rewards, group numbers, weight versions,
and handles, which it never dereferences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parallel.durable_files import atomic_file

_COLUMN = "column."  # prefix of `columns` in a block's file
Handle = Any  # reference to an object in Ray's object store; only workers dereference it
Column = NDArray[np.float32]  # [R] one number per sampled token


@dataclass(frozen=True)
class TokenBlock:
    """B sequences, each a prompt followed by its response; ragged, without padding."""

    tokens: NDArray[np.int32]  # [S]
    cu_seqlens: NDArray[np.int64]  # [B+1] running sum of sequence lengths
    prompt_lengths: NDArray[np.int64]  # [B]
    rollout_logprobs: NDArray[np.float32]  # [R] log-probability of each sampled token, as the engine computed it
    # [S, layers, topk] experts that the engine routed each token to; -1 if unknown, as for the last token of a sequence
    routed_experts: NDArray[np.int16] | None = None
    sampled: NDArray[np.bool_] | None = (
        None  # [S] whether the policy sampled the token; None: all response tokens are sampled
    )
    columns: Mapping[str, Column] = field(default_factory=dict)  # [R] by name: advantages, old_logprobs, values, ...

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]] | None = None,
        routed_experts: Sequence[NDArray[np.int16]] | None = None,
        sampled: Sequence[Sequence[bool]] | None = None,
    ) -> "TokenBlock":
        """Concatenate B prompts and responses. Without `logprobs` that column is NaN.

        Args:
            prompts: token ids of each prompt.
            responses: token ids of each response.
            logprobs: of the sampled tokens of each response.
            routed_experts: of the first tokens of each sequence, each [tokens or fewer, layers, topk].
            sampled: of each response, whether the policy sampled the token; None: it sampled all.
        """
        prompt_lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        response_lengths = np.fromiter(map(len, responses), np.int64, len(responses))
        cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths)])
        flat = [token for pair in zip(prompts, responses, strict=True) for part in pair for token in part]
        chosen = None if sampled is None else _where_sampled(prompts, responses, sampled)
        num_sampled = response_lengths.sum() if chosen is None else chosen.sum()
        if logprobs is None:
            column = np.full(num_sampled, np.nan, np.float32)
        else:
            column = np.fromiter((x for row in logprobs for x in row), np.float32)
        assert len(column) == num_sampled, f"{len(column)} logprobs for {num_sampled} sampled tokens"
        routing = None if routed_experts is None else _concatenate_experts(routed_experts, cu_seqlens)
        return cls(np.array(flat, np.int32), cu_seqlens, prompt_lengths, column, routing, chosen)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each sequence, prompt and response."""
        return np.diff(self.cu_seqlens)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each response, sampled or not."""
        return self.lengths - self.prompt_lengths

    @property
    def sampled_lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each response that the policy sampled; their sum is R."""
        if self.sampled is None:
            return self.response_lengths
        return np.add.reduceat(self.sampled, self.cu_seqlens[:-1], dtype=np.int64)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[S] position of each token in its own sequence."""
        return np.arange(len(self.tokens)) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @property
    def sampled_index(self) -> NDArray[np.int64]:
        """[R] indices, among the S tokens, of the sampled ones."""
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
        """Return the response tokens of one sequence."""
        start, end = self.cu_seqlens[row], self.cu_seqlens[row + 1]
        return self.tokens[start + self.prompt_lengths[row] : end]

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Return the prompt tokens of one sequence."""
        start = self.cu_seqlens[row]
        return self.tokens[start : start + self.prompt_lengths[row]]

    def select(self, rows: NDArray[np.int64]) -> "TokenBlock":
        """Return the block of these rows, in this order."""
        cu_sampled = np.concatenate([[0], np.cumsum(self.sampled_lengths)])
        spans = [slice(self.cu_seqlens[r], self.cu_seqlens[r + 1]) for r in rows]
        chosen = [slice(cu_sampled[r], cu_sampled[r + 1]) for r in rows]

        def pick(values: NDArray, where: Sequence[slice]) -> NDArray:
            return np.concatenate([values[span] for span in where]) if where else values[:0]

        return TokenBlock(
            pick(self.tokens, spans),
            np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            self.prompt_lengths[rows],
            pick(self.rollout_logprobs, chosen),
            None if self.routed_experts is None else pick(self.routed_experts, spans),
            None if self.sampled is None else pick(self.sampled, spans),
            {name: pick(column, chosen) for name, column in self.columns.items()},
        )

    def save(self, path: Path, **extra: NDArray) -> None:
        """Write tokens, columns and `extra` arrays to one .npz file, without pickle. The file appears when it is complete."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns = {f"{_COLUMN}{name}": column for name, column in self.columns.items()}
        with atomic_file(path) as partial, partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **columns, **extra)

    @classmethod
    def load(cls, path: Path) -> "tuple[TokenBlock, dict[str, NDArray]]":
        """Read what `save` wrote: the block, and the extra arrays by name."""
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        columns = {name.removeprefix(_COLUMN): arrays.pop(name) for name in list(arrays) if name.startswith(_COLUMN)}
        names = cls.__dataclass_fields__.keys() & arrays.keys()
        block = cls(**{name: arrays.pop(name) for name in names}, columns=columns)
        return block, arrays


def _where_sampled(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], sampled: Sequence[Sequence[bool]]
) -> NDArray[np.bool_]:
    """Return [S] whether each token was sampled. Prompt tokens never are."""
    for response, chosen in zip(responses, sampled, strict=True):
        assert len(chosen) == len(response), f"{len(chosen)} marks for a response of {len(response)} tokens"
    pairs = zip(prompts, sampled, strict=True)
    return np.fromiter((x for prompt, chosen in pairs for x in [*[False] * len(prompt), *chosen]), np.bool_)


def _concatenate_experts(parts: Sequence[NDArray[np.int16]], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int16]:
    """Concatenate the routed experts of each sequence to [S, ...]; missing tokens at the end of a sequence get -1."""
    assert len(parts) == len(cu_seqlens) - 1, f"routed experts of {len(parts)} of {len(cu_seqlens) - 1} sequences"
    column = np.full((cu_seqlens[-1], *parts[0].shape[1:]), -1, np.int16)
    for part, start, end in zip(parts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        assert len(part) <= end - start, f"routed experts of {len(part)} tokens for a sequence of {end - start}"
        column[start : start + len(part)] = part
    return column


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """B sampled and scored responses, as the driver sees them."""

    block: Handle  # of the TokenBlock
    prompt_lengths: NDArray[np.int64]  # [B] tokens
    response_lengths: NDArray[np.int64]  # [B] tokens, tool results included
    sampled_lengths: NDArray[np.int64]  # [B] tokens that the policy sampled; their sum is R
    rows: NDArray[np.int64]  # [B] row of the data set
    groups: NDArray[np.int64]  # [B] index of the prompt among the step's N prompts
    digests: NDArray[np.uint64]  # [B] hash of prompt and response
    truncated: NDArray[np.bool_]  # [B] whether the response was cut at the token limit
    weight_versions: NDArray[np.int64]  # [B] oldest weight version that sampled a token of the response
    rewards: NDArray[np.float64]  # [B]
    # [M, 3] (response, weight version, tokens that the version sampled), see mrl.rollout.trajectory.spans
    spans: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    # [N] numbers of the prompt requests, in the order in which the run drew them
    request_numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    # (number, row, weight version at dispatch) of the prompt requests that no step has trained yet
    waiting: Sequence[tuple[int, int, int]] = ()
    drawn: int = 0  # prompt requests so far
    sampling_metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of sampling and scoring

    def metrics(self, version: int) -> dict[str, float]:
        """Return the metrics of the batch, for a trainer with weight version `version`."""
        ages, tokens = version - self.weight_versions, self.spans[:, 2]
        token_age = (
            float(np.average(version - self.spans[:, 1], weights=tokens)) if tokens.any() else float(ages.mean())
        )
        return {
            "reward/mean": float(self.rewards.mean()),
            "rollout/samples": float(len(self.groups)),
            "rollout/tokens": float(self.sampled_lengths.sum()),
            "rollout/response_length_mean_tokens": float(self.response_lengths.mean()),
            "rollout/truncated_fraction": float(self.truncated.mean()),
            "rollout/weight_version": float(self.weight_versions.min()),
            "rollout/age_mean_versions": float(ages.mean()),
            "rollout/age_max_versions": float(ages.max()),
            "rollout/token_age_mean_versions": token_age,
            "rollout/mixed_versions_fraction": float((np.bincount(self.spans[:, 0]) > 1).mean())
            if len(tokens)
            else 0.0,
            **self.sampling_metrics,
        }


@dataclass(frozen=True)
class ColumnPart:
    """Values of a column for some rows of a block, computed by one trainer rank."""

    rows: NDArray[np.int64]  # [n] rows of the block
    values: Column  # of their sampled tokens, concatenated

    def by_row(self, lengths: NDArray[np.int64]) -> dict[int, Column]:
        """Return row -> values. `lengths`: [B] sampled tokens of all rows of the block."""
        pieces = np.split(self.values, np.cumsum(lengths[self.rows]))
        return dict(zip(self.rows.tolist(), pieces[:-1], strict=True))


def assemble(parts: Iterable[ColumnPart], lengths: NDArray[np.int64]) -> Column:
    """Assemble the whole column [R]. `lengths`: [B] sampled tokens of all rows of the block."""
    rows: dict[int, Column] = {}
    for part in parts:
        rows |= part.by_row(lengths)
    assert len(rows) == len(lengths), f"a column of {len(rows)} rows for a block of {len(lengths)}"
    return np.concatenate([np.empty(0, np.float32), *(rows[row] for row in range(len(lengths)))])


@dataclass(frozen=True)
class AdvantageResult:
    """Advantages of B responses, as the driver sees them."""

    columns: Handle  # name -> [R]: advantages, and the other columns that the losses need
    without_advantage: NDArray[np.bool_]  # [B] whether the advantage of every token is zero
    rejected: NDArray[np.bool_]  # [B] whether the response is excluded from the loss and from its denominators
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a block for one optimizer step, as the driver sees them."""

    block: Handle
    prompt_lengths: NDArray[np.int64]  # [B] tokens, by row of the block
    response_lengths: NDArray[np.int64]  # [B] tokens
    sampled_lengths: NDArray[np.int64]  # [B] tokens in the loss
    groups: NDArray[np.int64] | None  # [B] index of the prompt; None: unknown, so no prompt is shared
    rows: NDArray[np.int64]  # rows to train
    counted: NDArray[np.int64]  # rows in the denominators of the loss: `rows`, and those whose loss is known to be zero
    columns: Handle = None  # name -> [R] of the block

    @classmethod
    def of(cls, block: TokenBlock, groups: NDArray[np.int64] | None) -> "TrainBatch":
        """Return a batch of all rows of a block."""
        rows = np.arange(len(block.lengths))
        return cls(block, block.prompt_lengths, block.response_lengths, block.sampled_lengths, groups, rows, rows)


@dataclass(frozen=True)
class RankBatch:
    """Rows that one data-parallel replica trains in one optimizer step, divided into micro-batches."""

    micro_batches: tuple[NDArray[np.int64], ...]  # rows of each; filled with empty ones if other replicas have more
    weights: NDArray[np.float64]  # [B] weight of one token of the row in the loss
    groups: NDArray[np.int64] | None = (
        None  # [B] rows of one group compute their prompt once; None: no prompt is shared
    )
    step_tokens: int = 1  # tokens that all replicas compute in this optimizer step


@dataclass(frozen=True)
class SyncReport:
    """Report of one sender on one weight push; all zero if there are no engines."""

    bytes: int = 0  # sent, summed over all receivers
    raw_bytes: int = 0  # `bytes` before compression
    tensors: int = 0  # Hugging Face tensors of which this rank sent parts
    buckets: int = 0  # messages
    seconds: float = 0.0  # duration of the push
    engine_seconds: float = 0.0  # part of `seconds`: waiting for engines
    failed: dict[str, str] = field(default_factory=dict)  # engine URL -> why it is out of service
    must_repeat: bool = False  # engines did not take the version; the driver pushes it again


@dataclass(frozen=True)
class UpdateReport:
    """Metrics of one optimizer step from one rank. The driver adds up `sums` over replicas, and takes the maximum of `maxima`."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceSlot:
    """A device of the cluster, reserved for a process of one role."""

    node: str  # Ray's node id
    host: str  # address of the node
    device: str  # GPU id on the node; "" for a slot on a CPU
    options: Mapping[str, Any]  # Ray actor options that start a process on the device
