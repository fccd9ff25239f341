"""Advantage estimators of whole responses: the rewards of a batch -> a number per response.

Rewards are compared within groups, the responses to one prompt. Groups may have any sizes and their rows any order. A
response alone in its group has nothing to be compared with: its advantage is 0, as for a group whose rewards are all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.inputs import AdvantageInputs, Advantages
from mrl.algorithms.returns import discounted

Floats = NDArray[np.float64]


class Advantage(Protocol):
    """Any callable of this form can be named in `algorithm.advantage._target_`.

    `needs`, a class attribute and empty where it is missing, names what must be there: the columns values, old_logprobs,
    ref_logprobs and teacher_logprobs, or greedy_rewards. `heeds_kl`, true where it is missing, says that `token_rewards`
    are read, from which algorithm.kl_in_reward is taken.
    """

    def __call__(self, inputs: AdvantageInputs) -> NDArray[np.floating] | Advantages: ...


@dataclass(frozen=True)
class Groups:
    """Sums over the rows of the same group; each row is given its own group's."""

    groups: NDArray[np.int64]  # [B]

    @cached_property
    def _unique(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        return np.unique(self.groups, return_index=True, return_inverse=True, return_counts=True)

    @property
    def index(self) -> NDArray[np.int64]:
        """[B] number of each row's group, 0 .. number of groups - 1."""
        return self._unique[2]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[B] rows in each row's group."""
        return self._unique[3][self.index]

    def sum(self, values: Floats) -> Floats:
        """[B] -> [B]."""
        return np.bincount(self.index, values, minlength=len(self._unique[0])).astype(np.float64)[self.index]

    def mean(self, values: Floats) -> Floats:
        """[B] -> [B]."""
        return self.sum(values) / self.sizes

    def shifted(self, values: Floats) -> Floats:
        """[B] values less that of the group's first row: exactly 0, not nearly, where a group's values are all the same."""
        return values - values[self._unique[1]][self.index]

    def centred(self, values: Floats) -> Floats:
        """[B] values less their group's mean."""
        shifted = self.shifted(values)
        return shifted - self.mean(shifted)

    def std(self, values: Floats, ddof: int = 1) -> Floats:
        """[B] standard deviation of each row's group, with n - ddof in the denominator (1 at least)."""
        return np.sqrt(self.sum(self.centred(values) ** 2) / np.maximum(self.sizes - ddof, 1))


@dataclass(frozen=True)
class GRPO:
    """Group-relative advantage, (r - mean) / (std + eps) over the responses to one prompt (DeepSeekMath 2024, 4.1.2).

    The standard deviation is by default the unbiased one (n - ddof with ddof 1), as in the common implementations; the paper
    does not say which. `normalize_std=False` is Dr.GRPO's form (Liu et al. 2025, 3.2), without the division.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    eps: float = 1e-4
    normalize_std: bool = True
    ddof: int = 1

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        groups = Groups(inputs.groups)
        centred = groups.centred(inputs.rewards)
        return centred / (groups.std(inputs.rewards, self.ddof) + self.eps) if self.normalize_std else centred


@dataclass(frozen=True)
class RLOO:
    """Reward less the mean reward of the other responses to the prompt (Ahmadian et al. 2024, 2.2).

    verl keeps the bare reward of a response alone in its group; here it is 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]: r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)."""
        groups = Groups(inputs.groups)
        return groups.centred(inputs.rewards) * groups.sizes / np.maximum(groups.sizes - 1, 1)


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline:
    """Reward less the group's mean, to be whitened over the whole batch (Hu et al. 2025, REINFORCE++-baseline).

    The whitening is `algorithm.whiten=true`; conf/algorithm/reinforce_pp_baseline.yaml sets it.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B], before they are whitened."""
        return Groups(inputs.groups).centred(inputs.rewards)


@dataclass(frozen=True)
class ReMax:
    """Reward less that of the greedy response to the same prompt (Li et al. 2023, algorithm 1).

    `to_go`: each token is given the rewards from it on, less the baseline, as in verl; a difference only where rewards
    lie on several tokens, that is with a KL penalty in the reward or rewards of turns.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"greedy_rewards"})
    to_go: bool = False

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B], or [R] with `to_go`."""
        assert inputs.greedy_rewards is not None, "ReMax needs greedy_rewards"
        if not self.to_go:
            return inputs.rewards - inputs.greedy_rewards
        return discounted(inputs.token_rewards, inputs.lengths, 1.0) - inputs.greedy_rewards[inputs.rows]


@dataclass(frozen=True)
class OPO:
    """Reward less the baseline of least variance, the group's mean weighted by lengths (Hao et al. 2025, sec. 3)."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        groups, lengths = Groups(inputs.groups), inputs.lengths.astype(np.float64)
        shifted = groups.shifted(inputs.rewards)
        return shifted - groups.sum(lengths * shifted) / np.maximum(groups.sum(lengths), 1)


