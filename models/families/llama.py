"""Llama 2 and 3: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE, optional biases."""

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
    attention_parts,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a Llama config. Raises ValueError if a value is not supported."""
    # True would mean interleaved RoPE. transformers ignores this field and never interleaves, so mrl accepts only False
    config.expect(rope_interleaved=False)
    parts = attention_parts(config) | ({"mlp_bias"} if config["mlp_bias"] else set())
    return read_decoder(config, parts=parts)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS, *DENSE_MLP, *DENSE_MLP_BIAS),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS
    | dict(attention_bias=False, mlp_bias=False, head_dim=None, num_key_value_heads=None, rope_interleaved=False),
    engine_unsupported_parts=frozenset(["mlp_bias"]),
)
