"""Policy losses per sampled token, and the value loss of the critic.

Symbols in the formulas:

    A       advantage of a token
    pi      probability of the token under the current model weights
    pi_old  probability of the token before the first optimizer step of the training step; with algorithm.old_logprobs=rollout,
            the probability that the engine reported
    r       the ratio pi / pi_old
    sg      stop-gradient

`mrl.algorithms.objective` averages the losses and adds KL and entropy terms. The losses with one ratio per response are in
`mrl.algorithms.sequence_losses`. docs/concepts/algorithms.md lists the papers. R is the number of sampled tokens of a micro-batch
on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from mrl.algorithms.inputs import AdvantageInputs, LossInputs, bounded_exp, join_precomputed_columns, required_inputs_of
from mrl.core.types import Column

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor


class Loss(Protocol):
    """Interface of a policy loss. `algorithm.loss._target_` may name any callable of this form.

    The class PolicyLoss has defaults for all attributes of this interface. A function without these attributes needs no columns
    and has no precomputed columns. Its input `entropy` has no gradient, and training does not skip responses with advantage 0.
    """

    @property
    def zero_at_zero_advantage(self) -> bool:
        """Whether a response with advantage 0 has loss 0 and gradient 0.

        If this is true for the whole objective, and algorithm.skip_zero_advantage is true, training skips these responses.
        """
        ...

    @property
    def uses_entropy(self) -> bool:
        """Whether the loss depends on `inputs.entropy`. If it does, the entropy is computed with a gradient."""
        ...

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the columns that the loss reads (see mrl.algorithms.parts.COLUMNS)."""
        ...

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [R], and metrics: name -> values [R]. The values are averaged in the same way as the loss.

        A metric `NAME` without a slash is logged as `own/NAME`.
        """
        ...

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the loss's own columns [R], which `__call__` then finds in `inputs.columns`.

        This method gets the whole step, before the step is divided into mini-batches. So here R is the number of sampled tokens
        of the step.
        """
        ...


class PolicyLoss:
    """Base class of policy losses. By default, a loss needs no columns and has no precomputed columns."""

    zero_at_zero_advantage: ClassVar[bool] = True
    uses_entropy: ClassVar[bool] = False
    required_inputs: ClassVar[frozenset[str]] = frozenset()
    rows: ClassVar[str] = "responses"  # rows that supervised training needs: "responses", "pairs" or "labels"

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return no columns."""
        return {}


def clipped_loss(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A) [R], and the metric `loss/clip_fraction`. `ratio` is r.

    The metric counts the tokens whose loss the clip changes: r > 1 + high with A > 0, and r < 1 - low with A < 0.
    """
    objective, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -objective.minimum(clipped), {"loss/clip_fraction": (clipped < objective).float()}


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """Clipped policy-gradient loss, -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, Schulman et al. 2017, eq. 7).

    With `clip_high` above `clip_low`, the loss has DAPO's clip-higher (Yu et al. 2025, eq. 10). With `dual_clip`, a token
    with A < 0 has the loss min(loss, -dual_clip * A) (Ye et al. 2020, eq. 5). verl always uses this second clip; its default
    for `dual_clip` is 3.

    Raises ValueError for a `dual_clip` of 1 or less.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip={self.dual_clip}: must be greater than 1, or null for no dual clip.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
        loss, metrics = clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)
        if self.dual_clip is None:
            return loss, metrics
        ceiling = -self.dual_clip * inputs.advantages
        bounded = (inputs.advantages < 0) & (loss > ceiling)
        return ceiling.where(bounded, loss), metrics | {"loss/dual_clip_fraction": bounded.float()}


@dataclass(frozen=True)
class PolicyGradient(PolicyLoss):
    """Plain policy gradient -A log pi (Williams 1992). It assumes on-policy samples. For other samples, use a correction.

    This is the loss "opmd" of Trinity-RFT if the advantages have mean 0 in each group and are divided by 1 + tau.
    """

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.advantages * inputs.logprobs, {}


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """Policy gradient with the clipped ratio as factor (MiniMax-M1 2025, eq. 4-5).

    The loss is -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi. Clipped tokens also have a gradient, because the clip changes
    only the factor of log pi. The paper sets no lower bound, and does not publish the upper bound. The default upper bound
    1 + clip_high = 5 is from Khatri et al. (2025, ScaleRL).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_exp(inputs.logprobs.detach() - inputs.old_logprobs)
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": (ratio != weight).float()}


