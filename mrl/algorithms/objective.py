"""The objective of the actor (policy loss, correction, KL and entropy terms), and the weight of each token in the loss.

The loss of a mini-batch is the sum of token weight * token loss over all its tokens. `token_weights` normalizes the token
weights over the whole mini-batch, not over a micro-batch or a rank. So every split of the mini-batch into micro-batches and
data-parallel ranks gives the same loss and the same gradient. Gradients are summed over ranks, and need no division.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.corrections import Correction
from mrl.algorithms.distillation import Distillation
from mrl.algorithms.inputs import AdvantageInputs, LossInputs, join_extra_columns, needs_of
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks objectives without torch
    from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """The loss that the actor's optimizer minimises: a policy loss times a correction, plus KL and entropy terms.

    An Objective implements the interface mrl.algorithms.losses.Loss, for all these terms together.

    A token for which the engine reported NaN has policy loss 0 if the objective uses the engine's log-probabilities. Its ratio
    counts as 1 in products and means over its response. The metric `mismatch/nan_tokens` counts these tokens.
    """

    policy: Loss
    correction: Correction | None = None  # None: the policy loss is not corrected
    kl: KLPenalty | None = None  # penalty that is added to the loss
    entropy_coef: float = 0.0  # coefficient of the entropy bonus
    rollout_logprobs_as_old: bool = False  # use the engine's log-probabilities as old log-probabilities

    @property
    def zero_without_advantage(self) -> bool:
        return self.policy.zero_without_advantage and self.kl is None and not self.entropy_coef

    @property
    def uses_entropy(self) -> bool:
        return self.policy.uses_entropy or bool(self.entropy_coef)

    @property
    def uses_logprobs(self) -> bool:
        """Whether the gradient flows through the log-probabilities of the sampled tokens."""
        return getattr(self.policy, "uses_logprobs", True) or self.kl is not None

    @property
    def distillation(self) -> Distillation | None:
        """What the output head must compute of a teacher; None: nothing."""
        return getattr(self.policy, "distillation", None)

    @property
    def needs(self) -> frozenset[str]:
        return needs_of(self.policy) | needs_of(self.correction) | needs_of(self.kl)

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return the extra columns of the policy loss and of the correction."""
        return join_extra_columns((self.policy, self.correction), batch, advantages, rng)

    def with_kl_coef(self, coef: float) -> Objective:
        """Return the same objective with another coefficient of the KL term."""
        return replace(self, kl=replace(self.kl, coef=coef)) if self.kl else self

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        unknown = inputs.rollout_logprobs.isnan()
        if self.rollout_logprobs_as_old:
            old = inputs.logprobs.detach().where(unknown, inputs.rollout_logprobs)
            inputs = replace(inputs, old_logprobs=old, rollout_logprobs=old)
        loss, metrics = self.policy(inputs)
        if self.correction:
            rollout_logprobs = inputs.old_logprobs.where(unknown, inputs.rollout_logprobs)
            weights, correction_metrics = self.correction(replace(inputs, rollout_logprobs=rollout_logprobs))
            loss, metrics = loss * weights, metrics | correction_metrics
        if self.rollout_logprobs_as_old or self.correction:
            loss = loss.masked_fill(unknown, 0.0)
        if self.kl:
            kl = self.kl(inputs)
            loss, metrics = loss + self.kl.coef * kl, metrics | {"policy/kl_ref": kl.detach()}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * inputs.entropy
        return loss, metrics


AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


def token_weights(
    response_lengths: NDArray[np.int64], aggregation: str, max_tokens: int | None = None
) -> NDArray[np.float64]:
    """Return [B]: for each response, the token weight that each of its tokens has in the loss.

    `response_lengths` [B] are the numbers of sampled tokens of all responses of a mini-batch. Only this function normalizes
    the loss. `aggregation` selects the token weight:

        token_mean     1 / (number of tokens of all responses): every token has the same weight (DAPO, eq. 8)
        sequence_mean  1 / (B * number of tokens of the response): every response has the same weight (GRPO as published,
                       eq. 3)
        fixed_length   1 / (B * max_tokens): the token weight does not depend on the lengths of the responses (Dr.GRPO,
                       Liu et al. 2025, 3.2). `max_tokens` is the length limit of a response

    A response of length 0 has no tokens, but it counts in B. Raises ValueError for an unknown aggregation, and for
    fixed_length without `max_tokens`.
    """
    lengths = response_lengths.astype(np.float64)
    count = max(len(lengths), 1)
    if aggregation == "token_mean":
        return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))
    if aggregation == "sequence_mean":
        return 1.0 / (np.maximum(lengths, 1) * count)
    if aggregation == "fixed_length":
        if not max_tokens or max_tokens < 1:
            raise ValueError(
                f"max_tokens={max_tokens}: algorithm.aggregation=fixed_length needs the length limit of a response."
            )
        return np.full(len(lengths), 1.0 / (count * max_tokens))
    raise ValueError(f"algorithm.aggregation={aggregation!r}; expected one of {', '.join(AGGREGATIONS)}.")
