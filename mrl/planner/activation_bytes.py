"""Bytes of the activations that a trainer rank keeps for the backward pass of one micro-batch, counted tensor by tensor.

The count follows Korthikanti et al. 2022 (arXiv:2205.05198), "Reducing Activation Recomputation in Large Transformer Models".
Its equation 1 counts the saved inputs of a layer (34 s b h, without attention scores), equations 2 to 4 divide them over tensor
and sequence parallelism, and section 5 describes recomputation. This module counts the saved inputs of the layers that mrl
trains: gated MLPs, grouped and latent attention, experts, packed sequences, and attention kernels that keep no scores (so the
term 5 a s^2 b does not occur).

Shapes: s is the number of tokens of a pack on one context-parallel rank. r is the number of rows of hidden states outside of
tensor-parallel matrices: s / tp with sequence parallelism, else s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mrl.planner.model_shape import ModelShape
from parallel.dims import ParallelDims

INDEX_BYTES = 8  # of one int64 index
STATISTIC_BYTES = 4  # of one statistic of a norm or a softmax, kept in float32

BytesByTensor = dict[str, int]
"""Bytes of each kept tensor, by the tensor's name."""


@dataclass(frozen=True)
class Kernels:
    """Properties of a machine's kernels that determine which tensors are kept."""

    fused_norm: bool = True  # a norm keeps only its input; torch on a CPU keeps the normalized values too
    fused_mlp: bool = True  # the gated activation is one kernel that keeps its input, as in Transformer Engine
    grouped_attention: bool = True  # one call for all sequences, in which keys are not repeated for each query head


GPU_KERNELS = Kernels()
CPU_KERNELS = Kernels(fused_norm=False, fused_mlp=False, grouped_attention=False)


