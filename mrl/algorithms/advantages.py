"""Advantage estimators: rewards [B] and group numbers [B] -> advantages [B], one per response."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Advantage(Protocol):
    """Any callable of this form can be named in `algorithm.advantage._target_`."""

    def __call__(self, rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class GRPO:
    """Group-relative advantage, (r - mean) / (std + eps) over the responses to one prompt (DeepSeekMath 2024, 4.1.2).

    The standard deviation is the unbiased one (n - 1), as in the common implementations; the paper does not say which.
    `normalize_std=False` is Dr.GRPO's form (Liu et al. 2025), without the division.
    """

    eps: float = 1e-4
    normalize_std: bool = True

    def __call__(self, rewards: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float32]:
        """Advantages [B]; a group of one response has advantage 0."""
        _, index, counts = np.unique(groups, return_inverse=True, return_counts=True)
        means = np.bincount(index, rewards) / counts
        centred = rewards - means[index]
        if not self.normalize_std:
            return centred.astype(np.float32)
        variance = np.bincount(index, centred**2) / np.maximum(counts - 1, 1)
        return (centred / (np.sqrt(variance) + self.eps)[index]).astype(np.float32)
