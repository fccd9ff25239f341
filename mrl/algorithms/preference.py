"""Losses over preferences: the policy or a reward model learns which responses are better.

A loss over pairs trains on rows with a chosen and a rejected response to one prompt. Both responses of a pair are always in one
micro-batch (TrainBatch.whole_groups), in which the responses have the order chosen, rejected, chosen, rejected, and so on.
Every token of both responses has the loss of the pair. With the aggregation sequence_mean, which supervised training uses for
pairs, the loss of a mini-batch is therefore the mean loss of its pairs. docs/concepts/algorithms.md lists the papers.

Symbols in the formulas:

    y_w, y_l   the chosen and the rejected response
    |y|        number of tokens of y
    pi(y)      probability of y under the current weights
    pi_ref(y)  probability of y under the initial weights
    h(y)       log(pi(y) / pi_ref(y))
    sigma      the logistic function
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from mrl.algorithms.inputs import LossInputs, Responses
from mrl.algorithms.losses import PolicyLoss

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor

PAIRS, LABELS = "pairs", "labels"
"""Forms of rows. A row of PAIRS has a prompt, a chosen and a rejected response. A row of LABELS has a prompt, one response and
a label (good or bad)."""
LARGEST_MEAN_LOGPROB = -1e-6  # upper bound of the mean log-probability in ORPO, because the odds are infinite at 0


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) = -log sigma(-x). It neither overflows nor loses its gradient for large |x|."""
    return x.new_zeros(()).logaddexp(x)


