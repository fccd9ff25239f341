"""Training runs on a real Slurm cluster: on several nodes, with preemption, with a lost node, and with two runs on one node."""

import sys

import pytest
from run_comparison import check_equal_runs
from submitted_runs import LONG_S, submitter

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
STEPS = 24
OVERRIDES = [f"trainer.max_steps={STEPS}", "checkpoint.every=5", "optim.lr=5e-5"]


@pytest.fixture(scope="session")
def undisturbed(cluster, quickstart, tmp_path_factory):
    """An undisturbed run on two nodes."""
    run = submitter(cluster, quickstart, tmp_path_factory.mktemp("undisturbed"))(*OVERRIDES)
    run.finish()
    return run


def test_a_run_on_two_nodes_completes_and_leaves_no_process(cluster, undisturbed):
    job = cluster.job(undisturbed.job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), undisturbed.logs()
    assert [line["step"] for line in undisturbed.metrics()] == list(range(1, STEPS + 1))
    assert (undisturbed.folder / "hf/model.safetensors").exists()
    device_map = (undisturbed.folder / "mrl.log").read_text()
    assert "10.77.0.1 " in device_map and "10.77.0.2 " in device_map, "trainer on one node, engine on the other"
    logs = {path.name for path in (undisturbed.folder / "logs").iterdir()}
    names = {"driver.log", "ray_n1.log", "ray_n2.log", "ray_n1", "ray_n2", f"slurm_{undisturbed.job_id}.log"}
    assert names <= logs and list((undisturbed.folder / "logs/ray_n2").glob("raylet*"))
    assert "2 nodes are in the Ray cluster" in undisturbed.job_log()
    assert "2 hosts, 0 GPUs: no finding in 22 checks, all-reduce over world" in undisturbed.job_log()
    cluster.wait(lambda: not undisturbed.leftovers(), 60)


def test_a_run_on_four_nodes_uses_all_of_them(cluster, submit):
    run = submit("cluster.nodes=4", "parallel.world_size=2", "rollout.num_engines=2", "trainer.max_steps=3")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "4"), run.logs()
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    device_map = (run.folder / "mrl.log").read_text()
    assert all(f"10.77.0.{node} " in device_map for node in (1, 2, 3, 4))
    assert "4 nodes are in the Ray cluster" in run.job_log()
    cluster.wait(lambda: not run.leftovers(), 60)


def test_a_run_uses_all_components_of_a_heterogeneous_job(cluster, submit):
    run = submit("cluster.nodes=1", "cluster.components=[{nodes: 1, comment: another part}]", "trainer.max_steps=3")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "1"), run.logs()
    assert "2 hosts, 0 GPUs: no finding in 22 checks" in run.job_log()
    assert "2 nodes are in the Ray cluster" in run.job_log() and len(run.metrics()) == 3
    cluster.wait(lambda: not run.leftovers(), 60)


def test_a_preempted_run_is_requeued_and_equals_an_undisturbed_run(cluster, submit, undisturbed):
    run = submit(*OVERRIDES)
    run.wait_for_step(3)
    urgent = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3"
    )
    job = run.finish()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0") and int(job["Restarts"]) == 1, run.logs()
    assert cluster.job(urgent.strip())["JobState"] == "COMPLETED"
    assert "preempted" in run.job_log() and "mrl train ended with status 75" in run.job_log()
    check_equal_runs(run.folder, undisturbed.folder)
    cluster.wait(lambda: not run.leftovers(), 60)


@pytest.mark.parametrize("which", ["another node", "the head"])
def test_a_run_that_loses_a_node_is_requeued_and_equals_an_undisturbed_run(cluster, submit, undisturbed, which):
    run = submit(*OVERRIDES)
    run.wait_for_step(7)
    head = cluster.job(run.job_id)["BatchHost"]
    lost = head if which == "the head" else (nodes_of(cluster, run) - {head}).pop()
    cluster.kill(lost)
    try:
        job = run.finish()
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0") and int(job["Restarts"]) >= 1, run.logs()
        assert lost not in nodes_of(cluster, run)
        check_equal_runs(run.folder, undisturbed.folder)
        cluster.wait(lambda: not run.leftovers(), 60)
    finally:
        cluster.boot(lost)
        cluster.wait(lambda: "idle" in cluster.slurm("sinfo", "-h", "-N", "-p", "main", "-n", lost, "-o", "%T"), 60)


def nodes_of(cluster, run) -> set[str]:
    names = cluster.job(run.job_id)["NodeList"]
    return set(cluster.slurm("scontrol", "show", "hostnames", names).split())


def test_two_jobs_share_a_node(cluster, submit):
    on_one = ["cluster.nodes=1", "++cluster.slurm.nodelist=n1", "placement=colocated", "trainer.max_steps=3"]
    runs = [submit(*on_one, "++cluster.slurm.hold=true", f"run.seed={seed}") for seed in range(2)]
    for run in runs:
        cluster.run("scontrol", "release", run.job_id)
    jobs = [run.finish() for run in runs]
    for run, job in zip(runs, jobs, strict=True):
        assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n1"), run.logs()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert max(job["StartTime"] for job in jobs) < min(job["EndTime"] for job in jobs), "they ran at the same time"
    cluster.wait(lambda: not runs[0].leftovers(), 60)


def test_a_cancelled_run_ends_and_is_not_requeued(cluster, submit):
    run = submit("trainer.max_steps=100000")
    run.wait_for_step(2)
    cluster.run("scancel", run.job_id)
    cluster.wait(lambda: not run.leftovers(), 120)
    job = cluster.finish(run.job_id, LONG_S)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), run.logs()


PYTHON_THAT_HANGS_ON_ALL_NODES_BUT_N1 = """#!/bin/sh
[ "$(hostname)" = n1 ] || exec sleep 600
exec {python} "$@"
"""


@pytest.mark.parametrize(
    ("doctor_s", "exit_code", "message"),
    [("30", "2:0", "n2: it did not join the check in time"), ("0", "1:0", "after 90 s: n2;")],
    ids=["by mrl doctor", "by Ray"],
)
def test_a_node_that_does_not_answer_is_named_and_the_job_ends(cluster, submit, tmp_path, doctor_s, exit_code, message):
    (python := tmp_path / "python").write_text(PYTHON_THAT_HANGS_ON_ALL_NODES_BUT_N1.format(python=sys.executable))
    python.chmod(0o755)
    run = submit("++cluster.slurm.nodelist='n[1-2]'", MRL_PYTHON=str(python), MRL_DOCTOR_S=doctor_s, MRL_JOIN_S="90")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", exit_code), run.logs()
    assert message in run.job_log()
    assert not (run.folder / "logs/driver.log").exists()
    cluster.wait(lambda: not run.leftovers(), 60)
