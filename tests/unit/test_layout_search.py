"""The layout search equals exhaustive search, is never worse than published layouts, is fast, and prints usable overrides."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from published_dense_configs import GEMMA3_1B, published
from published_moe_configs import GPT_OSS_20B
from search_cases import (
    DEEPSEEK_V3,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    cluster_of,
    model_of,
    search_of,
    small_moe,
    write_model,
)
from tiny_families import image_config

from models.families import family_of
from models.hf_config import HFConfig
from mrl.commands import plan
from mrl.commands.plan_search import FIXABLE, make_search, overrides, prompt_length
from mrl.config import hydra_entry
from mrl.config.schema import ParallelConfig
from mrl.controller.memory_check import MemoryEstimator
from mrl.controller.plan_models import build_pools, check_planned_transport
from mrl.data.tokenizer import character_tokenizer
from mrl.placement.resource_pools import slot_demands
from mrl.planner.engine_time import EngineTime, RolloutTime, push_s, push_within_a_node_s
from mrl.planner.layout_search import STALENESS, explain_limits
from mrl.planner.layout_space import LayoutSpace, ReplicaLayout
from mrl.planner.model_shape import ModelShape
from mrl.planner.trainer_time import TrainerTime
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from parallel.dims import ParallelDims


def all_trainers(search):
    """Return number of GPUs -> [(training seconds, switching seconds)] of all layouts that the checks of a run accept."""
    arch, cluster = search.space.arch, search.space.cluster
    gpus, layers = cluster.gpus, arch.num_layers
    sizes = [n for n in range(1, gpus + 1)]
    results: dict[int, list[tuple[float, float]]] = {}
    for tp, pp, dp in product(sizes, range(1, layers + 1), sizes):
        if tp * pp * dp > gpus or tp > cluster.gpus_per_node:
            continue
        for vpp, cp, ep, etp in product(range(1, layers + 1), (1, 2, 4, 8, 16), sizes, {1, tp}):
            each = -(-layers // pp)
            last = layers - each * (pp - 1)
            uneven = last != each
            if cp > max(1, search.space.longest / 1024) or (uneven and (vpp > 1 or last < 1)):
                continue
            try:
                dims = ParallelDims(tp, pp, vpp, cp, dp, ep, etp)
                arch.check_layout(dims, uneven_stages=uneven)
            except ValueError:
                continue
            if dims.world_size > gpus or (gpus > cluster.gpus_per_node and dims.world_size % cluster.gpus_per_node):
                continue
            for recompute in (False, True):
                layout = ReplicaLayout(tp, pp, vpp, cp, ep, etp, last if uneven else 0, recompute)
                if search.fits(layout, dp):
                    trainer = TrainerTime(search.space.shape, layout, cluster, search.work)
                    replicas = np.array([dp])
                    switch = 2 * float(trainer.state_bytes(replicas)[0]) / cluster.pcie_bytes_per_s
                    seconds = float(trainer.times(replicas).total_s[0])
                    results.setdefault(dims.world_size, []).append((seconds, switch))
    return results


def all_engines(search, family):
    """Return the engines of all sizes over which SGLang can shard this model."""
    cluster, results = search.space.cluster, []
    for tp in range(1, cluster.gpus + 1):
        try:
            EngineLayout.of(family, search.space.arch, EngineParallelSizes(tp)).shards(0)
        except (ValueError, AssertionError):
            continue
        engine = EngineTime(search.space.shape, cluster, tp)
        if (cluster.gpus_per_node % tp == 0 or tp % cluster.gpus_per_node == 0) and engine.max_running(
            search.work.lengths
        ):
            results.append(engine)
    return results


def best_of_all(search, family):
    """Return the seconds of a step in the fastest of all configurations."""
    cluster, shape, work, best = search.space.cluster, search.space.shape, search.work, np.inf

    def rollout_of(engine, count, staleness):
        requests = -(-work.responses // count) * (staleness + 1)
        return RolloutTime.of(engine.speeds(work.lengths, requests), work, count, staleness)

    for gpus, trained in all_trainers(search).items():
        for engine in all_engines(search, family):
            count = gpus // engine.tp
            if count and "sync" in search.modes:
                sampling = rollout_of(engine, count, 0)
                if cluster.gpus <= cluster.gpus_per_node:
                    push = push_within_a_node_s(shape, cluster, gpus, engine.tp)
                else:
                    push = push_s(shape, cluster, gpus, count, engine.tp, search.bucket_bytes)
                best = min(best, *(sampling.step_s(seconds) + push + switch for seconds, switch in trained))
            count = (cluster.gpus - gpus) // engine.tp
            for mode in search.modes if count else ():
                push = push_s(shape, cluster, gpus, count, engine.tp, search.bucket_bytes)
                sampling = rollout_of(engine, count, STALENESS[mode])
                best = min(best, *(sampling.step_s(seconds) + push for seconds, _ in trained))
    return best


@pytest.mark.extended_except("4 GPUs-all")
@pytest.mark.parametrize("modes", [("sync",), ("one_step_off",), tuple(STALENESS)], ids=["sync", "one step off", "all"])
@pytest.mark.parametrize(
    ("nodes", "hardware"),
    [
        (1, dict(gpus_per_node=4, gpu_memory_gb=8)),
        (2, dict(gpus_per_node=4, gpu_memory_gb=6)),
        (2, dict(gpus_per_node=8, gpu_memory_gb=6)),
    ],
    ids=["4 GPUs", "8 GPUs", "16 GPUs"],
)
def test_the_search_finds_the_best_of_all_configurations(nodes, hardware, modes):
    fields = small_moe()
    search = search_of(fields, nodes, prompts=16, responses=4, modes=modes, max_tokens=8192, **hardware)
    family = family_of(HFConfig("config.json", fields))
    result = search.run(3)
    assert result.best[0].step_s == pytest.approx(best_of_all(search, family), rel=1e-12)
    assert result.excluded["trainer does not fit in memory"]
    shared = [candidate for candidate in search._candidates(3) if candidate.placement == "colocated"]
    assert all(each.engine_gpus <= each.trainers.gpus for each in shared), "engines get their weights on their own GPUs"
    assert [candidate.step_s for candidate in result.best] == sorted(candidate.step_s for candidate in result.best)


PUBLISHED = [
    (QWEN3_30B_A3B, 1, dict(tp=4, ep=8, etp=1)),
    (QWEN3_30B_A3B, 4, dict(tp=4, ep=8, etp=1)),
    (QWEN3_235B_A22B, 16, dict(tp=4, pp=8, ep=8, etp=1)),
    (QWEN3_235B_A22B, 16, dict(tp=4, pp=8, ep=16, etp=1)),
    (DEEPSEEK_V3, 32, dict(tp=8, pp=8, ep=32, etp=1)),
    (DEEPSEEK_V3, 64, dict(tp=8, pp=16, ep=32, etp=1)),
]
"""Layouts as others train these models with, on nodes of eight: trainers on all GPUs, colocated with engines."""


def layout_on_all_gpus(search, sizes):
    """Return the layout with these sizes, and its number of replicas on all GPUs."""
    layers, pp = search.space.shape.num_layers, sizes.get("pp", 1)
    last = layers - -(-layers // pp) * (pp - 1)
    layout = ReplicaLayout(**sizes, last_layers=0 if last * pp == layers else last)
    return layout, search.space.cluster.gpus // layout.gpus


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fields", "nodes", "sizes"),
    PUBLISHED,
    ids=[f"{f['num_hidden_layers']} layers on {8 * n} GPUs ep {s['ep']}" for f, n, s in PUBLISHED],
)
def test_a_published_layout_is_never_better_than_the_best_and_is_found_if_all_sizes_are_fixed(fields, nodes, sizes):
    search = search_of(fields, nodes, fits=lambda layout, replicas: True)  # memory is not checked
    layout, replicas = layout_on_all_gpus(search, sizes)
    theirs = TrainerTime(search.space.shape, layout, search.space.cluster, search.work).times(np.array([replicas]))
    result = search.run(1)
    fixed = dict(pp=1, vpp=1, cp=1, dp=replicas, placement="colocated") | sizes
    forced = search_of(fields, nodes, fits=lambda layout, replicas: True, fixed=fixed).run(1).best[0]
    assert forced.trainers.layout == layout and forced.trainers.replicas == replicas
    assert forced.trainers.train_s == theirs.total_s[0]
    assert result.best[0].step_s <= forced.step_s


@pytest.mark.extended
@pytest.mark.parametrize("fields", [QWEN3_8B, QWEN3_30B_A3B], ids=["8B", "30B-A3B"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_nodes_are_never_slower(fields, mode):
    seconds = [search_of(fields, nodes, modes=(mode,)).run(1).best[0].step_s for nodes in (2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.extended
def test_the_same_search_has_the_same_result():
    first, second = (search_of(QWEN3_30B_A3B, 4).run(5) for _ in range(2))
    assert first == second
    assert len({candidate.kind for candidate in first.best}) == len(first.best) == 5


@pytest.mark.extended
@pytest.mark.parametrize(
    "fixed",
    [
        dict(tp=2, cp=2),
        dict(engine_tp=4, num_engines=2),
        dict(placement="disaggregated", pp=2),
        dict(ep=4, etp=2, tp=2),
    ],
    ids=str,
)
def test_fixed_values_are_not_changed(fixed):
    candidate = search_of(QWEN3_30B_A3B, 4, fixed=fixed).run(1).best[0]
    values = vars(candidate.trainers.layout) | vars(candidate) | dict(dp=candidate.trainers.replicas)
    assert {name: values[name] for name in fixed} == fixed


@pytest.mark.extended
@pytest.mark.parametrize("fields", [QWEN3_235B_A22B, DEEPSEEK_V3], ids=["Qwen3-235B", "DeepSeek-V3"])
def test_a_search_over_ten_thousand_gpus_checks_the_memory_of_few_numbers_of_replicas(fields):
    """Bisection finds the numbers of replicas that fit. For each layout, one array operation computes all their times."""
    search = search_of(fields, 1280, prompts=4096)
    fits, checks = search.fits, []
    search.fits = lambda layout, replicas: checks.append(replicas) or fits(layout, replicas)
    result = search.run(5)
    layouts = sum(1 for _ in search.space.layouts())
    assert len(checks) <= 2 * (2 + math.log2(10_240)) * layouts
    assert result.evaluated > 50_000 and len(result.best) == 5
    assert result.best[0].gpus <= 10_240


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(plan.main(["search", *words]))
    out = capsys.readouterr()
    return ended.value.code, out.out, out.err


ARGUMENTS = (
    "cluster=h100",
    "cluster.nodes=4",
    "rollout.max_response_tokens=8192",
    "trainer.max_tokens_per_micro_batch=16384",
    "plan.prompt_tokens=512",
)


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_printed_overrides_are_a_config_of_that_layout(tmp_path, capsys, algorithm):
    folder = write_model(tmp_path, QWEN3_30B_A3B)
    words = (f"model.path={folder}", *ARGUMENTS, f"algorithm={algorithm}")
    code, out, _ = run(capsys, *words, "--json")
    printed = json.loads(out)
    assert code == 0 and len(printed["best"]) == 5
    arch, _ = model_of(QWEN3_30B_A3B)
    for candidate in [*printed["best"], *printed["best_of_each_placement_and_mode"]]:
        pasted = [word.strip("'") for word in candidate["overrides"]]
        config = hydra_entry.compose_config(
            hydra_entry.check_overrides([*words, "run.dir=x", "data.train=[x.jsonl]", *pasted])
        )
        dims = ParallelDims.from_world_size(**vars(config.parallel))
        arch.check_layout(dims, uneven_stages="num_layers_in_last_pipeline_stage" in config.megatron)
        roles = dict(actor=dims) | (dict(critic=dims) if algorithm == "ppo" else {})
        pools = build_pools(config, roles)
        check_planned_transport(config, pools)
        assert pools.size == candidate["gpus"] <= 32 and dims.world_size == candidate["trainer_gpus"]
        assert slot_demands(config.rollout, roles)["engines"].slots == candidate["engine_gpus"]
        assert config.rollout.mode == candidate["mode"]
        if algorithm == "grpo":  # with a critic, a third process keeps plan.reserve_gb on each GPU
            assert MemoryEstimator.of(config).estimate(config).fits
        parts = candidate["parts_s"]
        assert candidate["step_s"] == pytest.approx(sum(parts.values())) or candidate["mode"] != "sync"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("transport", "placements"),
    [("auto", {"colocated", "disaggregated"}), ("cuda_ipc", {"colocated"}), ("process_group", {"disaggregated"})],
)
def test_the_search_has_only_candidates_that_fit_the_transport(tmp_path, transport, placements):
    words = (f"model.path={write_model(tmp_path, QWEN3_8B)}", "run.dir=x", "data.train=[x.jsonl]", *ARGUMENTS)
    config = hydra_entry.compose_config(hydra_entry.check_overrides([*words, f"weight_sync.transport={transport}"]))
    assert {candidate.placement for candidate in make_search(config)._candidates(3)} == placements


@pytest.mark.extended
def test_the_search_counts_only_adapters_as_trained_weights(tmp_path):
    """The state of all 8 billion parameters does not fit on one GPU."""
    words = (f"model.path={write_model(tmp_path, QWEN3_8B)}", "run.dir=x", "data.train=[x.jsonl]", *ARGUMENTS)

    def fits(*keys: str) -> bool:
        config = hydra_entry.compose_config(hydra_entry.check_overrides([*words, *keys]))
        return make_search(config).fits(ReplicaLayout(recompute=True), 1)

    assert fits("lora.rank=16") and not fits()


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("model", "fixed"), [(GEMMA3_1B, {"cp": 1}), (GPT_OSS_20B, {})], ids=["windows", "windows and sinks"]
)
def test_without_shared_prompts_only_windows_without_sinks_exclude_context_parallelism(tmp_path, model, fixed):
    """In layers with sinks, PackedAttention computes the attention. See plan_model."""
    (tmp_path / "config.json").write_text(json.dumps(published(model)))
    words = (f"model.path={tmp_path}", "run.dir=x", "data.train=[x.jsonl]", *ARGUMENTS, "trainer.share_prompts=false")
    config = hydra_entry.compose_config(hydra_entry.check_overrides(words))
    assert make_search(config).space.fixed == fixed


def test_the_layers_with_features_of_a_vision_tower_stay_in_one_stage(tmp_path):
    image_config("qwen3_vl").save_pretrained(tmp_path)
    config = HFConfig.load(tmp_path)
    family, arch = family_of(config), family_of(config).read(config)
    for features, sizes in ((1, {1, 2}), (2, {1})):  # the model has two layers
        of = replace(arch, vision=replace(arch.vision, repeats=dict(block=2, feature=features)))
        layouts = LayoutSpace(of, ModelShape.of(family, of), cluster_of(1), 64.0).layouts()
        assert {layout.pp for layout in layouts} == sizes


@pytest.mark.extended
def test_the_text_shows_the_best_and_what_limits_it(tmp_path, capsys):
    code, out, _ = run(capsys, f"model.path={write_model(tmp_path, QWEN3_8B)}", *ARGUMENTS, "plan.top=3")
    assert code == 0
    for said in (
        "assumed: matmul 38%, attention 30%",
        "the 3 best candidates, from",
        "1: sampling: ",
        "2 compared with 1",
        "excluded: ",
        "parallel.tp=",
    ):
        assert said in out


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster.nodes=4"], "cluster.hardware.gpu_memory_gb=0"),
        (["cluster=h100"], "cluster.nodes=None"),
        (["cluster=h100", "cluster.nodes=1", "plan.fix=[parallel.sp]"], "the search does not set 'parallel.sp'"),
        (["cluster=h100", "cluster.nodes=1", "plan.top=0"], "plan.top=0"),
        (["cluster=h100", "cluster.nodes=1", "cluster.hardware.gpu_memory_gb=9"], "no layout fits on 8 GPUs"),
        (["cluster=h100", "cluster.nodes=1", "plan.lengths=nowhere.jsonl"], "lengths=nowhere.jsonl"),
        (
            ["cluster=h100", "cluster.nodes=1", "algorithm=distill", "roles.teacher.path=large"],
            "roles.teacher: mrl plan search plans for actor, critic and engines, and would ignore the GPUs, memory and time of "
            "the models in `roles`",
        ),
        (
            ["cluster=h100", "cluster.nodes=1", "reward=served_judge", "roles.judge.path=large"],
            "roles.judge: mrl plan search plans for actor, critic and engines",
        ),
    ],
)
def test_an_error_names_the_key(tmp_path, capsys, words, said):
    code, out, err = run(capsys, f"model.path={write_model(tmp_path, QWEN3_30B_A3B)}", *words)
    assert code == 2 and said in err and "Traceback" not in err and not out


@pytest.mark.extended
def test_the_best_candidates_have_different_layouts():
    """Variants that differ only in their virtual pipeline stages count as one layout."""
    result = search_of(QWEN3_30B_A3B, 4).run(5)
    layouts = {(each.placement, replace(each.trainers.layout, vpp=1)) for each in result.best}
    assert len(layouts) == len(result.best) == 5
    fixed = search_of(QWEN3_30B_A3B, 4, fixed=dict(tp=4, pp=1, vpp=1, cp=1, ep=8, etp=1, dp=4)).run(3).best
    assert len(fixed) == 3, "one layout: the others differ in mode or engines"


@pytest.mark.parametrize(("fields", "nodes"), [(QWEN3_8B, 1), (QWEN3_30B_A3B, 4)])
@pytest.mark.extended
def test_async_is_never_slower_than_one_step_off(fields, nodes):
    """A run with mode=async and staleness 1 is the same as one_step_off, and the search chooses the best staleness."""
    search = search_of(fields, nodes)
    candidates = [each for each in search._candidates(3) if each.placement == "disaggregated"]
    seconds = {(each.mode, each.trainers, each.engine_tp, each.num_engines): each.step_s for each in candidates}
    pairs = [(s, seconds["async", key[1], key[2], key[3]]) for key, s in seconds.items() if key[0] == "one_step_off"]
    assert pairs and all(asynchronous <= one_step_off for one_step_off, asynchronous in pairs)
    fastest = next(each for each in candidates if each.mode == "async")
    assert f"rollout.max_staleness={fastest.rollout.staleness}" in overrides(search, fastest)


@pytest.mark.extended
def test_the_length_of_prompts_is_shown_with_its_source(tmp_path, capsys):
    words = (f"model.path={write_model(tmp_path, QWEN3_8B)}", "cluster=h100", "cluster.nodes=1")
    assert "prompts of 512 tokens (assumed; plan.prompt_tokens sets it)" in " ".join(run(capsys, *words)[1].split())
    printed = json.loads(run(capsys, *words, "data.max_prompt_tokens=300", "--json")[1])
    assert (printed["assumed"]["prompt_tokens"], printed["assumed"]["prompt_tokens_source"]) == (
        300,
        "data.max_prompt_tokens",
    )


def test_the_length_of_prompts_is_measured_in_the_data(tmp_path):
    character_tokenizer().save_pretrained(write_model(tmp_path, QWEN3_8B))
    rows = [dict(prompt=[dict(role="user", content="1" * n)], reward_model=dict(ground_truth="1")) for n in (2, 4)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [f"model.path={tmp_path}", f"data.train=[{tmp_path}/data.jsonl]", "data.max_prompt_tokens=300"]
    tokens, source = prompt_length(hydra_entry.compose_config(hydra_entry.check_overrides([*keys, "run.dir=x"])))
    template_tokens = tokens - 3
    assert 0 <= template_tokens < 10 and source == "mean of the first 256 rows of each file of data.train"


def test_fixable_keys_are_keys_of_the_config():
    names = {name.partition(".")[2] for name in FIXABLE if name.startswith("parallel.")}
    assert names < set(ParallelConfig.__dataclass_fields__)


def test_the_limit_of_running_requests_is_named():
    search = search_of(QWEN3_8B, 1)
    search.max_requests = 4
    sampling = explain_limits(search, search.run(1).best[0])[1]
    assert sampling.startswith("sampling: an engine runs only 4 of its ") and "sglang.max_running_requests" in sampling


def test_a_layout_without_a_possible_number_of_replicas_has_its_own_reason():
    """On two nodes of eight GPUs, three replicas of one GPU fill no whole nodes."""
    search = search_of(QWEN3_8B, 2, fits=lambda layout, replicas: True, fixed=dict(tp=1, pp=1, cp=1, dp=3))
    with pytest.raises(ValueError, match=r"no layout fits on 16 GPUs: .*no possible number of replicas \(1\)"):
        search.run(1)


def test_overrides_leave_out_sizes_of_one():
    search = search_of(QWEN3_8B, 1)
    words = overrides(search, search.run(1).best[0])
    assert not any(word.startswith(("parallel.ep", "parallel.etp")) for word in words)
    assert cluster_of(1).gpus == 8
