"""What one optimizer step minimises: a policy loss, weighted against off-policy samples, with KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.algorithms.corrections import Correction
from mrl.algorithms.inputs import AdvantageInputs, LossInputs
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import Loss, PolicyLoss
from mrl.core.types import Column

if TYPE_CHECKING:  # named and checked in the driver, which needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class Objective:
    """A Loss made of a policy loss and the terms that go with any."""

    policy: Loss
    correction: Correction | None = None
    kl: KLPenalty | None = None
    entropy_coef: float = 0.0  # the mean entropy is raised where this is positive
    old_from_rollout: bool = False  # what the engine said of a token stands for the old policy

    @property
    def zero_without_advantage(self) -> bool:
        return self.policy.zero_without_advantage and self.kl is None and not self.entropy_coef

    @property
    def uses_entropy(self) -> bool:
        return self.policy.uses_entropy or bool(self.entropy_coef)

    @property
    def needs(self) -> frozenset[str]:
        found = getattr(self.policy, "needs", frozenset())
        return found | self.kl.needs if self.kl else found

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Those of the policy loss."""
        make = getattr(self.policy, "extra_columns", PolicyLoss().extra_columns)
        return make(batch, advantages, rng)

    def with_kl_coef(self, coef: float) -> Objective:
        """The same with another weight of the KL term."""
        return replace(self, kl=replace(self.kl, coef=coef)) if self.kl else self

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if self.old_from_rollout:
            inputs = replace(inputs, old_logprobs=inputs.rollout_logprobs)
        loss, numbers = self.policy(inputs)
        if self.correction:
            weights, found = self.correction(inputs)
            loss, numbers = loss * weights, numbers | found
        if self.kl:
            kl = self.kl(inputs)
            loss, numbers = loss + self.kl.coef * kl, numbers | {"policy/kl_ref": kl.detach()}
        if self.entropy_coef:
            loss = loss - self.entropy_coef * inputs.entropy
        return loss, numbers
