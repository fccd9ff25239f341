"""Corrections for off-policy samples, and metrics of the mismatch between trainer and engine.

A correction weights or masks the loss of each token, because the policy that sampled the token differs from the policy
being trained: the engine computes with other kernels and another precision, or with older weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mrl.algorithms.inputs import LossInputs

if TYPE_CHECKING:  # the driver builds and checks corrections without torch
    from torch import Tensor


class Correction(Protocol):
    """Interface of a correction. `algorithm.correction._target_` may name any callable of this form."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weights [R] of the token losses, without gradient (0 rejects a token), and metrics [R] by name."""
        ...


LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "reject")


@dataclass(frozen=True)
class ImportanceSampling:
    """Weights from the ratio pi_old / pi_rollout: the trainer's probability of a sampled token divided by the engine's.

    level  token: the ratio of the token; sequence: the product of the ratios of its response; geometric: the |y|-th
           root of that product
    mode   truncate: the ratio clamped to [low, high]; mask: the ratio, and 0 outside [low, high]; reject: 1, and 0
           outside [low, high]
    veto   reject every response that has a token with a ratio below `veto`, at any level and mode. None: no veto

    Published methods as settings of this class:

    - truncated importance sampling (TIS, Yao et al. 2025): truncate, high 2
    - masked importance sampling (MIS, at the sequence level as in Liu et al. 2025): mask
    - rejection of responses whose mean log-ratio is too far from 0: reject at the geometric level
    - the weight pi_prox / pi_behave of decoupled PPO, for rollouts sampled by older weights (Hilton et al. 2022, decoupled
      objective; AReaL, Fu et al. 2025, eq. 5): truncate at the token level with an infinite `high`

    Rejected tokens count in the denominators of the loss; in verl they do not. Raises ValueError for an unknown
    level or mode, and unless 0 <= low < high.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("level", self.level, LEVELS), ("mode", self.mode, MODES)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}.")
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected 0 <= low < high (.inf: no bound).")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R] without gradient; metrics are their mean and the truncated and rejected fractions."""
        log_ratio, responses = (inputs.old_logprobs - inputs.rollout_logprobs).detach(), inputs.responses
        if self.level == "token":
            ratio = log_ratio.exp()
        else:
            reduce = responses.sum if self.level == "sequence" else responses.mean
            ratio = responses.to_tokens(reduce(log_ratio).exp())
        outside = (ratio < self.low) | (ratio > self.high)
        if self.mode == "truncate":
            weights, rejected = ratio.clamp(self.low, self.high), outside.new_zeros(outside.shape)
        else:
            weights, rejected = ratio if self.mode == "mask" else ratio.new_ones(ratio.shape), outside
        if self.veto is not None:
            below = (log_ratio.exp() < self.veto).to(ratio.dtype)
            rejected = rejected | (responses.to_tokens(responses.sum(below)) > 0)
        weights = weights.masked_fill(rejected, 0.0)
        return weights, _metrics(weights, outside & ~rejected, rejected)


def _metrics(weights: Tensor, truncated: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "correction/weight_mean": weights,
        "correction/truncated_fraction": truncated.float(),
        "correction/rejected_fraction": rejected.float(),
    }


@dataclass(frozen=True)
class IcePop(ImportanceSampling):
    """Token-level importance sampling that masks tokens whose ratio is outside [low, high] (Ling team 2025, Ring-1T)."""

    mode: str = "mask"
    low: float = 0.5
    high: float = 5.0


def is_importance_sampling(correction: Correction) -> bool:
    """Whether a correction uses the ratio pi_old / pi_rollout, which is 1 under algorithm.old_logprobs=rollout."""
    if isinstance(correction, Product):
        return any(map(is_importance_sampling, correction.corrections))
    return isinstance(correction, ImportanceSampling)


@dataclass(frozen=True)
class OffPolicyMask:
    """Rejects responses of negative advantage whose mean log(pi_rollout / pi) exceeds `delta` (DeepSeek-V3.2 2025, 3.1).

    pi is the policy being trained, so the mean also changes with the optimizer steps since the rollout.
    """

    delta: float = 0.05

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R], 0 or 1."""
        responses = inputs.responses
        drift = responses.to_tokens(responses.mean(inputs.rollout_logprobs - inputs.logprobs.detach()))
        rejected = (inputs.advantages < 0) & (drift > self.delta)
        weights = (~rejected).to(drift.dtype)
        return weights, _metrics(weights, rejected.new_zeros(rejected.shape), rejected)


@dataclass(frozen=True)
class Product:
    """Several corrections, whose weights are multiplied. Example: geometric rejection times token-level weights."""

    corrections: Sequence[Correction]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R]. The metrics count a token as truncated or rejected if any correction truncated or rejected it."""
        weights = inputs.old_logprobs.new_ones(inputs.old_logprobs.shape)
        metrics: dict[str, Tensor] = {}
        for correction in self.corrections:
            factor, found = correction(inputs)
            weights = weights * factor
            for name, value in found.items():
                metrics[name] = value.maximum(metrics.get(name, value))
        return weights, metrics | {"correction/weight_mean": weights}


MISMATCH_SUMS = tuple(f"mismatch/{name}" for name in ("count", "log_ratio", "ratio", "ratio_squared", "k3_sum"))
"""Names of the sums that `mismatch_sums` returns."""


def mismatch_sums(old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Return sums over tokens, from which `mismatch_metrics` computes the mismatch of trainer and engine.

    `old` and `rollout` [R] are the log-probabilities of the sampled tokens under the trainer and the engine. The
    results are float64 scalars. Sums of parts of a batch, such as micro-batches and ranks, add up to the sums of the
    batch.
    """
    log_ratio = old.detach().double() - rollout.double()
    ratio = log_ratio.exp()
    return {
        "mismatch/count": log_ratio.new_tensor(float(len(log_ratio))),
        "mismatch/log_ratio": log_ratio.sum(),
        "mismatch/ratio": ratio.sum(),
        "mismatch/ratio_squared": ratio.square().sum(),
        "mismatch/k3_sum": (ratio - 1 - log_ratio).sum(),
    }


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the mismatch metrics from the sums of a whole batch.

    ratio = pi_train / pi_engine of a sampled token; E is the mean over the tokens that the engine sampled.

    kl            KL(engine || trainer) = -E[log ratio]
    k3            the same divergence, estimated by E[ratio - 1 - log ratio] (Schulman 2020)
    chi2          chi-square divergence, E[ratio^2] - 1
    ess_fraction  effective sample size as a fraction of n, (sum ratio)^2 / (n sum ratio^2) (Kish 1965)
    ppl_ratio     the samples' perplexity under the trainer divided by that under the engine, exp(-E[log ratio])

    All are NaN if there are no tokens, or if the engine returned no log-probabilities (NaN).
    """
    count, log_ratio, ratio, squared, k3 = (np.float64(sums[name]) for name in MISMATCH_SUMS)
    with np.errstate(all="ignore"):
        metrics = {
            "kl": -log_ratio / count,
            "k3": k3 / count,
            "chi2": squared / count - 1,
            "ess_fraction": ratio**2 / (count * squared),
            "ppl_ratio": np.exp(-log_ratio / count),
        }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()}
