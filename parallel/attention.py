"""Exact attention over packed sequences, with shared prompts and context parallelism.

Under context parallelism, every rank gathers all keys and values of the pack and computes the attention of its own queries. The
backward pass reduce-scatters the gradients of keys and values. In shapes, L is the number of tokens on this rank, n and g are the
numbers of query heads and key/value heads on this rank, and d is the number of channels per head.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel import groups
from parallel.packing import AttentionCall, PackedSequences


class PackedAttention(torch.nn.Module):
    """Megatron's core attention module for packs: softmax(scale * q k^T) v over the tokens that each token attends to."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale: float | None = None,
        pg_collection=None,
        **unused,
    ):
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout
        self.cp_group: ProcessGroup = groups.cp_group() if pg_collection is None else pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [L, n, d]
        key: Tensor,  # [L, g, d]
        value: Tensor,  # [L, g, d]
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # [L, n*d]
        """Compute the attention that `packed_seq_params` describes. Megatron's mask and bias arguments are not used."""
        assert isinstance(packed_seq_params, PackedSequences), (
            f"expected PackedSequences, got {type(packed_seq_params)}"
        )
        pack = packed_seq_params
        if self.cp_group.size() > 1:
            both = torch.cat([key, value], dim=-1)
            key, value = gather_from_sequence_parallel_region(both, True, self.cp_group).chunk(2, dim=-1)
        if pack.query_index is not None:
            query = query.index_select(0, pack.query_index)
        if pack.key_index is not None:
            key, value = key.index_select(0, pack.key_index), value.index_select(0, pack.key_index)
        dropout = self.dropout if self.training else 0.0
        attend = _attend_varlen if _supports_varlen(query) and not dropout else _attend_batched
        out = attend(query, key, value, pack.calls, self.scale, dropout).flatten(1)
        if pack.query_index is None:
            return out
        return torch.empty_like(out).index_copy(0, pack.query_index, out)


def _supports_varlen(query: Tensor) -> bool:
    """Whether torch's variable-length flash-attention kernel supports this tensor."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionCall, ...], scale: float, dropout: float
) -> Tensor:  # [L, n, d]
    """Run all calls in one flash-attention kernel. Its causal mask aligns last query and last key, as AttentionCall needs."""
    from torch.nn.attention.varlen import varlen_attn  # imports Triton

    def cumulative(sizes: list[int]) -> Tensor:
        return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)

    num_queries = [call.num_queries for call in calls for _ in range(call.count)]
    num_keys = [call.num_keys for call in calls for _ in range(call.count)]
    out = varlen_attn(
        query,
        key,
        value,
        cumulative(num_queries),
        cumulative(num_keys),
        max(num_queries),
        max(num_keys),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(out, Tensor), "no auxiliary output was requested"
    return out


def _attend_batched(
    query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionCall, ...], scale: float, dropout: float
) -> Tensor:  # [L, n, d]
    """Run one batched scaled_dot_product_attention for each AttentionCall. Works in any dtype on any device."""
    repeat = query.size(1) // key.size(1)
    if repeat > 1:  # torch's CPU flash kernel does not support grouped-query attention
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    queries = query.split([call.count * call.num_queries for call in calls])
    keys, values = (x.split([call.count * call.num_keys for call in calls]) for x in (key, value))
    out = [_attend_call(*parts, scale, dropout) for parts in zip(queries, keys, values, calls, strict=True)]
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_call(
    query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float, dropout: float
) -> Tensor:
    q, k, v = (x.view(call.count, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    square = call.num_queries == call.num_keys
    mask = None
    if not square and call.num_queries > 1:
        mask_rows = torch.ones(call.num_queries, call.num_keys, dtype=torch.bool, device=query.device)
        mask = mask_rows.tril(call.num_keys - call.num_queries)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=square, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
