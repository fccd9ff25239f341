"""Building blocks of image models: the translation of their nested configs, and table rows for the vision tower.

The vision tower is a module of transformers. It has the name `visual` in the model on the first pipeline stage. Each of its
parameters is equal to a tensor in the Hugging Face folder. Every tensor-parallel rank has the whole tower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from models.architecture import VISION_PREFIX, Architecture, VisionTower
from models.conversion.mapping import ParamMapping
from models.hf_config import HFConfig
from parallel.rope import rope_axes

_ROPE_FIELDS = ("rope_parameters", "rope_scaling")

TOWER_DEFAULTS: dict[str, Any] = dict(
    num_heads=16,
    in_channels=3,
    spatial_merge_size=2,
    temporal_patch_size=2,
    out_hidden_size=3584,
    rope_parameters=None,
)
"""Defaults of transformers for fields of vision_config that the families have in common."""
# Shapes of the tensors of the tower, as keys of Architecture.sizes. `tower_merged`: width of merge_size**2 patches together.
WIDTH, QKV, MERGED = ("tower_hidden",), ("tower_qkv",), ("tower_merged",)
PATCH_EMBEDDING = ("tower_hidden", "channels", "frames", "patch", "patch")
ATTENTION: dict[str, tuple[str, ...]] = {
    "attn.qkv.weight": ("tower_qkv", "tower_hidden"),
    "attn.qkv.bias": QKV,
    "attn.proj.weight": ("tower_hidden", "tower_hidden"),
    "attn.proj.bias": WIDTH,
}


def tower_rows(hf_prefix: str, shapes: Mapping[str, tuple[str, ...]]) -> tuple[ParamMapping, ...]:
    """Return one row for each tensor of the tower. `shapes`: name of a tensor after `hf_prefix` -> its shape."""
    return tuple(ParamMapping(VISION_PREFIX + name, (hf_prefix + name,), (shape,)) for name, shape in shapes.items())


def in_block(shapes: Mapping[str, tuple[str, ...]], block: str = "blocks.{block}.") -> dict[str, tuple[str, ...]]:
    """Return `shapes` with `block` before each name."""
    return {block + name: shape for name, shape in shapes.items()}


def with_hf_prefix(rows: Sequence[ParamMapping], prefix: str) -> tuple[ParamMapping, ...]:
    """Return the rows of a decoder, with `prefix` in place of `model.` at the start of the names of Hugging Face tensors."""
    renamed = (tuple(prefix + n.removeprefix("model.") if n.startswith("model.") else n for n in r.hf) for r in rows)
    return tuple(replace(row, hf=names) for row, names in zip(rows, renamed, strict=True))


def split_rope(fields: Mapping[str, Any], path: Any) -> tuple[dict[str, Any], list[int], bool]:
    """Return (fields without the keys of multimodal RoPE, mrope_section, mrope_interleaved).

    Raises ValueError if the fields have no mrope_section.
    """
    plain, found = dict(fields), dict[str, Any]()
    for name in _ROPE_FIELDS:
        if not isinstance(fields.get(name), dict):
            continue
        parameters = dict(fields[name])
        found |= {key: parameters.pop(key) for key in ("mrope_section", "mrope_interleaved") if key in parameters}
        kind = parameters.pop("type", None)
        kind = parameters.get("rope_type", kind)
        parameters["rope_type"] = "default" if kind in (None, "mrope") else kind
        plain[name] = parameters
    if "mrope_section" not in found:
        raise ValueError(f"{path}: mrope_section is missing in rope_parameters; it is needed to build the model.")
    return plain, found["mrope_section"], bool(found.get("mrope_interleaved", False))


def read_tower(config: HFConfig, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (fields of the tower's config, sizes of its tensors). Raises ValueError if a value is not supported."""
    tower = config.nested("vision_config", defaults)
    # None of these fields changes the outputs for images. `in_chans` and `spatial_patch_size` repeat other fields.
    tower.read_fields.update(("initializer_range", "tokens_per_second", "spatial_patch_size", "in_chans"))
    fields = {name: tower[name] for name in defaults}
    tower.check_all_fields_read()
    width, merge = fields["hidden_size"], fields["spatial_merge_size"]
    return fields, dict(
        tower_hidden=width,
        tower_qkv=3 * width,
        tower_ffn=fields["intermediate_size"],
        tower_merged=width * merge**2,
        tower_positions=fields.get("num_position_embeddings", 0),
        channels=fields["in_channels"],
        frames=fields["temporal_patch_size"],
        patch=fields["patch_size"],
    )


def with_tower(
    language: Architecture,
    config: HFConfig,
    model_type: str,
    tower: tuple[dict[str, Any], dict[str, int]],
    section: Sequence[int],
    interleaved: bool,
) -> Architecture:
    """Return the architecture of an image model. Raises ValueError if the tower does not fit the language model.

    `language`: architecture of the language model. `model_type`: type of the tower's config in transformers. `tower`: result of
    `read_tower`. `section`, `interleaved`: see `parallel.rope.rope_axes`.
    """
    fields, sizes = tower
    width = language.transformer["hidden_size"]
    if fields["out_hidden_size"] != width:
        raise ValueError(
            f"{config.path}: out_hidden_size={fields['out_hidden_size']} of vision_config is not supported; expected the "
            f"hidden_size {width} of the language model."
        )
    config.read_fields.update(("video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id"))
    assert language.rope is not None, "language models with images have a rotary embedding"
    try:
        axes = rope_axes(section, language.rotary_dim // 2, interleaved)
    except ValueError as error:
        raise ValueError(f"{config.path}: {error}") from error
    features = len(fields.get("deepstack_visual_indexes", ()))
    vision = VisionTower(
        model_type=model_type,
        config=fields,
        image_token=config["image_token_id"],
        merge_size=fields["spatial_merge_size"],
        rope_axes=axes,
        repeats=dict(block=fields["depth"], feature=features),
    )
    return replace(language, vision=vision, sizes=language.sizes | sizes)
