"""Runs `mrl` as a user does, and sees to it that every process it started is gone afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

TAG = "MRL_TEST_RUN"


def tagged(tag: str) -> list[psutil.Process]:
    """Processes that inherited the environment of one run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass
class Run:
    """One `mrl` process and what it left."""

    folder: Path
    tag: str
    process: subprocess.Popen

    def finish(self, timeout_s: float = 240) -> "Run":
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(f"no end after {timeout_s} s:\n{self.output()[-3000:]}") from None
        return self

    def output(self) -> str:
        return (self.folder / "terminal.log").read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def leftovers(self, within_s: float = 30) -> list[psutil.Process]:
        """Processes of the run that still live after `within_s` seconds."""
        end = time.monotonic() + within_s
        while (alive := tagged(self.tag)) and time.monotonic() < end:
            time.sleep(0.2)
        return alive


@pytest.fixture
def start_mrl(tmp_path_factory):
    """`start_mrl("train", "key=value", ...)` -> Run; whatever is left of it is killed after the test."""
    runs: list[Run] = []

    def start(command: str, *overrides: str) -> Run:
        folder, tag = tmp_path_factory.mktemp("run"), uuid.uuid4().hex
        env = os.environ | {TAG: tag, "WANDB_MODE": "offline"}
        line = [sys.executable, "-m", "mrl.cli", command, f"run.dir={folder}", *overrides]
        with (folder / "terminal.log").open("w") as log:
            run = Run(folder, tag, subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=env))
        runs.append(run)
        return run

    yield start
    for run in runs:
        for process in tagged(run.tag):
            process.kill()


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """The quickstart's files, made once."""
    from mrl.data.arithmetic import make_inputs

    folder = tmp_path_factory.mktemp("quickstart") / "inputs"
    make_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def quickstart(inputs) -> list[str]:
    """Overrides that make the quickstart small: no warm start, few rows, the shared inputs."""
    return [
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "sft=null",
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "trainer.eval_rows=16",
        "trainer.stop_reward=null",
    ]
