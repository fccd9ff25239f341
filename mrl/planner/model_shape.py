"""What memory depends on in a model, taken once from its family's table, so that thousands of layouts can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from models.conversion.mapping import Mapping, VocabMapping
from models.spec import Architecture, Family

Place = Literal["first", "layer", "expert", "last"]
Head = Literal["vocabulary", "value"]

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
"""How a layer's parameters follow each other in Megatron's flat buffers; it decides where a border between replicas falls."""


@dataclass(frozen=True)
class Parameter:
    """One of a model's parameters: of a layer, of an expert, or of an end of the model."""

    name: str  # Megatron's, within its layer
    place: Place
    shape: tuple[int, ...]  # of the whole; the first dim has the rows of all tensors that it holds
    cut: bool  # over (expert) tensor-parallel ranks
    where: str  # always, dense or moe: which layers have it
    is_vocabulary: bool = False  # rows are padded to a multiple of the ranks

    def numel(self, ranks: int) -> int:
        """Elements that one of `ranks` tensor-parallel ranks holds."""
        if not self.cut:
            return prod(self.shape)
        if self.is_vocabulary:
            return -(-self.shape[0] // ranks) * prod(self.shape[1:])
        return prod(self.shape) // ranks


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A model in numbers; compared by identity, so that results can be cached by it."""

    moe: tuple[bool, ...]  # by layer, whether it has experts
    hidden: int
    heads: int  # of queries
    groups: int  # of keys and values
    head_dim: int  # of queries and keys
    value_dim: int
    ffn: int  # width of a dense layer's MLP
    experts: int
    topk: int  # experts of a token
    moe_ffn: int  # width of an expert
    shared_ffn: int  # width of all shared experts together
    vocab: int
    qk_norm: bool
    q_lora: int = 0  # latent attention: width of what queries are projected up from; 0: of the hidden states
    kv_lora: int = 0  # 0: attention is not latent
    rotary_dim: int = 0  # channels of a head that carry the position; latent attention has them once for all heads
    sigmoid_router: bool = False
    router_groups: int = 0  # groups of experts, of which the router chooses some first
    tied: bool = False
    gated: bool = True
    dropout: bool = False
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Parameter, ...] = ()  # what no optimizer changes

    @classmethod
    def of(cls, family: Family, arch: Architecture) -> ModelShape:
        """The shape of `arch`."""
        t = arch.transformer
        return cls(
            moe=tuple(map(arch.is_moe, range(arch.num_layers))),
            hidden=t["hidden_size"],
            heads=t["num_attention_heads"],
            groups=t["num_query_groups"],
            head_dim=t["kv_channels"],
            value_dim=t.get("v_head_dim", t["kv_channels"]),
            ffn=t["ffn_hidden_size"],
            experts=arch.num_experts,
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
            parameters=_parameters([row for row in family.rows(arch) if not row.is_buffer], arch),
            buffers=_parameters([row for row in family.rows(arch) if row.is_buffer], arch),
        )

    @property
    def num_layers(self) -> int:
        return len(self.moe)

    @property
    def is_latent(self) -> bool:
        return self.kv_lora > 0

    @cached_property
    def num_parameters(self) -> int:
        """Of the whole model, without padding."""
        dense, moe = self.num_layers - sum(self.moe), sum(self.moe)
        layers = {"always": dense + moe, "dense": dense, "moe": moe}
        total = 0
        for p in self.parameters:
            copies = layers[p.where] if p.place in ("layer", "expert") else 1
            total += copies * prod(p.shape) * (self.experts if p.place == "expert" else 1)
        return total


def _parameters(rows: Sequence[Mapping], arch: Architecture) -> tuple[Parameter, ...]:
    found = [_parameter(row, arch) for row in rows]
    return tuple(sorted(found, key=_order))


def _order(p: Parameter) -> tuple[int, int]:
    if p.place not in ("layer", "expert"):
        return (0 if p.place == "first" else 2, 0)
    return 1, next(n for n, start in enumerate(MODULE_ORDER) if p.name.startswith(start))


def _parameter(row: Mapping, arch: Architecture) -> Parameter:
    shapes = list(row.hf_shapes(arch.sizes).values())
    name = row.megatron.removeprefix("decoder.layers.{layer}.")
    place: Place = "expert" if "{expert}" in name else "layer"
    if "{layer}" not in row.megatron:
        place = "first" if name.startswith("embedding.") else "last"
    whole = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if row.axis == 0 else shapes[0]
    assert len(shapes) == 1 or row.axis == 0, f"{row.megatron}: several tensors are stacked along rows"
    is_vocabulary = isinstance(row, VocabMapping)
    where = row.where if row.where in ("dense", "moe") else "always"
    return Parameter(name, place, whole, row.axis is not None, where, is_vocabulary)
