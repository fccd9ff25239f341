"""Losses that treat tokens apart whose log-probability and advantage vary together: these drive the entropy down.

Which tokens those are is decided once, over all tokens of the rollout and with the log-probabilities before its first
update, so that it depends neither on micro-batches nor on the layout (Cui et al. 2025, eq. 10; the authors' code decides
anew in each micro-batch).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mrl.algorithms.inputs import AdvantageInputs, LossInputs
from mrl.algorithms.losses import PolicyLoss
from mrl.core.types import Column

if TYPE_CHECKING:  # losses are named and checked in the driver, which needs no torch
    from torch import Tensor


def covariances(advantages: Column, logprobs: Column) -> np.ndarray:
    """[R] each token's part of the covariance, (log pi - mean log pi) (A - mean A), float64."""
    a, b = advantages.astype(np.float64), logprobs.astype(np.float64)
    return (a - a.mean()) * (b - b.mean()) if len(a) else a


def _mark(size: int, chosen: np.ndarray) -> Column:
    column = np.zeros(size, np.float32)
    column[chosen] = 1.0
    return column


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """-r A, and 0 for a random `fraction` of the tokens, drawn from those of covariance in (low, high) (Cui et al. 2025, eq. 11).

    The authors' code clips r as PPO does besides: `clip_low` and `clip_high`, 1 and 1 in their runs; none by default.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip_low: float = float("inf")
    clip_high: float = float("inf")

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """`clip_cov`: 1 where the token is left out. Of few candidates all are taken; one token at least is sought."""
        cov = covariances(advantages, batch.columns["old_logprobs"])
        candidates = np.flatnonzero((cov > self.low) & (cov < self.high))
        number = min(max(int(self.fraction * len(cov)), 1), len(candidates))
        return {"clip_cov": _mark(len(cov), rng.choice(candidates, number, replace=False))}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -(ratio * inputs.advantages).minimum(clipped * inputs.advantages)
        out = inputs.columns["clip_cov"] > 0
        numbers = {"loss/clip_fraction": (ratio != clipped).float(), "loss/selected_fraction": out.float()}
        return loss.masked_fill(out, 0.0), numbers


KL_COV_ESTIMATES = ("k3", "abs")


@dataclass(frozen=True)
class KLCov(PolicyLoss):
    """-r A, plus coef KL(old || pi) on the `fraction` of the tokens of largest covariance (Cui et al. 2025, eq. 12-13).

    `kl="k3"` estimates it by r - 1 - log r, whose value and gradient are right on average; "abs", |log r|, is what the authors'
    code has and what their coefficient of 1 was found with. A token of advantage 0 may be among the selected.
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
        """`kl_cov`: 1 where the token is penalised; one token at least. Of equal covariances the first are taken."""
        cov = covariances(advantages, batch.columns["old_logprobs"])
        number = min(max(int(self.fraction * len(cov)), 1), len(cov))
        return {"kl_cov": _mark(len(cov), np.argsort(-cov, kind="stable")[:number])}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        ratio, selected = log_ratio.exp(), inputs.columns["kl_cov"]
        kl = log_ratio.abs() if self.kl == "abs" else ratio - 1 - log_ratio
        loss = -ratio * inputs.advantages + self.coef * selected * kl
        return loss, {"loss/selected_fraction": selected}
