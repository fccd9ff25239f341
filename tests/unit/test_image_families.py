"""Configs and tables of image models: every field is accounted for, and conversion is exact for every tensor of the tower."""

import json

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
from parallel.image_packing import multimodal_positions
from parallel.rope import rope_axes

NAMES = list(IMAGE_FAMILIES)


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
