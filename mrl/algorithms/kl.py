"""KL penalties between the policy and the reference: estimates of the KL divergence per sampled token.

docs/concepts/algorithms.md lists the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import LossInputs, bounded_exp
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks penalties without torch
    from torch import Tensor

KL_ESTIMATORS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: d,
    "k2": lambda d, exp: d**2 / 2,
    "k3": lambda d, exp: exp(-d) - 1 + d,
    "abs": lambda d, exp: abs(d),
    "k1+": lambda d, exp: d,
    "k3+": lambda d, exp: exp(-d) - 1 + d,
    "abs+": lambda d, exp: abs(d),
    "unbiased": lambda d, exp: exp(-d) - 1 + d,
}
"""Name of an estimator -> function that computes its value (Schulman 2020, "Approximating KL divergence").

The arguments of the function are d = log pi - log pi_ref of a token that pi sampled, and an exponential function: np.exp or
bounded_exp.
"""
LOSS_KIND, REWARD_KIND = "k3", "k1"  # default estimators; in the loss, k1 has no gradient on average


@dataclass(frozen=True)
class KLPenalty:
    """KL penalty per token: `coef` times an estimate of KL(policy || reference).

    The penalty is subtracted from the rewards (algorithm.kl_in_reward) or added to the loss (algorithm.kl_in_loss). On
    average over samples of the policy, the value of k1, k3 and unbiased is KL(policy || reference). The default of `kind` is
    k1 in the reward and k3 in the loss. In the loss, the kinds differ in their average gradient:

        k1              no gradient on average: in the loss k1 adds only noise
        k2              the gradient of KL(policy || reference)
        k3              the gradient of KL(reference || policy), as in GRPO (DeepSeekMath 2024, eq. 4)
        abs             twice the gradient of the total variation distance, sum |policy - reference| / 2
        k1+, k3+, abs+  the gradient of k2, with the value of k1, k3 or abs; verl uses the same names
        unbiased        the gradient of KL(policy || reference), also for samples of the old policy. The value is k3
                        times the ratio pi / pi_old, and gradients flow through both factors (DeepSeek-V3.2 2025, 3.1).
                        In the reward, `unbiased` is k3

    With `target`, the coefficient adapts so that the measured KL per token approaches `target` (Ziegler et al. 2019,
    2.2). One training step multiplies the coefficient by a factor from 1 - c to 1 + c, where c is
    0.2 * (number of responses in the step) / `horizon`, and at most 0.8, so that the coefficient stays positive.

    Raises ValueError for an unknown kind, and for a target or a horizon of 0 or less.
    """

    # columns that the trainer computes before the loss
    required_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    coef: float = 0.001
    kind: str | None = None  # key of KL_ESTIMATORS; None: k3 in the loss, k1 in the reward
    target: float | None = None  # None: the coefficient is constant
    horizon: int = 10_000  # number of responses; a larger number makes the coefficient change more slowly

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KL_ESTIMATORS:
            raise ValueError(f"kind={self.kind!r}: expected one of {', '.join(KL_ESTIMATORS)}.")
        if self.target is not None and self.target <= 0:
            raise ValueError(f"target={self.target}: must be greater than 0, or null for a constant coefficient.")
        if self.horizon <= 0:
            raise ValueError(f"horizon={self.horizon}: must be greater than 0.")

    def __call__(self, inputs: LossInputs) -> Tensor:
        """Return a KL estimate for each of the R sampled tokens, for the loss. The estimates are not multiplied by `coef`."""
        d, kind = inputs.logprobs - inputs.columns["ref_logprobs"], self.kind or LOSS_KIND
        value = KL_ESTIMATORS[kind](d, bounded_exp)
        if kind == "unbiased":
            return bounded_exp(inputs.logprobs - inputs.old_logprobs) * value
        if kind.endswith("+"):
            k2 = KL_ESTIMATORS["k2"](d, None)
            return value.detach() + (k2 - k2.detach())
        return value

    def values(self, logprobs: Column, ref_logprobs: Column) -> NDArray[np.float64]:
        """Return a KL estimate for each of the R sampled tokens, for the reward. The estimates are not multiplied by `coef`.

        `logprobs` [R] are the old log-probabilities, and `ref_logprobs` [R] are the log-probabilities under the reference.
        """
        estimate = KL_ESTIMATORS[self.kind or REWARD_KIND]
        return estimate(logprobs.astype(np.float64) - ref_logprobs.astype(np.float64), np.exp)

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """Return the coefficient after a training step with `samples` responses and the mean KL per token `measured`."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * min(samples / self.horizon, 4))

    def is_active(self, measured: float | None) -> bool:
        """Return True: every step uses the penalty."""
        return True
