"""ProcessRecovery: which processes are restarted after a loss, from which state, and how often."""

from types import SimpleNamespace

import pytest

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.controller import processes
from mrl.controller.processes import ProcessRecovery
from mrl.core.run_errors import ProcessesLostError


class FakeProcesses:
    """Records what is done to the processes of a run. `trainers_alive`: whether the trainer ranks answer."""

    def __init__(self, trainers_alive: bool = True) -> None:
        self.done: list = []
        self.failing = 0
        self.startup = SimpleNamespace(ready=lambda text: None)
        self.models = SimpleNamespace(alive=lambda: trainers_alive)
        self.engines = SimpleNamespace(
            restart_if_lost=lambda trainers_alive: self.done.append("rollout worker checked"),
            wait_started=lambda: self.done.append("engines"),
            connect=lambda: self.done.append("connected"),
        )

    def restart_trainers(self) -> None:
        self.done.append("trainers")
        if self.failing:
            self.failing -= 1
            raise ProcessesLostError("and again")

    def bring_up(self, checkpoint) -> None:
        self.done.append(checkpoint and checkpoint.step)


@pytest.fixture
def pauses(monkeypatch):
    found = []
    monkeypatch.setattr(processes.time, "sleep", found.append)
    return found


def recovering(tmp_path, processes, limit: int = 3, base: Checkpoint | None = None) -> ProcessRecovery:
    return ProcessRecovery(
        processes, CheckpointStore(tmp_path), base, limit, lambda checkpoint: None, {"step": "none yet"}
    )


def save(tmp_path, step: int) -> None:
    store = CheckpointStore(tmp_path)
    store.commit(store.begin(), step, {"step": step})


def test_trainers_that_are_alive_with_intact_weights_are_not_restarted(tmp_path, pauses):
    processes = FakeProcesses()
    error = ProcessesLostError("the rollout worker died")
    error.role = "rollout"
    assert recovering(tmp_path, processes)(error, {"step": 7}) == {"step": 7}
    assert processes.done == ["rollout worker checked", "connected"]


@pytest.mark.parametrize(
    "alive, state_after_step", [(False, {"step": 7}), (True, None), (False, None), (True, {"step": 7})]
)
def test_other_trainers_are_restarted_from_the_last_checkpoint(tmp_path, pauses, alive, state_after_step):
    save(tmp_path, 5)
    processes = FakeProcesses(alive)
    assert recovering(tmp_path, processes)(ProcessesLostError("rank 1 died"), state_after_step) == {"step": 5}
    assert processes.done == ["rollout worker checked", "trainers", 5, "connected"]


def damage(checkpoint: Checkpoint) -> None:
    (checkpoint.path / "weights").write_text("WEIGHTS")


def test_trainers_never_load_a_damaged_checkpoint(tmp_path, pauses, caplog):
    for step in (5, 6):
        store = CheckpointStore(tmp_path)
        partial = store.begin()
        (partial / "weights").write_text("weights")
        newest = store.commit(partial, step, {"step": step})
    damage(newest)
    processes = FakeProcesses(trainers_alive=False)
    made = recovering(tmp_path, processes)
    assert made(ProcessesLostError("rank 1 died"), None) == {"step": 5} and 5 in processes.done
    assert "step_000006: weights is damaged" in caplog.text
    damage(Checkpoint.read(tmp_path / "step_000005"))
    pauses.clear()
    with pytest.raises(ValueError, match=r"the checkpoints of steps \[5, 6\] are damaged and there is no other"):
        made(ProcessesLostError("rank 1 died"), None)
    made.initial_checkpoint = newest
    with pytest.raises(ValueError, match="step_000006: weights is damaged"):
        made(ProcessesLostError("rank 1 died"), None)
    assert len(pauses) == 2, "a second restart would find the same files"


def test_checkpoints_are_not_read_if_no_trainer_restarts(tmp_path, pauses, monkeypatch):
    save(tmp_path, 5)
    monkeypatch.setattr(CheckpointStore, "latest_intact", None)
    error = ProcessesLostError("the rollout worker died")
    error.role = "rollout"
    assert recovering(tmp_path, FakeProcesses())(error, {"step": 7}) == {"step": 7}


def test_without_a_checkpoint_the_run_starts_again(tmp_path, pauses):
    processes = FakeProcesses(trainers_alive=False)
    assert recovering(tmp_path, processes)(ProcessesLostError("rank 1 died"), None) == {"step": "none yet"}
    assert processes.done[1:3] == ["trainers", None]


def test_a_loss_during_a_restart_leads_to_another_restart(tmp_path, pauses):
    processes = FakeProcesses(trainers_alive=False)
    processes.failing = 2
    recovering(tmp_path, processes)(ProcessesLostError("rank 1 died"), None)
    assert processes.done.count("trainers") == 3 and pauses == [0, 1, 3]


def test_restarts_without_a_new_checkpoint_are_limited(tmp_path, pauses):
    again = recovering(tmp_path, FakeProcesses(trainers_alive=False), limit=3)
    for _ in range(3):
        again(ProcessesLostError("rank 1 died"), None)
    with pytest.raises(ProcessesLostError, match="the fourth"):
        again(ProcessesLostError("the fourth"), None)


def test_a_new_checkpoint_resets_the_count_of_restarts(tmp_path, pauses):
    again = recovering(tmp_path, FakeProcesses(trainers_alive=False), limit=2)
    for step in range(1, 9):
        again(ProcessesLostError("rank 1 died"), None)
        if step % 2 == 0:
            save(tmp_path, step)
    assert max(pauses) == 1


def test_a_loss_before_the_first_step_is_recovered_too(tmp_path, pauses):
    processes = FakeProcesses(trainers_alive=False)
    bring_up, losses = processes.bring_up, [ProcessesLostError("a rank died")]

    def once(checkpoint) -> None:
        bring_up(checkpoint)
        if losses:
            raise losses.pop()

    processes.bring_up = once
    base = Checkpoint(tmp_path / "of another run", 40, {"step": 40})
    again = recovering(tmp_path, processes, base=base)
    again.begin()
    assert processes.done == [40, "rollout worker checked", "trainers", 40, "connected"]
    assert again(ProcessesLostError("later"), None) == {"step": 40}, "until the run has a checkpoint itself"
