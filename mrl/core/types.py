"""The data of one step, in two planes, and THE legend of shapes.

    N  prompts of a step                 G  responses per prompt            B = N * G  responses
    S  tokens of a ragged batch: prompts and responses, laid end to end     R  tokens among them that the policy sampled
    V  vocabulary

A response is all that follows its prompt; of several turns it holds tool results too, which nobody sampled and nobody
trains. The data plane (`TokenBlock` and columns [R]) lives where tokens are made and trained. The driver sees the control
plane (`Rollouts`, `AdvantageResult`): lengths, rewards, group numbers, versions, and handles that it never opens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# FROM: A device of the cluster, as whoever starts a process there needs to know it.

_COLUMN = "column."  # prefix of `columns` in a block's file
Handle = Any  # reference to an object in Ray's object store; opened by workers only
Column = NDArray[np.float32]  # [R] a number for each sampled token


@dataclass(frozen=True)
class TokenBlock:
    """B sequences of prompt then response, ragged, no padding."""

    tokens: NDArray[np.int32]  # [S]
    cu_seqlens: NDArray[np.int64]  # [B+1] running sum of sequence lengths
    prompt_lengths: NDArray[np.int64]  # [B]
    rollout_logprobs: NDArray[np.float32]  # [R] log-probability of each response token as the engine sampled it
    # [S, layers, topk] experts that the engine sent each token to; -1 where it did not say, as for a sequence's last token
    routed_experts: NDArray[np.int16] | None = None
    sampled: NDArray[np.bool_] | None = None  # [S] the R tokens that the policy chose; None: all behind the prompts
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
        """Lay out B prompts and responses; without `logprobs` the column is NaN (nothing was sampled).

        `routed_experts`: of each sequence's first tokens, [tokens or fewer, layers, topk]. `sampled`: of each response,
        which of its tokens the policy chose; `logprobs` are of those.
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
        routing = None if routed_experts is None else _lay_out(routed_experts, cu_seqlens)
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
        """[S] place of each token in its own sequence."""
        return np.arange(len(self.tokens)) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @property
    def sampled_index(self) -> NDArray[np.int64]:
        """[R] which of the S tokens the policy sampled."""
        if self.sampled is not None:
            return np.flatnonzero(self.sampled)
        return np.flatnonzero(self.positions >= np.repeat(self.prompt_lengths, self.lengths))

    def with_columns(self, **columns: Column) -> "TokenBlock":
        """The same tokens with these columns [R] besides those there are."""
        num_sampled = int(self.sampled_lengths.sum())
        for name, column in columns.items():
            assert column.shape == (num_sampled,), f"{name} has shape {column.shape} for {num_sampled} sampled tokens"
        return replace(self, columns={**self.columns, **columns})

    def response(self, row: int) -> NDArray[np.int32]:
        """All tokens behind the prompt of one sequence."""
        start, end = self.cu_seqlens[row], self.cu_seqlens[row + 1]
        return self.tokens[start + self.prompt_lengths[row] : end]

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Prompt tokens of one sequence."""
        start = self.cu_seqlens[row]
        return self.tokens[start : start + self.prompt_lengths[row]]

    def select(self, rows: NDArray[np.int64]) -> "TokenBlock":
        """The block of these rows, in this order."""
        cu_sampled = np.concatenate([[0], np.cumsum(self.sampled_lengths)])
        spans = [slice(self.cu_seqlens[r], self.cu_seqlens[r + 1]) for r in rows]
        chosen = [slice(cu_sampled[r], cu_sampled[r + 1]) for r in rows]

        def picked(values: NDArray, where: Sequence[slice]) -> NDArray:
            return np.concatenate([values[span] for span in where]) if where else values[:0]

        return TokenBlock(
            picked(self.tokens, spans),
            np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            self.prompt_lengths[rows],
            picked(self.rollout_logprobs, chosen),
            None if self.routed_experts is None else picked(self.routed_experts, spans),
            None if self.sampled is None else picked(self.sampled, spans),
            {name: picked(column, chosen) for name, column in self.columns.items()},
        )

    def save(self, path: Path, **extra: NDArray) -> None:
        """Write tokens, columns and `extra` arrays to one .npz file, without pickle. The file appears when it is complete."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns = {f"{_COLUMN}{name}": column for name, column in self.columns.items()}
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays, **columns, **extra)
        partial.replace(path)

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
    """[S] whether a token was sampled; prompts never are."""
    for response, chosen in zip(responses, sampled, strict=True):
        assert len(chosen) == len(response), f"{len(chosen)} marks for a response of {len(response)} tokens"
    pairs = zip(prompts, sampled, strict=True)
    return np.fromiter((x for prompt, chosen in pairs for x in [*[False] * len(prompt), *chosen]), np.bool_)


