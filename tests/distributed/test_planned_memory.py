"""Planned bytes of parameters, gradients and optimizer state, compared with models that are built for every rank.

The tests use torch's fake process groups: one process builds the model of each rank in turn, and nothing is communicated.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
from tiny_families import FAMILIES, SIZES, config_class

from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_state_bytes import StateBytes, largest_state, pipeline_stages, state_of_rank
from parallel.dims import ParallelDims

pytestmark = pytest.mark.extended

DENSE = [
    dict(),
    dict(dp=4),
    dict(dp=3),
    dict(tp=2),
    dict(tp=2, sp=False),
    dict(dp=5),
    dict(tp=2, dp=3),
    dict(tp=4, dp=2),
    dict(cp=2, dp=2),
    dict(cp=3),
    dict(pp=2),
    dict(pp=4, dp=2),
    dict(pp=2, vpp=2),
    dict(tp=2, pp=2, dp=2),
    dict(tp=2, pp=2, vpp=2, cp=2),
    dict(tp=2, cp=2, dp=2),
    dict(tp=4, pp=2, vpp=2),
]
EXPERTS = [
    dict(),
    dict(dp=2),
    dict(dp=2, ep=2),
    dict(dp=4, ep=2),
    dict(dp=4, ep=2, etp=2),
    dict(tp=2, ep=2, etp=1),
    dict(tp=2, dp=2, ep=2),
    dict(tp=2, dp=2, ep=1, etp=1),
    dict(tp=2, dp=2, ep=2, etp=1),
    dict(tp=2, etp=1),
    dict(cp=2, dp=2, ep=2),
    dict(cp=2, ep=2),
    dict(pp=2, dp=2, ep=2),
    dict(pp=2, vpp=2, dp=2, ep=2),
    dict(pp=4, dp=3),
    dict(tp=2, pp=2, vpp=2, ep=2, etp=1),
    dict(tp=2, pp=2, dp=2, ep=2, etp=1),
    dict(tp=2, cp=2, dp=2, ep=2, etp=2),
]
MORE_EXPERTS = [dict(dp=3, ep=3), dict(dp=6, ep=3), dict(tp=2, dp=3, ep=6, etp=1), dict(pp=2, dp=3, ep=3)]
UNEVEN = [
    (dict(pp=2), dict(num_layers_in_first_pipeline_stage=1)),
    (dict(pp=2), dict(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3)),
    (dict(pp=3, dp=2), dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)),
]


def layouts(name: str) -> list[tuple[ParallelDims, dict]]:
    has_experts = any("experts" in field for field in FAMILIES[name][1])
    axes = (EXPERTS if has_experts else DENSE) + (MORE_EXPERTS if "n_routed_experts" in FAMILIES[name][1] else [])
    heads = FAMILIES[name][1].get("num_key_value_heads", SIZES["num_key_value_heads"])
    found = [(axes_of, {}) for axes_of in axes if axes_of.get("tp", 1) <= heads] + (
        [] if "first_k_dense_replace" in FAMILIES[name][1] else UNEVEN
    )
    if (
        "index_topk_freq" in FAMILIES[name][1]
    ):  # no stage may begin with one of the layers 1 and 3, which have no indexer
        found = [
            (axes_of, overrides) for axes_of, overrides in found if axes_of.get("pp", 1) * axes_of.get("vpp", 1) <= 2
        ]
    return [(ParallelDims(**axes_of), overrides) for axes_of, overrides in found]


def test_at_least_forty_layouts_are_tested():
    assert len({(repr(dims), str(overrides)) for name in FAMILIES for dims, overrides in layouts(name)}) >= 40


def config_of(name: str, folder, **overrides):
    from models.hf_config import HFConfig

    prefix, fields = FAMILIES[name]
    config = config_class(prefix)(**deepcopy(SIZES | fields | overrides))
    config.architectures = [f"{prefix}ForCausalLM"]
    config.save_pretrained(folder)
    return HFConfig.load(str(folder))


def shape_of(hf) -> ModelShape:
    from models.families import family_of

    family = family_of(hf)
    return ModelShape.of(family, family.read(hf))


def build_every_rank(_rank: int, hf, cases) -> list[list[StateBytes]]:
    """Return the bytes that every rank holds, for each case (dims, dtype, head, trained, overrides)."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    real = dist.new_group
    dist.new_group = lambda *ranks, backend=None, pg_options=None, **kwargs: real(*ranks, backend="fake", **kwargs)
    found = [[_built(rank, hf, *case) for rank in range(case[0].world_size)] for case in cases]
    _fake(0, 1)  # the fixture expects a process group at its end
    return found


