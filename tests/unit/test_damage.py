"""Random damage to the files of a run: each damage is repaired, passed over with a warning, or refused in one line."""

import logging
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_rollout_log import completion, plain, step_of
from tiny_families import make_family

from models.conversion.hf_reader import check_hf_folder
from models.conversion.hf_writer import write_export
from models.hf_config import HFConfig
from mrl.checkpoint.resume import find_resume_point
from mrl.checkpoint.run_dir import lock_run_dir
from mrl.checkpoint.store import CheckpointStore, find_checkpoint
from mrl.config import hydra_entry
from mrl.config.schema import Config
from mrl.config.secrets import config_as_json
from mrl.core.jsonl import JsonLinesFile
from mrl.core.sample_file import SampleFile, TextSample, read_samples
from mrl.rollout.rollout_log import CompletionCache, RolloutLog
from mrl.tracking.backends import _stored_run_id
from parallel import durable_files

STEPS, LAST = 6, 4  # the run has six steps; its newest checkpoint is of step 4
CORE = 5  # number of seeds in the core tests
NOT_DATA = ("lock",)


@cache
def config_for(folder: Path) -> Config:
    return hydra_entry.compose_config(["experiment=quickstart", f"run.dir={folder}"])


def write_run(folder: Path, model: Path) -> None:
    """Write the files of a run with the writers that `mrl train` uses."""
    config = config_as_json(config_for(folder))
    with lock_run_dir(folder, "train", config):
        pass
    store = CheckpointStore(folder / "checkpoints")
    for step in (2, LAST):
        partial = store.begin()
        for part in ("actor", "reference"):
            (partial / part).mkdir()
            for name in ("__0_0.distcp", "__0_1.distcp", ".metadata"):
                (partial / part / name).write_bytes(random.randbytes(2000))
            durable_files.write_hashes(partial / part, {})
        store.commit(partial, step, {"progress": {"step": step}, "prompts": {"drawn": [8 * step]}, "config": config})
    for name in ("metrics.jsonl", "ledger.jsonl", "eval.jsonl"):
        lines = JsonLinesFile(folder / name)
        for step in range(1, STEPS + 1):
            lines.write(step, {"reward/mean": random.random(), "rows": random.sample(range(1000), 8)})
        lines.close()
    log, cache_folder = RolloutLog(folder / "rollout_log", "key"), folder / "rollout_log/key"
    for step in range(LAST, STEPS):
        log.put(step, step_of(plain(step, 5), plain(step + 10, 6)))
    CompletionCache(cache_folder, STEPS).put([90, 91], [[5, 6], [5, 7]], [completion(1), completion(2)])
    samples = SampleFile(folder)
    for step in range(1, STEPS + 1):
        samples.write(step, [TextSample("1+1=", str(step), 1.0, step, step, 2, False)])
    _stored_run_id(folder / "wandb_run_id")
    write_export(iter(load_file(model / "model.safetensors").items()), HFConfig.load(model), folder / "hf", {})


def read_run(folder: Path, messages: list[str]) -> dict[str, Any]:
    """Read everything that a resumed run and later commands read. Errors are added to `messages`, one line each."""
    found: dict[str, Any] = {}

    def read(name: str, function: Callable[[], Any]) -> None:
        try:
            found[name] = function()
        except ValueError as error:
            messages.append(str(error))

    def resumed() -> tuple[int, list[bytes], object]:
        point = find_resume_point(config_for(folder))
        assert point.checkpoint, "a run with checkpoints never starts at step 0"
        return point.checkpoint.step, content_of(point.checkpoint.path), point.changes

    def lines_of(name: str) -> list[bytes]:
        lines = JsonLinesFile(folder / name, LAST, every_step=name != "eval.jsonl")
        lines.close()
        return lines.path.read_bytes().splitlines()

    read("resumed", resumed)
    for step in (2, LAST):
        path = folder / f"checkpoints/step_{step:06d}"
        read(f"step {step}", lambda path=path: content_of(find_checkpoint(str(path)).path))
    for name in ("metrics.jsonl", "ledger.jsonl", "eval.jsonl"):
        read(name, lambda name=name: lines_of(name))
    log, completions = RolloutLog(folder / "rollout_log", "key"), CompletionCache(folder / "rollout_log/key", STEPS)
    for step in range(LAST, STEPS):
        read(f"groups {step}", lambda step=step: log.get(step))
    for number, tokens in ((90, [5, 6]), (91, [5, 7])):
        read(f"completion {number}", lambda number=number, tokens=tokens: completions.get(number, tokens))
    SampleFile(folder)
    read("samples", lambda: list(read_samples(folder)))
    read("wandb", lambda: _stored_run_id(folder / "wandb_run_id"))
    read("hf", lambda: (check_hf_folder(folder / "hf"), content_of(folder / "hf"))[1])
    return found


