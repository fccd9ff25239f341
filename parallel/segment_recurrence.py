"""Recurrent computations over packed sequences with shared prompts: short causal convolution, gated delta rule, and Mamba-2.

A recurrence passes a state from token to token. A pack consists of segments (parallel.packing). With shared prompts, a prompt
is a segment, and its responses are children of this segment; otherwise, each sequence is one segment. The first token of a
segment continues from the last token of the parent segment. So all responses to a shared prompt start from the same state, and
the prompt is computed once. Both recurrences compute chunks of CHUNK tokens in parallel: the gated delta rule as in Yang et
al., 2024, "Gated Delta Networks", arXiv:2412.06464, section 3.3, and Mamba-2 as in Dao and Gu, 2024, arXiv:2405.21060, section
6. The chunks of a pack form a forest: each chunk has one predecessor, or none at the start of a sequence. A level of the forest
consists of all chunks that have the same number of chunks before them in their sequence. The chunks of a level are computed in
one batch. This module does not communicate.

In shapes, S is the number of real tokens of the pack, N is the number of chunks, C is CHUNK, n is the number of heads, g is the
number of groups of heads, and k and v are the numbers of channels of a key and of a value.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from parallel.attention import gather_rows
from parallel.device import copy_to_device
from parallel.packing import PackedSequences, PackLayout

CHUNK = 64  # number of tokens
_NORM_EPS = 1e-6  # of the L2 norms of queries and keys; the same in transformers and flash-linear-attention

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class RecurrencePlan:
    """Order in which the tokens of a pack are computed. All tensors are int64 indices on the device."""

    num_tokens: int  # S
    num_rows: int  # L: tokens on this rank, including padding
    # [S] row of each real token in the concatenated rows of all context-parallel ranks; None: the first S rows, in order
    row_of_token: Tensor | None
    # [L] index of the real token in each row of this rank, S for padding; None: the first S rows are the tokens, in order
    token_of_row: Tensor | None
    # inputs of the convolution: for each segment, the indices of the `kernel - 1` tokens before it in its sequence, then those of
    # its own tokens. S: no token. `kernel`: width of the convolution, an argument of RecurrencePlan.of
    convolution_inputs: Tensor
    convolved: Tensor | None  # [S] index of each token among the outputs of the convolution; None: in order
    slots: Tensor  # [S] index of each token among the N*C slots of the chunks
    tokens: Tensor  # [N*C] index of the token in each slot; S: no token
    widths: tuple[int, ...]  # number of chunks of each level
    # for each level, index of each chunk's predecessor in the level before; None: the predecessors are in order
    previous: tuple[Tensor | None, ...]
    chunk: int = CHUNK

    @classmethod
    def of(cls, pack: PackedSequences, kernel: int, device: torch.device, chunk: int = CHUNK) -> "RecurrencePlan":
        """Return the plan for a pack. `kernel`: number of tokens that the convolution reads for one token."""
        layout = pack.layout
        assert layout is not None, "parallel.packing.pack has not made this pack"
        lengths = layout.lengths
        segment = np.repeat(np.arange(len(lengths)), lengths)  # [S]
        place = np.arange(len(segment)) - layout.starts[segment]
        first, positions, widths, previous = _chunk_forest(layout, chunk)
        convolved = np.arange(len(segment)) + (kernel - 1) * segment
        is_split = layout.cp_size > 1
        token_of_row = np.where(pack.token_index < 0, len(segment), pack.token_index)
        slots = positions[first[segment] + place // chunk] * chunk + place % chunk
        tokens = np.full(len(positions) * chunk, len(segment), np.int64)
        tokens[slots] = np.arange(len(segment))
        return cls(
            num_tokens=len(segment),
            num_rows=len(pack.token_index),
            row_of_token=copy_to_device(layout.global_indices(), device) if is_split else None,
            token_of_row=copy_to_device(token_of_row, device) if is_split else None,
            convolution_inputs=copy_to_device(_convolution_inputs(layout, kernel - 1), device),
            convolved=copy_to_device(convolved, device) if len(lengths) > 1 else None,
            slots=copy_to_device(slots, device),
            tokens=copy_to_device(tokens, device),
            widths=tuple(widths.tolist()),
            previous=tuple(None if rows is None else copy_to_device(rows, device) for rows in previous),
            chunk=chunk,
        )

    def select_tokens(self, x: Tensor) -> Tensor:
        """Return the rows [S, ...] of the real tokens. `x`: the concatenated rows of all context-parallel ranks."""
        return x[: self.num_tokens] if self.row_of_token is None else x.index_select(0, self.row_of_token)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return the rows [L, ...] of this rank. `x` [S, ...] has all real tokens. Padding is zero."""
        if self.token_of_row is not None:
            return _select_or_zero(x, self.token_of_row)
        missing = self.num_rows - self.num_tokens
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _select_or_zero(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows `index` of `x` [S, ...]. Row S is zero. `gather_rows` is an index_select without communication."""
    return gather_rows(torch.cat([x, x.new_zeros(1, *x.shape[1:])]), index)


def _convolution_inputs(layout: PackLayout, count: int) -> Ints:
    """Return, for each segment in turn, the indices of the `count` tokens before it in its sequence, and of its tokens."""
    none = np.full(count, layout.lengths.sum(), np.int64)
    parts = []
    for start, length, ancestors in zip(layout.starts, layout.lengths, layout.ancestors, strict=True):
        before = [np.arange(layout.starts[a], layout.starts[a] + layout.lengths[a]) for a in ancestors]
        last = np.concatenate([none, *before])
        parts += [last[len(last) - count :], np.arange(start, start + length)]
    return np.concatenate(parts)


def _chunk_forest(layout: PackLayout, chunk: int) -> tuple[Ints, Ints, Ints, list[Ints | None]]:
    """Order the chunks of all segments by level. Chunks are numbered through all segments, in the order of the segments.

    Returns the number of each segment's first chunk; the position of each chunk in the order by level; the count of chunks of
    each level; and the field `previous` of RecurrencePlan.
    """
    counts = -(-layout.lengths // chunk)
    first = np.cumsum(counts) - counts
    levels, predecessors = np.zeros(counts.sum(), np.int64), np.arange(counts.sum()) - 1
    for start, count, ancestors in zip(first, counts, layout.ancestors, strict=True):
        predecessors[start] = first[ancestors[-1]] + counts[ancestors[-1]] - 1 if ancestors else -1
        level = levels[predecessors[start]] + 1 if ancestors else 0
        levels[start : start + count] = level + np.arange(count)
    order = np.argsort(levels, kind="stable")
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    widths = np.bincount(levels)
    ends = np.cumsum(widths)
    previous: list[Ints | None] = [None]
    for level in range(1, len(widths)):
        rows = positions[predecessors[order[ends[level - 1] : ends[level]]]] - (ends[level - 1] - widths[level - 1])
        in_order = len(rows) == widths[level - 1] and (rows == np.arange(len(rows))).all()
        previous.append(None if in_order else rows)
    return first, positions, widths, previous


def causal_convolution(x: Tensor, weight: Tensor, plan: RecurrencePlan, bias: Tensor | None = None) -> Tensor:
    """Return the depthwise convolution [S, D] of `x` [S, D] with `weight` [D, 1, kernel] along each sequence, plus `bias` [D].

    D is the number of channels. The last element of a kernel is the factor of the token itself, and the element before it is the
    factor of the token before. The tokens before the start of a sequence count as zeros.
    """
    out = F.conv1d(_select_or_zero(x, plan.convolution_inputs).T[None], weight, bias, groups=len(weight))[0].T
    return out if plan.convolved is None else out.index_select(0, plan.convolved)


def gated_delta_rule(
    query: Tensor,  # [S, n, k]
    key: Tensor,  # [S, n, k]
    value: Tensor,  # [S, n, v]
    log_decay: Tensor,  # [S, n] logarithm of the factor by which the state decays, at most 0
    beta: Tensor,  # [S, n] weight of the update, from 0 to 1
    plan: RecurrencePlan,
) -> Tensor:  # [S, n, v]
    """Return the outputs of the gated delta rule, computed in float32 or in a wider dtype.

    For each head, token t updates the state M [k, v] of its sequence and reads it (arXiv:2412.06464, equation 10):

        M_t = a M_(t-1) + b k_t (v_t - a M_(t-1)^T k_t)^T,    o_t = M_t^T q_t / sqrt(k)

    where a = exp(log_decay), b = beta, and q_t and k_t are divided by their L2 norms. M is zero before the first token. The steps
    and their order are those of `torch_chunk_gated_delta_rule` in transformers.
    """
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value, log_decay, beta = (x.to(wide) for x in (query, key, value, log_decay, beta))
    query, key = _l2_norm(query) * query.size(-1) ** -0.5, _l2_norm(key)
    beta = beta[..., None]
    query, key, weighted_key, weighted_value = (_chunks(x, plan) for x in (query, key, key * beta, value * beta))
    decay = _chunks(log_decay[..., None], plan)[..., 0].cumsum(-1)  # [N, n, C] logarithms, from the start of the chunk
    out = _scan(query, key, weighted_key, weighted_value, decay, plan)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, plan.slots).to(dtype)


def _scan(
    query: Tensor,  # [N, n, C, k]
    key: Tensor,  # [N, n, C, k]
    weighted_key: Tensor,  # [N, n, C, k] times beta
    weighted_value: Tensor,  # [N, n, C, v] times beta
    decay: Tensor,  # [N, n, C] logarithm of the decay from the start of the chunk to each token
    plan: RecurrencePlan,
) -> Tensor:  # [N, n, C, v]
    """Compute the outputs inside each chunk, and pass the states from level to level."""
    pairs = _decay_of_pairs(decay)
    system = (weighted_key @ key.transpose(-1, -2)) * pairs
    scores = (query @ key.transpose(-1, -2)) * pairs
    from_start = decay.exp()[..., None]
    right = torch.cat([weighted_value, weighted_key * from_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    widths = list(plan.widths)
    # For each level: if M is the state before a chunk, the chunk writes values - corrections @ M.
    values, corrections = (x.split(widths) for x in solved.split([weighted_value.size(-1), key.size(-1)], dim=-1))
    reads = (query * from_start).split(widths)
    writes = (key * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2).split(widths)
    factors, scores_of = decay[..., -1].exp()[..., None, None].split(widths), scores.split(widths)
    state = solved.new_zeros(widths[0], query.size(1), query.size(-1), weighted_value.size(-1))

    def read(level: int, state: Tensor) -> tuple[Tensor, Tensor]:
        written = values[level] - corrections[level] @ state
        return reads[level] @ state + scores_of[level] @ written, written

    def advance(level: int, state: Tensor, written: Tensor) -> Tensor:
        return state * factors[level] + writes[level] @ written

    return _over_levels(plan, state, read, advance)


def _decay_of_pairs(decay: Tensor) -> Tensor:
    """Return factors [..., C, C]. Entry [i, j] is the decay of a state from token j to token i, and 0 if j > i.

    `decay` [..., C]: logarithm of the decay from the start of the chunk to each token.
    """
    ones = torch.ones(decay.size(-1), decay.size(-1), dtype=torch.bool, device=decay.device)
    later, same = ones.triu(1), ones.triu() & ones.tril()
    distance = decay[..., :, None] - decay[..., None, :]
    # The distance of a token from itself is the constant 0, so no gradient flows from it to `decay`. Otherwise, each entry of
    # `decay` would get two large gradients of opposite sign. They cancel, but under strong decay their round-off would be
    # larger than the true gradient.
    return distance.masked_fill(later, float("-inf")).masked_fill(same, 0.0).exp()


def _over_levels(
    plan: RecurrencePlan,
    state: Tensor,  # states before the chunks of the first level
    read: Callable[[int, Tensor], tuple[Tensor, Tensor]],
    advance: Callable[[int, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the outputs of all chunks. The states after the chunks of a level are passed to their successors.

    `read(level, state)` returns the outputs of a level and what its chunks write. `advance(level, state, written)` returns the
    states after the chunks of a level.
    """
    written, outputs = state, []
    for level, rows in enumerate(plan.previous):
        if level:
            state = advance(level - 1, state, written)
            state = state if rows is None else state.index_select(0, rows)
        out, written = read(level, state)
        outputs.append(out)
    return torch.cat(outputs)


def selective_scan(
    query: Tensor,  # [S, g, k] one query for all heads of a group
    key: Tensor,  # [S, g, k] one key for all heads of a group
    value: Tensor,  # [S, n, v]
    log_decay: Tensor,  # [S, n] logarithm of the factor by which the state decays, at most 0
    step: Tensor,  # [S, n] weight of the update
    plan: RecurrencePlan,
) -> Tensor:  # [S, n, v]
    """Return the outputs of the recurrence of Mamba-2, computed in float32 or in a wider dtype.

    For each head, token t updates the state M [k, v] of its sequence and reads it (arXiv:2405.21060, equation 1, whose B, C and x
    are key, query and value):

        M_t = a M_(t-1) + d k_t v_t^T,    o_t = M_t^T q_t

    where a = exp(log_decay) and d = step. M is zero before the first token. The n heads form g groups of consecutive heads. In a
    chunk, the outputs are computed as attention with decays, and the states are passed from chunk to chunk (section 6 of the
    paper). The heads of a group are columns of one matrix product, so no query or key is copied for each head.
    """
    dtype, wide = value.dtype, torch.promote_types(value.dtype, torch.float32)
    query, key, value, log_decay, step = (x.to(wide) for x in (query, key, value, log_decay, step))
    groups = query.size(1)
    by_head = value.size(1) // groups, value.size(2)  # heads of a group, channels
    query, key = _chunks(query, plan), _chunks(key, plan)  # [N, g, C, k]
    values = _chunks((value * step[..., None]).view(len(value), groups, -1), plan)  # [N, g, C, heads * v]
    decay = _chunks(log_decay.view(len(log_decay), groups, -1), plan).cumsum(-2)  # [N, g, C, heads] logarithms
    pairs = _decay_of_pairs(decay.transpose(-1, -2))  # [N, g, heads, C, C]
    scores = (query @ key.transpose(-1, -2)).unsqueeze(2) * pairs
    inside = (scores @ values.unflatten(-1, by_head).transpose(2, 3)).transpose(2, 3)  # [N, g, C, heads, v]
    to_end = (decay[..., -1:, :] - decay).exp().unsqueeze(-1)
    updates = key.transpose(-1, -2) @ (values.unflatten(-1, by_head) * to_end).flatten(-2)  # [N, g, k, heads * v]
    widths = list(plan.widths)
    queries_of, inside_of, updates_of = query.split(widths), inside.split(widths), updates.split(widths)
    from_start = decay.exp().unsqueeze(-1).split(widths)  # for each level: [width, g, C, heads, 1]

    def read(level: int, state: Tensor) -> tuple[Tensor, Tensor]:
        before = (queries_of[level] @ state).unflatten(-1, by_head)
        return before * from_start[level] + inside_of[level], updates_of[level]

    def advance(level: int, state: Tensor, update: Tensor) -> Tensor:
        return (state.unflatten(-1, by_head) * from_start[level][..., -1:, :, :]).flatten(-2) + update

    state = updates.new_zeros(widths[0], *updates.shape[1:])
    out = _over_levels(plan, state, read, advance)  # [N, g, C, heads, v]
    return out.transpose(1, 2).flatten(0, 1).index_select(0, plan.slots).flatten(1, 2).to(dtype)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _chunks(x: Tensor, plan: RecurrencePlan) -> Tensor:
    """Arrange tokens [S, n, d] in chunks [N, n, C, d]. A chunk that is not full ends with zeros, which change no state."""
    return _select_or_zero(x, plan.tokens).unflatten(0, (-1, plan.chunk)).transpose(1, 2).contiguous()
