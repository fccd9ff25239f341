"""Losses per sampled token; `mrl.algorithms.reduce` says how they are averaged, `mrl.algorithms.objective` what is added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from mrl.algorithms.inputs import AdvantageInputs, LossInputs
from mrl.core.types import Column

if TYPE_CHECKING:  # losses are named and checked in the driver, which needs no torch
    from torch import Tensor


class Loss(Protocol):
    """Any callable of this form can be named in `algorithm.loss._target_`; deriving from PolicyLoss gives the defaults."""

    @property
    def zero_without_advantage(self) -> bool:
        """A response of advantage 0 has loss and gradient 0: it need not be trained."""
        ...

    @property
    def uses_entropy(self) -> bool:
        """The loss is a function of the entropies too, which then carry gradients."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Columns that must be there: old_logprobs, ref_logprobs, values, teacher_logprobs."""
        ...

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R], and numbers [R] to report under their metric names, averaged like the loss."""
        ...

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Columns [R] made once from the whole batch of a rollout, before it is cut; they come back in `inputs.columns`."""
        ...


class PolicyLoss:
    """The defaults of a policy-gradient loss."""

    zero_without_advantage: ClassVar[bool] = True
    uses_entropy: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """None."""
        return {}


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped policy-gradient loss, -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman et al. 2017, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025, eq. 10). `dual_clip` c > 1: where A < 0 the loss is at
    most -c A, however large the ratio (Ye et al. 2020, eq. 5); verl has c = 3 always, the paper only for its game.
    Raises ValueError for a `dual_clip` of 1 or less.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}: must be greater than 1, or null for none.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * inputs.advantages).minimum(clipped * inputs.advantages)
        numbers = {"loss/clip_fraction": (ratio != clipped).float()}
        if self.dual_clip is None:
            return loss, numbers
        ceiling = -self.dual_clip * inputs.advantages
        bounded = (inputs.advantages < 0) & (loss > ceiling)
        return ceiling.where(bounded, loss), numbers | {"loss/dual_clip_fraction": bounded.float()}


@dataclass(frozen=True)
class PolicyGradient(PolicyLoss):
    """The plain policy gradient, -A log pi (Williams 1992); of fresh samples only, or with a correction.

    With advantages of mean 0 in their group and divided by 1 + tau it is the "opmd" loss of Trinity-RFT.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.advantages * inputs.logprobs, {}


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: weights are clipped, no token loses its gradient (MiniMax-M1 2025, eq. 4-5).

    The paper sets no lower bound, and does not say its upper one; 5 is what Khatri et al. (2025, ScaleRL) recommend.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs.detach() - inputs.old_logprobs).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": (ratio != weight).float()}


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """A soft gate in place of the clip, -A sigmoid(tau (r - 1)) 4 / tau (Gao et al. 2025), averaged by responses in the paper.

    On policy its gradient is that of the plain policy gradient, for any tau. A larger tau fades sooner; that of negative
    advantages is the larger one.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        negative = inputs.advantages <= 0
        tau = ratio.new_full(ratio.shape, self.tau_positive).masked_fill(negative, self.tau_negative)
        return -inputs.advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau, {}


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-sg(min(r, max_ratio)) A log pi, 0 where pi has moved by more than delta to where A drives it (Qi et al. 2026).

    The trust region is one of probabilities, |pi - pi_old| (binary total variation), not of their ratio: rare tokens keep
    their gradient, frequent ones are bounded earlier. The truncated ratio is that of verl.
    """

    delta_low: float = 0.2
    delta_high: float = 0.2
    max_ratio: float = 20.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        frozen = inputs.logprobs.detach()
        moved = frozen.exp() - inputs.old_logprobs.exp()
        outside = (moved > self.delta_high).where(inputs.advantages > 0, moved < -self.delta_low)
        weight = (frozen - inputs.old_logprobs).exp().clamp(max=self.max_ratio).masked_fill(outside, 0.0)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": outside.float()}


@dataclass(frozen=True)
class CrossEntropy(PolicyLoss):
    """Negative log-likelihood of the response: supervised fine-tuning."""

    zero_without_advantage: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.logprobs, {}


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic, (V - R)^2 / 2 (PPO, Schulman et al. 2017, L^VF of eq. 9, halved).

    `clip`: the larger of this and the same for V kept within `clip` of its value before the rollout's first update, as in
    the authors' code (openai/baselines, ppo2); 0: no clipping.
    """

    clip: float = 0.0

    def __call__(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Values, returns and old values [R] -> loss [R]."""
        loss = (values - returns) ** 2
        if self.clip:
            kept = old_values + (values - old_values).clamp(-self.clip, self.clip)
            loss = loss.maximum((kept - returns) ** 2)
        return 0.5 * loss
