"""Ministral 3 (text models): RMSNorm, grouped-query attention, gated SiLU MLP, RoPE, query scaling that depends on the position.

`mrl family derive` wrote this file, except for _OTHER_PERIOD.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDINGS,
    read_decoder,
    read_query_scaling,
)
from models.hf_config import HFConfig

_OTHER_PERIOD = "a query scaling with original_max_position_embeddings other than 16384"  # SGLang always takes 16384


def translate(config: HFConfig) -> Architecture:
    """Translate a config of Ministral3ForCausalLM. Raises ValueError if a value is not supported."""
    config.expect(sliding_window=None)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    arch = read_decoder(
        config,
        rope=config.rope(head_dim, without=("llama_4_scaling_beta", "max_position_embeddings")),
    )
    arch = replace(arch, query_scaling=(scaling := read_query_scaling(config)))
    return arch if scaling.period == 16384 else replace(arch, parts=frozenset([_OTHER_PERIOD]))


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *ATTENTION,
        *DENSE_MLP,
    ),
    engine_fused_params={
        "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    },
    defaults=dict(
        sliding_window=None,
        hidden_act="silu",
        attention_dropout=0.0,
        initializer_range=0.02,
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        tie_word_embeddings=False,
        tie_encoder_decoder=False,
        is_encoder_decoder=False,
        head_dim=128,
        num_key_value_heads=8,
    ),
    engine_unsupported_parts=frozenset([_OTHER_PERIOD]),
)
