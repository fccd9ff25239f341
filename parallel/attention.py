"""Exact attention over packed sequences, with shared prompts and context parallelism.

Under context parallelism, every rank gathers all keys and values of the pack and computes the attention of its own queries. The
backward pass reduce-scatters the gradients of keys and values. In shapes, L is the number of tokens on this rank, n and g are the
numbers of query heads and key/value heads on this rank, and d is the number of channels per head. K is the number of keys that
all attention calls of the pack (parallel.packing.AttentionCall) read, repetitions included. In `append_sinks`, L and K have
another meaning: the numbers of queries and keys of a single chunk.

An attention sink (gpt-oss) is an additional logit for each query head. It appears only in the denominator of the softmax: the
weight of key j is exp(s_j) / (exp(sink) + sum_k exp(s_k)), where s_k is the scaled product of the query and key k. Logits and
sums are in float32, even if sinks and keys are in 16 bits.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from parallel import groups
from parallel.device import has_cuda
from parallel.packing import AttentionCall, ChunkBounds, PackedSequences

logger = logging.getLogger(__name__)
_SINK_CHANNELS = 2  # channels that `append_sinks` adds


def sharded_along_dim_0(
    module: torch.nn.Module, tp_group: ProcessGroup, prefix: str, sharded_offsets: tuple, metadata: Any
) -> dict[str, Any]:
    """Return the parameters of `module` as Megatron's checkpoints need them: sharded along dim 0 over the ranks of `tp_group`.

    The other arguments are those of Megatron's `sharded_state_dict`.
    """
    state = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(
        state,
        prefix,
        dict.fromkeys(state, 0),
        sharded_offsets,
        tp_group=tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


@dataclass(frozen=True)
class SoftmaxSettings:
    """How attention turns products of queries and keys into weights."""

    scale: float  # factor of the products
    dropout: float = 0.0  # probability with which a weight becomes zero
    window: int | None = None  # a query attends only to its own key and the `window` - 1 keys before it; None: no limit
    sinks: Tensor | None = None  # [n] attention sinks; None: there are none


class PackedAttention(torch.nn.Module):
    """Core attention of Megatron's layers, for packs: softmax(scale * q k^T) v for each token with the query q.

    k and v are the keys and values of the tokens to which the token attends. In a layer with a sliding window, these are only
    the tokens of the window. A chunk consists of consecutive queries of one segment (parallel.packing). The keys of a chunk are
    those of all tokens of the sequence up to the chunk's last query, in order. This also holds with shared prompts and with
    context parallelism. So a window is a band along the causal diagonal of the chunk.

    With softmax_type="learnable", each query head has a sink. As in Megatron, the sinks are the parameter softmax_offset.
    """

    softmax_offset: torch.nn.Parameter | None

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
        # largest number of keys to which a token attends, its own key included; None: no limit
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        self.dropout = config.attention_dropout
        self.cp_group: ProcessGroup = groups.cp_group() if pg_collection is None else pg_collection.cp
        self.register_parameter("softmax_offset", None)
        if config.softmax_type == "learnable":
            self._add_sinks(config, groups.tp_group() if pg_collection is None else pg_collection.tp)

    def _add_sinks(self, config, tp_group: ProcessGroup) -> None:
        """Add the sinks of this rank's query heads [n], with uninitialized values."""
        heads = config.num_attention_heads // tp_group.size()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.tp_group = tp_group

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sinks, if there are any, as Megatron's checkpoints need them: sharded along dim 0."""
        if self.softmax_offset is None:
            return {}
        return sharded_along_dim_0(self, self.tp_group, prefix, sharded_offsets, metadata)

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
        return self.attend(query, key, value, packed_seq_params)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pack: PackedSequences,
        masks: Sequence[Tensor | None] | None = None,
    ) -> Tensor:  # [L, n*d]
        """Compute the attention over the keys that `masks` selects, one mask for each call of the pack: see `attend_batched`.

        If `masks` is None, a token attends to all keys that `pack` describes, within the window of the layer.
        """
        if self.cp_group.size() > 1:
            both = torch.cat([key, value], dim=-1)
            key, value = gather_from_sequence_parallel_region(both, True, self.cp_group).chunk(2, dim=-1)
        if pack.query_index is not None:
            query = query.index_select(0, pack.query_index)
        if pack.key_index is not None:
            key, value = (gather_rows(rows, pack.key_index) for rows in (key, value))
        dropout = self.dropout if self.training else 0.0
        softmax = SoftmaxSettings(self.scale, dropout, self.window, self.softmax_offset)
        # Activating FlashAttention-3 or 4 changes scaled_dot_product_attention, too. These versions have no dropout. So a model
        # with dropout never activates them, not even when it is evaluated.
        can_use_varlen = masks is None and supports_varlen(query.device, query.dtype) and not self.dropout
        if pack.chunks is not None and can_use_varlen:
            out = _attend_varlen(query, key, value, pack.chunks, softmax).flatten(1)
        else:
            out = attend_batched(query, key, value, pack.calls, softmax, masks).flatten(1)
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

    On a GPU, 16-bit gradients are summed in float32, because the atomic additions of `index_add_` round every partial sum. A key
    of a shared prompt is read by the chunks of the prompt and of all G responses, so its sum has at least G + 1 terms.
    """
    return torch.promote_types(rows.dtype, torch.float32) if rows.is_cuda else rows.dtype


def flash_attention_versions(channels: int) -> list[int]:
    """Return the versions of FlashAttention that this process can use for keys with `channels` channels, the preferred first.

    torch contains FlashAttention-2. FlashAttention-3 is the package flash_attn_interface, for Hopper GPUs. FlashAttention-4 is
    the package flash-attn-4, for Blackwell GPUs of compute capability 10. It supports only some numbers of channels. torch
    could also use FlashAttention-4 on Hopper GPUs, but this has not been measured.
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


