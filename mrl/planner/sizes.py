"""Parameters of a model by where they are, and what its tokens cost: from its family's table and its architecture alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from models.conversion.mapping import Mapping
from models.spec import Architecture, Family


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of one model; parameters are counted exactly, without padding of the vocabulary."""

    hidden: int
    moe: tuple[bool, ...]  # [layers] whether each has experts
    embedding: int  # parameters of the embedding
    output: int  # of output layer and final norm; a tied model's output layer counts here too
    attention: int  # of one layer, its norms included
    mlp: int  # of one dense layer's MLP
    shared: int  # of router and shared experts of one layer with experts
    expert: int  # of one expert
    experts: int  # of one layer; 0 in a dense model
    has_shared: bool  # experts that every token goes to
    topk: int
    tied: bool
    output_macs: int  # multiply-adds of a token in the output layer
    pair_macs: float  # of one layer: a sequence of L tokens costs pair_macs * L**2
    kv_width: int  # numbers that attention keeps of a token in one layer, over all heads
    key_value_heads: int  # among which tensor parallelism divides them; 1 of latent attention: every rank has all
    gathered_width: int  # numbers of a token's keys and values in one layer, as context parallelism gathers them

    @classmethod
    def of(cls, family: Family, arch: Architecture) -> ModelSizes:
        """The numbers of `arch`."""
        t, rows = arch.transformer, family.rows(arch)
        layer = [row for row in rows if "{layer}" in row.megatron]
        ends = [row for row in rows if "{layer}" not in row.megatron]
        embedding = _parameters([row for row in ends if row.megatron.startswith("embedding.")], arch)
        output = sum(_parameters([row], arch) for row in ends) - embedding + arch.tied_embeddings * embedding
        return cls(
            hidden=t["hidden_size"],
            moe=tuple(map(arch.is_moe, range(arch.num_layers))),
            embedding=embedding,
            output=output,
            attention=_parameters([row for row in layer if row.where == "always"], arch),
            mlp=_parameters([row for row in layer if row.where == "dense"], arch),
            shared=_parameters([row for row in layer if row.where == "moe" and "{expert}" not in row.megatron], arch),
            expert=_parameters([row for row in layer if "{expert}" in row.megatron], arch),
            experts=arch.num_experts,
            has_shared="shared_experts" in arch.parts,
            topk=t.get("moe_router_topk", 0),
            tied=arch.tied_embeddings,
            output_macs=t["hidden_size"] * arch.vocab_size,
            pair_macs=arch.flops()[1] / arch.num_layers,
            kv_width=t["kv_lora_rank"] + t["qk_pos_emb_head_dim"]
            if arch.is_latent
            else 2 * t["num_query_groups"] * t["kv_channels"],
            key_value_heads=1 if arch.is_latent else t["num_query_groups"],
            gathered_width=_gathered_width(arch),
        )

    @cached_property
    def layers(self) -> int:
        return len(self.moe)

    @cached_property
    def dense_parameters(self) -> int:
        """All but the experts that tokens choose from."""
        ends = self.embedding + self.output - self.tied * self.embedding
        return ends + sum(self.layer_parameters(moe) for moe in self.moe)

    @cached_property
    def expert_parameters(self) -> int:
        """Experts that tokens choose from, of all layers."""
        return sum(self.moe) * self.experts * self.expert

    @cached_property
    def parameters(self) -> int:
        return self.dense_parameters + self.expert_parameters

    @cached_property
    def token_macs(self) -> int:
        """Multiply-adds of a token, without attention's between tokens."""
        layers = sum(self.layer_parameters(moe) + moe * self.topk * self.expert for moe in self.moe)
        return layers + self.output_macs

    def layer_parameters(self, moe: bool) -> int:
        """Of a layer, without the experts that tokens choose from; also the multiply-adds of a token in them, but for norms."""
        return self.attention + (self.shared if moe else self.mlp)


def _gathered_width(arch: Architecture) -> int:
    t = arch.transformer
    if not arch.is_latent:
        return 2 * t["num_query_groups"] * t["kv_channels"]
    return t["num_attention_heads"] * (t["qk_head_dim"] + t["qk_pos_emb_head_dim"] + t["v_head_dim"])


def _parameters(rows: list[Mapping], arch: Architecture) -> int:
    return sum(prod(shape) for row in rows for shape in row.hf_shapes(arch.sizes).values())
