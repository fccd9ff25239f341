"""Advantage estimators: compute one advantage per response [B] or per sampled token [R] from the rewards of a batch.

Group-relative estimators compare the reward of a response with the rewards of its group, the responses to the same
prompt. Groups may differ in size, and the rows of a group may be anywhere in the batch. The advantage of a response is
0 if its group has one response, or if all rewards of the group are equal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import AdvantageInputs, Advantages, broadcast_to_tokens

Floats = NDArray[np.float64]


class Advantage(Protocol):
    """Interface of an advantage estimator. `algorithm.advantage._target_` may name any callable of this form.

    A class may declare two attributes:

    - `needs` (default: nothing): the inputs that the estimator reads, out of values, old_logprobs, ref_logprobs,
      teacher_logprobs (columns) and greedy_rewards.
    - `uses_token_rewards` (default: true): the estimator reads `token_rewards`, which contain the KL penalty of
      algorithm.kl_in_reward.
    """

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.floating] | Advantages: ...


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics per group. Every method returns one value per row [B]."""

    groups: NDArray[np.int64]  # [B] group id of each row

    @cached_property
    def _unique(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        return np.unique(self.groups, return_index=True, return_inverse=True, return_counts=True)

    @property
    def index(self) -> NDArray[np.int64]:
        """[B] position of each row's group among the sorted group ids, from 0."""
        return self._unique[2]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[B] number of rows in each row's group."""
        return self._unique[3][self.index]

    def sum(self, values: Floats) -> Floats:
        """Return the group sum of `values` [B] for each row [B]."""
        return np.bincount(self.index, values, minlength=len(self._unique[0])).astype(np.float64)[self.index]

    def mean(self, values: Floats) -> Floats:
        """Return the group mean of `values` [B] for each row [B]."""
        return self.sum(values) / self.sizes

    def subtract_first(self, values: Floats) -> Floats:
        """Return `values` [B] minus the value of the group's first row. Groups of equal values give exactly 0."""
        return values - values[self._unique[1]][self.index]

    def subtract_mean(self, values: Floats) -> Floats:
        """Return `values` [B] minus their group mean. Groups of equal values give exactly 0."""
        shifted = self.subtract_first(values)
        return shifted - self.mean(shifted)

    def std(self, values: Floats, ddof: int = 1) -> Floats:
        """Return the standard deviation of each row's group [B]. The denominator is max(n - ddof, 1)."""
        return np.sqrt(self.sum(self.subtract_mean(values) ** 2) / np.maximum(self.sizes - ddof, 1))


@dataclass(frozen=True)
class GRPO:
    """Group-relative advantage (r - mean) / (std + eps) over the responses to one prompt (DeepSeekMath 2024, 4.1.2).

    The paper does not say which standard deviation it uses. The default is the unbiased one (ddof 1), as in the common
    implementations. `normalize_std=False` omits the division, as Dr.GRPO does (Liu et al. 2025, 3.2).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    eps: float = 1e-4
    normalize_std: bool = True
    ddof: int = 1

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups = GroupStatistics(inputs.groups)
        centred = groups.subtract_mean(inputs.rewards)
        return centred / (groups.std(inputs.rewards, self.ddof) + self.eps) if self.normalize_std else centred


@dataclass(frozen=True)
class RLOO:
    """Reward minus the mean reward of the other responses to the prompt (Ahmadian et al. 2024, 2.2).

    In a group of one response the advantage is 0; in verl it is the reward.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]: r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)."""
        groups = GroupStatistics(inputs.groups)
        return groups.subtract_mean(inputs.rewards) * groups.sizes / np.maximum(groups.sizes - 1, 1)


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline:
    """Reward minus the group mean (Hu et al. 2025, REINFORCE++-baseline).

    The method also whitens the advantages over the batch. That step is `algorithm.whiten=true`, which
    conf/algorithm/reinforce_pp_baseline.yaml sets.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B] before whitening."""
        return GroupStatistics(inputs.groups).subtract_mean(inputs.rewards)


@dataclass(frozen=True)
class ReMax:
    """Reward minus the reward of the greedy response to the same prompt (Li et al. 2023, algorithm 1).

    With `to_go`, the advantage of a token is the sum of the rewards from that token on, minus the baseline, as in
    verl. This differs only if a response has rewards at several tokens: a KL penalty in the reward, or one reward per
    turn.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"greedy_rewards"})
    to_go: bool = False

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B], or [R] with `to_go`."""
        assert inputs.greedy_rewards is not None, "ReMax needs greedy_rewards"
        if not self.to_go:
            return inputs.rewards - inputs.greedy_rewards
        return discounted_sums(inputs.token_rewards, inputs.lengths, 1.0) - inputs.greedy_rewards[inputs.rows]


@dataclass(frozen=True)
class OPO:
    """Reward minus the minimum-variance baseline, the group's length-weighted mean reward (Hao et al. 2025, sec. 3)."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups, lengths = GroupStatistics(inputs.groups), inputs.lengths.astype(np.float64)
        shifted = groups.subtract_first(inputs.rewards)
        return shifted - groups.sum(lengths * shifted) / np.maximum(groups.sum(lengths), 1)


