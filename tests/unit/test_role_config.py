"""The key `roles`: frozen models beside the actor, and models that SGLang serves to rewards."""

import json
import shutil
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.config import hydra_entry
from mrl.config.validate import roles_of
from mrl.controller import model_processes, plan_train
from mrl.controller.colocation import ACTOR, ENGINES, MemoryScheduler, MemoryState
from mrl.controller.model_processes import ModelGroups
from mrl.controller.plan_models import build_pools, check_served_folders, parallel_layout, plan_models
from mrl.controller.plan_train import check_memory_fractions, check_served_roles
from mrl.controller.processes import RunProcesses
from mrl.data.tokenizer import byte_tokenizer
from mrl.rewards import remote_models
from mrl.rewards.by_source import BySource
from mrl.rewards.remote_models import Judge, RewardModel
from mrl.rewards.rule_based import MathVerify
from mrl.rollout import served_models
from mrl.rollout.engines.server_args import REWARD_MODELS
from mrl.rollout.served_models import ServedModelError, ServedModels
from mrl.rollout.spec import ServerGroup
from parallel.dims import ParallelDims


def config(*overrides: str):
    base = ["experiment=quickstart", "run.dir=unused"]
    return hydra_entry.compose_config(hydra_entry.check_overrides([*base, *overrides]))


def test_a_role_has_a_column_and_the_layout_of_the_actor_except_for_its_own_sizes():
    composed = config("parallel.tp=2", "roles.teacher.path=t", "roles.reference.parallel.tp=1", "roles.mine.path=m")
    roles = roles_of(composed)
    assert {name: role.column for name, role in roles.items()} == dict(
        teacher="teacher_logprobs", reference="ref_logprobs", mine="mine_logprobs"
    )
    assert parallel_layout(composed, "roles.reference").tp == 1 and parallel_layout(composed, "roles.mine").tp == 2


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.actor.path=x"], "roles.actor: expected a name"),
        (["roles.Judge.path=x"], "roles.Judge: expected a name"),
        (["roles.engine.path=x"], "roles.engine: expected a name"),
        (["roles.judge.pth=x"], "unknown key 'roles.judge.pth'; did you mean 'path'"),
        (["roles.judge=x"], "roles.judge='x': expected the fields of a model"),
        (["roles.judge.num_engines=-1"], "roles.judge.num_engines=-1: must be 0 or more"),
        (["roles.judge.num_engines=many"], "roles.judge.num_engines"),
        (["roles.judge.num_engines=1"], "roles.judge.path must be set"),
        (
            ["roles.judge.path=x", "roles.judge.num_engines=1", "roles.judge.column=c"],
            "roles.judge.column: SGLang serves",
        ),
        (
            ["roles.judge.path=x", "roles.judge.engine_tp=2"],
            "roles.judge.engine_tp: applies only to a model that SGLang",
        ),
        (["roles.judge.path=x", "roles.judge.parallel.tpp=2"], "roles.judge.parallel.tpp"),
    ],
)
def test_a_mistake_in_a_role_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        config(*overrides)


@pytest.mark.extended
def test_served_roles_have_pools_of_their_own():
    composed = config("roles.reward_model.path=x", "roles.reward_model.num_engines=2", "roles.reward_model.engine_tp=2")
    pools = build_pools(composed, {"actor": ParallelDims(tp=2)})
    assert {role: pool.size for role, pool in pools.by_role.items()} == dict(actor=2, reward_model=4, engines=1)
    paired = config("placement=paired", "roles.reward_model.path=x", "roles.reward_model.num_engines=2")
    pools = build_pools(
        paired, {"actor": ParallelDims(tp=2), "critic": ParallelDims(), "reference": ParallelDims(tp=2)}
    )
    assert {pool.name: set(pool.demands) for pool in pools.pools} == dict(
        policy={"actor", "reference"}, value={"critic", "reward_model"}, engines={"engines"}
    )


