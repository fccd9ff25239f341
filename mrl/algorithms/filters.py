"""Which groups of responses are worth training on; the others are dropped, and further prompts sampled in their place."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Filter(Protocol):
    """Any callable of this form can be named in `rollout.filter._target_`."""

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        """Rewards [G] of the responses to one prompt -> whether to keep them."""
        ...


@dataclass(frozen=True)
class NonzeroVariance:
    """Keeps groups whose rewards are not all the same: DAPO's dynamic sampling (Yu et al. 2025, eq. 11).

    For rewards of right and wrong it is the paper's 0 < right < G. A group of one has no variance. Rewards that are apart by
    `tolerance` or less count as the same.
    """

    tolerance: float = 0.0

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(np.ptp(rewards) > self.tolerance) if len(rewards) else False


@dataclass(frozen=True)
class RewardRange:
    """Keeps groups whose mean reward is in [low, high], both included: prompts neither too hard nor too easy.

    PRIME filters its prompts so (Cui et al. 2025, "Process reinforcement", online prompt filtering; 0.2 to 0.8).
    Raises ValueError unless low <= high.
    """

    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low={self.low}, high={self.high}: expected low <= high.")

    def __call__(self, rewards: NDArray[np.float64]) -> bool:
        return bool(self.low <= rewards.mean() <= self.high) if len(rewards) else False