def content_of(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]


def flip_bit(content: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def zero_range(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    length = min(draw.choice([1, 16, 4096]), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(1, len(content))]


def empty(content: bytes, draw: random.Random) -> bytes:
    return b""


OPERATIONS = (flip_bit, flip_bit, zero_range, zero_range, cut, empty)


def damage(folder: Path, seed: int) -> list[Path]:
    """Damage one file, or exchange two files. Returns these files."""
    draw = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_DATA)
    kinds = sorted({path.relative_to(folder).parts[0] for path in files})
    kind = draw.choice(kinds)  # first the kind, so that kinds with few files are damaged too
    path = draw.choice([file for file in files if file.relative_to(folder).parts[0] == kind])
    content = path.read_bytes()
    if draw.random() < 0.15:
        other = draw.choice([file for file in files if file.read_bytes() != content])
        path.write_bytes(other.read_bytes()), other.write_bytes(content)
        return [path, other]
    changed = content
    while changed == content:
        changed = draw.choice(OPERATIONS)(content, draw)
    path.write_bytes(changed)
    return [path]


def is_allowed(name: str, found: Any, intact: Any) -> bool:
    """Return whether the value is as written, or lacks only damaged entries, or is from the checkpoint before the newest."""
    if name == "resumed":
        return found in (intact[name], (2, intact["step 2"], ()))
    if name == "wandb":
        return len(found) == len(intact[name])
    if name.endswith(".jsonl") or name == "samples":
        return all(entry in intact[name] for entry in found)
    return found == intact[name] or (found is None and name.startswith(("groups", "completion")))


def is_named(path: Path, folder: Path, text: str) -> bool:
    """Return whether the messages name the damaged file and the run directory."""
    name = path.name.removeprefix(".").removesuffix(".hashes") if path.suffix == ".hashes" else path.name
    return name in text and str(folder) in text


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory):
    """Return (folder of the intact run, everything that is read from it, run directory in which files are damaged)."""
    root = tmp_path_factory.mktemp("damage")
    torch.manual_seed(0), random.seed(0)
    make_family("qwen3", root / "model")
    damaged = root / "run"
    write_run(damaged, root / "model")
    shutil.copytree(damaged, root / "intact")
    messages: list[str] = []
    found = read_run(damaged, messages)
    assert not messages and found["resumed"][0] == LAST
    return root / "intact", found, damaged


EXCHANGED_JSON = 543  # this seed exchanges run.json with another file that contains its own hash
CORE_SEEDS = [*range(CORE), EXCHANGED_JSON]
SEEDS = [*CORE_SEEDS, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(CORE, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_damage_passes_in_silence(intact_run, caplog, seed):
    original, intact, folder = intact_run
    shutil.rmtree(folder)
    shutil.copytree(original, folder)
    damaged, messages = damage(folder, seed), []
    with caplog.at_level(logging.WARNING):
        found = read_run(folder, messages)
    text = "\n".join([*messages, caplog.text])
    assert all("\n" not in message for message in messages), "a refusal is one line"
    for name, value in found.items():
        assert is_allowed(name, value, intact), f"{damaged}: {name} is {value}"
    for path in damaged:
        assert is_named(path, folder, text), f"{path} was damaged and nothing said so:\n{text}"
