"""What advantages and losses are given. Shapes: see mrl.core.types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.core.types import Column

if TYPE_CHECKING:  # losses are named and checked in the driver, which needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch of B responses, as an advantage sees it."""

    token_rewards: NDArray[np.float64]  # [R] each response's (or turn's) reward at its last token, less KL penalties
    groups: NDArray[np.int64]  # [B] which prompt each response answers
    lengths: NDArray[np.int64]  # [B] sampled tokens of each response; their sum is R
    columns: Mapping[str, Column] = field(default_factory=dict)  # [R] those that the advantage `needs`
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the greedy response to the same prompt
    parts: Mapping[str, NDArray[np.float64]] = field(
        default_factory=dict
    )  # [B] the rewards that a combined one is made of

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """[B] each response's reward, KL penalties included."""
        return np.bincount(self.rows, self.token_rewards, minlength=len(self.lengths)).astype(np.float64)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """[R] the response that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


class Advantages(NamedTuple):
    """What an estimator makes of a batch; one without a critic may return the advantages alone."""

    advantages: NDArray[np.floating]  # [B], the same for all tokens of a response, or [R]
    returns: NDArray[np.floating] | None = None  # [R] what the critic learns to predict


@dataclass(frozen=True)
class Scored:
    """What is known of a batch of B responses once they are scored."""

    rewards: NDArray[np.float64]  # [B]
    groups: NDArray[np.int64]  # [B] which prompt each response answers
    lengths: NDArray[np.int64]  # [B] sampled tokens of each response, 0 allowed; their sum is R
    truncated: NDArray[np.bool_]  # [B] cut at the token limit
    turn_rewards: NDArray[np.float64] | None = None  # [R] mostly 0; in place of the reward at the last token
    parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # [B] what a combined reward is made of
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the greedy response to the same prompt


@dataclass(frozen=True)
class Estimated:
    """What losses need of a batch of B responses."""

    columns: Mapping[str, Column]  # [R] advantages, returns where a critic learns, and what the loss made itself
    without_advantage: NDArray[np.bool_]  # [B] the advantage of every token is zero
    rejected: NDArray[np.bool_]  # [B] left out of the loss and of its denominators
    numbers: Mapping[str, float]  # metrics


def per_token(advantages: NDArray[np.floating], inputs: AdvantageInputs) -> NDArray[np.floating]:
    """Advantages [B] or [R] -> [R].

    Raises: ValueError for another shape.
    """
    if advantages.shape == inputs.lengths.shape:
        return advantages[inputs.rows]
    if advantages.shape == inputs.rows.shape:
        return advantages
    raise ValueError(
        f"algorithm.advantage gave an array of shape {advantages.shape}; expected one number for each of the "
        f"{len(inputs.lengths)} responses, or for each of their {len(inputs.rows)} sampled tokens."
    )


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Responses:
    """The n responses of a micro-batch, each of which lies here as a whole or, under context parallelism, in part."""

    index: Tensor  # [R here] int64, the response that each token belongs to
    lengths: Tensor  # [n] tokens of each response, on all ranks together
    reduce: Callable[[Tensor], Tensor] = _alone  # adds up over the ranks that hold parts; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """[R here] -> [n] sums over whole responses."""
        return self.reduce(values.new_zeros(len(self.lengths)).index_add(0, self.index, values))

    def mean(self, values: Tensor) -> Tensor:
        """[R here] -> [n] means over whole responses."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[n] -> [R here] each response's number for each of its tokens."""
        return values[self.index]


@dataclass(frozen=True)
class LossInputs:
    """Columns of the R sampled tokens of a micro-batch."""

    logprobs: Tensor  # [R] under the weights being trained, differentiable
    old_logprobs: Tensor  # [R] under the weights before this rollout's first update
    advantages: Tensor  # [R]
    entropy: Tensor  # [R] nats, of the distribution that predicts each token; differentiable where the loss uses it
    rollout_logprobs: Tensor  # [R] as the engine sampled them
    responses: Responses
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [R] those that the loss `needs` or made itself
