"""models.conversion.mapping: every rule is inverted bit-exactly, for every tensor-parallel size."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import FAMILIES as TINY
from tiny_families import make_family

from models.architecture import Architecture
from models.conversion.hf_reader import check_hf_folder
from models.families import FAMILIES, family_of
from parallel.rope import Rope

many = settings(max_examples=25)


@st.composite
def drawn_sizes(draw) -> dict[str, int]:
    """Draw the sizes of a model that tp=4 can split, with multi-head or grouped-query attention and any vocabulary size."""
    groups, per_group = 4 * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 4))
    key_heads, values_per_key = 4 * draw(st.integers(1, 2)), draw(st.integers(1, 3))  # of recurrent layers
    keys, value_channels = key_heads * draw(st.integers(1, 4)), draw(st.integers(1, 4))
    values = key_heads * values_per_key * value_channels
    moe_ffn = 4 * draw(st.integers(1, 4))
    return dict(
        vocab=draw(st.integers(5, 50)),
        hidden=draw(st.integers(1, 9)),
        ffn=4 * draw(st.integers(1, 5)),
        q=groups * per_group * head_dim,
        kv=groups * head_dim,
        head_dim=head_dim,
        experts=draw(st.integers(1, 4)),
        moe_ffn=moe_ffn,
        shared_ffn=4 * draw(st.integers(1, 4)),
        q_lora=draw(st.integers(1, 9)),  # this and the following sizes belong to latent attention
        kv_lora=draw(st.integers(1, 9)),
        kv_a=draw(st.integers(1, 9)),
        kv_b=4 * draw(st.integers(1, 9)),
        index_q=draw(st.integers(1, 9)),
        index_dim=draw(st.integers(1, 9)),
        index_heads=draw(st.integers(1, 9)),
        o=4 * draw(st.integers(1, 9)),
        tower_hidden=draw(st.integers(1, 5)),  # this and the following sizes belong to vision towers
        **dict(tower_qkv=3, tower_ffn=2, tower_merged=4, tower_positions=3, channels=3, frames=2, patch=2),
        one=1,
        heads=groups * per_group,  # this and the following size belong to gpt-oss
        gate_and_up=2 * moe_ffn,
        q_and_gate=2 * groups * per_group * head_dim,
        head_groups=key_heads,  # of gated delta nets and Mamba-2; the following sizes belong to gated delta nets
        gdn_k=keys,
        gdn_v=values,
        gdn_v_heads=key_heads * values_per_key,
        gdn_v_channels=value_channels,
        gdn_kernel=draw(st.integers(1, 4)),
        gdn_qkvz=2 * (keys + values),
        gdn_ba=2 * key_heads * values_per_key,
        values=values,  # this and the following sizes belong to Mamba-2
        states=keys,
        mamba_heads=key_heads * values_per_key,
        kernel=draw(st.integers(1, 4)),
    )


def hf_tensors(row, sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in row.hf_shapes(sizes).values()]


@pytest.mark.extended_after(2)
@many
@given(sizes=drawn_sizes())
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.architecture)
def test_hf_to_megatron_to_hf_is_the_identity(family, sizes):
    for row, tp in product(family.table, (1, 2, 4)):
        tensors = hf_tensors(row, sizes)
        shards = [row.to_megatron(tensors, sizes, rank, tp) for rank in range(tp)]
        assert len({shard.shape for shard in shards}) == 1, f"{row.megatron}: ranks hold like shapes"
        back = row.to_hf(shards, sizes)
        for (name, got), expected in zip(back.items(), tensors, strict=True):
            assert got.shape == expected.shape and torch.equal(got, expected), f"{name} at tp={tp}"


@pytest.mark.extended_after(10)
@pytest.mark.parametrize("name", TINY)
def test_the_table_has_exactly_the_tensors_that_transformers_saves(tmp_path, name):
    """Models have tied or untied embeddings, and biases or none. `check_hf_folder` compares names and shapes."""
    config = check_hf_folder(make_family(name, tmp_path))
    rows = family_of(config).param_mappings(family_of(config).read(config))
    assert len({row.megatron for row in rows}) == len(rows), "one row per Megatron parameter"


def test_qkv_is_ordered_by_key_value_group():
    row = next(r for r in FAMILIES["Qwen3ForCausalLM"].table if "linear_qkv.weight" in r.megatron)
    sizes = dict(hidden=1, q=4, kv=2, head_dim=1)
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert row.to_megatron([q, k, v], sizes, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert row.to_megatron([q, k, v], sizes, 1, 2).flatten().tolist() == [2, 3, 11, 21]


def test_alternating_rows_of_gate_and_up_projection_become_two_blocks():
    row = next(r for r in FAMILIES["GptOssForCausalLM"].table if "linear_fc1.bias" in r.megatron)
    rows = torch.tensor([0.0, 50, 1, 51, 2, 52, 3, 53])
    assert row.to_megatron([rows], dict(gate_and_up=8), 0, 1).tolist() == [0, 1, 2, 3, 50, 51, 52, 53]
    assert row.to_megatron([rows], dict(gate_and_up=8), 1, 2).tolist() == [2, 3, 52, 53]


def test_queries_come_before_their_gates_in_each_group():
    row = next(r for r in FAMILIES["Qwen3_5ForCausalLM"].table if "linear_qkv.weight" in r.megatron)
    sizes = dict(hidden=1, q=4, q_and_gate=8, kv=2, head_dim=1)
    q_and_gate = torch.tensor([0.0, 50, 1, 51, 2, 52, 3, 53])[:, None]  # each query is followed by its gate
    k, v = torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    merged = row.to_megatron([q_and_gate, k, v], sizes, 0, 1).flatten().tolist()
    assert merged == [0, 1, 50, 51, 10, 20, 2, 3, 52, 53, 11, 21]
    assert row.to_megatron([q_and_gate, k, v], sizes, 1, 2).flatten().tolist() == merged[6:]


def test_the_input_projection_of_mamba_2_is_ordered_by_groups():
    """The Hugging Face tensor has gates, values, keys, queries and numbers of heads, here two groups with two heads each."""
    row = next(r for r in FAMILIES["NemotronHForCausalLM"].table if r.megatron.endswith("linear_in.weight"))
    sizes = dict(hidden=1, values=4, states=2, mamba_heads=4, head_groups=2)
    whole = torch.arange(16.0)[:, None]
    merged = row.to_megatron([whole], sizes, 0, 1)
    assert merged[:, 0].tolist() == [0, 1, 4, 5, 8, 10, 12, 13, 2, 3, 6, 7, 9, 11, 14, 15]
    ranks = [row.to_megatron([whole], sizes, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(ranks), merged) and torch.equal(*row.to_hf(ranks, sizes).values(), whole)


def test_the_input_projection_of_a_gated_delta_net_is_ordered_by_key_heads():
    """Both families have the same Megatron tensor: Qwen3-Next stores it by key heads, and Qwen3.5 by kind of row."""
    sizes = dict(hidden=1, head_groups=2, gdn_k=2, gdn_v=4, gdn_v_heads=4, gdn_qkvz=12, gdn_ba=8)
    new, old = (
        next(r for r in FAMILIES[f"{name}ForCausalLM"].table if "linear_in.weight" in r.megatron)
        for name in ("Qwen3_5", "Qwen3Next")
    )
    qkv = torch.tensor([0.0, 1, 10, 11, 20, 21, 22, 23])[:, None]  # two queries, two keys, four values
    z, b, a = (torch.arange(start, start + 4.0)[:, None] for start in (30, 40, 50))
    expected = [0, 10, 20, 21, 30, 31, 40, 41, 50, 51, 1, 11, 22, 23, 32, 33, 42, 43, 52, 53]
    assert new.to_megatron([qkv, z, b, a], sizes, 0, 1).flatten().tolist() == expected
    assert new.to_megatron([qkv, z, b, a], sizes, 1, 2).flatten().tolist() == expected[10:]
    qkvz = torch.tensor([0.0, 10, 20, 21, 30, 31, 1, 11, 22, 23, 32, 33])[:, None]
    ba = torch.tensor([40.0, 41, 50, 51, 42, 43, 52, 53])[:, None]
    assert old.to_megatron([qkvz, ba], sizes, 0, 1).flatten().tolist() == expected
    boxes = new.split_over_ranks(sizes, 2)
    assert [[box.starts[0] for box in ranks[1]] for ranks in boxes.values()] == [[1, 3, 6], [2], [2], [2]]
    assert [new.first_shape_index(name) for name in new.hf] == [0, 3, 4, 5]


def test_biases_are_merged_like_weights():
    weight, bias = (
        next(r for r in FAMILIES["Qwen2ForCausalLM"].table if f"linear_qkv.{kind}" in r.megatron)
        for kind in ("weight", "bias")
    )
    sizes = dict(hidden=1, q=8, kv=4, head_dim=2)
    parts = [torch.arange(8.0), torch.arange(10.0, 14), torch.arange(20.0, 24)]
    for rank, tp in ((0, 1), (0, 2), (1, 2)):
        merged = weight.to_megatron([part[:, None] for part in parts], sizes, rank, tp)
        assert torch.equal(merged[:, 0], bias.to_megatron(parts, sizes, rank, tp))


def test_each_rank_holds_its_gate_shard_then_its_up_shard():
    row = next(r for r in FAMILIES["Qwen3ForCausalLM"].table if "linear_fc1.weight" in r.megatron)
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    assert row.to_megatron([gate, up], {}, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_each_section_of_a_fused_tensor_is_split_over_the_ranks():
    family = FAMILIES["Phi3ForCausalLM"]
    qkv, mlp = (next(r for r in family.table if name in r.megatron) for name in ("linear_qkv.weight", "fc1.weight"))
    sizes = dict(hidden=1, q=4, kv=2, head_dim=1, ffn=4)
    stored = torch.tensor([0.0, 1, 2, 3, 10, 11, 20, 21])[:, None]
    assert qkv.hf_shapes(sizes) == {"model.layers.{layer}.self_attn.qkv_proj.weight": (8, 1)}
    assert qkv.to_megatron([stored], sizes, 0, 1).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert qkv.to_megatron([stored], sizes, 1, 2).flatten().tolist() == [2, 3, 11, 21]
    assert mlp.to_megatron([stored], sizes, 1, 2).flatten().tolist() == [2, 3, 20, 21]
    (ranks,) = qkv.split_over_ranks(sizes, 2).values()
    assert [stored[box.slices].flatten().tolist() for box in ranks[1]] == [[2, 3], [11], [21]]


def test_tied_embeddings_have_no_output_row():
    family = FAMILIES["Qwen3ForCausalLM"]
    layers = dict(num_layers=2)
    rope = Rope(rope_theta=1e4, dim=6)
    tied = Architecture(41, 64, rope, True, layers)
    untied = Architecture(41, 64, rope, False, layers)
    assert {r.megatron for r in family.param_mappings(untied)} - {r.megatron for r in family.param_mappings(tied)} == {
        "output_layer.weight"
    }
