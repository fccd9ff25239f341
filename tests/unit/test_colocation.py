"""MemoryScheduler: which colocated roles are offloaded and loaded, in which order."""

from typing import Any

import pytest
from scripted_lifecycle import scripted_lifecycle

from mrl.controller.colocation import ACTOR, ENGINES, MemoryScheduler, MemoryState


class FakeRole:
    """A role that records its calls. It raises once, at the call that `refuses` names."""

    def __init__(self, name: str, calls: list[str], residual: int = 0) -> None:
        self.name, self.calls, self.residual = name, calls, residual
        self.refuses = ""
        self.resync: Any = None

    def _record(self, what: str) -> None:
        if what == self.refuses:
            self.refuses = ""
            raise RuntimeError(f"{self.name} cannot {what}")
        self.calls.append(f"{self.name} {what}")

    def offload(self, keep_weights: bool = False) -> int:
        self._record("keeps weights" if keep_weights else "offloads")
        return self.residual

    def load_to_device(self) -> None:
        self._record("loads")

    def load_weights(self) -> None:
        self._record("has weights")

    def load_kv_cache(self) -> None:
        self._record("has cache")


class Run:
    """A MemoryScheduler with fake roles, connected as in a run."""

    def __init__(self, *colocated: str, roles: str = "actor critic teacher") -> None:
        self.calls: list[str] = []
        self.trainers = {name: FakeRole(name, self.calls, residual) for residual, name in enumerate(roles.split(), 10)}
        self.engines = FakeRole(ENGINES, self.calls)
        self.scheduler = MemoryScheduler(frozenset(frozenset(group.split()) for group in colocated))
        for name, trainer in self.trainers.items():
            self.scheduler.register_model(name, trainer)
        self.engines.resync = lambda: self.push(self.send)
        self.scheduler.register_engines(self.engines)
        self.scheduler.mark_started(*self.trainers, ENGINES)

    def send(self, engines_were_offloaded: bool) -> str:
        self.calls.append("push to empty engines" if engines_were_offloaded else "push")
        return "report"

    def push(self, send: Any) -> Any:
        with self.scheduler.during_push() as engines_were_offloaded:
            return send(engines_were_offloaded)

    def calls_of(self, act: Any) -> list[str]:
        self.calls.clear()
        act()
        return self.calls.copy()

    def loads(self, role: str) -> list[str]:
        return self.calls_of(lambda: self.scheduler.load(role))

    def makes_room(self, role: str) -> list[str]:
        return self.calls_of(lambda: self.scheduler.make_room(role))

    def pushes(self) -> list[str]:
        return self.calls_of(lambda: self.push(self.send))

    def states(self) -> dict[str, MemoryState]:
        return {role: self.scheduler.state(role) for role in (*self.trainers, ENGINES)}


AROUND_A_PUSH = [
    "actor keeps weights",
    "engines has weights",
    "push to empty engines",
    "actor offloads",
    "engines has cache",
]


def test_roles_that_share_no_devices_are_never_offloaded():
    run = Run()
    for role in (*run.trainers, ENGINES):
        assert run.loads(role) == []
    assert run.pushes() == ["push"] and run.scheduler.metrics() == {}


def test_a_role_whose_peers_are_not_in_the_run_stays_on_its_devices():
    run = Run("actor reward", "critic teacher")  # the run has no role `reward`
    assert run.loads(ACTOR) == [] == run.loads(ENGINES)
    assert run.loads("critic") == ["teacher offloads"]
    assert run.loads("critic") == []
    assert run.loads("teacher") == ["critic offloads", "teacher loads"]


def test_a_step_of_colocated_roles_pushes_once():
    run = Run("actor critic engines", roles="actor critic")
    assert run.pushes() == ["engines offloads", "critic offloads", *AROUND_A_PUSH]  # all roles are loaded at the start
    assert run.loads(ENGINES) == []  # for the rollout
    assert run.loads("critic") == ["engines offloads", "critic loads"]  # for the values
    assert run.loads(ACTOR) == ["critic offloads", "actor loads"]  # for the update
    assert run.loads(ACTOR) == []
    assert run.pushes() == AROUND_A_PUSH
    assert run.states() == {
        "actor": MemoryState.OFFLOADED,
        "critic": MemoryState.OFFLOADED,
        "engines": MemoryState.ON_DEVICE,
    }


