"""Faults in a real run with trainer ranks, a rollout worker and an engine: the error names the process that hangs or is dead."""

import os
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import faulty_ranks
import psutil
import pytest
from hydra import compose, initialize_config_dir
from mrl_runs import select_processes, wait_until

from mrl.config import hydra_entry
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.model_processes import model_spec
from mrl.controller.plan_train import plan_training
from mrl.core.run_errors import PreemptionHandler
from mrl.hang_report import ray_wait
from mrl.hang_report.process_registry import read_process_records, registry_folder
from mrl.hang_report.ray_wait import RankLostError, StalledError
from mrl.workers import group as workers
from parallel.collective_log import read_collective_log
from parallel.dims import ParallelDims

DEADLINE_S = 3.0
REQUEST_DEADLINE_S = 8.0  # longer, because the rollout worker must first send its requests to the engine
DIAGNOSED_WITHIN_S = 60.0  # after the deadline. On an idle machine, the diagnosis takes about 5 s


class FaultyRun:
    """The run under test: an actor with two pipeline stages, an engine, and another worker group with two data-parallel ranks."""

    def __init__(self, trainer, start_replicas, run_dir: Path, faults: Path) -> None:
        self.trainer, self.generator, self.stages = trainer, trainer.rollout, trainer.actor.group
        self.run_dir, self.hang_file, self._start_replicas = run_dir, faults / faulty_ranks.HANG_FILE, start_replicas
        self.rollouts = self.generator.generate(trainer.prompts, 0)
        self.estimates = self.generator.estimate({}, 0.0, 0)
        self.update(self.stages)

    @cached_property
    def replicas(self):
        """The data-parallel ranks. They start when a test first needs them."""
        group = self._start_replicas()
        group.wait_ready(480)
        self.update(group)
        return group

    def update(self, group) -> None:
        replace(self.trainer.actor, group=group).begin_update(self.rollouts, self.estimates, 0, {}).result()

    def generate(self) -> None:
        self.generator.generate(self.trainer.prompts, 0)

    def pid(self, name: str) -> int:
        return next(record.pid for record in read_process_records(registry_folder(self.run_dir)) if record.name == name)

    def num_collectives(self, name: str) -> int:
        log = registry_folder(self.run_dir) / f"{name}.ops"
        return sum(last.num_collectives for last in read_collective_log(log))

    def scheduler(self) -> int:
        below = psutil.Process(self.pid("engine_0")).children()
        (found,) = select_processes(below, lambda child: "sglang::scheduler" in " ".join(child.cmdline()))
        return found.pid

    def deadline_s(self, group) -> float:
        """Return a deadline before which all ranks without a fault wait for the faulty one: five times the time of an update."""
        start = time.monotonic()
        self.update(group)
        return max(DEADLINE_S, 5 * (time.monotonic() - start))

    @contextmanager
    def faults_hang(self):
        """Context in which ranks and rewards with a fault hang. They continue when the context ends."""
        self.hang_file.touch()
        try:
            yield
        finally:
            self.hang_file.unlink()

    def check_stall(self, handle, call, name: str, *texts: str, deadline_s: float = DEADLINE_S) -> StalledError:
        """Check that the call fails after its deadline, and that the error contains the name of the process and these texts.

        `handle`: worker group or rollout worker whose timeout is the deadline. The deadline must be long enough for all
        processes except the faulty one to reach the place where they wait for it.
        """
        timeout_s, handle.timeout_s = handle.timeout_s, deadline_s
        start = time.monotonic()
        try:
            with pytest.raises(StalledError) as caught:
                call()
        finally:
            handle.timeout_s = timeout_s
        assert deadline_s <= time.monotonic() - start < deadline_s + DIAGNOSED_WITHIN_S
        return check_error(caught.value, name, *texts)


def check_error(error, name: str, *texts: str):
    """Check that the error blames the process `name`, contains these texts and names its hang report."""
    assert error.names == (name,), str(error)
    for text in (*texts, str(error.report)):
        assert text in str(error), str(error)
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
    folder, faults = tmp_path_factory.mktemp("faulty_run"), tmp_path_factory.mktemp("faults")
    overrides = [
        *["experiment=quickstart", f"data.inputs.folder={inputs}", f"run.dir={folder}", "sft.train=null"],
        *["parallel.pp=2", "rollout.prompts_per_step=4", "rollout.responses_per_prompt=2", "trainer.eval_rows=4"],
        *[
            "tracking.backends=[]",
            "algorithm.skip_zero_advantage=false",
            "reward._target_=faulty_ranks.Deadlock",
            "scoring.rehearse=false",
        ],
    ]
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", overrides))
    plan, dims = plan_training(config), ParallelDims(dp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_TEST_FAULTS", str(faults))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(workers, "TrainWorker", faulty_ranks.FaultyWorker)
        with build.trainer(plan, PreemptionHandler()) as trainer, ExitStack() as stack:

            def start_replicas() -> workers.WorkerGroup:
                options = [dict(num_cpus=0)] * dims.world_size
                group = workers.WorkerGroup(dims, str(folder), 120.0, lambda: options, "replica")
                stack.callback(group.close)
                group.start(replace(model_spec(plan), dims=dims), 0, 240.0)
                return group

            yield FaultyRun(trainer, start_replicas, folder, faults)


@pytest.mark.extended
def test_a_slow_call_and_a_call_that_raises_write_no_hang_report(run):
    """The slow call ends before its deadline. The exception of a rank is raised unchanged."""
    with run.faults_hang():
        run.stages.call(faulty_ranks.FaultyWorker.arm, 0, "data", "hang")
        slow = threading.Thread(target=run.update, args=[run.stages])
        slow.start()
        time.sleep(DEADLINE_S)
    slow.join()
    with pytest.raises(KeyError, match="nowhere"):
        run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "nowhere", "hang")
    assert not list(run.run_dir.glob("hang_report_*.txt"))