@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """Loss with a soft gate in place of a clip: -A sigmoid(tau (r - 1)) 4 / tau (Gao et al. 2025).

    For on-policy samples, every tau gives the gradient of the plain policy gradient. With a larger tau, the gradient
    falls faster as r moves away from 1. By default, tau is larger for negative advantages. In the paper, all responses
    have the same weight in the loss (`algorithm.aggregation=sequence_mean`).
    """

    tau_positive: float = 1.0  # tau of tokens with A > 0
    tau_negative: float = 1.05  # tau of tokens with A <= 0

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
        negative = inputs.advantages <= 0
        tau = ratio.new_full(ratio.shape, self.tau_positive).masked_fill(negative, self.tau_negative)
        return -inputs.advantages * (tau * (ratio - 1)).sigmoid() * 4 / tau, {}


DIVERGENCES = ("tv", "kl")


@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """Policy gradient with a trust region: -sg(min(r, max_ratio)) A log pi inside it, 0 outside (Qi et al. 2026).

    A token is outside the trust region if A > 0, pi > pi_old and D > delta_high, or if A <= 0, pi < pi_old and
    D > delta_low. D is a divergence between two Bernoulli distributions, whose parameters are the probabilities of the
    token: pi_old before the training step, and pi now. `divergence` selects D:

        tv  total variation, |pi - pi_old|
        kl  KL(old || new) = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    Compared with a clip of the ratio, tokens of low probability keep their gradient, and tokens of high probability reach the
    bound earlier. In the authors' runs, delta_low and delta_high are 0.15 for tv and 0.05 for kl. Raises ValueError for an
    unknown `divergence`.
    """

    delta_low: float = 0.2
    delta_high: float = 0.2
    max_ratio: float = 20.0  # r is clipped to at most this value, as in verl
    divergence: str = "tv"  # "tv" or "kl"

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r}: expected {' or '.join(DIVERGENCES)}.")

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        new, old = inputs.logprobs.detach(), inputs.old_logprobs
        divergence = (new.exp() - old.exp()).abs() if self.divergence == "tv" else binary_kl(old, new)
        too_likely, too_unlikely = (
            (new > old) & (divergence > self.delta_high),
            (new < old) & (divergence > self.delta_low),
        )
        outside = too_likely.where(inputs.advantages > 0, too_unlikely)
        weight = bounded_exp(new - old).clamp(max=self.max_ratio).masked_fill(outside, 0.0)
        return -weight * inputs.advantages * inputs.logprobs, {"loss/clip_fraction": outside.float()}


def binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """Return KL(Bernoulli(e^old) || Bernoulli(e^new)) in nats. All arrays are [R]; `old` and `new` are log-probabilities.

    The probability of the other event, 1 - e^x, is clamped to at least 1e-8, so that the result is finite.
    """
    log_others_old, log_others_new = ((-logprobs.expm1()).clamp(min=1e-8).log() for logprobs in (old, new))
    return old.exp() * (old - new) - old.expm1() * (log_others_old - log_others_new)


@dataclass(frozen=True)
class DRO(PolicyLoss):
    """Policy gradient with a quadratic penalty: -A log pi + beta / 2 (log r)^2 (Direct Reward Optimization).

    The penalty of Richemond et al. (2024, eq. 6) and of Kimi k1.5 (2025, 2.3.2) is one square for each response, as in the
    class OPMD. Here each token has its own square, as in Tinker and verl, so the gradient of a token depends on no other token.
    The samples may come from any older policy. A response with advantage 0 also has a gradient, towards the old policy.

    Raises ValueError for a `beta` of 0 or less.
    """

    zero_at_zero_advantage: ClassVar[bool] = False
    beta: float = 0.05  # a larger beta keeps the policy closer to the old policy

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ValueError(
                f"beta={self.beta}: must be greater than 0; without a penalty, use the loss PolicyGradient."
            )

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        square = (inputs.logprobs - inputs.old_logprobs) ** 2
        return -inputs.advantages * inputs.logprobs + self.beta / 2 * square, {}