def _fake(rank: int, world_size: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _built(rank: int, hf, dims: ParallelDims, dtype: str, head: str, trained: bool, overrides: dict) -> StateBytes:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from models.model_builder import build_model
    from parallel import groups
    from parallel.optimizer import build_optimizer, initialize_optimizer_state, optimizer_tensors, wrap_ddp
    from parallel.trainer_config import OptimConfig

    _fake(rank, dims.world_size)
    groups.initialize(dims, seed=0)
    chunks = build_model(hf, dims, getattr(torch, dtype), head=head, **overrides)
    if not trained:
        for chunk in chunks:
            chunk.requires_grad_(False)
    wrapped = wrap_ddp(chunks)
    own = [t for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]
    weights = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in own}.values())
    flat = [buffer for chunk in wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizer = 0
    if trained:
        built = build_optimizer(wrapped, OptimConfig())
        initialize_optimizer_state(built)
        weight_storages = {t.untyped_storage()._cdata for t in own}
        state = {t.untyped_storage()._cdata: t for t in optimizer_tensors(built)}
        optimizer = sum(t.untyped_storage().nbytes() for key, t in state.items() if key not in weight_storages)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return StateBytes(weights, sum(buffer.grad_data.nbytes for buffer in flat), optimizer)


def check(run_ranks, hf, cases) -> None:
    found = run_ranks(ParallelDims(), build_every_rank, hf, cases, timeout_s=900)[0]
    shape = shape_of(hf)
    for (dims, dtype, head, trained, overrides), real in zip(cases, found, strict=True):
        itemsize = 2 if dtype == "bfloat16" else 4
        how = dict(head=head, trained=trained, uneven=overrides)
        planned = [state_of_rank(shape, dims, rank, itemsize, **how) for rank in range(dims.world_size)]
        assert planned == real, (str(dims), dtype, head, overrides)
        for stage in range(dims.pp):
            mine = [planned[rank] for rank in range(dims.world_size) if dims.coords(rank).pp == stage]
            largest = largest_state(
                shape, dims, pipeline_stages(shape.num_layers, dims, overrides)[stage], itemsize, head, trained
            )
            for part in ("weights", "gradients", "optimizer"):
                most, bound = max(vars(state)[part] for state in mine), vars(largest)[part]
                slack = 0 if part == "gradients" else 12 * 64 * 400  # padding, which is large in such small models
                assert most <= bound <= most + slack, (str(dims), part)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_holds_the_planned_bytes(run_ranks, tmp_path, name):
    hf = config_of(name, tmp_path, num_hidden_layers=4)
    check(run_ranks, hf, [(dims, "bfloat16", "vocabulary", True, overrides) for dims, overrides in layouts(name)])


@pytest.mark.parametrize(
    ("name", "count"), [("deepseek_v3", 2), ("glm4_moe", 1), ("qwen3_5_biased", 1), ("qwen3_next", 1)]
)
def test_every_rank_holds_the_planned_bytes_of_mtp_layers(run_ranks, tmp_path, name, count):
    hf = config_of(name, tmp_path, num_hidden_layers=4)
    field = "mtp_num_hidden_layers" if "qwen" in name else "num_nextn_predict_layers"
    hf = replace(hf, fields=hf.fields | {field: count}, train_mtp=True)
    assert shape_of(hf).mtp_layers == count
    layout = [dims for dims, overrides in layouts(name) if not overrides]
    cases = [(dims, "bfloat16", "vocabulary", True, {}) for dims in layout]
    check(run_ranks, hf, [*cases, *((dims, "float32", "vocabulary", False, {}) for dims in layout[:4])])


@pytest.mark.parametrize("name", ["qwen3", "qwen2_tied_multi_head", "qwen3_moe", "deepseek_v3", "deepseek_v32"])
def test_critics_teachers_and_float32_models_hold_the_planned_bytes(run_ranks, tmp_path, name):
    hf = config_of(name, tmp_path, num_hidden_layers=4)
    dims = [ParallelDims(), ParallelDims(tp=2, pp=2, dp=2), ParallelDims(pp=2, vpp=2, dp=3)]
    cases = [(d, "bfloat16", "value", True, {}) for d in dims] + [(d, "float32", "vocabulary", True, {}) for d in dims]
    check(run_ranks, hf, cases + [(d, "bfloat16", "vocabulary", False, {}) for d in dims])


def test_a_wider_parameter_changes_the_planned_bytes(tmp_path):
    shape = shape_of(config_of("qwen3", tmp_path))
    wider = replace(shape, parameters=tuple(replace(p, shape=tuple(n + 64 for n in p.shape)) for p in shape.parameters))
    assert state_of_rank(shape, ParallelDims(), 0, 2) != state_of_rank(wider, ParallelDims(), 0, 2)


def test_a_custom_pipeline_layout_is_an_error(tmp_path):
    shape = shape_of(config_of("qwen3", tmp_path))
    with pytest.raises(ValueError, match=r"is not supported by mrl plan; use num_layers_in_first"):
        pipeline_stages(shape.num_layers, ParallelDims(pp=2), dict(pipeline_model_parallel_layout="Et|tL"))