def _lay_out(parts: Sequence[NDArray[np.int16]], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int16]:
    """Rows of each sequence at its place in [S, ...], -1 behind them."""
    assert len(parts) == len(cu_seqlens) - 1, f"routed experts of {len(parts)} of {len(cu_seqlens) - 1} sequences"
    column = np.full((cu_seqlens[-1], *parts[0].shape[1:]), -1, np.int16)
    for part, start, end in zip(parts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        assert len(part) <= end - start, f"routed experts of {len(part)} tokens for a sequence of {end - start}"
        column[start : start + len(part)] = part
    return column


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the driver knows of B sampled and scored responses."""

    block: Handle  # of the TokenBlock
    prompt_lengths: NDArray[np.int64]  # [B] tokens
    response_lengths: NDArray[np.int64]  # [B] tokens, tool results included
    sampled_lengths: NDArray[np.int64]  # [B] tokens that the policy sampled; their sum is R
    rows: NDArray[np.int64]  # [B] of the data set
    groups: NDArray[np.int64]  # [B] which prompt of the step each response answers
    digests: NDArray[np.uint64]  # [B] hash of prompt and response
    truncated: NDArray[np.bool_]  # [B] cut at the token limit, no end-of-sequence
    weight_versions: NDArray[np.int64]  # [B] version of the weights that sampled the response
    rewards: NDArray[np.float64]  # [B]
    spans: NDArray[np.int64] = field(
        default_factory=lambda: np.empty((0, 3), np.int64)
    )  # [M, 3] see mrl.rollout.trajectory
    tickets: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # of the groups: places in drawing order
    waiting: Sequence[
        tuple[int, int, int]
    ] = ()  # (ticket, row, version when it was admitted) of groups that no step has taken
    drawn: int = 0  # tickets so far
    numbers: Mapping[str, float] = field(default_factory=dict)  # metrics of how they were sampled and scored

    def metrics(self, version: int) -> dict[str, float]:
        """Numbers of the batch as sampled and scored, for a trainer whose weights are `version`."""
        ages, tokens = version - self.weight_versions, self.spans[:, 2]
        of_tokens = (
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
            "rollout/token_age_mean_versions": of_tokens,
            "rollout/mixed_versions_fraction": float((np.bincount(self.spans[:, 0]) > 1).mean())
            if len(tokens)
            else 0.0,
            **self.numbers,
        }


@dataclass(frozen=True)
class ColumnPart:
    """A column for some rows of a block, as one trainer rank computed it."""

    rows: NDArray[np.int64]  # [n] rows of the block
    values: Column  # their sampled tokens, row after row

    def by_row(self, lengths: NDArray[np.int64]) -> dict[int, Column]:
        """Row -> its numbers; `lengths` [B] are the sampled tokens of all rows of the block."""
        pieces = np.split(self.values, np.cumsum(lengths[self.rows]))
        return dict(zip(self.rows.tolist(), pieces[:-1], strict=True))


def assemble(parts: Iterable[ColumnPart], lengths: NDArray[np.int64]) -> Column:
    """[R] the whole column; `lengths` [B] are the sampled tokens of all rows of the block."""
    rows: dict[int, Column] = {}
    for part in parts:
        rows |= part.by_row(lengths)
    assert len(rows) == len(lengths), f"a column of {len(rows)} rows for a block of {len(lengths)}"
    return np.concatenate([np.empty(0, np.float32), *(rows[row] for row in range(len(lengths)))])


@dataclass(frozen=True)
class AdvantageResult:
    """What the driver knows of the advantages of B responses."""

    columns: Handle  # name -> [R]: advantages, and whatever the losses need besides
    without_advantage: NDArray[np.bool_]  # [B] the advantage of every token is zero
    rejected: NDArray[np.bool_]  # [B] left out of the loss and of its denominators
    numbers: Mapping[str, float]  # metrics


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a block for one optimizer step, in the driver's terms."""

    block: Handle
    prompt_lengths: NDArray[np.int64]  # [B] tokens, by row of the block
    response_lengths: NDArray[np.int64]  # [B] tokens
    sampled_lengths: NDArray[np.int64]  # [B] tokens in the loss
    groups: NDArray[np.int64] | None  # [B] which rows have the same prompt; None: nothing is known of that
    rows: NDArray[np.int64]  # trained
    counted: NDArray[np.int64]  # in the loss's denominators: the trained rows, and those whose loss is known to be zero
    columns: Handle = None  # name -> [R] of the block

    @classmethod
    def of(cls, block: TokenBlock, groups: NDArray[np.int64] | None) -> "TrainBatch":
        """All rows of a block that is at hand."""
        rows = np.arange(len(block.lengths))
        return cls(block, block.prompt_lengths, block.response_lengths, block.sampled_lengths, groups, rows, rows)


@dataclass(frozen=True)
class RankBatch:
    """What one data-parallel replica trains in one update: rows of the block, already cut into micro-batches."""

    micro_batches: tuple[NDArray[np.int64], ...]  # rows of each; an empty one keeps step with other ranks
    weights: NDArray[np.float64]  # [B] what one token of the row counts for in the loss
    groups: NDArray[np.int64] | None = None  # [B] rows of one group share one computed prompt; None: none is shared
    step_tokens: int = 1  # that all replicas together compute in the step


@dataclass(frozen=True)
class SyncReport:
    """One weight sync as one sender saw it; all zero where there is no engine."""

    bytes: int = 0  # that left, over all who got them
    raw_bytes: int = 0  # the same without compression
    tensors: int = 0  # Hugging Face tensors that this rank sent parts of
    buckets: int = 0  # messages
    seconds: float = 0.0  # all of it
    engine_seconds: float = 0.0  # of these, waiting for engines
    failed: dict[str, str] = field(default_factory=dict)  # engine -> why it is out of service
    again: bool = False  # nothing is served yet; the same version must be pushed again


@dataclass(frozen=True)
class UpdateReport:
    """Numbers of one update as one replica saw them; `sums` add up over replicas, `maxima` take the largest."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceSlot:
    """A place for a process of one role."""

    node: str  # Ray's id of it
    host: str  # its address
    device: str  # the GPU's id on it; "" where a slot is a place on a CPU
    options: Mapping[str, Any]  # Ray actor options that start a process there
