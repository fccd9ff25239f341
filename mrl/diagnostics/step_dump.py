"""A step on disk: a folder that has all of it, without pickle, so that any layout on any machine can run it again.

step_000007/    capsule.json          what, why, under which config and layout, and the size of every file
                batch.npz             tokens and columns of all rows, as a trainer had them
                mini_batches.npz      groups, and which rows each optimizer step trained and counted
                rng_00000.safetensors random number generators of each rank
                weights/              Hugging Face folder of the weights that the mini-batch began with, if they are here

Steps are counted as in metrics.jsonl: the first is 1, and step 7 begins with the weights that 6 steps made.
"""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.core.jsonl import write_json
from mrl.core.types import TokenBlock, TrainBatch
from mrl.workers.capsule import BATCH, WEIGHTS
from parallel.dims import ParallelDims

MANIFEST, MINI_BATCHES, FORMAT = "capsule.json", "mini_batches.npz", 1
_PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy")


@dataclass(frozen=True)
class Weights:
    """Where weights are."""

    path: str  # relative to the capsule, or a folder elsewhere
    step: int  # they are those after so many steps
    checkpoint: bool = False  # of Megatron; else a Hugging Face folder
    like: str = ""  # of a checkpoint: a Hugging Face folder of the same model


@dataclass(frozen=True)
class Content:
    """What the driver knows of a step."""

    step: int
    why: str  # for people: asked for, a spike, not finite
    weights: Weights | None  # None: nowhere on disk
    mini_batch: int  # the optimizer step, of those of this step, that `weights` are before
    lrs: list[float]  # of every mini-batch
    aggregation: str
    longest: int
    temperature: float
    kl_coef: float | None  # of the loss; None: it has no such term
    grad_norms: list[float]  # as the run saw them, as far as it came
    losses: list[float]
    layout: dict[str, Any]  # of the trainers
    config: dict[str, Any]  # composed; the objective is made of it

    @property
    def dims(self) -> ParallelDims:
        """The layout."""
        return ParallelDims(**self.layout)


@dataclass(frozen=True)
class Capsule:
    """One that is whole."""

    path: Path
    content: Content
    versions: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Capsule":
        """Look whether the capsule is whole and unchanged; raises ValueError that says what is not.

        Of weights only the sizes are looked at.
        """
        try:
            found = json.loads((path / MANIFEST).read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{path}: has no {MANIFEST}, so it is no whole capsule; name a folder such as RUN/capsules/step_000007."
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path / MANIFEST}: cannot be read ({error}); copy the capsule again.") from None
        if found.get("format") != FORMAT:
            raise ValueError(f"{path}: a capsule of format {found.get('format')}, this version of mrl reads {FORMAT}.")
        for name, expected in found["files"].items():
            _check_file(path, name, expected)
        content = found["content"]
        weights = content.pop("weights")
        return cls(path, Content(**content, weights=Weights(**weights) if weights else None), found["versions"])

    def block(self) -> TokenBlock:
        """Tokens and columns of all rows."""
        return TokenBlock.load(self.path / BATCH)[0]

    def batch(self, block: TokenBlock) -> TrainBatch:
        """The mini-batch that the weights are before."""
        with np.load(self.path / MINI_BATCHES, allow_pickle=False) as file:
            groups = file["groups"] if "groups" in file.files else None
            rows, counted = (file[f"{name}_{self.content.mini_batch}"] for name in ("rows", "counted"))
        lengths = block.prompt_lengths, block.response_lengths, block.sampled_lengths
        return TrainBatch(block, *lengths, groups, rows, counted)

    def folder_of(self, weights: Weights) -> Path:
        """Where the weights are; raises ValueError if they are gone."""
        folder = self.path / weights.path
        if not folder.is_dir():
            raise ValueError(
                f"{self.path}: its weights, {folder}, are not there any more; name others of the same model: "
                "weights=FOLDER, a Hugging Face folder."
            )
        return folder


def write_steps(folder: Path, steps: Sequence[TrainBatch]) -> None:
    """Write which rows each mini-batch has."""
    arrays = {f"rows_{n}": step.rows for n, step in enumerate(steps)}
    arrays |= {f"counted_{n}": step.counted for n, step in enumerate(steps)}
    groups = {} if steps[0].groups is None else dict(groups=steps[0].groups)
    with (folder / MINI_BATCHES).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays, **groups)


def complete(folder: Path, content: Content) -> None:
    """Write the manifest, after which the capsule is whole."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {str(path.relative_to(folder)): _describe(folder, path) for path in paths}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    write_json(folder / MANIFEST, dict(format=FORMAT, content=asdict(content), versions=versions, files=files))


def _describe(folder: Path, path: Path) -> dict[str, Any]:
    described: dict[str, Any] = dict(bytes=path.stat().st_size)
    if path.relative_to(folder).parts[0] != WEIGHTS:  # those may be hundreds of gigabytes
        described["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return described


def _check_file(folder: Path, name: str, expected: dict[str, Any]) -> None:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder}: {name} is missing; copy the capsule again, with all its files.")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise ValueError(
            f"{folder}: {name} has {size} bytes, was written with {expected['bytes']}; copy the capsule again."
        )
    if "sha256" in expected and hashlib.sha256(path.read_bytes()).hexdigest() != expected["sha256"]:
        raise ValueError(f"{folder}: {name} is not what was written (other SHA-256); copy the capsule again.")
