"""Sizes of one model: widths, number of layers, and the shape of every parameter.

The planner computes bytes and seconds from these sizes. ModelShape.of reads the widths from the Architecture of the model, and
the shapes of the parameters from the conversion table of its family. A search reads them only once, so that it can evaluate
thousands of layouts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from models.architecture import VISION_PREFIX, Architecture, Block, Family
from models.conversion.lora_mapping import RANK, adapted_matrices, adapter_mappings, can_have_adapter
from models.conversion.mapping import ParamMapping
from mrl.planner.parameter_shape import FLOAT32_BYTES, ParameterShape, parameter_shape, parameter_shapes
from parallel.trainer_config import LoraConfig

HeadKind = Literal["vocabulary", "value"]
"""Output for each token: logits of the vocabulary, or one value (critic). The planner has no head "score" (reward model)."""


class LayerKind(NamedTuple):
    """What a layer consists of."""

    blocks: tuple[Block, ...] = ("attention", "dense")  # in order
    indexer: bool = False  # whether the layer has an indexer, which chooses the keys of sparse attention

    @property
    def experts(self) -> bool:
        """Whether the layer has experts."""
        return "moe" in self.blocks

    @property
    def present(self) -> tuple[str, ...]:
        """Values of ParameterShape.present_in with which a layer of this kind has the parameter."""
        return "always", *self.blocks


@dataclass(frozen=True)
class RecurrentShape:
    """Sizes of the recurrent layers of a model: gated delta nets, or Mamba-2 layers."""

    key_heads: int  # Mamba-2: groups of heads
    value_heads: int  # Mamba-2: heads
    key_dim: int  # channels of a key
    value_dim: int  # channels of a value
    kernel: int  # number of tokens that the convolution reads
    is_mamba: bool = False

    @property
    def macs(self) -> int:
        """Number of multiply-adds of one token in the recurrence of a layer; see models.multiply_adds.recurrent_multiply_adds."""
        return (2 if self.is_mamba else 3) * self.value_heads * self.value_dim * self.key_dim

    @property
    def channels(self) -> int:
        """Number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def gathered_width(self) -> int:
        """Number of elements that context-parallel ranks gather for one token in one layer."""
        return self.channels + (1 if self.is_mamba else 2) * self.value_heads


