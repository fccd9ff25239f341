"""The objective of the actor (policy loss, correction, KL and entropy terms), and the weight of each token in the loss.

The loss of a mini-batch is a weighted sum of the losses of its tokens. The token weights are normalized over the whole
mini-batch, not over a micro-batch or a rank. So every split of the mini-batch into micro-batches and data-parallel ranks gives
the same loss and the same gradient. Gradients are summed over ranks, and need no division. docs/concepts/algorithms.md lists the
papers. mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.corrections import Correction
from mrl.algorithms.distillation import Distillation
from mrl.algorithms.inputs import AdvantageInputs, LossInputs, join_precomputed_columns, required_inputs_of, to_numbers
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss
from mrl.core.code_locations import describe_plug_in
from mrl.core.metrics import check, logged_name
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks objectives without torch
    from torch import Tensor


@dataclass(frozen=True)
class EntropyBonus:
    """Bonus that is subtracted from the loss: `coef` times the entropy, in nats, of the distribution that predicts a token.

    With `target`, the coefficient adapts as in Skywork-OR1 (He et al. 2025, adaptive entropy control). If the mean entropy per
    token of a training step is at most `target`, the coefficient grows by `step` after this step. Otherwise it falls by `step`.
    The coefficient stays between 0 and `max_coef`. A step uses the bonus only if the mean entropy of the previous step was at
    most `target`. In the paper, the entropy of the same step, measured before the update, is compared with `target`.

    With `target`, raises ValueError if `target` or `step` is 0 or less, or if `coef` is outside [0, `max_coef`].
    """

    coef: float = 0.0
    target: float | None = None  # nats per token; None: the coefficient is constant
    step: float = 0.005
    max_coef: float = 1.0

    def __post_init__(self) -> None:
        if self.target is None:
            return
        if self.target <= 0 or self.step <= 0:
            raise ValueError(f"target={self.target}, step={self.step}: both must be greater than 0.")
        if not 0 <= self.coef <= self.max_coef:
            raise ValueError(
                f"max_coef={self.max_coef}: the first coefficient, algorithm.entropy_coef={self.coef}, must be between 0 and "
                "this value."
            )

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """Return the coefficient after a training step with the mean entropy per token `measured`."""
        if self.target is None:
            return coef
        return min(max(coef + (self.step if measured <= self.target else -self.step), 0.0), self.max_coef)

    def is_active(self, measured: float | None) -> bool:
        """Return whether a step uses the bonus.

        With `target`, a step uses it only if the entropy `measured` in the previous step is at most `target`. Without `target`,
        the result is always true.
        """
        return self.target is None or (measured is not None and measured <= self.target)


@dataclass(frozen=True)
class Objective:
    """The loss that the actor's optimizer minimizes: a policy loss times a correction, plus KL and entropy terms.

    An Objective implements the interface mrl.algorithms.losses.Loss, for all these terms together.

    An engine may report NaN as the log-probability of a token. The token then has policy loss 0 if the objective uses the
    engine's log-probabilities: as old log-probabilities, in a correction, or in a policy loss that names `rollout_logprobs` in
    `required_inputs`. The policy loss and the correction get a number in place of NaN: the old log-probability of the token or,
    with `rollout_logprobs_as_old`, its current log-probability. So the token's ratio of the old policy to the engine
    counts as 1 in products and means over its response. With `rollout_logprobs_as_old`, this holds for its ratio of the current
    policy to the old policy. The metric `mismatch/nan_tokens` counts the tokens with NaN.
    """

    policy: Loss
    correction: Correction | None = None  # None: the policy loss is not corrected
    kl: KLPenalty | None = None  # penalty that is added to the loss
    entropy: EntropyBonus | None = None  # bonus that is subtracted from the loss
    rollout_logprobs_as_old: bool = False  # use the engine's log-probabilities as old log-probabilities

    @property
    def zero_at_zero_advantage(self) -> bool:
        zero = getattr(self.policy, "zero_at_zero_advantage", False)
        return zero and self.kl is None and self.entropy is None

    @property
    def uses_entropy(self) -> bool:
        return getattr(self.policy, "uses_entropy", False) or bool(self.coefs.get("entropy"))

    @property
    def source(self) -> str:
        """Text for error messages: the config key and the name of the policy loss, and of the correction if there is one."""
        parts = {"algorithm.loss": self.policy, "algorithm.correction": self.correction}
        return ", ".join(f"{key}: {describe_plug_in(part)}" for key, part in parts.items() if part)

    @property
    def uses_logprobs(self) -> bool:
        """Whether the gradient flows through the log-probabilities of the sampled tokens."""
        return getattr(self.policy, "uses_logprobs", True) or self.kl is not None

    @property
    def distillation(self) -> Distillation | None:
        """The Distillation loss, which tells the output head what to compute; None: the policy loss is not a Distillation."""
        return getattr(self.policy, "distillation", None)

    @property
    def required_inputs(self) -> frozenset[str]:
        return required_inputs_of(self.policy) | required_inputs_of(self.correction) | required_inputs_of(self.kl)

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the precomputed columns of the policy loss and of the correction."""
        return join_precomputed_columns((self.policy, self.correction), batch, advantages, rng)

    @property
    def coefs(self) -> dict[str, float]:
        """Name of each term (kl_loss, entropy) -> its coefficient."""
        terms = dict(kl_loss=self.kl, entropy=self.entropy)
        return {name: term.coef for name, term in terms.items() if term}

    def with_loss(self, loss: Loss) -> Objective:
        """Return the same objective with another policy loss, or `loss` itself if it is an Objective."""
        return loss if isinstance(loss, Objective) else replace(self, policy=loss)

    def with_coefs(self, coefs: Mapping[str, float]) -> Objective:
        """Return the same objective with other coefficients. `coefs`: name of a term, as in `self.coefs` -> coefficient."""
        kl = self.kl and replace(self.kl, coef=coefs.get("kl_loss", self.kl.coef))
        entropy = self.entropy and replace(self.entropy, coef=coefs.get("entropy", self.entropy.coef))
        return replace(self, kl=kl, entropy=entropy)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        unknown = inputs.rollout_logprobs.isnan()
        old = inputs.logprobs.detach() if self.rollout_logprobs_as_old else inputs.old_logprobs
        rollout_logprobs = old.where(unknown, inputs.rollout_logprobs)
        old = rollout_logprobs if self.rollout_logprobs_as_old else old
        inputs = replace(inputs, old_logprobs=old, rollout_logprobs=rollout_logprobs)
        loss, metrics = check_token_values(self.policy(inputs), inputs.logprobs, "algorithm.loss", self.policy)
        if self.correction:
            result = check_token_values(
                self.correction(inputs), inputs.logprobs, "algorithm.correction", self.correction
            )
            weights, correction_metrics = result
            if weights.requires_grad:
                raise ValueError(
                    f"algorithm.correction: {describe_plug_in(self.correction)} returned weights with a gradient; compute them "
                    "from inputs.logprobs.detach()."
                )
            loss, metrics = loss * weights, metrics | correction_metrics
        if self.rollout_logprobs_as_old or self.correction or "rollout_logprobs" in required_inputs_of(self.policy):
            loss = loss.masked_fill(unknown, 0.0)
        if self.kl:
            kl = self.kl(inputs)
            loss, metrics = loss + self.kl.coef * kl, metrics | {"policy/kl_ref": kl.detach()}
        if self.entropy and self.entropy.coef:
            loss = loss - self.entropy.coef * inputs.entropy
        return loss, metrics


