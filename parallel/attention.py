"""Core attention over packs: exact, no padding, any lengths, shared prompts and context parallelism.

Under context parallelism every rank gathers all keys and values of the pack (backward: reduce-scatter) and computes the
rows of its own queries. Shapes: L tokens on this rank, n query heads, g key/value heads, d channels of a head (per rank).
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
    """softmax(q k^T) v over what each token may see of its pack; stands where Megatron expects a core attention."""

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
        """Attend as the pack says; Megatron's mask and bias are never used with packs."""
        assert isinstance(packed_seq_params, PackedSequences), f"a pack is needed, got {type(packed_seq_params)}"
        pack = packed_seq_params
        if self.cp_group.size() > 1:
            both = torch.cat([key, value], dim=-1)
            key, value = gather_from_sequence_parallel_region(both, True, self.cp_group).chunk(2, dim=-1)
        if pack.query_index is not None:
            query = query.index_select(0, pack.query_index)
        if pack.key_index is not None:
            key, value = key.index_select(0, pack.key_index), value.index_select(0, pack.key_index)
        dropout = self.dropout if self.training else 0.0
        attend = _varlen if _has_varlen(query) and not dropout else _batched
        out = attend(query, key, value, pack.calls, self.scale, dropout).flatten(1)
        if pack.query_index is None:
            return out
        return torch.empty_like(out).index_copy(0, pack.query_index, out)


def _has_varlen(query: Tensor) -> bool:
    """Whether torch's variable-length flash kernel takes this tensor."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionCall, ...], scale: float, dropout: float
) -> Tensor:  # [L, n, d]
    """One flash-attention kernel for all calls; its causal mask is aligned at the last key, as ours."""
    from torch.nn.attention.varlen import varlen_attn  # imports Triton

    def sums(sizes: list[int]) -> Tensor:
        return torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)

    num_queries = [call.num_queries for call in calls for _ in range(call.count)]
    num_keys = [call.num_keys for call in calls for _ in range(call.count)]
    out = varlen_attn(
        query,
        key,
        value,
        sums(num_queries),
        sums(num_keys),
        max(num_queries),
        max(num_keys),
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(out, Tensor), "no auxiliary output was asked for"
    return out


def _batched(
    query: Tensor, key: Tensor, value: Tensor, calls: tuple[AttentionCall, ...], scale: float, dropout: float
) -> Tensor:  # [L, n, d]
    """One batched call per shape: exact in any dtype on any device."""
    repeat = query.size(1) // key.size(1)
    if repeat > 1:  # torch's CPU flash kernel has no grouped-query form
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    queries = query.split([call.count * call.num_queries for call in calls])
    keys, values = (x.split([call.count * call.num_keys for call in calls]) for x in (key, value))
    out = [_one(*parts, scale, dropout) for parts in zip(queries, keys, values, calls, strict=True)]
    return out[0] if len(out) == 1 else torch.cat(out)


def _one(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, scale: float, dropout: float) -> Tensor:
    q, k, v = (x.view(call.count, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    square = call.num_queries == call.num_keys
    mask = None
    if not square and call.num_queries > 1:
        seen = torch.ones(call.num_queries, call.num_keys, dtype=torch.bool, device=query.device)
        mask = seen.tril(call.num_keys - call.num_queries)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=square, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
