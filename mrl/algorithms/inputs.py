"""Inputs and results of advantages and losses. mrl.core.types explains the shape letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


@dataclass(frozen=True)
class ScoredBatch:
    """A batch of B responses with their rewards; input of the advantage pipeline."""

    rewards: NDArray[np.float64]  # [B]
    groups: NDArray[np.int64]  # [B] id of the prompt that the response answers
    lengths: NDArray[np.int64]  # [B] number of sampled tokens, may be 0; their sum is R
    truncated: NDArray[np.bool_]  # [B] the response was cut at the token limit
    turn_rewards: NDArray[np.float64] | None = None  # [R] reward at the last token of each turn; replaces `rewards`
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # [B] parts of a combined reward, by name
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the greedy response to the same prompt


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an advantage estimator: the B responses of a batch that have sampled tokens."""

    token_rewards: NDArray[np.float64]  # [R] reward at the last token of each response or turn, minus KL penalties
    groups: NDArray[np.int64]  # [B] id of the prompt that the response answers
    lengths: NDArray[np.int64]  # [B] number of sampled tokens; their sum is R
    columns: Mapping[str, Column] = field(default_factory=dict)  # [R] the columns that the advantage `needs`
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the greedy response to the same prompt
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # [B] parts of a combined reward, by name

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """[B] reward of each response, KL penalties included."""
        return np.bincount(self.rows, self.token_rewards, minlength=len(self.lengths)).astype(np.float64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[R] row of the response that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


class Advantages(NamedTuple):
    """Result of an advantage estimator. An estimator without returns may return the bare array instead."""

    advantages: NDArray[np.floating]  # [B], one for all tokens of a response, or [R]
    returns: NDArray[np.floating] | None = None  # [R] targets of the critic


@dataclass(frozen=True)
class AdvantageColumns:
    """Result of the advantage pipeline: the columns that the losses of B responses need."""

    columns: Mapping[str, Column]  # [R] advantages; returns if a critic learns; the loss's extra columns
    without_advantage: NDArray[np.bool_]  # [B] the advantage of every token is 0
    rejected: NDArray[np.bool_]  # [B] excluded from the loss and from its denominators
    metrics: Mapping[str, float]


def broadcast_to_tokens(advantages: NDArray[np.floating], inputs: AdvantageInputs) -> NDArray[np.floating]:
    """Return advantages [B] or [R] as one value per sampled token [R].

    Raises:
        ValueError: `advantages` has another shape.
    """
    if advantages.shape == inputs.lengths.shape:
        return advantages[inputs.rows]
    if advantages.shape == inputs.rows.shape:
        return advantages
    raise ValueError(
        f"algorithm.advantage gave an array of shape {advantages.shape}; expected one number for each of the "
        f"{len(inputs.lengths)} responses, or for each of their {len(inputs.rows)} sampled tokens."
    )


def _identity(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Responses:
    """Sums and means over the n responses of a micro-batch. With context parallelism, a rank holds a part of each response."""

    index: Tensor  # [local R] int64, number of the response that each token on this rank belongs to, from 0
    lengths: Tensor  # [n] number of sampled tokens of each response, summed over all ranks
    reduce: Callable[[Tensor], Tensor] = _identity  # sums over the context-parallel ranks; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each whole response: [local R] -> [n]."""
        return self.reduce(values.new_zeros(len(self.lengths)).index_add(0, self.index, values))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each whole response: [local R] -> [n]."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return each response's value for each of its tokens: [n] -> [local R]."""
        return values[self.index]


@dataclass(frozen=True)
class LossInputs:
    """Input of a loss or correction: columns of the R sampled tokens of a micro-batch."""

    logprobs: Tensor  # [R] under the weights being trained, differentiable
    old_logprobs: Tensor  # [R] under the weights before the first optimizer step on this rollout
    advantages: Tensor  # [R]
    entropy: Tensor  # [R] in nats, of the distribution that predicts the token; differentiable if the loss uses it
    rollout_logprobs: Tensor  # [R] under the engine that sampled the tokens
    responses: Responses
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [R] columns in `needs` and extra columns of the loss
