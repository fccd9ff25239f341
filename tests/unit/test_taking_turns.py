"""Who sleeps and who wakes, in which order, among those that share devices."""

from typing import Any

import pytest

from mrl.controller.colocation import ACTOR, ENGINES, State, Turns
from mrl.weight_sync.driver import WeightSync


class Fake:
    """A role that writes down what it is told, and refuses once what it is told to refuse."""

    def __init__(self, name: str, calls: list[str], residual: int = 0) -> None:
        self.name, self.calls, self.residual = name, calls, residual
        self.refuses = ""

    def _do(self, what: str) -> None:
        if what == self.refuses:
            self.refuses = ""
            raise RuntimeError(f"{self.name} cannot {what}")
        self.calls.append(f"{self.name} {what}")

    def sleep(self, keep_weights: bool = False) -> int:
        self._do("keeps weights" if keep_weights else "sleeps")
        return self.residual

    def wake(self) -> None:
        self._do("wakes")

    def wake_weights(self) -> None:
        self._do("has weights")

    def wake_cache(self) -> None:
        self._do("has cache")


class Run:
    """Fakes around Turns, as a run wires them."""

    def __init__(self, *sharing: str, roles: str = "actor critic teacher") -> None:
        self.calls: list[str] = []
        self.trainers = {name: Fake(name, self.calls, residual) for residual, name in enumerate(roles.split(), 10)}
        self.engines = Fake(ENGINES, self.calls)
        self.turns = Turns(self.trainers, self.engines, frozenset(frozenset(group.split()) for group in sharing))
        self.turns.bring = lambda: self.turns.push(self.send)
        self.turns.started(*self.trainers, ENGINES)

    def send(self, released: bool) -> str:
        self.calls.append("push to empty engines" if released else "push")
        return "report"

    def did(self, act: Any) -> list[str]:
        self.calls.clear()
        act()
        return self.calls.copy()

    def needs(self, role: str) -> list[str]:
        return self.did(lambda: self.turns.need(role))

    def pushes(self) -> list[str]:
        return self.did(lambda: self.turns.push(self.send))

    def states(self) -> dict[str, State]:
        return {role: self.turns.state(role) for role in (*self.trainers, ENGINES)}


AROUND_A_PUSH = [
    "actor keeps weights",
    "engines has weights",
    "push to empty engines",
    "actor sleeps",
    "engines has cache",
]


def test_nothing_happens_where_nothing_is_shared():
    run = Run()
    for role in (*run.trainers, ENGINES):
        assert run.needs(role) == []
    assert run.pushes() == ["push"] and run.turns.metrics() == {}


def test_who_shares_with_nobody_here_stays_awake():
    run = Run("actor reward", "critic teacher")  # a role that the run does not have
    assert run.needs(ACTOR) == [] == run.needs(ENGINES)
    assert run.needs("critic") == ["teacher sleeps"]
    assert run.needs("critic") == []
    assert run.needs("teacher") == ["critic sleeps", "teacher wakes"]


def test_a_step_of_colocated_roles_pushes_once():
    run = Run("actor critic engines", roles="actor critic")
    assert run.pushes() == ["engines sleeps", "critic sleeps", *AROUND_A_PUSH]  # all were awake: as freshly started
    assert run.needs(ENGINES) == []  # rollout
    assert run.needs("critic") == ["engines sleeps", "critic wakes"]  # values
    assert run.needs(ACTOR) == ["critic sleeps", "actor wakes"]  # update
    assert run.needs(ACTOR) == []
    assert run.pushes() == AROUND_A_PUSH
    assert run.states() == {"actor": State.ASLEEP, "critic": State.ASLEEP, "engines": State.AWAKE}


def test_engines_that_slept_wake_around_a_push_of_what_they_had():
    run = Run("actor engines", roles="actor")
    run.pushes()
    assert run.needs(ACTOR) == ["engines sleeps", "actor wakes"]  # a checkpoint between steps
    assert run.needs(ENGINES) == AROUND_A_PUSH


