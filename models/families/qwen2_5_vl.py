"""Qwen2.5-VL: a vision tower with window attention, and the decoder of Qwen2 with multimodal RoPE (arXiv:2502.13923).

Published configs have the fields of the language model at the top level. transformers 5 writes them into `text_config`.
"""

from typing import Any

from models.architecture import Architecture, Family
from models.families import decoder_blocks as decoder
from models.families.vision_blocks import (
    ATTENTION,
    MERGED,
    PATCH_EMBEDDING,
    TOWER_DEFAULTS,
    WIDTH,
    in_block,
    read_tower,
    split_rope,
    tower_rows,
    with_tower,
)
from models.hf_config import HFConfig

_TEXT_DEFAULTS: dict[str, Any] = (
    decoder.DEFAULTS
    | decoder.FULL_ATTENTION_DEFAULTS
    | dict(head_dim=None, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
)
_TOWER_DEFAULTS: dict[str, Any] = TOWER_DEFAULTS | dict(
    depth=32,
    hidden_size=3584,
    hidden_act="silu",
    intermediate_size=3420,
    patch_size=14,
    window_size=112,
    fullatt_block_indexes=[7, 15, 23, 31],
)
_OWN_FIELDS = (  # fields at the top level that do not belong to the language model
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("vision_token_id", "text_config"),
)


def translate(config: HFConfig) -> Architecture:
    """Translate a Qwen2.5-VL config. Raises ValueError if a value is not supported."""
    outer = {name: value for name, value in config.fields.items() if name not in _OWN_FIELDS}
    nested = config.fields.get("text_config")
    # section: mrope_section, the numbers of pairs of components that rotate by the positions along time, height and width
    fields, section, _ = split_rope(nested if isinstance(nested, dict) else outer, config.path)
    fields["tie_word_embeddings"] = bool(outer.get("tie_word_embeddings") or fields.get("tie_word_embeddings"))
    text = config.nested("text_config", _TEXT_DEFAULTS, fields)
    config.read_fields.update(("text_config", "tie_word_embeddings"))
    if nested is None:
        config.read_fields.update(outer)
    decoder.check_full_attention(text)
    language = decoder.read_decoder(text, parts=frozenset(["qkv_bias"]))
    text.check_all_fields_read()
    tower = read_tower(config, _TOWER_DEFAULTS)
    return with_tower(language, config, "qwen2_5_vl_vision", tower, section, interleaved=False)


_MLP = {
    "mlp.gate_proj.weight": ("tower_ffn", "tower_hidden"),
    "mlp.gate_proj.bias": ("tower_ffn",),
    "mlp.up_proj.weight": ("tower_ffn", "tower_hidden"),
    "mlp.up_proj.bias": ("tower_ffn",),
    "mlp.down_proj.weight": ("tower_hidden", "tower_ffn"),
    "mlp.down_proj.bias": WIDTH,
}
_TOWER = (
    {"patch_embed.proj.weight": PATCH_EMBEDDING}
    | in_block({"norm1.weight": WIDTH, "norm2.weight": WIDTH} | ATTENTION | _MLP)
    | {
        "merger.ln_q.weight": WIDTH,
        "merger.mlp.0.weight": ("tower_merged", "tower_merged"),
        "merger.mlp.0.bias": MERGED,
        "merger.mlp.2.weight": ("hidden", "tower_merged"),
        "merger.mlp.2.bias": ("hidden",),
    }
)

QWEN2_5_VL = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    translate=translate,
    table=(
        *(*decoder.EMBEDDINGS, *decoder.ATTENTION, *decoder.QKV_BIAS, *decoder.DENSE_MLP),
        *tower_rows("visual.", _TOWER),
    ),
    engine_fused_params=decoder.ENGINE_FUSED_PARAMS,
    peft_prefixes={"model.layers.": "model.language_model.layers."},
    defaults=dict(image_token_id=151655, tie_word_embeddings=False),
)