def test_a_role_has_the_column_and_the_pool_of_the_config(tiny_qwen3):
    role = [f"roles.mine.path={tiny_qwen3()}", "roles.mine.column=opinion", "roles.mine.parallel.tp=2"]
    pool = ["placement=colocated", "placement.pools.second=[mine]"]
    composed = config(f"model.path={tiny_qwen3()}", "sft.train=null", *role, *pool)
    models = plan_models(composed, frozenset({"opinion"}), weights=False)
    assert models.keys() == {"actor", "mine"} and roles_of(composed)["mine"].column == "opinion"
    assert plan_models(composed, frozenset({"mine_logprobs"}), weights=False).keys() == {"actor"}
    pools = build_pools(composed, {name: model.dims for name, model in models.items()})
    assert {pool.name: set(pool.demands) for pool in pools.pools} == dict(all={"actor", "engines"}, second={"mine"})
    assert pools.by_role["mine"].size == 2 and pools.by_role["actor"].size == 1


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_role_without_a_path_starts_from_the_warm_start(monkeypatch, tiny_qwen3, tmp_path, is_stored):
    """A run either trains its warm start after the plan, or finds it before the plan, and then has no warm start to train."""
    initial, warm = tiny_qwen3(), tmp_path / "warm"
    shutil.copytree(initial, warm)
    settings = [f"model.path={initial}", f"sft.output={warm}", "roles.reference.parallel.tp=1"]
    composed = config(*settings, f"roles.mine.path={initial}", "roles.other.parallel.tp=1")
    required_inputs = frozenset({"values", "ref_logprobs", "mine_logprobs", "other_logprobs"})
    plans = plan_models(composed, required_inputs, actor_path=str(warm) if is_stored else "", weights=False)
    started = {}

    class Group:
        """Stands in for a WorkerGroup. Records from which folder its model starts."""

        def __init__(self, dims, run_dir, timeout_s, options, name, load) -> None:
            self.name = name

        def start(self, spec, seed, timeout_s, head) -> None:
            started[self.name] = spec.model_path

        def wait_ready(self, timeout_s) -> None:
            assert self.name in started

        def close(self) -> None: ...

    monkeypatch.setattr(model_processes, "WorkerGroup", Group)
    placements = dict.fromkeys(plans, SimpleNamespace(options=list))
    models = ModelGroups(plans, placements, MemoryScheduler(frozenset()), SimpleNamespace(), ExitStack())
    models_beside_actor = {name: plan for name, plan in plans.items() if name != ACTOR}
    plan = SimpleNamespace(
        config=composed, warm_start=None if is_stored else composed.sft, models_beside_actor=models_beside_actor
    )
    models.start_others(RunProcesses._paths_of_others(SimpleNamespace(plan=plan)))
    assert started == dict(critic=str(warm), reference=str(warm), mine=str(initial), other=str(warm))


SERVED = ["roles.judge.path=x", "roles.judge.num_engines=1"]


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "reward", "colocated", "message"),
    [
        ([], Judge(role="judge"), set(), "calls roles.judge, which SGLang does not serve"),
        (
            [*SERVED, "roles.judge.sglang.mem_fraction=1"],
            Judge(role="judge"),
            set(),
            "roles.judge.sglang.mem_fraction is not",
        ),
        ([*SERVED, "roles.judge.sglang.port=1"], Judge(role="judge"), set(), "roles.judge.sglang.port=1 is set by mrl"),
        (
            [*SERVED, "rollout.mode=one_step_off"],
            Judge(role="judge"),
            {frozenset({"judge", "critic"})},
            "judge shares devices with critic, but responses are scored while the trainers work",
        ),
        (
            [*SERVED, "roles.judge.sglang.enable_memory_saver=false"],
            Judge(role="judge"),
            {frozenset({"judge", "critic"})},
            "roles.judge.sglang.enable_memory_saver=false: judge shares devices with critic",
        ),
    ],
)
def test_a_served_role_that_cannot_work_is_refused(overrides, reward, colocated, message):
    with pytest.raises(ValueError, match=message):
        check_served_roles(config(*overrides), {"reward": reward}, frozenset(colocated))


