"""Measures one layer's attention over packs (packed sequences), with the kernel that mrl chooses and with other kernels.

`measure_attention` is a section of `mrl bench gpu` (see mrl.bench.sections). This module imports Megatron, so
`parallel.device.patch_megatron_for_cpu` must run before the import.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from mrl.bench.device_rates import peak_memory, seconds_of
from mrl.bench.model_steps import model_dtype, start_one_rank
from mrl.bench.sections import SectionJob, Value
from parallel.attention import (
    PackedAttention,
    SoftmaxSettings,
    attend_batched,
    flash_attention_versions,
    supports_varlen,
)
from parallel.device import capabilities, device
from parallel.packing import PackedSequences, Segment, pack


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of the attention of one layer, and of the packs."""

    heads: int  # query heads
    kv_heads: int  # key/value heads
    channels: int  # channels of one head
    mixed_tokens: int  # tokens of the pack with sequences of mixed lengths
    prompt: int  # tokens of the prompt in the packs of one group
    responses: int  # responses in the packs of one group
    response: int  # tokens of each response


SIZES_BY_NAME = {  # full and small have the heads of Qwen3-4B
    "full": AttentionSizes(32, 8, 128, 32768, 2048, 16, 8192),
    "small": AttentionSizes(32, 8, 128, 16384, 1024, 8, 2048),
    "toy": AttentionSizes(4, 2, 16, 256, 32, 4, 64),
}
AttentionKernel = Callable[[Tensor, Tensor, Tensor, PackedSequences], Tensor]
"""Function of (query, key, value, pack) -> [L, heads, channels] for the L tokens of the pack.

The attention of a pack is divided into chunks (PackedSequences.chunks). The rows of query, key and value are in the order of the
chunks. The rows of the result are in the order of the queries.
"""


def measure_attention(job: SectionJob) -> None:
    """Section attention: measure the forward and backward pass of one layer's attention, for each pack and kernel."""
    start_one_rank()
    sizes = SIZES_BY_NAME[job.spec.size]
    for name, segments in packs(sizes).items():
        _measure_pack(job, sizes, name, segments)


def _measure_pack(job: SectionJob, sizes: AttentionSizes, name: str, segments: list[Segment]) -> None:
    tokens = sum(segment.length for segment in segments)
    shape = dict(device=device(), dtype=model_dtype())
    counts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    inputs = [torch.randn(tokens, count, sizes.channels, **shape).requires_grad_() for count in counts]
    pairs = attended_pairs(pack(segments, device()))
    # The forward pass has two matrix products, so 4 FLOPs for each pair and channel. The backward pass has 2.5 times as many.
    flops = 3.5 * 4 * pairs * sizes.heads * sizes.channels
    reference: Tensor | None = None
    for kernel, forward in attention_kernels(job, name, sizes, segments):

        def run(forward: Callable[..., Tensor] = forward) -> None:
            torch.autograd.grad(forward(*inputs).sum(), inputs)

        with job.case(f"{name}: {kernel}"):
            with torch.no_grad():
                out = forward(*inputs).flatten(1)
            memory_values, seconds = peak_memory(run), seconds_of(run)
            values: list[Value] = [("time", 1e3 * seconds, "ms"), ("size", tokens, "tokens"), *memory_values]
            values += job.efficiency(flops / seconds / 1e12)
            if reference is not None:
                values.append(("difference from the first kernel", (out - reference).abs().max().item(), ""))
            reference = out if reference is None else reference
            job.row(f"{name}: {kernel}", *values)


def packs(sizes: AttentionSizes) -> dict[str, list[Segment]]:
    """Return the measured packs by name."""
    prompt, response = Segment(sizes.prompt), sizes.response
    group = f"prompt of {sizes.prompt}, {sizes.responses} x {response} responses"
    return {
        f"{sizes.mixed_tokens} tokens of mixed lengths": [Segment(n) for n in mixed_lengths(sizes.mixed_tokens)],
        f"{group}, shared prompt": [prompt, *[Segment(response, 0)] * sizes.responses],
        f"{group}, repeated prompt": [Segment(sizes.prompt + response)] * sizes.responses,
    }


def mixed_lengths(total: int) -> list[int]:
    """Return log-normal lengths whose sum is `total`. Every call returns the same lengths."""
    rng, lengths = np.random.default_rng(0), []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(rng.lognormal(np.log(total / 24), 0.9)))))
    return lengths


def attended_pairs(packed: PackedSequences) -> int:
    """Return the number of pairs of a query and a key that the attention of a pack computes."""
    return sum(
        call.count * (call.num_queries * (call.num_keys - call.num_queries) + _triangle(call.num_queries))
        for call in packed.calls
    )


def _triangle(n: int) -> int:
    """Return the number of pairs of a query and a key if each of n tokens attends to itself and to the earlier tokens."""
    return n * (n + 1) // 2