@dataclass(frozen=True)
class IndexerShape:
    """Sizes of the indexers of sparse attention (parallel.sparse_attention). Their weights are never trained."""

    layers: tuple[bool, ...]  # [layers] whether the layer has an indexer
    heads: int
    channels: int  # channels of a query and of a key
    topk: int  # largest number of keys to which a token attends
    matrices: int  # number of weights of the matrices of one indexer
    norm: int  # number of float32 weights of the norm of one indexer

    @classmethod
    def of(cls, arch: Architecture, rows: Sequence[ParamMapping]) -> IndexerShape | None:
        """Return the sizes of the indexers, or None if attention is not sparse. `rows`: their rows of the conversion table."""
        if not arch.has_sparse_attention:
            return None
        t = arch.transformer
        sizes = (t["dsa_indexer_n_heads"], t["dsa_indexer_head_dim"], t["dsa_indexer_topk"])
        matrices, norm = (
            sum(parameter_shape(row, arch).numel for row in rows if row.is_buffer == is_norm)
            for is_norm in (False, True)
        )
        return cls(arch.indexer_layers, *sizes, matrices, norm)

    @property
    def weights(self) -> int:
        """Number of weights of one indexer."""
        return self.matrices + self.norm

    @property
    def pair_macs(self) -> int:
        """Number of multiply-adds for the index score of one query and one key."""
        return self.heads * (self.channels + 1)

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights of one indexer. `itemsize`: bytes of one element of a matrix."""
        return self.matrices * itemsize + self.norm * FLOAT32_BYTES


@dataclass(frozen=True)
class TowerShape:
    """Sizes of the vision tower of an image model."""

    hidden: int  # width of the hidden states of a patch
    ffn: int  # width of the MLPs
    blocks: int
    gated: bool  # whether the MLPs have a gate, and the norms are RMSNorms
    num_feature_layers: int  # number of decoder layers to whose outputs the tower adds features
    patches: int  # number of patches that the tower merges into one image token
    values: int  # number of pixel values in each patch
    trained: bool

    @classmethod
    def of(cls, arch: Architecture, rows: Sequence[ParamMapping], trained: bool) -> TowerShape | None:
        """Return the sizes of the tower, or None if the model reads no images. `rows`: its rows of the conversion table."""
        if arch.vision is None:
            return None
        sizes, vision = arch.sizes, arch.vision
        return cls(
            hidden=sizes["tower_hidden"],
            ffn=sizes["tower_ffn"],
            blocks=vision.repeats["block"],
            gated=any(".gate_proj." in row.megatron for row in rows),
            num_feature_layers=vision.num_features,
            patches=vision.merge_size**2,
            values=sizes["channels"] * sizes["frames"] * sizes["patch"] ** 2,
            trained=trained,
        )


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Sizes of one model. Instances are hashed by identity, so that functions with `lru_cache` can take them as arguments."""

    kinds: tuple[LayerKind, ...]  # [layers]
    hidden: int  # width of the hidden states
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads
    head_dim: int  # width of a query head and of a key head
    value_dim: int  # width of a value head
    ffn: int  # width of a dense layer's MLP
    num_experts: int  # number of routed experts in a layer
    topk: int  # number of experts that the router chooses for each token
    moe_ffn: int  # width of an expert
    shared_ffn: int  # width of all shared experts together
    vocab: int  # number of tokens in the vocabulary
    qk_norm_per_head: bool  # whether attention normalizes the queries and keys of each head
    qk_norm_over_all_heads: bool = False  # whether one norm covers all query heads, and another all key heads
    pre_norms: bool = True  # whether there is a norm before the attention and one before the MLP
    fused_activation: bool = True  # whether a kernel of Megatron computes the gated activation of MLPs
    clamped_gates: bool = False  # whether gates and up projections are clamped
    post_norms: bool = False  # whether there is a norm after the attention and one after the MLP
    q_lora: int = 0  # width of the compressed queries of latent attention; 0 if queries are not compressed
    kv_lora: int = 0  # width of the compressed keys and values of latent attention; 0 if attention is not latent
    rotary_dim: int = 0  # channels of a head that have a rotary embedding
    sigmoid_router: bool = False  # whether the router scores experts with a sigmoid instead of a softmax
    router_groups: int = 0  # number of groups of experts; the router chooses groups first, then experts in these groups
    window: int = 0  # number of tokens to which a token attends in layers with a sliding window; 0: no layer has one
    windowed_fraction: float = 0.0  # fraction of the layers that have a sliding window
    recurrence: RecurrentShape | None = None  # sizes of the recurrent layers; None: no layer is recurrent
    zero_centered_norms: bool = False  # whether norms multiply by 1 + weight
    output_gate: bool = False  # whether attention has an output gate
    shared_gate: bool = False  # whether the output of the shared expert is multiplied by a gate
    tied: bool = False  # whether the output layer and the embedding share their weights
    gated: bool = True  # whether MLPs have a gate
    dropout: bool = False  # whether layers have dropout of hidden states
    parameters: tuple[ParameterShape, ...] = ()  # trainable parameters
    # Buffers of torch modules: the float32 correction biases of routers, which no optimizer updates
    router_buffers: tuple[ParameterShape, ...] = ()
    frozen_vision_weights: int = 0  # number of weights of a tower that is not trained, on the first pipeline stage
    tower: TowerShape | None = None  # sizes of the vision tower, on the first pipeline stage
    indexer: IndexerShape | None = None  # sizes of the indexers; None: attention is not sparse
    mtp_layers: int = 0  # number of trained MTP layers, on the last pipeline stage; no other field counts them

    @classmethod
    def of(
        cls, family: Family, arch: Architecture, train_vision: bool = False, *, hidden_dropout: float = 0.0
    ) -> ModelShape:
        """Return the sizes of the model `arch`.

        `family`: model family, which has the conversion table of the model. `train_vision`: whether the vision tower of an
        image model is trained. `hidden_dropout`: megatron.hidden_dropout.
        """
        t, rows = arch.transformer, [row for row in family.rows(arch) if not row.megatron.startswith(VISION_PREFIX)]
        of_tower = [row for row in family.param_mappings(arch) if row.megatron.startswith(VISION_PREFIX)]
        rows += of_tower if train_vision else []
        of_indexer, rows = [row for row in rows if row.is_frozen], [row for row in rows if not row.is_frozen]
        return cls(
            kinds=tuple(LayerKind(arch.blocks(layer), arch.has_indexer(layer)) for layer in range(arch.num_layers)),
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
            qk_norm_per_head=t.get("qk_layernorm", False),
            qk_norm_over_all_heads="projection_norms" in arch.parts,
            pre_norms="no_pre_norms" not in arch.parts,
            post_norms="post_norms" in arch.parts,
            fused_activation=arch.activation == "silu",
            clamped_gates=t.get("activation_func_clamp_value") is not None,
            q_lora=t.get("q_lora_rank") or 0,
            kv_lora=t.get("kv_lora_rank") or 0,
            rotary_dim=arch.rotary_dim,
            sigmoid_router=t.get("moe_router_score_function") == "sigmoid",
            router_groups=t.get("moe_router_num_groups") or 0,
            window=arch.window,
            windowed_fraction=sum(map(arch.has_window, range(arch.num_layers))) / arch.num_layers,
            recurrence=_recurrent_shape(t) if arch.has_recurrent_layers else None,
            zero_centered_norms=t.get("layernorm_zero_centered_gamma", False),
            output_gate=t.get("attention_output_gate", False),
            shared_gate=t.get("moe_shared_expert_gate", False),
            tied=arch.tied_embeddings,
            gated=t["gated_linear_unit"],
            parameters=parameter_shapes(
                [row for row in rows if not row.is_buffer], arch, family.engine_float32_tensors
            ),
            dropout=hidden_dropout > 0,
            router_buffers=parameter_shapes([row for row in rows if row.is_buffer], arch),
            frozen_vision_weights=0 if train_vision else sum(parameter_shape(row, arch).numel for row in of_tower),
            tower=TowerShape.of(arch, of_tower, train_vision),
            indexer=IndexerShape.of(arch, of_indexer),
            mtp_layers=arch.mtp_layers,
        )

    @classmethod
    def of_adapters(cls, family: Family, arch: Architecture, lora: LoraConfig) -> ModelShape:
        """Return the sizes of the model `arch`, with the parameters of its LoRA adapters in place of its own parameters."""
        rows = [row for row in family.rows(arch) if can_have_adapter(row, lora.experts)]
        targets = adapted_matrices(rows, lora)
        mappings = [mapping for row in rows for mapping in adapter_mappings(row, targets)]
        parameters = parameter_shapes(mappings, replace(arch, sizes=arch.sizes | {RANK: lora.rank}))
        without_weights = dict(router_buffers=(), frozen_vision_weights=0, indexer=None, vocab=0)
        return replace(cls.of(family, arch), parameters=parameters, **without_weights)

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @cached_property
    def moe(self) -> tuple[bool, ...]:
        """Whether each layer has experts [layers]."""
        return tuple(kind.experts for kind in self.kinds)

    @property
    def blocks_per_layer(self) -> int:
        """Number of blocks of each layer: 2, or 1 if each layer has only attention, a recurrence, an MLP, or experts."""
        return len(self.kinds[0].blocks)

    @cached_property
    def has_dense_layers(self) -> bool:
        """Whether some layers have an MLP."""
        return any("dense" in kind.blocks for kind in self.kinds)

    @cached_property
    def num_attention_layers(self) -> int:
        return sum("attention" in kind.blocks for kind in self.kinds)

    @cached_property
    def num_recurrent_layers(self) -> int:
        return sum("recurrent" in kind.blocks for kind in self.kinds)

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_lora > 0

    @property
    def mtp_kind(self) -> LayerKind:
        """What the decoder layer of an MTP layer consists of."""
        return LayerKind(("attention", "moe" if self.num_experts else "dense"))

    @cached_property
    def mtp_parameters(self) -> tuple[ParameterShape, ...]:
        """Parameters of one MTP layer: two norms, the projection, its decoder layer and a norm."""

        def outer(name: str, *shape: int) -> ParameterShape:
            return ParameterShape(f"{name}.weight", "layer", shape, len(shape) > 1, "always")

        norms = [outer(name, self.hidden) for name in ("enorm", "hnorm", "final_layernorm")]
        inner = [
            p for p in self.parameters if p.location in ("layer", "expert") and p.present_in in self.mtp_kind.present
        ]
        return (*norms[:2], outer("eh_proj", self.hidden, 2 * self.hidden), *inner, norms[2])

    @cached_property
    def num_mtp_parameters(self) -> int:
        """Number of trainable parameters of all MTP layers."""
        copies = {"expert": self.num_experts}
        return self.mtp_layers * sum(p.numel * copies.get(p.location, 1) for p in self.mtp_parameters)

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts in all layers."""
        return sum(self.moe) * self.num_experts * self.parameters_per_expert

    @cached_property
    def num_parameters(self) -> int:
        """Number of trainable parameters of the model, without padding and without MTP layers."""
        of_indexers = sum(self.indexer.layers) * self.indexer.weights if self.indexer else 0
        of_routers = sum(self.moe) * sum(p.numel for p in self.router_buffers)
        return self.num_weights - self.frozen_vision_weights - of_routers - of_indexers

    @cached_property
    def num_weights(self) -> int:
        """Number of all weights of the model, without padding: parameters, correction biases, indexers, frozen weights."""
        return self.dense_weights + self.expert_parameters

    @cached_property
    def dense_weights(self) -> int:
        """Number of weights of the model, without the weights of routed experts."""
        ends = sum(p.numel for p in self.parameters if p.location in ("first", "last"))
        return ends + self.frozen_vision_weights + sum(self._weights_of_kind[kind] for kind in self.kinds)

    def layer_weights(self, moe: bool) -> float:
        """Return the number of weights of a layer with experts (`moe`) or without experts. Routed experts do not count.

        Layers with different blocks have different numbers of weights, so the result is a mean over the layers.
        If norms are neglected, one token needs one multiply-add for each of these weights.
        """
        return self._layer_weights[moe]

    @cached_property
    def _layer_weights(self) -> tuple[float, float]:
        """Mean number of weights without routed experts: (of the layers without experts, of the layers with experts)."""
        found = [[self._weights_of_kind[kind] for kind in self.kinds if kind.experts == moe] for moe in (False, True)]
        dense, moe = (sum(weights) / len(weights) if weights else 0 for weights in found)
        return dense, moe

    @cached_property
    def _weights_of_kind(self) -> dict[LayerKind, int]:
        """Number of weights without routed experts, by kind of layer."""
        per_layer = [p for p in (*self.parameters, *self.router_buffers) if p.location == "layer"]
        of_indexer = self.indexer.weights if self.indexer else 0
        return {
            kind: sum(p.numel for p in per_layer if p.present_in in kind.present) + kind.indexer * of_indexer
            for kind in set(self.kinds)
        }

    @cached_property
    def parameters_per_expert(self) -> int:
        return sum(p.numel for p in self.parameters if p.location == "expert")

    @cached_property
    def output_macs(self) -> int:
        """Number of multiply-adds of one token in the output layer."""
        return self.hidden * self.vocab

    @cached_property
    def token_macs(self) -> int:
        """Number of multiply-adds of one token in all weight matrices and recurrences, without those of `attention_macs`."""
        experts = sum(self.moe) * self.topk * self.parameters_per_expert
        recurrences = self.num_recurrent_layers * self.recurrence.macs if self.recurrence else 0
        return sum(self._weights_of_kind[kind] for kind in self.kinds) + experts + recurrences + self.output_macs

    @cached_property
    def attention_macs(self) -> float:
        """Number of multiply-adds for the attention scores and values of one sequence in one layer, divided by L**2.

        L is the number of tokens of the sequence. The attention is causal. In sparse attention, trainers compute the products
        with all keys. The result includes the products of the indexers, as a mean over the layers with attention.
        """
        of_indexer = (
            sum(self.indexer.layers) * self.indexer.pair_macs / self.num_attention_layers if self.indexer else 0
        )
        return (self.num_heads * (self.head_dim + self.value_dim) + of_indexer) / 2

    def limit_to_windows(self, squared_length_per_token: float) -> float:
        """Return `squared_length_per_token`, averaged over the layers. In a layer with a window, it is at most 2 * `window`.

        `squared_length_per_token`: sum of L**2 over the sequences, divided by the sum of L, where L is the length of a
        sequence. A token attends to `squared_length_per_token` / 2 tokens on average. In a layer with a window, it attends to
        at most `window` tokens.
        """
        limited = min(squared_length_per_token, 2.0 * self.window)
        return squared_length_per_token + self.windowed_fraction * (limited - squared_length_per_token)

    @cached_property
    def gathered_kv_width(self) -> int:
        """Number of elements of keys and values that context-parallel ranks gather for one token in one layer."""
        if self.has_latent_attention:
            return self.num_heads * (self.head_dim + self.value_dim)
        return 2 * self.num_kv_heads * self.head_dim


def _recurrent_shape(t: dict[str, Any]) -> RecurrentShape:
    if "mamba_num_heads" in t:
        groups, heads, key_dim, value_dim = (
            t[f"mamba_{n}"] for n in ("num_groups", "num_heads", "state_dim", "head_dim")
        )
        return RecurrentShape(groups, heads, key_dim, value_dim, t["linear_conv_kernel_dim"], is_mamba=True)
    fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return RecurrentShape(*(t[f"linear_{name}"] for name in fields))
