"""Runs `mrl` as a user does, and sees to it that every process it started is gone afterwards."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

TAG = "MRL_TEST_RUN"
PATIENCE = 3  # times what a run takes on a machine of its own: how long nobody minds


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
            self.process.wait(PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise AssertionError(f"no end after {PATIENCE * timeout_s} s:\n{self.output()[-3000:]}") from None
        return self

    def output(self) -> str:
        return (self.folder / "terminal.log").read_text()

    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def leftovers(self, within_s: float = 90) -> list[psutil.Process]:
        """Processes of the run that still live after `within_s` seconds; Ray's agents may wait 60 for a dead head."""
        end = time.monotonic() + within_s
        while (alive := tagged(self.tag)) and time.monotonic() < end:
            time.sleep(0.2)
        return alive


def heed_sigint() -> None:
    """As from a terminal, also where the tests run in the background of a shell, which has them ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def start_mrl(tmp_path_factory):
    """`start_mrl("train", "key=value", ...)` -> Run; whatever is left of any is killed after the tests."""
    runs: list[Run] = []

    def start(command: str, *overrides: str) -> Run:
        folder, tag = tmp_path_factory.mktemp("run"), uuid.uuid4().hex
        env = os.environ | {TAG: tag, "WANDB_MODE": "offline"}
        line = [sys.executable, "-m", "mrl.cli", command, f"run.dir={folder}", *overrides]
        with (folder / "terminal.log").open("w") as log:
            pipes = dict(stdout=log, stderr=subprocess.STDOUT)
            run = Run(folder, tag, subprocess.Popen(line, env=env, preexec_fn=heed_sigint, **pipes))
        runs.append(run)
        return run

    yield start
    for run in runs:
        for process in tagged(run.tag):
            process.kill()


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """`make_once(name, make)` -> folder: made by the first worker of pytest-xdist that asks, while the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def of(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return of


@pytest.fixture(scope="session")
def inputs(make_once) -> Path:
    """The quickstart's files."""
    from mrl.data.synthetic_tasks import make_doubling_task

    return make_once("inputs", make_doubling_task)


@pytest.fixture(scope="session")
def warm(start_mrl, inputs, make_once) -> Path:
    """A model that answers some problems, made by `mrl sft` as a user would."""

    def make(folder: Path) -> None:
        run = start_mrl("sft", "experiment=quickstart", f"data.inputs.folder={inputs}", f"sft.output={folder}").finish()
        assert run.process.returncode == 0, run.output()
        losses = [json.loads(line)["loss/sft"] for line in (run.folder / "sft.jsonl").read_text().splitlines()]
        assert losses[-1] < losses[0] / 2
        assert (run.folder / "checkpoint/metadata.json").exists() and run.leftovers() == []

    return make_once("warm", make)


@pytest.fixture(scope="session")
def quickstart(inputs, warm) -> list[str]:
    """Overrides that make the quickstart small: the warm model, few rows, the shared inputs."""
    return [
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "sft.train=null",
        f"model.path={warm}",
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "trainer.eval_rows=16",
        "trainer.stop_reward=null",
        "tracking.wandb=false",
    ]


@pytest.fixture(scope="module")
def one_rank():
    """This process as the only rank of a trainer."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Engine:
    """A live SGLang server with the model it serves, as Transformers has it."""

    server: Any
    client: Any
    model: Any
    folder: Path


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory) -> Path:
    """A Qwen3 of the quickstart's size with random weights, in Hugging Face form."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qwen3")
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine(qwen3_folder, tmp_path_factory):
    """One engine for all tests of this session that only need a server; they leave it usable."""
    import torch
    from transformers import Qwen3ForCausalLM

    from mrl.rollout.client import EngineClient
    from mrl.rollout.engines.server import EngineServer
    from mrl.rollout.engines.server_args import default_server_args

    args = default_server_args("float32", 512) | {"model_path": str(qwen3_folder)}
    with EngineServer(args, tmp_path_factory.mktemp("engine") / "engine.log") as server:
        model = Qwen3ForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
        server.wait_ready(timeout_s=480)
        yield Engine(server, EngineClient(server.url, timeout_s=240), model, qwen3_folder)
