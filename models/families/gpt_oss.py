"""gpt-oss: attention sinks, sliding windows in every second layer, YaRN, biases, and experts with clamped gates.

The input of an expert's down projection is (u + 1) * g * sigmoid(1.702 * g), where g and u are the clamped outputs of its gate
and of its up projection. Checkpoints stack the experts of a layer in one tensor, and published checkpoints store the matrices of
the experts in MXFP4 (models/conversion/expert_stacks.py). One matrix of an expert contains the gate and the up projection: its
rows belong alternately to the gate and to the up projection.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.expert_stacks import QUANT_METHOD, is_mxfp4
from models.conversion.mapping import InterleavedMLPMapping, ParamMapping
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    MOE_NORM,
    OUTPUT_PROJECTION_BIAS,
    QKV_BIAS,
    attention_parts,
    read_decoder,
    read_windows,
)
from models.hf_config import HFConfig

_LAYER, _HF_LAYER = "decoder.layers.{layer}", "model.layers.{layer}"
_EXPERT, _HF_EXPERT = f"{_LAYER}.mlp.experts.{{expert}}", f"{_HF_LAYER}.mlp.experts.{{expert}}"
_TIED = "tied embeddings"  # SGLang would leave its output layer uninitialized
_YARN = dict(  # rope_parameters that transformers uses if a config does not have this field
    rope_type="yarn",
    factor=32.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=4096,
)


def translate(config: HFConfig) -> Architecture:
    """Translate a gpt-oss config. Raises ValueError if a value is not supported."""
    config.expect(swiglu_alpha=1.702, experts_per_token=(None, config["num_experts_per_tok"]))
    # This field repeats original_max_position_embeddings of the rotary embedding.
    config.read_fields.add("initial_context_length")
    if config["quantization_config"] is not None and not is_mxfp4(config.fields):
        raise ValueError(
            f"{config.path}: quantization_config={config['quantization_config']!r} is not supported; expected "
            f"quant_method={QUANT_METHOD!r} or no quantization."
        )
    if not config.fields.get("rope_parameters") and not config.fields.get("rope_scaling"):
        config = replace(config, fields=config.fields | dict(rope_parameters=_YARN, rope_scaling=None))
    arch = read_decoder(
        config,
        parts=attention_parts(config) | {"moe_bias"} | ({_TIED} if config["tie_word_embeddings"] else set()),
        softmax_type="learnable",
        num_moe_experts=config.any_spelling("num_experts", "num_local_experts"),
        moe_ffn_hidden_size=config["intermediate_size"],
        moe_layer_freq=[1] * config["num_hidden_layers"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_pre_softmax=False,
        activation_func_clamp_value=config["swiglu_limit"],
        glu_linear_offset=1.0,
        **read_windows(config, full_attention_every=2),
    )
    sizes = arch.sizes | dict(heads=config["num_attention_heads"], gate_and_up=2 * config["intermediate_size"])
    return replace(arch, activation="quick_gelu", sizes=sizes)


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    translate=translate,
    table=(
        *(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS),
        ParamMapping(
            f"{_LAYER}.self_attention.core_attention.softmax_offset",
            (f"{_HF_LAYER}.self_attn.sinks",),
            (("heads",),),
            axis=0,
        ),
        MOE_NORM,
        ParamMapping(f"{_LAYER}.mlp.router.weight", (f"{_HF_LAYER}.mlp.router.weight",), (("experts", "hidden"),)),
        ParamMapping(f"{_LAYER}.mlp.router.bias", (f"{_HF_LAYER}.mlp.router.bias",), (("experts",),)),
        InterleavedMLPMapping(
            f"{_EXPERT}.linear_fc1.weight", (f"{_HF_EXPERT}.gate_up_proj",), (("gate_and_up", "hidden"),), axis=0
        ),
        InterleavedMLPMapping(
            f"{_EXPERT}.linear_fc1.bias", (f"{_HF_EXPERT}.gate_up_proj_bias",), (("gate_and_up",),), axis=0
        ),
        ParamMapping(f"{_EXPERT}.linear_fc2.weight", (f"{_HF_EXPERT}.down_proj",), (("hidden", "moe_ffn"),), axis=1),
        ParamMapping(f"{_EXPERT}.linear_fc2.bias", (f"{_HF_EXPERT}.down_proj_bias",), (("hidden",),)),
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS
    | {
        "experts.w13_weight": ("experts.{expert}.gate_up_proj",),
        "experts.w13_weight_bias": ("experts.{expert}.gate_up_proj_bias",),
        "experts.w2_weight": ("experts.{expert}.down_proj",),
        "experts.w2_weight_bias": ("experts.{expert}.down_proj_bias",),
    },
    defaults=DEFAULTS
    | dict(
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        head_dim=64,
        num_key_value_heads=8,
        attention_bias=True,
        sliding_window=128,
        layer_types=None,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        experts_per_token=None,
        quantization_config=None,
    ),
    engine_float32=("experts.w13_weight_bias", "experts.w2_weight_bias"),
    engine_unsupported_parts=frozenset([_TIED]),
    engine_needs_gpu=True,  # because of the attention sinks
    engine_reads_dtype=True,
    # Otherwise, if the package triton_kernels is installed, SGLang would transpose the matrices of the experts.
    engine_args=dict(moe_runner_backend="triton"),
)
