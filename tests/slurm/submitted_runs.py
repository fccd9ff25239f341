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


NOT_EXACT = ("time/", "spent/", "throughput/", "weight_sync/", "batch/")  # clocks
NOT_EXACT += ("mismatch/", "rollout/cached", "rollout/replaced", "rollout/retried")  # what batching and faults decide


def comparable(path: Path) -> list[dict]:
    """What a metrics file says of learning, step by step."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(NOT_EXACT)} for line in lines]


def check_the_same(left_alone: Path, struck: Path) -> None:
    """Both runs trained the same samples with the same numbers, and ended with the same weights."""
    import torch
    from safetensors.torch import load_file

    assert (struck / "ledger.jsonl").read_text() == (left_alone / "ledger.jsonl").read_text()
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert comparable(struck / name) == comparable(left_alone / name), name
    ours, theirs = (load_file(folder / "hf/model.safetensors") for folder in (struck, left_alone))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
