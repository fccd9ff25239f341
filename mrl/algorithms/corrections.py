"""Corrections for samples of another policy than the one that is trained: weights and masks on the loss of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mrl.algorithms.inputs import LossInputs

if TYPE_CHECKING:  # named and checked in the driver, which needs no torch
    from torch import Tensor


class Correction(Protocol):
    """Any callable of this form can be named in `algorithm.correction._target_`."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [R] of the tokens' losses, without gradient (0 rejects), and numbers [R] to report."""
        ...


LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "reject")


@dataclass(frozen=True)
class ImportanceSampling:
    """Weights from the ratio pi_old / pi_rollout: what the trainer says of a sampled token over what the engine said.

    level  token: each token's own ratio; sequence: the product over its response; geometric: the product's |y|-th root
    mode   truncate: the ratio, kept within [low, high]; mask: the ratio, 0 outside; reject: 1 inside and 0 outside
    veto   a response with a token whose ratio is below this is left out, whatever else holds

    truncate with high 2 is truncated importance sampling (TIS, Yao et al. 2025); mask is masked importance sampling (MIS), at
    the level of sequences as in Liu et al. 2025; reject at the level geometric drops whole responses that are off on average.
    truncate at the level token with `high` infinite is decoupled PPO's weight pi_prox / pi_behave (Hilton et al. 2022, the
    decoupled objective; AReaL, Fu et al. 2025, eq. 5), where the rollout is of older weights.

    What is left out still counts in the denominators of the loss (verl takes it out of them). Raises ValueError for an
    unknown level or mode, and for bounds that enclose nothing.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None

    def __post_init__(self) -> None:
        for name, value, fits in (("level", self.level, LEVELS), ("mode", self.mode, MODES)):
            if value not in fits:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(fits)}.")
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected 0 <= low < high (.inf: no bound).")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [R] without gradient, and their mean and the fractions that were truncated and rejected."""
        log_ratio, responses = (inputs.old_logprobs - inputs.rollout_logprobs).detach(), inputs.responses
        if self.level == "token":
            ratio = log_ratio.exp()
        else:
            over = responses.sum if self.level == "sequence" else responses.mean
            ratio = responses.spread(over(log_ratio).exp())
        outside = (ratio < self.low) | (ratio > self.high)
        if self.mode == "truncate":
            weights, rejected = ratio.clamp(self.low, self.high), outside.new_zeros(outside.shape)
        else:
            weights, rejected = ratio if self.mode == "mask" else ratio.new_ones(ratio.shape), outside
        if self.veto is not None:
            below = (log_ratio.exp() < self.veto).to(ratio.dtype)
            rejected = rejected | (responses.spread(responses.sum(below)) > 0)
        weights = weights.masked_fill(rejected, 0.0)
        return weights, _numbers(weights, outside & ~rejected, rejected)


def _numbers(weights: Tensor, truncated: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "correction/weight_mean": weights,
        "correction/truncated_fraction": truncated.float(),
        "correction/rejected_fraction": rejected.float(),
    }


@dataclass(frozen=True)
class IcePop(ImportanceSampling):
    """Tokens whose ratio is outside [low, high] are left out on both sides, others weighted by it (Ling team 2025, Ring-1T)."""

    mode: str = "mask"
    low: float = 0.5
    high: float = 5.0


def compares_old(correction: Correction) -> bool:
    """Whether it looks at pi_old / pi_rollout, which is 1 where the rollout's policy stands for the old one."""
    if isinstance(correction, Product):
        return any(map(compares_old, correction.corrections))
    return isinstance(correction, ImportanceSampling)


@dataclass(frozen=True)
class OffPolicyMask:
    """Responses of negative advantage are left out whose mean log(pi_rollout / pi) exceeds `delta` (DeepSeek-V3.2 2025, 3.1).

    pi is the policy being trained, so that later updates of a rollout count too.
    """

    delta: float = 0.05

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [R], 0 or 1."""
        responses = inputs.responses
        drift = responses.spread(responses.mean(inputs.rollout_logprobs - inputs.logprobs.detach()))
        rejected = (inputs.advantages < 0) & (drift > self.delta)
        weights = (~rejected).to(drift.dtype)
        return weights, _numbers(weights, rejected.new_zeros(rejected.shape), rejected)


@dataclass(frozen=True)
class Product:
    """Several corrections at once: weights multiply; as geometric rejection with weights of tokens."""

    corrections: Sequence[Correction]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights [R]; a token is reported truncated or rejected where one of the corrections did so."""
        weights = inputs.old_logprobs.new_ones(inputs.old_logprobs.shape)
        numbers: dict[str, Tensor] = {}
        for correction in self.corrections:
            more, found = correction(inputs)
            weights = weights * more
            for name, value in found.items():
                numbers[name] = value.maximum(numbers.get(name, value))
        return weights, numbers | {"correction/weight_mean": weights}
