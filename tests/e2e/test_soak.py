"""Processes of a run are killed at random times: ledger, metrics and weights equal those of an undisturbed run."""

import json
import os
import random
import time

import psutil
import pytest
from mrl_runs import PATIENCE, select_processes, tagged, wait_until
from run_comparison import check_equal_runs

pytestmark = pytest.mark.extended

KINDS = {  # kind of process -> text that its command line contains
    "driver": "mrl.commands.train_process",
    "trainer rank": "ray::TrainWorker",
    "rollout worker": "ray::RolloutWorker",
    "engine": "sglang::scheduler",
    "raylet": "/raylet/raylet ",
}
SEED = int(os.environ.get("MRL_SOAK_SEED", "0"))


def find_process(tag: str, kind: str) -> psutil.Process | None:
    return next(iter(select_processes(tagged(tag), lambda p: KINDS[kind] in " ".join(p.cmdline()))), None)


def num_steps(folder) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


class Soak:
    """A run whose processes are killed one after another. About a quarter of the kills may come while the run still starts."""

    def __init__(self, start, folder, seed: int, pause_s: float) -> None:
        self.start, self.folder, self.rng, self.pause_s = start, folder, random.Random(seed), pause_s
        self.run, self.starts, self.killed, self.reached = start(), 1, [], 0

    def kill_next(self, kind: str) -> None:
        """Kill a process of this kind. With a probability of 3/4, first wait until a step has ended since the last kill."""
        training, end = self.rng.random() < 0.75, time.monotonic() + 600 * PATIENCE
        while training and num_steps(self.folder) <= self.reached and self.keep_running() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(self.rng.uniform(0, self.pause_s))
        while not (victim := find_process(self.run.tag, kind)) and self.keep_running() and time.monotonic() < end:
            time.sleep(0.02)
        self.reached = max(self.reached, num_steps(self.folder))
        if victim:
            victim.kill()
            self.killed.append((kind, self.reached))

    def keep_running(self) -> bool:
        """Return False if the run has completed. If its command failed, start it again, as a cluster does."""
        status = self.run.process.poll()
        if status:
            self.run, self.starts = self.start(), self.starts + 1
        return status != 0

    def finish(self) -> None:
        end = time.monotonic() + 600 * PATIENCE
        while self.keep_running() and self.starts < 60:
            assert time.monotonic() < end, self.run.output()[-5000:]
            time.sleep(0.2)


@pytest.fixture
def run_twice(start_mrl, tmp_path):
    """`run_twice(overrides, kinds, ...)` -> (undisturbed run directory, disturbed run directory, Soak of the disturbed run)."""

    def run(overrides: list[str], kinds: list[str], seed: int, pause_s: float):
        folders = [tmp_path / "undisturbed", tmp_path / "disturbed"]
        undisturbed = start_mrl("train", *overrides, f"run.dir={folders[0]}").finish(900)
        assert undisturbed.process.returncode == 0, undisturbed.output()
        soak = Soak(lambda: start_mrl("train", *overrides, f"run.dir={folders[1]}"), folders[1], seed, pause_s)
        for kind in kinds:
            soak.kill_next(kind)
        soak.finish()
        assert soak.run.process.returncode == 0, soak.run.output()[-5000:]
        assert soak.run.leftovers() == []
        return *folders, soak

    return run


def check_ledger_of_sync_run(folder, per_step: int) -> None:
    """Check that each step trained on exactly the rows that it drew from the prompt stream."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["drawn"] for line in lines] == [[per_step * line["step"]] for line in lines]
    assert all(len(line["groups"]) == per_step for line in lines)
    assert all(line["weight_version"] == line["step"] - 1 for line in lines)


def test_a_run_whose_raylet_is_killed_during_startup_starts_again(start_mrl, quickstart):
    run = start_mrl("train", *quickstart, "trainer.max_steps=1")
    wait_until(lambda: find_process(run.tag, "raylet"), 300, poll_s=0.01)
    find_process(run.tag, "raylet").kill()
    assert run.finish(300).process.returncode == 0, run.output()
    assert "restart 1 of 5" in run.output() and [line["step"] for line in run.metrics()] == [1]
    assert run.leftovers() == []


@pytest.mark.timeout(3600)
def test_a_run_equals_an_undisturbed_run_after_a_kill_of_each_kind_of_process(run_twice, quickstart):
    kinds = list(KINDS)
    random.Random(SEED).shuffle(kinds)
    small = [*quickstart, "trainer.max_steps=150", "trainer.eval_every=25", "checkpoint.every=10", "optim.lr=5e-5"]
    undisturbed, disturbed, soak = run_twice(small, kinds, SEED, pause_s=2.0)
    print(f"{soak.killed}, {soak.starts} starts of the command")
    assert len(soak.killed) == len(KINDS)
    check_equal_runs(disturbed, undisturbed)
    check_ledger_of_sync_run(disturbed, per_step=6)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_run_equals_an_undisturbed_run_after_fifty_kills(run_twice, quickstart):
    rng = random.Random(SEED)
    kinds = [rng.choice(list(KINDS)) for _ in range(50)]
    more = ["trainer.max_steps=600", "trainer.eval_every=25", "checkpoint.every=10", "optim.lr=5e-5"]
    undisturbed, disturbed, soak = run_twice([*quickstart, *more], kinds, SEED, pause_s=2.0)
    print(f"{len(soak.killed)} kills, {soak.starts} starts of the command: {soak.killed}")
    assert len(soak.killed) == 50
    check_equal_runs(disturbed, undisturbed)
    check_ledger_of_sync_run(disturbed, per_step=6)
