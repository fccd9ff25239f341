"""Gemma 3, text models: norms before and after each block, sliding windows, GELU, scaled embeddings, norms of queries and keys.

All norms multiply by 1 + weight. Layers with a sliding window and layers with full attention have different rotary embeddings.
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
    QK_NORMS,
    QKV_BIAS,
    attention_parts,
    read_decoder,
    read_windows,
)
from models.hf_config import HFConfig
from parallel.rope import LinearRope, Rope

_SCALED_ROPE = "RoPE scaling, except linear scaling in layers with full attention"
_OWN_OUTPUT = "untied embeddings"  # SGLang always computes logits with the embedding


def translate(config: HFConfig) -> Architecture:
    """Translate the config of a Gemma 3 text model. Raises ValueError if a value is not supported."""
    config.expect(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=(False, None))
    config.expect(attn_logit_softcapping=None, final_logit_softcapping=None)
    config.read_fields.add("_sliding_window_pattern")  # transformers writes this field, but does not read it
    rope, window_rope = config.rope_by_layer(config["head_dim"], config["rope_theta"], config["rope_local_base_freq"])
    is_scaled = type(rope) not in (Rope, LinearRope) or type(window_rope) is not Rope
    unsupported = {_SCALED_ROPE: is_scaled, _OWN_OUTPUT: not config["tie_word_embeddings"]}
    arch = read_decoder(
        config,
        parts=attention_parts(config)
        | {"post_norms"}
        | {part for part, is_present in unsupported.items() if is_present},
        rope=rope,
        qk_layernorm=True,
        layernorm_zero_centered_gamma=True,
        softmax_scale=config["query_pre_attn_scalar"] ** -0.5,
        **read_windows(config, config["sliding_window_pattern"]),
    )
    return replace(arch, window_rope=window_rope, activation="gelu_tanh", embedding_scale=config["hidden_size"] ** 0.5)


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    translate=translate,
    table=(
        replace(EMBEDDINGS[0], replicated_in_engine=True),
        *(*EMBEDDINGS[1:], *ATTENTION, *QKV_BIAS, *OUTPUT_PROJECTION_BIAS, *QK_NORMS, *POST_NORMS),
        replace(DENSE_MLP[0], hf=("model.layers.{layer}.pre_feedforward_layernorm.weight",)),
        *DENSE_MLP[1:],
    ),
    engine_fused_params=ENGINE_FUSED_PARAMS,
    defaults=DEFAULTS
    | dict(
        hidden_activation="gelu_pytorch_tanh",
        head_dim=256,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        attention_bias=False,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        query_pre_attn_scalar=256,
        sliding_window=4096,
        sliding_window_pattern=6,
        layer_types=None,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    ),
    engine_unsupported_parts=frozenset([_SCALED_ROPE, _OWN_OUTPUT]),
)