@dataclass(frozen=True)
class GPG:
    """Reward minus the group mean, times B / (B - M) (Chu et al. 2025, AGE).

    M is the number of responses whose group has equal rewards. The factor keeps the size of the gradient when many
    groups give no signal. In verl, M is the number of responses with reward 0. `normalize_std` also divides by the
    group's standard deviation; by default, the paper's F_norm is 1.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    normalize_std: bool = False
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups = GroupStatistics(inputs.groups)
        centred, std = groups.subtract_mean(inputs.rewards), groups.std(inputs.rewards)
        informative = np.count_nonzero(std)  # B - M
        if not informative:
            return centred
        scale = len(std) / informative
        return scale * (centred / (std + self.eps) if self.normalize_std else centred)


@dataclass(frozen=True)
class PassAtK:
    """Marginal gain of the best response of a group; 0 for all others (Tang et al. 2025, leave-one-out baseline).

    The objective is the best reward among all responses to a prompt. The gain is the best reward minus the second
    best, so the gain is 0 if two responses have the best reward.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        index = GroupStatistics(inputs.groups).index
        order = np.lexsort((inputs.rewards, index))  # sorted by group, then by reward: the best of a group is its last
        is_best = np.diff(index[order], append=-1) != 0
        has_second = np.diff(index[order], prepend=-1) == 0  # the row before it belongs to the same group
        rewards = inputs.rewards[order]
        gap = np.diff(rewards, prepend=rewards[:1])
        advantages = np.zeros(len(order))
        advantages[order] = np.where(is_best & has_second, gap, 0.0)
        return advantages


