"""OLMo 2 and OLMo 3: norms after the attention and after the MLP, but no pre-norms.

The queries of all heads together have one norm, and so have the keys. OLMo 3 has layers with a sliding window, which have plain
RoPE. Its other layers may have a scaled RoPE.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.families.decoder_blocks import (
    ATTENTION,
    DEFAULTS,
    DENSE_MLP,
    EMBEDDINGS,
    ENGINE_FUSED_PARAMS,
    OUTPUT_PROJECTION_BIAS,
    POST_NORMS,
    PROJECTION_NORMS,
    QKV_BIAS,
    attention_parts,
    read_decoder,
    read_windows,
    without_pre_norms,
)
from models.hf_config import HFConfig

_PARTS = frozenset(["projection_norms", "post_norms", "no_pre_norms"])
_OTHER_HEADS = "a head_dim other than hidden_size / num_attention_heads"
_TABLE = (
    *EMBEDDINGS,
    *without_pre_norms(*ATTENTION, *DENSE_MLP),
    *(*QKV_BIAS, *OUTPUT_PROJECTION_BIAS),
    *(replace(row, replicated_in_engine=True) for row in PROJECTION_NORMS),
    *POST_NORMS,
)
_DEFAULTS = DEFAULTS | dict(rms_norm_eps=1e-5, attention_bias=False, head_dim=None, num_key_value_heads=None)


def translate_olmo2(config: HFConfig) -> Architecture:
    """Translate an OLMo 2 config. Raises ValueError if a value is not supported."""
    is_other = config["head_dim"] not in (None, config["hidden_size"] // config["num_attention_heads"])
    return read_decoder(config, parts=attention_parts(config) | _PARTS | ({_OTHER_HEADS} if is_other else set()))


def translate_olmo3(config: HFConfig) -> Architecture:
    """Translate an OLMo 3 config. Raises ValueError if a value is not supported."""
    # transformers applies another value only to full attention. In `rope_parameters`, each kind of layer has a value of its own.
    config.expect(rope_theta=500000.0)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    rope, window_rope = config.rope_by_layer(head_dim, config["rope_theta"], config["rope_theta"])
    arch = read_decoder(
        config, parts=attention_parts(config) | _PARTS, rope=rope, **read_windows(config, full_attention_every=4)
    )
    return replace(arch, window_rope=window_rope)


OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    translate=translate_olmo2,
    table=_TABLE,
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=_DEFAULTS,
    engine_unsupported_parts=frozenset([_OTHER_HEADS]),
)
OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    translate=translate_olmo3,
    table=_TABLE,
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=_DEFAULTS | dict(rope_theta=500000.0, sliding_window=4096, layer_types=None),
    supported_by_sglang=False,
)
