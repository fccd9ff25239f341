"""Inputs and results of advantage estimators and losses. mrl.core.types explains the letters of the array dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mrl.core.code_locations import describe_plug_in
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


@dataclass(frozen=True)
class ScoredBatch:
    """The B responses of a step with their rewards: the input of the advantage pipeline."""

    rewards: NDArray[np.float64]  # [B]
    groups: NDArray[np.int64]  # [B] id of the prompt that the response answers
    lengths: NDArray[np.int64]  # [B] number of sampled tokens, which may be 0; the sum is R
    truncated: NDArray[np.bool_]  # [B] whether the token limit or the turn limit ended the response
    # [R] reward of a turn at its last token, 0 at all other tokens; used in place of `rewards`. None: no rewards per turn
    turn_rewards: NDArray[np.float64] | None = None
    # name of a part of the reward -> values of this part [B]
    reward_parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the prompt's greedy response; None: not computed
    # [B] data.offline.advantage of offline rows, which replaces the estimated advantage. A response with NaN keeps its estimated
    # advantage. None: all responses keep their estimated advantages
    offline_advantages: NDArray[np.float64] | None = None

    def select(self, rows: NDArray[np.bool_]) -> ScoredBatch:
        """Return the responses for which `rows` [B] is true."""
        return ScoredBatch(
            self.rewards[rows],
            self.groups[rows],
            self.lengths[rows],
            self.truncated[rows],
            None if self.turn_rewards is None else self.turn_rewards[np.repeat(rows, self.lengths)],
            {name: values[rows] for name, values in self.reward_parts.items()},
            None if self.greedy_rewards is None else self.greedy_rewards[rows],
            None if self.offline_advantages is None else self.offline_advantages[rows],
        )


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an advantage estimator, and of the method `precomputed_columns` of losses and corrections.

    It contains only responses with sampled tokens; B is the number of these responses.
    """

    # [R] reward of a response or turn at its last token, 0 at all other tokens; the KL penalties are already subtracted
    token_rewards: NDArray[np.float64]
    groups: NDArray[np.int64]  # [B] id of the prompt that the response answers
    lengths: NDArray[np.int64]  # [B] number of sampled tokens; the sum is R
    # name -> column [R]: the columns that the estimator, the loss and the KL penalty need. `rollout_logprobs` is NaN for a token
    # for which the engine reported no log-probability
    columns: Mapping[str, Column] = field(default_factory=dict)
    greedy_rewards: NDArray[np.float64] | None = None  # [B] reward of the prompt's greedy response; None: not computed
    # name of a part of the reward -> values of this part [B]
    reward_parts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    @cached_property
    def rewards(self) -> NDArray[np.float64]:
        """[B] sum of the `token_rewards` of each response."""
        return np.bincount(self.response_of_token, self.token_rewards, minlength=len(self.lengths)).astype(np.float64)

    @cached_property
    def response_of_token(self) -> NDArray[np.int64]:
        """[R] for each token, the index of its response among the B responses."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


class Advantages(NamedTuple):
    """Result of an advantage estimator. An estimator that computes no returns may return just the array of advantages."""

    advantages: NDArray[np.floating]  # [B] or [R]; with [B], each token gets the advantage of its response
    returns: NDArray[np.floating] | None = None  # [R] targets that the critic learns


@dataclass(frozen=True)
class AdvantageColumns:
    """Result of the advantage pipeline for B responses: the columns that the losses need."""

    columns: Mapping[str, Column]  # name -> column [R]: advantages, returns, and the result of Loss.precomputed_columns
    zero_advantage: NDArray[np.bool_]  # [B] whether the advantage of every token is 0
    excluded: NDArray[np.bool_]  # [B] whether the response is excluded from the loss and from the loss's denominators
    metrics: Mapping[str, float]
    counts: NDArray[np.int64] | None = None  # [B] how often the response counts in the loss; None: once


def broadcast_to_tokens(
    advantages: NDArray[np.floating], inputs: AdvantageInputs, source: str = "algorithm.advantage"
) -> NDArray[np.floating]:
    """Return advantages [B] or [R] as one value per sampled token [R]. `source` names the estimator in an error.

    Raises:
        ValueError: the shape of `advantages` is neither [B] nor [R].
    """
    if advantages.shape == inputs.lengths.shape:
        return advantages[inputs.response_of_token]
    if advantages.shape == inputs.response_of_token.shape:
        return advantages
    raise ValueError(
        f"{source} returned an array of shape {advantages.shape}; expected one number for each of the "
        f"{len(inputs.lengths)} responses, or for each of their {len(inputs.response_of_token)} sampled tokens."
    )


MAX_LOG_RATIO = 20.0
"""Bound of the absolute value of a log-ratio, in nats: `bounded_exp` clamps larger values. verl has the same bound."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), with log_ratio clamped to [-MAX_LOG_RATIO, MAX_LOG_RATIO]. Outside the bounds the gradient is 0.

    Without the bounds, exp overflows in float32 for log-ratios above 88.7, and the gradient of a clipped loss becomes
    0 * inf = NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _identity(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Responses:
    """Computes sums and means over each of the n responses of a micro-batch.

    With context parallelism, a rank holds only a part of each response.
    """

    index: Tensor  # [tokens on this rank] int64, for each sampled token the index (0 to n - 1) of its response
    lengths: Tensor  # [n] number of sampled tokens of each response on all ranks together
    sum_over_ranks: Callable[[Tensor], Tensor] = _identity  # sums over the context-parallel ranks; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each whole response: [tokens on this rank] -> [n]."""
        return self.sum_over_ranks(values.new_zeros(len(self.lengths)).index_add(0, self.index, values))

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each whole response: [tokens on this rank] -> [n]."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return, for each token, the value of its response: [n] -> [tokens on this rank]."""
        return values[self.index]


@dataclass(frozen=True)
class LossInputs:
    """Input of a loss or correction. R is the number of sampled tokens of a micro-batch on this rank."""

    logprobs: Tensor  # [R] log-probabilities under the current model weights; differentiable
    # [R] log-probabilities before the first optimizer step on these responses; with algorithm.old_logprobs=rollout, those that
    # the engine reported
    old_logprobs: Tensor
    advantages: Tensor  # [R]
    # [R] entropy in nats of the distribution that predicts the token; differentiable if the loss uses it
    entropy: Tensor
    # [R] log-probabilities from the engine that sampled the tokens; where the engine reported none, the value of `old_logprobs`
    rollout_logprobs: Tensor
    responses: Responses  # computes sums and means over each response
    # name -> column [R]: a column for each name in `required_inputs` of the loss and the correction, and their precomputed
    # columns
    columns: Mapping[str, Tensor] = field(default_factory=dict)


def required_inputs_of(part: object) -> frozenset[str]:
    """Return the attribute `required_inputs` of a part of an algorithm: names of the inputs that it reads (default: no names).

    Raises ValueError if `required_inputs` is a string instead of a set of names.
    """
    required_inputs = getattr(part, "required_inputs", ())
    if isinstance(required_inputs, str):
        raise ValueError(
            f"{describe_plug_in(part)}: required_inputs={required_inputs!r}: expected a set of names, such as "
            f"{{{required_inputs!r}}}."
        )
    return frozenset(required_inputs)


def to_numbers(values: object, source: str, finite: bool = True) -> NDArray[np.float64]:
    """Convert the result of a part of an algorithm to an array of numbers. `source` names the part in an error.

    Raises ValueError if the values are not numbers or, with `finite`, if one of them is not finite.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:  # for example lists of different lengths
        raise ValueError(f"{source} returned a {type(values).__name__} that is no array: {error}.") from None
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{source} returned a {type(values).__name__} of {array.dtype}; expected an array of numbers.")
    if finite and not (known := np.isfinite(array)).all():
        first = int(np.flatnonzero(~known)[0])
        raise ValueError(
            f"{source} returned {array.flat[first]} at index {first}, and {array.size - np.count_nonzero(known)} of "
            f"{array.size} values are not finite; expected finite numbers."
        )
    return array.astype(np.float64)


def join_precomputed_columns(
    parts: Iterable[object], batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
) -> dict[str, Column]:
    """Return the precomputed columns [R] of several parts of an algorithm.

    A part without the method `precomputed_columns` has none.

    Raises ValueError if two parts return columns of the same name, if another column of the step has the same name, or if a
    column does not have one number for each token.
    """
    joined: dict[str, Column] = {}
    for part in parts:
        compute = getattr(part, "precomputed_columns", None)
        source = f"precomputed_columns of {describe_plug_in(part)}"
        columns = compute(batch, advantages, rng) if compute else {}
        if taken := columns.keys() & {"advantages", "returns", *batch.columns, *joined}:
            raise ValueError(
                f"{source} returned {min(taken)!r}, but another column has this name; choose another name."
            )
        for name, values in columns.items():
            column = to_numbers(values, f"{source} ({name})", finite=False)
            if column.shape != advantages.shape:
                raise ValueError(
                    f"{source} ({name}) returned an array of shape {column.shape}; expected one number for each of the "
                    f"{len(advantages)} sampled tokens."
                )
            joined[name] = column.astype(np.float32)
    return joined
