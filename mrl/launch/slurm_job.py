"""A run as a Slurm job: the batch script that brings up Ray and calls `mrl train` there, and its submission."""

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

from mrl.config.overrides import key_of, override, sets
from mrl.config.schema import ClusterConfig

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = "job.sbatch"  # in the run's folder
SETTINGS = ("CONTAINER", "MOUNTS", "PYTHON", "INTERFACE", "RAY_OPTIONS", "DOCTOR_S", "JOIN_S", "STOP_S", "REQUEUES")
"""Of slurm/env.sh: MRL_<name> goes from the environment of the command into the script."""
SUBMIT_S = 120.0  # for sbatch to answer
_ONE_RUN = {"array", "wrap"}
_OPTION = re.compile(r"[a-z][a-z0-9_-]*")
_HANDED_DOWN = ("MRL_SUPERVISOR_PIPE", "SLURM_")  # variables of this command or of a job around it, not of ours


@dataclass(frozen=True)
class Job:
    """What the batch script says."""

    components: tuple[Mapping[str, str], ...]  # options of sbatch, name -> value ("": without one), of each part
    environment: Mapping[str, str]
    arguments: tuple[str, ...]  # of mrl train
    run_dir: Path

    @property
    def script(self) -> str:
        """The text of the batch script."""
        parts = ["\n".join(_directive(*option) for option in part.items()) for part in self.components]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        arguments = " \\\n    ".join(map(shlex.quote, self.arguments))
        lines = [
            "#!/usr/bin/env bash",
            "# Written by `mrl train`; `sbatch` takes it again: the run goes on where it was.",
            "\n#SBATCH hetjob\n".join(parts),
            "",
            *exports,
            f'exec "$MRL_CHECKOUT/slurm/train.sbatch" \\\n    {arguments}',
        ]
        return "\n".join(lines) + "\n"


def make_job(cluster: ClusterConfig, name: str, run_dir: Path, overrides: Sequence[str]) -> Job:
    """The job that runs `mrl train` with these overrides in this folder; raises ValueError.

    It is called where the command is, so that relative paths mean the same.
    """
    asked = {each: vars(cluster)[each] for each in ("nodes", "gpus_per_node", "partition", "time")}
    for key in asked.keys() & cluster.slurm:
        raise ValueError(f"cluster.slurm.{key}={cluster.slurm[key]}: has a key of its own; use cluster.{key}.")
    for key in _ONE_RUN & cluster.slurm.keys():
        raise ValueError(
            f"cluster.slurm.{key}: a job is one run here; submit slurm/train.sbatch by hand (docs/slurm.md)."
        )
    once = dict(job_name=f"mrl-{name}", chdir=os.getcwd(), output=_log(run_dir, "%j"))
    each = asked | dict(ntasks_per_node=1) | cluster.slurm
    parts = [_options(once | each, "cluster.slurm")]
    parts += [_options(each | dict(nodes=1) | part, "cluster.components") for part in cluster.components]
    return Job(tuple(parts), _environment(), (*_arguments(overrides), override("run.dir", run_dir)), run_dir)


def make_array(cluster: ClusterConfig, name: str, folder: Path, indices: Sequence[int], at_once: int) -> Job:
    """The array job that runs these points of the sweep in `folder`, `at_once` at one time; raises ValueError."""
    if cluster.components:
        raise ValueError("cluster.components: a heterogeneous job cannot be an array; leave them out of a sweep.")
    job = make_job(cluster, name, folder, [])
    tasks = f"{','.join(map(str, indices))}%{at_once}"
    (part,) = job.components
    options = {**part, "array": tasks, "output": _log(folder, "%A_%a")}
    return Job((options,), {**job.environment, "MRL_SWEEP": str(folder)}, job.arguments, folder)


def queued(job_id: str) -> set[int] | None:
    """Tasks of an array that wait or run; None where Slurm does not answer."""
    line = ["squeue", "--noheader", "--array", f"--job={job_id}", "--format=%K"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=SUBMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return set() if "Invalid job id" in done.stderr else None  # it has forgotten a job that ended
    return {int(word) for word in done.stdout.split() if word.isdecimal()}


def submit(job: Job) -> str:
    """Write the script into the run's folder and submit it; returns the job's id. Raises ValueError where sbatch refuses."""
    if not (sbatch := shutil.which("sbatch")):
        raise ValueError("there is no sbatch here; call this on a login node of the cluster, or add --dry-run.")
    line = [sbatch, "--parsable", str(script := write(job))]
    try:
        done = subprocess.run(line, env=_own(), capture_output=True, text=True, timeout=SUBMIT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"sbatch did not answer in {SUBMIT_S:g} s; `squeue --me` tells whether it took {script}."
        ) from None
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout.strip().split(";")[0]


def write(job: Job) -> Path:
    """Write the script, and make the folder of its log."""
    (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = job.run_dir / SCRIPT
    path.write_text(job.script)
    path.chmod(0o755)
    return path


def told(job: Job, job_id: str) -> str:
    """What a user wants to know of a job that was submitted."""
    log = job.components[0].get("output", "").replace("%j", job_id).replace("%%", "%")
    return (
        f"job {job_id} is submitted; its script is {job.run_dir / SCRIPT}\n"
        f"  follow  squeue --job {job_id}; tail -F {log} {job.run_dir / 'logs/driver.log'}\n"
        f"  leave   scancel --batch --signal=USR1 {job_id}   (saves; then it is queued again)\n"
        f"  cancel  scancel {job_id}   (the same command goes on from the last checkpoint)\n"
        f"everything will be in {job.run_dir}\n"
    )


def _log(folder: Path, name: str) -> str:
    """In sbatch's words, where % begins a name of its own."""
    return f"{str(folder).replace('%', '%%')}/logs/slurm_{name}.log"


def _options(section: Mapping[str, Any], key: str) -> dict[str, str]:
    """Options as sbatch has them; what is null or false is left out, and so are no GPUs."""
    options = {}
    for name, value in section.items():
        plain = "" if value is True else str(value)
        if not _OPTION.fullmatch(str(name)) or not plain.isprintable() or isinstance(value, list | dict):
            raise ValueError(f"{key}.{name}={value!r}: expected the name of an option of sbatch, and one line of text.")
        if not (value is None or value is False or (name, value) == ("gpus_per_node", 0)):
            options[name.replace("_", "-")] = plain
    return options


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "")


def _quoted(value: str) -> str:
    """As sbatch reads it: quotes keep spaces together, and a backslash before one keeps it."""
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"' if re.search(r"[\s\"'#\\]", value) else value


def _environment() -> dict[str, str]:
    given = {f"MRL_{name}": os.environ.get(f"MRL_{name}", "") for name in SETTINGS}
    if not given["MRL_CONTAINER"]:
        given["MRL_PYTHON"] = given["MRL_PYTHON"] or sys.executable
    return {"MRL_CHECKOUT": str(CHECKOUT)} | {name: value for name, value in given.items() if value}


def _arguments(overrides: Sequence[str]) -> list[str]:
    """`resume=never` was heeded when the run was submitted: a job that is queued again must go on."""
    here = ("run.dir", "cluster.dry_run")
    return [each for each in overrides if not sets(each, "resume", "never") and key_of(each) not in here]


def _own() -> dict[str, str]:
    """The environment that the command was called with: libraries have set variables since that are not for the job."""
    given = psutil.Process().environ()
    kept = {name: value for name, value in given.items() if not name.startswith(_HANDED_DOWN)}
    return kept | {name: given[name] for name in ("SLURM_CONF",) if name in given}
