"""The search: equal to trying everything, never worse than published layouts, quick, and what it says can be pasted."""

import json
import time
from itertools import product

import numpy as np
import pytest
from search_cases import (
    DEEPSEEK_V3,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_235B_A22B,
    machine_of,
    model_of,
    search_of,
    small_moe,
    write_model,
)

from models.families import family_of
from models.hf_config import HFConfig
from mrl.commands import hydra_app, plan
from mrl.commands.plan_search import FIXABLE, overrides
from mrl.config.schema import ParallelConfig
from mrl.controller.memory_check import Counted
from mrl.controller.plan_train import pools_of
from mrl.placement.resource_pools import needs_of
from mrl.planner import engine_time
from mrl.planner.engine_time import Engine, Sampling
from mrl.planner.layout_search import STALENESS
from mrl.planner.layout_space import Layout
from mrl.planner.trainer_time import Trainer
from mrl.weight_sync.engine_layout import EngineLayout, Topology
from parallel.dims import ParallelDims


def tried_trainers(search):
    """Seconds of training and of switching by number of GPUs, of all that the rules of the run itself accept."""
    arch, machine = search.space.arch, search.space.machine
    gpus, layers = machine.gpus, arch.num_layers
    sizes = [n for n in range(1, gpus + 1)]
    found: dict[int, list[tuple[float, float]]] = {}
    for tp, pp, dp in product(sizes, range(1, layers + 1), sizes):
        if tp * pp * dp > gpus or tp > machine.per_node:
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
            if dims.world_size > gpus or (gpus > machine.per_node and dims.world_size % machine.per_node):
                continue
            for recompute in (False, True):
                layout = Layout(tp, pp, vpp, cp, ep, etp, last if uneven else 0, recompute)
                if search.fits(layout, dp):
                    trainer = Trainer(search.space.sizes, layout, machine, search.work)
                    replicas = np.array([dp])
                    switch = 2 * float(trainer.state_bytes(replicas)[0]) / machine.pcie_bytes
                    seconds = float(trainer.times(replicas).total_s[0])
                    found.setdefault(dims.world_size, []).append((seconds, switch))
    return found


def tried_engines(search, family):
    """Numbers of GPUs that SGLang could cut this model over."""
    machine, found = search.space.machine, []
    for tp in range(1, machine.gpus + 1):
        try:
            EngineLayout.of(family, search.space.arch, Topology(tp)).rank(0)
        except (ValueError, AssertionError):
            continue
        engine = Engine(search.space.sizes, machine, tp)
        if (machine.per_node % tp == 0 or tp % machine.per_node == 0) and engine.max_running(search.work.lengths):
            found.append(engine)
    return found


