"""Qwen3 (dense): RMSNorm, grouped-query attention with query/key norms, gated SiLU MLP, RoPE."""

from models.families.decoder import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSIONS,
    FULL_ATTENTION_DEFAULTS,
    PROJ_BIAS,
    QK_NORMS,
    QKV_BIAS,
    attention_parts,
    check_full_attention,
    read_decoder,
)
from models.hf_config import HFConfig
from models.spec import Architecture, Family


def translate(config: HFConfig) -> Architecture:
    """Translate a Qwen3 config; raises ValueError at a flag whose meaning this family does not implement."""
    check_full_attention(config)
    return read_decoder(config, parts=attention_parts(config), qk_layernorm=True)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *PROJ_BIAS, *QK_NORMS, *DENSE_MLP),
    engine_fusions=ENGINE_FUSIONS,
    defaults=DEFAULTS | FULL_ATTENTION_DEFAULTS | dict(attention_bias=False, head_dim=128, num_key_value_heads=32),
)