@pytest.mark.extended
def test_a_served_role_may_share_devices_if_nothing_is_scored_meanwhile():
    rewards = {"reward": Judge(role="judge")}
    check_served_roles(config(*SERVED), rewards, frozenset({frozenset({"judge", "critic"})}))
    with_engines = frozenset({frozenset({"judge", "engines"})})
    check_served_roles(config(*SERVED, "rollout.mode=async"), rewards, with_engines)


@pytest.mark.extended
def test_rewards_of_held_out_sets_and_of_data_sources_may_call_served_roles():
    key, judge = "data.test_sets.hard.reward", Judge(role="judge")
    rewards = {"reward": MathVerify(), key: BySource({"math": MathVerify()}, default=judge)}
    check_served_roles(config(*SERVED), rewards, frozenset())
    with pytest.raises(ValueError, match=f"^{key}: calls roles.judge, which SGLang does not serve"):
        check_served_roles(config(), rewards, frozenset())


def test_a_served_role_needs_a_folder_with_a_model(tmp_path):
    served = config(f"roles.judge.path={tmp_path}", "roles.judge.num_engines=1", "roles.mine.path=missing")
    with pytest.raises(ValueError, match=r"roles\.judge\.path=.*: there is no config\.json in this folder"):
        check_served_folders(served)
    (tmp_path / "config.json").write_text("{}")
    check_served_folders(served)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "MiniMaxM2ForCausalLM", "NemotronHForCausalLM"]
)
def test_a_served_role_that_needs_gpus_is_refused_on_a_cpu(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=[name])))
    served = [f"roles.judge.path={tmp_path}", "roles.judge.num_engines=1"]
    with pytest.raises(ValueError, match=rf"roles\.judge\.path=.* no kernels for {name} on a CPU; use GPUs\.$"):
        check_served_folders(config(*served, "sglang.device=cpu"))
    check_served_folders(config(*served, "cluster=h100"))


@pytest.mark.extended
def test_servers_that_share_gpus_claim_less_than_their_whole_memory():
    together = frozenset({frozenset({"judge", "engines", "actor"})})
    with pytest.raises(
        ValueError, match=r"sglang\.mem_fraction_static=0\.8, roles\.judge\.sglang\.mem_fraction_static=0\.8: these"
    ):
        check_memory_fractions(config(*SERVED), together)
    check_memory_fractions(config(*SERVED), frozenset({frozenset({"judge", "critic"})}))
    fractions = ["sglang.mem_fraction_static=0.6", "roles.judge.sglang.mem_fraction_static=0.3"]
    check_memory_fractions(config(*SERVED, *fractions), together)


def reward_model(folder: Path, **fields: object) -> RewardModel:
    """Write the config and the tokenizer of a model, and return a reward that scores with the served role `reward_model`."""
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return RewardModel(role="reward_model", tokenizer=str(folder))


ONE_OUTPUT = dict(id2label={"0": "score"})


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("architecture", "outputs", "message"),
    [
        *((name, ONE_OUTPUT, None) for name in REWARD_MODELS),
        ("Qwen2ForRewardModel", {}, None),
        ("Qwen3MoeForSequenceClassification", ONE_OUTPUT, "cannot serve Qwen3MoeForSequenceClassification as a"),
        ("Glm4MoeForSequenceClassification", ONE_OUTPUT, "cannot serve Glm4MoeForSequenceClassification as a"),
        ("Qwen3ForCausalLM", {}, "a run cannot serve Qwen3ForCausalLM as a reward model"),
        ("Qwen3ForSequenceClassification", {}, "has 2 outputs; expected a reward model"),
    ],
)
def test_a_reward_model_that_a_run_cannot_serve_is_refused_before_the_start(tmp_path, architecture, outputs, message):
    reward = BySource({"math": MathVerify()}, default=reward_model(tmp_path, architectures=[architecture], **outputs))
    composed = config(f"roles.reward_model.path={tmp_path}", "roles.reward_model.num_engines=1")
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_served_roles(composed, {"reward": reward}, frozenset())