def test_offloaded_engines_are_loaded_by_a_push_of_the_weights_that_they_had():
    run = Run("actor engines", roles="actor")
    run.pushes()
    assert run.loads(ACTOR) == ["engines offloads", "actor loads"]  # to save a checkpoint between steps
    assert run.loads(ENGINES) == AROUND_A_PUSH


def test_loading_engines_that_are_on_their_devices_only_offloads_their_peers():
    run = Run("actor engines", roles="actor")
    assert run.loads(ENGINES) == ["actor offloads"]


def test_an_actor_on_other_devices_stays_loaded_during_a_push():
    run = Run("critic engines", roles="actor critic")
    assert run.pushes() == [
        "engines offloads",
        "critic offloads",
        "engines has weights",
        "push to empty engines",
        "engines has cache",
    ]
    assert run.scheduler.state(ACTOR) is MemoryState.ON_DEVICE


def test_an_actor_offloaded_from_other_devices_is_loaded_for_a_push_and_offloaded_again():
    run = Run("actor teacher", "critic engines")
    assert run.loads("teacher") == ["actor offloads"]
    assert run.loads("critic") == ["engines offloads"]
    assert run.loads(ENGINES) == ["critic offloads", "teacher offloads", *AROUND_A_PUSH]


def test_the_actor_is_loaded_before_a_push_to_engines_on_their_own_devices():
    run = Run("actor critic", roles="actor critic")
    assert run.loads("critic") == ["actor offloads"]
    assert run.pushes() == ["critic offloads", "actor loads", "push"]


