"""Attention for SGLang on a CPU: many sequences per SDPA call.

SGLang's `torch_native` backend calls `scaled_dot_product_attention` once per sequence and layer. With hundreds of short
sequences, the Python loop costs far more than the arithmetic. Here, all layers of a forward pass share one *plan*: queries
are cut into rows (one sequence, up to `MAX_QUERIES_PER_ROW` consecutive query tokens), and rows of similar size are grouped
into *tiles*. A tile is one gather of keys and values and one SDPA call with a mask. Its rows are padded to the same number of
query tokens, so it has N * Q places for query tokens.

Shapes: T query tokens, H query heads, K key/value heads, D head size, N rows of a tile, Q query tokens per row,
L keys per row.
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
"""Limit of query tokens in one row. It bounds the mask of a long prompt, and most keys after a query token are not computed."""

MAX_TILE_KEYS = 1 << 16
"""Limit of keys gathered for one tile (64 Ki tokens: 32 MiB of float32 keys and values per 64 elements of K * D)."""

MAX_TILE_SCORES = 1 << 23
"""Limit of mask elements of one tile (float32: 32 MiB)."""

MAX_PADDING_FACTOR = 2.0
"""The scores of a tile, padding included, are at most this multiple of the needed scores, plus SLACK_SCORES."""

SLACK_SCORES = 1 << 13
"""Number of padding scores that cost less than one more SDPA call."""


class QueryRow(NamedTuple):
    """Consecutive query tokens of one sequence and the keys that the last of them sees."""

    sequence: int
    first_token: int  # index of the first query token in the batch's flat queries
    num_queries: int
    num_keys: int  # keys visible to the last query: its position + 1


@dataclass
class Tile:
    """Rows that share one SDPA call. Padding repeats the last valid query and key of a row, so its scores are finite."""

    num_rows: int
    queries_per_row: int
    tokens: Tensor | None  # [N * Q] query token of each place; None if the places are exactly the tokens of the batch
    kept_places: Tensor | None  # places that are not padding; None if none is padding
    kept_tokens: Tensor | None  # the query token of each kept place
    slots_NL: Tensor
    query_positions_NQ: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive causal mask [N, 1, Q, L]; with `window`, a query sees only that many keys before itself."""
        if window not in self.masks:
            keys_L, queries_NQ1 = torch.arange(self.slots_NL.size(1)), self.query_positions_NQ[:, :, None]
            hidden = keys_L > queries_NQ1
            if window is not None:
                hidden |= keys_L < queries_NQ1 - window
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self.masks[window] = mask[:, None]
        return self.masks[window]