@dataclass(frozen=True)
class GPG:
    """Centred reward times B / (B - M), M responses having rewards all the same in their group (Chu et al. 2025, AGE).

    The factor keeps the gradient's size when many groups say nothing. verl counts responses of reward 0 in place of M.
    `normalize_std` divides by the group's standard deviation too (the paper's F_norm; 1 by default).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    normalize_std: bool = False
    eps: float = 1e-4

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        groups = Groups(inputs.groups)
        centred, std = groups.centred(inputs.rewards), groups.std(inputs.rewards)
        scale = len(std) / max(np.count_nonzero(std), 1)
        return scale * (centred / (std + self.eps) if self.normalize_std else centred)


@dataclass(frozen=True)
class PassAtK:
    """What the best response adds to its group's maximum, 0 for all others (Tang et al. 2025, the leave-one-out baseline).

    For the objective "best of all responses to a prompt": max r - max of the others. Where two are the best it is 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        index = Groups(inputs.groups).index
        order = np.lexsort((inputs.rewards, index))  # by group, the best last
        best = np.diff(index[order], append=-1) != 0
        second = np.diff(index[order], prepend=-1) == 0  # there is one before it in its group
        gap = np.diff(inputs.rewards[order], prepend=0.0)
        advantages = np.zeros(len(order))
        advantages[order] = np.where(best & second, gap, 0.0)
        return advantages


@dataclass(frozen=True)
class LogMeanExp:
    """Reward less tau log(mean exp(r / tau)) of its group, the baseline of OPMD (Kimi k1.5 2025, 2.3.2, tau log Z).

    The paper takes the plain mean in practice, to which this tends as tau grows: GRPO with normalize_std=False.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    tau: float = 1.0

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        groups = Groups(inputs.groups)
        top = np.full(groups.index.max(initial=-1) + 1, -np.inf)
        np.maximum.at(top, groups.index, inputs.rewards)
        below = inputs.rewards - top[groups.index]  # <= 0, so that exp cannot overflow
        return below - self.tau * np.log(groups.mean(np.exp(below / self.tau)))


@dataclass(frozen=True)
class GDPO:
    """Each part of the reward normalised in its group, then added up and normalised over the batch (Liu et al. 2026, sec. 3).

    `weights`: of the parts, by name; one that is not named weighs 1. Parts know no KL penalty: take it into the loss.
    `normalize_batch=False` leaves the last step out; `algorithm.whiten` in its place counts by tokens, as in verl.
    A reward that is not combined of several is its only part, `reward`. Raises ValueError for a weight of a part that the
    reward does not have.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    heeds_kl: ClassVar[bool] = False
    weights: Mapping[str, float] = field(default_factory=dict)
    eps: float = 1e-4
    normalize_batch: bool = True

    def __call__(self, inputs: AdvantageInputs) -> Floats:
        """Advantages [B]."""
        parts = inputs.parts or {"reward": inputs.rewards}
        if set(self.weights) - set(parts):
            raise ValueError(
                f"algorithm.advantage.weights={dict(self.weights)}: the reward has the parts {', '.join(sorted(parts))}."
            )
        groups, total = Groups(inputs.groups), np.zeros(len(inputs.groups))
        for name, rewards in parts.items():
            normalised = groups.centred(rewards) / (groups.std(rewards) + self.eps)
            total += self.weights.get(name, 1.0) * normalised
        # The mean is 0 as it is, each group's being 0; taking it off would leave round-off where there is no advantage.
        return total / (total.std() + self.eps) if self.normalize_batch else total
