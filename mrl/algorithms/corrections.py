"""Corrections for off-policy samples, and metrics of the mismatch between trainer and engine.

The policy that sampled a token differs from the policy that is trained: the engine uses other kernels, another precision
or older weights. A correction gives the loss of each token a weight that compensates for this difference.
docs/concepts/corrections.md lists the papers. R is the number of sampled tokens in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import (
    MAX_LOG_RATIO,
    AdvantageInputs,
    LossInputs,
    bounded_exp,
    join_precomputed_columns,
    required_inputs_of,
)
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks corrections without torch
    from torch import Tensor


class Correction(Protocol):
    """Interface of a correction. `algorithm.correction._target_` may name any callable of this form.

    A correction may declare `required_inputs` and `precomputed_columns`, as a policy loss may (see mrl.algorithms.losses.Loss).
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a correction weight for each token loss [R], and metrics: name -> values [R].

        Correction weights have no gradient. A correction weight of 0 rejects a token.
        """
        ...


LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask", "reject")
NUMERATORS = ("old", "current")


@dataclass(frozen=True)
class ImportanceSampling:
    """Computes weights from the ratio pi_old / pi_rollout of a sampled token.

    pi_rollout is the probability of the token in the engine. pi_old is its probability in the trainer before the first optimizer
    step on the response. With `numerator=current`, the numerator is the probability under the current weights, without gradient.
    `algorithm.old_logprobs=rollout` needs this numerator, because pi_old is then pi_rollout. Use `numerator=current` with a loss
    that has no ratio, such as PolicyGradient, or with mode=reject.

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

    With `batch_normalize`, the weights are divided by their mean, so that the loss keeps its scale. The mean is computed once per
    step, before the step is divided into mini-batches. With level=token, it is a mean over tokens; with the other levels, it is
    a mean over responses. With mode=mask, masked tokens and responses count as 0 in the mean. The mean does not include
    responses that the token limit ended and that algorithm.mask_truncated excludes. With level=token, it also does not include
    tokens for which the engine reported no log-probability. The veto and other corrections do not change the mean. If the mean is
    below 1e-8, the weights are not divided, as in verl.

    Published methods are settings of this class:

    - truncated importance sampling (TIS, Yao et al. 2025): mode=truncate, high=2
    - masked importance sampling (MIS, Liu et al. 2025): level=sequence, mode=mask
    - rejection of responses whose mean log-ratio is too far from 0: level=geometric, mode=reject
    - the weight of decoupled PPO, pi_prox / pi_behave, which is pi_old / pi_rollout here (Hilton et al. 2022; AReaL, Fu et al.
      2025, eq. 5): level=token, mode=truncate, high=inf

    Rejected tokens count in the denominators of the loss; in verl they do not count.

    Raises ValueError for an unknown level, mode or numerator, for low < 0, and for low >= high. Also raises ValueError for
    `batch_normalize` with mode=reject (the weights are only 0 or 1) or numerator=current (the weights are not known before the
    optimizer steps).
    """

    level: str = "token"
    mode: str = "truncate"
    low: float = 0.0
    high: float = 2.0
    veto: float | None = None  # lower bound of the ratio of every single token; None: no bound
    numerator: str = "old"  # "old" or "current"
    batch_normalize: bool = False

    def __post_init__(self) -> None:
        _check_choices(level=(self.level, LEVELS), mode=(self.mode, MODES), numerator=(self.numerator, NUMERATORS))
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected 0 <= low < high (.inf: no bound).")
        if self.batch_normalize and (self.mode == "reject" or self.numerator == "current"):
            raise ValueError(
                f"batch_normalize=True, mode={self.mode!r}, numerator={self.numerator!r}: batch_normalize needs mode=truncate or "
                "mode=mask, and numerator=old."
            )

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the columns from which `precomputed_columns` computes the mean weight of a step."""
        return frozenset({"old_logprobs", "rollout_logprobs"}) if self.batch_normalize else frozenset()

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """With `batch_normalize`, return one column: 1 / (mean weight of the step) for each token. Otherwise, return {}."""
        if not self.batch_normalize:
            return {}
        weights = self.step_weights(batch)
        if self.level == "token":
            weights = weights[~np.isnan(batch.columns["rollout_logprobs"])]
        else:
            weights = weights[np.cumsum(batch.lengths) - 1]  # one for each response
        mean = weights.mean() if len(weights) else 0.0
        return {self.scale_column: np.full(len(advantages), 1 / mean if mean > 1e-8 else 1.0, np.float32)}

    @property
    def scale_column(self) -> str:
        """Name of the column of `precomputed_columns`. Corrections that differ in level, mode or bounds have different names."""
        return f"importance_scale_{self.level}_{self.mode}_{self.low}_{self.high}"

    def step_weights(self, batch: AdvantageInputs) -> NDArray[np.float64]:
        """Return the weights [R] of all tokens of a step, before the veto and `batch_normalize` are applied.

        `batch` has the columns old_logprobs and rollout_logprobs. Where the engine reported NaN, the token's ratio is 1.
        """
        old, rollout = (batch.columns[name].astype(np.float64) for name in ("old_logprobs", "rollout_logprobs"))
        log_ratio = np.where(np.isnan(rollout), 0.0, old - rollout)
        if self.level != "token":
            sums = np.bincount(batch.response_of_token, log_ratio, minlength=len(batch.lengths))
            log_ratio = (sums / batch.lengths if self.level == "geometric" else sums)[batch.response_of_token]
        ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
        inside = (ratio >= self.low) & (ratio <= self.high)
        return {
            "truncate": np.clip(ratio, self.low, self.high),
            "mask": np.where(inside, ratio, 0.0),
            "reject": inside.astype(np.float64),
        }[self.mode]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R] without gradient, and metrics for the mean weight and the truncated and rejected fractions."""
        log_ratio, responses = _log_ratio(inputs, self.numerator), inputs.responses
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
        if self.batch_normalize:
            weights = weights * inputs.columns[self.scale_column]
        return weights, _metrics(weights, outside & ~rejected, rejected)


def _log_ratio(inputs: LossInputs, numerator: str) -> Tensor:
    """Return [R], without gradient: the log-probability under the policy `numerator` minus the engine's log-probability."""
    policy = inputs.logprobs if numerator == "current" else inputs.old_logprobs
    return (policy - inputs.rollout_logprobs).detach()