def split_rows(query_lens: Sequence[int], key_lens: Sequence[int]) -> list[QueryRow]:
    """Cut each sequence's queries (its last `query_lens[i]` of `key_lens[i]` tokens) into rows."""
    rows, first = [], 0
    for i, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        step = max(1, min(MAX_QUERIES_PER_ROW, MAX_TILE_SCORES // keys))
        for start in range(0, queries, step):
            count = min(step, queries - start)
            rows.append(QueryRow(i, first + start, count, keys - queries + start + count))
        first += queries
    return rows


def fits_tile(num_rows: int, widest_Q: int, widest_L: int, needed_scores: int) -> bool:
    """Return whether rows with these maxima may share a tile under the limits of padding and memory."""
    scores = num_rows * widest_Q * widest_L
    return (
        scores <= MAX_PADDING_FACTOR * needed_scores + SLACK_SCORES
        and scores <= MAX_TILE_SCORES
        and num_rows * widest_L <= MAX_TILE_KEYS
    )


def group_rows(rows: list[QueryRow]) -> list[list[QueryRow]]:
    """Group rows of similar size into tiles, longest sequences last. A single row always makes a tile."""
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
    """Make the index tensors of one tile. rows_N4: columns as in `QueryRow`; slots: [requests, context] slot of each token."""
    sequence, first, num_queries, num_keys = rows_N4.unbind(1)
    widest_Q = int(num_queries.max())
    query_NQ = torch.arange(widest_Q)
    kept_NQ = query_NQ < num_queries[:, None]
    query_NQ = query_NQ.minimum(num_queries[:, None] - 1)
    tokens = (first[:, None] + query_NQ).view(-1)
    places = None if kept_NQ.all() else kept_NQ.view(-1).nonzero().view(-1)
    kept = tokens if places is None else tokens[places]
    in_order = kept.numel() == num_tokens and bool((kept == torch.arange(num_tokens)).all())
    position_NL = torch.arange(int(num_keys.max())).minimum(num_keys[:, None] - 1)
    return Tile(
        num_rows=len(rows_N4),
        queries_per_row=widest_Q,
        tokens=None if in_order and places is None else tokens,
        kept_places=places,
        kept_tokens=None if in_order else kept,
        slots_NL=slots[req_pool_indices[sequence, None], position_NL].long(),
        query_positions_NQ=(num_keys - num_queries)[:, None] + query_NQ,
    )


def make_plan(query_lens: Tensor, key_lens: Tensor, slots: Tensor, req_pool_indices: Tensor) -> list[Tile]:
    """Make the tiles of one forward pass over sequences whose last `query_lens[i]` of `key_lens[i]` tokens are queries.

    query_lens, key_lens, req_pool_indices: [sequences], int64. slots: [requests, context].
    """
    ends = query_lens.cumsum(0)
    num_tokens, needed = int(ends[-1]), int((query_lens * key_lens).sum())
    widest_Q, widest_L = int(query_lens.max()), int(key_lens.max())
    if widest_Q <= MAX_QUERIES_PER_ROW and fits_tile(
        len(query_lens), widest_Q, widest_L, needed
    ):  # usual case: no loop
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

    query, output: [T, H, D]; k_cache, v_cache: [slots, K, D].
    """
    N, Q, H, K = tile.num_rows, tile.queries_per_row, query.size(1), k_cache.size(1)
    keys, values = (_gather(cache, tile.slots_NL, query.dtype) for cache in (k_cache, v_cache))
    picked = query if tile.tokens is None else query.index_select(0, tile.tokens)
    mask = tile.mask(window, query.dtype)
    if Q == 1:  # query heads of one key head become its queries, so keys are not repeated
        picked = picked.reshape(N, K, H // K, -1)
        result = scaled_dot_product_attention(picked, keys, values, attn_mask=mask, scale=scaling)
    else:
        picked = picked.reshape(N, Q, H, -1).transpose(1, 2)
        result = scaled_dot_product_attention(
            picked, keys, values, attn_mask=mask, scale=scaling, enable_gqa=H != K
        ).transpose(1, 2)
    result = result.reshape(N * Q, H, -1)
    if tile.kept_places is not None:
        result = result.index_select(0, tile.kept_places)
    if tile.kept_tokens is None:
        output.copy_(result)
    else:
        output.index_copy_(0, tile.kept_tokens, result)


def _gather(cache: Tensor, slots_NL: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather rows of a cache [slots, K, D] as [N, K, L, D]."""
    N, L = slots_NL.shape
    picked = cache.flatten(1).index_select(0, slots_NL.view(-1)).to(dtype)
    return picked.view(N, L, *cache.shape[1:]).transpose(1, 2)


class BatchedSdpaBackend(TorchNativeAttnBackend):
    """SGLang's `torch_native` backend, with causal self-attention computed tile by tile. Everything else is SGLang's code."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(model_runner)
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
        """Run the planned tiles, or `fallback` (SGLang's loop) if there is no plan. The arguments are those of sglang 0.5.23."""
        if self.plan is None or options["is_cross_attn"]:
            return fallback(*tensors, **options)
        query, output, k_cache, v_cache = tensors[:4]
        for tile in self.plan:
            run_tile(tile, query, output, k_cache, v_cache, options["scaling"], options["sliding_window_size"])
        return output


@register_attention_backend(ATTENTION_BACKEND)
def _create(model_runner: ModelRunner) -> BatchedSdpaBackend:
    return BatchedSdpaBackend(model_runner)
