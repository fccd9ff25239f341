"""Processes of a run are killed at random points: it ends as the run whose processes were left alone."""

import json
import os
import random
import time

import psutil
import pytest
from conftest import PATIENCE, tagged
from test_resumed_runs import learning

pytestmark = pytest.mark.extended

KINDS = {  # what the command line of a process has in it
    "driver": "mrl.commands.train_process",
    "trainer rank": "ray::TrainWorker",
    "rollout worker": "ray::RolloutWorker",
    "engine": "sglang::scheduler",
    "raylet": "/raylet/raylet ",
}
SEED = int(os.environ.get("MRL_SOAK_SEED", "0"))
NOT_EXACT = ("mismatch/", "rollout/cached", "rollout/replaced", "rollout/retried")  # what batching and faults decide


def find(tag: str, kind: str) -> psutil.Process | None:
    for process in tagged(tag):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if KINDS[kind] in line:
            return process
    return None


def comparable(path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(NOT_EXACT)} for line in learning(path)]


def num_steps(folder) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


class Soak:
    """A run whose processes are killed one after another: three in four while it trains, the others whenever they are met."""

    def __init__(self, start, folder, seed: int, pause_s: float) -> None:
        self.start, self.folder, self.chance, self.pause_s = start, folder, random.Random(seed), pause_s
        self.run, self.starts, self.killed, self.reached = start(), 1, [], 0

    def strike(self, kind: str) -> None:
        """Kill the next process of this kind, once the run has come farther than when the last one was killed."""
        training, end = self.chance.random() < 0.75, time.monotonic() + 600 * PATIENCE
        while training and num_steps(self.folder) <= self.reached and self.goes_on() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(self.chance.uniform(0, self.pause_s))
        while not (victim := find(self.run.tag, kind)) and self.goes_on() and time.monotonic() < end:
            time.sleep(0.02)
        self.reached = max(self.reached, num_steps(self.folder))
        if victim:
            victim.kill()
            self.killed.append((kind, self.reached))

    def goes_on(self) -> bool:
        """Whether the run is not at its end; one that gave up is started again, as a cluster would."""
        status = self.run.process.poll()
        if status:
            self.run, self.starts = self.start(), self.starts + 1
        return status != 0

    def finish(self) -> None:
        end = time.monotonic() + 600 * PATIENCE
        while self.goes_on() and self.starts < 60:
            assert time.monotonic() < end, self.run.output()[-5000:]
            time.sleep(0.2)


@pytest.fixture
def trial(start_mrl, tmp_path):
    """`trial(overrides, kinds, ...)`: folders of the run left alone and of the one whose processes were killed, and the Soak."""

    def compare(overrides: list[str], kinds: list[str], seed: int, pause_s: float):
        folders = [tmp_path / "left_alone", tmp_path / "struck"]
        left_alone = start_mrl("train", *overrides, f"run.dir={folders[0]}").finish(900)
        assert left_alone.process.returncode == 0, left_alone.output()
        soak = Soak(lambda: start_mrl("train", *overrides, f"run.dir={folders[1]}"), folders[1], seed, pause_s)
        for kind in kinds:
            soak.strike(kind)
        soak.finish()
        assert soak.run.process.returncode == 0, soak.run.output()[-5000:]
        assert soak.run.leftovers() == []
        return *folders, soak

    return compare


def check_the_same(left_alone, struck) -> None:
    import torch
    from safetensors.torch import load_file

    ledgers = [(folder / "ledger.jsonl").read_text() for folder in (left_alone, struck)]
    assert ledgers[0] == ledgers[1], "no sample is lost, and none is trained twice"
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert comparable(struck / name) == comparable(left_alone / name), name
    ours, theirs = (load_file(folder / "hf/model.safetensors") for folder in (struck, left_alone))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_the_ledger(folder, per_step: int) -> None:
    """Every row that the stream drew was trained, once each, in the step that drew it."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["drawn"] for line in lines] == [[per_step * line["step"]] for line in lines]
    assert all(len(line["groups"]) == per_step for line in lines)
    assert all(line["weight_version"] == line["step"] - 1 for line in lines)


def test_a_raylet_that_is_gone_before_the_run_is_up_costs_a_new_start(start_mrl, quickstart):
    run, end = start_mrl("train", *quickstart, "trainer.max_steps=1"), time.monotonic() + 300
    while not (raylet := find(run.tag, "raylet")) and time.monotonic() < end:
        time.sleep(0.01)
    assert raylet, run.output()
    raylet.kill()
    assert run.finish(300).process.returncode == 0, run.output()
    assert "new start 1 of 5" in run.output() and [line["step"] for line in run.metrics()] == [1]
    assert run.leftovers() == []


@pytest.mark.timeout(3600)
def test_a_run_whose_processes_are_killed_is_the_run_that_was_left_alone(trial, quickstart):
    kinds = list(KINDS)
    random.Random(SEED).shuffle(kinds)
    small = [*quickstart, "trainer.max_steps=150", "trainer.eval_every=25", "checkpoint.every=10", "optim.lr=5e-5"]
    left_alone, struck, soak = trial(small, kinds, SEED, pause_s=2.0)
    print(f"{soak.killed}, {soak.starts} starts of the command")
    assert len(soak.killed) == len(KINDS)
    check_the_same(left_alone, struck)
    check_the_ledger(struck, per_step=6)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_fifty_kills_over_a_run(trial, quickstart):
    chance = random.Random(SEED)
    kinds = [chance.choice(list(KINDS)) for _ in range(50)]
    more = ["trainer.max_steps=600", "trainer.eval_every=25", "checkpoint.every=10", "optim.lr=5e-5"]
    left_alone, struck, soak = trial([*quickstart, *more], kinds, SEED, pause_s=2.0)
    print(f"{len(soak.killed)} kills, {soak.starts} starts of the command: {soak.killed}")
    assert len(soak.killed) == 50
    check_the_same(left_alone, struck)
    check_the_ledger(struck, per_step=6)
