"""parallel.dims: valid sizes of the parallel dimensions, and errors that suggest valid sizes."""

import re
from math import prod
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parallel import device
from parallel.dims import ParallelDims, RankCoords

device.patch_megatron_for_cpu()  # before the first import from Megatron

from models.architecture import Architecture  # noqa: E402
from models.conversion.weight_bridge import WeightBridge  # noqa: E402
from models.families import FAMILIES  # noqa: E402
from models.hf_config import HFConfig  # noqa: E402

many = settings(max_examples=60)
small = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw) -> ParallelDims:
    """Draw a valid layout. Only ep may be larger than 4."""
    sizes = dict(
        tp=draw(small), pp=draw(small), cp=draw(small), dp=draw(small), ep=draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    )
    etp = draw(st.sampled_from([None, 1, 2, 3]))
    assume(sizes["tp"] * sizes["cp"] * sizes["dp"] % (sizes["ep"] * (etp or sizes["tp"])) == 0)
    return ParallelDims(**sizes, etp=etp)


@many
@given(layouts())
def test_every_rank_has_unique_coordinates(dims):
    places = [dims.coords(rank) for rank in range(dims.world_size)]
    assert len(set(places)) == dims.world_size
    for axis in ("tp", "cp", "dp", "pp"):
        assert {getattr(place, axis) for place in places} == set(range(getattr(dims, axis)))


def test_tensor_parallel_ranks_are_neighbors_and_pipeline_stages_are_farthest_apart():
    dims = ParallelDims(tp=2, cp=3, dp=5, pp=7)
    assert dims.coords(1) == RankCoords(tp=1, cp=0, dp=0, pp=0)
    assert dims.coords(2) == RankCoords(tp=0, cp=1, dp=0, pp=0)
    assert dims.coords(6) == RankCoords(tp=0, cp=0, dp=1, pp=0)
    assert dims.coords(30) == RankCoords(tp=0, cp=0, dp=0, pp=1)
    assert dims.coords(209) == RankCoords(tp=1, cp=2, dp=4, pp=6)


@many
@given(layouts())
def test_world_size_and_dp_determine_each_other(dims):
    axes = dict(tp=dims.tp, pp=dims.pp, cp=dims.cp, ep=dims.ep, etp=dims.etp)
    assert ParallelDims.from_world_size(dims.world_size, None, **axes) == dims
    assert ParallelDims.from_world_size(None, dims.dp, **axes) == dims
    assert ParallelDims.from_world_size(dims.world_size, dims.dp, **axes) == dims
    with pytest.raises(
        ValueError, match=rf"world_size={dims.world_size + 1}, but .* dp={dims.dp} is {dims.world_size} "
    ):
        ParallelDims.from_world_size(dims.world_size + 1, dims.dp, **axes)


def test_without_world_size_and_dp_there_is_one_replica():
    assert ParallelDims.from_world_size(None, None, tp=2, pp=2) == ParallelDims(tp=2, pp=2)


@many
@given(small, small, st.integers(1, 9), st.sampled_from([None, 1, 2, 3, 5]))
def test_without_world_size_and_dp_the_experts_determine_the_number_of_replicas(tp, cp, ep, etp):
    found = ParallelDims.from_world_size(None, None, tp=tp, cp=cp, ep=ep, etp=etp)
    for dp in range(1, found.dp):
        with pytest.raises(ValueError, match="does not divide"):
            ParallelDims(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)


@many
@given(st.integers(-5, 40), small, small, small)
def test_a_world_size_that_does_not_factor_raises_an_error_with_sizes_that_do(world_size, tp, cp, pp):
    one = tp * cp * pp
    if world_size > 0 and world_size % one == 0:
        assert ParallelDims.from_world_size(world_size, None, tp=tp, cp=cp, pp=pp).dp == world_size // one
        return
    with pytest.raises(ValueError, match=rf"world_size={world_size} is not a multiple .* = {one} processes") as error:
        ParallelDims.from_world_size(world_size, None, tp=tp, cp=cp, pp=pp)
    suggested = [int(n) for n in re.findall(r"-?\d+", str(error.value).split("; use ")[1])]
    assert suggested and all(
        ParallelDims.from_world_size(n, None, tp=tp, cp=cp, pp=pp).world_size == n for n in suggested
    )


