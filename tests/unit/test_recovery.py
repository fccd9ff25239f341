"""Which processes are started again after a loss, from which state, and how often."""

from types import SimpleNamespace

import pytest

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.controller import recovery
from mrl.controller.recovery import Recovery
from mrl.core.errors import Lost


class Processes:
    """Notes what is done to processes of which some do not answer."""

    def __init__(self, trainers: bool = True) -> None:
        self.done: list = []
        self.trainers, self.failing = trainers, 0
        self.startup = SimpleNamespace(ready=lambda text: None)

    def restart_rollout_if_lost(self) -> None:
        self.done.append("rollout looked at")

    def trainers_alive(self) -> bool:
        return self.trainers

    def restart_trainers(self) -> None:
        self.done.append("trainers")
        if self.failing:
            self.failing -= 1
            raise Lost("and again")

    def bring_up(self, checkpoint) -> None:
        self.done.append(checkpoint and checkpoint.step)

    def wait_engines(self) -> None:
        self.done.append("engines")

    def connect_all(self) -> None:
        self.done.append("connected")


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(recovery.time, "sleep", found.append)
    return found


def recovering(tmp_path, processes, limit: int = 3, base: Checkpoint | None = None) -> Recovery:
    return Recovery(processes, CheckpointStore(tmp_path), base, limit, lambda checkpoint: None, {"step": "none yet"})


def save(tmp_path, step: int) -> None:
    store = CheckpointStore(tmp_path)
    store.commit(store.begin(), step, {"step": step})


def test_trainers_that_live_and_hold_their_step_are_left_alone(tmp_path, pauses):
    processes = Processes()
    error = Lost("the rollout worker died")
    error.role = "rollout"
    assert recovering(tmp_path, processes)(error, {"step": 7}) == {"step": 7}
    assert processes.done == ["rollout looked at", "connected"]


@pytest.mark.parametrize("alive, boundary", [(False, {"step": 7}), (True, None), (False, None), (True, {"step": 7})])
def test_others_go_back_to_the_last_checkpoint(tmp_path, pauses, alive, boundary):
    save(tmp_path, 5)
    processes = Processes(alive)
    assert recovering(tmp_path, processes)(Lost("rank 1 died"), boundary) == {"step": 5}
    assert processes.done == ["rollout looked at", "trainers", 5, "connected"]


def test_without_a_checkpoint_they_go_back_to_the_beginning(tmp_path, pauses):
    processes = Processes(trainers=False)
    assert recovering(tmp_path, processes)(Lost("rank 1 died"), None) == {"step": "none yet"}
    assert processes.done[1:3] == ["trainers", None]


def test_a_loss_on_the_way_back_is_another_try(tmp_path, pauses):
    processes = Processes(trainers=False)
    processes.failing = 2
    recovering(tmp_path, processes)(Lost("rank 1 died"), None)
    assert processes.done.count("trainers") == 3 and pauses == [0, 1, 3]


def test_restarts_without_progress_are_limited(tmp_path, pauses):
    again = recovering(tmp_path, Processes(trainers=False), limit=3)
    for _ in range(3):
        again(Lost("rank 1 died"), None)
    with pytest.raises(Lost, match="the fourth"):
        again(Lost("the fourth"), None)


def test_a_new_checkpoint_is_progress(tmp_path, pauses):
    again = recovering(tmp_path, Processes(trainers=False), limit=2)
    for step in range(1, 9):
        again(Lost("rank 1 died"), None)
        if step % 2 == 0:
            save(tmp_path, step)
    assert max(pauses) == 1


def test_what_is_lost_before_the_first_step_is_started_again_too(tmp_path, pauses):
    processes = Processes(trainers=False)
    bring_up, losses = processes.bring_up, [Lost("a rank died")]

    def once(checkpoint) -> None:
        bring_up(checkpoint)
        if losses:
            raise losses.pop()

    processes.bring_up = once
    base = Checkpoint(tmp_path / "of another run", 40, {"step": 40})
    again = recovering(tmp_path, processes, base=base)
    again.begin()
    assert processes.done == [40, "rollout looked at", "trainers", 40, "connected"]
    assert again(Lost("later"), None) == {"step": 40}, "until the run has a checkpoint itself"
