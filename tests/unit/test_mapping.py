"""The conversion rules: byte for byte there and back, for every tensor-parallel size."""

import pytest
import torch

from models.families import FAMILIES
from models.spec import Architecture

SIZES = dict(vocab=41, hidden=8, ffn=16, q=4 * 6, kv=4 * 6, head_dim=6, experts=4, moe_ffn=12)
GROUPED = SIZES | dict(q=8 * 6)


def hf_tensors(row, sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in row.hf_shapes(sizes).values()]


@pytest.mark.parametrize("sizes", [SIZES, GROUPED], ids=["multi-head", "grouped-query"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.architecture)
def test_hf_to_megatron_to_hf_is_the_identity(family, tp, sizes):
    for row in family.table:
        tensors = hf_tensors(row, sizes)
        shards = [row.to_megatron(tensors, sizes, rank, tp) for rank in range(tp)]
        back = row.to_hf(shards, sizes)
        for (name, got), expected in zip(back.items(), tensors, strict=True):
            assert got.shape == expected.shape and torch.equal(got, expected), f"{name} at tp={tp}"


def test_qkv_interleaves_by_group():
    row = next(r for r in FAMILIES["Qwen3ForCausalLM"].table if "linear_qkv.weight" in r.megatron)
    sizes = dict(hidden=1, q=4, kv=2, head_dim=1)
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert row.to_megatron([q, k, v], sizes, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert row.to_megatron([q, k, v], sizes, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_each_rank_holds_its_gate_then_its_up():
    row = next(r for r in FAMILIES["Qwen3ForCausalLM"].table if "linear_fc1.weight" in r.megatron)
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    assert row.to_megatron([gate, up], {}, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_tied_embeddings_have_no_output_row():
    family = FAMILIES["Qwen3ForCausalLM"]
    layers = dict(num_layers=2)
    tied = Architecture(41, 64, 1e4, True, layers, SIZES)
    untied = Architecture(41, 64, 1e4, False, layers, SIZES)
    assert {r.megatron for r in family.entries(untied)} - {r.megatron for r in family.entries(tied)} == {
        "output_layer.weight"
    }
