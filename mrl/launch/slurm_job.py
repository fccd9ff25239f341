"""Slurm jobs: writes and submits the batch script, which starts Ray on all nodes and runs `mrl train` or another command."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mrl.config.hydra_entry import format_override, is_override_to, override_key
from mrl.config.process_schema import ClusterConfig
from mrl.config.ray_settings import start_arguments
from mrl.core.code_locations import IS_CHECKOUT, PACKAGE_ROOT, SLURM

SCRIPT = "job.sbatch"  # name of the batch script in the run directory
SETTINGS = (
    "SCRIPTS",  # folder with the Slurm scripts, such as a changed copy of slurm/
    "CONTAINER",  # image in which the processes run
    "MOUNTS",  # additional folders that the container mounts
    "PYTHON",  # Python interpreter on the nodes
    "INTERFACE",  # network interface for Ray, gloo and NCCL
    "RAY_OPTIONS",  # additional options of `ray start`
    "DOCTOR_S",  # time limit (s) of `mrl doctor` before Ray starts
    "JOIN_S",  # time limit (s) for all nodes to join Ray
    "STOP_S",  # time limit (s) for the processes on the nodes to end
    "REQUEUES",  # largest number of requeues after a lost node
)
"""Names of the settings in slurm/env.sh, except CHECKOUT. The script gets the value of MRL_<name> in this process."""
SLURM_TIMEOUT_S = 120.0  # timeout of one call of sbatch or squeue
_REFUSED_OPTIONS = {"array", "wrap"}  # --array would submit several runs, and --wrap would run another command
_OPTION_NAME = re.compile(r"[a-z][a-z0-9_-]*")
# Prefixes of variables that a new job does not get: a file descriptor of this process (see mrl/launch/supervisor.py), and
# variables of the Slurm job in which this process may run.
_NOT_PASSED_ON = ("MRL_SUPERVISOR_PIPE", "SLURM_")


@dataclass(frozen=True)
class Job:
    """Content of a batch script."""

    # option of sbatch -> its value, "" if it takes no value; one mapping for each component of a heterogeneous job
    components: tuple[Mapping[str, str], ...]
    environment: Mapping[str, str]  # variables that the script exports
    arguments: tuple[str, ...]  # arguments of the command
    run_dir: Path
    command: str = "train"  # train, generate or evaluate

    @property
    def script(self) -> str:
        """The text of the batch script."""
        parts = ["\n".join(_directive(*option) for option in part.items()) for part in self.components]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        arguments = " \\\n    ".join(map(shlex.quote, self.arguments))
        lines = [
            "#!/usr/bin/env bash",
            f"# Written by `mrl {self.command}`. Submit it again with `sbatch` to continue the run.",
            "\n#SBATCH hetjob\n".join(parts),
            "",
            *exports,
            f'exec "$MRL_SCRIPTS/train.sbatch" \\\n    {arguments}',
        ]
        return "\n".join(lines) + "\n"


def make_job(cluster: ClusterConfig, name: str, run_dir: Path, overrides: Sequence[str], command: str = "train") -> Job:
    """Make the job that runs `mrl train`, or another command, with these overrides in this run directory.

    The job runs in the current working directory, so relative paths in the overrides stay valid. Raises ValueError if an option
    in cluster.slurm or cluster.components is malformed or not allowed.
    """
    sizes = {key: vars(cluster)[key] for key in ("nodes", "gpus_per_node")}
    for key in sizes.keys() & cluster.slurm:
        raise ValueError(f"cluster.slurm.{key}={cluster.slurm[key]}: this option has its own key; use cluster.{key}.")
    for key in _REFUSED_OPTIONS & cluster.slurm.keys():
        raise ValueError(
            f"cluster.slurm.{key}: not allowed, because a job trains one run; to use it, submit slurm/train.sbatch by hand "
            "(docs/tutorials/slurm.md)."
        )
    job_options = dict(job_name=f"mrl-{name}", chdir=os.getcwd(), output=_log_path(run_dir, "%j"))
    component_options = sizes | dict(ntasks_per_node=1) | cluster.slurm
    components = [_sbatch_options(job_options | component_options, "cluster.slurm")]
    components += [
        _sbatch_options(component_options | dict(nodes=1) | part, "cluster.components") for part in cluster.components
    ]
    arguments = (*_job_arguments(overrides), format_override("run.dir", run_dir))
    environment = _job_environment(cluster.ray) | ({} if command == "train" else {"MRL_COMMAND": command})
    return Job(tuple(components), environment, arguments, run_dir, command)


def make_array(cluster: ClusterConfig, name: str, folder: Path, indices: Sequence[int], max_running: int) -> Job:
    """Make a job array that runs some points of a sweep.

    Raises ValueError in the same cases as `make_job`, and for a heterogeneous job.

    Args:
        cluster: settings of the job.
        name: name of the job.
        folder: folder of the sweep.
        indices: indices of the points to run.
        max_running: largest number of points that run at the same time.
    """
    if cluster.components:
        raise ValueError(
            "cluster.components: a sweep is a job array, which cannot have components; omit this key in a sweep."
        )
    job = make_job(cluster, name, folder, [])
    tasks = f"{','.join(map(str, indices))}%{max_running}"
    (part,) = job.components
    options = {**part, "array": tasks, "output": _log_path(folder, "%A_%a")}
    environment = {**job.environment, "MRL_SWEEP": str(folder)}
    return Job(components=(options,), environment=environment, arguments=job.arguments, run_dir=folder)


def queued_tasks(job_id: str) -> set[int] | None:
    """Return the indices of the waiting and running tasks of a job array, or None if Slurm does not answer."""
    command = ["squeue", "--noheader", "--array", f"--job={job_id}", "--format=%K"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return set() if "Invalid job id" in done.stderr else None  # Slurm forgets a job some time after its end
    return {int(word) for word in done.stdout.split() if word.isdecimal()}


def submit(job: Job) -> str:
    """Write the script into the run directory, submit it, and return the job id. Raises ValueError if sbatch fails."""
    if not (sbatch := shutil.which("sbatch")):
        raise ValueError(
            "the command sbatch is not on this machine; run this on a login node of the cluster, or add --dry-run."
        )
    command = [sbatch, "--parsable", str(script := write_script(job))]
    try:
        done = subprocess.run(
            command, env=_original_environment(), capture_output=True, text=True, timeout=SLURM_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"sbatch did not answer in {SLURM_TIMEOUT_S:g} s; `squeue --me` shows whether it accepted {script}."
        ) from None
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def write_script(job: Job) -> Path:
    """Write the script, create the folder for its log, and return the path of the script."""
    (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = job.run_dir / SCRIPT
    path.write_text(job.script)
    path.chmod(0o755)
    return path


def submission_message(job: Job, job_id: str) -> str:
    """Return a text that explains how to follow, preempt and cancel a submitted job."""
    log = job.components[0].get("output", "").replace("%j", job_id).replace("%%", "%")
    saves = "saves a checkpoint" if job.command == "train" else "finished files are kept"
    own_folder = "" if job.command == "train" else f" with {format_override('run.dir', job.run_dir)}"
    return (
        f"job {job_id} is submitted; its script is {job.run_dir / SCRIPT}\n"
        f"  follow   squeue --job {job_id}; tail -F {log} {job.run_dir / 'logs/driver.log'}\n"
        f"  preempt  scancel --batch --signal=USR1 {job_id}   ({saves}; then the job is queued again)\n"
        f"  cancel   scancel {job_id}   (to continue later, run the same `mrl {job.command}` command again{own_folder})\n"
        f"run directory: {job.run_dir}\n"
    )


def _log_path(folder: Path, name: str) -> str:
    """Return the path of a log in the syntax of sbatch, where %% stands for the character %."""
    return f"{str(folder).replace('%', '%%')}/logs/slurm_{name}.log"


def _sbatch_options(section: Mapping[str, Any], key: str) -> dict[str, str]:
    """Return the options in a config section as texts for sbatch. Omits null, false and gpus_per_node=0.

    `key`: name of the section in error messages.
    """
    options = {}
    for name, value in section.items():
        plain = "" if value is True else str(value)
        if not _OPTION_NAME.fullmatch(str(name)) or not plain.isprintable() or isinstance(value, list | dict):
            raise ValueError(
                f"{key}.{name}={value!r}: expected the name of an option of sbatch and a value in one line."
            )
        if not (value is None or value is False or (name, value) == ("gpus_per_node", 0)):
            options[name.replace("_", "-")] = plain
    return options


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={_quote(value)}" if value else "")


def _quote(value: str) -> str:
    """Return a value in the syntax of sbatch. A value with whitespace, a quote, # or a backslash gets double quotes.

    Double quotes and backslashes in the value get a backslash.
    """
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"' if re.search(r"[\s\"'#\\]", value) else value


def _job_environment(ray: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of the batch script. `ray`: the key cluster.ray."""
    settings = {f"MRL_{name}": os.environ.get(f"MRL_{name}", "") for name in SETTINGS}
    settings["MRL_RAY_OPTIONS"] = " ".join([*start_arguments(ray), *settings["MRL_RAY_OPTIONS"].split()])
    if not settings["MRL_CONTAINER"]:
        settings["MRL_PYTHON"] = settings["MRL_PYTHON"] or sys.executable
    settings["MRL_SCRIPTS"] = settings["MRL_SCRIPTS"] or str(SLURM)
    return {"MRL_CHECKOUT": str(PACKAGE_ROOT) if IS_CHECKOUT else ""} | {
        name: value for name, value in settings.items() if value
    }


def _job_arguments(overrides: Sequence[str]) -> list[str]:
    """Return the overrides for the job, without run.dir, cluster.dry_run and `resume=never`.

    The login node has already checked `resume=never`. A requeued job must be able to resume.
    """
    dropped = ("run.dir", "cluster.dry_run")
    return [
        each for each in overrides if not is_override_to(each, "resume", "never") and override_key(each) not in dropped
    ]


def _original_environment() -> dict[str, str]:
    """Return the environment with which this process started, without the variables that a new job must not get.

    The result does not contain variables that libraries have set after the start.
    """
    original = psutil.Process().environ()
    kept = {name: value for name, value in original.items() if not name.startswith(_NOT_PASSED_ON)}
    return kept | {name: original[name] for name in ("SLURM_CONF",) if name in original}
