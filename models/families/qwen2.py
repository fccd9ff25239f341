"""Qwen2 and Qwen2.5 (dense): like Llama, with biases of query, key and value projections but not of the output projection."""

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
    """Translate a Qwen2 config; raise ValueError at an unsupported value."""
    check_full_attention(config)
    config.expect(use_mrope=False)  # configs of text models contain it too; transformers ignores it
    return read_decoder(config, parts=frozenset(["qkv_bias"]))


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *QKV_BIAS, *DENSE_MLP),
    engine_fusions=ENGINE_FUSIONS,
    defaults=DEFAULTS | FULL_ATTENTION_DEFAULTS | dict(head_dim=None, num_key_value_heads=32, use_mrope=False),
)
