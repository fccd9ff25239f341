"""Corrections for off-policy samples, and metrics of the mismatch between trainer and engine.

The policy that sampled a token differs from the policy that is trained: the engine uses other kernels, another precision
or older weights. A correction gives the loss of each token a weight that compensates for this difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mrl.algorithms.inputs import AdvantageInputs, LossInputs, bounded_exp, join_extra_columns, needs_of
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks corrections without torch
    from torch import Tensor


class Correction(Protocol):
    """Interface of a correction. `algorithm.correction._target_` may name any callable of this form.

    A correction may declare `needs` and `extra_columns`, as a policy loss may (see mrl.algorithms.losses.Loss).
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a correction weight for each token loss [R], and metrics: name -> values [R].

        Correction weights have no gradient. A correction weight of 0 rejects a token.
        """
        ...


LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "reject")


@dataclass(frozen=True)
class ImportanceSampling:
    """Weights from the ratio pi_old / pi_rollout: the trainer's probability of a sampled token, divided by the engine's.

    `level` selects the ratio of a token:

        token      the ratio of the token itself
        sequence   the product of the ratios of all tokens of its response
        geometric  the geometric mean of the ratios of all tokens of its response

    `mode` selects the weight for a ratio:

        truncate   the ratio, clamped to [low, high]
        mask       the ratio, or 0 if the ratio is outside [low, high]
        reject     1, or 0 if the ratio is outside [low, high]

    With `veto`, all tokens of a response get weight 0 if the response has a token whose own ratio is below `veto`. The veto
    works with every level and mode.

    Published methods are settings of this class:

    - truncated importance sampling (TIS, Yao et al. 2025): mode=truncate, high=2
    - masked importance sampling (MIS, Liu et al. 2025): level=sequence, mode=mask
    - rejection of responses whose mean log-ratio is too far from 0: level=geometric, mode=reject
    - the weight pi_prox / pi_behave of decoupled PPO (Hilton et al. 2022; AReaL, Fu et al. 2025, eq. 5):
      level=token, mode=truncate, high=inf

    Rejected tokens count in the denominators of the loss; in verl they do not count. Raises ValueError for an unknown
    level or mode, for low < 0, and for low >= high.
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None  # lower bound of the ratio of every single token; None: no bound

    def __post_init__(self) -> None:
        for name, value, known in (("level", self.level, LEVELS), ("mode", self.mode, MODES)):
            if value not in known:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}.")
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected 0 <= low < high (.inf: no bound).")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R] without gradient, and metrics for the mean weight and the truncated and rejected fractions."""
        log_ratio, responses = (inputs.old_logprobs - inputs.rollout_logprobs).detach(), inputs.responses
        if self.level == "token":
            ratio = bounded_exp(log_ratio)
        else:
            combine = responses.sum if self.level == "sequence" else responses.mean
            ratio = responses.to_tokens(bounded_exp(combine(log_ratio)))
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
    """Importance sampling of tokens. A token whose ratio is outside [low, high] is masked (Ling team 2025, Ring-1T)."""

    mode: str = "mask"
    low: float = 0.5
    high: float = 5.0


def is_importance_sampling(correction: Correction) -> bool:
    """Return whether a correction uses the ratio pi_old / pi_rollout. With algorithm.old_logprobs=rollout this ratio is 1."""
    if isinstance(correction, Product):
        return any(map(is_importance_sampling, correction.corrections))
    return isinstance(correction, ImportanceSampling)


