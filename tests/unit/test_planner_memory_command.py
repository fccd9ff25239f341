"""`mrl plan memory`: what fits, what would, and how that is said."""

import json
from dataclasses import replace

import pytest
from planned_runs import FULL, config_of, memory_of

from mrl.commands import plan, plan_memory
from mrl.config import hydra_entry
from mrl.controller.memory_check import MemoryEstimator
from mrl.data.synthetic_tasks import make_doubling_task
from mrl.planner.memory_advice import advice
from mrl.planner.run_memory import GIB

GROUPS = ("algorithm", "cluster", "model", "placement", "reward", "sweep")
FILES = sorted(f"{group}={path.stem}" for group in GROUPS for path in (hydra_entry.CONF / group).glob("*.yaml"))
BLANKS = {  # what these leave to the user
    "algorithm=distill": ["teacher.path=${model.path}"],
    "reward=function": ["reward.path=mine.py"],
    "reward=judge": ["reward.url=http://judge:30000", "reward.model=judge"],
    "reward=reward_model": ["reward.url=http://rewards:30000", "reward.tokenizer=${model.path}"],
}
EXPERIMENTS = sorted(path.stem for path in (hydra_entry.CONF / "experiment").glob("*.yaml"))
SHARED = ["cluster=h100", "placement=colocated", "rollout.engine_tp=4", "rollout.num_engines=2"]
TRAINED = ["parallel.tp=4", "parallel.ep=8", "parallel.etp=1", "parallel.dp=2"]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_can_be_planned(tmp_path, monkeypatch, experiment):
    """Those without a model of their own with Qwen3-8B on a node of eight."""
    monkeypatch.chdir(tmp_path)
    own = "path:" in (hydra_entry.CONF / "experiment" / f"{experiment}.yaml").read_text()
    layout = [] if own else ["parallel.tp=4", "parallel.dp=2"]
    found = memory_of(config_of(None if own else "Qwen3-8B", tmp_path, "cluster=h100", *layout, experiment=experiment))
    assert found.fits, found.problems


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    make_doubling_task(folder := tmp_path_factory.mktemp("inputs") / "made")
    return folder


@pytest.mark.parametrize("choice", FILES)
def test_every_file_of_conf_can_be_planned(inputs, capsys, choice):
    words = ["experiment=quickstart", f"data.inputs.folder={inputs}", choice, *BLANKS.get(choice, [])]
    assert plan.main(words) == 0
    said = capsys.readouterr().out
    assert "actor: " in said and ("It fits." in said or "Nothing says what a GPU has" in said)


def test_what_does_not_fit_ends_with_one_and_says_what_would(tmp_path, capsys):
    config = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED)
    with pytest.raises(SystemExit) as ended:
        plan_memory.memory(config)
    out = capsys.readouterr().out
    assert ended.value.code == 1
    assert "It does not fit" in out and "actor during update" in out
    assert "megatron.recompute_granularity=full" in out


def test_what_fits_says_so(tmp_path, capsys):
    plan_memory.memory(config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED, *FULL))
    out = capsys.readouterr().out
    assert "It fits." in out and "30.53 billion parameters" in out


def test_json_has_the_same_numbers(tmp_path, capsys):
    config = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED)
    with pytest.raises(SystemExit):
        plan_memory.memory(config, as_json=True)
    said, found = json.loads(capsys.readouterr().out), memory_of(config)
    assert [moment["total"] for moment in said["moments"]] == [moment.total for moment in found.moments]
    assert not said["fits"] and said["instead"] and all(change["fits"] for change in said["instead"])


def test_advice_is_counted_by_the_same_account(tmp_path):
    estimator = MemoryEstimator.of(config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED))
    changes = advice(estimator.config, estimator.estimate)
    assert changes
    for change in changes:
        assert change.memory.fits
        assert estimator.estimate(change.config) == change.memory
        again = config_of("Qwen3-30B-A3B", tmp_path, *SHARED, *TRAINED, *change.overrides)
        assert memory_of(again).moments == change.memory.moments


def test_several_changes_are_found_where_one_is_not_enough(tmp_path):
    layout = ["cluster=h100", "parallel.world_size=16", "cluster.nodes=3", "rollout.engine_tp=8"]
    estimator = MemoryEstimator.of(config_of("Qwen3-30B-A3B", tmp_path, *layout))
    changes = advice(estimator.config, estimator.estimate)
    assert changes and len(changes[0].overrides) > 1
    assert all(change.memory.gpus <= 24 for change in changes)


def test_too_few_nodes_are_a_problem(tmp_path):
    found = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h200", "cluster.nodes=1", "parallel.dp=16"))
    assert any("the run needs 17 GPUs, the cluster has 8" in problem for problem in found.problems)


def test_no_sequence_is_longer_than_the_context(tmp_path):
    """Prompts are taken to be as long as responses, where nothing is said, but no longer than fits beside one."""
    config = config_of("Qwen3-8B", tmp_path, "cluster=h100", "rollout.max_response_tokens=30000")
    assert memory_of(config).sequence == 40_960
    assert memory_of(config_of("Qwen3-8B", tmp_path, "rollout.max_response_tokens=1000")).sequence == 2000


def test_without_hardware_nothing_has_a_limit(tmp_path):
    found = memory_of(config_of("Qwen3-8B", tmp_path))
    assert found.fits and all(moment.limit == 0 for moment in found.moments)
    assert found.engine is not None and found.engine.tokens == 65536


def test_roles_that_share_a_gpu_are_counted_when_they_work(tmp_path):
    apart = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8"))
    shared = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", "placement=colocated"))
    assert {(m.role, m.phase) for m in apart.moments} >= {("actor", "weight_sync"), ("engines", "rollout")}
    assert {(m.role, m.phase) for m in shared.moments} >= {("actor, engines", "weight_sync"), ("engines", "rollout")}
    assert shared.gpus == 8 and apart.gpus == 9
    of = {m.phase: m for m in shared.moments}
    assert of["update"].parts["context"] == 4 * GIB
    assert shared.host.asleep > 0 and apart.host.asleep == 0


def test_a_critic_and_a_reference_are_counted(tmp_path):
    ppo = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=h100", "parallel.dp=8", "algorithm=ppo"))
    assert {m.role for m in ppo.moments} == {"actor", "critic", "engines"}
    kl = memory_of(config_of("Qwen3-8B", tmp_path, "parallel.dp=8", "++algorithm.kl_in_loss.coef=0.1"))
    assert kl.host.reference > 0


def test_a_layout_that_cannot_be_is_said_as_before(tmp_path):
    with pytest.raises(ValueError, match=r"parallel\.tp=3 does not divide"):
        memory_of(config_of("Qwen3-8B", tmp_path, "parallel.tp=3"))


def test_a_small_kv_cache_is_a_problem(tmp_path):
    long = ["rollout.max_response_tokens=30000", "sglang.mem_fraction_static=0.2"]
    found = memory_of(config_of("Qwen3-8B", tmp_path, "cluster=a100", "parallel.dp=8", *FULL, *long))
    assert any("the KV cache holds" in problem for problem in found.problems)


def test_an_account_is_plain_and_frozen(tmp_path):
    found = memory_of(config_of("Qwen3-8B", tmp_path))
    assert replace(found, nodes=2).nodes == 2
    json.dumps(found.as_json())


def test_json_is_only_for_memory(capsys):
    assert plan.main(["sync", "--json"]) == 2
    assert "--json" in capsys.readouterr().err
