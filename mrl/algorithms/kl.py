"""Estimates of KL(policy || reference) per sampled token, as a penalty in the reward or as a term of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import LossInputs
from mrl.core.types import Column

if TYPE_CHECKING:  # named and checked in the driver, which needs no torch
    from torch import Tensor

KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: d,
    "k2": lambda d, exp: d**2 / 2,
    "k3": lambda d, exp: exp(-d) - 1 + d,
    "k1+": lambda d, exp: d,
    "k3+": lambda d, exp: exp(-d) - 1 + d,
    "unbiased": lambda d, exp: exp(-d) - 1 + d,
}
"""Values from d = log pi - log pi_ref of a token sampled from pi (Schulman, "Approximating KL divergence", 2020)."""


@dataclass(frozen=True)
class KLPenalty:
    """`coef` times a KL estimate: taken from the rewards (algorithm.kl_in_reward), or added to the loss (kl_in_loss).

    All kinds but k2 are right in value on average. As a term of the loss they differ in the gradient that they have on average
    over samples of the policy itself:

        k1        none: its mean is 0 (harmless in the reward, useless in the loss)
        k2        that of KL(policy || reference)
        k3        that of KL(reference || policy), the other direction; it is the one of GRPO (DeepSeekMath 2024, eq. 4)
        k1+, k3+  that of k2: the value of the first with the gradient of the second, as verl names them
        unbiased  that of KL(policy || reference), also for samples of the old policy: k3 times pi / pi_old, which carries
                  gradient (DeepSeek-V3.2 2025, 3.1); the value is weighted in the loss, and k3 in the reward

    With `target` the coefficient adapts to the measured KL (Ziegler et al. 2019, 2.2), over about `horizon` responses.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    coef: float = 0.001
    kind: str = "k1"
    target: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KINDS)}.")
        if self.target is not None and self.target <= 0:
            raise ValueError(f"target={self.target}: must be greater than 0, or null for a constant coefficient.")

    def __call__(self, inputs: LossInputs) -> Tensor:
        """[R] KL estimates, with the gradient that belongs to the kind."""
        d = inputs.logprobs - inputs.columns["ref_logprobs"]
        value = KINDS[self.kind](d, lambda x: x.exp())
        if self.kind == "unbiased":
            return (inputs.logprobs - inputs.old_logprobs).exp() * value
        if self.kind.endswith("+"):
            slope = KINDS["k2"](d, None)
            return value.detach() + (slope - slope.detach())
        return value

    def values(self, logprobs: Column, ref_logprobs: Column) -> NDArray[np.float64]:
        """[R] KL estimates of tokens that the policy of `logprobs` sampled, for the reward."""
        return KINDS[self.kind](logprobs.astype(np.float64) - ref_logprobs.astype(np.float64), np.exp)

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """The coefficient after a step of `samples` responses whose mean KL (per token, as `target`) was `measured`."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * samples / self.horizon)
