"""Qwen3-VL (dense): a vision tower, and the decoder of Qwen3 with interleaved multimodal RoPE and DeepStack (arXiv:2511.21631).

DeepStack (arXiv:2406.04334): some blocks of the tower have a merger, which reads the hidden states after its block. The outputs
of the mergers are added to the outputs of the first decoder layers, at the image tokens.
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
    with_hf_prefix,
    with_tower,
)
from models.hf_config import HFConfig

_TEXT_DEFAULTS: dict[str, Any] = decoder.DEFAULTS | dict(
    head_dim=128, num_key_value_heads=32, attention_bias=False, rope_theta=5e5
)
_TOWER_DEFAULTS: dict[str, Any] = TOWER_DEFAULTS | dict(
    depth=27,
    hidden_size=1152,
    hidden_act="gelu_pytorch_tanh",
    intermediate_size=4304,
    patch_size=16,
    num_position_embeddings=2304,
    deepstack_visual_indexes=[8, 16, 24],
)


def translate(config: HFConfig) -> Architecture:
    """Translate a Qwen3-VL config. Raises ValueError if a value is not supported."""
    nested = config["text_config"]
    # section: mrope_section, the numbers of pairs of components that rotate by the positions along time, height and width
    fields, section, interleaved = split_rope(nested if isinstance(nested, dict) else {}, config.path)
    if not interleaved:
        raise ValueError(f"{config.path}: mrope_interleaved=False is not supported; expected True.")
    fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    text = config.nested("text_config", _TEXT_DEFAULTS, fields)
    language = decoder.read_decoder(text, parts=decoder.attention_parts(text), qk_layernorm=True)
    text.check_all_fields_read()
    tower = read_tower(config, _TOWER_DEFAULTS)
    return with_tower(language, config, "qwen3_vl_vision", tower, section, interleaved)


def _merger(norm_width: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the tensors of a merger, which maps merge_size**2 patches to one vector of the width of the language model."""
    return {
        "norm.weight": norm_width,
        "norm.bias": norm_width,
        "linear_fc1.weight": ("tower_merged", "tower_merged"),
        "linear_fc1.bias": MERGED,
        "linear_fc2.weight": ("hidden", "tower_merged"),
        "linear_fc2.bias": ("hidden",),
    }


_NORMS = {f"{norm}.{kind}": WIDTH for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
_MLP = {
    "mlp.linear_fc1.weight": ("tower_ffn", "tower_hidden"),
    "mlp.linear_fc1.bias": ("tower_ffn",),
    "mlp.linear_fc2.weight": ("tower_hidden", "tower_ffn"),
    "mlp.linear_fc2.bias": WIDTH,
}
_TOWER = (
    {"patch_embed.proj.weight": PATCH_EMBEDDING, "patch_embed.proj.bias": WIDTH}
    | {"pos_embed.weight": ("tower_positions", "tower_hidden")}
    | in_block(_NORMS | ATTENTION | _MLP)
    | in_block(_merger(WIDTH), "merger.")
    | in_block(_merger(MERGED), "deepstack_merger_list.{feature}.")
)

QWEN3_VL = Family(
    architecture="Qwen3VLForConditionalGeneration",
    translate=translate,
    table=(
        *with_hf_prefix(
            (
                *(
                    *decoder.EMBEDDINGS,
                    *decoder.ATTENTION,
                    *decoder.QKV_BIAS,
                    *decoder.OUTPUT_PROJECTION_BIAS,
                    *decoder.QK_NORMS,
                ),
                *decoder.DENSE_MLP,
            ),
            "model.language_model.",
        ),
        *tower_rows("model.visual.", _TOWER),
    ),
    engine_fused_params=decoder.ENGINE_FUSED_PARAMS,
    engine_prefixes={"model.language_model.": "model."},
    defaults=dict(image_token_id=151655, tie_word_embeddings=False),
)
