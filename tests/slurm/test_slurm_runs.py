"""Runs on a real Slurm cluster: over nodes, preempted, with a node gone, beside another on one node; nothing is left of any."""

import sys

import pytest
from run_comparison import check_equal_runs
from submitted_runs import LONG_S, submitter

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]
STEPS = 24
SAME = [f"trainer.max_steps={STEPS}", "checkpoint.every=5", "optim.lr=5e-5"]


@pytest.fixture(scope="session")
def left_alone(lab, quickstart, tmp_path_factory):
    """A run over two nodes that nothing happened to."""
    run = submitter(lab, quickstart, tmp_path_factory.mktemp("left_alone"))(*SAME)
    run.finish()
    return run


def test_a_run_over_two_nodes_completes_and_leaves_nothing(lab, left_alone):
    job = lab.job(left_alone.job_id)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0"), left_alone.logs()
    assert [line["step"] for line in left_alone.metrics()] == list(range(1, STEPS + 1))
    assert (left_alone.folder / "hf/model.safetensors").exists()
    picture = (left_alone.folder / "mrl.log").read_text()
    assert "10.77.0.1 " in picture and "10.77.0.2 " in picture, "trainer on one node, engine on the other"
    logs = {path.name for path in (left_alone.folder / "logs").iterdir()}
    names = {"driver.log", "ray_n1.log", "ray_n2.log", "ray_n1", "ray_n2", f"slurm_{left_alone.job_id}.log"}
    assert names <= logs and list((left_alone.folder / "logs/ray_n2").glob("raylet*"))
    assert "2 nodes are in the Ray cluster" in left_alone.said()
    assert "2 hosts, 0 GPUs: no finding in 22 checks, all-reduce over world" in left_alone.said()
    lab.wait(lambda: not left_alone.leftovers(), 60)


def test_a_run_over_four_nodes_has_its_processes_on_all_of_them(lab, submit):
    run = submit("cluster.nodes=4", "parallel.world_size=2", "rollout.num_engines=2", "trainer.max_steps=3")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "4"), run.logs()
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    picture = (run.folder / "mrl.log").read_text()
    assert all(f"10.77.0.{node} " in picture for node in (1, 2, 3, 4))
    assert "4 nodes are in the Ray cluster" in run.said()
    lab.wait(lambda: not run.leftovers(), 60)


def test_the_parts_of_a_heterogeneous_job_are_one_cluster(lab, submit):
    run = submit("cluster.nodes=1", "cluster.components=[{nodes: 1, comment: another part}]", "trainer.max_steps=3")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"], job["NumNodes"]) == ("COMPLETED", "0:0", "1"), run.logs()
    assert "2 hosts, 0 GPUs: no finding in 22 checks" in run.said()
    assert "2 nodes are in the Ray cluster" in run.said() and len(run.metrics()) == 3
    lab.wait(lambda: not run.leftovers(), 60)


def test_a_preempted_run_saves_is_queued_again_and_ends_the_same(lab, submit, left_alone):
    run = submit(*SAME)
    run.wait_for_step(3)
    urgent = lab.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3"
    )
    job = run.finish()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0") and int(job["Restarts"]) == 1, run.logs()
    assert lab.job(urgent.strip())["JobState"] == "COMPLETED"
    assert "preempted" in run.said() and "mrl train ended with status 75" in run.said()
    check_equal_runs(run.folder, left_alone.folder)
    lab.wait(lambda: not run.leftovers(), 60)


@pytest.mark.parametrize("which", ["another node", "the head"])
def test_a_run_survives_the_loss_of(lab, submit, left_alone, which):
    """It is queued again on the nodes that are left, and ends as if nothing had been."""
    run = submit(*SAME)
    run.wait_for_step(7)
    head = lab.job(run.job_id)["BatchHost"]
    lost = head if which == "the head" else (nodes_of(lab, run) - {head}).pop()
    lab.kill(lost)
    try:
        job = run.finish()
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0") and int(job["Restarts"]) >= 1, run.logs()
        assert lost not in nodes_of(lab, run)
        check_equal_runs(run.folder, left_alone.folder)
        lab.wait(lambda: not run.leftovers(), 60)
    finally:
        lab.boot(lost)
        lab.wait(lambda: "idle" in lab.slurm("sinfo", "-h", "-N", "-p", "main", "-n", lost, "-o", "%T"), 60)


def nodes_of(lab, run) -> set[str]:
    names = lab.job(run.job_id)["NodeList"]
    return set(lab.slurm("scontrol", "show", "hostnames", names).split())


def test_two_jobs_share_a_node(lab, submit):
    on_one = ["cluster.nodes=1", "++cluster.slurm.nodelist=n1", "placement=colocated", "trainer.max_steps=3"]
    runs = [submit(*on_one, f"run.seed={seed}") for seed in range(2)]
    jobs = [run.finish() for run in runs]
    for run, job in zip(runs, jobs, strict=True):
        assert (job["JobState"], job["NodeList"]) == ("COMPLETED", "n1"), run.logs()
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert max(job["StartTime"] for job in jobs) < min(job["EndTime"] for job in jobs), "they were there together"
    lab.wait(lambda: not runs[0].leftovers(), 60)


def test_a_cancelled_job_is_gone_at_once_and_stays_so(lab, submit):
    run = submit("trainer.max_steps=100000")
    run.wait_for_step(2)
    lab.run("scancel", run.job_id)
    lab.wait(lambda: not run.leftovers(), 120)
    job = lab.finish(run.job_id, LONG_S)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), run.logs()


SLEEPY = """#!/bin/sh
[ "$(hostname)" = n1 ] || exec sleep 600
exec {python} "$@"
"""


@pytest.mark.parametrize(
    ("doctor_s", "exit_code", "said"),
    [("30", "2:0", "n2: it did not join the check in time"), ("0", "1:0", "after 90 s: n2;")],
    ids=["by the doctor", "by Ray"],
)
def test_a_node_that_does_not_answer_is_named_and_the_job_ends(lab, submit, tmp_path, doctor_s, exit_code, said):
    (sleepy := tmp_path / "python").write_text(SLEEPY.format(python=sys.executable))
    sleepy.chmod(0o755)
    run = submit("++cluster.slurm.nodelist='n[1-2]'", MRL_PYTHON=str(sleepy), MRL_DOCTOR_S=doctor_s, MRL_JOIN_S="90")
    job = run.finish()
    assert (job["JobState"], job["ExitCode"]) == ("FAILED", exit_code), run.logs()
    assert said in run.said()
    assert not (run.folder / "logs/driver.log").exists()
    lab.wait(lambda: not run.leftovers(), 60)