@dataclass(frozen=True)
class OffPolicyMask:
    """Rejects responses with negative advantage whose mean log(pi_rollout / pi) is above `delta` (DeepSeek-V3.2 2025, 3.1).

    pi is the policy that is trained, so the mean also changes with each optimizer step on the responses.
    """

    delta: float = 0.05  # largest accepted mean of log(pi_rollout / pi) over the tokens of a response, in nats

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R], each 0 or 1, and metrics."""
        responses = inputs.responses
        drift = responses.to_tokens(responses.mean(inputs.rollout_logprobs - inputs.logprobs.detach()))
        rejected = (inputs.advantages < 0) & (drift > self.delta)
        weights = (~rejected).to(drift.dtype)
        return weights, _metrics(weights, rejected.new_zeros(rejected.shape), rejected)


@dataclass(frozen=True)
class Product:
    """Multiplies the weights of several corrections, for example geometric rejection and weights per token."""

    corrections: Sequence[Correction]

    @property
    def needs(self) -> frozenset[str]:
        """Names of the columns that any of the corrections reads."""
        return frozenset[str]().union(*map(needs_of, self.corrections))

    def extra_columns(self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator) -> dict[str, Column]:
        """Return the extra columns of all corrections."""
        return join_extra_columns(self.corrections, batch, advantages, rng)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R], and metrics. A token counts as truncated or rejected if any correction truncates or rejects it."""
        weights = inputs.old_logprobs.new_ones(inputs.old_logprobs.shape)
        metrics: dict[str, Tensor] = {}
        for correction in self.corrections:
            factor, correction_metrics = correction(inputs)
            weights = weights * factor
            for name, value in correction_metrics.items():
                metrics[name] = value.maximum(metrics.get(name, value))
        return weights, metrics | {"correction/weight_mean": weights}


MISMATCH_SUMS = tuple(f"mismatch/{name}" for name in ("count", "log_ratio", "ratio", "ratio_squared", "k3_sum", "nan"))
"""Names of the sums that `mismatch_sums` returns."""


def mismatch_sums(old: Tensor, rollout: Tensor, left_out: Tensor | None = None) -> dict[str, Tensor]:
    """Return sums over tokens, from which `mismatch_metrics` computes the mismatch between trainer and engine.

    `old` [R] are the trainer's log-probabilities of the sampled tokens, and `rollout` [R] are the engine's. Tokens for which
    the engine reported NaN are only counted. `left_out` [R]: tokens that no engine of the run sampled, which are not counted. The
    results are float64 scalars. The caller adds the sums of all micro-batches and ranks.
    """
    # masked and not removed: on a GPU, the host would wait for the number of remaining tokens
    not_reported = rollout.isnan() if left_out is None else rollout.isnan() & ~left_out
    unknown = not_reported if left_out is None else not_reported | left_out
    log_ratio = (old.detach().double() - rollout.double()).masked_fill(unknown, 0.0)
    ratio = log_ratio.exp()
    k3 = ratio - 1 - log_ratio
    ratio = ratio.masked_fill(unknown, 0.0)
    return {
        "mismatch/count": (~unknown).double().sum(),
        "mismatch/log_ratio": log_ratio.sum(),
        "mismatch/ratio": ratio.sum(),
        "mismatch/ratio_squared": ratio.square().sum(),
        "mismatch/k3_sum": k3.sum(),
        "mismatch/nan": not_reported.double().sum(),
    }


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the mismatch metrics, computed from the sums of a whole batch.

    Here ratio is pi_trainer / pi_engine of a sampled token, and E is the mean over the sampled tokens for which the engine
    reported a log-probability. `nan_tokens` is the number of all other sampled tokens.

    kl            KL(engine || trainer), estimated by -E[log ratio]
    k3            KL(engine || trainer), estimated by E[ratio - 1 - log ratio] (Schulman 2020)
    chi2          chi-square divergence, E[ratio^2] - 1
    ess_fraction  effective sample size, divided by the number of tokens: E[ratio]^2 / E[ratio^2] (Kish 1965)
    ppl_ratio     perplexity of the samples under the trainer, divided by their perplexity under the engine:
                  exp(-E[log ratio])

    All metrics except nan_tokens are NaN if the engine reported no log-probability of any token.
    """
    count, log_ratio, ratio, squared, k3, num_nan = (np.float64(sums[name]) for name in MISMATCH_SUMS)
    with np.errstate(all="ignore"):
        metrics = {
            "kl": -log_ratio / count,
            "k3": k3 / count,
            "chi2": squared / count - 1,
            "ess_fraction": ratio**2 / (count * squared),
            "ppl_ratio": np.exp(-log_ratio / count),
        }
    return {f"mismatch/{name}": float(value) for name, value in metrics.items()} | {
        "mismatch/nan_tokens": float(num_nan)
    }
