"""Qwen3-Next and the text models of Qwen3.5: most layers have a gated delta net, the others have attention with an output gate.

RoPE rotates a part of each head. All norms multiply by 1 + weight, except the norm inside a gated delta net. Dense Qwen3.5 models
have MLPs. Qwen3-Next has routed experts and a shared expert. The output of the shared expert is multiplied by the sigmoid of one
number per token.
"""

from dataclasses import replace
from typing import Any

from models.architecture import Architecture, Family
from models.conversion.mapping import GatedMLPMapping, GatedQKVMapping, ParamMapping, RecurrentGroupsMapping
from models.conversion.mtp_mapping import PREFIXED_LAYER
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    OUTPUT_PROJECTION_BIAS,
    QK_NORMS,
    QKV_BIAS,
    attention_parts,
    moe_fused_params,
    moe_mlp,
    read_decoder,
)
from models.hf_config import HFConfig
from models.multiply_adds import recurrent_value_width
from parallel.rope import Rope

_KINDS = ("linear_attention", "full_attention")
_OTHER_ROPE = "a rotary embedding that differs from rope_theta and partial_rotary_factor of config.json"
_OTHER_LAYERS = "layer_types that differ from full_attention_interval"
_DENSE_LAYERS = "layers without experts"
_MATRICES = ("gate_proj", "up_proj", "down_proj")

_MEGATRON, _HF = "decoder.layers.{layer}.self_attention", "model.layers.{layer}.linear_attn"
_SHARED = "decoder.layers.{layer}.mlp.shared_experts"


def _gated(row: ParamMapping) -> GatedQKVMapping:
    """Return the row of a query, key and value projection with an output gate."""
    shapes = (("q_and_gate", *row.shapes[0][1:]), *row.shapes[1:])
    return GatedQKVMapping(row.megatron, row.hf, shapes, axis=0, part=row.part)


_ATTENTION = tuple(
    replace(row, present_in="attention_layers")
    for row in (
        *(ATTENTION[0], _gated(ATTENTION[1]), ATTENTION[2]),
        *(*map(_gated, QKV_BIAS), *OUTPUT_PROJECTION_BIAS, *QK_NORMS),
    )
)
# Sizes in the shapes of attention (q_and_gate: queries and output gates of all heads) and of a gated delta net:
#   gdn_k: keys of all heads
#   gdn_v: values of all heads
#   gdn_v_heads: number of value heads
#   gdn_v_channels: components of the value of one head
#   gdn_kernel: tokens that the convolution reads
#   gdn_qkvz: queries, keys, values and output gates of all heads
#   gdn_ba: beta and alpha of all value heads
#   one: 1
# RecurrentGroupsMapping also needs the size head_groups, the number of groups of heads: one group for each key head.
_K, _V, _HEADS = ("gdn_k", "hidden"), ("gdn_v", "hidden"), ("gdn_v_heads", "hidden")
_KERNEL = ("one", "gdn_kernel")


def _recurrent(projections: tuple[str, ...], shapes: tuple[tuple[str, ...], ...]) -> tuple[ParamMapping, ...]:
    """Return the rows of a gated delta net.

    `projections`: Hugging Face names of the matrices that read the layer's input. `shapes`: see ParamMapping.shapes.
    """
    rows = (
        RecurrentGroupsMapping(
            f"{_MEGATRON}.conv_weight",
            (f"{_HF}.conv1d.weight",),
            (("gdn_k", *_KERNEL), ("gdn_k", *_KERNEL), ("gdn_v", *_KERNEL)),
            axis=0,
        ),
        ParamMapping(f"{_MEGATRON}.dt_bias", (f"{_HF}.dt_bias",), (("gdn_v_heads",),), axis=0),
        ParamMapping(f"{_MEGATRON}.A_log", (f"{_HF}.A_log",), (("gdn_v_heads",),), axis=0),
        ParamMapping(f"{_MEGATRON}.norm_weight", (f"{_HF}.norm.weight",), (("gdn_v_channels",),)),
        ParamMapping(f"{_MEGATRON}.linear_proj.weight", (f"{_HF}.out_proj.weight",), (("hidden", "gdn_v"),), axis=1),
        RecurrentGroupsMapping(
            f"{_MEGATRON}.linear_in.weight", tuple(f"{_HF}.{name}.weight" for name in projections), shapes, axis=0
        ),
        ParamMapping(
            f"{_MEGATRON}.linear_in.layer_norm_weight", ("model.layers.{layer}.input_layernorm.weight",), (("hidden",),)
        ),
    )
    return tuple(replace(row, present_in="recurrent_layers") for row in rows)


