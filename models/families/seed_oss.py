"""Seed-OSS: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE, separate switches for the biases of the projections.

mrl ignores the dropout rates in configs of this family. Like every model in mrl, the model has dropout only if
`megatron.*_dropout` is set.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    DENSE_MLP_BIAS,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    OUTPUT_PROJECTION_BIAS,
    QKV_BIAS,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a Seed-OSS config. Raises ValueError if a value is not supported."""
    config.read_fields.update(("attention_dropout", "residual_dropout"))
    biases = dict(qkv_bias="attention_bias", proj_bias="attention_out_bias", mlp_bias="mlp_bias")
    parts = frozenset(part for part, field in biases.items() if config[field])
    return read_decoder(replace(config, fields=config.fields | dict(attention_dropout=0.0)), parts=parts)


SEED_OSS = Family(
    architecture="SeedOssForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS, *DENSE_MLP, *DENSE_MLP_BIAS),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS
    | dict(attention_bias=True, attention_out_bias=False, mlp_bias=False, head_dim=128, num_key_value_heads=8),
    supported_by_sglang=False,
)