def _check_choices(**choices: tuple[str, Sequence[str]]) -> None:
    """Raise ValueError for an argument whose value is unknown. `choices`: name -> (value, known values)."""
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}.")


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


REJECTION_LEVELS = ("token", "sum", "mean", "max")
REJECTION_KINDS = ("k2", "k3")


@dataclass(frozen=True)
class Rejection:
    """Rejects tokens or responses for which trainer and engine differ too much (Liu et al. 2025, "When speed kills stability").

    `kind` selects the estimate of the divergence at a sampled token, where r is pi_old / pi_rollout (Schulman 2020):

        k2  (log r)^2 / 2
        k3  r - 1 - log r

    `level` selects what is compared with `high`:

        token  the divergence of the token; a token above `high` is rejected
        sum    the sum over the response
        mean   the mean over the response
        max    the largest divergence of a token of the response

    With sum, mean and max, all tokens of a response are rejected if the value of the response is above `high`.

    For verl's estimate k1, use ImportanceSampling with mode=reject, which compares r with `low` and `high`. `numerator` has the
    same meaning as in ImportanceSampling. Rejected tokens count in the denominators of the loss; in verl they do not count.

    Raises ValueError for an unknown level, kind or numerator, and for a `high` of 0 or less.
    """

    high: float  # largest accepted divergence in nats
    level: str = "mean"
    kind: str = "k3"
    numerator: str = "old"  # "old" or "current"

    def __post_init__(self) -> None:
        levels, kinds = (self.level, REJECTION_LEVELS), (self.kind, REJECTION_KINDS)
        _check_choices(level=levels, kind=kinds, numerator=(self.numerator, NUMERATORS))
        if self.high <= 0:
            raise ValueError(f"high={self.high}: must be greater than 0.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return weights [R], each 0 or 1, and metrics."""
        log_ratio, responses = _log_ratio(inputs, self.numerator), inputs.responses
        divergence = log_ratio**2 / 2 if self.kind == "k2" else bounded_exp(log_ratio) - 1 - log_ratio
        if self.level == "sum":
            divergence = responses.to_tokens(responses.sum(divergence))
        elif self.level == "mean":
            divergence = responses.to_tokens(responses.mean(divergence))
        rejected = divergence > self.high
        if self.level == "max":  # the response has a token above `high`
            rejected = responses.to_tokens(responses.sum(rejected.to(divergence.dtype))) > 0
        weights = (~rejected).to(divergence.dtype)
        return weights, _metrics(weights, rejected.new_zeros(rejected.shape), rejected)


def _factors(correction: Correction) -> Iterator[Correction]:
    """Yield the corrections that a Product multiplies, also those of nested Products. Yield any other correction unchanged."""
    if not isinstance(correction, Product):
        yield correction
        return
    for part in correction.corrections:
        yield from _factors(part)


def compares_old_policy(correction: Correction) -> bool:
    """Return whether a correction uses the ratio pi_old / pi_rollout. With algorithm.old_logprobs=rollout this ratio is 1."""
    return any(
        isinstance(part, ImportanceSampling | Rejection) and part.numerator == "old" for part in _factors(correction)
    )


@dataclass(frozen=True)
class OffPolicyMask:
    """Rejects tokens with A < 0 in responses whose mean log(pi_rollout / pi) is above `delta` (DeepSeek-V3.2 2025, 3.1).

    A is the advantage of a token. pi is the policy that is trained, so the mean also changes with each optimizer step.
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
    """Multiplies the weights of several corrections, for example geometric rejection and weights per token.

    Raises ValueError if two corrections have `batch_normalize` and the same level, mode and bounds, because their columns would
    have the same name.
    """

    corrections: Sequence[Correction]

    def __post_init__(self) -> None:
        columns = [
            part.scale_column
            for part in _factors(self)
            if isinstance(part, ImportanceSampling) and part.batch_normalize
        ]
        if len(set(columns)) < len(columns):
            raise ValueError(
                "two corrections with batch_normalize=True have the same level, mode, low and high, so the ratio of a token "
                "would count twice; remove one of them."
            )

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the columns that any of the corrections reads."""
        return frozenset[str]().union(*map(required_inputs_of, self.corrections))

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the precomputed columns of all corrections."""
        return join_precomputed_columns(self.corrections, batch, advantages, rng)

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
    the engine reported NaN count only in `mismatch/nan`. `left_out` [R] is true for tokens of rows of data.offline.path. No
    engine of the run sampled these tokens, so they count in no sum. The results are float64 scalars. The caller adds the sums
    of all micro-batches and ranks.
    """
    # Tokens whose ratio is unknown are masked, not removed: to remove them, the host would have to wait for a count on the GPU.
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
    reported a log-probability. `nan_tokens` is the number of tokens for which it reported NaN. Tokens of rows of
    data.offline.path do not count.

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
