"""Advantage estimators: they compute one advantage per response [B] or per sampled token [R] from the rewards of a batch.

Most estimators compare the reward of a response with the rewards of its group. A group is all responses to one prompt.
Groups may differ in size, and the responses of a group may be anywhere in the batch. These estimators give a response the
advantage 0 if its group has only one response, or if all rewards of the group are equal. There are two exceptions: GDPO
compares each part of the reward instead of the whole reward. OptimalTokenBaseline compares rewards to go, token by token, and
with `zero_tail` also has advantages for a response that is alone in its group.
docs/concepts/algorithms.md lists the papers. mrl.core.types explains the letters B and R.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.corrections import ImportanceSampling
from mrl.algorithms.inputs import AdvantageInputs, Advantages, broadcast_to_tokens

Floats = NDArray[np.float64]


class Advantage(Protocol):
    """Interface of an advantage estimator. `algorithm.advantage._target_` may name any callable of this form.

    A class may declare three attributes:

    - `required_inputs`: the inputs that the estimator reads: columns (see mrl.algorithms.parts.COLUMNS), and greedy_rewards. By
      default the set is empty.
    - `uses_token_rewards`: true if the estimator reads `rewards` or `token_rewards`, from which the KL penalty of
      algorithm.kl_in_reward is subtracted. By default this is true.
    - `group_relative`: whether the advantage of a response is always 0 if it is the only response to its prompt. By
      default this is false.
    """

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.floating] | Advantages: ...


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of groups. Every method returns one value for each row [B], computed from the group of the row.

    A row is a response. In OptimalTokenBaseline, a row is a token, and a group has the tokens with the same index in the
    responses to one prompt.
    """

    groups: NDArray[np.int64]  # [B] id of the group of each row

    @cached_property
    def _unique(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        return np.unique(self.groups, return_index=True, return_inverse=True, return_counts=True)

    @property
    def index(self) -> NDArray[np.int64]:
        """[B] for each row, the position of its group among the sorted group ids, from 0."""
        return self._unique[2]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[B] for each row, the number of rows in its group."""
        return self._unique[3][self.index]

    def sum(self, values: Floats) -> Floats:
        """Return [B]: for each row, the sum of `values` [B] over its group."""
        return np.bincount(self.index, values, minlength=len(self._unique[0])).astype(np.float64)[self.index]

    def mean(self, values: Floats) -> Floats:
        """Return [B]: for each row, the mean of `values` [B] over its group."""
        return self.sum(values) / self.sizes

    def subtract_first(self, values: Floats) -> Floats:
        """Return `values` [B], each minus the value of the first row of its group. Equal values give exactly 0."""
        return values - values[self._unique[1]][self.index]

    def subtract_mean(self, values: Floats) -> Floats:
        """Return `values` [B], each minus the mean of its group. A group of equal values gives exactly 0."""
        shifted = self.subtract_first(values)
        return shifted - self.mean(shifted)

    def std(self, values: Floats, ddof: int = 1) -> Floats:
        """Return [B]: for each row, sqrt(sum of (value - mean)^2 / max(size - ddof, 1)) over its group."""
        return np.sqrt(self.sum(self.subtract_mean(values) ** 2) / np.maximum(self.sizes - ddof, 1))


REWARD_SCALES = ("group", "batch", "none")


@dataclass(frozen=True)
class GRPO:
    """Advantage (r - mean) / (std + eps), with the mean and standard deviation of the group (DeepSeekMath 2024, 4.1.2).

    `scale_rewards` selects the standard deviation, as in trl:

        group  standard deviation of the rewards of the group
        batch  standard deviation of the rewards of all responses of the step (Lite PPO, Liu et al. 2025, arXiv 2508.08221)
        none   no division (Dr.GRPO, Liu et al. 2025, arXiv 2503.20783, 3.2)

    The paper of GRPO does not say whether it uses the biased or the unbiased standard deviation. The default is the unbiased
    one (`ddof=1`), as in the common implementations. Raises ValueError for an unknown `scale_rewards`.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True
    eps: float = 1e-4
    scale_rewards: str = "group"  # "group", "batch" or "none"
    ddof: int = 1

    def __post_init__(self) -> None:
        if self.scale_rewards not in REWARD_SCALES:
            raise ValueError(f"scale_rewards={self.scale_rewards!r}: expected one of {', '.join(REWARD_SCALES)}.")

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        centered = GroupStatistics(inputs.groups).subtract_mean(inputs.rewards)
        if self.scale_rewards == "none":
            return centered
        scaled_together = inputs.groups if self.scale_rewards == "group" else np.zeros_like(inputs.groups)
        return centered / (GroupStatistics(scaled_together).std(inputs.rewards, self.ddof) + self.eps)


@dataclass(frozen=True)
class RLOO:
    """Reward minus the mean reward of the other responses to the same prompt (Ahmadian et al. 2024, 2.2).

    In a group of one response, the advantage is 0; in verl, it is the reward of this response.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]: r - (sum - r) / (n - 1) = (r - mean) n / (n - 1), where n is the size of the group."""
        groups = GroupStatistics(inputs.groups)
        return groups.subtract_mean(inputs.rewards) * groups.sizes / np.maximum(groups.sizes - 1, 1)


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline:
    """Reward minus the mean of the group (Hu et al. 2025, REINFORCE++-baseline).

    The paper also whitens the advantages over the batch. This class does not: `algorithm.whiten=true` whitens them, and
    conf/algorithm/reinforce_pp_baseline.yaml sets this key.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B] before whitening."""
        return GroupStatistics(inputs.groups).subtract_mean(inputs.rewards)


@dataclass(frozen=True)
class ReMax:
    """Reward minus the reward of the greedy response to the same prompt (Li et al. 2023, algorithm 1).

    With `to_go`, the advantage of a token is the sum of the rewards from this token to the end, minus the greedy reward,
    as in verl. This differs from the default only if a response has rewards at several tokens: with a KL penalty in the
    reward, or with one reward per turn.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"greedy_rewards"})
    to_go: bool = False  # True: one advantage per token, from the rewards that are still to come (reward to go)

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B], or [R] with `to_go`."""
        assert inputs.greedy_rewards is not None, "ReMax needs greedy_rewards"
        if not self.to_go:
            return inputs.rewards - inputs.greedy_rewards
        greedy_rewards = inputs.greedy_rewards[inputs.response_of_token]
        return discounted_sums(inputs.token_rewards, inputs.lengths, 1.0) - greedy_rewards


@dataclass(frozen=True)
class OPO:
    """Reward minus the weighted mean reward of the group (Hao et al. 2025, sec. 3).

    In this mean, the weight of a response is its length. According to the paper, this baseline gives the gradient the smallest
    variance.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups, lengths = GroupStatistics(inputs.groups), inputs.lengths.astype(np.float64)
        shifted = groups.subtract_first(inputs.rewards)
        return shifted - groups.sum(lengths * shifted) / np.maximum(groups.sum(lengths), 1)


@dataclass(frozen=True)
class GPG:
    """(Reward minus the mean of the group) times B / (B - M) (Chu et al. 2025, AGE).

    M is the number of responses whose group has only equal rewards. Such groups give no gradient; the factor compensates for
    this. In verl, M is the number of responses with reward 0. The paper also divides the advantage by a number F_norm. By
    default F_norm is 1; with `normalize_std`, F_norm is the standard deviation of the group plus `eps`.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True
    normalize_std: bool = False
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups = GroupStatistics(inputs.groups)
        centered, std = groups.subtract_mean(inputs.rewards), groups.std(inputs.rewards)
        informative = np.count_nonzero(std)  # B - M
        if not informative:
            return centered
        scale = len(std) / informative
        return scale * (centered / (std + self.eps) if self.normalize_std else centered)


@dataclass(frozen=True)
class PassAtK:
    """The best response of a group gets its reward minus the second-best reward; all others get 0 (Tang et al. 2025).

    This is the paper's leave-one-out baseline for the objective "best reward among all responses to a prompt". If two
    responses have the best reward, the advantage of both is 0. With `normalize_std`, the advantage is divided by the standard
    deviation of the group plus `eps`, as verl does by default.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True
    normalize_std: bool = False
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        groups = GroupStatistics(inputs.groups)
        # Sort by group, then by reward, so that the best response of a group comes last.
        order = np.lexsort((inputs.rewards, groups.index))
        is_best = np.diff(groups.index[order], append=-1) != 0
        has_second = np.diff(groups.index[order], prepend=-1) == 0  # the previous row belongs to the same group
        rewards = inputs.rewards[order]
        gap = np.diff(rewards, prepend=rewards[:1])
        advantages = np.zeros(len(order))
        advantages[order] = np.where(is_best & has_second, gap, 0.0)
        return advantages / (groups.std(inputs.rewards) + self.eps) if self.normalize_std else advantages


@dataclass(frozen=True)
class LogMeanExp:
    """Reward minus tau log Z, the baseline of OPMD (Kimi k1.5 2025, 2.3.2).

    Z is the mean of exp(r / tau) over the group, where r is the reward. For large tau the baseline is close to the mean reward
    of the group. In practice the authors use the mean reward as baseline, as GRPO with `scale_rewards=none` does.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True
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
    """Weighted sum of the parts of the reward, with two normalizations (Liu et al. 2026, sec. 3).

    First each part is normalized over the group. Then the sum of the parts is normalized over the batch. With
    `normalize_batch=False` the second normalization is omitted, and `algorithm.whiten` can normalize over tokens, as
    verl does.

    `weights` maps the name of a part to its weight in the sum. Parts that `weights` does not name have weight 1. If a
    reward has no parts, the whole reward is used as a part with the name `reward`. The parts do not contain the penalty of
    algorithm.kl_in_reward, so use algorithm.kl_in_loss.

    Raises ValueError if `weights` names a part that the reward does not have.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    group_relative: ClassVar[bool] = True
    uses_token_rewards: ClassVar[bool] = False
    weights: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-4  # added to the standard deviations by which the two normalizations divide
    normalize_batch: bool = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [B]."""
        parts = inputs.reward_parts or {"reward": inputs.rewards}
        if set(self.weights) - set(parts):
            raise ValueError(
                f"algorithm.advantage.weights={dict(self.weights)}: the reward has the parts {', '.join(sorted(parts))}."
            )
        groups, total = GroupStatistics(inputs.groups), np.zeros(len(inputs.groups))
        for name, rewards in parts.items():
            normalized = groups.subtract_mean(rewards) / (groups.std(rewards) + self.eps)
            total += self.weights.get(name, 1.0) * normalized
        # The mean over the batch is 0 because the mean of each group is 0. Subtracting the mean would only add rounding errors.
        # The standard deviation is unbiased, as in the normalization over the group and in trl.
        return total / (total.std(ddof=int(len(total) > 1)) + self.eps) if self.normalize_batch else total


@dataclass(frozen=True)
class GAE:
    """Generalized advantage estimation with a critic (Schulman et al. 2015, eq. 16).

    The advantage of token t is the sum over l of (gamma lam)^l delta[t + l], where
    delta[t] = r[t] + gamma V[t + 1] - V[t], and V = 0 after the last token. The index t counts only sampled tokens: in a
    multi-turn response, the first token of a turn follows the last token of the previous turn.

    The critic learns the TD(lambda) return, which is the advantage before whitening plus the value.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset({"values"})
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
    """Discounted sum of the token rewards from each token to the end of the response (Hu et al. 2025).

    The token rewards contain the KL penalty of algorithm.kl_in_reward.

    The paper also whitens the advantages over the batch. This class does not: `algorithm.whiten=true` whitens them, and
    conf/algorithm/reinforce_pp.yaml sets this key.
    """

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    gamma: float = 1.0

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [R] before whitening."""
        return discounted_sums(inputs.token_rewards, inputs.lengths, self.gamma)


@dataclass(frozen=True)
class OptimalTokenBaseline:
    """Reward to go minus a token baseline, which minimizes the variance of the gradient (OTB, Li et al. 2026).

    The advantage of token t of response i is G[i, t] - B[t]. G[i, t] is the sum of the rewards from this token to the end. B[t]
    is the weighted mean of G[., t] over the responses of the group that have a token t, with the weights W[., t]. W[i, t] is the
    sum of 1 - 2 pi + q over the tokens of response i up to t, where pi is the old probability of a token, and q is the sum of
    the squared old probabilities of all tokens of the vocabulary. 1 - 2 pi + q is the squared norm
    of the gradient of log pi with respect to the logits.

    The index t counts only sampled tokens. So this class equals verl's `tir_optimal_token_baseline` for responses of several
    turns, and verl's `optimal_token_baseline` for responses of one turn.

    With `zero_tail`, B[t] is 0 if only one response of the group has a token t. Without `zero_tail`, the advantage of such a
    token is 0. Set `correction` if another policy than the old policy samples the tokens. The terms of W are then multiplied by
    the squares of the correction weights. The correction's option `batch_normalize` has no effect here, because it multiplies all
    weights by the same number. A token whose old log-probability is NaN adds 0 to W.

    Raises ValueError for a `correction` with numerator=current or with a `veto`.
    """

    zero_tail: bool = True
    correction: ImportanceSampling | None = None  # None: the samples are from the old policy

    def __post_init__(self) -> None:
        if self.correction and self.correction.numerator == "current":
            raise ValueError(
                "correction.numerator='current': baselines are computed before the optimizer steps, from the weights of the old "
                "policy; use numerator=old."
            )
        if self.correction and self.correction.veto is not None:
            raise ValueError(
                f"correction.veto={self.correction.veto}: baselines cannot reject responses; set the veto in "
                "algorithm.correction, and remove it here."
            )

    @property
    def required_inputs(self) -> frozenset[str]:
        """old_logprobs and sum_pi_squared; with `correction`, also rollout_logprobs."""
        of_correction = {"rollout_logprobs"} if self.correction else set[str]()
        return frozenset({"old_logprobs", "sum_pi_squared"} | of_correction)

    @property
    def group_relative(self) -> bool:
        """Whether the advantage of a response that is alone in its group is 0."""
        return not self.zero_tail

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return advantages [R]."""
        old, squares = (inputs.columns[name].astype(np.float64) for name in ("old_logprobs", "sum_pi_squared"))
        energy = np.nan_to_num(np.maximum(1 - 2 * np.exp(old) + squares, 0.0))
        if self.correction:
            energy = energy * self.correction.step_weights(inputs) ** 2
        weights = sums_so_far(energy, inputs.lengths)
        to_go = discounted_sums(inputs.token_rewards, inputs.lengths, 1.0)
        same_index = GroupStatistics(_group_and_index(inputs))  # compares the tokens with the same index in a group
        shifted = same_index.subtract_first(to_go)  # equal rewards to go give exactly 0
        total = same_index.sum(weights)
        baseline = np.divide(same_index.sum(weights * shifted), total, out=np.zeros_like(total), where=total > 0)
        return np.where(same_index.sizes > 1, shifted - baseline, to_go if self.zero_tail else 0.0)


def _group_and_index(inputs: AdvantageInputs) -> NDArray[np.int64]:
    """Return [R]: a number for each token. It is the same for tokens with the same index in the responses of one group."""
    response = inputs.response_of_token
    index = np.arange(len(response)) - (np.cumsum(inputs.lengths) - inputs.lengths)[response]
    return GroupStatistics(inputs.groups).index[response] * inputs.lengths.max(initial=1) + index


@dataclass(frozen=True)
class OnPolicyDistillation:
    """Advantage coef * (log p_teacher - log p_old) of each token (Lu and Thinking Machines 2025).

    The mean of this advantage is -coef * KL(old policy || teacher), the reverse KL divergence. With `gamma` above 0, the
    terms of later tokens are added, discounted by `gamma` per token; `gamma=1` gives R_t of MiniLLM (Gu et al. 2024, 2.2).

    `reward` is a second advantage estimator, which reads the rewards. The result is the advantage above plus
    `reward_coef` times the advantage of the second estimator.
    """

    coef: float = 1.0
    gamma: float = 0.0
    reward: Advantage | None = None  # the second advantage estimator; None: rewards have no effect
    reward_coef: float = 1.0  # factor of the second estimator's advantages

    @property
    def required_inputs(self) -> frozenset[str]:
        """Names of the columns with the log-probabilities of teacher and old policy, and of the inputs that `reward` needs."""
        return frozenset({"teacher_logprobs", "old_logprobs"}) | getattr(self.reward, "required_inputs", frozenset())

    @property
    def uses_token_rewards(self) -> bool:
        """Whether `reward` reads token rewards. The distillation term reads no rewards."""
        return self.reward is not None and getattr(self.reward, "uses_token_rewards", True)

    def __call__(self, inputs: AdvantageInputs) -> Advantages:
        """Return advantages [R], and the returns [R] of `reward` if it has any."""
        old, teacher = (inputs.columns[name].astype(np.float64) for name in ("old_logprobs", "teacher_logprobs"))
        log_ratio = np.where(np.isnan(old), 0.0, teacher - old)  # NaN: the engine reported no log-probability
        advantages = self.coef * discounted_sums(log_ratio, inputs.lengths, self.gamma)
        if self.reward is None:
            return Advantages(advantages)
        result = self.reward(inputs)
        other = result if isinstance(result, Advantages) else Advantages(result)
        return Advantages(advantages + self.reward_coef * broadcast_to_tokens(other.advantages, inputs), other.returns)


@dataclass(frozen=True)
class NoAdvantage:
    """Advantage 0 for every response, for a loss that reads no advantages, such as Distillation without `reward_loss`."""

    required_inputs: ClassVar[frozenset[str]] = frozenset()
    uses_token_rewards: ClassVar[bool] = False

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Return zeros [B]."""
        return np.zeros(len(inputs.lengths))


def discounted_sums(values: Floats, lengths: NDArray[np.int64], factor: float) -> Floats:
    """Return x [R] where x[t] = values[t] + factor * x[t + 1] within each response, and x is 0 after the last token.

    `values` [R] are values of tokens. `lengths` [B] are the lengths of the responses.
    """
    sums, ends = values.astype(np.float64), np.cumsum(lengths)
    # Each iteration handles one token of every response that is long enough, from the second-last token backwards.
    for distance in range(1, lengths.max(initial=0)):
        index = ends[lengths > distance] - 1 - distance
        sums[index] += factor * sums[index + 1]
    return sums


def sums_so_far(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return [R]: for each token, the sum of `values` [R] over the tokens of its response up to this token."""
    sums = np.cumsum(values)
    before = np.concatenate([[0.0], sums])[np.cumsum(lengths) - lengths]  # [B] sum of all earlier responses
    return sums - np.repeat(before, lengths)


def next_token_values(values: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Return [R]: for each token, the value of the next token of the same response; 0 for the last token."""
    shifted = np.concatenate([values[1:], [0.0]])[: len(values)]
    shifted[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return shifted