def chosen_and_rejected(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split the values [n] of the responses of a micro-batch into two tensors [pairs]: chosen and rejected responses.

    An empty micro-batch has one response without tokens, which is in no pair.
    """
    paired = values[: len(values) // 2 * 2]
    return paired[0::2], paired[1::2]


def pairs_to_tokens(values: Tensor, responses: Responses) -> Tensor:
    """Return, for each token, the value of its pair: [pairs] -> [tokens on this rank].

    If only one response of a pair has tokens, its tokens count twice, so that every pair has the same weight.
    """
    chosen, rejected = chosen_and_rejected((responses.lengths > 0).to(values.dtype))
    return responses.to_tokens((values * 2 / (chosen + rejected).clamp(min=1)).repeat_interleave(2))


def pair_metrics(chosen: Tensor, rejected: Tensor, responses: Responses) -> dict[str, Tensor]:
    """Return the metrics of pairs: name -> values [tokens on this rank]. `chosen`, `rejected`: rewards [pairs]."""
    metrics = {
        "preference/accuracy": (chosen > rejected).to(chosen.dtype),
        "preference/margin": chosen - rejected,
        "preference/chosen_reward": chosen,
        "preference/rejected_reward": rejected,
    }
    return {name: pairs_to_tokens(values.detach(), responses) for name, values in metrics.items()}


class PairLoss(PolicyLoss):
    """Base class of losses over pairs. A subclass defines the reward of each response, and the loss of each pair."""

    zero_at_zero_advantage: ClassVar[bool] = False
    rows: ClassVar[str] = PAIRS

    def rewards(self, inputs: LossInputs) -> Tensor:
        """Return the reward [n] that the policy implies for each response. The metrics compare these rewards."""
        raise NotImplementedError

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair from the rewards of its two responses: [pairs]."""
        raise NotImplementedError

    def chosen_loss(self, inputs: LossInputs) -> Tensor | None:
        """Return a further loss [n] for each response, or None. Only the chosen response's loss is added to the pair's loss."""
        return None

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        responses = inputs.responses
        chosen, rejected = chosen_and_rejected(self.rewards(inputs))
        loss = self.pair_loss(chosen, rejected)
        further = self.chosen_loss(inputs)
        if further is not None:
            loss = loss + chosen_and_rejected(further)[0]
        metrics = pair_metrics(chosen, rejected, responses)
        logprobs = chosen_and_rejected(responses.sum(inputs.logprobs.detach()))
        for name, values in zip(("chosen", "rejected"), logprobs, strict=True):
            metrics[f"preference/{name}_logprob"] = pairs_to_tokens(values, responses)
        return pairs_to_tokens(loss, responses), metrics


def log_ratios(inputs: LossInputs) -> Tensor:
    """Return h(y) of each response: [n]."""
    return inputs.responses.sum(inputs.logprobs - inputs.columns["ref_logprobs"])


@dataclass(frozen=True)
class DPO(PairLoss):
    """Direct preference optimization: -log sigma(beta (h(y_w) - h(y_l))) (Rafailov et al. 2023, eq. 7).

    `label_smoothing` is the expected fraction of pairs whose order is wrong. With it, the loss of a pair is
    -(1 - label_smoothing) log sigma(m) - label_smoothing log sigma(-m) with m = beta (h(y_w) - h(y_l)) (conservative DPO,
    Mitchell 2023). The loss also contains `nll_coef` times the negative log-likelihood of y_w per token (as in Pang et al. 2024).
    Raises ValueError for a `beta` of 0 or less, or a `label_smoothing` outside [0, 0.5).
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    beta: float = 0.1  # a larger beta keeps the policy closer to the reference
    label_smoothing: float = 0.0
    nll_coef: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected a fraction of pairs in [0, 0.5).")

    def rewards(self, inputs: LossInputs) -> Tensor:
        return self.beta * log_ratios(inputs)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = chosen - rejected
        return (1 - self.label_smoothing) * softplus(-margin) + self.label_smoothing * softplus(margin)

    def chosen_loss(self, inputs: LossInputs) -> Tensor | None:
        return -self.nll_coef * inputs.responses.mean(inputs.logprobs) if self.nll_coef else None


@dataclass(frozen=True)
class IPO(PairLoss):
    """Identity preference optimization: (h(y_w) - h(y_l) - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17; beta is their tau).

    With `per_token`, h(y) is divided by |y|, as in trl. The authors of trl took this form from the authors of the paper. Raises
    ValueError for a `beta` of 0 or less.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    beta: float = 0.1  # a larger beta keeps the policy closer to the reference
    per_token: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def rewards(self, inputs: LossInputs) -> Tensor:
        ratios = log_ratios(inputs)
        return self.beta * (ratios / inputs.responses.lengths.clamp(min=1) if self.per_token else ratios)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return ((chosen - rejected) / self.beta - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class Hinge(PairLoss):
    """Hinge loss max(0, 1 - beta (h(y_w) - h(y_l))) (Liu et al. 2024, RSO, after SLiC of Zhao et al. 2023).

    Raises ValueError for a `beta` of 0 or less.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    beta: float = 0.1  # a pair has no loss if h(y_w) - h(y_l) is at least 1 / beta

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def rewards(self, inputs: LossInputs) -> Tensor:
        return self.beta * log_ratios(inputs)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - (chosen - rejected)).clamp(min=0)


@dataclass(frozen=True)
class SimPO(PairLoss):
    """Simple preference optimization, without a reference (Meng et al. 2024, eq. 6).

    The loss of a pair is -log sigma(beta log pi(y_w) / |y_w| - beta log pi(y_l) / |y_l| - gamma).

    Raises ValueError for a `beta` of 0 or less.
    """

    beta: float = 2.0
    gamma: float = 1.0  # margin by which the reward of y_w should be larger

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def rewards(self, inputs: LossInputs) -> Tensor:
        return self.beta * inputs.responses.mean(inputs.logprobs)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return softplus(self.gamma - (chosen - rejected))


@dataclass(frozen=True)
class ORPO(PairLoss):
    """Odds ratio preference optimization, without a reference (Hong et al. 2024, eq. 3-7).

    The loss of a pair is -log p(y_w) - beta log sigma(log(odds(y_w) / odds(y_l))), where log p(y) = log pi(y) / |y| and
    odds(y) = p(y) / (1 - p(y)). The name of beta in the paper is lambda. The first term averages over the tokens of each y_w. The
    code of the authors computes one average over all tokens of a batch: the tokens of all y_w, and the tokens of their prompts.

    Raises ValueError for a `beta` of 0 or less.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def rewards(self, inputs: LossInputs) -> Tensor:
        return self.beta * inputs.responses.mean(inputs.logprobs)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return self.beta * softplus(log_odds(rejected / self.beta) - log_odds(chosen / self.beta))

    def chosen_loss(self, inputs: LossInputs) -> Tensor | None:
        return -inputs.responses.mean(inputs.logprobs)


def log_odds(logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)), computed from log p. Values of log p above LARGEST_MEAN_LOGPROB are clamped."""
    bounded = logprobs.clamp(max=LARGEST_MEAN_LOGPROB)
    return bounded - (-bounded.expm1()).log()


@dataclass(frozen=True)
class KTO(PolicyLoss):
    """Kahneman-Tversky optimization of single responses with a label, good or bad (Ethayarajh et al. 2024, eq. 7).

    The loss of a response is desirable_weight (1 - sigma(beta (h(y) - z))) if it is good, and
    undesirable_weight (1 - sigma(beta (z - h(y)))) if it is bad. z is an estimate of KL(pi || pi_ref) without gradient: each
    prompt of the mini-batch is paired with the response to another prompt, and z is the mean of h over these pairs, or 0 if the
    mean is negative. Raises ValueError for a `beta` of 0 or less.
    """

    zero_at_zero_advantage: ClassVar[bool] = False
    rows: ClassVar[str] = LABELS
    required_inputs: ClassVar[frozenset[str]] = frozenset({"ref_logprobs"})
    beta: float = 0.1  # a larger beta keeps the policy closer to the reference
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_point: float = 0.0  # z in nats; supervised training sets it for every mini-batch

    def __post_init__(self) -> None:
        check_positive(self, "beta")

    def with_reference_point(self, mean_log_ratio: float) -> KTO:
        """Return this loss with z = max(0, `mean_log_ratio`).

        `mean_log_ratio`: mean of h if each prompt of the mini-batch is paired with the response to another prompt.
        """
        return replace(self, reference_point=max(0.0, mean_log_ratio))

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        good = inputs.columns["labels"] > 0
        margin = self.beta * (inputs.responses.to_tokens(log_ratios(inputs)) - self.reference_point)
        signed = margin.where(good, -margin)  # positive if the policy agrees with the label
        weight = signed.new_full((), self.desirable_weight).where(good, signed.new_full((), self.undesirable_weight))
        detached = signed.detach()
        metrics = {"preference/accuracy": (detached > 0).to(signed.dtype), "preference/margin": detached}
        return weight * (-signed).sigmoid(), metrics


class ScoreLoss:
    """Base class of losses of a reward model. Such a loss reads the score of each response instead of log-probabilities."""

    # Output head of the trained model; for losses without this attribute, it is "vocabulary"
    head: ClassVar[str] = "score"
    required_inputs: ClassVar[frozenset[str]] = frozenset()
    rows: ClassVar[str] = PAIRS  # rows that supervised training needs: PAIRS or LABELS

    def __call__(
        self, scores: Tensor, responses: Responses, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of each token: [tokens on this rank].

        Each response has one token in the loss, and `scores` [tokens on this rank] has the score of the response at this token.
        `columns` has the column `margins` if rows are pairs, and the column `labels` if rows have a label.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class BradleyTerry(ScoreLoss):
    """Loss of a reward model with scores s: -log sigma(s(y_w) - s(y_l) - margin) (Ouyang et al. 2022, eq. 1).

    The margin of a pair is the column `margin` of its row, and 0 without this column (Touvron et al. 2023, Llama 2, eq. 2).
    The term center_coef (s(y_w) + s(y_l))^2 is added, so that scores stay near 0 (Eisenstein et al. 2023).
    """

    center_coef: float = 0.0

    def __call__(
        self, scores: Tensor, responses: Responses, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = chosen_and_rejected(responses.sum(scores))
        margin = chosen_and_rejected(responses.sum(columns["margins"]))[0]
        loss = softplus(margin - (chosen - rejected)) + self.center_coef * (chosen + rejected) ** 2
        return pairs_to_tokens(loss, responses), pair_metrics(chosen, rejected, responses)


@dataclass(frozen=True)
class OutcomeLabels(ScoreLoss):
    """Cross-entropy of labels: -log sigma(s(y)) for a good response, and -log sigma(-s(y)) for a bad response.

    The score is the output at the last token, as for the solution-level verifiers of Cobbe et al. (2021).
    """

    rows: ClassVar[str] = LABELS

    def __call__(
        self, scores: Tensor, responses: Responses, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        signed = scores.where(columns["labels"] > 0, -scores)
        detached = signed.detach()
        metrics = {"preference/accuracy": (detached > 0).to(signed.dtype), "preference/margin": detached}
        return softplus(-signed), metrics


def check_positive(loss: object, name: str) -> None:
    """Raise ValueError if the argument `name` of a loss is not above 0."""
    value = vars(loss)[name]
    if not value > 0:
        raise ValueError(f"{name}={value}: must be greater than 0.")
