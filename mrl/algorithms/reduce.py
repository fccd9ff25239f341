"""Loss normalisation: the one place where denominators are chosen.

A loss is the sum over all response tokens of the whole batch, each times the weight given here. The denominators are
global, so any split of the batch into micro-batches or data-parallel replicas adds up to the same loss and gradient;
gradients are summed over replicas and never divided again.
"""

import numpy as np
from numpy.typing import NDArray

AGGREGATIONS = ("token_mean", "sequence_mean", "fixed_length")


def token_weights(
    response_lengths: NDArray[np.int64], aggregation: str, max_tokens: int | None = None
) -> NDArray[np.float64]:
    """What one token of each response counts for, [B]; responses of length 0 are allowed, and have no token to count.

    token_mean: 1 / (all response tokens), every token alike (DAPO's token-level loss, eq. 8).
    sequence_mean: 1 / (B * tokens of this response), every response alike (GRPO as published, eq. 3).
    fixed_length: 1 / (B * max_tokens), sums over responses with a constant that does not know their lengths (Dr.GRPO, Liu et
        al. 2025, 3.2). `max_tokens`: the longest response allowed.
    """
    lengths = response_lengths.astype(np.float64)
    count = max(len(lengths), 1)
    if aggregation == "token_mean":
        return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))
    if aggregation == "sequence_mean":
        return 1.0 / (np.maximum(lengths, 1) * count)
    if aggregation == "fixed_length":
        if not max_tokens or max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens}: algorithm.aggregation=fixed_length needs the longest response.")
        return np.full(len(lengths), 1.0 / (count * max_tokens))
    raise ValueError(f"algorithm.aggregation={aggregation!r}; expected one of {', '.join(AGGREGATIONS)}.")
