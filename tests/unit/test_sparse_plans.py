"""Plans of models with sparse attention: memory of trainers and engines, layouts, and refusals before any process starts."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from planned_runs import config_of, folder_of
from search_cases import cluster_of

from models.architecture import Architecture
from models.families import family_of
from models.hf_config import HFConfig
from mrl.controller import plan_tools
from mrl.controller.plan_engine_dtype import check_fp8_engines
from mrl.controller.plan_models import check_layout, engine_parallel_sizes, plan_model
from mrl.planner.activation_bytes import MicroBatchShape, attention_bytes, indexer_working_bytes
from mrl.planner.engine_memory import kv_bytes
from mrl.planner.layout_space import LayoutSpace
from mrl.planner.model_shape import ModelShape
from mrl.planner.run_memory import trainer_settings
from mrl.planner.trainer_memory import TrainerSettings, trainer_memory
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from parallel.dims import ParallelDims
from parallel.trainer_config import MAX_INDEX_PRODUCTS

INDEXER = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128  # weights of one indexer of DeepSeek-V3.2


def config_json(model: str, folder) -> HFConfig:
    """Return the published config with fewer experts. The plans of attention do not depend on the experts."""
    hf = HFConfig.load(folder_of(model, folder))
    return replace(hf, fields=hf.fields | dict(n_routed_experts=16))


def read(model: str, folder) -> tuple[Architecture, ModelShape]:
    hf = config_json(model, folder)
    arch = family_of(hf).read(hf)
    return arch, ModelShape.of(family_of(hf), arch)


def with_indexers(arch: Architecture, kinds: str) -> Architecture:
    """Return the model with as many layers as `kinds`; F: the layer has an indexer, S: it uses the keys of an earlier layer."""
    layers = tuple(kind == "F" for kind in kinds)
    t = arch.transformer | dict(num_layers=len(kinds), moe_layer_freq=[1] * len(kinds))
    return replace(arch, indexer_layers=layers, transformer=t)


def test_indexers_have_weights_but_neither_gradients_nor_optimizer_state(tmp_path):
    (_, dense), (_, sparse) = (read(model, tmp_path) for model in ("DeepSeek-V3", "DeepSeek-V3.2"))
    assert sparse.num_parameters == dense.num_parameters
    assert sparse.num_weights - dense.num_weights == 61 * INDEXER
    dims = ParallelDims(tp=8, pp=61, dp=2)
    (expected, found) = (
        trainer_memory(s, dims, TrainerSettings(longest=2048)).stages[3].state for s in (dense, sparse)
    )
    assert (found.gradients, found.optimizer) == (expected.gradients, expected.optimizer)
    assert found.weights - expected.weights == 2 * (INDEXER - 256) + 4 * 256, (
        "whole on every rank; the norm is in float32"
    )


def test_a_mask_is_kept_only_if_a_sequence_is_longer_than_the_choice(tmp_path):
    _, shape = read("DeepSeek-V3.2", tmp_path)

    def mask(tokens: int, longest: int, recomputed: tuple[str, ...] = (), **dims: int) -> int:
        batch = MicroBatchShape.of(ParallelDims(**dims), tokens, 2, longest=longest)
        return attention_bytes(shape, batch, frozenset(recomputed)).get("mask of chosen keys", 0)

    assert mask(8192, 2048) == mask(2048, 0) == 0
    assert mask(8192, 4096) == 2 * 8192 * 4096, "two sequences of 4096 tokens"
    assert mask(8192, 0) == 2 * 8192 * 8192, "one sequence with all tokens"
    assert mask(8192, 4096, ("core_attn",)) == 0
    # two chunks of 1024 queries of each sequence, which read 1024 * (1 + 4) keys together
    assert mask(8192, 4096, cp=2) == 2 * 2 * 1024 * 1024 * (1 + 4)
    dense = read("DeepSeek-V3", tmp_path)[1]
    assert "mask of chosen keys" not in attention_bytes(dense, MicroBatchShape.of(ParallelDims(), 8192, 2))


def test_a_trainer_needs_memory_for_the_products_of_a_block_of_queries(tmp_path):
    _, shape = read("DeepSeek-V3.2", tmp_path)
    dims = ParallelDims(tp=8, pp=61, dp=2)

    def scoring(longest: int) -> int:
        return trainer_memory(shape, dims, TrainerSettings(max_tokens=8192, longest=longest)).stages[3].scoring

    assert scoring(4096) - scoring(2048) == 4 * MAX_INDEX_PRODUCTS + 2 * 8192 * 4096
    arch = read("GLM-5", tmp_path)[0]
    shared = ModelShape.of(
        family_of(HFConfig("c", dict(architectures=["GlmMoeDsaForCausalLM"]))), with_indexers(arch, "FSFS")
    )
    batch = MicroBatchShape.of(ParallelDims(), 4096, 2)
    assert indexer_working_bytes(shared, batch) == 4 * MAX_INDEX_PRODUCTS + 4096 * 4096, "the next layer reads the mask"


def test_the_longest_sequence_of_a_run_is_that_of_its_config(tmp_path):
    config = config_of("DeepSeek-V3.2", tmp_path, "data.max_prompt_tokens=1024", "rollout.max_response_tokens=3072")
    settings = trainer_settings(config, 163840)
    assert settings.longest == 4096


def test_an_engine_also_caches_the_keys_of_indexers(tmp_path):
    _, shape = read("DeepSeek-V3.2", tmp_path)
    assert kv_bytes(shape, EngineParallelSizes(8), 2) == 61 * ((512 + 64) * 2 + 128 + 4)
    arch = with_indexers(read("GLM-5", tmp_path)[0], "FSSF")
    shared = ModelShape.of(family_of(HFConfig("c", dict(architectures=["GlmMoeDsaForCausalLM"]))), arch)
    assert kv_bytes(shared, EngineParallelSizes(8), 2) == 4 * (512 + 64) * 2 + 2 * (128 + 4)


@pytest.mark.extended
@pytest.mark.parametrize(("model", "is_fused"), [("DeepSeek-V3.2", False), ("GLM-5", True)])
def test_every_engine_rank_has_the_whole_indexer(tmp_path, model, is_fused):
    """The names, shapes and dtypes are those of sglang.srt.layers.attention.dsa.dsa_indexer.Indexer on a GPU."""
    hf = config_json(model, tmp_path)
    layout = EngineLayout.of(family_of(hf), family_of(hf).read(hf), EngineParallelSizes(8))
    prefix = "model.layers.5.self_attn.indexer."
    found = {name.removeprefix(prefix): s for name, s in layout.param_shapes(7).items() if name.startswith(prefix)}
    heads, hidden, compressed = (32, 6144, 2048) if is_fused else (64, 7168, 1536)
    from_hidden = {"wk_weights_proj.weight": (128 + heads, hidden)}
    if not is_fused:
        from_hidden = {"wk.weight": (128, hidden), "weights_proj.weight": (heads, hidden)}
    norm = {"k_norm.weight": (128,), "k_norm.bias": (128,)}
    assert found == {"wq_b.weight": (heads * 128, compressed)} | from_hidden | norm
    dtypes = {name: layout.dtype_of(f"{prefix}{name}", "bfloat16") for name in found}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == norm.keys()


def test_the_search_has_no_layout_whose_stage_begins_without_an_indexer(tmp_path):
    arch = read("GLM-5", tmp_path)[0]
    family = family_of(HFConfig("c", dict(architectures=["GlmMoeDsaForCausalLM"])))
    for kinds, sizes in (("FFFFFF", {1, 2, 3, 4, 5, 6}), ("FSSFSS", {1, 2}), ("FSFSFS", {1, 3, 4}), ("FSSSSS", {1})):
        of = with_indexers(arch, kinds)
        space = LayoutSpace(of, ModelShape.of(family, of), cluster_of(8), 64.0)
        found = {(layout.pp, layout.vpp) for layout in space.layouts()}
        assert {pp for pp, _ in found} <= sizes, kinds
        for pp, vpp in found:
            if 6 % (pp * vpp) == 0:
                of.check_layout(ParallelDims(pp=pp, vpp=vpp))
        assert ("a pipeline stage whose first layer has no indexer" in space.excluded) == ("S" in kinds)


def test_an_uneven_stage_begins_with_a_layer_that_has_an_indexer(tmp_path):
    arch = with_indexers(read("GLM-5", tmp_path)[0], "FSSFSS")

    def check(pp: int, **megatron) -> None:
        check_layout(SimpleNamespace(megatron=megatron), arch, ParallelDims(pp=pp))

    check(2, num_layers_in_first_pipeline_stage=3)
    with pytest.raises(ValueError, match=r"begins with layer 2 \(counted from 0\), which has no indexer"):
        check(2, num_layers_in_first_pipeline_stage=2)
    with pytest.raises(
        ValueError, match=r"does not know whether every stage begins with a layer that has an indexer; use"
    ):
        check(2, pipeline_model_parallel_layout="Ettt|tttL")
    full = with_indexers(arch, "FFFFFF")
    check_layout(SimpleNamespace(megatron=dict(num_layers_in_first_pipeline_stage=2)), full, ParallelDims(pp=2))


@pytest.mark.extended
def test_mrl_certify_engine_refuses_sparse_attention(tmp_path, monkeypatch):
    config = config_of("GLM-5", tmp_path, "cluster=h100")
    plan_of = partial(plan_model, path=config.model.path, weights=False)
    monkeypatch.setattr(plan_tools, "plan_parity", plan_of)
    with pytest.raises(ValueError, match="mrl certify engine does not know where SGLang computes sparse attention"):
        plan_tools.plan_engine_check(config)


@pytest.mark.extended
def test_engines_in_fp8_cannot_get_indexers(tmp_path):
    config = config_of("GLM-5", tmp_path, "cluster=h100", "sglang.quantization=fp8")
    hf = config_json("GLM-5", tmp_path)
    arch = family_of(hf).read(hf)
    layout = EngineLayout.of(family_of(hf), arch, EngineParallelSizes())
    with pytest.raises(ValueError, match="SGLang stores some matrices of the indexers of sparse attention in FP8, but"):
        check_fp8_engines(config, arch, layout, ParallelDims())


@pytest.mark.extended
@pytest.mark.parametrize("model", ["DeepSeek-V3.2", "GLM-5"])
def test_engines_with_sparse_attention_need_gpus_and_bfloat16(tmp_path, model):
    hf = config_json(model, tmp_path)
    actor = SimpleNamespace(hf=hf, arch=family_of(hf).read(hf))
    keys = ["cluster=h100", "rollout.engine_tp=8"]
    assert engine_parallel_sizes(config_of(model, tmp_path, *keys), actor).tp == 8
    with pytest.raises(ValueError, match=r"SGLang 0.5.23 has no kernels for \w+ on a CPU"):
        engine_parallel_sizes(config_of(model, tmp_path, *keys, "sglang.device=cpu"), actor)
    with pytest.raises(ValueError, match=r"computes \w+ only in bfloat16, not in float16; set sglang.dtype=bfloat16"):
        engine_parallel_sizes(config_of(model, tmp_path, *keys, "sglang.dtype=float16"), actor)
