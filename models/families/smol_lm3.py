"""SmolLM3: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE, but some layers do not rotate queries and keys.

`mrl family derive` wrote this file.
"""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DENSE_MLP,
    DENSE_MLP_BIAS,
    EMBEDDINGS,
    OUTPUT_PROJECTION_BIAS,
    QKV_BIAS,
    check_full_attention,
    read_decoder,
    read_layers_without_rope,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a config of SmolLM3ForCausalLM. Raises ValueError if a value is not supported."""
    check_full_attention(config)
    optional_parts = dict(
        qkv_bias=config["attention_bias"],
        proj_bias=config["attention_bias"],
        mlp_bias=config["mlp_bias"],
    )
    return read_decoder(
        config,
        parts=frozenset(part for part, is_present in optional_parts.items() if is_present),
        **read_layers_without_rope(config),
    )


SMOL_LM3 = Family(
    architecture="SmolLM3ForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *QKV_BIAS,
        *OUTPUT_PROJECTION_BIAS,
        *DENSE_MLP,
        *DENSE_MLP_BIAS,
    ),
    engine_fused_params={},
    defaults=dict(
        hidden_act="silu",
        attention_dropout=0.0,
        initializer_range=0.02,
        rms_norm_eps=1e-06,
        rope_theta=2000000.0,
        tie_word_embeddings=True,
        tie_encoder_decoder=False,
        is_encoder_decoder=False,
        use_sliding_window=False,
        layer_types=None,
        head_dim=None,
        num_key_value_heads=4,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_bias=False,
        mlp_bias=False,
    ),
    supported_by_sglang=False,
)
