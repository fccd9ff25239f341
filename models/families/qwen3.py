"""Qwen3 (dense): RMSNorm, grouped-query attention with query/key norms, gated SiLU MLP, RoPE."""

from models.families.decoder import ATTENTION, DENSE_MLP, EMBEDDINGS, ENGINE_FUSIONS, QK_NORMS, read_decoder
from models.spec import Architecture, Family, HFConfig


def read(config: HFConfig) -> Architecture:
    """Translate a Qwen3 config; raises ValueError at a flag whose meaning this family does not implement."""
    config.expect(attention_bias=False, use_sliding_window=False)
    return read_decoder(config, qk_layernorm=True)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    read=read,
    table=(*EMBEDDINGS, *ATTENTION, *QK_NORMS, *DENSE_MLP),
    engine_fusions=ENGINE_FUSIONS,
)