def test_a_role_that_nothing_reads_gets_a_warning_and_is_not_started(tiny_qwen3, own_records):
    overrides = [f"model.path={tiny_qwen3()}", "sft.train=null", "algorithm.kl_in_loss.coef=0.01"]
    composed = config(*overrides, "roles.reference.parallel.tp=1", "roles.mine.parallel.tp=1")
    algorithm = plan_train.algorithm_of(composed)
    plan_train._warn_of_unused_keys(composed, algorithm, {"actor", "reference"})
    assert [record.getMessage() for record in own_records()] == [
        "roles.mine: is not started, because no part of the algorithm reads the column mine_logprobs."
    ]
    assert plan_models(composed, algorithm.required_inputs, weights=False).keys() == {"actor", "reference"}


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            ["critic.max_tokens_per_micro_batch=64", "checkpoint.keep_last_critic=1"],
            "critic.max_tokens_per_micro_batch, checkpoint.keep_last_critic: not used, because the run has no critic.",
        ),
        (
            ["checkpoint.keep_last_exports=1"],
            "checkpoint.keep_last_exports: not used, because checkpoint.export_every=0.",
        ),
        (["checkpoint.keep_last_exports=1", "checkpoint.export_every=2"], None),
        (
            ["rollout.replay=outputs/run", "rollout.group_sizes={_target_: mrl.data.samplers.ByDifficulty}"],
            "rollout.group_sizes: not used, because rollout.replay sets the prompts of each step.",
        ),
        (["checkpoint.keep_last=1", "trainer.max_tokens_per_micro_batch=64"], None),
    ],
)
def test_keys_that_a_run_does_not_use_get_a_warning(own_records, overrides, warning):
    composed = config(*overrides)
    plan_train._warn_of_unused_keys(composed, plan_train.algorithm_of(composed), {"actor"})
    assert [record.getMessage() for record in own_records()] == ([warning] if warning else [])


