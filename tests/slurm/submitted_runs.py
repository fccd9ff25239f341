"""Training runs that `mrl train` submits to the Slurm cluster of the tests."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_cluster import SlurmCluster

LONG_S = 900.0  # deadline for a run that takes a minute on an idle machine

SETTINGS = dict(MRL_RAY_OPTIONS="--object-store-memory=200000000", MRL_JOIN_S="600", WANDB_MODE="offline")
"""Environment of the jobs, for a small and busy machine."""


@dataclass
class SubmittedRun:
    """A training run that is a Slurm job."""

    cluster: SlurmCluster
    job_id: str
    folder: Path

    def num_steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait(lambda: self.num_steps() >= step or self.ended(), LONG_S)
        assert self.num_steps() >= step and not self.ended(), self.logs()

    def ended(self) -> bool:
        return self.cluster.job(self.job_id).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED")

    def finish(self) -> dict[str, str]:
        return self.cluster.finish(self.job_id, LONG_S)

    def job_log(self) -> str:
        return (self.folder / f"logs/slurm_{self.job_id}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in (self.folder / "logs").glob("*.log"))

    def leftovers(self) -> dict[str, list[str]]:
        """Return node -> remaining processes and files of all jobs, for the nodes that have any."""
        processes = {node: [" ".join(p.cmdline()) for p in self.cluster.processes(node)] for node in self.cluster.nodes}
        files = {
            node: [str(f) for f in (self.cluster.folder / node / "tmp").glob("mrl-[0-9]*")]
            for node in self.cluster.nodes
        }
        return {node: processes[node] + files[node] for node in self.cluster.nodes if processes[node] + files[node]}


def submitter(cluster: SlurmCluster, overrides: list[str], base: Path) -> Callable[..., SubmittedRun]:
    """Return a function that submits runs with these overrides. The run directories are in `base`."""
    made: list[SubmittedRun] = []

    def run(*more: str, **variables: str) -> SubmittedRun:
        folder = base / f"run{len(made)}"
        size = ["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.slurm.exclusive=null"]
        line = [sys.executable, "-m", "mrl.cli", "train", *overrides, f"run.dir={folder}", *size, *more]
        output = cluster.run(*line, **SETTINGS | variables)
        found = re.search(r"job (\d+) is submitted", output)
        assert found, output
        made.append(SubmittedRun(cluster, found[1], folder))
        return made[-1]

    return run
