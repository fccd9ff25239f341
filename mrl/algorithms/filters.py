"""Filters that drop groups of responses. The rollout worker samples another prompt for each dropped group."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Filter(Protocol):
    """Interface of a group filter. `rollout.filter._target_` may name any callable of this form."""

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        """Return whether to keep a group, given the rewards [G] of its responses."""
        ...


@dataclass(frozen=True)
class NonzeroVariance:
    """Keeps the groups whose rewards are not all equal, as DAPO's dynamic sampling does (Yu et al. 2025, eq. 11).

    For rewards of 0 and 1 this is the paper's condition 0 < number of correct responses < G. A group of one response
    is dropped. A group is also dropped if its largest and its smallest reward differ by at most `tolerance`.
    """

    tolerance: float = 0.0

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(np.ptp(rewards) > self.tolerance) if len(rewards) else False


@dataclass(frozen=True)
class RewardRange:
    """Keeps the groups whose mean reward is in [low, high], so that prompts are neither too hard nor too easy.

    PRIME filters its prompts in this way, with the range 0.2 to 0.8 (Cui et al. 2025, "Process reinforcement", online
    prompt filtering). Raises ValueError if low > high.
    """

    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected low <= high.")

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(self.low <= rewards.mean() <= self.high) if len(rewards) else False
