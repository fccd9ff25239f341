"""The batch scripts on a real Slurm cluster: steps, signals, requeues and lost nodes. A script replaces Ray and mrl."""

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
REPOSITORY = Path(__file__).resolve().parents[2]
WITHIN_S = 180

PYTHON = """#!{python} -S
import os, signal, socket, subprocess, sys, time
assert sys.argv.pop(1) == "-P"
module, here = sys.argv[2], os.environ["SLURMD_NODENAME"]
note = os.environ["NOTES"] + "/" + os.environ["MRL_JOB"] + "."
if module == "ray.scripts.scripts":
    options = dict(word.partition("=")[::2] for word in sys.argv[4:])
    os.makedirs(options["--temp-dir"] + "/session_latest/logs")
    open(options["--temp-dir"] + "/session_latest/logs/raylet.out", "w").write("a raylet")
    open(note + here, "w").write(options["--num-gpus"] + " " + options["--node-manager-port"])
    subprocess.Popen(["/bin/sleep", "601"], start_new_session=True)  # a daemon that Slurm does not track
    if "--head" in options:
        listener = socket.create_server(("0.0.0.0", int(options["--port"])))
    time.sleep(600)
elif module == "mrl.placement.ray_cluster":
    end = time.monotonic() + float(sys.argv[4])
    while missing := [node for node in sys.argv[5:] if not os.path.exists(note + node)]:
        if time.monotonic() > end:
            sys.exit("missing " + " ".join(missing))
        time.sleep(0.05)
elif module == "mrl.cli":
    def handle_preemption(*_):
        open(note + "preempted", "a").write(here + "\\n")
        sys.exit(75)
    signal.signal(signal.SIGUSR1, handle_preemption)
    open(note + "driver", "a").write(here + "\\n")
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts < int(os.environ["WAITS"]):
        time.sleep(600)
"""


@pytest.fixture
def job(cluster, tmp_path):
    """`job(waits, option, ...)` -> id of a job whose first `waits` starts do not end. The job writes notes to tmp_path."""
    (python := tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)

    def run(waits: int, *options: str) -> str:
        env = dict(
            MRL_PYTHON=str(python), MRL_CHECKOUT=str(REPOSITORY), NOTES=str(tmp_path), WAITS=str(waits), MRL_STOP_S="60"
        )
        words = ["sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/%j.log", "--gpus-per-node=1"]
        words += [*options, "--time=60", str(REPOSITORY / "slurm/train.sbatch"), f"run.dir={tmp_path}/run"]
        return cluster.run(*words, **env).strip()

    return run


@pytest.fixture
def note(cluster, tmp_path):
    """`note(job_id, name)`: wait for the stand-in to write this note, and return its text."""

    def read(job_id: str, name: str) -> str:
        path = tmp_path / f"{job_id}.{name}"
        cluster.wait(lambda: path.exists() and path.read_text(), WITHIN_S)
        return path.read_text()

    return read


def job_log(tmp_path, job_id: str) -> str:
    return (tmp_path / f"{job_id}.log").read_text()


def nothing_is_left(cluster) -> bool:
    """Return whether no running node has files or processes of a job."""
    files = [path for node in cluster.nodes for path in (cluster.folder / node / "tmp").glob("mrl-[0-9]*")]
    sleepers = [p for node in cluster.nodes.values() for p in node.children(recursive=True) if p.name() == "sleep"]
    return not files and not sleepers and not any(map(cluster.processes, cluster.nodes))