class Model:
    """A model for the MemoryScheduler. Records the calls that it gets."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def offload(self, keep_weights: bool = False) -> int:
        self.calls.append(f"{self.name} off")
        return 0

    def load_to_device(self) -> None:
        self.calls.append(f"{self.name} on")

    def resync(self) -> None:
        self.calls.append("engines on")


def test_engines_and_served_models_stay_loaded_together():
    calls: list[str] = []
    scheduler = MemoryScheduler(frozenset({frozenset({"actor", "critic", "judge", "engines"})}))
    for name in ("actor", "critic"):
        scheduler.register_model(name, Model(name, calls))
    scheduler.register_served("judge", Model("judge", calls))
    scheduler.register_engines(Model("engines", calls))
    assert scheduler.peers("judge") == ["actor", "critic"] and ENGINES not in scheduler.peers("judge")
    assert scheduler.peers(ENGINES) == ["actor", "critic"] and scheduler.rollout_shares_devices()
    scheduler.mark_started("actor", "critic", *scheduler.sglang_roles)
    scheduler.load(ACTOR)
    assert calls == ["critic off", "judge off", "engines off"] and scheduler.state("judge") is MemoryState.OFFLOADED
    calls.clear()
    scheduler.load_for_rollout()
    assert calls == ["engines on", "actor off", "judge on"]
    calls.clear()
    scheduler.load_for_rollout()
    assert "judge off" not in calls


class FakeServer:
    """Stands in for an EngineServer."""

    def __init__(self, url: str) -> None:
        self.url, self.running = url, True

    def alive(self) -> bool:
        return self.running


class FakeServers:
    """Stands in for EngineServers. Its replacements get new URLs."""

    def __init__(self, group: ServerGroup) -> None:
        self.group, self.count = group, 0
        self.servers = [self._new() for _ in range(group.count)]
        self.stopped = False

    def _new(self) -> FakeServer:
        self.count += 1
        return FakeServer(f"http://{self.group.name}:{self.count}")

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def end_reason(self, url: str) -> str:
        return "its processes have ended"

    def replace(self, url: str) -> None:
        self.servers = [self._new() if server.url == url else server for server in self.servers]

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(served_models, "EngineServers", FakeServers)
    monkeypatch.setattr(served_models, "CHECK_INTERVAL_S", 0.01)
    group = ServerGroup(
        name="judge", run_dir="d", arguments={}, model_path="m", count=2, tp_size=1, seed=0, max_replacements=1
    )
    models = ServedModels([group], max_restarts=2)
    models.wait_ready(1.0)
    yield models, models._servers["judge"]
    models.close()
    remote_models.set_servers("judge", [])


def wait_for(condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_ends_is_replaced_until_its_restarts_are_used_up(served):
    models, servers = served
    assert remote_models._SERVERS["judge"] == ["http://judge:1", "http://judge:2"]
    servers.servers[0].running = False
    wait_for(lambda: remote_models._SERVERS["judge"] == ["http://judge:3", "http://judge:2"])
    assert models.num_restarts == 1
    models.check()
    servers.servers[1].running = False
    wait_for(lambda: models.num_restarts == 2)
    models.check()
    servers.servers[0].running = False
    wait_for(lambda: models._lost)
    with pytest.raises(ServedModelError, match=r"its servers ended 3 times \(fault_tolerance.max_restarts=2\)"):
        models.check()


def test_closing_ends_the_servers_and_the_thread_that_watches_them(served):
    models, servers = served
    watcher = models._watcher
    models.close()
    watcher.join(5)
    assert servers.stopped and not watcher.is_alive()
    assert not any(thread.name == "served models" for thread in threading.enumerate())


def test_the_servers_of_all_models_become_ready_within_one_timeout(monkeypatch):
    timeouts = []

    def wait_ready(servers: FakeServers, timeout_s: float) -> None:
        timeouts.append(timeout_s)
        time.sleep(0.1)

    monkeypatch.setattr(served_models, "EngineServers", FakeServers)
    monkeypatch.setattr(FakeServers, "wait_ready", wait_ready)
    settings = dict(run_dir="d", arguments={}, model_path="m", count=1, tp_size=1, seed=0, max_replacements=1)
    models = ServedModels([ServerGroup(name=name, **settings) for name in ("judge", "critic_model")], max_restarts=2)
    models.wait_ready(30.0)
    models.close()
    assert timeouts[0] <= 30 and timeouts[1] <= 29.9
    for name in ("judge", "critic_model"):
        remote_models.set_servers(name, [])


def test_a_replacement_that_is_not_ready_in_time_is_used_as_soon_as_it_is_ready(served, monkeypatch):
    models, servers = served
    failures = iter([TimeoutError("it still loads its weights")])

    def wait_ready(timeout_s: float) -> None:
        for failure in failures:
            raise failure

    monkeypatch.setattr(servers, "wait_ready", wait_ready)
    servers.servers[0].running = False
    wait_for(lambda: remote_models._SERVERS["judge"] == ["http://judge:3", "http://judge:2"])
    assert models.num_restarts == 1


class FakeControl:
    """Stands in for EngineControl. Records which servers release and allocate their memory."""

    calls: list[tuple[str, str]]

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url

    def __enter__(self) -> "FakeControl":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def pause(self, mode) -> None:
        pass

    def resume(self) -> None:
        pass

    def release_memory(self, tags) -> None:
        self.calls.append(("release", self.url))

    def resume_memory(self, tags) -> None:
        self.calls.append(("allocate", self.url))


def test_a_server_that_ends_while_its_model_is_offloaded_is_replaced_after_the_load(served, monkeypatch):
    models, servers = served
    monkeypatch.setattr(served_models, "EngineControl", FakeControl)
    monkeypatch.setattr(FakeControl, "calls", calls := [], raising=False)
    models.offload("judge")
    servers.servers[0].running = False
    with models._lock:
        models._check_servers("judge", servers)
    assert models.num_restarts == 0, "its devices belong to trainers now"
    models.load("judge")
    wait_for(lambda: remote_models._SERVERS["judge"] == ["http://judge:3", "http://judge:2"])
    assert set(calls) == {(call, f"http://judge:{n}") for call in ("release", "allocate") for n in (1, 2)}
    calls.clear()
    models.offload("judge")
    models.load("judge")
    assert set(calls) == {(call, f"http://judge:{n}") for call in ("release", "allocate") for n in (3, 2)}
