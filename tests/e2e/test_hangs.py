"""Ten ways to stand still or to die, in a real run of trainer ranks, a rollout worker and an engine: who is to blame is found."""

import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import faulty_ranks
import psutil
import pytest
from hydra import compose, initialize_config_dir

from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.controller.processes import model_spec
from mrl.core.run_errors import PreemptionHandler
from mrl.hang_report import ray_wait
from mrl.hang_report.process_registry import read_process_records, registry_folder
from mrl.hang_report.ray_wait import RankLostError, StalledError
from mrl.workers import group as workers
from parallel.dims import ParallelDims

DEADLINE_S = 3.0
WITHIN_S = DEADLINE_S + 10


class Hung:
    """The run under test: an actor of two pipeline stages with an engine, and two data-parallel replicas beside it."""

    def __init__(self, trainer, replicas, run_dir: Path, faults: Path) -> None:
        self.trainer, self.generator, self.stages = trainer, trainer.rollout, trainer.actor.group
        self.run_dir, self.held, self._replicas = run_dir, faults / faulty_ranks.HELD, replicas
        self.rollouts = self.generator.generate(trainer.prompts, 0)
        self.estimates = self.generator.estimate({}, 0.0, 0)
        self.update(self.stages)

    @cached_property
    def replicas(self):
        """They start while other tests run."""
        self._replicas.wait_ready(480)
        self.update(self._replicas)
        return self._replicas

    def update(self, group) -> None:
        replace(self.trainer.actor, group=group).update(self.rollouts, self.estimates, 0, 0.0)

    def generate(self) -> None:
        self.generator.generate(self.trainer.prompts, 0)

    def pid(self, name: str) -> int:
        return next(record.pid for record in read_process_records(registry_folder(self.run_dir)) if record.name == name)

    def scheduler(self) -> int:
        below = psutil.Process(self.pid("engine_0")).children()
        return next(child.pid for child in below if "sglang::scheduler" in " ".join(child.cmdline()))

    @contextmanager
    def holding(self):
        self.held.touch()
        try:
            yield
        finally:
            self.held.unlink()

    def stalls(self, of, call, name: str, *words: str) -> StalledError:
        """The call ends with this process's name, and these words, soon after its deadline."""
        before, of.timeout_s = of.timeout_s, DEADLINE_S
        start = time.monotonic()
        try:
            with pytest.raises(StalledError) as caught:
                call()
        finally:
            of.timeout_s = before
        assert DEADLINE_S <= time.monotonic() - start < WITHIN_S
        return named(caught.value, name, *words)


def named(error, name: str, *words: str):
    assert error.names == (name,), str(error)
    for word in (*words, str(error.report)):
        assert word in str(error), str(error)
    return error


@contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    folder, faults = tmp_path_factory.mktemp("hung"), tmp_path_factory.mktemp("faults")
    overrides = [
        *["experiment=quickstart", f"data.inputs.folder={inputs}", f"run.dir={folder}", "sft.train=null"],
        *["parallel.pp=2", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=2", "trainer.eval_rows=4"],
        *["tracking.wandb=false", "algorithm.skip_zero_advantage=false", "reward._target_=faulty_ranks.Deadlock"],
    ]
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", overrides))
    plan, dims = plan_training(config), ParallelDims(dp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_TEST_FAULTS", str(faults))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(workers, "TrainWorker", faulty_ranks.FaultyWorker)
        with build.trainer(plan, PreemptionHandler()) as trainer:
            replicas = workers.WorkerGroup(
                dims, str(folder), 120.0, lambda: [dict(num_cpus=0)] * dims.world_size, "replica"
            )
            replicas.start(replace(model_spec(plan), dims=dims), 0, 240.0)
            try:
                yield Hung(trainer, replicas, folder, faults)
            finally:
                replicas.close()


def test_healthy_calls_are_not_diagnosed(run):
    """However slow they are, within their deadlines; and what a rank raises comes out as it is."""
    with run.holding():
        run.stages.call(faulty_ranks.FaultyWorker.arm, 0, "data", "hold")
        slow = threading.Thread(target=run.update, args=[run.stages])
        slow.start()
        time.sleep(DEADLINE_S)
    slow.join()
    with pytest.raises(KeyError, match="nowhere"):
        run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "nowhere", "hold")
    assert not list(run.run_dir.glob("hang_report_*.txt"))


def test_a_scheduler_of_an_engine_that_is_stopped(run):
    with stopped(run.scheduler()):
        run.stalls(
            run.generator.worker,
            run.generate,
            "engine 0 scheduler",
            "kill -CONT",
            "the rollout worker waits for an answer",
        )


def test_a_server_of_an_engine_that_is_stopped(run):
    with stopped(run.pid("engine_0")):
        run.stalls(
            run.generator.worker,
            run.generate,
            "engine 0 server",
            "is stopped",
            "the rollout worker waits for an answer",
        )


def test_a_reward_in_a_deadlock(run):
    with run.holding():
        words = ("is in scoring", "faulty_ranks.py", "reward Deadlock on 8 responses", "scoring 8 responses to rows")
        run.stalls(run.generator.worker, run.generate, "the rollout worker", *words)


def test_a_rollout_worker_that_is_stopped(run):
    with stopped(run.pid("rollout")):
        run.stalls(run.generator.worker, run.generate, "the rollout worker", "is stopped")


def test_a_rank_that_sleeps_before_it_sends_to_the_next_stage(run):
    run.stages.call(faulty_ranks.FaultyWorker.arm, 0, "send", "hold")
    words = (
        "rank 1 (pp 1) waits for other ranks in receiving the previous pipeline stage's activations",
        "faulty_ranks",
    )
    with run.holding():
        error = run.stalls(run.stages, lambda: run.update(run.stages), "rank 0 (pp 0)", *words)
    assert error.ranks == (0,)


def test_a_rank_that_is_stuck_in_weight_sync(run):
    run.trainer.weight_sync.push(version=1)
    run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "sync", "hold")
    with run.holding():
        push = partial(run.trainer.weight_sync.push, version=2)
        run.stalls(run.stages, push, "rank 1 (pp 1)", "is in the weight sync", "push_weights() on 2 trainer ranks")


def test_a_rank_that_sleeps_in_data_loading(run):
    run.replicas.call(faulty_ranks.FaultyWorker.arm, 1, "data", "hold")
    with run.holding():
        words = (
            "faulty_ranks.py",
            "replica rank 0 (dp 0) waits for other ranks in the gradient all-reduce",
            "it has entered",
        )
        error = run.stalls(run.replicas, lambda: run.update(run.replicas), "replica rank 1 (dp 1)", *words)
    text = error.report.read_text()
    assert error.ranks == (1,) and "<- behind" in text


def test_a_rank_that_is_stopped_on_another_host(run, monkeypatch):
    """Its host is looked at by a task of Ray."""
    monkeypatch.setattr(ray_wait, "gethostname", lambda: "the driver's")
    monkeypatch.setattr(ray_wait, "REMOTE_TIMEOUT_S", WITHIN_S)
    with stopped(run.pid("replica_0")):
        call = partial(run.update, run.replicas)
        run.stalls(run.replicas, call, "replica rank 0 (dp 0)", "is stopped", "rank 1 (dp 1) waits for other ranks")


def test_a_rank_that_dies_before_a_collective(run):
    """Its neighbour's complaint comes first; the dead one is named, and how it died."""
    run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "data", "crash")
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        run.update(run.stages)
    assert time.monotonic() - start < WITHIN_S
    assert named(caught.value, "rank 1 (pp 1)", "died while updating the weights: Aborted").ranks == (1,)


def test_a_rank_that_is_killed_in_a_collective(run):
    run.replicas.call(faulty_ranks.FaultyWorker.arm, 1, "data", "hold")
    with run.holding():
        kill = threading.Timer(DEADLINE_S, os.kill, [run.pid("replica_0"), signal.SIGKILL])
        kill.start()
        start = time.monotonic()
        with pytest.raises(RankLostError) as caught:
            run.update(run.replicas)
        assert time.monotonic() - start < WITHIN_S
    text = named(caught.value, "replica rank 0 (dp 0)", "SIGKILL", "rank 1 (dp 1) is in").report.read_text()
    assert caught.value.ranks == (0,) and "replica rank 0 (dp 0): group" in text, "its last collective outlives it"
