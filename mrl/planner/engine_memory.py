"""Memory of one engine rank: model weights, slots for LoRA adapters, and KV cache with the states of recurrent layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.conversion.fp8_blocks import BLOCK, SCALE_BYTES, is_quantized
from mrl.planner.model_shape import ModelShape
from mrl.planner.parameter_shape import ParameterShape
from mrl.planner.trainer_state_bytes import BIAS_BYTES
from mrl.weight_sync.engine_layout import ITEM_BYTES, VOCAB_PADDING, EngineParallelSizes

# Fraction of GPU memory for the weights and the KV cache of an engine if sglang.mem_fraction_static is not set.
DEFAULT_MEM_FRACTION = 0.8
# Bytes for states of recurrent layers, divided by bytes for keys and values, if sglang.mamba_full_memory_ratio is not set.
_STATE_RATIO = 0.9
# Bytes of one element of the convolution's inputs, and of the recurrence's state, in SGLang (0.5.23) by default.
_CONVOLUTION_BYTES, _STATE_BYTES = 2, 4


@dataclass(frozen=True)
class EngineRankMemory:
    """Bytes that one engine rank uses on its GPU."""

    weights: int  # model weights
    kv_cache: int  # keys, values and states of recurrent layers; negative if the weights alone do not fit
    token_bytes: int  # bytes of the keys and values of one token
    states: int = 0  # the part of `kv_cache` for states of recurrent layers
    adapters: int = 0  # slots for LoRA adapters, which an offloaded engine keeps on the GPU

    @property
    def tokens(self) -> int:
        """Number of tokens that fit in the KV cache, over all running requests."""
        return max(0, self.kv_cache - self.states) // self.token_bytes

    @property
    def total(self) -> int:
        """Bytes that the engine rank allocates when it starts."""
        return self.weights + self.adapters + max(0, self.kv_cache)

    def with_adapters(self, nbytes: int) -> EngineRankMemory:
        """Return this memory with `nbytes` bytes of slots for LoRA adapters. The KV cache has `nbytes` bytes less."""
        return replace(self, kv_cache=self.kv_cache - nbytes, adapters=nbytes)


def engine_memory(
    shape: ModelShape,
    parallel_sizes: EngineParallelSizes,
    itemsize: int,
    free: int,
    fraction: float,
    kv_itemsize: int | None = None,
    fp8: bool = False,
) -> EngineRankMemory:
    """Return the memory of an engine rank without LoRA adapters.

    `free`: bytes that are free on the GPU before the engine starts. `fraction`: the part of the free bytes that the engine uses
    for weights and KV cache (sglang.mem_fraction_static). The rest is for activations and CUDA graphs. `fp8`: whether the engine
    stores matrices in FP8 with block scales.
    """
    token = kv_bytes(shape, parallel_sizes, kv_itemsize or itemsize)
    weights = engine_weights(shape, parallel_sizes, itemsize, fp8)
    return with_states(EngineRankMemory(weights, int(free * fraction) - weights, token), shape, parallel_sizes)


def with_states(
    rank: EngineRankMemory, shape: ModelShape, parallel_sizes: EngineParallelSizes, server_args: Mapping[str, Any] = {}
) -> EngineRankMemory:
    """Return `rank` with `states` set: the part of `kv_cache` that SGLang (0.5.23) reserves for states of recurrent layers.

    `server_args`: the config section `sglang`, which may set the size of this part.
    """
    if not shape.recurrence:
        return rank
    if slots := server_args.get("max_mamba_cache_size"):
        return replace(rank, states=(slots // parallel_sizes.dp + 1) * state_bytes(shape, parallel_sizes))
    ratio = server_args.get("mamba_full_memory_ratio") or _STATE_RATIO
    return replace(rank, states=int(max(0, rank.kv_cache) * ratio / (1 + ratio)))


def state_bytes(shape: ModelShape, parallel_sizes: EngineParallelSizes) -> int:
    """Return the bytes that one engine rank stores for the states of one request, in all recurrent layers together.

    A layer keeps the state of its recurrence, and the last inputs of its convolution.
    """
    sizes = shape.recurrence
    assert sizes is not None, "the model has no recurrent layers"
    convolution = sizes.channels * (sizes.kernel - 1) * _CONVOLUTION_BYTES
    layer = convolution + sizes.value_heads * sizes.value_dim * sizes.key_dim * _STATE_BYTES
    return shape.num_recurrent_layers * layer * parallel_sizes.dp // parallel_sizes.tp


def kv_bytes(shape: ModelShape, parallel_sizes: EngineParallelSizes, itemsize: int) -> int:
    """Return the bytes that one engine rank stores for the keys and values of one token, in all layers together.

    Recurrent layers have no keys and values; `state_bytes` counts their states. If there are fewer key/value heads than ranks,
    several ranks store the same head. Latent attention caches one compressed vector for each token, and sparse attention also
    caches the keys of its indexers. Every rank stores these vectors and keys as a whole.
    """
    if shape.has_latent_attention:
        # The keys of an indexer are in FP8, and each key has a float32 scale.
        of_indexers = sum(shape.indexer.layers) * (shape.indexer.channels + SCALE_BYTES) if shape.indexer else 0
        return shape.num_layers * (shape.kv_lora + shape.rotary_dim) * itemsize + of_indexers
    return shape.num_attention_layers * 2 * _kv_heads(shape, parallel_sizes) * shape.head_dim * itemsize


def engine_weights(shape: ModelShape, parallel_sizes: EngineParallelSizes, itemsize: int, fp8: bool = False) -> int:
    """Return the bytes of model weights on one engine rank. Tied embeddings are stored only once."""
    return sum(engine_weight_parts(shape, parallel_sizes, itemsize, fp8))


def engine_weight_parts(
    shape: ModelShape, parallel_sizes: EngineParallelSizes, itemsize: int, fp8: bool = False
) -> tuple[int, int]:
    """Return the bytes of model weights on one engine rank: (without routed experts, of routed experts)."""
    moe = sum(shape.moe)
    layers = Counter(present for kind in shape.kinds for present in kind.present)
    # SGLang shards most of a vision tower over the ranks; the plan counts the whole tower on each rank.
    dense, experts = (
        moe * sum(p.numel for p in shape.router_buffers) * BIAS_BYTES + shape.frozen_vision_weights * itemsize,
        0,
    )
    if shape.indexer:
        dense += sum(shape.indexer.layers) * shape.indexer.num_bytes(itemsize)
    for p in shape.parameters:
        if p.location == "expert":
            local_experts = shape.num_experts // parallel_sizes.ep
            numel = p.shard_numel(parallel_sizes.tp // parallel_sizes.ep)
            experts += layers[p.present_in] * local_experts * _weight_bytes(p, numel, itemsize, fp8)
        else:
            copies = layers[p.present_in] if p.location == "layer" else 1
            dense += copies * _weight_bytes(p, _rank_numel(shape, p, parallel_sizes), itemsize, fp8)
    return dense, experts


def adapter_slot_bytes(
    shape: ModelShape, parallel_sizes: EngineParallelSizes, itemsize: int, lora_rank: int, matrices: Collection[str]
) -> int:
    """Return the bytes of one slot for LoRA adapters on one engine rank.

    `matrices`: names of the adapted matrices, such as q_proj. In SGLang (0.5.23, LoRAMemoryPool), a slot has matrices A and B
    for each fused linear layer that has an adapted matrix, in every layer of the model. A has rows for all matrices of the
    fused linear layer, even for matrices without adapters. If this layer is split by output rows, every rank has the whole A.
    """
    tp, hidden = parallel_sizes.tp, shape.hidden
    qkv = (shape.num_heads // tp + 2 * _kv_heads(shape, parallel_sizes)) * shape.head_dim
    fused = {  # matrices that SGLang fuses -> (their number, inputs of A on one rank, outputs of B on one rank)
        ("q_proj", "k_proj", "v_proj"): (3, hidden, qkv),
        ("o_proj",): (1, shape.num_heads * shape.value_dim // tp, hidden),
        ("gate_proj", "up_proj"): (2, hidden, 2 * shape.ffn // tp),
        ("down_proj",): (1, shape.ffn // tp, hidden),
    }
    widths = sum(n * inputs + outputs for names, (n, inputs, outputs) in fused.items() if {*names} & {*matrices})
    return shape.num_layers * lora_rank * widths * itemsize


def _weight_bytes(p: ParameterShape, numel: int, itemsize: int, fp8: bool) -> int:
    """Return the bytes of `numel` elements of a parameter. In FP8, a matrix has a float32 scale for each block."""
    if p.float32_in_engine:
        return numel * ITEM_BYTES["float32"]
    if not (fp8 and is_quantized(p.name)):
        return numel * itemsize
    return numel + -(-numel // BLOCK**2) * SCALE_BYTES


def _rank_numel(shape: ModelShape, p: ParameterShape, parallel_sizes: EngineParallelSizes) -> int:
    """Return the number of elements of a parameter on one engine rank.

    An engine with data-parallel attention shards the parameters of attention over fewer ranks than its other parameters.
    """
    if not p.is_sharded or p.replicated_in_engine:
        return p.numel
    in_attention = p.name.startswith("self_attention.") or p.location == "first"
    ranks = parallel_sizes.tp // parallel_sizes.dp if in_attention else parallel_sizes.tp
    if p.is_vocabulary:
        return _vocabulary_rows(p.shape[0], ranks) * p.shape[1]
    if p.name.startswith("self_attention.k_projection_norm."):
        return _kv_heads(shape, parallel_sizes) * shape.head_dim
    if p.name.startswith("self_attention.linear_qkv."):
        rows = (
            shape.num_heads * (1 + shape.output_gate) // ranks + 2 * _kv_heads(shape, parallel_sizes)
        ) * shape.head_dim
        return rows * p.numel // p.shape[0]
    return p.numel // ranks


def _kv_heads(shape: ModelShape, parallel_sizes: EngineParallelSizes) -> int:
    return max(1, shape.num_kv_heads // (parallel_sizes.tp // parallel_sizes.dp))


def _vocabulary_rows(rows: int, ranks: int) -> int:
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    if padded % ranks:
        padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
    return padded // ranks
