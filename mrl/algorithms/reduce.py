"""Loss normalisation: the one place where denominators are chosen.

A loss is the sum over all response tokens of the whole batch, each times the weight given here. The denominators are
global, so any split of the batch into micro-batches or data-parallel replicas adds up to the same loss and gradient;
gradients are summed over replicas and never divided again.
"""

import numpy as np
from numpy.typing import NDArray

AGGREGATIONS = ("token_mean", "sequence_mean")


def token_weights(response_lengths: NDArray[np.int64], aggregation: str) -> NDArray[np.float64]:
    """What one token of each response counts for, [B].

    token_mean: 1 / (all response tokens), every token alike (DAPO's token-level loss, eq. 8).
    sequence_mean: 1 / (B * tokens of this response), every response alike (GRPO as published, eq. 3).
    """
    lengths = response_lengths.astype(np.float64)
    if aggregation == "token_mean":
        return np.full(len(lengths), 1.0 / lengths.sum())
    if aggregation == "sequence_mean":
        return 1.0 / (np.maximum(lengths, 1) * len(lengths))
    raise ValueError(f"algorithm.aggregation={aggregation!r}; expected one of {', '.join(AGGREGATIONS)}.")
