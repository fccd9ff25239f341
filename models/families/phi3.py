"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: RMSNorm, grouped-query attention, gated SiLU MLP, RoPE, which may be partial.

A checkpoint stores the queries, keys and values of a layer in one tensor, and the gate and the up projection in another one.
"""

from dataclasses import replace

from models.architecture import Architecture, Family
from models.conversion.mapping import GatedMLPMapping, QKVMapping
from models.families.decoder_blocks import ATTENTION, DEFAULTS, DENSE_MLP, EMBEDDINGS, check_no_window, read_decoder
from models.hf_config import HFConfig
from parallel.rope import LongRope, Rope

# class of a row of ATTENTION or DENSE_MLP -> the Hugging Face tensor that replaces the separate tensors of this row
_FUSED: dict[type, str] = {QKVMapping: "self_attn.qkv_proj.weight", GatedMLPMapping: "mlp.gate_up_proj.weight"}
# Optional part (Architecture.parts) of a model whose partial_rotary_factor in rope_parameters differs from the one outside of it,
# which is 1 by default. SGLang reads only the one outside, so it does not support this part.
_NESTED_FRACTION = "rope_parameters.partial_rotary_factor"


def translate(config: HFConfig) -> Architecture:
    """Translate a Phi-3 config. Raises ValueError if a value is not supported."""
    config.expect(resid_pdrop=0.0, embd_pdrop=0.0)
    # Some configs contain these fields, but transformers ignores them. So other values are refused: they would have no effect.
    config.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False, full_attn_mod=1, interpolate_factor=1)
    # A field that only LongRoPE uses: mark it as read, because mrl refuses configs with fields that no code has read.
    config.read_fields.add("original_max_position_embeddings")
    check_no_window(config)
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    rope = config.rope(head_dim, partial=True)
    if type(rope) not in (Rope, LongRope):
        raise ValueError(
            f"{config.path}: a rotary embedding of {type(rope).__name__} is not supported; expected default or longrope."
        )
    # SGLang reads partial_rotary_factor only outside of rope_parameters; transformers prefers the value in rope_parameters.
    is_nested = rope.dim != int(head_dim * (config["partial_rotary_factor"] or 1.0))
    return read_decoder(config, rope=rope, parts=frozenset([_NESTED_FRACTION] if is_nested else []))


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    translate=translate,
    table=(
        *EMBEDDINGS,
        *(
            replace(row, hf=(f"model.layers.{{layer}}.{_FUSED[type(row)]}",)) if type(row) in _FUSED else row
            for row in (*ATTENTION, *DENSE_MLP)
        ),
    ),
    engine_fused_params={},  # SGLang stores the same fused tensors
    defaults=DEFAULTS
    | dict(
        rms_norm_eps=1e-5,
        head_dim=None,
        num_key_value_heads=None,
        sliding_window=None,
        partial_rotary_factor=1.0,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_bias=False,
        mlp_bias=False,
        lm_head_bias=False,
        full_attn_mod=1,
        interpolate_factor=1,
    ),
    engine_unsupported_parts=frozenset([_NESTED_FRACTION]),
)
