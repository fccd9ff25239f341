"""models.conversion.expert_stacks: tensors of all experts of a layer, also in MXFP4."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import make_family

from models.conversion import convert_checkpoint, hf_reader
from models.conversion.expert_stacks import dequantize_mxfp4, expert_slice_of, is_stacked, stored_name, stored_tensors
from models.conversion.hf_reader import HFWeights, check_hf_folder
from models.conversion.hf_writer import write_export
from models.families import family_of
from models.hf_config import HFConfig

STACKS = ("gate_up_proj", "down_proj")


class Silent:
    """Progress display that shows nothing."""

    def begin(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


def packed(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw blocks and scales of matrices [experts, out, in], with the largest and the smallest scales of normal numbers."""
    experts, rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    return blocks, scales


def quantize(folder) -> dict[str, torch.Tensor]:
    """Replace the matrices of the experts in the folder with MXFP4. Returns what transformers reads, by name of the stack."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(STACKS)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks, scales = packed((experts, rows, columns))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(
        {name: t if t.dtype == torch.uint8 else t.bfloat16() for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(quant_method="mxfp4"))))
    return expected


@pytest.fixture
def model(tmp_path):
    """A tiny model whose sizes are multiples of a block."""
    return make_family("gpt_oss", tmp_path / "model", intermediate_size=64)


def test_names_of_the_table_and_of_the_folder():
    matrix, bias = "model.layers.2.mlp.experts.3.down_proj", "model.layers.2.mlp.experts.3.down_proj_bias"
    assert stored_name(matrix) == "model.layers.2.mlp.experts.down_proj"
    assert stored_name(bias) == "model.layers.2.mlp.experts.down_proj_bias"
    assert expert_slice_of(matrix).index == 3 and expert_slice_of(matrix).stored_shape((2, 5)) == (5, 2)
    assert expert_slice_of(bias).stored_shape((5,)) == (5,)
    other = "model.layers.2.mlp.experts.3.down_proj.weight"  # of families that store the experts one by one
    assert stored_name(other) == other and not is_stacked(other)
    assert is_stacked("model.layers.{layer}.mlp.experts.{expert}.down_proj")
    specs = {f"a.experts.{expert}.x": ("F32", (2, 5)) for expert in (1, 0, 2)} | dict(b=("BF16", (4,)))
    assert stored_tensors(specs) == {"a.experts.x": ("F32", (3, 5, 2)), "b": ("BF16", (4,))}


def test_mxfp4_is_dequantized_as_in_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed((3, 6, 64))
    found = dequantize_mxfp4(blocks, scales)
    assert found.dtype == torch.bfloat16 and len(found.unique()) > 80  # at most 91 values are possible
    assert torch.equal(found.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))
    pair = dequantize_mxfp4(
        torch.tensor([[0x2F] + [0] * 15], dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8)
    )
    assert pair[:2].tolist() == [-12.0, 2.0], "the lower half of a byte is the first value"


def test_the_parts_of_a_stack_are_read_by_the_names_of_the_table(model):
    weights, stored = HFWeights(model), load_file(model / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    name = f"{prefix}.2.gate_up_proj"
    assert name in weights and weights.dtype_of(name) == "F32" and f"{prefix}.2.gate_up" not in weights
    assert torch.equal(weights[name], stored[f"{prefix}.gate_up_proj"][2].t())
    assert torch.equal(weights[f"{name}_bias"], stored[f"{prefix}.gate_up_proj_bias"][2])
    assert torch.equal(weights.read(name, (3, 4), (2, 5)), stored[f"{prefix}.gate_up_proj"][2].t()[3:5, 4:9])
    weights.release(name)
    assert torch.equal(weights[name], stored[f"{prefix}.gate_up_proj"][2].t())


def test_a_folder_in_mxfp4_is_read_and_written_in_bfloat16(model, tmp_path):
    expected = quantize(model)
    config = check_hf_folder(model)
    weights = HFWeights(model)
    for name, stack in expected.items():
        prefix, _, matrix = name.rpartition(".")
        for expert, values in enumerate(stack):
            assert torch.equal(weights[f"{prefix}.{expert}.{matrix}"], values.t())
            assert weights.dtype_of(f"{prefix}.{expert}.{matrix}") == "BF16"
    convert_checkpoint.to_megatron(config, tmp_path / "megatron", Silent())
    assert convert_checkpoint.check_against_checkpoint(config, tmp_path / "megatron").passed
    convert_checkpoint.to_hf(tmp_path / "megatron", config, tmp_path / "back", Silent())
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == {name.removesuffix("_blocks") for name in weights.shapes() if not name.endswith("_scales")}
    assert all(torch.equal(back[name], stack) for name, stack in expected.items())
    written = check_hf_folder(tmp_path / "back")
    assert "quantization_config" not in written.fields
    family_of(written).check_engine(written, family_of(written).read(written))


def test_a_slice_in_mxfp4_dequantizes_only_the_blocks_that_contain_its_values(model, monkeypatch):
    expected = quantize(model)["model.layers.0.mlp.experts.down_proj"][3].t()  # [32, 64]
    calls: list[int] = []

    def dequantize(blocks, scales):
        calls.append(2 * blocks.numel())
        return dequantize_mxfp4(blocks, scales)

    monkeypatch.setattr(hf_reader, "dequantize_mxfp4", dequantize)
    weights = HFWeights(model)
    for starts, sizes, values in [((5, 33), (7, 20), 7 * 32), ((0, 30), (2, 4), 2 * 64), ((9, 0), (0, 3), 0)]:
        calls.clear()
        found = weights.read("model.layers.0.mlp.experts.3.down_proj", starts, sizes)
        assert calls == [values] and found.is_contiguous()
        assert torch.equal(found, expected[starts[0] :, starts[1] :][: sizes[0], : sizes[1]])
    with pytest.raises(AssertionError, match="no slice of shape"):
        weights.read("model.layers.0.mlp.experts.3.down_proj", (0, 60), (1, 5))


def test_a_scale_that_stands_for_nan_is_refused_before_a_conversion_writes(model, tmp_path):
    quantize(model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 7, 1] = 255
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model.safetensors: {name}\[2, 7, 1\] is 255, which stands for NaN"):
        convert_checkpoint.to_megatron(HFConfig.load(model), tmp_path / "megatron", Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_an_export_writes_the_parts_of_a_stack_in_any_order(model, tmp_path):
    config, weights = HFConfig.load(model), HFWeights(model)
    names = list(family_of(config).hf_shapes(family_of(config).read(config)))
    write_export(((name, weights[name]) for name in reversed(names)), config, tmp_path / "export", {})
    found, expected = load_file(tmp_path / "export/model.safetensors"), load_file(model / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_wrong_shapes_in_mxfp4_are_found(model):
    quantize(model)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"{name} in model.safetensors is \[4, 31, 2\], config.json says \[4, 32, 2\]"
    ):
        check_hf_folder(model)
