"""GLM-4-0414 and GLM-Z1 (dense models): norms before and after each block, interleaved RoPE on a part of each head.

A checkpoint stores the gate and the up projection of a layer in one tensor. `mrl family derive` wrote this file.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mapping import GatedMLPMapping, ParamMapping
from models.families.decoder_blocks import (
    ATTENTION,
    EMBEDDINGS,
    QKV_BIAS,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a config of Glm4ForCausalLM. Raises ValueError if a value is not supported."""
    optional_parts = dict(qkv_bias=config["attention_bias"], post_norms=True)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    arch = read_decoder(
        config,
        parts=frozenset(part for part, is_present in optional_parts.items() if is_present),
        rope=config.rope(head_dim, partial=True),
    )
    return replace(arch, interleaved_rope=True)


GLM4 = Family(
    architecture="Glm4ForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *QKV_BIAS,
        ParamMapping(
            "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight",
            ("model.layers.{layer}.post_attention_layernorm.weight",),
            (("hidden",),),
            present_in="dense_layers",
        ),
        GatedMLPMapping(
            "decoder.layers.{layer}.mlp.linear_fc1.weight",
            ("model.layers.{layer}.mlp.gate_up_proj.weight",),
            (("ffn", "hidden"), ("ffn", "hidden")),
            axis=0,
            present_in="dense_layers",
        ),
        ParamMapping(
            "decoder.layers.{layer}.mlp.linear_fc2.weight",
            ("model.layers.{layer}.mlp.down_proj.weight",),
            (("hidden", "ffn"),),
            axis=1,
            present_in="dense_layers",
        ),
        ParamMapping(
            "decoder.layers.{layer}.post_self_attn_layernorm.weight",
            ("model.layers.{layer}.post_self_attn_layernorm.weight",),
            (("hidden",),),
        ),
        ParamMapping(
            "decoder.layers.{layer}.post_mlp_layernorm.weight",
            ("model.layers.{layer}.post_mlp_layernorm.weight",),
            (("hidden",),),
        ),
    ),
    engine_fused_params={
        "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "qkv_proj.bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    },
    defaults=dict(
        hidden_act="silu",
        attention_dropout=0.0,
        initializer_range=0.02,
        rms_norm_eps=1.5625e-07,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        tie_encoder_decoder=False,
        is_encoder_decoder=False,
        head_dim=128,
        num_key_value_heads=2,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
)