_SHARED_EXPERT = tuple(
    replace(row, present_in="moe_layers", part="shared_experts")
    for row in (
        ParamMapping(
            f"{_SHARED}.gate_weight", ("model.layers.{layer}.mlp.shared_expert_gate.weight",), (("one", "hidden"),)
        ),
        GatedMLPMapping(
            f"{_SHARED}.linear_fc1.weight",
            tuple(f"model.layers.{{layer}}.mlp.shared_expert.{matrix}.weight" for matrix in _MATRICES[:2]),
            (("shared_ffn", "hidden"), ("shared_ffn", "hidden")),
            axis=0,
        ),
        ParamMapping(
            f"{_SHARED}.linear_fc2.weight",
            ("model.layers.{layer}.mlp.shared_expert.down_proj.weight",),
            (("hidden", "shared_ffn"),),
            axis=1,
        ),
    )
)


def _rope(config: HFConfig) -> Rope:
    """Return the rotary embedding without the fields of multimodal RoPE, whose three positions are equal for a text token."""
    fields = dict(config.fields)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(parameters := fields.get(name), dict):
            fields[name] = {
                key: value for key, value in parameters.items() if key not in ("mrope_section", "mrope_interleaved")
            }
    return replace(config, fields=fields).rope(config["head_dim"], partial=True)


def _read_layers(config: HFConfig) -> tuple[list[int], bool]:
    """Return (for each layer, 1 if it is recurrent, else 0; whether `full_attention_interval` alone describes the layers)."""
    kinds, count, every = config["layer_types"], config["num_hidden_layers"], config["full_attention_interval"]
    by_interval = [_KINDS[(number + 1) % every == 0] for number in range(count)]
    kinds = by_interval if kinds is None else kinds
    if len(kinds) != count or not set(kinds) <= set(_KINDS):
        raise ValueError(
            f"{config.path}: layer_types={kinds!r} is not supported; expected {' or '.join(_KINDS)} for each of the {count} "
            "layers."
        )
    return [int(kind == _KINDS[0]) for kind in kinds], kinds == by_interval