def _varlen_kernel_pair() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the kernels of torch.nn.attention.varlen for the forward and the backward pass. `_varlen_kernel` registers them."""
    kernels = torch.ops.torch_attn
    return kernels._varlen_attn, kernels._varlen_attn_backward


class VarlenCall(NamedTuple):
    """Arguments of torch's flash-attention kernels for sequences of variable length, except query, key and value."""

    chunks: ChunkBounds
    scale: float
    window_size: tuple[int, int]  # number of keys before and after a query's own key; -1: no limit

    @property
    def is_causal(self) -> bool:
        """Whether the attention is causal without a window. torch's varlen_attn passes the same value to the kernel."""
        return self.window_size == (-1, 0)


class AttendVarlenWithSinks(torch.autograd.Function):
    """Attention with sinks over chunks of different lengths, with torch's flash-attention kernels on a GPU.

    The kernels do not support sinks. The forward kernel also returns the logarithm of the denominator without the sink. With this
    logarithm, the output is corrected afterwards. The backward kernel recomputes all weights from the logits and from this
    logarithm, and it needs sum(gradient * output) over the channels. If it gets the corrected logarithm and the corrected output,
    its gradients are those of attention with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [L, n, d]
        key: Tensor,  # [K, g, d]
        value: Tensor,  # [K, g, d]
        sinks: Tensor,  # [n]
        call: VarlenCall,
    ) -> Tensor:  # [L, n, d]
        """Return the output. `_varlen_kernel` must have been called, because it registers the kernels."""
        chunks, scale, window_size = call
        bounds = chunks.queries, chunks.keys, chunks.max_queries, chunks.max_keys, call.is_causal
        # The attention is causal or has a window, so torch never uses cuDNN's kernel, whose logarithms have another shape.
        # without_sink: logarithm of the denominator without the sink. state: state of the kernel's random number generator.
        kernel, _ = _varlen_kernel_pair()
        out, without_sink, state = kernel(query, key, value, *bounds, scale, list(window_size), True)
        log_sum = torch.logaddexp(without_sink, sinks.to(without_sink.dtype).unsqueeze(1))  # [n, L]
        out = (out * (without_sink - log_sum).exp().t().unsqueeze(-1)).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum, state, chunks.queries, chunks.keys)
        ctx.sizes = chunks.max_queries, chunks.max_keys, call.is_causal
        ctx.scale, ctx.window_size = scale, list(window_size)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and sinks."""
        query, key, value, sinks, out, log_sum, state, queries, keys = ctx.saved_tensors
        _, kernel = _varlen_kernel_pair()
        grads = kernel(
            *(grad.contiguous(), query, key, value, out, log_sum, queries, keys, *ctx.sizes),
            *(state, ctx.scale, ctx.window_size),
        )
        # Let w be the softmax weight of the sink. The sink has the value vector 0, so the gradient of the sink is the product
        # of -w and sum(gradient * output).
        wide = log_sum.dtype
        product = (grad.to(wide) * out.to(wide)).sum(-1).t()  # [n, L]
        sink_grad = -((sinks.to(wide).unsqueeze(1) - log_sum).exp() * product).sum(1)
        return (*grads, sink_grad.to(sinks.dtype), None)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    chunks: ChunkBounds,
    softmax: SoftmaxSettings,
) -> Tensor:  # [L, n, channels of value]
    """Compute the attention of all chunks in one call of the flash-attention kernel.

    The causal mask of the kernel aligns the last query of each chunk with the last key of the chunk. In the kernel, a value must
    have as many channels as a key. In latent attention, values have fewer channels, so they are padded with zeros.
    """
    width = value.size(2)
    if width != key.size(2):
        value = F.pad(value, (0, key.size(2) - width))
    kernel, window_size = _varlen_kernel(key.size(2)), (-1 if softmax.window is None else softmax.window - 1, 0)
    if softmax.sinks is not None:
        call = VarlenCall(chunks, softmax.scale, window_size)
        return AttendVarlenWithSinks.apply(query, key, value, softmax.sinks, call)[..., :width]
    out = kernel(
        query,
        key,
        value,
        chunks.queries,
        chunks.keys,
        chunks.max_queries,
        chunks.max_keys,
        scale=softmax.scale,
        window_size=window_size,
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(out, Tensor), "no auxiliary output was requested"
    return out[..., :width]


def append_sinks(
    query: Tensor,  # [count, n, L, d]
    key: Tensor,  # [count, n, K, d]
    value: Tensor,  # [count, n, K, d]
    sinks: Tensor,  # [n]
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key whose logit is the sink and whose value is 0, so that a kernel without sinks computes attention with sinks.

    All three tensors get two further channels. In these channels, queries are 1, the given keys are 0, and the two elements of
    the appended key sum to sink / scale. With only one channel, sink / scale would be rounded to the dtype of the keys. The
    further channels of the values are 0. They exist because fast kernels need values that are as wide as the keys.
    """
    wide = sinks.to(torch.promote_types(sinks.dtype, torch.float32)) / scale
    high = wide.to(key.dtype)
    parts = torch.stack([high, (wide - high).to(key.dtype)], dim=-1)  # [n, 2]
    sink_key = F.pad(parts, (key.size(-1), 0))[None, :, None].expand(key.size(0), -1, -1, -1)
    return (
        F.pad(query, (0, _SINK_CHANNELS), value=1.0),
        torch.cat([F.pad(key, (0, _SINK_CHANNELS)), sink_key], dim=2),
        F.pad(value, (0, _SINK_CHANNELS, 0, 1)),
    )


def attend_batched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    calls: tuple[AttentionCall, ...],
    softmax: SoftmaxSettings,
    masks: Sequence[Tensor | None] | None = None,
) -> Tensor:  # [L, n, channels of value]
    """Run one batched scaled_dot_product_attention for each AttentionCall. Works in any dtype on any device.

    `masks` has one mask [count, num_queries, num_keys] for each call (see the fields of AttentionCall). A mask is True at the
    keys to which a query attends, and must be causal. None in place of a mask means that a query attends to all keys that
    AttentionCall describes.
    """
    repeat = query.size(1) // key.size(1)
    if repeat > 1:  # torch's CPU flash kernel does not support grouped-query attention
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    queries = query.split([call.count * call.num_queries for call in calls])
    keys, values = (x.split([call.count * call.num_keys for call in calls]) for x in (key, value))
    chosen = [None] * len(calls) if masks is None else masks
    out = [_attend_call(*parts, softmax) for parts in zip(queries, keys, values, calls, chosen, strict=True)]
    return out[0] if len(out) == 1 else torch.cat(out)


def _attend_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    chosen: Tensor | None,
    softmax: SoftmaxSettings,
) -> Tensor:
    """Compute one AttentionCall. `chosen`: the mask of the call, as in `attend_batched`."""
    q, k, v = (x.view(call.count, -1, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
    square, window, sinks = call.num_queries == call.num_keys, softmax.window, softmax.sinks
    has_window = window is not None and window < call.num_keys
    mask = None if chosen is None else chosen.unsqueeze(1)  # the same keys for all heads
    if chosen is not None:
        assert window is None and sinks is None, "sparse attention has no windows and no sinks"
    elif has_window or sinks is not None or (not square and call.num_queries > 1):
        own_key = call.num_keys - call.num_queries  # index of the first query's own key
        mask = torch.ones(call.num_queries, call.num_keys, dtype=torch.bool, device=query.device).tril(own_key)
        if window is not None:
            mask = mask.triu(own_key - window + 1)
        if sinks is not None:
            q, k, v = append_sinks(q, k, v, sinks, softmax.scale)
            mask = torch.cat([mask, mask.new_ones(call.num_queries, 1)], dim=1)  # every query sees the sink
    causal = square and mask is None
    out = F.scaled_dot_product_attention(q, k, v, mask, softmax.dropout, is_causal=causal, scale=softmax.scale)
    if sinks is not None:
        out = out[..., : value.size(2)]
    return out.transpose(1, 2).flatten(0, 1)
