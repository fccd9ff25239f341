"""How far the trainer's policy is from what the engine sampled, from sums that add up over ranks.

With ratio = pi_train / pi_engine of the sampled tokens, all averages being over tokens that the engine sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


SUMS = tuple(f"mismatch/{name}" for name in ("count", "log_ratio", "ratio", "ratio_squared", "k3_sum"))
"""What `sums` gives."""


def sums(old: Tensor, rollout: Tensor) -> dict[str, Tensor]:
    """Log-probabilities [R] of the trainer and of the engine -> float64 scalars that add up over parts of a batch."""
    log_ratio = old.detach().double() - rollout.double()
    ratio = log_ratio.exp()
    return {
        "mismatch/count": log_ratio.new_tensor(float(len(log_ratio))),
        "mismatch/log_ratio": log_ratio.sum(),
        "mismatch/ratio": ratio.sum(),
        "mismatch/ratio_squared": ratio.square().sum(),
        "mismatch/k3_sum": (ratio - 1 - log_ratio).sum(),
    }


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics from the sums of a whole batch; NaN without tokens, or where the engine said nothing (NaN).

    kl: KL(engine || trainer) = -E[log ratio]; k3 is the same as E[ratio - 1 - log ratio] (Schulman 2020). chi2: E[ratio^2] - 1,
    the chi-square divergence of the trainer from the engine. ess_fraction: (sum ratio)^2 / (n sum ratio^2), the effective
    sample size (Kish 1965) as a fraction. ppl_ratio: exp(-E[log ratio]), the trainer's perplexity of the samples over the
    engine's.
    """
    count, log_ratio, ratio, squared, k3 = (np.float64(sums[name]) for name in SUMS)
    with np.errstate(all="ignore"):
        found = {
            "kl": -log_ratio / count,
            "k3": k3 / count,
            "chi2": squared / count - 1,
            "ess_fraction": ratio**2 / (count * squared),
            "ppl_ratio": np.exp(-log_ratio / count),
        }
    return {f"mismatch/{name}": float(value) for name, value in found.items()}
