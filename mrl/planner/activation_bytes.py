"""What a trainer rank keeps of a micro-batch for its backward pass, tensor by tensor.

The account is that of Korthikanti et al. 2022 (arXiv:2205.05198), "Reducing Activation Recomputation in Large Transformer
Models": equation 1 counts a layer's saved inputs (34 s b h of them, without the attention scores), equations 2 to 4 divide them
over tensor and sequence parallelism, section 5 recomputes them. Here the same is counted for what mrl trains: gated MLPs,
grouped and latent attention, experts, packs, and attention kernels that keep no scores, for which 5 a s^2 b is gone.

Shapes: s tokens of a pack on one context-parallel rank; r of them between a layer's matrices, s / tp under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mrl.planner.model_shape import ModelShape
from parallel.dims import ParallelDims

INDEX = 8  # bytes of torch's indices
STATISTIC = 4  # bytes of a norm's or a softmax's, kept in float32

Tally = dict[str, int]
"""Bytes by what is kept."""


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a machine keep beyond their inputs."""

    fused_norm: bool = True  # a norm keeps its input alone; torch on a CPU also keeps what it normalised
    fused_mlp: bool = True  # a gated activation is one kernel that keeps its input; Transformer Engine brings it
    grouped_attention: bool = True  # one call for all lengths, in which keys are not repeated for each query head


GPU = Kernels()
CPU = Kernels(fused_norm=False, fused_mlp=False, grouped_attention=False)


