"""Configs and tables of image models: every field is accounted for, and conversion is exact for every tensor of the tower."""

import json
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_convert_checkpoint import assert_same_tensors, to_hf, to_megatron
from tiny_families import IMAGE_FAMILIES, IMAGE_TOKEN, image_config, make_image_family, prompts_with_images

from models.architecture import Architecture
from models.conversion import convert_checkpoint
from models.conversion.hf_reader import check_hf_folder
from models.families import FAMILIES, family_of
from models.hf_config import HFConfig
from parallel.dims import ParallelDims
from parallel.image_packing import PackedImages, SequenceImages, multimodal_positions
from parallel.rope import rope_axes

NAMES = list(IMAGE_FAMILIES)
QWEN25_VL_7B = dict(
    architectures=["Qwen2_5_VLForConditionalGeneration"],
    attention_dropout=0.0,
    bos_token_id=151643,
    eos_token_id=151645,
    vision_start_token_id=151652,
    vision_end_token_id=151653,
    vision_token_id=151654,
    image_token_id=151655,
    video_token_id=151656,
    hidden_act="silu",
    hidden_size=3584,
    initializer_range=0.02,
    intermediate_size=18944,
    max_position_embeddings=128000,
    max_window_layers=28,
    model_type="qwen2_5_vl",
    num_attention_heads=28,
    num_hidden_layers=28,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    sliding_window=32768,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.41.2",
    use_cache=True,
    use_sliding_window=False,
    vision_config=dict(
        depth=32,
        hidden_act="silu",
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        in_chans=3,
        out_hidden_size=3584,
        patch_size=14,
        spatial_merge_size=2,
        spatial_patch_size=14,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
        tokens_per_second=2,
        temporal_patch_size=2,
    ),
    rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
    vocab_size=152064,
)
QWEN3_VL_4B = dict(
    architectures=["Qwen3VLForConditionalGeneration"],
    image_token_id=151655,
    model_type="qwen3_vl",
    text_config=dict(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        dtype="bfloat16",
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=2560,
        initializer_range=0.02,
        intermediate_size=9728,
        max_position_embeddings=262144,
        model_type="qwen3_vl_text",
        num_attention_heads=32,
        num_hidden_layers=36,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
        rope_theta=5000000,
        tie_word_embeddings=True,
        use_cache=True,
        vocab_size=151936,
    ),
    tie_word_embeddings=True,
    transformers_version="4.57.0.dev0",
    video_token_id=151656,
    vision_config=dict(
        deepstack_visual_indexes=[5, 11, 17],
        depth=24,
        hidden_act="gelu_pytorch_tanh",
        hidden_size=1024,
        in_channels=3,
        initializer_range=0.02,
        intermediate_size=4096,
        model_type="qwen3_vl",
        num_heads=16,
        num_position_embeddings=2304,
        out_hidden_size=2560,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
    ),
    vision_end_token_id=151653,
    vision_start_token_id=151652,
)


@pytest.mark.parametrize(
    ("published", "parameters"), [(QWEN25_VL_7B, 8_292_166_656), (QWEN3_VL_4B, 4_437_815_808)], ids=["7B", "4B"]
)
def test_a_published_config_is_accepted_and_has_the_published_number_of_parameters(published, parameters):
    config = HFConfig("config.json", published)
    family = family_of(config)
    assert sum(prod(shape) for shape in family.hf_shapes(family.read(config)).values()) == parameters


@pytest.fixture
def fields(tmp_path):
    """`fields(name)` returns the config.json that transformers writes for a tiny model."""

    def of(name: str) -> dict:
        image_config(name).save_pretrained(tmp_path)
        return json.loads((tmp_path / "config.json").read_text())

    return of


def read(fields: dict) -> Architecture:
    config = HFConfig("config.json", fields)
    return family_of(config).read(config)


def changed(fields: dict, section: str, **values) -> dict:
    return fields | {section: fields[section] | values}


@pytest.mark.parametrize("name", NAMES)
def test_the_config_of_transformers_is_read(fields, name):
    arch = read(fields(name))
    assert arch.vision.image_token == IMAGE_TOKEN and arch.vision.repeats["block"] == 2
    assert arch.vision.num_features == (1 if name == "qwen3_vl" else 0)
    assert len(arch.vision.rope_axes) == arch.rope.dim // 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("section", ["text_config", "vision_config"])
def test_an_unknown_field_of_a_nested_config_is_an_error(fields, name, section):
    with pytest.raises(ValueError, match="scale_depth=2 is not known to Qwen"):
        read(changed(fields(name), section, scale_depth=2))


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_field_is_an_error(fields, name):
    with pytest.raises(ValueError, match="scale_depth=2 is not known to Qwen"):
        read(fields(name) | dict(scale_depth=2))


