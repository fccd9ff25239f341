"""Chooses the responses on which a step trains, by their rewards: rollout filters reject groups, resampling draws responses.

The rollout worker samples responses to a new prompt in place of each group that a filter rejects. docs/concepts/algorithms.md
lists the papers. mrl.core.types explains the letters of array dimensions, such as B and G.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Filter(Protocol):
    """Interface of a rollout filter. `rollout.filter._target_` may name any callable of this form.

    A class may declare the attribute `metric`, which selects the values that the filter gets (see `filter_values`). By
    default it is None.
    """

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        """Return whether to keep a group, given the rewards [G] of its responses, or the values that `metric` selects."""
        ...


CORRECTNESS_PARTS = ("correct", "correctness", "accuracy", "acc")
"""Names of reward parts that say whether a response is correct. `metric: correctness` selects the first part that exists."""


def filter_values(
    metric: str | None, rewards: NDArray[np.float64], parts: Sequence[Mapping[str, float]]
) -> NDArray[np.float64]:
    """Return the values [G] that a filter gets for a group.

    `metric` selects the values:

        None         the rewards
        correctness  the first part of the reward whose name is in CORRECTNESS_PARTS; the rewards if there is no such part
        other names  the part of the reward with this name

    A response without the named part, for example because its scoring failed, has the value 0. Raises ValueError if no response
    of the group has the named part. There is no error if the responses have no parts at all and all rewards are 0: the values
    are then 0.

    Args:
        metric: attribute `metric` of the filter.
        rewards: total reward of each response, [G].
        parts: for each response, the parts of its reward: name -> value.
    """
    names = {name for part in parts for name in part}
    if metric == "correctness":
        metric = next((name for name in CORRECTNESS_PARTS if name in names), None)
    if metric is None:
        return rewards
    if metric not in names and (names or rewards.any()):
        raise ValueError(
            f"rollout.filter.metric={metric}: the reward has no part with this name; "
            + (
                f"its parts are {', '.join(sorted(names))}."
                if names
                else "it has no parts. Remove rollout.filter.metric."
            )
        )
    return np.array([part.get(metric, 0.0) for part in parts])


@dataclass(frozen=True)
class NonzeroVariance:
    """Keeps the groups whose rewards are not all equal, as DAPO's dynamic sampling does (Yu et al. 2025, eq. 11).

    For rewards of 0 and 1 this is the paper's condition 0 < number of correct responses < G. A group of one response
    is dropped. A group is also dropped if its largest and its smallest reward differ by at most `tolerance`.

    `metric` selects a part of the reward in place of the total reward (see `filter_values`). The paper counts correct
    responses. If the reward contains a penalty for long responses, set `metric` to `correctness`, or to the name of the part that
    says whether a response is correct.
    """

    tolerance: float = 0.0
    metric: str | None = None  # part of the reward; None: the total reward; correctness: see `filter_values`

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(np.ptp(rewards) > self.tolerance) if len(rewards) else False


@dataclass(frozen=True)
class RewardRange:
    """Keeps the groups whose mean reward is in [low, high], so that prompts are neither too hard nor too easy.

    PRIME filters its prompts in this way, with the range 0.2 to 0.8 (Cui et al. 2025, "Process reinforcement", online
    prompt filtering). `metric` selects a part of the reward in place of the total reward (see `filter_values`). Raises
    ValueError if low > high.
    """

    low: float = 0.2
    high: float = 0.8
    metric: str | None = None  # part of the reward; None: the total reward; correctness: see `filter_values`

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected low <= high.")

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(self.low <= rewards.mean() <= self.high) if len(rewards) else False


class Resampling(Protocol):
    """Interface of a function that resamples responses. `algorithm.resampling._target_` may name any such callable."""

    def __call__(
        self, rewards: NDArray[np.float64], groups: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return [B]: how often each response counts in the loss. The step does not train on responses that count 0 times.

        `rewards` [B] are the rewards of the responses before KL penalties, and `groups` [B] are the ids of their prompts.
        """
        ...


FILTRATION_METHODS = ("pow", "max_min", "max_random")


@dataclass(frozen=True)
class PolicyFiltration:
    """Draws responses at random, with replacement. The probability depends on the reward r (PF-PPO, Zhang et al. 2024).

    Rewards near the extremes are more reliable, so responses with such rewards are drawn more often. The number of draws equals
    the number of responses. A response that is drawn n times counts n times in the loss and in the denominators of the loss, as
    if the batch had n copies of the response. But the models compute the response only once. Advantages are computed before the
    draw, from all responses.

    `method` selects the probability with which a response is drawn:

        pow         proportional to |r|^power
        max_min     equal for the responses with the largest and with the smallest reward; nearly 0 for others
        max_random  four times as large for the responses with the largest reward as for others

    By default, responses are compared and drawn separately for each group. With `per_group=False`, all responses of the step are
    compared and drawn together, as in verl. Raises ValueError for an unknown method, and for a `power` below 0.
    """

    method: str = "pow"
    power: float = 2.0  # exponent of the method pow
    per_group: bool = True  # False: the whole step is one group

    def __post_init__(self) -> None:
        if self.method not in FILTRATION_METHODS:
            raise ValueError(f"method={self.method!r}: expected one of {', '.join(FILTRATION_METHODS)}.")
        if self.power < 0:
            raise ValueError(f"power={self.power}: must be 0 or more.")

    def __call__(
        self, rewards: NDArray[np.float64], groups: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        counts = np.zeros(len(rewards), np.int64)
        for group in np.unique(groups) if self.per_group else [None]:
            rows = np.arange(len(rewards)) if group is None else np.flatnonzero(groups == group)
            weights = self.weights(rewards[rows])
            counts[rows] = rng.multinomial(len(rows), weights / weights.sum()) if len(rows) else 0
        return counts

    def weights(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [n]: for each of n responses, the number to which its probability is proportional.

        1e-8 is added, as in verl, so that responses can be drawn if all these numbers are 0.
        """
        largest, smallest = rewards.max(initial=-np.inf), rewards.min(initial=np.inf)
        numbers = {
            "pow": np.abs(rewards) ** self.power,
            "max_min": ((rewards == largest) | (rewards == smallest)).astype(np.float64),
            "max_random": np.where(rewards == largest, 0.4, 0.1),
        }
        return numbers[self.method] + 1e-8
