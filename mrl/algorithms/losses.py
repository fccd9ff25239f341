"""Policy losses per sampled token, and the value loss of the critic.

`mrl.algorithms.objective` averages the losses and adds KL and entropy terms. `mrl.algorithms.sequence_losses` contains
the losses with one ratio per response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from mrl.algorithms.inputs import AdvantageInputs, LossInputs
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


class Loss(Protocol):
    """Interface of a policy loss. `algorithm.loss._target_` may name any callable of this form; PolicyLoss has the defaults."""

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a response with advantage 0 has loss 0 and gradient 0, so that training may skip it."""
        ...

    @property
    def uses_entropy(self) -> bool:
        """Whether the loss depends on the entropies; they are then computed with a gradient."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """The columns that the loss reads, out of old_logprobs, ref_logprobs, values and teacher_logprobs."""
        ...

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [R], and metrics [R] by name, which are averaged like the loss."""
        ...

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return columns [R] computed from the whole rollout before it is split; the loss finds them in `inputs.columns`."""
        ...


class PolicyLoss:
    """Defaults of a policy-gradient loss: it needs no columns and adds none."""

    zero_without_advantage: ClassVar[bool] = True
    uses_entropy: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return no columns."""
        return {}


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped policy-gradient loss, -min(r A, clip(r, 1 - low, 1 + high) A) (PPO, Schulman et al. 2017, eq. 7).

    `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al. 2025, eq. 10). `dual_clip` c > 1 bounds the loss by
    -c A where A < 0, however large the ratio is (Ye et al. 2020, eq. 5). verl always uses c = 3; the paper uses it
    only for its game. Raises ValueError for a `dual_clip` of 1 or less.
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
        metrics = {"loss/clip_fraction": (ratio != clipped).float()}
        if self.dual_clip is None:
            return loss, metrics
        ceiling = -self.dual_clip * inputs.advantages
        bounded = (inputs.advantages < 0) & (loss > ceiling)
        return ceiling.where(bounded, loss), metrics | {"loss/dual_clip_fraction": bounded.float()}


@dataclass(frozen=True)
class PolicyGradient(PolicyLoss):
    """Plain policy gradient -A log pi (Williams 1992). It assumes on-policy samples; otherwise use a correction.

    If the advantages have mean 0 in each group and are divided by 1 + tau, this is the "opmd" loss of Trinity-RFT.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.advantages * inputs.logprobs, {}


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (MiniMax-M1 2025, eq. 4-5); sg is the stop-gradient.

    The clip bounds the weight of a token; clipped tokens also have a gradient. The paper sets no lower bound and does
    not publish its upper bound. The default upper bound of 5 is recommended by Khatri et al. (2025, ScaleRL).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs.detach() - inputs.old_logprobs).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": (ratio != weight).float()}


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Soft gate instead of a clip, -A sigmoid(tau (r - 1)) 4 / tau (Gao et al. 2025). The paper averages over responses.

    For on-policy samples, the gradient equals the plain policy gradient for any tau. A larger tau makes the gradient
    fall faster as r moves away from 1. By default, tau is larger for negative advantages.
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
    """-sg(min(r, max_ratio)) A log pi; 0 for tokens outside the trust region (Qi et al. 2026). sg is the stop-gradient.

    A token is outside if A > 0 and pi - pi_old > delta_high, or if A <= 0 and pi - pi_old < -delta_low. The trust
    region bounds |pi - pi_old| (binary total variation), not the ratio: rare tokens keep their gradient, and frequent
    tokens reach the bound earlier. `max_ratio` is taken from verl.
    """

    delta_low: float = 0.2
    delta_high: float = 0.2
    max_ratio: float = 20.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        detached = inputs.logprobs.detach()
        moved = detached.exp() - inputs.old_logprobs.exp()
        outside = (moved > self.delta_high).where(inputs.advantages > 0, moved < -self.delta_low)
        weight = (detached - inputs.old_logprobs).exp().clamp(max=self.max_ratio).masked_fill(outside, 0.0)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": outside.float()}


@dataclass(frozen=True)
class CrossEntropy(PolicyLoss):
    """Negative log-likelihood of the response: supervised fine-tuning."""

    zero_without_advantage: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.logprobs, {}


def covariances(advantages: Column, logprobs: Column) -> np.ndarray:
    """Return each token's term of the covariance, (log pi - mean log pi) (A - mean A): [R] float64.

    Tokens whose log-probability and advantage vary together drive the entropy down (Cui et al. 2025). ClipCov and
    KLCov select such tokens once, over all tokens of the rollout, with the log-probabilities before the first
    optimizer step (eq. 10). So the selection depends neither on micro-batches nor on the parallel layout. The authors'
    code selects tokens within each micro-batch.
    """
    a, b = advantages.astype(np.float64), logprobs.astype(np.float64)
    return (a - a.mean()) * (b - b.mean()) if len(a) else a


def _indicator(size: int, selected: np.ndarray) -> Column:
    """Return a column [size] with 1 at the `selected` positions, else 0."""
    column = np.zeros(size, np.float32)
    column[selected] = 1.0
    return column


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """-r A, and 0 for a random `fraction` of the tokens (Cui et al. 2025, eq. 11).

    These tokens are drawn from the tokens whose covariance is in (low, high); `fraction` is relative to all tokens.

    The authors' code also clips r as PPO does; their runs use 1 for both bounds. `clip_low` and `clip_high` do the same;
    by default nothing is clipped.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = float("inf")
    clip_high: float = float("inf")

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return `clip_cov`: 1 for the tokens with loss 0, at least one if any covariance is in (low, high)."""
        cov = covariances(advantages, batch.columns["old_logprobs"])
        candidates = np.flatnonzero((cov > self.low) & (cov < self.high))
        count = min(max(int(self.fraction * len(cov)), 1), len(candidates))
        return {"clip_cov": _indicator(len(cov), rng.choice(candidates, count, replace=False))}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * inputs.advantages).minimum(clipped * inputs.advantages)
        left_out = inputs.columns["clip_cov"] > 0
        metrics = {"loss/clip_fraction": (ratio != clipped).float(), "loss/selected_fraction": left_out.float()}
        return loss.masked_fill(left_out, 0.0), metrics


KL_COV_ESTIMATES = ("k3", "abs")


@dataclass(frozen=True)
class KLCov(PolicyLoss):
    """-r A, plus coef KL(old || pi) on the `fraction` of tokens with the largest covariance (Cui et al. 2025, eq. 12-13).

    `kl` selects the estimate of the KL. "k3" is r - 1 - log r; its value and its gradient are unbiased. "abs" is |log r|,
    as in the authors' code; their coefficient of 1 was chosen for it. Tokens with advantage 0 may be selected too.
    Raises ValueError for another `kl`.
    """

    zero_without_advantage: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    fraction: float = 2e-4
    coef: float = 1.0
    kl: str = "k3"

    def __post_init__(self) -> None:
        if self.kl not in KL_COV_ESTIMATES:
            raise ValueError(f"kl={self.kl!r}: expected {' or '.join(KL_COV_ESTIMATES)}.")

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return `kl_cov`: 1 for the penalised tokens, at least one. The first token wins among equal covariances."""
        cov = covariances(advantages, batch.columns["old_logprobs"])
        count = min(max(int(self.fraction * len(cov)), 1), len(cov))
        return {"kl_cov": _indicator(len(cov), np.argsort(-cov, kind="stable")[:count])}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        ratio, selected = log_ratio.exp(), inputs.columns["kl_cov"]
        kl = log_ratio.abs() if self.kl == "abs" else ratio - 1 - log_ratio
        loss = -ratio * inputs.advantages + self.coef * selected * kl
        return loss, {"loss/selected_fraction": selected}


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of the critic, (V - R)^2 / 2 (PPO, Schulman et al. 2017, L^VF of eq. 9, halved).

    With `clip` > 0, the loss is the larger of this error and the error of a clipped V. V is clipped to within `clip` of
    its value before the first optimizer step on the rollout, as in the authors' code (openai/baselines, ppo2). With
    `clip` = 0, V is not clipped.
    """

    clip: float = 0.0

    def __call__(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Return the loss [R] from values, returns and old values, each [R]."""
        loss = (values - returns) ** 2
        if self.clip:
            clipped = old_values + (values - old_values).clamp(-self.clip, self.clip)
            loss = loss.maximum((clipped - returns) ** 2)
        return 0.5 * loss
