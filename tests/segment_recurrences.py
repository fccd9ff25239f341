"""Reference implementation of recurrent layers over packs of segments: one sequence after another, one token after another."""

import torch
from segment_trees import ancestors
from torch import Tensor

from parallel.packing import Segment


def sequences_of(segments: list[Segment]) -> list[tuple[list[int], int]]:
    """Return for each segment (indices of the tokens of its ancestors and of itself, number of its own tokens)."""
    starts = [sum(s.length for s in segments[:number]) for number in range(len(segments))]
    paths = [[*reversed(ancestors(segments, number)), number] for number in range(len(segments))]
    return [
        ([starts[s] + place for s in path for place in range(segments[s].length)], segments[path[-1]].length)
        for path in paths
    ]


def by_sequence(segments: list[Segment], function, *columns: Tensor) -> Tensor:
    """Call `function` for each sequence, and return the outputs [S, ...] of the tokens. `columns`: [S, ...]."""
    outputs = []
    for tokens, own in sequences_of(segments):
        outputs.append(function(*(column[tokens] for column in columns))[-own:])
    return torch.cat(outputs)


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the causal depthwise convolution [L, D] of one sequence `x` [L, D] with `weight` [D, 1, kernel]."""
    kernel = weight.size(2)
    rows = []
    for token in range(len(x)):
        terms = [weight[:, 0, kernel - 1 - back] * x[token - back] for back in range(min(kernel, token + 1))]
        rows.append(torch.stack(terms).sum(0))
    return torch.stack(rows)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs [L, n, v] of the gated delta rule for one sequence, from token to token."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    state, outputs = torch.zeros(*key.shape[1:], value.size(2), dtype=value.dtype), []
    for q, k, v, g, b in zip(query, key, value, log_decay, beta, strict=True):
        state = g.exp()[:, None, None] * state
        predicted = torch.einsum("nkv,nk->nv", state, k)
        state = state + torch.einsum("nk,nv->nkv", k, b[:, None] * (v - predicted))
        outputs.append(torch.einsum("nkv,nk->nv", state, q) / q.size(-1) ** 0.5)
    return torch.stack(outputs)


def selective_scan(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, step: Tensor) -> Tensor:
    """Return the outputs [L, n, v] of the recurrence of Mamba-2 for one sequence, from token to token. Queries are [L, g, k]."""
    query, key = (x.repeat_interleave(value.size(1) // x.size(1), dim=1) for x in (query, key))
    state, outputs = torch.zeros(*key.shape[1:], value.size(2), dtype=value.dtype), []
    for q, k, v, g, d in zip(query, key, value, log_decay, step, strict=True):
        state = g.exp()[:, None, None] * state + torch.einsum("nk,nv->nkv", k, d[:, None] * v)
        outputs.append(torch.einsum("nkv,nk->nv", state, q))
    return torch.stack(outputs)
