"""Mistral 7B v0.3, Nemo and Small: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE."""

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    check_no_window,
    read_decoder,
)
from models.hf_config import HFConfig


def translate(config: HFConfig) -> Architecture:
    """Translate a Mistral config. Raises ValueError if a value is not supported."""
    check_no_window(config)
    return read_decoder(config)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    translate=translate,
    table=(*EMBEDDINGS, *ATTENTION, *DENSE_MLP),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS | dict(head_dim=None, num_key_value_heads=8, sliding_window=4096),
)
