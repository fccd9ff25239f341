"""Attention for SGLang on a CPU. One call of `scaled_dot_product_attention` (SDPA) serves many sequences.

SGLang's `torch_native` backend calls SDPA once per sequence and layer. With hundreds of short sequences, the Python loop costs
far more than the arithmetic. Here, all layers of a forward pass share one *plan*, which is a list of *tiles*. A tile is a set
of *rows* of similar size. A row is up to `MAX_QUERIES_PER_ROW` consecutive query tokens of one sequence. For each tile, one
gather collects the keys and values, and one SDPA call with a mask computes the attention. The rows of a tile are padded to the
same number of query tokens, Q, and of keys, L.

Shapes: T query tokens of the batch, H query heads, K key/value heads, D head size, N rows of a tile, Q query tokens per row,
L keys per row. A suffix gives the shape of a variable: `slots_NL` has the shape [N, L].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mrl.rollout.cpu import ATTENTION_BACKEND

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_QUERIES_PER_ROW = 512
"""Largest number of query tokens in one row. A long prompt is cut into rows, because a row only needs the keys up to its last
query token, and because a shorter row has a smaller mask."""

MAX_TILE_KEYS = 1 << 16
"""Largest number of keys (N * L) that are gathered for one tile of several rows. With K * D = 64 in float32, keys and values take
32 MiB."""

MAX_TILE_SCORES = 1 << 23
"""Largest number of attention scores (N * Q * L) of one tile. The mask has one element per score: 32 MiB in float32."""

MAX_PADDING_FACTOR = 2.0
"""Limit of padding: scores of a tile <= MAX_PADDING_FACTOR * (its scores without padding) + FREE_PADDING_SCORES."""

FREE_PADDING_SCORES = 1 << 13
"""This many padding scores are always allowed, because they cost less time than one more SDPA call."""


class QueryRow(NamedTuple):
    """Consecutive query tokens of one sequence, with the keys up to the last of these tokens."""

    sequence: int  # index of the sequence in the batch
    first_token: int  # index of the row's first query token among the T query tokens of the batch
    num_queries: int
    num_keys: int  # number of keys that the last query token sees: its position + 1


@dataclass
class Tile:
    """Rows that share one SDPA call. A tile has N * Q entries; each entry is a query token of the batch or padding.

    Padding repeats the last query token and the last key of a row. Therefore each padding entry has a valid token index, and a
    tile reads only slots of the KV cache that SGLang has written.
    """

    num_rows: int  # N
    queries_per_row: int  # Q
    # [N * Q] index of each entry's query token among the T tokens of the batch. None: entry i is token i, for all T tokens.
    entry_tokens: Tensor | None
    real_entries: Tensor | None  # indices of the entries that are not padding; None if no entry is padding
    # Like `entry_tokens`, but only for the real entries. None: real entry i is token i, for all T tokens.
    real_entry_tokens: Tensor | None
    slots_NL: Tensor  # index of each key in SGLang's KV cache
    query_positions_NQ: Tensor  # position of each query token in its sequence
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # window -> mask that `mask` computed

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive causal mask [N, 1, Q, L]. With `window`, a query sees its own key and `window` earlier keys."""
        if window not in self.masks:
            keys_L, queries_NQ1 = torch.arange(self.slots_NL.size(1)), self.query_positions_NQ[:, :, None]
            hidden = keys_L > queries_NQ1
            if window is not None:
                hidden |= keys_L < queries_NQ1 - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.masks[window] = mask[:, None]
        return self.masks[window]