@pytest.mark.parametrize(
    ("name", "section", "values", "message"),
    [
        ("qwen3_vl", "vision_config", dict(out_hidden_size=64), "out_hidden_size=64 of vision_config is not supported"),
        ("qwen2_5_vl", "text_config", dict(use_sliding_window=True), "use_sliding_window=True is not supported"),
        ("qwen3_vl", "text_config", dict(rope_parameters=dict(rope_theta=1.0)), "mrope_section is missing"),
        (
            "qwen3_vl",
            "text_config",
            dict(rope_parameters=dict(rope_theta=1.0, mrope_section=[4, 2, 2])),
            "mrope_interleaved=False is not supported",
        ),
        (
            "qwen2_5_vl",
            "text_config",
            dict(rope_parameters=dict(rope_theta=1.0, mrope_section=[4, 2, 2])),
            r"mrope_section=\[4, 2, 2\]: expected three numbers whose sum is 4",
        ),
    ],
)
def test_an_unsupported_value_is_an_error(fields, name, section, values, message):
    with pytest.raises(ValueError, match=message):
        read(changed(fields(name), section, **values))


def test_a_published_config_with_the_language_model_at_the_top_level_is_read(fields):
    nested = fields("qwen2_5_vl")
    text = {k: v for k, v in nested.pop("text_config").items() if k not in ("model_type", "rope_parameters", "dtype")}
    rope = dict(type="mrope", mrope_section=[1, 1, 2])
    flat = nested | text | dict(rope_scaling=rope, rope_theta=5000.0)
    flat["vision_config"] = flat["vision_config"] | dict(in_chans=3, spatial_patch_size=4)
    assert read(flat) == read(fields("qwen2_5_vl"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_table_has_exactly_the_tensors_that_transformers_saves(tmp_path, name, tied):
    config = check_hf_folder(make_image_family(name, tmp_path, tie_word_embeddings=tied))
    arch = family_of(config).read(config)
    rows = family_of(config).param_mappings(arch)
    assert arch.tied_embeddings == tied and len({row.megatron for row in rows}) == len(rows)


@pytest.mark.parametrize("name", NAMES)
def test_an_image_model_converts_to_megatron_and_back_bit_exactly(tmp_path, name):
    model = make_image_family(name, tmp_path / "model")
    to_megatron(model, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", model, tmp_path / "back")
    assert_same_tensors(tmp_path / "back", model)
    assert any("visual" in tensor for tensor in load_file(tmp_path / "back/model.safetensors"))
    assert convert_checkpoint.check_against_checkpoint(HFConfig.load(model), tmp_path / "megatron").passed


def test_features_must_be_added_on_the_first_stage(fields):
    arch = FAMILIES["Qwen3VLForConditionalGeneration"].read(HFConfig("c", fields("qwen3_vl")))
    arch.check_layout(ParallelDims(tp=2, pp=2))
    few = changed(fields("qwen3_vl"), "vision_config", deepstack_visual_indexes=[0, 1])
    with pytest.raises(ValueError, match=r"first 2 layers, which must be in the first stage"):
        read(few).check_layout(ParallelDims(pp=2))


@pytest.mark.parametrize("name", NAMES)
def test_positions_and_axes_are_those_of_transformers(name):
    """Compares the positions of each prompt, and the cosines of the angles of each token."""
    import transformers

    config = image_config(name)
    model = getattr(transformers, config.architectures[0])(config).model
    arch = read(json.loads(config.to_json_string()))
    inv_freq = arch.rope.inv_freq()
    for prompt, images in zip(*prompts_with_images(), strict=True):
        is_image = np.array(prompt) == IMAGE_TOKEN
        grids = images.grid_thw if images else np.empty((0, 3), np.int64)
        found = multimodal_positions(is_image, grids, 2)
        expected, _ = model.get_rope_index(
            torch.tensor([prompt]),
            mm_token_type_ids=torch.from_numpy(is_image.astype(np.int32))[None],
            image_grid_thw=torch.from_numpy(grids) if images else None,
        )
        np.testing.assert_array_equal(found, expected[:, 0])
        cos, _ = model.language_model.rotary_emb(torch.zeros(1), expected)
        of_axis = torch.from_numpy(found)[list(arch.vision.rope_axes)].T.float()  # [tokens, pairs]
        torch.testing.assert_close((of_axis * inv_freq).cos(), cos[0, :, : len(inv_freq)], rtol=0, atol=1e-6)


def test_interleaved_axes_alternate_at_the_beginning():
    assert rope_axes([4, 2, 2], 8, interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
    assert rope_axes([1, 1, 2], 4, interleaved=False) == (0, 1, 2, 2)
    with pytest.raises(ValueError, match="interleaved axes need at most 2 pairs each"):
        rope_axes([2, 3, 3], 8, interleaved=True)


@dataclass
class Pack:
    position_ids: torch.Tensor
    token_index: np.ndarray
    axis_position_ids: torch.Tensor | None = None
    images: PackedImages | None = None


def test_the_pixels_of_a_pack_stay_on_the_host():
    """All packs of a step exist at the same time, and only the first pipeline stage reads pixels."""
    images = SequenceImages.without_images(np.arange(4))
    is_image = np.array([False, True, True, False])
    images.add(slice(0, 4), is_image, np.zeros((8, 6), np.float32), np.array([[1, 2, 4]]), 2)
    pack = Pack(torch.zeros(1, 4, device="meta", dtype=torch.long), np.arange(4))
    found = images.pack(pack, np.arange(4))
    assert found.images.pixel_values.device.type == "cpu" and found.images.pixel_values.shape == (8, 6)
    assert found.images.token_index.device.type == "meta"
