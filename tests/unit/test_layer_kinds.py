"""models.families: which layers have windows, recurrences, indexers or one block, what they cost, and how they are divided."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from family_configs import read, saved, tiny_fields
from tiny_families import YARN_ROPE, config_class

from models.families import FAMILIES
from mrl.config import hydra_entry
from mrl.controller.plan_models import plan_model
from mrl.planner.model_shape import ModelShape
from parallel.dims import ParallelDims
from parallel.rope import Rope, YarnRope


@pytest.fixture
def fields(tmp_path):
    """`fields(name)` returns the config.json of a tiny model."""
    return partial(tiny_fields, tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(index_topk_freq=4), "FFSSSF"),
        (dict(index_topk_freq=3, index_skip_topk_offset=1), "FSSFSS"),
        (dict(index_topk_pattern="FSFSSF"), "FSFSSF"),
        (dict(index_topk_pattern=["full", "shared", "shared", "full", "full", "full"]), "FSSFFF"),
        (dict(index_topk_pattern="FSFSSF", indexer_types=["full"] * 6), "FFFFFF"),
        ({}, "FFFFFF"),
    ],
)
def test_layers_without_an_indexer_are_those_of_transformers(tmp_path, change, expected):
    fields = dict(num_hidden_layers=6, first_k_dense_replace=1)
    read_by_them = config_class("GlmMoeDsa")(**fields, **change).indexer_types
    assert "".join({"full": "F", "shared": "S"}[kind] for kind in read_by_them) == expected
    config = saved(tmp_path, "GlmMoeDsa", **fields) | change
    if "indexer_types" not in change:
        del config["indexer_types"]
    arch = read(config)
    assert "".join("SF"[has_indexer] for has_indexer in arch.indexer_layers) == expected
    assert [arch.has_indexer(layer) for layer in range(6)] == [kind == "F" for kind in expected]


def test_no_pipeline_stage_begins_with_a_layer_without_an_indexer(fields):
    known = fields("glm_moe_dsa") | dict(num_hidden_layers=6, mlp_layer_types=None, layer_types=None)
    arch = read(known | dict(indexer_types=["full", "shared", "shared"] * 2))
    arch.check_layout(ParallelDims(pp=2))
    for dims, first in ((ParallelDims(pp=3), 2), (ParallelDims(pp=6), 1), (ParallelDims(pp=2, vpp=3), 1)):
        with pytest.raises(ValueError, match=rf"begins with layer {first} .* begins with one of the layers 0, 3\.$"):
            arch.check_layout(dims)


def test_sparse_attention_has_the_cost_of_its_indexers(fields):
    """Two layers, of which only the first has an indexer. Trainers compute the products of a query with all keys."""
    arch = read(fields("glm_moe_dsa"))
    dense = replace(arch, indexer_layers=())
    (linear, quadratic), (dense_linear, dense_quadratic) = arch.multiply_adds(), dense.multiply_adds()
    heads, channels = 32, 128
    assert linear - dense_linear == 12 * heads * channels + 32 * (channels + heads)
    assert quadratic - dense_quadratic == heads * (channels + 1) / 2
    shape = ModelShape.of(FAMILIES["GlmMoeDsaForCausalLM"], arch)
    weights = 12 * heads * channels + 32 * (channels + heads) + 2 * channels
    assert shape.indexer.weights == weights and shape.num_weights - shape.num_parameters == weights + 12
    assert 2 * shape.attention_macs == 2 * dense_quadratic / 2 + heads * (channels + 1) / 2


def test_gated_delta_nets_have_a_linear_cost(fields):
    """Two layers: a gated delta net and attention with an output gate. The MLPs and the output layer are counted apart."""
    arch = read(fields("qwen3_5"))
    linear, quadratic = arch.multiply_adds()
    assert quadratic == 2 * 4 * 16 / 2, "scores and values of four heads"
    keys, values, kernel = 4 * 8, 8 * 6, 4
    recurrent = 32 * (2 * keys + 3 * values + 2 * 8) + kernel * (2 * keys + values) + 3 * values * 8
    attention = 32 * (2 * 64 + 2 * 32 + 64)
    assert linear == recurrent + attention + 2 * 3 * 32 * 48 + 32 * 41
    shape = ModelShape.of(FAMILIES["Qwen3_5ForCausalLM"], arch)
    norms = 4 * 32 + 2 * 16 + 6 + 2 * 8  # and two numbers for each head of the gated delta net
    assert shape.token_macs == linear + norms
    assert (shape.num_attention_layers, shape.recurrence.macs) == (1, 3 * values * 8)


def test_tensor_parallelism_divides_the_heads_of_gated_delta_nets(fields):
    known = fields("qwen3_5") | dict(num_key_value_heads=4, linear_num_key_heads=2)
    with pytest.raises(
        ValueError, match=r"^parallel.tp=4 does not divide linear_num_key_heads=2 of this model; use 1, 2.$"
    ):
        read(known).check_layout(ParallelDims(tp=4))


def test_all_spellings_of_the_layers_of_nemotron_h_give_the_same_model(fields):
    known = fields("nemotron_h")
    others = {name: value for name, value in known.items() if name != "layers_block_type"}
    arch = read(known)
    assert [arch.blocks(n) for n in range(4)] == [("recurrent",), ("dense",), ("attention",), ("recurrent",)]
    assert arch == read(others | dict(hybrid_override_pattern="M-*M", num_hidden_layers=4))
    assert arch == read(others | dict(layers_block_type=["mamba", "mlp", "attention", "mamba"]))
    assert arch == read(known | dict(time_step_limit=[0.0, float("inf")], time_step_min=0.5))


def test_layers_with_one_block_have_the_cost_of_their_block(fields):
    arch = read(fields("nemotron_h_moe"))
    values, states, heads, kernel, state = 4 * 6, 4 * 10, 4, 3, 10
    mamba = 32 * (3 * values + 2 * states + heads) + kernel * (values + 2 * states) + 2 * values * state
    attention, experts = 32 * 4 * 64, 2 * 32 * (3 * 24 + 20)
    linear, quadratic = arch.multiply_adds()
    assert (linear, quadratic) == (mamba + attention + 2 * experts + 32 * 41, 2 * 4 * 16 / 2)
    shape = ModelShape.of(FAMILIES["NemotronHForCausalLM"], arch)
    routers, norms = 2 * (32 + 1) * 6, 4 * 32 + values + 3 * heads  # with correction biases and numbers of heads
    assert shape.token_macs == linear + routers + norms
    assert (shape.num_attention_layers, shape.num_recurrent_layers, shape.has_dense_layers) == (1, 1, False)


def test_tensor_parallelism_divides_the_groups_of_mamba_2(fields):
    known = fields("nemotron_h_moe")
    read(known | dict(n_groups=4)).check_layout(ParallelDims(tp=4))
    with pytest.raises(ValueError, match=r"^parallel.tp=4 does not divide n_groups=2 of this model; use 1, 2.$"):
        read(known | dict(n_groups=2)).check_layout(ParallelDims(tp=4))


def test_a_model_with_longrope_takes_only_sequences_that_use_the_short_factors(fields):
    known = fields("phi3_long")
    assert known["max_position_embeddings"] == 64 and read(known).max_position_embeddings == 48
    assert read(known).rope.factor == 64 / 48


def test_the_config_says_which_layers_have_a_window(fields):
    arch = read(fields("olmo3") | dict(layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"]))
    assert [arch.has_window(layer) for layer in range(4)] == [False, True, True, False]
    assert arch.transformer["window_size"] == (8, 0)
    without = read(fields("olmo3") | dict(layer_types=["full_attention"] * 4, sliding_window=None))
    assert "window_size" not in without.transformer and not without.has_window(0)


def test_layers_with_a_window_have_a_linear_cost(fields):
    windowed = read(fields("olmo3"))
    full = read(fields("olmo3") | dict(layer_types=["full_attention"] * 4))
    (linear, quadratic), (full_linear, full_quadratic) = windowed.multiply_adds(), full.multiply_adds()
    assert quadratic == full_quadratic / 4 and full_quadratic == 4 * 2 * 32 / 2
    assert linear - full_linear == 3 * 2 * 32 * 9, "three layers: scores and values of 32 channels, for 9 keys"
    shape = ModelShape.of(FAMILIES["Olmo3ForCausalLM"], windowed)
    assert shape.limit_to_windows(10.0) == 10.0 and shape.limit_to_windows(100.0) == (3 * 2 * 9 + 100) / 4


def test_layers_with_a_window_have_a_rotary_embedding_of_their_own(fields):
    arch = read(fields("olmo3"))
    assert (arch.rope.rope_theta, arch.window_rope.rope_theta) == (5000.0, 300.0)
    old = {name: value for name, value in fields("olmo3").items() if name != "rope_parameters"}
    scaling = {name: value for name, value in YARN_ROPE.items() if name != "rope_theta"}
    arch = read(old | dict(rope_theta=500000.0, rope_scaling=scaling))
    assert arch.rope.factor == 4.0 and arch.window_rope == Rope(rope_theta=500000.0, dim=8)


def test_a_gpt_oss_config_without_rope_parameters_has_yarn(fields):
    known = {name: value for name, value in fields("gpt_oss").items() if name != "rope_parameters"}
    rope = read(known).rope
    assert rope == YarnRope(
        rope_theta=150000.0,
        dim=16,
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )


def test_only_layers_with_sinks_force_packed_attention(fields, monkeypatch):
    from models import model_builder

    monkeypatch.setattr(model_builder, "capabilities", lambda: SimpleNamespace(transformer_engine=True))
    for name, is_packed in (("gpt_oss", True), ("mixtral", False)):
        assert model_builder.uses_packed_attention(read(fields(name)), share_prompts=False) == is_packed


def test_windows_under_context_parallelism_need_shared_prompts(fields, tmp_path):
    fields("olmo3")  # writes config.json
    keys = ["model.dtype=float32", "run.dir=out", "parallel.cp=2", "trainer.share_prompts=false"]
    config = hydra_entry.compose_config(hydra_entry.check_overrides([f"model.path={tmp_path}", *keys]))
    why = (
        r"trainer.share_prompts=false with parallel.cp=2: on GPUs, .* set trainer.share_prompts=true, or parallel.cp=1"
    )
    with pytest.raises(ValueError, match=why):
        plan_model(config, str(tmp_path), weights=False)
    plan_model(replace(config, trainer=replace(config.trainer, share_prompts=True)), str(tmp_path), weights=False)
    fields("gpt_oss")  # with sinks, Transformer Engine never computes the attention
    plan_model(config, str(tmp_path), weights=False)