@dataclass(frozen=True)
class CrossEntropy(PolicyLoss):
    """Negative log-likelihood of the response, for supervised fine-tuning."""

    zero_at_zero_advantage: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -inputs.logprobs, {}


def covariances(advantages: Column, logprobs: Column) -> np.ndarray:
    """Return [R]: for each token of the step, its term of the covariance, (log pi - mean log pi) (A - mean A), in float64.

    Training on tokens with a large term reduces the entropy (Cui et al. 2025, eq. 10). ClipCov and KLCov select such tokens from
    all tokens of the step, with the log-probabilities before the first optimizer step. So the selection depends neither on
    micro-batches nor on the parallel layout. The authors' code selects tokens within each micro-batch. The result is NaN for a
    token whose log-probability is NaN.
    """
    a, b = advantages.astype(np.float64), logprobs.astype(np.float64)
    known = ~np.isnan(b)
    return (a - a.mean()) * (b - b[known].mean()) if known.any() else np.full(len(a), np.nan)


def _indicator(size: int, selected: np.ndarray) -> Column:
    """Return a column [size] with 1 at the indices `selected`, and 0 elsewhere."""
    column = np.zeros(size, np.float32)
    column[selected] = 1.0
    return column


@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """Loss -r A, and 0 for randomly selected tokens with a covariance in (low, high) (Cui et al. 2025, eq. 11).

    The number of selected tokens is `fraction` times the number of all tokens, or smaller if fewer tokens have such a covariance.

    The authors' code also clips r as PPO does, with 1 for both bounds. Here `clip_low` and `clip_high` are these bounds. By
    default, r is not clipped.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    fraction: float = 2e-4  # fraction of all tokens
    low: float = 1.0  # every selected token has a covariance in (low, high)
    high: float = 5.0
    clip_low: float = float("inf")
    clip_high: float = float("inf")

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the column `clip_cov`: 1 for the selected tokens, 0 for others.

        At least one token is selected if there is a covariance in (low, high).
        """
        cov = covariances(advantages, batch.columns["old_logprobs"])
        candidates = np.flatnonzero((cov > self.low) & (cov < self.high))
        count = min(max(int(self.fraction * len(cov)), 1), len(candidates))
        return {"clip_cov": _indicator(len(cov), rng.choice(candidates, count, replace=False))}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_exp(inputs.logprobs - inputs.old_logprobs)
        loss, metrics = clipped_loss(ratio, inputs.advantages, self.clip_low, self.clip_high)
        selected = inputs.columns["clip_cov"] > 0
        return loss.masked_fill(selected, 0.0), metrics | {"loss/selected_fraction": selected.float()}


KL_COV_ESTIMATES = ("k3", "abs")