FAILURES = {
    "actor loads": ("actor", "load"),
    "critic offloads": ("critic", "load"),
    "engines offloads": ("engines", "push"),
    "actor keeps weights": ("actor", "push"),
    "engines has weights": ("engines", "push"),
    "actor offloads": ("actor", "push"),
    "engines has cache": ("engines", "push"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failed_transition_the_next_request_succeeds(failure):
    name, request = FAILURES[failure]
    run = Run("actor critic engines", roles="actor critic")
    fake = run.engines if name == ENGINES else run.trainers[name]
    if request == "load":
        run.loads("critic")
    fake.refuses = failure.removeprefix(f"{name} ")
    with pytest.raises(RuntimeError, match=f"{name} cannot"):
        run.pushes() if request == "push" else run.loads(ACTOR)
    assert run.scheduler.state(name) is MemoryState.TRANSITIONING
    run.loads(ACTOR)
    assert run.states() == {
        "actor": MemoryState.ON_DEVICE,
        "critic": MemoryState.OFFLOADED,
        "engines": MemoryState.OFFLOADED,
    }
    run.loads(ENGINES)
    assert run.states() == {
        "actor": MemoryState.OFFLOADED,
        "critic": MemoryState.OFFLOADED,
        "engines": MemoryState.ON_DEVICE,
    }
    assert run.calls[-5:] == AROUND_A_PUSH


def test_a_failed_push_leaves_engines_without_weights_and_the_next_push_brings_them():
    run = Run("actor engines", roles="actor")

    def fail(engines_were_offloaded: bool) -> None:
        raise ConnectionError("no engine")

    with pytest.raises(ConnectionError):
        run.push(fail)
    assert run.states() == {"actor": MemoryState.TRANSITIONING, "engines": MemoryState.TRANSITIONING}
    assert run.pushes() == ["engines offloads", *AROUND_A_PUSH]


def test_restarted_processes_are_on_their_devices():
    run = Run("actor critic engines", roles="actor critic")
    run.pushes()
    run.scheduler.mark_ended("actor", "critic")
    assert run.loads(ACTOR) == ["engines offloads"]  # makes room for the actor that will start
    run.scheduler.mark_started("actor")
    assert run.loads(ACTOR) == []
    assert run.loads("critic") == ["actor offloads"]
    run.scheduler.mark_started("critic")
    assert run.loads(ACTOR) == ["critic offloads", "actor loads"]


def test_roles_that_start_one_after_another_find_room():
    run = Run("actor critic engines", roles="actor critic")
    run.scheduler.mark_ended(*run.states())
    assert run.loads(ACTOR) == []
    run.scheduler.mark_started(ACTOR)
    assert run.loads(ENGINES) == ["actor offloads"]
    run.scheduler.mark_started(ENGINES)
    assert run.loads("critic") == ["engines offloads"]
    run.scheduler.mark_started("critic")
    assert run.loads(ACTOR) == ["critic offloads", "actor loads"]  # to load a checkpoint
    assert run.pushes() == AROUND_A_PUSH


def test_metrics_count_from_the_last_call(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("mrl.controller.colocation.time.perf_counter", lambda: float(next(clock)))
    run = Run("actor critic engines", roles="actor critic")
    run.pushes()  # when offloaded, the actor keeps 10 bytes and the critic 11
    found = run.scheduler.metrics()
    assert found == {"placement/switch_s": 2.0, "placement/switches": 1.0, "placement/residual_bytes": 11.0}
    run.loads(ACTOR)
    found = run.scheduler.metrics()
    assert found == {"placement/switch_s": 1.0, "placement/switches": 1.0, "placement/residual_bytes": 0.0}
    assert run.scheduler.metrics() == {
        "placement/switch_s": 0.0,
        "placement/switches": 0.0,
        "placement/residual_bytes": 0.0,
    }


def test_engines_that_fail_in_a_push_are_replaced_and_all_engines_get_another_push():
    from mrl.core.types import SyncReport

    calls: list[str] = []
    answers = [SyncReport(failed={"http://a": "gone"}), SyncReport()]
    actor = FakeRole("actor", calls)

    def push(version: int, engines_were_offloaded: bool) -> list[SyncReport]:
        calls.append("push to empty engines" if engines_were_offloaded else "push")
        return [answers.pop(0)]

    together = frozenset([frozenset([ACTOR, ENGINES])])
    engines = scripted_lifecycle(
        push, models={ACTOR: actor}, colocated=together
    )  # the engines have no URLs, so nothing is sent to them
    push_calls = ["actor keeps weights", "push to empty engines", "actor offloads"]
    engines.push(0)
    assert calls == 2 * push_calls
    engines.scheduler.load(ACTOR)
    calls.clear()
    answers.append(SyncReport())
    engines.load()
    assert calls == push_calls and engines.weight_version == 0


def test_a_worker_group_loads_its_model_before_calls_that_need_device_memory():
    from mrl.workers.worker import TrainWorker, must_be_loaded_first

    methods = {name: method for name, method in vars(TrainWorker).items() if not name.startswith("_")}
    assert {name for name, method in methods.items() if not must_be_loaded_first(method)} == {
        *("rendezvous_address", "setup", "connect_engines", "offload", "load_to_device"),
        *("load_supervised_dataset", "add_column", "mean_log_ratio"),
        "load_teacher_weights",  # loads into host memory
        *("save_has_ended", "finish_save", "abandon_save", "cpu_seconds", "close"),
        "begin_step",  # starts the step's profile, without the model
        "push_weights",  # the scheduler loads the weights around a push
    }


def test_settings_that_need_persistent_engine_memory_are_refused_for_colocated_engines():
    from types import SimpleNamespace

    from mrl.config.process_schema import WeightSyncConfig
    from mrl.controller.plan_train import check_time_sharing

    together = frozenset([frozenset(["actor", "engines"])])
    for sync, sglang, named in (
        (dict(pause_mode="in_place"), {}, r"weight_sync\.pause_mode=in_place keeps the KV cache.*use retract"),
        (dict(delta=True), {}, r"weight_sync\.delta=true.*leave it false"),
        ({}, dict(enable_memory_saver=False), r"sglang\.enable_memory_saver=false.*leave enable_memory_saver out"),
    ):
        config: Any = SimpleNamespace(weight_sync=WeightSyncConfig(**sync), sglang=sglang)
        with pytest.raises(ValueError, match=named):
            check_time_sharing(config, together)
        check_time_sharing(config, frozenset([frozenset(["actor", "critic"])]))
    check_time_sharing(SimpleNamespace(weight_sync=WeightSyncConfig(), sglang={}), together)  # type: ignore[bad-argument-type]


def test_engines_on_a_gpu_start_with_the_memory_saver():
    from mrl.rollout.engines.server_args import check_server_args, memory_saver_args

    assert memory_saver_args("cpu") == {} and memory_saver_args("cuda")["enable_memory_saver"]
    check_server_args(memory_saver_args("cuda"))