def best_of_all(search, family):
    """The least seconds of a step, every answer tried."""
    machine, sizes, work, best = search.space.machine, search.space.sizes, search.work, np.inf

    def sampling_of(engine, count, staleness):
        asked = -(-work.responses // count) * (staleness + 1)
        return Sampling.of(engine.speeds(work.lengths, asked), work, count, staleness)

    for gpus, trained in tried_trainers(search).items():
        for engine in tried_engines(search, family):
            count = machine.gpus // engine.tp
            if count and "sync" in search.modes:
                sampling = sampling_of(engine, count, 0)
                if machine.gpus <= machine.per_node:
                    push = engine_time.push_within_a_node_s(sizes, machine, gpus, engine.tp)
                else:
                    push = engine_time.push_s(sizes, machine, gpus, count, engine.tp, search.bucket_bytes)
                best = min(best, *(sampling.step_s(seconds) + push + switch for seconds, switch in trained))
            count = (machine.gpus - gpus) // engine.tp
            for mode in search.modes if count else ():
                push = engine_time.push_s(sizes, machine, gpus, count, engine.tp, search.bucket_bytes)
                sampling = sampling_of(engine, count, STALENESS[mode])
                best = min(best, *(sampling.step_s(seconds) + push for seconds, _ in trained))
    return best


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
def test_what_is_found_is_the_best_of_everything(nodes, hardware, modes):
    fields = small_moe()
    search = search_of(fields, nodes, prompts=16, responses=4, modes=modes, max_tokens=8192, **hardware)
    family = family_of(HFConfig("config.json", fields))
    found = search.run(3)
    assert found.best[0].step_s == pytest.approx(best_of_all(search, family), rel=1e-12)
    assert found.excluded["trainer does not fit in memory"]
    assert [answer.step_s for answer in found.best] == sorted(answer.step_s for answer in found.best)


PUBLISHED = [
    (QWEN3_30B_A3B, 1, dict(tp=4, ep=8, etp=1)),
    (QWEN3_30B_A3B, 4, dict(tp=4, ep=8, etp=1)),
    (QWEN3_235B_A22B, 16, dict(tp=4, pp=8, ep=8, etp=1)),
    (QWEN3_235B_A22B, 16, dict(tp=4, pp=8, ep=16, etp=1)),
    (DEEPSEEK_V3, 32, dict(tp=8, pp=8, ep=32, etp=1)),
    (DEEPSEEK_V3, 64, dict(tp=8, pp=16, ep=32, etp=1)),
]
"""Layouts as others train these models with, on nodes of eight: trainers on all GPUs, engines by turns."""


def with_all_gpus(search, sizes):
    """The layout that these sizes name, with its replicas."""
    layers, pp = search.space.sizes.layers, sizes.get("pp", 1)
    last = layers - -(-layers // pp) * (pp - 1)
    layout = Layout(**sizes, last_layers=0 if last * pp == layers else last)
    return layout, search.space.machine.gpus // layout.lane


@pytest.mark.parametrize(
    ("fields", "nodes", "sizes"),
    PUBLISHED,
    ids=[f"{f['num_hidden_layers']} layers on {8 * n} GPUs ep {s['ep']}" for f, n, s in PUBLISHED],
)
def test_published_layouts_are_never_better_and_are_found_where_nothing_else_is_allowed(fields, nodes, sizes):
    search = search_of(fields, nodes, fits=lambda layout, replicas: True)  # whatever memory says
    layout, replicas = with_all_gpus(search, sizes)
    theirs = Trainer(search.space.sizes, layout, search.space.machine, search.work).times(np.array([replicas]))
    found = search.run(1)
    fixed = dict(pp=1, vpp=1, cp=1, dp=replicas, placement="colocated") | sizes
    alone = search_of(fields, nodes, fits=lambda layout, replicas: True, fixed=fixed).run(1).best[0]
    assert alone.trainers.layout == layout and alone.trainers.replicas == replicas
    assert alone.trainers.seconds == theirs.total_s[0]
    assert found.best[0].step_s <= alone.step_s


@pytest.mark.parametrize("fields", [QWEN3_8B, QWEN3_30B_A3B], ids=["8B", "30B-A3B"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_nodes_are_never_slower(fields, mode):
    seconds = [search_of(fields, nodes, modes=(mode,)).run(1).best[0].step_s for nodes in (2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)


def test_the_same_question_has_the_same_answer():
    first, second = (search_of(QWEN3_30B_A3B, 4).run(5) for _ in range(2))
    assert first == second
    assert len({answer.shape for answer in first.best}) == len(first.best) == 5


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
def test_what_is_fixed_stays(fixed):
    answer = search_of(QWEN3_30B_A3B, 4, fixed=fixed).run(1).best[0]
    values = vars(answer.trainers.layout) | vars(answer) | dict(dp=answer.trainers.replicas)
    assert {name: values[name] for name in fixed} == fixed


@pytest.mark.parametrize("fields", [QWEN3_235B_A22B, DEEPSEEK_V3], ids=["Qwen3-235B", "DeepSeek-V3"])
def test_ten_thousand_gpus_take_seconds(fields):
    search = search_of(fields, 1280, prompts=4096)
    began = time.process_time()
    found = search.run(5)
    spent = time.process_time() - began
    assert found.looked_at > 50_000 and len(found.best) == 5
    assert spent < 60, f"{spent:.0f} s of CPU"
    assert found.best[0].gpus <= 10_240


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(plan.main(["search", *words]))
    out = capsys.readouterr()
    return ended.value.code, out.out, out.err


QUESTION = (
    "cluster=h100",
    "cluster.nodes=4",
    "rollout.max_response_tokens=8192",
    "trainer.max_tokens_per_micro_batch=16384",
    "plan.prompt_tokens=512",
)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_what_it_says_to_paste_is_a_config_of_that_layout(tmp_path, capsys, algorithm):
    folder = write_model(tmp_path, QWEN3_30B_A3B)
    words = (f"model.path={folder}", *QUESTION, f"algorithm={algorithm}")
    code, out, _ = run(capsys, *words, "--json")
    told = json.loads(out)
    assert code == 0 and len(told["best"]) == 5
    arch, _ = model_of(QWEN3_30B_A3B)
    for answer in [*told["best"], *told["best_of_each"]]:
        pasted = [word.strip("'") for word in answer["overrides"]]
        config = hydra_app.composed(hydra_app.checked([*words, "run.dir=x", "data.train=[x.jsonl]", *pasted]))
        dims = ParallelDims.of_world(**vars(config.parallel))
        arch.check_layout(dims, uneven_stages="num_layers_in_last_pipeline_stage" in config.megatron)
        roles = dict(actor=dims) | (dict(critic=dims) if algorithm == "ppo" else {})
        pools = pools_of(config, roles)
        assert pools.size == answer["gpus"] <= 32 and dims.world_size == answer["trainer_gpus"]
        assert needs_of(config.rollout, roles)["engines"].slots == answer["engine_gpus"]
        assert config.rollout.mode == answer["mode"]
        if algorithm == "grpo":  # a critic has its own reserve on each GPU
            assert Counted.of(config).memory(config).fits
        parts = answer["parts_s"]
        assert answer["step_s"] == pytest.approx(sum(parts.values())) or answer["mode"] != "sync"


def test_a_newcomer_reads_the_best_and_why(tmp_path, capsys):
    code, out, _ = run(capsys, f"model.path={write_model(tmp_path, QWEN3_8B)}", *QUESTION, "plan.top=3")
    assert code == 0
    for said in (
        "assumed, not measured",
        "the best 3 of",
        "1: sampling: ",
        "2 against 1",
        "left out",
        "parallel.tp=",
    ):
        assert said in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster.nodes=4"], "cluster.hardware.gpu_memory_gb=0"),
        (["cluster=h100"], "cluster.nodes=None"),
        (["cluster=h100", "cluster.nodes=1", "plan.fix=[parallel.sp]"], "'parallel.sp' is not searched"),
        (["cluster=h100", "cluster.nodes=1", "plan.top=0"], "plan.top=0"),
        (["cluster=h100", "cluster.nodes=1", "cluster.hardware.gpu_memory_gb=9"], "no layout fits on 8 GPUs"),
        (["cluster=h100", "cluster.nodes=1", "plan.lengths=nowhere.jsonl"], "lengths=nowhere.jsonl"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, words, said):
    code, out, err = run(capsys, f"model.path={write_model(tmp_path, QWEN3_30B_A3B)}", *words)
    assert code == 2 and said in err and "Traceback" not in err and not out


def test_only_what_a_config_has_can_be_fixed():
    names = {name.partition(".")[2] for name in FIXABLE if name.startswith("parallel.")}
    assert names < set(ParallelConfig.__dataclass_fields__)


def test_overrides_leave_out_what_is_not_needed():
    search = search_of(QWEN3_8B, 1)
    words = overrides(search, search.run(1).best[0])
    assert not any(word.startswith(("parallel.ep", "parallel.etp")) for word in words)
    assert machine_of(1).gpus == 8
