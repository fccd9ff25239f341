"""Advantage estimators that give each sampled token a number of its own."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.inputs import AdvantageInputs, Advantages, per_token
from mrl.algorithms.returns import discounted, following


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation with a critic: sum of (gamma lam)^l delta[t + l] (Schulman et al. 2015, eq. 16).

    delta[t] = r[t] + gamma V[t + 1] - V[t], V = 0 behind the last token. Sampled tokens follow each other directly:
    of several turns, the last token of one is followed by the first of the next. The critic learns advantage + value
    (the TD(lambda) return), before any whitening.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    gamma: float = 1.0
    lam: float = 0.95

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Advantages [R] and returns [R]."""
        values = inputs.columns["values"].astype(np.float64)
        deltas = inputs.token_rewards + self.gamma * following(values, inputs.lengths) - values
        advantages = discounted(deltas, inputs.lengths, self.gamma * self.lam)
        return Advantages(advantages, advantages + values)


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Each token's discounted rewards from it on, KL penalties included, to be whitened over the batch (Hu et al. 2025).

    The whitening is `algorithm.whiten=true`; conf/algorithm/reinforce_pp.yaml sets it.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    gamma: float = 1.0

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.float64]:
        """Advantages [R], before they are whitened."""
        return discounted(inputs.token_rewards, inputs.lengths, self.gamma)


@dataclass(frozen=True)
class OnPolicyDistillation:
    """Per-token reverse KL to a teacher as the advantage, log p_teacher - log p_old (Lu and Thinking Machines 2025).

    `gamma` 0, theirs, counts each token's own divergence; 1 adds those that follow (the R_t of MiniLLM, Gu et al. 2024,
    2.2). `reward`: another estimator, `reward_coef` times whose advantages are added.
    """

    coef: float = 1.0
    gamma: float = 0.0
    reward: Advantage | None = None
    reward_coef: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Both log-probabilities, and what the other estimator needs."""
        return frozenset({"teacher_logprobs", "old_logprobs"}) | getattr(self.reward, "needs", frozenset())

    @property
    def heeds_kl(self) -> bool:
        """Only the other estimator looks at rewards."""
        return self.reward is not None and getattr(self.reward, "heeds_kl", True)

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Advantages [R]; returns are those of the other estimator, if it has any."""
        old, teacher = (inputs.columns[name].astype(np.float64) for name in ("old_logprobs", "teacher_logprobs"))
        advantages = self.coef * discounted(teacher - old, inputs.lengths, self.gamma)
        if self.reward is None:
            return Advantages(advantages)
        found = self.reward(inputs)
        other = found if isinstance(found, Advantages) else Advantages(found)
        return Advantages(advantages + self.reward_coef * per_token(other.advantages, inputs), other.returns)
