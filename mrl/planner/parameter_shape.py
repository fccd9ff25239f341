"""Shapes of the parameters of a model, in the order of Megatron's modules. Flat buffers have the reverse order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from models.architecture import VISION_PREFIX, Architecture
from models.conversion.mapping import ParamMapping, VocabMapping

FLOAT32_BYTES = 4  # bytes of one element
ParameterLocation = Literal["first", "layer", "expert", "last"]
"""Location of a parameter in the model.

first: in the embedding, or in a vision tower that is trained. layer: once in each layer. expert: once in each expert of each
layer. last: in the final norm or the output layer.
"""
MODULE_ORDER = (
    "input_layernorm.",
    "self_attention.conv_weight",
    "self_attention.conv_bias",
    "self_attention.dt_bias",
    "self_attention.A_log",
    "self_attention.D",
    "self_attention.norm_weight",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_in.weight",
    "self_attention.linear_in.layer_norm_weight",
    "self_attention.linear_in.lora.",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.lora.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.kv_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.q_projection_norm.",
    "self_attention.k_projection_norm.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.lora.",
    "mlp.linear_fc2.",
    "post_self_attn_layernorm.",
    "post_mlp_layernorm.",
)
"""Order of a layer's parameters in Megatron's modules. Megatron fills its flat buffers in the reverse order.

The ranks that have the same parameters shard the optimizer state of a buffer. The order determines which parameters each shard
contains.
"""


@dataclass(frozen=True)
class ParameterShape:
    """Shape of one parameter of the model (see ParameterLocation).

    It may also be the shape of an untrained tensor: a buffer of a torch module, such as the correction bias of a router.
    """

    name: str  # Megatron's name, without the prefix of its layer
    location: ParameterLocation
    shape: tuple[int, ...]  # without tensor parallelism; a fused parameter has the rows of all its tensors in dim 0
    is_sharded: bool  # whether tensor parallelism (for experts: expert tensor parallelism) shards the parameter
    present_in: str  # the layers that have the parameter: "always" (all), "dense", "moe", "attention" or "recurrent"
    replicated_in_engine: bool = False  # whether every engine rank has the whole parameter, although trainers shard it
    is_vocabulary: bool = False  # dim 0 of `shape` is the vocabulary without padding; shard_numel pads it
    float32_in_engine: bool = False  # whether SGLang stores the parameter in float32 whatever the dtype of the engine

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


def parameter_shapes(
    rows: Sequence[ParamMapping], arch: Architecture, float32: tuple[str, ...] = ()
) -> tuple[ParameterShape, ...]:
    """Return the shapes of the parameters of these rows of the conversion table, in MODULE_ORDER.

    `float32`: suffixes of the names of the Hugging Face tensors that SGLang stores in float32 (Family.engine_float32_tensors).
    """
    shapes = (replace(parameter_shape(row, arch), float32_in_engine=row.hf[0].endswith(float32)) for row in rows)
    return tuple(sorted(shapes, key=_module_position))


def _module_position(p: ParameterShape) -> tuple[int, int]:
    """Return the sort key of a parameter: its position in the order of Megatron's modules (see MODULE_ORDER)."""
    if p.location not in ("layer", "expert"):
        return (0 if p.location == "first" else 2, int(not p.is_vocabulary))
    return 1, next(n for n, start in enumerate(MODULE_ORDER) if p.name.startswith(start))


def parameter_shape(row: ParamMapping, arch: Architecture) -> ParameterShape:
    """Return the shape of the Megatron parameter of a row of the conversion table."""
    shapes = list(row.hf_shapes(arch.sizes).values())
    name = row.megatron.removeprefix("decoder.layers.{layer}.")
    location: ParameterLocation = "expert" if "{expert}" in name else "layer"
    if "{layer}" not in row.megatron:
        location = "first" if name.startswith(("embedding.", VISION_PREFIX)) else "last"
    assert len(shapes) == 1 or row.axis == 0, f"{row.megatron}: its {len(shapes)} tensors must be stacked along dim 0"
    fused = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if row.axis == 0 else shapes[0]
    kind = row.present_in.removesuffix("_layers")
    present_in = kind if row.present_in.endswith("_layers") else "always"
    return ParameterShape(
        *(name, location, fused, row.axis is not None, present_in),
        row.replicated_in_engine,
        isinstance(row, VocabMapping),
    )
