"""Memory of an engine's ranks: weights as SGLang holds them, and the tokens that its KV cache has room for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mrl.planner.model_shape import ModelShape, Parameter
from mrl.weight_sync.engine_layout import VOCAB_PADDING, Topology

BIAS = 4  # bytes of a correction bias, which is float32


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one rank of an engine on its device."""

    weights: int
    kv_cache: int  # pool of keys and values; negative where the weights alone are too large
    token: int  # keys and values of one token

    @property
    def tokens(self) -> int:
        """That the KV cache holds, of all requests that run together."""
        return max(0, self.kv_cache) // self.token

    @property
    def total(self) -> int:
        """What the rank takes when it starts."""
        return self.weights + max(0, self.kv_cache)


def engine_memory(
    shape: ModelShape, topology: Topology, itemsize: int, free: int, fraction: float, kv_itemsize: int | None = None
) -> EngineMemory:
    """Of one rank, which finds `free` bytes and takes `fraction` of them for weights and KV cache.

    `fraction`: sglang.mem_fraction_static. The rest is for activations and CUDA graphs.
    """
    weights = engine_weights(shape, topology, itemsize)
    token = kv_bytes(shape, topology, kv_itemsize or itemsize)
    return EngineMemory(weights, int(free * fraction) - weights, token)


def kv_bytes(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Bytes of a token's keys and values on one rank, all layers.

    Where there are fewer key/value heads than ranks, heads are repeated. Latent attention keeps its short vector, whole on
    every rank.
    """
    if shape.is_latent:
        return shape.num_layers * (shape.kv_lora + shape.rotary_dim) * itemsize
    return shape.num_layers * 2 * _kv_heads(shape, topology) * shape.head_dim * itemsize


def engine_weights(shape: ModelShape, topology: Topology, itemsize: int) -> int:
    """Bytes of the weights of one rank, tied embeddings once."""
    moe = sum(shape.moe)
    copies = {"always": shape.num_layers, "dense": shape.num_layers - moe, "moe": moe}
    total = 0
    for p in shape.parameters:
        of_layers = copies[p.where] if p.place in ("layer", "expert") else 1
        total += of_layers * _numel(shape, p, topology) * itemsize
    return total + moe * sum(prod(p.shape) for p in shape.buffers) * BIAS


def _numel(shape: ModelShape, p: Parameter, topology: Topology) -> int:
    attends = p.name.startswith("self_attention.") or p.place == "first"
    ranks = topology.tp // topology.dp if attends else topology.tp
    if p.place == "expert":
        ranks = topology.tp // topology.ep
        return prod(p.shape) // ranks * (shape.experts // topology.ep)
    if not p.cut:
        return prod(p.shape)
    if p.is_vocabulary:
        return _vocabulary_rows(p.shape[0], ranks) * p.shape[1]
    if p.name.startswith("self_attention.linear_qkv."):
        rows = (shape.heads // ranks + 2 * _kv_heads(shape, topology)) * shape.head_dim
        return rows * prod(p.shape[1:])
    return prod(p.shape) // ranks


def _kv_heads(shape: ModelShape, topology: Topology) -> int:
    return max(1, shape.groups // (topology.tp // topology.dp))


def _vocabulary_rows(rows: int, ranks: int) -> int:
    padded = -(-rows // VOCAB_PADDING) * VOCAB_PADDING
    if padded % ranks:
        padded = -(-rows // (VOCAB_PADDING * ranks)) * VOCAB_PADDING * ranks
    return padded // ranks