@dataclass(frozen=True)
class Recompute:
    """Megatron's settings of activation recomputation."""

    granularity: str | None = None  # full: whole layers; selective: modules
    method: str | None = None  # with full: uniform (all layers) or block (the first num_layers of a virtual stage)
    num_layers: int = (
        1  # with uniform: number of layers that are recomputed from one kept input; with block: see method
    )
    modules: frozenset[str] = frozenset()  # with selective: Megatron's names of the recomputed modules
    distributed: bool = False  # kept inputs are sharded over tensor-parallel ranks

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> Recompute:
        """Read the config's section `megatron`."""
        return cls(
            granularity=megatron.get("recompute_granularity"),
            method=megatron.get("recompute_method"),
            num_layers=megatron.get("recompute_num_layers") or 1,
            modules=frozenset(megatron.get("recompute_modules") or ["core_attn"]),
            distributed=bool(megatron.get("distribute_saved_activations")),
        )

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(sorted(self.modules))})"
        return "none" if self.granularity is None else f"full ({self.method}, {self.num_layers})"


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch on one trainer rank."""

    tokens: int  # s
    itemsize: int  # bytes of an activation
    tp: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    keys_per_token: float = 1.0  # keys that attention reads per token; above 1 where responses share a prompt
    imbalance: float = 1.0  # tokens that reach the rank's experts, divided by the mean of all ranks
    kernels: Kernels = GPU_KERNELS

    @classmethod
    def of(cls, dims: ParallelDims, tokens: int, itemsize: int, **fields: Any) -> MicroBatchShape:
        """Return the shape of one rank's part of a pack. `tokens`: of the whole pack, over all context-parallel ranks."""
        layout = dict(tp=dims.tp, etp=dims.expert_tp, cp=dims.cp, sequence_parallel=dims.sequence_parallel)
        return cls(-(-tokens // dims.cp), itemsize, **layout, **fields)

    @property
    def rows(self) -> int:
        """r: rows of hidden states outside of tensor-parallel matrices."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def is_gathered(self) -> bool:
        """Whether attention reads reordered copies of tokens (under context parallelism, and for shared prompts)."""
        return self.cp > 1 or self.keys_per_token > 1

    @property
    def keys(self) -> int:
        """Rows of keys that attention reads.

        Context parallelism cuts a sequence into 2 cp chunks. A rank has two of them, which together read 2 cp + 1 chunks of keys.
        """
        zigzag = 1 + 1 / (2 * self.cp) if self.cp > 1 else 1
        return int(self.tokens * self.cp * self.keys_per_token * zigzag)

    def expert_rows(self, topk: int) -> int:
        """Return the number of rows that reach the rank's experts, if each token has `topk` experts."""
        return int(self.rows * topk * self.etp * self.imbalance)


@lru_cache(maxsize=65536)
def layer_bytes(shape: ModelShape, moe: bool, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> int:
    """Return the bytes that one layer keeps. `recomputed`: Megatron's names of the recomputed modules."""
    parts = attention_bytes(shape, batch, recomputed) | (expert_bytes if moe else mlp_bytes)(shape, batch, recomputed)
    return sum(parts.values())


def attention_bytes(
    shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()
) -> BytesByTensor:
    """Return the bytes that a layer's attention keeps, with its norm and residual."""
    e = batch.itemsize
    kept = norm_bytes("attention", shape.hidden, batch.rows, batch)
    kept["attention norm's output"] = batch.rows * shape.hidden * e
    if shape.is_latent and "layernorm" in recomputed:
        del kept["attention norm's output"]
    kept |= (_latent_attention if shape.is_latent else _grouped_attention)(shape, batch, recomputed)
    kept["attention output"] = batch.tokens * shape.num_heads * shape.value_dim // batch.tp * e
    if "core_attn" not in recomputed:
        kept["softmax statistics"] = batch.tokens * shape.num_heads // batch.tp * STATISTIC_BYTES
    if shape.dropout:
        kept["dropout masks"] = 2 * batch.rows * shape.hidden
    return kept


def _grouped_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes of queries, keys and values. A view keeps the whole projection in memory."""
    e, s, d = batch.itemsize, batch.tokens, shape.head_dim
    q, kv = shape.num_heads * d // batch.tp, shape.num_kv_heads * d // batch.tp
    keys = batch.keys
    kept: BytesByTensor = {}
    if shape.qk_norm or not batch.is_gathered:  # the norms' inputs or the values are views of it
        kept["qkv projection"] = s * (q + 2 * kv) * e
    if shape.qk_norm:
        heads, several_groups = (shape.num_heads + shape.num_kv_heads) // batch.tp, shape.num_kv_heads // batch.tp > 1
        is_copy = several_groups and shape.num_heads > shape.num_kv_heads  # else a view of the projection
        kept["query norm's input"] = s * q * e if is_copy else 0
        normalized = 0 if batch.kernels.fused_norm else s * (q + kv) * e
        kept["qk norm statistics"] = s * heads * STATISTIC_BYTES + normalized
    if shape.rotary_dim:
        kept["rotated queries"] = s * q * e
        kept["rotated keys"] = keys * kv * e
        kept["rotary tables"] = 4 * s * shape.rotary_dim * e
    if batch.is_gathered:
        kept["gathered values"] = keys * kv * e
        kept["attention output in token order"] = s * q * e
        kept["attention output per sequence"] = 0 if batch.kernels.grouped_attention else s * q * e
    if not batch.kernels.grouped_attention and shape.num_heads > shape.num_kv_heads:
        kept["rotated keys"] = kept["gathered values"] = keys * q * e
        if not shape.qk_norm:
            kept.pop("qkv projection", None)
    return kept


def _latent_attention(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str]) -> BytesByTensor:
    """Return the bytes that multi-head latent attention keeps: compressed vectors and their up-projections."""
    e, s, r = batch.itemsize, batch.tokens, batch.rows
    heads = shape.num_heads // batch.tp
    kept: BytesByTensor = {}
    if shape.q_lora:
        kept |= norm_bytes("compressed queries", shape.q_lora, r, batch)
        kept["normalized compressed queries"] = r * shape.q_lora * e
    kept |= norm_bytes("compressed keys", shape.kv_lora, r, batch)
    kept["rotary keys of all heads"] = r * shape.rotary_dim * e
    kept["normalized compressed keys"] = r * shape.kv_lora * e
    if "mla_up_proj" in recomputed:
        return kept
    keys = batch.keys
    kept["rotary tables"] = 4 * s * shape.rotary_dim * e
    kept["queries"] = s * heads * shape.head_dim * e
    kept["keys"] = keys * heads * shape.head_dim * e
    kept["values"] = keys * heads * shape.head_dim * e  # padded to the width of keys for the kernel
    kept["padded attention output"] = s * heads * shape.head_dim * e
    return kept


def mlp_bytes(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> BytesByTensor:
    """Return the bytes that a dense layer's MLP keeps, with its norm and residual."""
    if "mlp" in recomputed:
        return {"mlp's input": batch.rows * shape.hidden * batch.itemsize}
    kept = norm_bytes("mlp", shape.hidden, batch.rows, batch)
    kept["mlp norm's output"] = batch.rows * shape.hidden * batch.itemsize
    return kept | _intermediate_bytes("mlp", shape, batch.tokens, shape.ffn // batch.tp, batch)


def _intermediate_bytes(
    name: str, shape: ModelShape, rows: int, width: int, batch: MicroBatchShape, scaled: bool = False
) -> BytesByTensor:
    """Return the bytes that are kept between the two matrices of an MLP.

    `width`: intermediate size of the MLP on this rank. `scaled`: the activation is multiplied by each token's router weight.
    """
    projected = {f"{name} projection": rows * width * batch.itemsize * (2 if shape.gated else 1)}
    unfused = 0 if batch.kernels.fused_mlp or not shape.gated else 2 + scaled  # silu(gate), up, and the scaled product
    return projected | {f"{name} activation": rows * width * batch.itemsize * (1 + unfused)}


def expert_bytes(shape: ModelShape, batch: MicroBatchShape, recomputed: frozenset[str] = frozenset()) -> BytesByTensor:
    """Return the bytes that the MLP of a layer with experts keeps, with its norm and residual.

    Each token is sent to the ranks of its experts, so the tensors of experts have one row for each token that the rank receives.
    """
    e, r = batch.itemsize, batch.rows
    kept = norm_bytes("mlp", shape.hidden, r, batch)
    kept["mlp norm's output"] = r * shape.hidden * e
    if "moe" in recomputed:
        return kept
    if "layernorm" in recomputed:
        del kept["mlp norm's output"]
    kept |= _routing_bytes(shape, batch)
    received = batch.expert_rows(shape.topk)
    kept["tokens of experts"] = received * (shape.hidden * e + STATISTIC_BYTES)
    kept |= _intermediate_bytes("experts", shape, received, shape.moe_ffn // batch.etp, batch, scaled=True)
    if "moe_act" in recomputed:
        del kept["experts activation"]
    if shape.shared_ffn and "shared_experts" not in recomputed:
        kept |= _intermediate_bytes("shared experts", shape, batch.tokens, shape.shared_ffn // batch.tp, batch)
    return kept


def _routing_bytes(shape: ModelShape, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of the chosen experts, their weights, and the order in which tokens are sent."""
    chosen = shape.topk * (2 * INDEX_BYTES + STATISTIC_BYTES)
    order = shape.num_experts * INDEX_BYTES
    scores = (shape.num_experts * (STATISTIC_BYTES + 1) + STATISTIC_BYTES) if shape.sigmoid_router else 0
    groups = (2 * shape.router_groups + shape.router_groups // 2) * INDEX_BYTES
    return {"routing": batch.rows * (chosen + order + scores + groups)}


def norm_bytes(name: str, width: int, rows: int, batch: MicroBatchShape) -> BytesByTensor:
    """Return the bytes of a norm's input and statistics. The norm's output is counted in the module that reads it."""
    copies = 1 if batch.kernels.fused_norm else 2
    return {
        f"{name} norm's input": rows * width * batch.itemsize * copies,
        f"{name} norm's statistics": rows * STATISTIC_BYTES,
    }


def end_bytes(shape: ModelShape, batch: MicroBatchShape, is_first: bool, is_last: bool) -> int:
    """Return the bytes that are kept outside of layers: token ids on the first stage, the final norm's tensors on the last."""
    kept = batch.tokens * INDEX_BYTES if is_first else 0
    return kept + (sum(norm_bytes("final", shape.hidden, batch.rows, batch).values()) if is_last else 0)


def virtual_stage_bytes(shape: ModelShape, batch: MicroBatchShape, moe: tuple[bool, ...], recompute: Recompute) -> int:
    """Return the bytes that one virtual stage keeps for one micro-batch. `moe`: [layers] whether the layer has experts."""
    dense_layers, moe_layers = len(moe) - sum(moe), sum(moe)
    if recompute.granularity != "full":
        modules = recompute.modules if recompute.granularity == "selective" else frozenset()
        kept = dense_layers * layer_bytes(shape, False, batch, modules)
        return kept + (moe_layers * layer_bytes(shape, True, batch, modules) if moe_layers else 0)
    layer_input = batch.rows * shape.hidden * batch.itemsize
    if recompute.distributed and not batch.sequence_parallel:
        layer_input //= batch.tp
    if recompute.method == "block":
        first = min(recompute.num_layers, len(moe))
        return first * layer_input + sum(layer_bytes(shape, is_moe, batch) for is_moe in moe[first:])
    return -(-len(moe) // recompute.num_layers) * layer_input
