"""The batch scripts of slurm/ with stand-ins for Slurm's commands and for Python: what they start, say and leave behind."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from mrl_runs import leftovers, signal_all

from mrl.config.hydra_entry import format_override

JOB = 10**6 + os.getpid()  # id of the job, which no other process of the tests uses
SLURM = Path(__file__).resolve().parents[2] / "slurm"

SRUN = """#!/usr/bin/env bash
# Starts a command once on each node it is for: in turn the names that FAKE_NODES has.
echo "srun $*" >>"$FAKE/calls"
on=$FAKE_NODES log=/dev/stdout
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) on=${1#*=} ;; --output=*) log=${1#*=} ;; esac
    shift
done
pids=() id=0
trap 'kill -TERM "${pids[@]}"' TERM
trap 'kill -USR1 "${pids[@]}"' USR1
for node in $on; do
    SLURMD_NODENAME=$node SLURM_PROCID=$id "$@" >>"${log//%N/$node}" 2>&1 &
    pids+=($!) id=$((id + 1))
done
status=0
for pid in "${pids[@]}"; do
    while :; do wait $pid; s=$?; kill -0 $pid 2>/dev/null || break; done
    [ $s -le $status ] || status=$s
done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$FAKE/calls"
[ "$1" != show ] || tr ' ' '\\n' <<<"$FAKE_NODES"
"""
SQUEUE = '#!/bin/sh\necho "squeue $*" >>"$FAKE/calls"\nprintf "${FAKE_STATE:-RUNNING}\\n"\n'
SINFO = '#!/bin/sh\necho "${FAKE_NODE:-mixed}"\n'
SLEEP = '#!/bin/sh\n[ "$1" = 60 ] || exec /bin/sleep "$@"\n'  # does not wait until Slurm ends the script
APPTAINER = '#!/usr/bin/env bash\necho "apptainer $*" >>"$FAKE/calls"\nshift 5\nexec "$@"\n'
PYTHON = """#!{python}
import json, os, signal, socket, subprocess, sys, time
assert sys.argv.pop(1) == "-P", "modules in the working directory do not hide those of mrl"
fake, module = os.environ["FAKE"], sys.argv[2]
with open(f"{{fake}}/started", "a") as file:
    names = ("SLURMD_NODENAME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG_FILE")
    file.write(json.dumps(dict(argv=sys.argv[2:], env={{name: os.environ.get(name) for name in names}})) + "\\n")
if module == "ray.scripts.scripts":
    options = dict(word.partition("=")[::2] for word in sys.argv[4:])
    temp_dir = options["--temp-dir"]
    os.makedirs(temp_dir + "/session_latest/logs")
    os.chmod(temp_dir, 0o777)  # what Ray does
    open(temp_dir + "/session_latest/logs/raylet.out", "w").write(f"{{os.stat(os.path.dirname(temp_dir)).st_mode:o}}")
    open(f"{{fake}}/ray_on_{{os.environ['SLURMD_NODENAME']}}", "w").close()
    if "--head" in options:
        listener = socket.create_server((options["--node-ip-address"], int(options["--port"])))
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)  # a daemon that Slurm may lose sight of
    time.sleep(600)
elif module == "mrl.placement.ray_cluster":
    address, timeout_s, *nodes = sys.argv[3:]
    for name, seconds in (("FAKE_JOINED", os.environ["MRL_JOIN_S"]), ("FAKE_LOST", "5")):
        if name in os.environ and seconds == timeout_s:
            sys.exit(int(os.environ[name]))
    while not all(os.path.exists(f"{{fake}}/ray_on_{{node}}") for node in nodes):
        time.sleep(0.05)
elif module == "mrl.commands.doctor":
    if os.environ.get("FAKE_DOCTOR") == "wait":
        time.sleep(60)
    sys.exit(int(os.environ.get("FAKE_DOCTOR", "0")))
elif module == "mrl.cli":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    open(f"{{fake}}/driver", "w").close()
    if os.environ.get("FAKE_STATUS") == "wait":
        time.sleep(60)
    sys.exit(int(os.environ.get("FAKE_STATUS", "0")))
