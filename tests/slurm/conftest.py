"""A Slurm cluster, and runs that `mrl train` submits to it."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import slurm_lab

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from e2e.conftest import inputs, make_once, quickstart, start_mrl, warm  # noqa: F401

LONG_S = 900.0  # for anything that takes a minute on a machine of its own


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Three nodes with two GPUs each. Only the tests' folder and the checkout are on all of them."""
    if why := slurm_lab.lacks():
        pytest.skip(f"a Slurm cluster on this machine: it {why}")
    made = slurm_lab.Lab(3, 2, [tmp_path_factory.getbasetemp(), Path(__file__).resolve().parents[2]])
    yield made
    made.close()


@dataclass
class Submitted:
    """A run that is a job."""

    lab: slurm_lab.Lab
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


@pytest.fixture
def submit(lab, quickstart, tmp_path) -> Callable[..., Submitted]:  # noqa: F811
    """`submit(key=value, ..., name=...)`: what `mrl train cluster=slurm` on the login node makes a job of."""
    return submitter(lab, quickstart, tmp_path)


def submitter(lab: slurm_lab.Lab, overrides: list[str], base: Path) -> Callable[..., Submitted]:
    made: list[Submitted] = []

    def run(*more: str, **variables: str) -> Submitted:
        folder = base / f"run{len(made)}"
        size = ["cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.slurm.exclusive=null"]
        line = [sys.executable, "-m", "mrl.cli", "train", *overrides, f"run.dir={folder}", *size, *more]
        options = dict(MRL_RAY_OPTIONS="--object-store-memory=200000000", WANDB_MODE="offline")
        said = lab.run(*line, **options | variables)
        found = re.search(r"job (\d+) is submitted", said)
        assert found, said
        made.append(Submitted(lab, found[1], folder))
        return made[-1]

    return run
