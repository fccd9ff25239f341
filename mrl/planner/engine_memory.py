"""GPU memory of one engine rank: the weights as SGLang shards them, and the tokens that its KV cache has room for."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.planner.model_shape import ModelShape, ParameterShape
from mrl.planner.trainer_state_bytes import BIAS_BYTES
from mrl.weight_sync.engine_layout import VOCAB_PADDING, Topology

MEM_FRACTION = 0.8  # of a GPU, for an engine's weights and KV cache, unless sglang.mem_fraction_static is set


@dataclass(frozen=True)
class EngineRankMemory:
    """Bytes of one engine rank on its GPU."""

    weights: int
    kv_cache: int  # pool of keys and values; negative where the weights alone are too large
    token: int  # keys and values of one token

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, over all running requests."""
        return max(0, self.kv_cache) // self.token

    @property
    def total(self) -> int:
        """Bytes that the rank allocates when it starts."""
        return self.weights + max(0, self.kv_cache)


def engine_memory(
    shape: ModelShape, topology: Topology, itemsize: int, free: int, fraction: float, kv_itemsize: int | None = None
) -> EngineRankMemory:
    """Return the memory of a rank that finds `free` bytes and takes `fraction` of them for weights and KV cache.

    `fraction` is sglang.mem_fraction_static. The rest is left for activations and CUDA graphs.
    """
    token = kv_bytes(shape, topology, kv_itemsize or itemsize)
    weights = engine_weights(shape, topology, itemsize)
    return EngineRankMemory(weights, int(free * fraction) - weights, token)


def kv_bytes(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Return the bytes of one token's keys and values on one rank, over all layers.

    Key/value heads are replicated if there are fewer of them than ranks. Latent attention caches one compressed vector per token,
    and every rank has a full copy of it.
    """
    if shape.is_latent:
        return shape.num_layers * (shape.kv_lora + shape.rotary_dim) * itemsize
    return shape.num_layers * 2 * _kv_heads(shape, topology) * shape.head_dim * itemsize


def engine_weights(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Return the bytes of the weights of one rank; tied embeddings count once."""
    return sum(engine_weight_parts(shape, topology, itemsize))


def engine_weight_parts(shape: ModelShape, topology: Topology, itemsize: int) -> tuple[int, int]:
    """Return the bytes of the weights of one rank: (all but routed experts, routed experts)."""
    moe = sum(shape.moe)
    layers = {"always": shape.num_layers, "dense": shape.num_layers - moe, "moe": moe}
    dense, experts = moe * sum(p.numel for p in shape.buffers) * BIAS_BYTES, 0
    for p in shape.parameters:
        if p.location == "expert":
            local_experts = shape.num_experts // topology.ep
            experts += layers[p.where] * (p.numel // (topology.tp // topology.ep)) * local_experts * itemsize
        else:
            copies = layers[p.where] if p.location == "layer" else 1
            dense += copies * _rank_numel(shape, p, topology) * itemsize
    return dense, experts


def _rank_numel(shape: ModelShape, p: ParameterShape, topology: Topology) -> int:
    """Count the elements of a parameter on one rank. Data-parallel attention shards over fewer ranks."""
    if not p.is_sharded:
        return p.numel
    in_attention = p.name.startswith("self_attention.") or p.location == "first"
    ranks = topology.tp // topology.dp if in_attention else topology.tp
    if p.is_vocabulary:
        return _vocabulary_rows(p.shape[0], ranks) * p.shape[1]
    if p.name.startswith("self_attention.linear_qkv."):
        rows = (shape.num_heads // ranks + 2 * _kv_heads(shape, topology)) * shape.head_dim
        return rows * p.numel // p.shape[0]
    return p.numel // ranks


def _kv_heads(shape: ModelShape, topology: Topology) -> int:
    return max(1, shape.num_kv_heads // (topology.tp // topology.dp))


def _vocabulary_rows(rows: int, ranks: int) -> int:
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    if padded % ranks:
        padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
    return padded // ranks
