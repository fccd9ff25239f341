"""Distillation: the divergence between a teacher and the policy at each sampled token, as a policy loss.

The responses are samples of the policy, so the policy learns from the teacher in the states that the policy itself visits
(on-policy distillation: GKD, Agarwal et al. 2024, arXiv 2306.13649; MiniLLM, Gu et al. 2024, arXiv 2306.08543). The trainer ranks
compute the divergence (parallel.distillation). R is the number of sampled tokens: in LossInputs, the tokens of a micro-batch on
one rank, and in `precomputed_columns`, the tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from mrl.algorithms.advantages import NoAdvantage, OnPolicyDistillation
from mrl.algorithms.inputs import AdvantageInputs, LossInputs, required_inputs_of
from mrl.algorithms.losses import Loss, PolicyLoss
from mrl.core.types import Column
from parallel.trainer_config import Divergence, DivergenceKind

if TYPE_CHECKING:  # the driver builds and checks losses without torch
    from torch import Tensor

TEACHER_HIDDEN, TEACHER_TOP_K = "teacher_hidden", "teacher_top_k"
TEACHER_OUTPUTS = frozenset({TEACHER_HIDDEN, TEACHER_TOP_K})
"""Outputs of teachers. A loss may name them in `required_inputs`. Each teacher computes them for the prompts assigned to it.

    teacher_hidden  final hidden states, from which the trainer ranks compute the distribution over the whole vocabulary
    teacher_top_k   ids and log-probabilities of the k most probable tokens, and the log-probability of all other tokens together
"""


DIVERGENCE_OUTPUTS = ("divergence", "teacher_mass", "policy_mass")
"""Columns [R] that the output head of the policy computes from a teacher's outputs. The loss reads them in `LossInputs.columns`.

    divergence    divergence between teacher and policy in nats, with a gradient
    teacher_mass  probability that the teacher gives to its top_k most probable tokens; only with top_k
    policy_mass   probability that the policy gives to these tokens; only with top_k
"""


def reads_rewards(advantage: object, required_inputs: frozenset[str]) -> bool:
    """Return whether the algorithm learns from rewards. Distillation alone does not.

    `advantage`: the advantage estimator of the algorithm. `required_inputs`: what the parts of the algorithm read.
    """
    if not required_inputs & (TEACHER_OUTPUTS | {"teacher_logprobs"}):
        return True
    estimator = advantage.reward if isinstance(advantage, OnPolicyDistillation) else advantage
    return estimator is not None and not isinstance(estimator, NoAdvantage)


@dataclass(frozen=True)
class Distillation(PolicyLoss):
    """Distillation loss: coef * D(teacher, policy) at each sampled token.

    `reward_loss` is a second loss, which learns from rewards. If it is given, it is added to the distillation loss.

    D is the divergence, in nats, between the distributions of teacher and policy that predict the token: KL(teacher || policy),
    KL(policy || teacher), or the generalized Jensen-Shannon divergence (parallel.trainer_config.Divergence has the formulas).
    The gradient flows through the distribution of the policy, not through the choice of the sampled tokens, as in GKD. An
    off-policy correction multiplies the whole loss, D included.

    With `top_k`, D compares k + 1 probabilities: those of the teacher's k most probable tokens, and the probability of all other
    tokens together. This D is at most the D over the whole vocabulary. Without the probability of all other tokens, D could be
    negative, and the policy would not learn how much probability the teacher gives to the k tokens.

    Raises ValueError for an unknown divergence, for js with a beta outside (0, 1), and for a `top_k`, `temperature` or `coef`
    that is not positive.
    """

    # A response with advantage 0 has a gradient, so training must not skip it.
    zero_at_zero_advantage: ClassVar[bool] = False

    divergence: str = "reverse_kl"  # forward_kl, reverse_kl or js
    beta: float = 0.5  # weight of the teacher in the mixture of js
    top_k: int | None = None  # number of the teacher's most probable tokens; None: the whole vocabulary
    temperature: float | None = None  # temperature of both distributions; None: rollout.temperature
    coef: float = 1.0
    reward_loss: Loss | None = None  # a loss that learns from rewards; None: rewards have no effect

    def __post_init__(self) -> None:
        self.divergence_settings()
        for name in ("top_k", "temperature", "coef"):
            value = vars(self)[name]
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value}: must be greater than 0.")

    def divergence_settings(self) -> Divergence:
        """Return the kind of the divergence, with its beta."""
        if self.divergence not in list(DivergenceKind):
            raise ValueError(f"divergence={self.divergence!r}: expected {', '.join(DivergenceKind)}.")
        return Divergence(DivergenceKind(self.divergence), self.beta)

    @property
    def distillation(self) -> Distillation:
        """This loss itself. Objective.distillation reads this attribute to find out whether a policy loss is a Distillation.

        Through this attribute, the output head of the actor finds the Distillation. The head then computes what this loss needs,
        in addition to log-probabilities.
        """
        return self

    @property
    def uses_entropy(self) -> bool:  # type: ignore[bad-override]  # depends on reward_loss
        return self.reward_loss is not None and getattr(self.reward_loss, "uses_entropy", False)

    @property
    def uses_logprobs(self) -> bool:
        """Whether the gradient flows through the log-probabilities of the sampled tokens."""
        return self.reward_loss is not None

    @property
    def required_inputs(self) -> frozenset[str]:  # type: ignore[bad-override]  # depends on top_k
        """The output of the teacher that this loss reads, and the columns that `reward_loss` needs."""
        return required_inputs_of(self.reward_loss) | {TEACHER_TOP_K if self.top_k else TEACHER_HIDDEN}

    def precomputed_columns(
        self, batch: AdvantageInputs, advantages: Column, rng: np.random.Generator
    ) -> dict[str, Column]:
        """Return the precomputed columns of `reward_loss`."""
        compute = getattr(self.reward_loss, "precomputed_columns", None)
        return compute(batch, advantages, rng) if compute else {}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [R], and metrics [R]. The column `divergence` comes from the output head, with a gradient."""
        divergence = inputs.columns["divergence"]
        metrics = {"distill/divergence": divergence.detach()}
        if self.top_k:
            metrics |= {f"distill/{name}": inputs.columns[name] for name in DIVERGENCE_OUTPUTS[1:]}
        loss = self.coef * divergence
        if self.reward_loss is None:
            return loss, metrics
        reward_loss, reward_metrics = self.reward_loss(inputs)
        return loss + reward_loss, metrics | reward_metrics