@dataclass(frozen=True)
class KLCov(PolicyLoss):
    """Loss -r A, plus coef KL(old || pi) for the tokens with the largest covariance (Cui et al. 2025, eq. 12-13).

    The number of these tokens is `fraction` times the number of all tokens. Some of these tokens may have
    advantage 0, so training does not skip responses with advantage 0.

    `kl` selects the estimate of the KL. "k3" is r - 1 - log r. Its value and its gradient are unbiased. "abs" is |log r|,
    as in the authors' code, which uses the coefficient 1. Raises ValueError for any other `kl`.
    """

    zero_at_zero_advantage: ClassVar[bool] = False
    required_inputs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    fraction: float = 2e-4
    coef: float = 1.0
    kl: str = "k3"  # estimate of KL(old || pi): "k3" or "abs"

    def __post_init__(self) -> None:
        if self.kl not in KL_COV_ESTIMATES:
            raise ValueError(f"kl={self.kl!r}: expected {' or '.join(KL_COV_ESTIMATES)}.")

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the column `kl_cov`: 1 for the selected tokens, 0 for others.

        At least one token is selected. Among equal covariances, the first tokens are selected.
        """
        cov = covariances(advantages, batch.columns["old_logprobs"])
        count = min(max(int(self.fraction * len(cov)), 1), len(cov))
        return {"kl_cov": _indicator(len(cov), np.argsort(-cov, kind="stable")[:count])}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = inputs.logprobs - inputs.old_logprobs
        ratio, selected = bounded_exp(log_ratio), inputs.columns["kl_cov"]
        kl = log_ratio.abs() if self.kl == "abs" else ratio - 1 - log_ratio
        loss = -ratio * inputs.advantages + self.coef * selected * kl
        return loss, {"loss/selected_fraction": selected}


class ValueLossFunction(Protocol):
    """Interface of a value loss. `critic.loss._target_` may name any callable of this form."""

    def __call__(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Return the loss [R]. All arguments have the shape [R].

        Args:
            values: predictions of the critic; differentiable.
            returns: the targets, from the advantage estimator.
            old_values: predictions before the first optimizer step on the responses.
        """
        ...


@dataclass(frozen=True)
class TopEntropy:
    """Applies another policy loss only to the tokens with the largest entropy (Wang et al. 2025, arXiv 2506.01939).

    All other tokens have the loss 0. A token is selected if its entropy is at least the (1 - fraction) quantile of the entropies
    of all tokens in the loss of the step. The entropies are computed before the first optimizer step, so the selection depends
    neither on micro-batches nor on the parallel layout. The quantile is interpolated linearly between two entropies, as in trl.

    Tokens that are not selected still count in the denominators of the loss, as in the paper. KL penalties and the entropy bonus
    apply to all tokens. Raises ValueError for a `fraction` outside [0, 1].
    """

    loss: Loss  # the loss of the selected tokens
    fraction: float = 0.2  # fraction of the tokens that are selected

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: expected a number from 0 to 1.")

    @property
    def zero_at_zero_advantage(self) -> bool:
        return getattr(self.loss, "zero_at_zero_advantage", False)

    @property
    def uses_entropy(self) -> bool:
        return getattr(self.loss, "uses_entropy", False)

    @property
    def required_inputs(self) -> frozenset[str]:
        return required_inputs_of(self.loss) | {"entropies"}

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the columns of the other loss, and the column `top_entropy`: 1 for the selected tokens, 0 for others."""
        entropies = batch.columns["entropies"]
        threshold = np.quantile(entropies, 1 - self.fraction) if len(entropies) else 0.0
        columns = join_precomputed_columns([self.loss], batch, advantages, rng)
        return columns | {"top_entropy": (entropies >= threshold).astype(np.float32)}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.loss(inputs)
        return loss.masked_fill(inputs.columns["top_entropy"] == 0, 0.0), metrics


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared error of a value V, (V - return)^2 / 2 (PPO, Schulman et al. 2017, half of L^VF in eq. 9).

    With `clip` > 0, the loss is max((V - return)^2, (V_clipped - return)^2) / 2, as in the authors' code (openai/baselines,
    ppo2). V_clipped is V clipped to [V_old - clip, V_old + clip], where V_old is the value before the first optimizer step
    on the responses. With `clip` = 0, V is not clipped. Raises ValueError for a negative `clip`.
    """

    clip: float = 0.2

    def __post_init__(self) -> None:
        if self.clip < 0:
            raise ValueError(f"clip={self.clip}: must be 0 or more (0: values are not clipped).")

    def __call__(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        """Return the loss [R]. All arguments have the shape [R]."""
        loss = (values - returns) ** 2
        if self.clip:
            clipped = old_values + (values - old_values).clamp(-self.clip, self.clip)
            loss = loss.maximum((clipped - returns) ** 2)
        return 0.5 * loss
