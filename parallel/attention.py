"""Core attention over packed sequences for machines without Transformer Engine: exact, and no padding.

Consecutive sequences of equal length form one batched call, so a pack sorted by length costs as many calls as it
has distinct lengths. Shapes: t tokens of the pack, n query heads, g key/value heads, d channels of a head (per rank).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.packing import PackedSequences


class PackedAttention(torch.nn.Module):
    """Causal softmax(q k^T) v inside each sequence of a pack; stands where Megatron expects a core attention."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **unused):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError("PackedAttention has no context parallelism yet; use context_parallel_size=1.")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout

    def forward(
        self,
        query: Tensor,  # [t, n, d]
        key: Tensor,  # [t, g, d]
        value: Tensor,  # [t, g, d]
        attention_mask: Tensor | None = None,
        attn_mask_type=None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # [t, n*d]
        """Attend within each sequence; Megatron's mask and bias are never used with packs."""
        assert isinstance(packed_seq_params, PackedSequences), f"a pack is needed, got {type(packed_seq_params)}"
        runs = packed_seq_params.runs
        repeat = query.size(1) // key.size(1)
        if repeat > 1:  # torch's CPU flash kernel has no grouped-query form
            key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
        pieces = [x.split([count * length for count, length in runs]) for x in (query, key, value)]
        out = [self._run(q, k, v, *run) for q, k, v, run in zip(*pieces, runs, strict=True)]
        return torch.cat(out)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, count: int, length: int) -> Tensor:
        q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, dropout_p=dropout)
        return out.transpose(1, 2).reshape(count * length, -1)
