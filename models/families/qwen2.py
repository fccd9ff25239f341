"""Qwen2 and Qwen2.5 (dense): as Llama, with biases of queries, keys and values, none of the output projection."""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSIONS,
    FULL_ATTENTION_DEFAULTS,
    QKV_BIAS,
    check_full_attention,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a Qwen2 config; raises ValueError at a flag whose meaning this family does not implement."""
    check_full_attention(config)
    config.expect(use_mrope=False)  # written for text models too; transformers does not read it
    return read_decoder(config, parts=frozenset(["qkv_bias"]))


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    engine_fusions=ENGINE_FUSIONS,
    defaults=DEFAULTS | FULL_ATTENTION_DEFAULTS | dict(head_dim=None, num_key_value_heads=32, use_mrope=False),
)
