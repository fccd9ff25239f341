"""Exact attention over packed sequences, with shared prompts and context parallelism.

Under context parallelism, every rank gathers all keys and values of the pack and computes the attention of its own queries. The
backward pass reduce-scatters the gradients of keys and values. In shapes, L is the number of tokens on this rank, n and g are the
numbers of query heads and key/value heads on this rank, and d is the number of channels per head.
"""

import logging
import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from parallel import groups
from parallel.device import has_cuda
from parallel.packing import AttentionCall, ChunkBounds, PackedSequences

logger = logging.getLogger(__name__)


class PackedAttention(torch.nn.Module):
    """Core attention of Megatron's layers, for packs: softmax(scale * q k^T) v for each token with the query q.

    k and v are the keys and values of the tokens to which the token attends. In a layer with a sliding window, these are only the
    last tokens. The keys of a chunk are all tokens of the sequence up to the end of the chunk, in order, also with shared prompts
    and with context parallelism. So a window is a band along the causal diagonal of the chunk.
    """

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
        # number of keys to which a token attends at most, itself included; None: no limit
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
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
            key, value = (gather_rows(rows, pack.key_index) for rows in (key, value))
        dropout = self.dropout if self.training else 0.0
        # FlashAttention-3 and 4 also replace the kernel of scaled_dot_product_attention, and they have no dropout. So a model
        # with dropout never activates them, not even when it is evaluated.
        if pack.chunks is not None and supports_varlen(query.device, query.dtype) and not self.dropout:
            out = _attend_varlen(query, key, value, pack.chunks, self.scale, self.window).flatten(1)
        else:
            out = attend_batched(query, key, value, pack.calls, self.scale, dropout, self.window).flatten(1)
        if pack.query_index is None:
            return out
        return torch.empty_like(out).index_copy(0, pack.query_index, out)


def supports_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length flash-attention kernel supports tensors of this device and dtype."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Return `rows.index_select(0, index)`. On a GPU, the backward pass sums 16-bit gradients of a repeated row in float32."""
    return _GatherRows.apply(rows, index, _gradient_sum_dtype(rows))


class _GatherRows(torch.autograd.Function):
    """Selects rows with `index_select`. If several chunks read a row, the backward pass sums its gradients in `sum_dtype`."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, sum_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows, ctx.sum_dtype = len(rows), sum_dtype
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        total = grad.new_zeros(ctx.num_rows, *grad.shape[1:], dtype=ctx.sum_dtype)
        return total.index_add_(0, index, grad.to(ctx.sum_dtype)).to(grad.dtype), None, None


def _gradient_sum_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype in which the gradients of shared keys and values are summed.

    On a GPU, 16-bit gradients are summed in float32, because the atomic additions of `index_add_` round every partial sum. The
    sum for a key of a shared prompt has up to G terms, one for each of the G responses.
    """
    return torch.promote_types(rows.dtype, torch.float32) if rows.is_cuda else rows.dtype


def flash_attention_versions(channels: int) -> list[int]:
    """Return the versions of FlashAttention that this process can use for keys with `channels` channels, the preferred first.

    torch contains FlashAttention-2. FlashAttention-3 is the package flash_attn_interface, for Hopper GPUs. FlashAttention-4 is
    the package flash-attn-4, for Blackwell GPUs of capability 10. It supports only some numbers of channels. torch could also use
    FlashAttention-4 on Hopper GPUs, but this has not been measured.
    """
    major = torch.cuda.get_device_capability()[0] if has_cuda() else 0
    versions = [2]
    if major == 10 and (channels <= 128 or channels == 256):
        package = find_spec("flash_attn")  # flash-attn 2 has this package, too, but without the folder cute
        folders = [] if package is None else package.submodule_search_locations or []
        versions += [4] * any(Path(folder, "cute").is_dir() for folder in folders)
    if major == 9 and find_spec("flash_attn_interface") is not None:
        versions.append(3)
    return versions[::-1]


@cache
def _varlen_kernel(channels: int) -> Callable[..., Any]:
    """Return torch's flash-attention kernel for sequences of variable length, and for keys with `channels` channels.

    By default, torch uses FlashAttention-2. This function makes torch use the first of `flash_attention_versions` that can be
    activated.
    """
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn  # not at the top of this file, because it imports Triton

    for version in flash_attention_versions(channels):
        if version == 2:
            break
        try:
            activate_flash_attention_impl(f"FA{version}")
            break
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            logger.warning("FlashAttention-%d is installed but cannot be used: %s", version, error)
    return varlen_attn


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, chunks: ChunkBounds, scale: float, window: int | None
) -> Tensor:  # [L, n, channels of value]
    """Compute the attention of all chunks in one call of the flash-attention kernel.

    The causal mask of the kernel aligns the last query of each chunk with the last key of the chunk. The kernel needs values with
    as many channels as keys. In latent attention, values have fewer channels, so they are padded with zeros.
    """
    width = value.size(2)
    if width != key.size(2):
        value = F.pad(value, (0, key.size(2) - width))
    out = _varlen_kernel(key.size(2))(
        query,
        key,
        value,
        chunks.queries,
        chunks.keys,
        chunks.max_queries,
        chunks.max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(out, Tensor), "no auxiliary output was requested"
    return out[..., :width]


def attend_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: tuple[AttentionCall, ...],
    scale: float,
    dropout: float,
    window: int | None = None,
) -> Tensor:  # [L, n, d]
    """Run one batched scaled_dot_product_attention for each AttentionCall. Works in any dtype on any device.

    A query attends to the last `window` of its keys (None: to all).
    """
    repeat = query.size(1) // key.size(1)
    if repeat > 1:  # torch's CPU flash kernel does not support grouped-query attention
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    queries = query.split([call.count * call.num_queries for call in calls])
    keys, values = (x.split([call.count * call.num_keys for call in calls]) for x in (key, value))
    out = [_attend_call(*parts, scale, dropout, window) for parts in zip(queries, keys, values, calls, strict=True)]
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    q, k, v = (x.view(call.count, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    square = call.num_queries == call.num_keys
    has_window = window is not None and window < call.num_keys
    mask = None
    if has_window or (not square and call.num_queries > 1):
        own_key = call.num_keys - call.num_queries  # index of the first query's own key
        mask = torch.ones(call.num_queries, call.num_keys, dtype=torch.bool, device=query.device).tril(own_key)
        if window is not None:
            mask = mask.triu(own_key - window + 1)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=square and mask is None, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
