"""Predicted seconds agree with a layout computed by hand, with laws for all hardware, and with the simulator."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import DEEPSEEK_V3, QWEN3_8B, QWEN3_30B_A3B, cluster_of, model_of, small_moe

from models.families import family_of
from models.hf_config import HFConfig
from mrl.config.process_schema import ClusterConfig, HardwareConfig
from mrl.config.schema import PlanConfig, TrainerConfig
from mrl.planner.engine_time import EngineTime, RolloutTime, push_s
from mrl.planner.layout_space import GpuCluster, ReplicaLayout
from mrl.planner.model_shape import LayerKind
from mrl.planner.rollout_simulator import GroupLengths, RolloutSetup, RunSpeeds, simulate
from mrl.planner.step_workload import LengthDistribution, StepWorkload
from mrl.planner.trainer_time import PARTS, TrainerTime
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from mrl.weight_sync.transfer_plan import (
    LinkSpeeds,
    compile_transfer_plan,
    estimate_transfer_cost,
    even_pipeline_stages,
    trainer_shards,
)
from parallel.dims import ParallelDims

ONE = np.array([1])
ROOT = Path(__file__).parents[2]
SHAPE = "prompt of 2048, 16 x 8192 responses"


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [(QWEN3_8B, 8_190_735_360), (QWEN3_30B_A3B, 30_532_122_624), (DEEPSEEK_V3, 671_026_419_200)],
    ids=["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"],
)
def test_a_model_shape_counts_every_weight_and_the_multiply_adds_of_a_token(fields, parameters):
    arch, shape = model_of(fields)
    assert shape.num_weights == parameters
    assert shape.token_macs == pytest.approx(
        arch.multiply_adds()[0], rel=0.005
    )  # multiply_adds() does not count norms and routers


def test_the_seconds_of_a_layout_are_those_computed_by_hand():
    """Qwen3-8B, tp 2, pp 2, dp 2 on 8 GPUs: 4 packs of 8,192 tokens per replica, forward and backward."""
    _, shape = model_of(QWEN3_8B)
    cluster = GpuCluster.of(
        ClusterConfig(nodes=1, hardware=HardwareConfig("x", 80, 1000, 2000, 800, 50, 1000)), PlanConfig()
    )
    lengths = LengthDistribution(1024, np.array([7168.0]))
    work = StepWorkload(lengths, prompts=8, responses_per_prompt=1, max_tokens=8192)
    seconds = TrainerTime(shape, ReplicaLayout(tp=2, pp=2, etp=2), cluster, work).times(np.array([2]))

    layer = 4096 * 128 * (32 + 2 * 8 + 32) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    flops = 2 * (18 * layer + 4096 * 151_936) * 8192 / 2
    matmul = 4 * 3 * flops / (1000e12 * 0.38)
    pairs = 18 * (2 * 32 * 128 * 0.5) * 8192**2 / 2
    attention = 4 * 3 * 2 * pairs / (1000e12 * 0.3)
    message = 8192 * 4096 * 2 / 2 / (400e9 * 0.75) + 10e-6
    tensor = 4 * (4 * 18 * message) * 2.5
    between = 2 * (8192 / 2 * 4096 * 2 / (400e9 * 0.75) + 10e-6)
    slot = (matmul + attention + tensor) / 4 + between
    norms = 2 * 4096 + 2 * 128  # not sharded: each tensor-parallel rank has all norms
    stage = (18 * (layer - norms) + 4096 * 151_936) / 2 + 18 * norms + 4096
    gradients = stage * 6 * 0.5 / (400e9 * 0.75) + 20e-6
    optimizer = stage / 2 * 34 / (2000e9 * 0.75)

    parts = seconds.at(0)
    assert parts["matmul"] == pytest.approx(matmul) and parts["attention"] == pytest.approx(attention)
    assert parts["tensor"] == pytest.approx(tensor) and parts["pipeline"] == pytest.approx(4 * between + slot)
    assert parts["gradients"] == pytest.approx(gradients) and parts["optimizer"] == pytest.approx(optimizer)
    assert seconds.total_s[0] == pytest.approx(5 * slot + gradients + optimizer)


def test_an_engine_sums_the_partial_results_of_its_gpus_after_each_block():
    """A layer of Nemotron-H has one block, a layer of the other families has two."""
    _, shape = model_of(QWEN3_8B)
    one_block = replace(shape, kinds=(LayerKind(("attention",)),) * 36)
    seconds = [EngineTime(each, cluster_of(1, 8), 8)._all_reduce_s(64) for each in (shape, one_block)]
    assert seconds[0] == 2 * seconds[1] > 0


def measured_seconds(file: str, case: str) -> float:
    """Return the measured time of a case in benchmarks/results."""
    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    (row,) = (row for section in results["sections"] for row in section["rows"] if row["case"] == case)
    return next(value["value"] for value in row["values"] if value["quantity"] == "time")


def test_the_planner_predicts_the_updates_that_were_measured_on_an_h100():
    """The sizes are those of mrl/bench/model_steps.py: STEPS (all lengths are uniform) and LONG_RESPONSES."""
    sizes = dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=15, tie_word_embeddings=True)
    small = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
    mixed = LengthDistribution(640, np.linspace(256.0, 2048.0, 64))
    packed = StepWorkload(mixed, prompts=8, responses_per_prompt=8, max_tokens=16384)
    long = StepWorkload(LengthDistribution(8, np.array([16376.0])), 1, 1, max_tokens=16384, share_prompts=False)
    shared = "15 layers with the widths of Qwen3-4B: packed, shared prompts (mrl's choice)"
    alone = "Qwen3-0.6B: one response of 16384 tokens"
    for fields, work, file, case in (
        (sizes, packed, "gpu_h100_2026-11-26.json", shared),
        (small, long, "gpu_h100_2026-11-26_213714.json", alone),
    ):
        _, shape = model_of(QWEN3_8B | sizes | fields)
        layout = ReplicaLayout(tp=1, pp=1, etp=1)
        predicted = TrainerTime(shape, layout, cluster_of(1, 1), work).times(ONE).total_s[0]
        assert predicted == pytest.approx(measured_seconds(file, case), rel=0.06), case


def test_the_reasons_of_defaults_for_gpus_have_the_numbers_that_were_measured():
    page = (ROOT / "docs" / "how_to" / "speed.md").read_text().partition("## Choices for GPUs")[2]
    measured = {
        f"{measured_seconds('gpu_h100_2026-11-26.json', case):.{digits}f}"
        for case, digits in (
            ("mrl, chunks of 1024", 0),
            ("mrl, chunks of 4096", 0),
            ("32768 tokens of mixed lengths: Transformer Engine (mrl's choice with share_prompts=false)", 1),
            ("32768 tokens of mixed lengths: torch's variable-length FlashAttention-2 (mrl's choice)", 1),
            (f"{SHAPE}, shared prompt: torch's variable-length FlashAttention-2 (mrl's choice)", 0),
            (f"{SHAPE}, repeated prompt: Transformer Engine (mrl's choice with share_prompts=false)", 0),
        )
    }
    flops_per_s = cluster_of(1, 1).matmul_flops_per_s
    layers = [128 * hidden * (32 + 16 + 32) + 3 * hidden * ffn for hidden, ffn in ((2560, 9728), (4096, 12288))]
    saved = {f"{1e3 * 6 * layer * 15 * 2048 / flops_per_s:.0f}" for layer in layers}  # 15 of 16 prompts of 2,048 tokens
    assert set(re.findall(r"([\d.]+) ms", page)) == measured | saved
    for key in ("share_prompts", "logprob_chunk"):
        default = json.dumps(getattr(TrainerConfig(), key))
        assert re.search(rf"\| `trainer\.{key}` \| `?{default}`? \|", page)


def test_stages_have_the_layers_that_megatron_gives_them():
    moe = (False,) * 3 + (True,) * 58
    assert ReplicaLayout(pp=16, last_layers=1).stages(moe) == [(3, 1), *[(0, 4)] * 14, (0, 1)]
    moe = (
        False,
        False,
        True,
        True,
        True,
        False,
        True,
        True,
    )  # virtual stages of 2 layers: stage 0 has the first and the third
    assert ReplicaLayout(pp=2, vpp=2).stages(moe) == [(3, 1), (0, 4)]


LAYOUTS = st.sampled_from(
    [
        ReplicaLayout(),
        ReplicaLayout(tp=4, etp=4),
        ReplicaLayout(tp=2, ep=8, etp=1),
        ReplicaLayout(pp=4, vpp=3, ep=4),
        ReplicaLayout(pp=5, last_layers=8, ep=2, recompute=True),
        ReplicaLayout(tp=2, pp=2, cp=4, ep=16, etp=2),
    ]
)
FASTER = ("tflops_bf16", "hbm_gb_per_s", "nvlink_gb_per_s", "network_gb_per_s")


def work_of(prompts=64, responses=8, max_tokens=8192, **others):
    return StepWorkload(LengthDistribution.log_normal(256, 2000, 0.9, 8192), prompts, responses, max_tokens, **others)


@settings(max_examples=60)
@given(LAYOUTS, st.sampled_from(FASTER), st.floats(1.01, 20), st.integers(0, 6))
def test_faster_hardware_is_never_slower(layout, name, factor, power):
    _, shape = model_of(QWEN3_30B_A3B)
    hardware = HardwareConfig("x", 80, 1000, 3000, 900, 50, 1000)
    faster = replace(hardware, **{name: getattr(hardware, name) * factor})
    slow, fast = (ClusterConfig(nodes=64, hardware=each) for each in (hardware, faster))
    replicas = np.array([16 * 2**power])
    trainers = [TrainerTime(shape, layout, GpuCluster.of(cluster, PlanConfig()), work_of()) for cluster in (slow, fast)]
    before, after = (trainer.times(replicas).total_s[0] for trainer in trainers)
    assert after <= before
    engines = [EngineTime(shape, GpuCluster.of(cluster, PlanConfig()), 4) for cluster in (slow, fast)]
    before, after = (engine.decoding_step_s(64, 3000.0) for engine in engines)
    assert after <= before


@pytest.mark.extended
@settings(max_examples=60)
@given(LAYOUTS, st.integers(1, 64), st.integers(0, 2), st.booleans(), st.integers(1, 3))
def test_parts_add_up_and_replicas_share_the_arithmetic(layout, replicas, scoring, critic, mini_batches):
    _, shape = model_of(QWEN3_30B_A3B)
    work = work_of(scoring_passes=scoring, critic=critic, mini_batches=mini_batches)
    trainer = TrainerTime(shape, layout, cluster_of(64), work)
    replicas = layout.replica_multiple * replicas
    seconds = trainer.times(np.array([replicas, 2 * replicas]))
    assert set(seconds.parts) == set(PARTS)
    assert sum(seconds.parts.values()) == pytest.approx(seconds.total_s)
    assert seconds.parts["matmul"][1] <= seconds.parts["matmul"][0] * (1 + 1e-9)
    recomputed = replace(trainer, layout=replace(layout, recompute=True)).times(np.array([replicas]))
    assert recomputed.total_s[0] >= seconds.total_s[0] * (1 - 1e-9)
    more = replace(trainer, work=replace(work, scoring_passes=scoring + 1)).times(np.array([replicas]))
    assert more.score_s[0] > seconds.score_s[0] and more.update_s[0] == pytest.approx(seconds.update_s[0])


@settings(max_examples=40)
@given(LAYOUTS, st.integers(1, 32))
def test_tensor_context_and_pipeline_parallelism_divide_arithmetic_equally(layout, replicas):
    """The three kinds differ only in what ranks send and in how long ranks wait."""
    _, shape = model_of(QWEN3_30B_A3B)
    replicas *= layout.replica_multiple
    dims = layout.dims(replicas)
    assert isinstance(dims, ParallelDims) and dims.world_size == layout.gpus * replicas
    work = StepWorkload(LengthDistribution(0, np.array([1024.0])), 64 * 48 * 16, 1, 1024)
    trainer = TrainerTime(shape, layout, cluster_of(64), work)
    passes = 4 if layout.recompute else 3
    parts = trainer.times(np.array([replicas])).at(0)
    pairs = (
        2
        * shape.num_layers
        * shape.attention_macs
        * work.sum_of_squared_lengths
        / trainer.cluster.attention_flops_per_s
    )
    stages = [sum(counts) for counts in layout.stages(shape.moe)]
    busiest = max(
        stages[:-1], default=stages[-1]
    )  # with equal stages, the last one is the slowest, because it has the output layer
    expected = passes * pairs / (layout.tp * layout.cp * replicas) * np.array([busiest, stages[-1]]) / shape.num_layers
    assert any(parts["attention"] == pytest.approx(value) for value in expected)


def test_shared_prompts_are_computed_once_per_pack():
    work = StepWorkload(LengthDistribution(1000, np.array([500.0])), 10, 8, max_tokens=5000)
    assert work.tokens == 10 * (1000 + 8 * 500) and work.sum_of_squared_lengths == 10 * (
        1000**2 + 8 * (1500**2 - 1000**2)
    )
    alone = replace(work, share_prompts=False)
    assert alone.tokens == 10 * 8 * 1500 and alone.sum_of_squared_lengths == 10 * 8 * 1500**2
    assert replace(work, max_tokens=1200).packs == 80  # a response with its prompt fills a pack of its own


def test_a_length_distribution_has_the_moments_of_a_large_sample():
    lengths = LengthDistribution.log_normal(0, 1000, 0.8, 10**9)
    drawn = np.random.default_rng(0).lognormal(np.log(1000), 0.8, (4000, 64))
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert lengths.longest_response_of(64) == pytest.approx(drawn.max(axis=1).mean(), rel=0.02)
    assert lengths.mean_context == pytest.approx((drawn**2).mean() / (2 * drawn.mean()), rel=0.02)
    assert lengths.remaining_of(1)[0] == pytest.approx(lengths.mean_context, rel=0.01)


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("fields", "tp", "engines", "prompts", "responses"),
    [(QWEN3_8B, 2, 4, 64, 8), (QWEN3_8B, 1, 8, 64, 16), (QWEN3_30B_A3B, 4, 2, 64, 8)],
)
@pytest.mark.parametrize(("staleness", "error"), [(0, 0.1), (1, 0.2), (2, 0.15)], ids=["sync", "one step off", "async"])
def test_the_closed_form_of_sampling_agrees_with_the_simulator(
    fields, tp, engines, prompts, responses, staleness, error
):
    _, shape = model_of(fields)
    work = work_of(prompts, responses)
    asked = prompts * responses // engines * (staleness + 1)
    speeds = EngineTime(shape, cluster_of(4), tp).speeds(work.lengths, asked)
    drawn = np.random.default_rng(0).choice(work.lengths.responses, (1024, responses)).astype(np.int64)
    groups = GroupLengths(drawn, np.full(len(drawn), work.lengths.prompt_tokens))
    setup = RolloutSetup(prompts, engines, staleness, in_order=staleness < 2)
    sampling = RolloutTime.of(speeds, work, engines, staleness)
    for share in (0.0, 0.5, 1.5):
        train_s = share * sampling.step_s(0.0)
        simulated = simulate(groups, RunSpeeds(speeds, train_s, 0.0, 1.0), setup, 16).seconds(6)
        assert 1.0 + sampling.step_s(train_s) == pytest.approx(simulated, rel=error)


@given(st.integers(0, 4), st.floats(0, 100), st.floats(0, 100), st.floats(0, 100), st.floats(0, 300), st.floats(0, 50))
def test_slower_trainers_and_less_staleness_never_make_steps_faster(staleness, tail, shared, more, train_s, later):
    sampling = RolloutTime(staleness, tail, shared, shared + more)
    step_s = sampling.step_s(train_s)
    assert step_s >= max(train_s, shared) * (1 - 1e-9)
    assert sampling.step_s(train_s + later) >= step_s * (1 - 1e-9)
    if staleness:
        assert replace(sampling, staleness=staleness + 1).step_s(train_s) <= step_s * (1 + 1e-9)


def test_a_decoding_step_reads_the_experts_that_its_requests_choose():
    _, shape = model_of(QWEN3_30B_A3B)
    cluster = cluster_of(1)
    engine = EngineTime(shape, cluster, 1)
    one, many = (engine.decoding_step_s(n, 0.0) - n * engine._compute_s - engine._all_reduce_s(n) for n in (1, 1000))
    assert one * cluster.hbm_bytes_per_s == pytest.approx(2 * (shape.dense_weights + shape.expert_parameters * 8 / 128))
    assert many * cluster.hbm_bytes_per_s == pytest.approx(2 * shape.num_weights)
    assert EngineTime(shape, replace(cluster, memory_bytes=60e9), 1).max_running(work_of().lengths) == 0


def test_more_senders_and_faster_networks_push_sooner():
    _, shape = model_of(QWEN3_8B)
    cluster = cluster_of(64)
    few, many = (push_s(shape, cluster, trainers, 32, 2, 2**26) for trainers in (16, 64))
    assert many < few
    weights = 2 * 8_190_735_360
    assert few == pytest.approx(weights * 32 / 16 / cluster.network_bytes_per_s + weights / 16 / 2**26 * 32 * 50e-6)


@pytest.mark.parametrize(("trainers", "num_engines", "engine_tp"), [(4, 2, 2), (8, 4, 1), (2, 4, 4)])
def test_the_closed_form_of_a_push_is_close_to_the_cost_of_the_transfer_plan(trainers, num_engines, engine_tp):
    fields = small_moe()
    arch, shape = model_of(fields)
    layout = EngineLayout.of(family_of(HFConfig(Path("config.json"), fields)), arch, EngineParallelSizes(engine_tp))
    dims = ParallelDims(tp=2, dp=trainers // 2, ep=2, etp=1)
    owned = trainer_shards(layout.rows, layout.sizes, dims, even_pipeline_stages(arch.num_layers, dims))
    found = compile_transfer_plan(owned, layout, num_engines, lambda _: ("bfloat16", 2), 2**26)
    cluster = cluster_of(2)
    gb_per_s = cluster.link_bytes_per_s(trainers + num_engines * engine_tp) / 1e9
    planned = estimate_transfer_cost(found, trainers, LinkSpeeds(gb_per_s, gb_per_s, 50.0), shared=False)
    closed = push_s(shape, cluster, trainers, num_engines, engine_tp, 2**26)
    assert closed == pytest.approx(planned.seconds, rel=0.25)  # the closed form ignores how chunks fill buckets