def test_ray_runs_on_each_node_with_its_gpus_and_ends_with_the_job(cluster, job, note, tmp_path):
    job_id = job(0, "--nodes=2")
    ended = cluster.finish(job_id, WITHIN_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job_log(tmp_path, job_id)
    assert [note(job_id, node).split()[0] for node in ("n1", "n2")] == ["1", "1"]
    assert note(job_id, "driver") == "n1\n"
    logs = {str(path.relative_to(tmp_path / "run/logs")) for path in (tmp_path / "run/logs").rglob("*")}
    assert logs >= {"driver.log", "ray_n1.log", "ray_n2.log", "ray_n1/raylet.out", "ray_n2/raylet.out"}
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_the_components_of_a_heterogeneous_job_form_one_ray_cluster(cluster, job, note, tmp_path):
    job_id = job(0, "--nodes=1", ":", "--nodes=1", "--gpus-per-node=2")
    ended = cluster.finish(job_id, WITHIN_S)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), job_log(tmp_path, job_id)
    assert [note(job_id, node).split()[0] for node in ("n1", "n2")] == ["1", "2"]
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_a_preempted_job_is_requeued(cluster, job, note, tmp_path):
    job_id = job(1, "--nodes=2")
    note(job_id, "driver")
    cluster.run("sbatch", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 2")
    ended = cluster.finish(job_id, WITHIN_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job_log(tmp_path, job_id)
    assert note(job_id, "preempted") == "n1\n", "mrl got the signal once"
    assert "mrl train ended with status 75" in job_log(tmp_path, job_id)
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_sigusr1_to_the_batch_script_requeues_the_job(cluster, job, note, tmp_path):
    job_id = job(1, "--nodes=2")
    note(job_id, "driver")
    cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    ended = cluster.finish(job_id, WITHIN_S)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job_log(tmp_path, job_id)
    assert note(job_id, "preempted") == "n1\n"
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_all_components_of_a_heterogeneous_job_are_requeued(cluster, job, note, tmp_path):
    job_id = job(1, "--nodes=1", ":", "--nodes=1")
    note(job_id, "driver")
    cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    cluster.wait(lambda: job_log(tmp_path, job_id).count("Ray is stopped on all nodes") == 2, WITHIN_S)
    assert "start 1 of job" in job_log(tmp_path, job_id) and job_log(tmp_path, job_id).count("mrl train ended") == 2
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_the_tasks_of_an_array_are_requeued_one_by_one(cluster, job, tmp_path):
    """One of the tasks has the id of the array as its SLURM_JOB_ID."""
    job_id = job(1, "--nodes=1", "--array=0-1")
    tasks = [f"{job_id}_{number}" for number in (0, 1)]
    cluster.wait(lambda: len(list(tmp_path.glob("*.driver"))) == 2, WITHIN_S)
    for task in tasks:
        cluster.run("scancel", "--batch", "--signal=USR1", task)
    for task in tasks:
        ended = cluster.finish(task, WITHIN_S)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1")
    assert all((tmp_path / f"run/{number}/logs/driver.log").exists() for number in (0, 1))
    cluster.wait(lambda: nothing_is_left(cluster), 60)


def test_a_cancelled_job_ends_and_is_not_requeued(cluster, job, note, tmp_path):
    job_id = job(9, "--nodes=2")
    note(job_id, "driver")
    cluster.run("scancel", job_id)
    cluster.wait(lambda: nothing_is_left(cluster), WITHIN_S)
    ended = cluster.finish(job_id, WITHIN_S)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), job_log(tmp_path, job_id)


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_job_that_loses_a_node_is_requeued_on_other_nodes(cluster, job, note, tmp_path, lost):
    """The batch script runs on n1."""
    job_id = job(1, "--nodes=2")
    assert note(job_id, "driver") == "n1\n"
    cluster.kill(lost)
    try:
        ended = cluster.finish(job_id, WITHIN_S)
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job_log(tmp_path, job_id)
        cluster.wait(lambda: nothing_is_left(cluster), 60)
    finally:
        cluster.boot(lost)
        cluster.wait(lambda: "idle" in cluster.slurm("sinfo", "-h", "-N", "-p", "main", "-n", lost, "-o", "%T"), 60)


def test_jobs_on_one_node_use_different_ports(cluster, job, note, tmp_path):
    jobs = [job(1, "--nodes=1", "--nodelist=n3") for _ in range(2)]
    ports = {int(note(job_id, "n3").split()[1]) for job_id in jobs}
    assert len(ports) == 2 and abs(max(ports) - min(ports)) >= 200
    for job_id in jobs:
        note(job_id, "driver")
        cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    assert {cluster.finish(job_id, WITHIN_S)["JobState"] for job_id in jobs} == {"COMPLETED"}, job_log(
        tmp_path, jobs[0]
    )
    cluster.wait(lambda: nothing_is_left(cluster), 60)