def split_rows(query_lens: Sequence[int], key_lens: Sequence[int]) -> list[QueryRow]:
    """Cut the query tokens of each sequence into rows.

    Sequence i has `key_lens[i]` tokens; its last `query_lens[i]` tokens are queries.
    """
    rows, first = [], 0
    for i, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        max_count = max(1, min(MAX_QUERIES_PER_ROW, MAX_TILE_SCORES // keys))
        for start in range(0, queries, max_count):
            count = min(max_count, queries - start)
            rows.append(QueryRow(i, first + start, num_queries=count, num_keys=keys - queries + start + count))
        first += queries
    return rows


def fits_tile(num_rows: int, widest_Q: int, widest_L: int, needed_scores: int) -> bool:
    """Return whether rows may share a tile under the limits of padding and memory.

    `widest_Q`: largest number of query tokens of a row. `widest_L`: largest number of keys of a row. `needed_scores`: number of
    scores without padding.
    """
    scores = num_rows * widest_Q * widest_L
    return (
        scores <= MAX_PADDING_FACTOR * needed_scores + FREE_PADDING_SCORES
        and scores <= MAX_TILE_SCORES
        and num_rows * widest_L <= MAX_TILE_KEYS
    )


def group_rows(rows: list[QueryRow]) -> list[list[QueryRow]]:
    """Return the rows of each tile. Rows of similar size share a tile. A row that cannot share a tile has its own tile."""
    groups: list[list[QueryRow]] = []
    widest_Q = widest_L = needed = 0
    for row in sorted(rows, key=lambda r: (r.num_queries.bit_length(), r.num_keys)):
        widest_Q, widest_L = max(widest_Q, row.num_queries), max(widest_L, row.num_keys)
        needed += row.num_queries * row.num_keys
        if not groups or not fits_tile(len(groups[-1]) + 1, widest_Q, widest_L, needed):
            groups.append([])
            widest_Q, widest_L, needed = row.num_queries, row.num_keys, row.num_queries * row.num_keys
        groups[-1].append(row)
    return groups


def build_tile(rows_N4: Tensor, slots: Tensor, req_pool_indices: Tensor, num_tokens: int) -> Tile:
    """Make the index tensors of one tile.

    The columns of rows_N4 are the fields of QueryRow. slots: [requests, context], the index of each token in the KV cache.
    req_pool_indices: [sequences], for each sequence the index of its request in `slots`. num_tokens: T.
    """
    sequence, first, num_queries, num_keys = rows_N4.unbind(1)
    widest_Q = int(num_queries.max())
    query_NQ = torch.arange(widest_Q)
    is_real_NQ = query_NQ < num_queries[:, None]
    query_NQ = query_NQ.minimum(num_queries[:, None] - 1)
    entry_tokens = (first[:, None] + query_NQ).view(-1)
    real_entries = None if is_real_NQ.all() else is_real_NQ.view(-1).nonzero().view(-1)
    real_tokens = entry_tokens if real_entries is None else entry_tokens[real_entries]
    in_order = real_tokens.numel() == num_tokens and bool((real_tokens == torch.arange(num_tokens)).all())
    position_NL = torch.arange(int(num_keys.max())).minimum(num_keys[:, None] - 1)
    return Tile(
        num_rows=len(rows_N4),
        queries_per_row=widest_Q,
        entry_tokens=None if in_order and real_entries is None else entry_tokens,
        real_entries=real_entries,
        real_entry_tokens=None if in_order else real_tokens,
        slots_NL=slots[req_pool_indices[sequence, None], position_NL].long(),
        query_positions_NQ=(num_keys - num_queries)[:, None] + query_NQ,
    )


def make_plan(query_lens: Tensor, key_lens: Tensor, slots: Tensor, req_pool_indices: Tensor) -> list[Tile]:
    """Return the tiles of one forward pass. Sequence i has `key_lens[i]` tokens; its last `query_lens[i]` tokens are queries.

    query_lens, key_lens, req_pool_indices: [sequences], int64. slots: [requests, context]. See `build_tile` for the last two.
    """
    ends = query_lens.cumsum(0)
    num_tokens, needed = int(ends[-1]), int((query_lens * key_lens).sum())
    widest_Q, widest_L = int(query_lens.max()), int(key_lens.max())
    # In the usual case, each sequence is one row and one tile holds all rows. No Python loop is needed.
    if widest_Q <= MAX_QUERIES_PER_ROW and fits_tile(len(query_lens), widest_Q, widest_L, needed):
        rows_N4 = torch.stack([torch.arange(len(query_lens)), ends - query_lens, query_lens, key_lens], 1)
        groups = [rows_N4]
    else:
        rows = split_rows(query_lens.tolist(), key_lens.tolist())
        groups = [torch.tensor(group) for group in group_rows(rows)]
    return [build_tile(rows_N4, slots, req_pool_indices, num_tokens) for rows_N4 in groups]


def run_tile(
    tile: Tile,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scaling: float | None,
    window: int | None,
) -> None:
    """Compute the attention of the tile's query tokens and write it to `output`.

    query, output: [T, H, D]. k_cache, v_cache: [slots, K, D]. scaling: factor of the scores; None: 1 / sqrt(D). window: see
    `Tile.mask`.
    """
    N, Q, H, K = tile.num_rows, tile.queries_per_row, query.size(1), k_cache.size(1)
    keys, values = (_gather(cache, tile.slots_NL, query.dtype) for cache in (k_cache, v_cache))
    picked = query if tile.entry_tokens is None else query.index_select(0, tile.entry_tokens)
    mask = tile.mask(window, query.dtype)
    if Q == 1:  # the query heads that share a key head become the queries of this head, so that keys are not repeated
        picked = picked.reshape(N, K, H // K, -1)
        result = scaled_dot_product_attention(picked, keys, values, attn_mask=mask, scale=scaling)
    else:
        picked = picked.reshape(N, Q, H, -1).transpose(1, 2)
        result = scaled_dot_product_attention(
            picked, keys, values, attn_mask=mask, scale=scaling, enable_gqa=H != K
        ).transpose(1, 2)
    result = result.reshape(N * Q, H, -1)
    if tile.real_entries is not None:
        result = result.index_select(0, tile.real_entries)
    if tile.real_entry_tokens is None:
        output.copy_(result)
    else:
        output.index_copy_(0, tile.real_entry_tokens, result)


def _gather(cache: Tensor, slots_NL: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values of a tile, [N, K, L, D], from a cache [slots, K, D]."""
    N, L = slots_NL.shape
    picked = cache.flatten(1).index_select(0, slots_NL.view(-1)).to(dtype)
    return picked.view(N, L, *cache.shape[1:]).transpose(1, 2)


class BatchedSdpaBackend(TorchNativeAttnBackend):
    """SGLang's `torch_native` backend, with causal self-attention computed tile by tile. Everything else is SGLang's code."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
        # Plan of the current forward pass. If it is None, SGLang's code computes the attention.
        self.plan: list[Tile] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.plan = None
        if forward_batch.encoder_lens is not None or self.use_sliding_window_kv_pool:
            return
        key_lens = forward_batch.seq_lens.long()
        query_lens = (
            torch.ones_like(key_lens)
            if forward_batch.forward_mode.is_decode()
            else forward_batch.extend_seq_lens.long()
        )
        self.plan = make_plan(
            query_lens, key_lens, self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices.long()
        )

    def _run_sdpa_forward_decode(self, *tensors, **options) -> Tensor:
        return self._run(super()._run_sdpa_forward_decode, tensors, options)

    def _run_sdpa_forward_extend(self, *tensors, **options) -> Tensor:
        if not options["causal"]:
            return super()._run_sdpa_forward_extend(*tensors, **options)
        return self._run(super()._run_sdpa_forward_extend, tensors, options)

    def _run(self, fallback: Callable[..., Tensor], tensors: tuple, options: dict) -> Tensor:
        """Run the tiles of the plan. If there is no plan, run SGLang's method `fallback`.

        `tensors` and `options` are the positional and keyword arguments of `fallback` in sglang 0.5.23.
        """
        if self.plan is None or options["is_cross_attn"]:
            return fallback(*tensors, **options)
        query, output, k_cache, v_cache = tensors[:4]
        for tile in self.plan:
            run_tile(tile, query, output, k_cache, v_cache, options["scaling"], options["sliding_window_size"])
        return output


@register_attention_backend(ATTENTION_BACKEND)
def _create(model_runner: ModelRunner) -> BatchedSdpaBackend:
    return BatchedSdpaBackend(model_runner)