def test_engines_that_are_awake_beside_others_only_have_these_sleep():
    run = Run("actor engines", roles="actor")
    assert run.needs(ENGINES) == ["actor sleeps"]


def test_an_actor_elsewhere_stays_awake_around_a_push():
    run = Run("critic engines", roles="actor critic")
    assert run.pushes() == [
        "engines sleeps",
        "critic sleeps",
        "engines has weights",
        "push to empty engines",
        "engines has cache",
    ]
    assert run.turns.state(ACTOR) is State.AWAKE


def test_an_actor_that_sleeps_elsewhere_is_woken_for_a_push_and_sleeps_again():
    run = Run("actor teacher", "critic engines")
    assert run.needs("teacher") == ["actor sleeps"]
    assert run.needs("critic") == ["engines sleeps"]
    assert run.needs(ENGINES) == ["critic sleeps", "teacher sleeps", *AROUND_A_PUSH]


def test_engines_of_their_own_are_pushed_to_by_an_actor_that_has_its_turn():
    run = Run("actor critic", roles="actor critic")
    assert run.needs("critic") == ["actor sleeps"]
    assert run.pushes() == ["critic sleeps", "actor wakes", "push"]


FAILURES = {
    "actor wakes": ("actor", "need"),
    "critic sleeps": ("critic", "need"),
    "engines sleeps": ("engines", "push"),
    "actor keeps weights": ("actor", "push"),
    "engines has weights": ("engines", "push"),
    "actor sleeps": ("actor", "push"),
    "engines has cache": ("engines", "push"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failure_what_is_asked_for_next_is_reached_all_the_same(failure):
    name, asked = FAILURES[failure]
    run = Run("actor critic engines", roles="actor critic")
    fake = run.engines if name == ENGINES else run.trainers[name]
    if asked == "need":
        run.needs("critic")
    fake.refuses = failure.removeprefix(f"{name} ")
    with pytest.raises(RuntimeError, match=f"{name} cannot"):
        run.pushes() if asked == "push" else run.needs(ACTOR)
    assert run.turns.state(name) is State.BETWEEN
    run.needs(ACTOR)
    assert run.states() == {"actor": State.AWAKE, "critic": State.ASLEEP, "engines": State.ASLEEP}
    run.needs(ENGINES)
    assert run.states() == {"actor": State.ASLEEP, "critic": State.ASLEEP, "engines": State.AWAKE}
    assert run.calls[-5:] == AROUND_A_PUSH


def test_a_push_that_fails_leaves_engines_without_weights_and_the_next_one_brings_them():
    run = Run("actor engines", roles="actor")

    def fail(released: bool) -> None:
        raise ConnectionError("no engine")

    with pytest.raises(ConnectionError):
        run.turns.push(fail)
    assert run.states() == {"actor": State.BETWEEN, "engines": State.BETWEEN}
    assert run.pushes() == ["engines sleeps", *AROUND_A_PUSH]


def test_processes_that_were_started_again_are_awake():
    run = Run("actor critic engines", roles="actor critic")
    run.pushes()
    run.turns.forget("actor", "critic")
    assert run.needs(ACTOR) == ["engines sleeps"]  # there is room for it
    run.turns.started("actor")
    assert run.needs(ACTOR) == []
    assert run.needs("critic") == ["actor sleeps"]
    run.turns.started("critic")
    assert run.needs(ACTOR) == ["critic sleeps", "actor wakes"]


def test_those_that_start_find_room_one_after_another():
    run = Run("actor critic engines", roles="actor critic")
    run.turns.forget(*run.states())
    assert run.needs(ACTOR) == []
    run.turns.started(ACTOR)
    assert run.needs(ENGINES) == ["actor sleeps"]
    run.turns.started(ENGINES)
    assert run.needs("critic") == ["engines sleeps"]
    run.turns.started("critic")
    assert run.needs(ACTOR) == ["critic sleeps", "actor wakes"]  # to take up a checkpoint
    assert run.pushes() == AROUND_A_PUSH


def test_numbers_are_those_since_the_last_look(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("mrl.controller.colocation.time.perf_counter", lambda: float(next(clock)))
    run = Run("actor critic engines", roles="actor critic")
    run.pushes()  # the actor keeps 10 bytes, the critic 11
    found = run.turns.metrics()
    assert found == {"placement/switch_s": 2.0, "placement/switches": 1.0, "placement/residual_bytes": 11.0}
    run.needs(ACTOR)
    found = run.turns.metrics()
    assert found == {"placement/switch_s": 1.0, "placement/switches": 1.0, "placement/residual_bytes": 0.0}
    assert run.turns.metrics() == {
        "placement/switch_s": 0.0,
        "placement/switches": 0.0,
        "placement/residual_bytes": 0.0,
    }


def test_engines_that_fail_at_a_push_are_replaced_and_all_are_pushed_to_again():
    from mrl.core.types import SyncReport

    run = Run("actor engines", roles="actor")
    answers = [SyncReport(failed={"http://a": "gone"}), SyncReport()]

    def send(released: bool) -> list[SyncReport]:
        run.send(released)
        return [answers.pop(0)]

    sync = WeightSync(lambda version: run.turns.push(send), lambda urls: {}, lambda urls: ["http://b"])
    run.turns.bring = sync.again
    sync.push(0)
    assert run.calls == ["engines sleeps", *AROUND_A_PUSH, "engines sleeps", *AROUND_A_PUSH]
    run.needs(ACTOR)
    answers.append(SyncReport())
    assert run.needs(ENGINES) == AROUND_A_PUSH and sync.version == 0


def test_groups_ask_for_their_turn_before_calls_that_need_memory():
    from mrl.workers.group import WorkerGroup

    asked: list[str] = []
    group = object.__new__(WorkerGroup)  # without processes
    group.role, group.before = "critic", asked.append
    for method in ("sleep", "wake", "close", "cpu_seconds", "finish_save", "connect_engines", "push_weights"):
        group._prepare(method)
    assert asked == []
    for method in ("compute", "update", "begin_save", "save", "load", "export_hf", "trace", "look", "keep_reference"):
        group._prepare(method)
    assert asked == ["critic"] * 9


def test_every_call_to_a_trainer_says_what_it_needs():
    from mrl.workers.awake import NEEDS
    from mrl.workers.worker import TrainWorker

    public = {name for name in vars(TrainWorker) if not name.startswith("_")}
    assert public - NEEDS.keys() == {
        *("address", "setup", "load_sft", "connect_engines", "sleep", "wake"),
        *("save_finished", "finish_save", "abandon_save", "cpu_seconds", "close"),
    }
    assert NEEDS.keys() <= public and all(hasattr(vars(TrainWorker)[name], "__wrapped__") for name in NEEDS)


def test_settings_that_need_memory_which_is_not_kept_are_refused():
    from types import SimpleNamespace

    from mrl.config.schema import WeightSyncConfig
    from mrl.controller.plan_train import check_turns

    together = frozenset([frozenset(["actor", "engines"])])
    for sync, sglang, named in (
        (dict(pause_mode="in_place"), {}, r"weight_sync\.pause_mode=in_place keeps the KV cache.*use retract"),
        (dict(delta=True), {}, r"weight_sync\.delta=true.*leave it false"),
        ({}, dict(enable_memory_saver=False), r"sglang\.enable_memory_saver=false.*leave it out"),
    ):
        config: Any = SimpleNamespace(weight_sync=WeightSyncConfig(**sync), sglang=sglang)
        with pytest.raises(ValueError, match=named):
            check_turns(config, together)
        check_turns(config, frozenset([frozenset(["actor", "critic"])]))
    check_turns(SimpleNamespace(weight_sync=WeightSyncConfig(), sglang={}), together)  # type: ignore[bad-argument-type]


def test_engines_on_a_gpu_are_started_so_that_they_can_give_memory_back():
    from mrl.rollout.server_args import check_server_args, memory_saver_args

    assert memory_saver_args("cpu") == {} and memory_saver_args("cuda") == {"enable_memory_saver": True}
    check_server_args(memory_saver_args("cuda"))
