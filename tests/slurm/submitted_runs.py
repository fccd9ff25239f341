"""Runs that `mrl train` submits to the Slurm cluster of a lab."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurm_lab import Lab

LONG_S = 900.0  # for anything that takes a minute on a machine of its own

SETTINGS = dict(MRL_RAY_OPTIONS="--object-store-memory=200000000", MRL_JOIN_S="600", WANDB_MODE="offline")
"""Of jobs on a machine that is small and busy."""


@dataclass
class Submitted:
    """A run that is a job."""

    lab: Lab
    job_id: str
    folder: Path

    def num_steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        self.lab.wait(lambda: self.num_steps() >= step or self.ended(), LONG_S)
        assert self.num_steps() >= step and not self.ended(), self.logs()

    def ended(self) -> bool:
        return self.lab.job(self.job_id).get("JobState") in ("COMPLETED", "FAILED", "CANCELLED")

    def finish(self) -> dict[str, str]:
        return self.lab.finish(self.job_id, LONG_S)

    def said(self) -> str:
        return (self.folder / f"logs/slurm_{self.job_id}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in (self.folder / "logs").glob("*.log"))

    def leftovers(self) -> dict[str, list[str]]:
        """Processes and files that nodes still have of any job."""
        processes = {node: [" ".join(p.cmdline()) for p in self.lab.processes(node)] for node in self.lab.nodes}
        files = {node: [str(f) for f in (self.lab.folder / node / "tmp").glob("mrl-[0-9]*")] for node in self.lab.nodes}
        return {node: processes[node] + files[node] for node in self.lab.nodes if processes[node] + files[node]}


def submitter(lab: Lab, overrides: list[str], base: Path) -> Callable[..., Submitted]:
    made: list[Submitted] = []

    def run(*more: str, **variables: str) -> Submitted:
        folder = base / f"run{len(made)}"
        size = ["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.slurm.exclusive=null"]
        line = [sys.executable, "-m", "mrl.cli", "train", *overrides, f"run.dir={folder}", *size, *more]
        said = lab.run(*line, **SETTINGS | variables)
        found = re.search(r"job (\d+) is submitted", said)
        assert found, said
        made.append(Submitted(lab, found[1], folder))
        return made[-1]

    return run
