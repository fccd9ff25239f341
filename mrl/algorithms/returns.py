"""Sums over the tokens that follow, within each response."""

import numpy as np
from numpy.typing import NDArray


def discounted(values: NDArray[np.float64], lengths: NDArray[np.int64], factor: float) -> NDArray[np.float64]:
    """Values [R] of responses of these lengths [B] -> [R] x with x[t] = value[t] + factor * x[t + 1], 0 behind the end."""
    found, ends = values.astype(np.float64), np.cumsum(lengths)
    for back in range(1, lengths.max(initial=0)):  # all responses at once, from the last token but one on
        here = ends[lengths > back] - 1 - back
        found[here] += factor * found[here + 1]
    return found


def following(values: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """[R] -> [R] the value of each token's successor in its response, 0 behind the end."""
    shifted = np.concatenate([values[1:], [0.0]])[: len(values)]
    shifted[np.cumsum(lengths)[lengths > 0] - 1] = 0.0
    return shifted