@dataclass(frozen=True)
class Recompute:
    """Megatron's settings of what is thrown away and computed again."""

    granularity: str | None = None  # full: whole layers; selective: modules
    method: str | None = None  # of full: uniform, all layers; block, the first num_layers of a virtual stage
    num_layers: int = 1  # uniform: layers between two that are kept
    modules: frozenset[str] = frozenset()
    distributed: bool = False  # the layers' inputs are cut over tensor-parallel ranks

    @classmethod
    def of(cls, megatron: Mapping[str, Any]) -> Recompute:
        """Of the config's section `megatron`."""
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
class Pass:
    """One micro-batch on one rank."""

    tokens: int  # s
    itemsize: int  # bytes of an activation
    tp: int = 1
    etp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    keys_per_token: float = 1.0  # keys that attention reads; more where responses share a prompt
    imbalance: float = 1.0  # tokens that the rank's experts get, over the mean of all ranks
    kernels: Kernels = GPU

    @classmethod
    def of(cls, dims: ParallelDims, tokens: int, itemsize: int, **more: Any) -> Pass:
        """Of a pack of `tokens`, all context-parallel ranks together."""
        layout = dict(tp=dims.tp, etp=dims.expert_tp, cp=dims.cp, sequence_parallel=dims.sequence_parallel)
        return cls(-(-tokens // dims.cp), itemsize, **layout, **more)

    @property
    def rows(self) -> int:
        """r"""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def picked(self) -> bool:
        """Whether attention takes tokens in another order than they lie in: copies of them."""
        return self.cp > 1 or self.keys_per_token > 1

    @property
    def keys(self) -> int:
        """Rows of keys that attention reads. A context-parallel rank's two chunks see 2 cp + 1 of the 2 cp, together."""
        zigzag = 1 + 1 / (2 * self.cp) if self.cp > 1 else 1
        return int(self.tokens * self.cp * self.keys_per_token * zigzag)


@lru_cache(maxsize=65536)
def layer(shape: ModelShape, moe: bool, run: Pass, dropped: frozenset[str] = frozenset()) -> int:
    """Bytes that one layer keeps; `dropped`: modules that are recomputed, by Megatron's names."""
    parts = attention(shape, run, dropped) | (experts if moe else mlp)(shape, run, dropped)
    return sum(parts.values())


def attention(shape: ModelShape, run: Pass, dropped: frozenset[str] = frozenset()) -> Tally:
    """Of a layer's attention, its norm and residual included."""
    e = run.itemsize
    kept = norm("attention", shape.hidden, run.rows, run)
    kept["attention norm's output"] = run.rows * shape.hidden * e
    if shape.is_latent and "layernorm" in dropped:
        del kept["attention norm's output"]
    kept |= (_latent if shape.is_latent else _grouped)(shape, run, dropped)
    kept["attention output"] = run.tokens * shape.heads * shape.value_dim // run.tp * e
    if "core_attn" not in dropped:
        kept["softmax statistics"] = run.tokens * shape.heads // run.tp * STATISTIC
    if shape.dropout:
        kept["dropout masks"] = 2 * run.rows * shape.hidden
    return kept


def _grouped(shape: ModelShape, run: Pass, dropped: frozenset[str]) -> Tally:
    """Queries, keys and values; the projection that they are views of stays as a whole."""
    e, s, d = run.itemsize, run.tokens, shape.head_dim
    q, kv = shape.heads * d // run.tp, shape.groups * d // run.tp
    seen = run.keys
    kept: Tally = {}
    if shape.qk_norm or not run.picked:  # something is a view of it: the norms' inputs, or the values
        kept["qkv projection"] = s * (q + 2 * kv) * e
    if shape.qk_norm:
        heads, several = (shape.heads + shape.groups) // run.tp, shape.groups // run.tp > 1
        kept["query norm's input"] = s * q * e if several and shape.heads > shape.groups else 0  # else a view
        kept["qk norm statistics"] = s * heads * STATISTIC + (0 if run.kernels.fused_norm else s * (q + kv) * e)
    if shape.rotary_dim:
        kept["rotated queries"] = s * q * e
        kept["rotated keys"] = seen * kv * e
        kept["rotary tables"] = 4 * s * shape.rotary_dim * e
    if run.picked:
        kept["picked values"] = seen * kv * e
        kept["attention output, put back"] = s * q * e
        kept["attention output, in pieces"] = 0 if run.kernels.grouped_attention else s * q * e
    if not run.kernels.grouped_attention and shape.heads > shape.groups:
        kept["rotated keys"] = kept["picked values"] = seen * q * e
        if not shape.qk_norm:
            kept.pop("qkv projection", None)
    return kept


def _latent(shape: ModelShape, run: Pass, dropped: frozenset[str]) -> Tally:
    """Of multi-head latent attention: the short vectors, and what is projected up from them."""
    e, s, r = run.itemsize, run.tokens, run.rows
    heads = shape.heads // run.tp
    kept: Tally = {}
    if shape.q_lora:
        kept |= norm("short queries", shape.q_lora, r, run)
        kept["short queries, normalised"] = r * shape.q_lora * e
    kept |= norm("short keys", shape.kv_lora, r, run)
    kept["shared keys"] = r * shape.rotary_dim * e
    kept["short keys, normalised"] = r * shape.kv_lora * e
    if "mla_up_proj" in dropped:
        return kept
    seen = run.keys
    kept["rotary tables"] = 4 * s * shape.rotary_dim * e
    kept["queries"] = s * heads * shape.head_dim * e
    kept["keys"] = seen * heads * shape.head_dim * e
    kept["values"] = seen * heads * shape.head_dim * e  # lengthened to the keys' size for the kernel
    kept["attention output, lengthened"] = s * heads * shape.head_dim * e
    return kept


def mlp(shape: ModelShape, run: Pass, dropped: frozenset[str] = frozenset()) -> Tally:
    """Of a dense layer's MLP, its norm and residual included."""
    inputs = norm("mlp", shape.hidden, run.rows, run)
    if "mlp" in dropped:
        return {"mlp's input": run.rows * shape.hidden * run.itemsize}
    inputs["mlp norm's output"] = run.rows * shape.hidden * run.itemsize
    return inputs | activation("mlp", shape, run.tokens, shape.ffn // run.tp, run)


def activation(name: str, shape: ModelShape, rows: int, width: int, run: Pass, scaled: bool = False) -> Tally:
    """Between an MLP's two matrices, of this width on this rank; `scaled`: by each token's weight of an expert."""
    projected = {f"{name} projection": rows * width * run.itemsize * (2 if shape.gated else 1)}
    more = 0 if run.kernels.fused_mlp or not shape.gated else 2 + scaled  # silu(gate), up, and their product
    return projected | {f"{name} activation": rows * width * run.itemsize * (1 + more)}


def experts(shape: ModelShape, run: Pass, dropped: frozenset[str] = frozenset()) -> Tally:
    """Of a layer with experts: tokens go to the ranks of their experts, so a rank's rows are those that it gets."""
    e, r = run.itemsize, run.rows
    kept = norm("mlp", shape.hidden, r, run)
    kept["mlp norm's output"] = r * shape.hidden * e
    if "moe" in dropped:
        return kept
    if "layernorm" in dropped:
        del kept["mlp norm's output"]
    kept |= _routing(shape, run)
    received = int(r * shape.topk * run.etp * run.imbalance)
    kept["tokens of experts"] = received * (shape.hidden * e + STATISTIC)
    kept |= activation("experts", shape, received, shape.moe_ffn // run.etp, run, scaled=True)
    if "moe_act" in dropped:
        del kept["experts activation"]
    if shape.shared_ffn and "shared_experts" not in dropped:
        kept |= activation("shared experts", shape, run.tokens, shape.shared_ffn // run.tp, run)
    return kept


def _routing(shape: ModelShape, run: Pass) -> Tally:
    """Which experts are chosen, with which weights, and the order that tokens are sent in."""
    chosen = shape.topk * (2 * INDEX + STATISTIC)
    sorted_ = shape.experts * INDEX
    affinities = (shape.experts * (STATISTIC + 1) + STATISTIC) if shape.sigmoid_router else 0
    groups = (2 * shape.router_groups + shape.router_groups // 2) * INDEX
    return {"routing": run.rows * (chosen + sorted_ + affinities + groups)}


def norm(name: str, width: int, rows: int, run: Pass) -> Tally:
    """A norm's input and statistics; its output is kept by what reads it."""
    copies = 1 if run.kernels.fused_norm else 2
    return {f"{name} norm's input": rows * width * run.itemsize * copies, f"{name} norm's statistics": rows * STATISTIC}


def ends(shape: ModelShape, run: Pass, is_first: bool, is_last: bool) -> int:
    """Bytes that the ends of the model keep: token ids, and the input of the final norm."""
    kept = run.tokens * INDEX if is_first else 0
    return kept + (sum(norm("final", shape.hidden, run.rows, run).values()) if is_last else 0)


def chunk(shape: ModelShape, run: Pass, moe: tuple[bool, ...], recompute: Recompute) -> int:
    """Bytes that these layers of a virtual stage keep of one micro-batch. `moe`: of each, whether it has experts."""
    whole = len(moe) - sum(moe), sum(moe)
    if recompute.granularity != "full":
        dropped = recompute.modules if recompute.granularity == "selective" else frozenset()
        return whole[0] * layer(shape, False, run, dropped) + (whole[1] and whole[1] * layer(shape, True, run, dropped))
    one = run.rows * shape.hidden * run.itemsize
    if recompute.distributed and not run.sequence_parallel:
        one //= run.tp
    if recompute.method == "block":
        first = min(recompute.num_layers, len(moe))
        rest = moe[first:]
        return first * one + sum(layer(shape, kind, run) for kind in rest)
    return -(-len(moe) // recompute.num_layers) * one