def attention_kernels(
    job: SectionJob, name: str, sizes: AttentionSizes, segments: Sequence[Segment]
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield (name of a kernel, function of query, key and value). Omits kernels that this machine does not have.

    The kernel that mrl chooses is the last one, because choosing FlashAttention-3 or 4 changes torch for the whole process.
    """
    varlen, version = supports_varlen(device(), model_dtype()), flash_attention_versions(sizes.channels)[0]
    scale, whole = sizes.channels**-0.5, pack(segments, device(), chunks_in_token_order=True)
    if varlen and version > 2:
        yield "torch's variable-length FlashAttention-2", _gathering(_torch_varlen(scale), whole)
    if not varlen:
        job.leave_out(f"{name}: FlashAttention and Transformer Engine", "their kernels need a GPU")
    else:
        shared = any(segment.parent is not None for segment in segments)
        yield from _optional_kernels(job, name, sizes, whole, shared)
        yield "batched scaled_dot_product_attention", _gathering(_batched(scale), pack(segments, device()))
    config = SimpleNamespace(  # the fields of Megatron's TransformerConfig that PackedAttention reads
        kv_channels=sizes.channels,
        attention_dropout=0.0,
        softmax_type="vanilla",
        window_size=None,
        window_attn_skip_freq=None,
    )
    attention = PackedAttention(config, 1, None, "self")
    chosen = f"torch's variable-length FlashAttention-{version}" if varlen else "batched"
    own = pack(segments, device(), chunks_in_token_order=varlen)
    yield f"{chosen} (mrl's choice)", lambda *inputs: attention(*inputs, packed_seq_params=own)


def _optional_kernels(
    job: SectionJob, name: str, sizes: AttentionSizes, packed: PackedSequences, shared: bool
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield the kernels of two optional packages, flash-attn and Transformer Engine."""
    scale = sizes.channels**-0.5
    package = find_spec("flash_attn")
    if package is None or package.origin is None:  # flash-attn-4 alone: its flash_attn has no __init__.py
        job.leave_out(f"{name}: flash-attn", "flash-attn is not installed; pip install flash-attn")
    else:
        yield "flash-attn's flash_attn_varlen_func", _gathering(flash_attn_kernel(scale), packed)
    if not capabilities().transformer_engine:
        job.leave_out(
            f"{name}: Transformer Engine", "it is not installed; make setup LOCK=requirements-gpu.txt installs it"
        )
    elif shared:
        job.leave_out(f"{name}: Transformer Engine", "it has no attention for shared prompts")
    else:
        kernel = transformer_engine_kernel(sizes)
        yield "Transformer Engine (mrl's choice with share_prompts=false)", _gathering(kernel, packed)


def _gathering(kernel: AttentionKernel, packed: PackedSequences) -> Callable[..., Tensor]:
    """Return a function of query, key and value. The rows of these tensors are in the order of the tokens.

    The function gathers the rows for the calls of the pack, runs `kernel`, and returns the output in the order of the tokens.
    """

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if packed.query_index is not None:
            query = query.index_select(0, packed.query_index)
        if packed.key_index is not None:
            key, value = (rows.index_select(0, packed.key_index) for rows in (key, value))
        out = kernel(query, key, value, packed)
        if packed.query_index is None:
            return out
        return torch.empty_like(out).index_copy(0, packed.query_index, out)

    return forward


def _batched(scale: float) -> AttentionKernel:
    return lambda query, key, value, packed: attend_batched(query, key, value, packed.calls, SoftmaxSettings(scale))


def _torch_varlen(scale: float) -> AttentionKernel:
    """Return torch's variable-length kernel: FlashAttention-2, as long as no other version is activated."""
    varlen_attn = import_module("torch.nn.attention.varlen").varlen_attn  # imports Triton

    def kernel(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        options = dict(scale=scale, window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1))
        return varlen_attn(query, key, value, *_bounds(packed), **options)

    return kernel


def flash_attn_kernel(scale: float) -> AttentionKernel:
    """Return the kernel of the package flash-attn."""
    flash_attn_varlen_func = import_module("flash_attn").flash_attn_varlen_func

    def kernel(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        return flash_attn_varlen_func(query, key, value, *_bounds(packed), softmax_scale=scale, causal=True)

    return kernel


def transformer_engine_kernel(sizes: AttentionSizes) -> AttentionKernel:
    """Return Transformer Engine's attention for packs without shared prompts."""
    attention = import_module("transformer_engine.pytorch").DotProductAttention(
        sizes.heads,
        sizes.channels,
        num_gqa_groups=sizes.kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )

    def kernel(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences) -> Tensor:
        queries, keys, max_queries, max_keys = _bounds(packed)
        bounds = dict(cu_seqlens_q=queries, cu_seqlens_kv=keys, max_seqlen_q=max_queries, max_seqlen_kv=max_keys)
        return attention(query, key, value, **bounds).view(query.shape)

    return kernel


def _bounds(packed: PackedSequences) -> tuple[Tensor, Tensor, int, int]:
    """Return cu_seqlens of the queries and of the keys, and the largest numbers of queries and of keys in a chunk."""
    assert packed.chunks is not None, "pack() sets the chunks"
    chunks = packed.chunks
    return chunks.queries, chunks.keys, chunks.max_queries, chunks.max_keys