def test_a_stopped_scheduler_of_an_engine_is_named(run):
    with stopped(run.scheduler()):
        run.check_stall(
            run.generator.worker,
            run.generate,
            "engine 0 scheduler",
            "kill -CONT",
            "the rollout worker waits for an answer",
            deadline_s=REQUEST_DEADLINE_S,
        )


@pytest.mark.extended
def test_a_stopped_server_of_an_engine_is_named(run):
    with stopped(run.pid("engine_0")):
        run.check_stall(
            run.generator.worker,
            run.generate,
            "engine 0 server",
            "is stopped",
            "the rollout worker waits for an answer",
            deadline_s=REQUEST_DEADLINE_S,
        )


@pytest.mark.extended
def test_a_rollout_worker_whose_reward_deadlocks_is_named(run):
    with run.faults_hang():
        texts = ("is in scoring", "faulty_ranks.py", "reward Deadlock on 8 responses", "scoring 8 responses to rows")
        # The engine has to answer before the reward can hang.
        run.check_stall(run.generator.worker, run.generate, "the rollout worker", *texts, deadline_s=15)


@pytest.mark.extended
def test_a_stopped_rollout_worker_is_named(run):
    with stopped(run.pid("rollout")):
        run.check_stall(run.generator.worker, run.generate, "the rollout worker", "is stopped")


@pytest.mark.extended
def test_a_rank_that_does_not_send_to_the_next_pipeline_stage_is_named(run):
    deadline_s = run.deadline_s(run.stages)
    run.stages.call(faulty_ranks.FaultyWorker.arm, 0, "send", "hang")
    texts = (
        "rank 1 (pp 1) waits for other ranks in receiving the previous pipeline stage's activations",
        "faulty_ranks",
    )
    with run.faults_hang():
        update = partial(run.update, run.stages)
        error = run.check_stall(run.stages, update, "rank 0 (pp 0)", *texts, deadline_s=deadline_s)
    assert error.ranks == (0,)


@pytest.mark.extended
def test_a_rank_that_hangs_in_the_weight_sync_is_named(run):
    run.trainer.weight_sync.push(version=1)
    run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "sync", "hang")
    with run.faults_hang():
        push = partial(run.trainer.weight_sync.push, version=2)
        texts = ["is in the weight sync", "push_weights() on 2 trainer ranks"]
        run.check_stall(run.stages, push, "rank 1 (pp 1)", *texts, deadline_s=30)  # the engine has to pause first


@pytest.mark.extended
def test_a_rank_that_hangs_in_data_loading_is_named(run):
    deadline_s = run.deadline_s(run.replicas)
    run.replicas.call(faulty_ranks.FaultyWorker.arm, 1, "data", "hang")
    with run.faults_hang():
        texts = (
            "faulty_ranks.py",
            "replica rank 0 (dp 0) waits for other ranks in the gradient reduction",
            "it has entered",
        )
        update = partial(run.update, run.replicas)
        error = run.check_stall(run.replicas, update, "replica rank 1 (dp 1)", *texts, deadline_s=deadline_s)
    text = error.report.read_text()
    assert error.ranks == (1,) and "<- behind" in text


@pytest.mark.extended
def test_a_stopped_rank_on_another_host_is_named(run, monkeypatch):
    """A Ray task examines the other host."""
    deadline_s, call = run.deadline_s(run.replicas), partial(run.update, run.replicas)
    monkeypatch.setattr(ray_wait, "gethostname", lambda: "host-of-the-driver")
    monkeypatch.setattr(ray_wait, "REMOTE_TIMEOUT_S", DIAGNOSED_WITHIN_S)
    texts = ("is stopped", "rank 1 (dp 1) waits for other ranks")
    with stopped(run.pid("replica_0")):
        run.check_stall(run.replicas, call, "replica rank 0 (dp 0)", *texts, deadline_s=deadline_s)


@pytest.mark.extended
def test_a_rank_that_dies_before_a_collective_is_named(run):
    """The error of the neighboring rank arrives first, but the report names the dead rank, with the cause of its death."""
    run.stages.call(faulty_ranks.FaultyWorker.arm, 1, "data", "crash")
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        run.update(run.stages)
    assert time.monotonic() - start < DIAGNOSED_WITHIN_S
    assert check_error(caught.value, "rank 1 (pp 1)", "died while updating the weights: Aborted").ranks == (1,)


@pytest.mark.extended
def test_a_rank_that_is_killed_in_a_collective_is_named(run):
    run.replicas.call(faulty_ranks.FaultyWorker.arm, 1, "data", "hang")
    issued = run.num_collectives("replica_0")
    killed = []

    def kill_in_collective() -> None:
        wait_until(lambda: run.num_collectives("replica_0") > issued)
        os.kill(run.pid("replica_0"), signal.SIGKILL)
        killed.append(time.monotonic())

    with run.faults_hang():
        threading.Thread(target=kill_in_collective).start()
        with pytest.raises(RankLostError) as caught:
            run.update(run.replicas)
        assert time.monotonic() - killed[0] < DIAGNOSED_WITHIN_S
    text = check_error(caught.value, "replica rank 0 (dp 0)", "SIGKILL", "rank 1 (dp 1) is in").report.read_text()
    assert caught.value.ranks == (0,) and "replica rank 0 (dp 0): process group" in text, (
        "the report has the dead rank's last collective"
    )