@pytest.mark.parametrize("axis", ["tp", "pp", "vpp", "cp", "dp", "ep", "etp"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_size_below_one_raises_an_error(axis, size):
    with pytest.raises(ValueError, match=rf"parallel\.{axis}={size}: a parallel size must be 1 or more"):
        ParallelDims(**{axis: size})
    if axis != "dp":
        with pytest.raises(ValueError, match=rf"parallel\.{axis}={size}: a parallel size must be 1 or more"):
            ParallelDims.from_world_size(4, None, **{axis: size})


def test_a_size_that_needs_another_one_raises_an_error():
    with pytest.raises(ValueError, match=r"parallel\.sp=true needs parallel\.tp greater than 1"):
        ParallelDims(sp=True)
    with pytest.raises(ValueError, match=r"parallel\.vpp=2 needs parallel\.pp greater than 1"):
        ParallelDims(vpp=2)


@many
@given(small, small, small, st.integers(1, 9), st.sampled_from([None, 1, 2, 3, 5]))
def test_experts_that_do_not_fit_raise_an_error_with_sizes_that_do(tp, cp, dp, ep, etp):
    ranks = prod((tp, cp, dp))
    if ranks % (ep * (etp or tp)) == 0:
        assert ParallelDims(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp).expert_tp == (etp or tp)
        return
    with pytest.raises(
        ValueError, match=rf"parallel\.ep={ep} x etp={etp or tp}.* {ranks} ranks of a pipeline stage"
    ) as error:
        ParallelDims(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
    fits = re.findall(r"ep=(\d+) etp=(\d+)", str(error.value).split("; use ")[1])
    assert fits, "something must fit"
    for pair in fits:
        ParallelDims(tp=tp, cp=cp, dp=dp, ep=int(pair[0]), etp=int(pair[1]))


@many
@given(layouts())
def test_replicas_need_equal_micro_batch_counts_if_a_copy_of_the_experts_spans_several(dims):
    per_replica = dims.tp * dims.cp
    spans = [
        {rank // per_replica for rank in range(start, start + dims.ep * dims.expert_tp)}
        for start in expert_starts(dims)
    ]
    assert dims.equal_micro_batch_counts == any(len(replicas) > 1 for replicas in spans)


def expert_starts(dims: ParallelDims) -> range:
    """Return the first rank of each copy of the experts in the first pipeline stage."""
    return range(0, dims.tp * dims.cp * dims.dp, dims.ep * dims.expert_tp)


@many
@given(layouts(), st.booleans())
def test_the_ranks_of_an_export_contain_all_their_groups(dims, has_experts):
    bridge = SimpleNamespace(dims=dims, num_experts=8 * has_experts)
    chosen = {rank for rank in range(dims.world_size) if WeightBridge.participates_in_export(bridge, rank)}
    stage = dims.world_size // dims.pp
    blocks = [
        dims.tp,
        *([dims.expert_tp, dims.ep * dims.expert_tp] if has_experts else []),
    ]  # sizes of groups of neighboring ranks
    groups = [set(range(start, start + size)) for size in blocks for start in range(0, dims.world_size, size)]
    groups += [set(range(place, dims.world_size, stage)) for place in range(stage)]  # the ranks of each pipeline
    assert 0 in chosen
    assert all(group <= chosen or not group & chosen for group in groups), "no group is cut in two"
    needed, grown = set(), {0}
    while grown != needed:
        needed = grown
        grown = set().union(*(group for group in groups if group & needed))
    assert chosen == needed, "and no rank waits for nothing"


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (ParallelDims(), "one process"),
        (ParallelDims(tp=2, pp=4, vpp=2), "tp2 pp4 vpp2 sp"),
        (ParallelDims(tp=2, dp=2, ep=4, etp=1, sp=False), "tp2 dp2 ep4 etp1"),
    ],
)
def test_a_layout_prints_its_sizes(dims, text):
    assert str(dims) == text
    assert str(dims.single_process()) == "one process"


DENSE = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
    rope_theta=1e6,
    hidden_act="silu",
)
MOE = dict(num_experts=12, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1)


def dense() -> Architecture:
    return FAMILIES["Qwen3ForCausalLM"].read(HFConfig("qwen3", DENSE))


def moe() -> Architecture:
    return FAMILIES["Qwen3MoeForCausalLM"].read(HFConfig("qwen3_moe", DENSE | MOE | dict(mlp_only_layers=[])))


@pytest.mark.parametrize(
    ("read", "sizes", "message"),
    [
        (
            dense,
            dict(pp=3),
            "parallel.pp=3 does not divide num_hidden_layers=28 of this model; use 1, 2, 4, 7, 14, 28.",
        ),
        (
            dense,
            dict(pp=2, vpp=3),
            "parallel.pp x parallel.vpp=6 does not divide num_hidden_layers=28 of this model; choose pp and vpp whose product is "
            "one of 1, 2, 4, 7, 14, 28.",
        ),
        (dense, dict(pp=28, vpp=2), "parallel.pp x parallel.vpp=56 does not divide num_hidden_layers=28"),
        (dense, dict(tp=3), "parallel.tp=3 does not divide num_attention_heads=16 of this model; use 1, 2, 4, 8."),
        (dense, dict(tp=16), "parallel.tp=16 does not divide num_key_value_heads=8 of this model; use 1, 2, 4, 8."),
        (dense, dict(tp=32), "parallel.tp=32 does not divide num_attention_heads=16 of this model; use 1, 2, 4, 8."),
        (dense, dict(dp=2, ep=2), "parallel.ep=2: this model has no experts; use 1."),
        (dense, dict(tp=2, etp=1), "parallel.etp=1: this model has no experts; leave it out."),
        (moe, dict(dp=8, ep=8), "parallel.ep=8 does not divide num_experts=12 of this model; use 1, 2, 3, 4, 6, 12."),
        (
            moe,
            dict(dp=24, ep=24),
            "parallel.ep=24 does not divide num_experts=12 of this model; use 1, 2, 3, 4, 6, 12.",
        ),
        (
            moe,
            dict(dp=5, etp=5),
            "parallel.etp=5 does not divide moe_intermediate_size=768 of this model; use 1, 2, 3, 4,",
        ),
        (
            moe,
            dict(tp=2, sp=False),
            "parallel.sp=false: experts with parallel.tp > 1 need sequence parallelism",
        ),
        (moe, dict(pp=5), "parallel.pp=5 does not divide num_hidden_layers=28"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_raises_an_error(read, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read().check_layout(ParallelDims(**sizes))


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_all_sizes_that_an_error_suggests_work(axis):
    def layout(size: int) -> ParallelDims:
        return ParallelDims(ep=size, dp=size) if axis == "ep" else ParallelDims(**{axis: size})

    with pytest.raises(ValueError, match=r"use 1, ") as error:
        moe().check_layout(layout(5))
    for size in re.findall(r"\d+", str(error.value).split("; use ")[1]):
        moe().check_layout(layout(int(size)))


@pytest.mark.parametrize(
    ("read", "sizes"),
    [
        (dense, dict(tp=8, pp=7, vpp=4, cp=5, dp=3)),
        (dense, dict(tp=2, sp=False)),
        (dense, dict(tp=2, etp=2)),
        (moe, dict(tp=2, dp=6, ep=12, etp=1)),
        (moe, dict(dp=6, ep=3, etp=2, pp=14)),
    ],
)
def test_a_layout_that_fits_is_accepted(read, sizes):
    read().check_layout(ParallelDims(**sizes))
