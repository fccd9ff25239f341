"""Means over prompts with confidence intervals: prompts are the sample, so an interval speaks of prompts like these."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and the ends of its confidence interval; None where one prompt cannot say."""

    value: float
    low: float | None
    high: float | None


def share(values: NDArray[np.float64], confidence: float) -> Estimate:
    """Mean of one number from 0 to 1 per prompt [P], with Wilson's score interval for the effective number of prompts.

    P values of 0 and 1 give Wilson's interval exactly. Values in between (a pass@k is a probability) vary less than their mean
    m would let them, as if there were P * m(1-m) / variance prompts; surveys do the same (Franco et al. 2019, "Comparative
    Study of Confidence Intervals for Proportions in Complex Sample Surveys"). The variance counts one prompt more, of
    the largest spread m(1-m), so that a few equal values do not pretend to be certain.
    """
    from scipy.stats import norm  # a second

    assert np.abs(values - 0.5).max() < 0.5 + 1e-9, f"shares from {values.min()} to {values.max()}"
    mean, count = float(values.clip(0, 1).mean()), len(values)
    largest = mean * (1 - mean)
    variance = (float(np.square(values - mean).sum()) + largest) / (count + 1)
    effective = count * largest / variance if variance > 0 else count
    z = float(norm.ppf((1 + confidence) / 2))
    centre = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * np.sqrt(largest / effective + z**2 / (4 * effective**2))
    return Estimate(mean, max(0.0, float(centre - half)), min(1.0, float(centre + half)))


def mean(values: NDArray[np.floating], confidence: float) -> Estimate:
    """Mean of any number per prompt [P], with Student's t interval."""
    from scipy.stats import t  # a second

    middle, count = float(values.mean()), len(values)
    if count < 2:
        return Estimate(middle, None, None)
    half = float(t.ppf((1 + confidence) / 2, count - 1) * values.std(ddof=1) / np.sqrt(count))
    return Estimate(middle, middle - half, middle + half)