"""


@dataclass
class Batch:
    """A batch script that runs with stand-ins."""

    folder: Path
    process: subprocess.Popen

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def started(self, module: str) -> list[dict]:
        lines = map(json.loads, (self.folder / "started").read_text().splitlines())
        return [line for line in lines if line["argv"][0] == module]

    def ray_of(self, node: str) -> dict[str, str]:
        """Return the options of `ray start` on a node."""
        (line,) = [each for each in self.started("ray.scripts.scripts") if each["env"]["SLURMD_NODENAME"] == node]
        return dict(word.partition("=")[::2] for word in line["argv"][2:])

    def leftovers(self, within_s: float = 10) -> list[psutil.Process]:
        """Return the processes that are still running after `within_s` seconds."""
        return leftovers(str(self.folder), within_s, "FAKE")


@pytest.fixture
def batch(tmp_path):
    """`batch(argument, ..., NAME=value)` runs train.sbatch with these arguments and variables."""
    tools = dict(srun=SRUN, scontrol=SCONTROL, squeue=SQUEUE, sinfo=SINFO, sleep=SLEEP, apptainer=APPTAINER)
    tools["python"] = PYTHON.format(python=sys.executable)
    made = []
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        (path := tmp_path / "bin" / name).write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(*arguments: str, **variables: str) -> Batch:
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        env = kept | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "FAKE": str(tmp_path),
            "FAKE_NODES": "n1 n2",
            "MRL_CHECKOUT": str(SLURM.parent),
            "MRL_PYTHON": str(tmp_path / "bin/python"),
            "MRL_JOIN_S": "60",
            "MRL_STOP_S": "30",
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURMD_NODENAME": "n1",
            "SLURM_CPUS_ON_NODE": "3",
        }
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen(
                ["bash", str(SLURM / "train.sbatch"), *arguments],
                env=env | variables,
                cwd=tmp_path,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        made.append(Batch(tmp_path, process))
        return made[-1]

    yield run
    for each in made:
        each.process.kill()
        signal_all(each.leftovers(0))


@pytest.mark.extended
def test_a_job_starts_ray_on_every_node_and_leaves_none_of_its_processes(batch, tmp_path):
    job = batch("experiment=x", "run.dir=mine", PYTHONPATH="/of/mine")
    assert job.end() == 0, job.said
    head, other = job.ray_of("n1"), job.ray_of("n2")
    assert "--head" in head and other["--address"] == f"{head['--node-ip-address']}:{head['--port']}"
    (driver,) = job.started("mrl.cli")
    run_dir, address = f'run.dir="{tmp_path / "mine"}"', f"cluster.address={other['--address']}"
    assert driver["argv"] == ["mrl.cli", "train", "experiment=x", "run.dir=mine", run_dir, address]
    assert driver["env"]["PYTHONPATH"] == f"{SLURM.parent}:/of/mine"
    assert job.leftovers() == [] and not list(Path("/tmp").glob(f"mrl-{JOB}.*"))
    logs = {str(path.relative_to(tmp_path / "mine/logs")) for path in (tmp_path / "mine/logs").rglob("*")}
    assert logs >= {"driver.log", "ray_n1.log", "ray_n2.log", "ray_n1/raylet.out", "ray_n2/raylet.out"}
    for node in ("n1", "n2"):
        mode = (tmp_path / f"mine/logs/ray_{node}/raylet.out").read_text()
        assert mode == "40700", "other users cannot enter the folder of Ray"


@pytest.mark.extended
def test_a_job_of_another_command_runs_this_command_and_checks_only_the_machines(batch, tmp_path):
    job = batch("generate.samples=4", "run.dir=mine", MRL_COMMAND="generate")
    assert job.end() == 0, job.said
    ((driver,), doctors) = job.started("mrl.cli"), job.started("mrl.commands.doctor")
    assert driver["argv"][:3] == ["mrl.cli", "generate", "generate.samples=4"]
    assert len(doctors) == 2 and not any("generate.samples=4" in each["argv"] for each in doctors)
    assert "mrl generate ended with status 0" in job.said


@pytest.mark.extended
def test_the_token_is_random_and_in_no_command_line_log_or_file(batch, tmp_path):
    job = batch("run.dir=mine")
    assert job.end() == 0, job.said
    envs = [line["env"] for module in ("ray.scripts.scripts", "mrl.cli") for line in job.started(module)]
    (token,) = {env["RAY_AUTH_TOKEN"] for env in envs}
    assert len(token) == 64 and {env["RAY_AUTH_MODE"] for env in envs} == {"token"}
    assert not any(token in " ".join(line["argv"]) for line in job.started("ray.scripts.scripts"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "started"]
    assert files and not any(token.encode() in path.read_bytes() for path in files)


PORTS = ("port", "node-manager-port", "object-manager-port", "ray-client-server-port", "runtime-env-agent-port")
PORTS += ("dashboard-agent-grpc-port", "dashboard-agent-listen-port", "metrics-export-port")


def ports(options: dict[str, str]) -> set[int]:
    fixed = {int(options[f"--{name}"]) for name in PORTS}
    return fixed | set(range(int(options["--min-worker-port"]), int(options["--max-worker-port"]) + 1))


@pytest.mark.extended
def test_two_jobs_on_a_node_have_different_ports(batch, tmp_path):
    """Job ids that differ by the number of port blocks select the same block; the second job takes the next block."""
    first = batch("run.dir=a", FAKE_STATUS="wait", FAKE_NODES="n1")
    wait_for(tmp_path / "driver")
    ours = ports(first.ray_of("n1"))
    assert len(ours) == 198 and min(ours) >= 12000 and max(ours) < 32768, "below the ports that the system gives away"
    (tmp_path / "started").unlink()
    (tmp_path / "ray_on_n1").unlink()  # otherwise the second job would not wait for its own Ray
    second = batch("run.dir=b", FAKE_NODES="n1", SLURM_JOB_ID=str(JOB + 10**7))
    assert second.end() == 0, second.said
    assert not ours & ports(second.ray_of("n1"))
    first.process.send_signal(signal.SIGUSR1)
    assert first.end() == 75


def wait_for(path: Path, within_s: float = 30) -> None:
    end = time.monotonic() + within_s
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)


ENDS = {  # event -> (variables of the stand-ins, exit status of the job, whether the job is queued again)
    "success": (dict(FAKE_STATUS="0"), 0, False),
    "a mistake in the config": (dict(FAKE_STATUS="2"), 2, False),
    "preempted": (dict(FAKE_STATUS="75"), 75, True),
    "cancelled": (dict(FAKE_STATUS="75", FAKE_STATE="COMPLETING"), 75, False),
    "an error": (dict(FAKE_STATUS="1"), 1, False),
    "a lost node": (dict(FAKE_STATUS="1", FAKE_LOST="1"), 75, True),
    "a lost node after many time limits": (dict(FAKE_STATUS="1", FAKE_LOST="1", SLURM_RESTART_COUNT="9"), 75, True),
    "a lost node without requeues": (dict(FAKE_STATUS="1", FAKE_LOST="1", MRL_REQUEUES="0"), 1, False),
    "preempted as a heterogeneous job": (dict(FAKE_STATUS="75", FAKE_STATE="RUNNING\\nRUNNING"), 75, True),
    "a node that does not join": (dict(FAKE_JOINED="1"), 1, False),
    "warnings of the doctor": (dict(FAKE_DOCTOR="1"), 0, False),
    "errors of the doctor": (dict(FAKE_DOCTOR="2"), 2, False),
    "a killed doctor": (dict(FAKE_DOCTOR="137"), 2, False),
    "no doctor": (dict(FAKE_DOCTOR="2", MRL_DOCTOR_S="0"), 0, False),
    "a node lost before the doctor": (dict(FAKE_DOCTOR="2", FAKE_NODE="idle*"), 75, True),
    "a node lost before the doctor without requeues": (
        dict(FAKE_DOCTOR="2", FAKE_NODE="idle*", MRL_REQUEUES="0"),
        2,
        False,
    ),
}


@pytest.mark.extended_except("success", "preempted", "errors of the doctor")
@pytest.mark.parametrize(("variables", "status", "queued_again"), ENDS.values(), ids=ENDS)
def test_the_exit_status_of_a_job_and_whether_it_is_queued_again(batch, variables, status, queued_again):
    job = batch("run.dir=mine", **variables)
    assert job.end() == status, job.said
    assert any(call.startswith("scontrol requeue") for call in job.calls) == queued_again
    doctored = variables.get("FAKE_DOCTOR") in ("2", "137") and "MRL_DOCTOR_S" not in variables
    refused = "FAKE_JOINED" in variables or doctored
    assert (job.folder / "driver").exists() == (not refused)
    assert job.leftovers() == []


@pytest.mark.extended
def test_a_preempted_job_lets_the_run_save_and_is_queued_again(batch, tmp_path):
    job = batch("run.dir=mine", FAKE_STATUS="wait")
    wait_for(tmp_path / "driver")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75, job.said
    assert f"scontrol requeue {JOB}" in job.calls and job.leftovers() == []


def test_a_job_preempted_before_ray_is_up_starts_nothing_more(batch, tmp_path):
    job = batch("run.dir=mine")
    wait_for(tmp_path / "calls")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75, job.said
    assert not (tmp_path / "driver").exists() and job.leftovers() == []


def test_the_doctor_checks_every_node_before_ray_starts(batch, tmp_path):
    job = batch("experiment=x", "run.dir=mine", FAKE_DOCTOR="2")
    assert job.end() == 2 and "the run does not start, because the doctor has found errors" in job.said
    seen = job.started("mrl.commands.doctor")
    assert {one["env"]["SLURMD_NODENAME"] for one in seen} == {"n1", "n2"}
    meeting = f"--rendezvous={tmp_path}/mine/doctor-{JOB}-0"
    options = ["--deadline=120", "--hosts=2", meeting, "experiment=x", "run.dir=mine", f'run.dir="{tmp_path}/mine"']
    assert seen[0]["argv"] == ["mrl.commands.doctor", *options]
    assert not job.started("ray.scripts.scripts")


def test_a_job_preempted_during_the_doctors_checks_starts_nothing_more(batch, tmp_path):
    job = batch("run.dir=mine", FAKE_DOCTOR="wait")
    wait_for(tmp_path / "started")
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75, job.said
    assert not job.started("ray.scripts.scripts") and job.leftovers() == []


@pytest.mark.extended
def test_logs_of_nccl_are_in_the_runs_folder(batch, tmp_path):
    job = batch("run.dir=mine", NCCL_DEBUG="INFO")
    assert job.end() == 0, job.said
    found = {line["env"]["NCCL_DEBUG_FILE"] for line in job.started("ray.scripts.scripts")}
    assert found == {f"{tmp_path}/mine/logs/nccl_%h_%p.log"}


@pytest.mark.extended
def test_lost_nodes_are_counted_over_the_starts_of_a_job(batch, tmp_path):
    for status in (75, 75, 1):
        job = batch("run.dir=mine", FAKE_STATUS="1", FAKE_LOST="1", MRL_REQUEUES="2")
        assert job.end() == status, job.said


@pytest.mark.extended
def test_a_task_of_an_array_is_queued_again_alone_and_the_doctor_checks_its_own_point(batch, tmp_path):
    array = dict(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3", MRL_SWEEP=f"{tmp_path}/sweep")
    job = batch("run.dir=sweep", FAKE_STATUS="75", **array)
    assert job.end() == 0, "the stand-in has no mrl.sweep.points"
    (doctor, _) = job.started("mrl.commands.doctor")
    assert doctor["argv"][-1] == f"--point={tmp_path}/sweep/3"
    job.process = batch("run.dir=sweep", FAKE_STATUS="75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3").process
    assert job.end() == 75
    assert "squeue --noheader --job=7_3 --format=%T" in job.calls and "scontrol requeue 7_3" in job.calls


@pytest.mark.extended
@pytest.mark.parametrize("name", ["a b", "lr=1e-4", "ü(1)", "50%", 'quo"te', "it's"])
def test_a_folder_may_have_any_name(batch, tmp_path, name):
    job = batch(format_override("run.dir", tmp_path / name))
    assert job.end() == 0, job.said
    (driver,) = job.started("mrl.cli")
    overrides = OverridesParser.create().parse_overrides(driver["argv"][2:-1])
    assert {each.value() for each in overrides} == {f"{tmp_path}/{name}"}
    assert (tmp_path / name / "logs/driver.log").exists()


@pytest.mark.extended
def test_a_task_of_an_array_has_a_folder_of_its_own(batch, tmp_path):
    job = batch("run.dir=sweep", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert job.end() == 0, job.said
    assert (tmp_path / "sweep/3/logs/driver.log").exists() and not (tmp_path / "sweep/logs").exists()


@pytest.mark.extended
def test_a_heterogeneous_job_has_all_its_parts_in_one_cluster(batch):
    variables = dict(SLURM_HET_SIZE="2", SLURM_JOB_NODELIST_HET_GROUP_1="n3", FAKE_NODES="n1 n2 n3")
    job = batch("run.dir=mine", **variables)
    assert job.end() == 0, job.said
    assert "scontrol show hostnames n[1-2],n3" in job.calls
    (everywhere,) = [call for call in job.calls if "ray_cluster.sh node" in call]
    (doctor,) = [call for call in job.calls if "mrl.commands.doctor" in call]
    assert all("--het-group=0-1 " in call for call in (everywhere, doctor)) and job.ray_of("n3")
    on_head = [call for call in job.calls if call.startswith("srun") and call not in (everywhere, doctor)]
    assert len(on_head) == 2 and all("--het-group=0 " in call for call in on_head)


@pytest.mark.extended
def test_one_variable_runs_every_process_in_an_apptainer_image(batch, tmp_path):
    job = batch("run.dir=mine", MRL_CONTAINER="/images/mrl.sif", MRL_MOUNTS="/data,/scratch:/s")
    assert job.end() == 0, job.said
    inside = [call for call in job.calls if call.startswith("apptainer")]
    assert len(inside) == 6, "the doctor and Ray on two nodes, the look at them, and the run"
    folders = [f"{folder}:{folder}" for folder in (SLURM.parent, SLURM, tmp_path, tmp_path / "mine", "/tmp", "/data")]
    binds = ",".join([*folders, "/scratch:/s"])
    assert all(call.startswith(f"apptainer exec --nv --bind {binds} /images/mrl.sif ") for call in inside)


@pytest.mark.extended
def test_a_checkout_whose_path_has_a_space_is_one_mount(batch, tmp_path):
    checkout = tmp_path / "my checkout"
    checkout.symlink_to(SLURM.parent)
    variables = dict(MRL_CHECKOUT=str(checkout), MRL_SCRIPTS=str(SLURM), MRL_CONTAINER="/images/mrl.sif")
    job = batch("run.dir=mine", **variables)
    assert job.end() == 0, job.said
    inside = [call for call in job.calls if call.startswith("apptainer")]
    assert inside and all(f"--bind {checkout}:{checkout},{SLURM}:{SLURM}," in call for call in inside)


@pytest.mark.extended
def test_any_other_image_runs_with_pyxis(batch, tmp_path):
    job = batch("run.dir=mine", MRL_CONTAINER="ghcr.io#me/mrl:1")
    assert job.end() == 0, job.said
    steps = [call for call in job.calls if call.startswith("srun")]
    folders = (SLURM.parent, SLURM, tmp_path, tmp_path / "mine", "/tmp")
    mounts = f"--container-mounts={','.join(f'{folder}:{folder}' for folder in folders)}"
    assert len(steps) == 4 and all(f"--container-image=ghcr.io#me/mrl:1 {mounts}" in call for call in steps)
