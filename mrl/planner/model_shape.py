"""Sizes of one model: widths, number of layers, and the shape of every parameter.

The planner computes bytes and seconds from these sizes. ModelShape.of reads the widths from the Architecture of the model, and
the shapes of the parameters from the conversion table of its family. It does this once, so a search can evaluate thousands of
layouts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from models.architecture import Architecture, Family
from models.conversion.mapping import ParamMapping, VocabMapping

ParameterLocation = Literal["first", "layer", "expert", "last"]
"""Location of a parameter in the model.

first: in the embedding. layer: once in each layer. expert: once in each expert of each layer. last: in the final norm or the
output layer.
"""
HeadKind = Literal["vocabulary", "value"]
"""Output for each token: logits of the vocabulary, or one value (critic)."""

MODULE_ORDER = (
    "input_layernorm.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.kv_layernorm.",
    "self_attention.k_layernorm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc2.",
)
"""Order of a layer's parameters in Megatron's flat buffers.

The ranks that have the same parameters shard the optimizer state of a buffer. The order determines which parameters each shard
contains.
"""


@dataclass(frozen=True)
class ParameterShape:
    """Shape of one parameter of a layer, an expert, the embedding, the final norm or the output layer.

    It may also be the shape of an untrained tensor: a buffer of a torch module, such as the correction bias of a router.
    """

    name: str  # Megatron's name, without the prefix of its layer
    location: ParameterLocation
    shape: tuple[int, ...]  # without tensor parallelism; a fused parameter has the rows of all its tensors in dim 0
    is_sharded: bool  # whether tensor parallelism (for experts: expert tensor parallelism) shards the parameter
    present_in: str  # the layers that have the parameter: "always" (all layers), "dense" or "moe"
    is_vocabulary: bool = False  # dim 0 of `shape` is the vocabulary without padding; shard_numel pads it

    @property
    def numel(self) -> int:
        """Number of elements without tensor parallelism."""
        return prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Return the number of elements on one of `ranks` tensor-parallel ranks."""
        if not self.is_sharded:
            return self.numel
        if self.is_vocabulary:
            return -(-self.shape[0] // ranks) * prod(self.shape[1:])
        return self.numel // ranks


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Sizes of one model. Instances are hashed by identity, so that functions with `lru_cache` can take them as arguments."""

    moe: tuple[bool, ...]  # [layers] whether the layer has experts
    hidden: int  # width of the hidden states
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads
    head_dim: int  # width of a query head and of a key head
    value_dim: int  # width of a value head
    ffn: int  # width of a dense layer's MLP
    num_experts: int
    topk: int  # number of experts that the router chooses for each token
    moe_ffn: int  # width of an expert
    shared_ffn: int  # width of all shared experts together
    vocab: int  # number of tokens in the vocabulary
    qk_norm: bool  # whether attention normalizes queries and keys
    q_lora: int = 0  # width of the compressed queries of latent attention; 0 if queries are not compressed
    kv_lora: int = 0  # width of the compressed keys and values of latent attention; 0 if attention is not latent
    rotary_dim: int = 0  # channels of a head that have a rotary embedding
    sigmoid_router: bool = False  # whether the router scores experts with a sigmoid instead of a softmax
    router_groups: int = 0  # number of groups of experts; the router chooses groups first, then experts in these groups
    tied: bool = False  # whether the output layer and the embedding share their weights
    gated: bool = True  # whether MLPs have a gate
    dropout: bool = False  # whether layers have dropout of hidden states
    parameters: tuple[ParameterShape, ...] = ()  # trainable parameters
    # Buffers of torch modules: the float32 correction biases of routers, which no optimizer updates
    untrained_tensors: tuple[ParameterShape, ...] = ()

    @classmethod
    def of(cls, family: Family, arch: Architecture, *, hidden_dropout: float = 0.0) -> ModelShape:
        """Return the sizes of the model `arch`.

        `family`: model family, which has the table of the model's parameters. `hidden_dropout`: megatron.hidden_dropout.
        """
        t, rows = arch.transformer, family.rows(arch)
        return cls(
            moe=tuple(map(arch.is_moe, range(arch.num_layers))),
            hidden=t["hidden_size"],
            num_heads=t["num_attention_heads"],
            num_kv_heads=t["num_query_groups"],
            head_dim=t["kv_channels"],
            value_dim=t.get("v_head_dim", t["kv_channels"]),
            ffn=t["ffn_hidden_size"],
            num_experts=arch.num_experts,
            topk=t.get("moe_router_topk", 0),
            moe_ffn=t.get("moe_ffn_hidden_size", 0),
            shared_ffn=t.get("moe_shared_expert_intermediate_size") or 0,
            vocab=arch.vocab_size,
            qk_norm=t.get("qk_layernorm", False),
            q_lora=t.get("q_lora_rank") or 0,
            kv_lora=t.get("kv_lora_rank") or 0,
            rotary_dim=arch.rope.dim,
            sigmoid_router=t.get("moe_router_score_function") == "sigmoid",
            router_groups=t.get("moe_router_num_groups") or 0,
            tied=arch.tied_embeddings,
            gated=t["gated_linear_unit"],
            parameters=_parameter_shapes([row for row in rows if not row.is_buffer], arch),
            dropout=hidden_dropout > 0,
            untrained_tensors=_parameter_shapes([row for row in rows if row.is_buffer], arch),
        )

    @property
    def num_layers(self) -> int:
        return len(self.moe)

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_lora > 0

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts in all layers."""
        return sum(self.moe) * self.num_experts * self.parameters_per_expert

    @cached_property
    def num_parameters(self) -> int:
        """Number of trainable parameters of the model, without padding."""
        return self.num_weights - sum(self.moe) * sum(p.numel for p in self.untrained_tensors)

    @cached_property
    def num_weights(self) -> int:
        """Number of parameters and correction biases of the model, without padding. Engines receive all of them."""
        return self.dense_weights + self.expert_parameters

    @cached_property
    def dense_weights(self) -> int:
        """Number of weights of the model, without the weights of routed experts."""
        ends = sum(p.numel for p in self.parameters if p.location in ("first", "last"))
        return ends + sum(map(self.layer_weights, self.moe))

    def layer_weights(self, moe: bool) -> int:
        """Return the number of weights of one layer, without routed experts.

        If norms are neglected, one token needs one multiply-add for each of these weights.
        """
        return self._layer_weights[moe]

    @cached_property
    def _layer_weights(self) -> tuple[int, int]:
        """Number of weights without routed experts: (of a dense layer, of a layer with experts)."""
        per_layer = [p for p in (*self.parameters, *self.untrained_tensors) if p.location == "layer"]
        dense, moe = (sum(p.numel for p in per_layer if p.present_in in ("always", kind)) for kind in ("dense", "moe"))
        return dense, moe

    @cached_property
    def parameters_per_expert(self) -> int:
        return sum(p.numel for p in self.parameters if p.location == "expert")

    @cached_property
    def output_macs(self) -> int:
        """Number of multiply-adds of one token in the output layer."""
        return self.hidden * self.vocab

    @cached_property
    def token_macs(self) -> int:
        """Number of multiply-adds of one token in all weight matrices. The arithmetic of `attention_macs` is not included."""
        layers = sum(self.layer_weights(moe) + moe * self.topk * self.parameters_per_expert for moe in self.moe)
        return layers + self.output_macs

    @cached_property
    def attention_macs(self) -> float:
        """Number of multiply-adds for the attention scores and values of one sequence in one layer, divided by L**2.

        L is the number of tokens of the sequence. The attention is causal.
        """
        return self.num_heads * (self.head_dim + self.value_dim) / 2

    @cached_property
    def gathered_kv_width(self) -> int:
        """Number of elements of keys and values that context-parallel ranks gather for one token in one layer."""
        if self.has_latent_attention:
            return self.num_heads * (self.head_dim + self.value_dim)
        return 2 * self.num_kv_heads * self.head_dim


def _parameter_shapes(rows: Sequence[ParamMapping], arch: Architecture) -> tuple[ParameterShape, ...]:
    return tuple(sorted((_parameter_shape(row, arch) for row in rows), key=_flat_buffer_position))


def _flat_buffer_position(p: ParameterShape) -> tuple[int, int]:
    """Return the sort key of a parameter: its position in Megatron's flat buffer (see MODULE_ORDER)."""
    if p.location not in ("layer", "expert"):
        return (0 if p.location == "first" else 2, 0)
    return 1, next(n for n, start in enumerate(MODULE_ORDER) if p.name.startswith(start))


def _parameter_shape(row: ParamMapping, arch: Architecture) -> ParameterShape:
    shapes = list(row.hf_shapes(arch.sizes).values())
    name = row.megatron.removeprefix("decoder.layers.{layer}.")
    location: ParameterLocation = "expert" if "{expert}" in name else "layer"
    if "{layer}" not in row.megatron:
        location = "first" if name.startswith("embedding.") else "last"
    assert len(shapes) == 1 or row.axis == 0, f"{row.megatron}: its {len(shapes)} tensors must be stacked along dim 0"
    fused = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if row.axis == 0 else shapes[0]
    present_in = {"dense_layers": "dense", "moe_layers": "moe"}.get(row.present_in, "always")
    return ParameterShape(name, location, fused, row.axis is not None, present_in, isinstance(row, VocabMapping))
