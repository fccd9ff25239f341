"""MTP layers that are not trained are copied into Hugging Face exports, byte for byte."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import add_mtp_layers, make_family

from models.conversion import convert_checkpoint
from models.conversion.hf_reader import check_hf_folder
from models.conversion.hf_writer import write_export
from models.hf_config import HFConfig

FAMILIES_WITH_MTP = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5")


class Silent:
    """Progress display that shows nothing."""

    def begin(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


def convert(model, output, dtype=None) -> dict[str, torch.Tensor]:
    """Convert a folder to Megatron and back. Returns the tensors of the result."""
    config, checkpoint = HFConfig.load(model), output.with_name("checkpoint")
    convert_checkpoint.to_megatron(config, checkpoint, Silent(), dtype)
    convert_checkpoint.to_hf(checkpoint, config, output, Silent(), max_shard_bytes=30_000)
    return {name: tensor for path in output.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_copied(found: dict[str, torch.Tensor], added: dict[str, torch.Tensor]) -> None:
    for name, tensor in added.items():
        assert convert_checkpoint.is_bit_equal(found[name], tensor), name


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", FAMILIES_WITH_MTP)
@pytest.mark.parametrize("count", [1, 2])
def test_a_conversion_to_megatron_and_back_keeps_the_mtp_layers(tmp_path, name, count):
    model = make_family(name, tmp_path / "model")
    added = add_mtp_layers(model, count)
    found = convert(model, tmp_path / "back")
    assert found.keys() == load_file(model / "model.safetensors").keys()
    assert_copied(found, added)
    check_hf_folder(tmp_path / "back")


def test_a_conversion_to_another_dtype_keeps_the_bytes_of_the_mtp_layers(tmp_path):
    model = make_family("glm4_moe", tmp_path / "model")
    added = add_mtp_layers(model, 4)  # more elements than the rest of the model
    found = convert(model, tmp_path / "back", torch.bfloat16)
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert_copied(found, added)
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", FAMILIES_WITH_MTP)
def test_an_export_has_the_trained_weights_and_the_mtp_layers_of_the_input(tmp_path, name):
    model = make_family(name, tmp_path / "model")
    before = load_file(model / "model.safetensors")
    added = add_mtp_layers(model)
    trained = {name: tensor + 1 for name, tensor in before.items()}
    write_export(trained.items(), HFConfig.load(model), tmp_path / "export", {})
    found = load_file(tmp_path / "export/model.safetensors")
    assert found.keys() == before.keys() | added.keys()
    assert_copied(found, added | trained)


def test_folders_for_engines_have_no_mtp_layers(tmp_path):
    model = make_family("glm4_moe", tmp_path / "model")
    before = load_file(model / "model.safetensors")
    add_mtp_layers(model)
    write_export(before.items(), HFConfig.load(model), tmp_path / "export", {}, copy_mtp=False)
    assert load_file(tmp_path / "export/model.safetensors").keys() == before.keys()


def test_a_reward_model_gets_no_mtp_layers(tmp_path):
    model = make_family("glm4_moe", tmp_path / "model")
    trained = load_file(model / "model.safetensors") | {"score.weight": torch.ones(1, 32)}
    del trained["lm_head.weight"]
    add_mtp_layers(model)
    write_export(trained.items(), HFConfig.load(model).as_reward_model(), tmp_path / "export", {})
    assert load_file(tmp_path / "export/model.safetensors").keys() == trained.keys()


def test_a_folder_without_weights_gives_the_config_of_a_conversion(tmp_path):
    model = make_family("glm4_moe", tmp_path / "model")
    before, config = load_file(model / "model.safetensors"), HFConfig.load(model)
    convert_checkpoint.to_megatron(config, tmp_path / "checkpoint", Silent())
    (model / "model.safetensors").unlink()
    convert_checkpoint.to_hf(tmp_path / "checkpoint", config, tmp_path / "back", Silent())
    assert load_file(tmp_path / "back/model.safetensors").keys() == before.keys()


def test_an_mtp_layer_in_an_unsupported_dtype_is_refused(tmp_path):
    model = make_family("glm4_moe", tmp_path / "model")
    tensors = load_file(model / "model.safetensors") | {
        "model.layers.2.eh_proj.weight": torch.ones(2, 2, dtype=torch.int8)
    }
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.eh_proj\.weight of an MTP layer is I8, expected F64"):
        check_hf_folder(model)