@dataclass(frozen=True)
class LogMeanExp:
    """Reward minus tau log(mean exp(r / tau)) over the group: the baseline tau log Z of OPMD (Kimi k1.5 2025, 2.3.2).

    As tau grows, the baseline tends to the group mean. In practice the paper uses the mean, which is GRPO with
    normalize_std=False.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    tau: float = 1.0

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups = GroupStatistics(inputs.groups)
        best = np.full(groups.index.max(initial=-1) + 1, -np.inf)
        np.maximum.at(best, groups.index, inputs.rewards)
        below_best = inputs.rewards - best[groups.index]  # <= 0, so exp cannot overflow
        return below_best - self.tau * np.log(groups.mean(np.exp(below_best / self.tau)))


@dataclass(frozen=True)
class GDPO:
    """Sum of the reward's parts, each normalised in its group; the sum is normalised over the batch (Liu et al. 2026, sec. 3).

    `weights` maps the name of a part to its weight; other parts have weight 1. The parts do not contain the penalty of
    algorithm.kl_in_reward, so use algorithm.kl_in_loss. `normalize_batch=False` omits the last step; `algorithm.whiten`
    then normalises over tokens, as verl does. A reward without parts counts as one part, named `reward`.

    Raises ValueError if `weights` names a part that the reward does not have.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    uses_token_rewards: ClassVar[bool] = False
    weights: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-4
    normalize_batch: bool = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        parts = inputs.parts or {"reward": inputs.rewards}
        if set(self.weights) - set(parts):
            raise ValueError(
                f"algorithm.advantage.weights={dict(self.weights)}: the reward has the parts {', '.join(sorted(parts))}."
            )
        groups, total = GroupStatistics(inputs.groups), np.zeros(len(inputs.groups))
        for name, rewards in parts.items():
            normalised = groups.subtract_mean(rewards) / (groups.std(rewards) + self.eps)
            total += self.weights.get(name, 1.0) * normalised
        # The batch mean is 0 because each group's mean is 0. Subtracting it would only add round-off to advantages of 0.
        return total / (total.std() + self.eps) if self.normalize_batch else total


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation with a critic: sum over l of (gamma lam)^l delta[t + l] (Schulman et al. 2015, eq. 16).

    delta[t] = r[t] + gamma V[t + 1] - V[t], with V = 0 after the last token. t counts sampled tokens only: in a
    multi-turn response the first token of a turn follows the last token of the turn before it. The critic learns
    advantage + value, the TD(lambda) return, computed before any whitening.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    gamma: float = 1.0
    lam: float = 0.95

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages [R] and returns [R]."""
        values = inputs.columns["values"].astype(np.float64)
        deltas = inputs.token_rewards + self.gamma * next_token_values(values, inputs.lengths) - values
        advantages = discounted_sums(deltas, inputs.lengths, self.gamma * self.lam)
        return Advantages(advantages, advantages + values)


@dataclass(frozen=True)
class ReinforcePlusPlus:
    """Discounted sum of the rewards from each token on, KL penalties included (Hu et al. 2025).

    The method also whitens the advantages over the batch. That step is `algorithm.whiten=true`, which
    conf/algorithm/reinforce_pp.yaml sets.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    gamma: float = 1.0

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [R] before whitening."""
        return discounted_sums(inputs.token_rewards, inputs.lengths, self.gamma)


@dataclass(frozen=True)
class OnPolicyDistillation:
    """Advantage log p_teacher - log p_old per token: minus the reverse KL to a teacher (Lu and Thinking Machines 2025).

    gamma   0, as in the source: the advantage of a token is its own term. 1: the advantage also includes the terms of
            all later tokens (R_t of MiniLLM, Gu et al. 2024, 2.2)
    reward  another estimator, whose advantages are added with the factor `reward_coef`. None: distillation only
    """

    coef: float = 1.0
    gamma: float = 0.0
    reward: Advantage | None = None
    reward_coef: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Both log-probabilities, and the needs of `reward`."""
        return frozenset({"teacher_logprobs", "old_logprobs"}) | getattr(self.reward, "needs", frozenset())

    @property
    def uses_token_rewards(self) -> bool:
        """True if `reward` reads token rewards; the distillation term reads none."""
        return self.reward is not None and getattr(self.reward, "uses_token_rewards", True)

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages [R], and the returns [R] of `reward` if it has any."""
        old, teacher = (inputs.columns[name].astype(np.float64) for name in ("old_logprobs", "teacher_logprobs"))
        advantages = self.coef * discounted_sums(teacher - old, inputs.lengths, self.gamma)
        if self.reward is None:
            return Advantages(advantages)
        result = self.reward(inputs)
        other = result if isinstance(result, Advantages) else Advantages(result)
        return Advantages(advantages + self.reward_coef * broadcast_to_tokens(other.advantages, inputs), other.returns)


def discounted_sums(values: Floats, lengths: NDArray[np.int64], factor: float) -> Floats:
    """Return x [R] with x[t] = values[t] + factor * x[t + 1] within each response and x = 0 after its last token.

    `values` [R] belong to responses with `lengths` [B].
    """
    sums, ends = values.astype(np.float64), np.cumsum(lengths)
    for back in range(1, lengths.max(initial=0)):  # backwards from the second-last token, all responses together
        here = ends[lengths > back] - 1 - back
        sums[here] += factor * sums[here + 1]
    return sums


def next_token_values(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return the value [R] of the next token in the same response, 0 at the last token."""
    shifted = np.concatenate([values[1:], [0.0]])[: len(values)]
    shifted[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return shifted
