"""KL penalties against the reference policy: estimates per sampled token, and their coefficients over a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import LossInputs
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks penalties without torch
    from torch import Tensor

KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: d,
    "k2": lambda d, exp: d**2 / 2,
    "k3": lambda d, exp: exp(-d) - 1 + d,
    "k1+": lambda d, exp: d,
    "k3+": lambda d, exp: exp(-d) - 1 + d,
    "unbiased": lambda d, exp: exp(-d) - 1 + d,
}
"""Estimate of each kind from d = log pi - log pi_ref of a token sampled from pi (Schulman 2020, "Approximating KL divergence").

`exp` is the exponential of NumPy or of torch.
"""


@dataclass(frozen=True)
class KLPenalty:
    """`coef` times an estimate of KL(policy || reference) per token.

    The penalty is subtracted from the rewards (algorithm.kl_in_reward) or added to the loss (algorithm.kl_in_loss). On
    average over samples of the policy, every kind but k2 has the value KL(policy || reference). In the loss, the kinds
    differ in their average gradient:

        k1        0, so in the loss k1 adds only noise; use k1 in the reward
        k2        the gradient of KL(policy || reference)
        k3        the gradient of KL(reference || policy), as in GRPO (DeepSeekMath 2024, eq. 4)
        k1+, k3+  the value of k1 or k3 with the gradient of k2; the names are verl's
        unbiased  the gradient of KL(policy || reference), also for samples of the old policy: k3 times pi / pi_old,
                  and the ratio carries gradient (DeepSeek-V3.2 2025, 3.1). In the reward it is k3

    With `target`, the coefficient adapts so that the measured KL per token approaches `target` (Ziegler et al. 2019,
    2.2): one step changes the coefficient by at most 20 % times (responses of the step / `horizon`). Raises ValueError
    for an unknown kind and for a target of 0 or less.
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
        """Return KL estimates [R] for the loss, without `coef`, with the gradient of the kind."""
        d = inputs.logprobs - inputs.columns["ref_logprobs"]
        value = KINDS[self.kind](d, lambda x: x.exp())
        if self.kind == "unbiased":
            return (inputs.logprobs - inputs.old_logprobs).exp() * value
        if self.kind.endswith("+"):
            k2 = KINDS["k2"](d, None)
            return value.detach() + (k2 - k2.detach())
        return value

    def values(self, logprobs: Column, ref_logprobs: Column) -> NDArray[np.float64]:
        """Return KL estimates [R] for the reward, without `coef`. The policy of `logprobs` sampled the tokens."""
        return KINDS[self.kind](logprobs.astype(np.float64) - ref_logprobs.astype(np.float64), np.exp)

    def next_coef(self, coef: float, measured: float, samples: int) -> float:
        """Return the coefficient after a step of `samples` responses whose mean KL per token was `measured`."""
        if self.target is None:
            return coef
        error = min(max(measured / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * samples / self.horizon)


MEASURED = {"reward": "policy/kl_reward", "loss": "policy/kl_ref"}
"""Metric with the measured KL of the penalty in the reward, and of the penalty in the loss."""


@dataclass
class KLControl:
    """The current coefficients of the KL penalties in the reward and in the loss: constant, or adapted to the measured KL."""

    penalties: Mapping[str, KLPenalty]  # keys: "reward", "loss"
    coefs: dict[str, float] = field(default_factory=dict)  # the same keys

    def __post_init__(self) -> None:
        self.coefs = {where: penalty.coef for where, penalty in self.penalties.items()} | self.coefs

    def coef(self, where: str) -> float:
        """Return the coefficient for the next step; 0 if there is no such penalty. `where` is "reward" or "loss"."""
        return self.coefs.get(where, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the coefficients as metrics."""
        return {f"policy/kl_coef_{where}": coef for where, coef in self.coefs.items()}

    def adapt(self, metrics: Mapping[str, float], samples: int) -> None:
        """Adapt the coefficients to the `metrics` of a step that trained the actor on `samples` responses."""
        for where, penalty in self.penalties.items():
            self.coefs[where] = penalty.next_coef(self.coefs[where], metrics[MEASURED[where]], samples)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficients for a checkpoint."""
        return dict(self.coefs)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore adaptive coefficients. Constant ones keep the value of the config."""
        for where, penalty in self.penalties.items():
            if penalty.target is not None:
                self.coefs[where] = state.get(where, self.coefs[where])
