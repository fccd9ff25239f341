"""Losses per response token; `mrl.algorithms.reduce` says how they are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:  # losses are named and checked in the driver, which needs no torch
    from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """Columns of the R response tokens of a micro-batch."""

    logprobs: Tensor  # [R] under the weights being trained, differentiable
    old_logprobs: Tensor  # [R] under the weights before this rollout's first update
    advantages: Tensor  # [R]
    entropy: Tensor  # [R] nats, of the distribution that predicts each token; differentiable where the loss uses it


class Loss(Protocol):
    """Any callable of this form can be named in `algorithm.loss._target_`."""

    zero_without_advantage: ClassVar[bool]  # a response of advantage 0 has loss and gradient 0: it need not be trained
    uses_entropy: ClassVar[bool]  # the loss is a function of the entropies too, which then carry gradients

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R], and numbers [R] to report under their metric names, averaged like the loss."""
        ...


@dataclass(frozen=True)
class PPOClip:
    """Clipped policy-gradient loss, -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman et al. 2017, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025, eq. 10).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    zero_without_advantage: ClassVar[bool] = True
    uses_entropy: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * inputs.advantages).minimum(clipped * inputs.advantages)
        return loss, {"loss/clip_fraction": (ratio != clipped).float()}


@dataclass(frozen=True)
class CrossEntropy:
    """Negative log-likelihood of the response: supervised fine-tuning."""

    zero_without_advantage: ClassVar[bool] = False
    uses_entropy: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.logprobs, {}


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic, (V - R)^2 / 2 (PPO, Schulman et al. 2017, L^VF of eq. 9, halved)."""

    def __call__(self, values: Tensor, returns: Tensor) -> Tensor:
        """Values [R] and returns [R] -> loss [R]."""
        return 0.5 * (values - returns) ** 2
