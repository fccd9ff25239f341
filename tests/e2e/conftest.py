"""Fixtures of the end-to-end tests: they start `mrl` commands, kill processes that remain afterwards, and serve a tiny model."""

import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mrl_runs
import pytest
from mrl_runs import TAG, MrlRun, RunFolder, restore_sigint, signal_all, tagged


@pytest.fixture(scope="session")
def start_mrl(tmp_path_factory):
    """`start_mrl("train", "key=value", ...)` -> MrlRun. After the tests, the fixture kills all processes that remain."""
    runs: list[MrlRun] = []

    def start(command: str, *overrides: str, folder: Path | None = None) -> MrlRun:
        folder, tag = folder or tmp_path_factory.mktemp("run"), uuid.uuid4().hex
        env = os.environ | {TAG: tag, "WANDB_MODE": "offline"}
        line = [sys.executable, "-m", "mrl.cli", command, f"run.dir={folder}", *overrides]
        with (folder / "terminal.log").open("w") as log:
            pipes = dict(stdout=log, stderr=subprocess.STDOUT)
            run = MrlRun(folder, tag, subprocess.Popen(line, env=env, preexec_fn=restore_sigint, **pipes))
        runs.append(run)
        return run

    yield start
    for run in runs:
        signal_all(tagged(run.tag))


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """`user_module(name, source)` lets runs import the source as the module `name`. Runs can also import the test helpers."""

    def add(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        folders = [str(tmp_path), str(Path(mrl_runs.__file__).parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))

    return add


@pytest.fixture
def letters_reward(tmp_path) -> list[str]:
    """Overrides with a reward that depends only on the letters of a response.

    A random model solves no problem. Rewards must differ, because a step skips groups with equal rewards.
    """
    path = tmp_path / "letters_reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(map(ord, solution_str)) % 7\n"
    )
    return ["reward=function", f"reward.path={path}"]


@pytest.fixture(scope="session")
def make_once(tmp_path_factory):
    """`make_once(name, make)` -> folder. The first pytest-xdist worker that needs the folder makes it. Other workers wait."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = base / name, base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def inputs(make_once) -> Path:
    """The prompt files and the untrained model of the quickstart."""
    from mrl.data.synthetic_tasks import make_doubling_task

    return make_once("inputs", make_doubling_task)


@pytest.fixture(scope="session")
def warm(start_mrl, inputs, make_once) -> Path:
    """A model that solves some of the quickstart's problems. The command `mrl sft` trains it."""

    def make(folder: Path) -> None:
        run = start_mrl("sft", "experiment=quickstart", f"data.inputs.folder={inputs}", f"sft.output={folder}").finish()
        assert run.process.returncode == 0, run.output()
        losses = [json.loads(line)["loss/sft"] for line in (run.folder / "sft.jsonl").read_text().splitlines()]
        assert losses[-1] < losses[0] / 2
        assert (run.folder / "checkpoint/metadata.json").exists() and run.leftovers() == []

    return make_once("warm", make)


@pytest.fixture(scope="session")
def quickstart(inputs, warm) -> list[str]:
    """Overrides that make the quickstart small: the model of `warm`, few rows, and the shared prompt files."""
    return [
        "experiment=quickstart",
        f"data.inputs.folder={inputs}",
        "sft.train=null",
        f"model.path={warm}",
        "rollout.prompts_per_step=6",
        "rollout.responses_per_prompt=4",
        "trainer.eval_rows=16",
        "trainer.stop_reward=null",
        "tracking.backends=[]",
    ]


@pytest.fixture(scope="session")
def recorded(start_mrl, quickstart, make_once) -> RunFolder:
    """An uninterrupted synchronous run of five steps, which records its rollouts and writes to all trackers."""

    def make(folder: Path) -> None:
        folder.mkdir()
        options = ["trainer.max_steps=5", "rollout.record=true", "tracking.backends=[wandb,tensorboard,mlflow]"]
        run = start_mrl("train", *quickstart, *options, folder=folder).finish()
        assert run.process.returncode == 0 and run.leftovers() == [], run.output()

    return RunFolder(make_once("recorded", make))


@pytest.fixture(scope="module")
def one_rank():
    """A process group that consists of this process only."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Engine:
    """A running SGLang server, and the model that it serves, loaded with Transformers."""

    server: Any
    client: Any
    model: Any
    folder: Path


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory) -> Path:
    """A Qwen3 of the quickstart's size with random weights, in Hugging Face format."""
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
    """One engine for all tests of a session that need no special server.

    After a test, the engine must be able to serve requests. A test that changes the weights of the server must give the same
    weights to `model`, because later tests compare the two. The files in `folder` keep the initial weights.
    """
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