def check_token_values(
    result: tuple[Tensor, dict[str, Tensor]], tokens: Tensor, key: str, part: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of a loss or of a correction if it has the right form, otherwise raise ValueError.

    `tokens` is a tensor [R]. `key` is the config key of the loss or correction `part`, for the message. The function does not
    read the numbers, because then the host would have to wait for the device.
    """
    source = f"{key}: {describe_plug_in(part)}"
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(
            f"{source} returned a {type(result).__name__}; expected a tensor [R] and a dict of metrics, such as `loss, {{}}`."
        )
    values, metrics = result
    for name, each in {"": values, **metrics}.items():
        metric = f" as metric {name}" if name else ""
        try:
            check([logged_name(name)] if name else [])
        except ValueError:
            own = re.sub(r"\W", "_", name.removeprefix("own/"))
            raise ValueError(
                f"{source} returned the metric {name!r}; the name of a metric has letters, digits and _, such as {own!r}."
            ) from None
        if not isinstance(each, type(tokens)):
            raise ValueError(f"{source} returned a {type(each).__name__}{metric}; expected a tensor.")
        if each.shape != tokens.shape:
            raise ValueError(
                f"{source} returned a tensor of shape {list(each.shape)}{metric}; expected one number for each of the "
                f"{len(tokens)} sampled tokens of the micro-batch. mrl computes the mean or sum (algorithm.aggregation)."
            )
    if not values.is_floating_point():
        raise ValueError(f"{source} returned a tensor of {values.dtype}; expected floating-point numbers.")
    return values, metrics


@dataclass(frozen=True)
class AggregationInputs:
    """Input of an aggregation: the B responses of the mini-batch over which the loss is normalized."""

    lengths: NDArray[np.int64]  # [B] number of sampled tokens, which may be 0
    groups: NDArray[np.int64]  # [B] id of the prompt that the response answers
    max_response_tokens: int | None  # length limit of a response; None: supervised training, which has no limit


Aggregation = Callable[[AggregationInputs], NDArray[np.floating]]
"""Interface of an aggregation. It returns [B]: for each response, the weight of every token of the response in the loss.

`algorithm.aggregation._target_` may name any callable of this form. A response of length 0 has no tokens, but it counts in B.
"""


def token_mean(inputs: AggregationInputs) -> NDArray[np.float64]:
    """Return 1 / (number of tokens of all responses): every token has the same weight (DAPO, Yu et al. 2025, eq. 8)."""
    return np.full(len(inputs.lengths), 1.0 / max(inputs.lengths.sum(), 1))


def sequence_mean(inputs: AggregationInputs) -> NDArray[np.float64]:
    """Return 1 / (B * length): every response has the same weight (GRPO as published, DeepSeekMath 2024, eq. 3)."""
    return 1.0 / (np.maximum(inputs.lengths, 1).astype(np.float64) * max(len(inputs.lengths), 1))


def fixed_length(inputs: AggregationInputs) -> NDArray[np.float64]:
    """Return 1 / (B * max_response_tokens): the weight does not depend on the lengths (Dr.GRPO, Liu et al. 2025, 3.2).

    Raises ValueError if the length limit of a response is unknown.
    """
    limit = inputs.max_response_tokens
    if not limit or limit < 1:
        raise ValueError(
            f"max_response_tokens={limit}: algorithm.aggregation=fixed_length needs the length limit of a response."
        )
    return np.full(len(inputs.lengths), 1.0 / (max(len(inputs.lengths), 1) * limit))


def token_sum(inputs: AggregationInputs) -> NDArray[np.float64]:
    """Return 1: the loss is the sum over all tokens, so it grows with the size of the mini-batch."""
    return np.ones(len(inputs.lengths))


def sequence_sum(inputs: AggregationInputs) -> NDArray[np.float64]:
    """Return 1 / B: the loss of a response is the sum of its token losses, and the loss is the mean over responses."""
    return np.full(len(inputs.lengths), 1.0 / max(len(inputs.lengths), 1))


AGGREGATIONS: dict[str, Aggregation] = {
    aggregation.__name__: aggregation
    for aggregation in (token_mean, sequence_mean, fixed_length, token_sum, sequence_sum)
}
"""Value of algorithm.aggregation -> its function."""


@dataclass(frozen=True)
class TokenWeighting:
    """Computes the token weights of a mini-batch with an aggregation, which may use the length limit of a response."""

    aggregation: Aggregation = token_mean
    max_response_tokens: int | None = None  # None: unknown; see AggregationInputs

    def __call__(self, lengths: NDArray[np.int64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [B]: for each response, the weight of every token of the response in the loss.

        `lengths` [B] are the numbers of sampled tokens, and `groups` [B] are the ids of the prompts. Raises ValueError if the
        result of the aggregation is not an array of B finite numbers, each 0 or more.
        """
        source = f"algorithm.aggregation: {describe_plug_in(self.aggregation)}"
        weights = to_numbers(self.aggregation(AggregationInputs(lengths, groups, self.max_response_tokens)), source)
        if weights.shape != lengths.shape:
            raise ValueError(
                f"{source} returned an array of shape {weights.shape}; expected one number for each of the {len(lengths)} "
                "responses."
            )
        if (weights < 0).any():
            raise ValueError(f"{source} returned the weight {weights.min()}; expected numbers of 0 or more.")
        return weights