def _read(config: HFConfig, parts: frozenset[str] = frozenset(), **transformer: Any) -> Architecture:
    """Translate the fields that both families have. Raises ValueError if a value is not supported.

    `parts`: further optional parts (Architecture.parts). `transformer`: further fields of Megatron's config.
    """
    config.expect(attn_output_gate=True, output_gate_type=(None, "silu", "swish"), use_sliding_window=False)
    # Two fields act only with sliding windows, two describe MTP layers, and the last one is the dtype of states in engines.
    config.read_fields.update(("sliding_window", "max_window_layers", "mtp_num_hidden_layers"))
    config.read_fields.update(("mtp_use_dedicated_embeddings", "mamba_ssm_dtype"))
    recurrent, by_interval = _read_layers(config)
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(
            f"{config.path}: linear_num_value_heads={value_heads} is not supported; expected a multiple of "
            f"linear_num_key_heads={key_heads}."
        )
    rope = _rope(config)
    fraction = config.fields.get("partial_rotary_factor", config.defaults["partial_rotary_factor"])
    others = {_OTHER_LAYERS: not by_interval, _OTHER_ROPE: rope.dim != int(config["head_dim"] * fraction)}
    arch = read_decoder(
        config,
        parts=attention_parts(config) | parts | {part for part, is_present in others.items() if is_present},
        rope=rope,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=recurrent,
        linear_conv_kernel_dim=config["linear_conv_kernel_dim"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        **transformer,
    )
    t = arch.transformer
    keys, values = key_heads * t["linear_key_head_dim"], recurrent_value_width(t)
    sizes = dict(gdn_k=keys, gdn_v=values, gdn_v_heads=value_heads, gdn_v_channels=t["linear_value_head_dim"])
    sizes |= dict(gdn_kernel=t["linear_conv_kernel_dim"], gdn_qkvz=2 * (keys + values), gdn_ba=2 * value_heads)
    return replace(arch, sizes=arch.sizes | sizes | dict(one=1, head_groups=key_heads, q_and_gate=2 * arch.sizes["q"]))


_DEFAULTS = DEFAULTS | dict(
    head_dim=256,
    attention_bias=False,
    partial_rotary_factor=0.25,
    layer_types=None,
    full_attention_interval=4,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    attn_output_gate=True,
    output_gate_type=None,
    use_sliding_window=False,
)
_ENGINE_RENAMES = {".self_attn.": "."}  # in SGLang, the modules of the attention belong to the decoder layer
_UNSUPPORTED = frozenset([_OTHER_LAYERS, _OTHER_ROPE, "qkv_bias", "proj_bias"])


def translate_qwen3_5(config: HFConfig) -> Architecture:
    """Translate the config of a dense Qwen3.5 text model. Raises ValueError if a value is not supported."""
    config.read_fields.add("mlp_only_layers")  # a field of Qwen3-Next, without a meaning in dense models
    return _read(config)


QWEN3_5 = Family(
    architecture="Qwen3_5ForCausalLM",
    translate=translate_qwen3_5,
    table=(
        *(*EMBEDDINGS, *_ATTENTION),
        *_recurrent(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), (_K, _K, _V, _V, _HEADS, _HEADS)),
        *DENSE_MLP,
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS
    | {
        "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
        "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
    },
    defaults=_DEFAULTS | dict(num_key_value_heads=4),
    engine_required_fields=("full_attention_interval",),
    engine_unsupported_parts=_UNSUPPORTED,
    engine_float32=("linear_attn.A_log",),
    engine_renames=_ENGINE_RENAMES,
    engine_needs_gpu=True,
    engine_reads_dtype=True,
    has_mtp_layers=True,
    mtp=PREFIXED_LAYER,
)


def translate_qwen3_next(config: HFConfig) -> Architecture:
    """Translate a Qwen3-Next config. Raises ValueError if a value is not supported."""
    dense, step, count = config["mlp_only_layers"] or [], config["decoder_sparse_step"], config["num_hidden_layers"]
    moe = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(count)]
    others = {_DENSE_LAYERS: not all(moe), _OTHER_ROPE: "rope_theta" not in config.fields}
    return _read(
        config,
        frozenset(["shared_experts"]) | {part for part, is_present in others.items() if is_present},
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=moe,
        moe_router_topk=config["num_experts_per_tok"],
        # True: the softmax is over all experts; False: it is over the chosen experts
        moe_router_pre_softmax=not config["norm_topk_prob"],
        moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
    )


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    translate=translate_qwen3_next,
    table=(
        *(*EMBEDDINGS, *_ATTENTION),
        *_recurrent(("in_proj_qkvz", "in_proj_ba"), (("gdn_qkvz", "hidden"), ("gdn_ba", "hidden"))),
        *(*DENSE_MLP, *moe_mlp("mlp", *_MATRICES), *_SHARED_EXPERT),
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS | moe_fused_params(*_MATRICES),
    defaults=_DEFAULTS
    | dict(
        num_key_value_heads=2,
        mlp_only_layers=None,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts_per_tok=10,
        num_experts=512,
    ),
    engine_required_fields=("full_attention_interval",),
    engine_unsupported_parts=_UNSUPPORTED | {_DENSE_LAYERS},
    engine_float32=("linear_attn.A_log",),
    engine_renames=_ENGINE_RENAMES,
    engine_needs_gpu=True,
    engine_reads_dtype=True,
    has_mtp_layers=True,
    mtp=PREFIXED_LAYER,
)
