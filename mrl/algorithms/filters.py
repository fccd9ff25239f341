"""Filters that reject groups of responses. The rollout worker samples a new prompt in place of each rejected group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Filter(Protocol):
    """Interface of a group filter. `rollout.filter._target_` may name any callable of this form.

    A class may declare the attribute `metric`, which selects the values that the filter gets (see `filter_values`). By
    default it is None.
    """

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        """Return whether to keep a group, given the rewards [G] of its responses, or the values that `metric` selects."""
        ...


CORRECTNESS_PARTS = ("correct", "correctness", "accuracy", "acc")
"""Names of the part of a reward that says whether a response is correct. `metric: correctness` selects the first that exists."""


def filter_values(
    metric: str | None, rewards: NDArray[np.float64], parts: Sequence[Mapping[str, float]]
) -> NDArray[np.float64]:
    """Return the values [G] of a group that a filter gets.

    `metric` selects the values:

        None         the rewards
        correctness  the first part of the reward whose name is in CORRECTNESS_PARTS; the rewards if there is no such part
        other names  the part of the reward with this name

    A response whose scoring failed has the value 0. Raises ValueError if no response of the group has the named part, but a
    response has other parts or a reward other than 0.

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
    responses, so a punishment of long responses should not decide: set `metric=correctness`, or the name of the part.
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
