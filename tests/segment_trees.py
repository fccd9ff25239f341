"""Reference implementation for packs of segments: which tokens a token sees, positions, and attention with a dense mask."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel.packing import Segment


def ancestors(segments: list[Segment], number: int) -> list[int]:
    """Return the numbers of the segment's parent, of the parent's parent, and so on."""
    parent = segments[number].parent
    return [] if parent is None else [parent, *ancestors(segments, parent)]


def tokens_of(segments: list[Segment]) -> list[tuple[int, int]]:
    """Return (segment, index in the segment) of each token [S]."""
    return [(number, place) for number, segment in enumerate(segments) for place in range(segment.length)]


def visible(segments: list[Segment]) -> NDArray[np.bool_]:
    """Return the mask [S queries, S keys]. A token sees all tokens of ancestors, and its own segment up to itself."""
    paths = [ancestors(segments, number) for number in range(len(segments))]
    tokens = tokens_of(segments)
    return np.array([[k in paths[q] or (k == q and j <= i) for k, j in tokens] for q, i in tokens])


def positions(segments: list[Segment]) -> list[int]:
    """Return the position of each token in its sequence [S]: the number of tokens before it."""
    starts = [sum(segments[s].length for s in ancestors(segments, number)) for number in range(len(segments))]
    return [starts[number] + place for number, place in tokens_of(segments)]


def dense_attention(
    *columns: Tensor, segments: list[Segment], window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v [S, n*d] of query [S, n, d], key and value [S, g, d], head by head.

    A token attends to the last `window` tokens of its sequence, itself included (None: to all). `sinks` [n]: a further logit of
    each head, whose value is zero.
    """
    query, key, value = columns
    mask = torch.from_numpy(visible(segments))
    if window is not None:
        position = torch.tensor(positions(segments))
        mask &= position[:, None] - position[None] < window
    repeat = query.size(1) // key.size(1)
    heads = []
    for head in range(query.size(1)):
        scores = query[:, head] @ key[:, head // repeat].T / query.size(2) ** 0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].expand(len(scores), 1)], dim=1)
        heads.append(scores.softmax(-1)[:, : len(mask)] @ value[:, head // repeat])
    return torch.cat(heads, dim=1)


def random_segments(rng: np.random.Generator, most: int = 8, longest: int = 9) -> list[Segment]:
    """Return a random pack of segment trees with a depth of at most 3."""
    segments: list[Segment] = []
    for number in range(rng.integers(1, most + 1)):
        parents = [s for s in range(number) if len(ancestors(segments, s)) < 2]
        parent = int(rng.choice(parents)) if parents and rng.random() < 0.6 else None
        segments.append(Segment(int(rng.integers(1, longest + 1)), parent))
    return segments
