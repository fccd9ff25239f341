"""The data of one step, in two planes, and THE legend of shapes.

    N  prompts of a step                 G  responses per prompt            B = N * G  responses
    S  tokens of a ragged batch: prompts and responses, laid end to end     R  response tokens among them
    V  vocabulary

The data plane (`TokenBlock`) lives where tokens are made and trained. The driver sees the control plane (`Rollouts`):
lengths, rewards, group numbers, versions, and a handle to the block that it never opens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Handle = Any  # reference to an object in Ray's object store; opened by workers only


@dataclass(frozen=True)
class TokenBlock:
    """B sequences of prompt then response, ragged, no padding."""

    tokens: NDArray[np.int32]  # [S]
    cu_seqlens: NDArray[np.int64]  # [B+1] running sum of sequence lengths
    prompt_lengths: NDArray[np.int64]  # [B]
    rollout_logprobs: NDArray[np.float32]  # [R] log-probability of each response token as the engine sampled it
    # [S, layers, topk] experts that the engine sent each token to; -1 where it did not say, as for a sequence's last token
    routed_experts: NDArray[np.int16] | None = None

    @classmethod
    def from_lists(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        logprobs: Sequence[Sequence[float]] | None = None,
        routed_experts: Sequence[NDArray[np.int16]] | None = None,
    ) -> "TokenBlock":
        """Lay out B prompts and responses; without `logprobs` the column is NaN (nothing was sampled).

        `routed_experts`: of each sequence's first tokens, [tokens or fewer, layers, topk].
        """
        prompt_lengths = np.fromiter(map(len, prompts), np.int64, len(prompts))
        response_lengths = np.fromiter(map(len, responses), np.int64, len(responses))
        cu_seqlens = np.concatenate([[0], np.cumsum(prompt_lengths + response_lengths)])
        flat = [token for pair in zip(prompts, responses, strict=True) for part in pair for token in part]
        if logprobs is None:
            column = np.full(response_lengths.sum(), np.nan, np.float32)
        else:
            column = np.fromiter((x for row in logprobs for x in row), np.float32)
        assert len(column) == response_lengths.sum(), f"{len(column)} logprobs for {response_lengths.sum()} tokens"
        routing = None if routed_experts is None else _lay_out(routed_experts, cu_seqlens)
        return cls(np.array(flat, np.int32), cu_seqlens, prompt_lengths, column, routing)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each sequence, prompt and response."""
        return np.diff(self.cu_seqlens)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """[B] response tokens of each sequence."""
        return self.lengths - self.prompt_lengths

    def response(self, row: int) -> NDArray[np.int32]:
        """Response tokens of one sequence."""
        start, end = self.cu_seqlens[row], self.cu_seqlens[row + 1]
        return self.tokens[start + self.prompt_lengths[row] : end]

    def prompt(self, row: int) -> NDArray[np.int32]:
        """Prompt tokens of one sequence."""
        start = self.cu_seqlens[row]
        return self.tokens[start : start + self.prompt_lengths[row]]

    def select(self, rows: NDArray[np.int64]) -> "TokenBlock":
        """The block of these rows, in this order."""
        cu_responses = np.concatenate([[0], np.cumsum(self.response_lengths)])
        spans = [slice(self.cu_seqlens[r], self.cu_seqlens[r + 1]) for r in rows]
        logprobs = [self.rollout_logprobs[cu_responses[r] : cu_responses[r + 1]] for r in rows]
        return TokenBlock(
            np.concatenate([self.tokens[span] for span in spans]),
            np.concatenate([[0], np.cumsum(self.lengths[rows])]),
            self.prompt_lengths[rows],
            np.concatenate(logprobs),
            None if self.routed_experts is None else np.concatenate([self.routed_experts[span] for span in spans]),
        )


def _lay_out(parts: Sequence[NDArray[np.int16]], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int16]:
    """Rows of each sequence at its place in [S, ...], -1 behind them."""
    assert len(parts) == len(cu_seqlens) - 1, f"routed experts of {len(parts)} of {len(cu_seqlens) - 1} sequences"
    column = np.full((cu_seqlens[-1], *parts[0].shape[1:]), -1, np.int16)
    for part, start, end in zip(parts, cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        assert len(part) <= end - start, f"routed experts of {len(part)} tokens for a sequence of {end - start}"
        column[start : start + len(part)] = part
    return column


@dataclass(frozen=True)
class Rollouts:
    """What the driver knows of B sampled responses."""

    block: Handle  # of the TokenBlock
    prompt_lengths: NDArray[np.int64]  # [B] tokens
    response_lengths: NDArray[np.int64]  # [B] tokens
    groups: NDArray[np.int64]  # [B] which prompt of the step each response answers
    truncated: NDArray[np.bool_]  # [B] cut at the token limit, no end-of-sequence
    weight_versions: NDArray[np.int64]  # [B] version of the weights that sampled the response
    engine_seconds: float = 0.0  # of the phase, spent waiting for the engines

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[B] tokens of each sequence."""
        return self.prompt_lengths + self.response_lengths

    def metrics(self) -> dict[str, float]:
        """Numbers of the batch as sampled."""
        return {
            "rollout/samples": float(len(self.groups)),
            "rollout/tokens": float(self.response_lengths.sum()),
            "rollout/response_length_mean_tokens": float(self.response_lengths.mean()),
            "rollout/truncated_fraction": float(self.truncated.mean()),
            "rollout/weight_version": float(self.weight_versions.min()),
            "spent/engine_s": self.engine_seconds,
        }


@dataclass(frozen=True)
class TrainBatch:
    """Rows of a block for one optimizer step, in the driver's terms."""

    block: Handle
    prompt_lengths: NDArray[np.int64]  # [B] tokens, by row of the block
    response_lengths: NDArray[np.int64]  # [B] tokens
    groups: NDArray[np.int64] | None  # [B] which rows have the same prompt; None: nothing is known of that
    advantages: NDArray[np.float32]  # [B]
    rows: NDArray[np.int64]  # trained
    counted: NDArray[np.int64]  # in the loss's denominators: the trained rows, and those whose loss is known to be zero


@dataclass(frozen=True)
class Share:
    """What one data-parallel replica trains in one update: rows of the block, already cut into micro-batches."""

    micro_batches: tuple[NDArray[np.int64], ...]  # rows of each; an empty one keeps step with other ranks
    advantages: NDArray[np.float32]  # [B] by row of the block
    weights: NDArray[np.float64]  # [B] what one token of the row counts for in the loss
    groups: NDArray[np.int64] | None = None  # [B] rows of one group share one computed prompt; None: none is shared
    step_tokens: int = 1  # that all replicas together compute in the step


@dataclass(frozen=True)
class SyncReport:
    """One weight sync as its sender saw it; all zero where there is no engine."""

    bytes: int = 0  # sent to each engine
    tensors: int = 0  # by Hugging Face name
    buckets: int = 0  # messages
    seconds: float = 0.0  # all of it
    engine_seconds: float = 0.0  # of these, waiting for engines to answer


@dataclass(frozen=True)
class UpdateReport:
    """Numbers of one update as one replica saw them; `sums` add up over replicas, `maxima` take the largest."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
