"""Step dumps: folders with all inputs of a training step, without pickles. `mrl replay` repeats the step under any layout.

step_000007/    step_dump.json        description of the step: reason, config, layout, and size and checksum of every file
                batch.npz             tokens and columns of all rows, as the trainer ranks received them
                mini_batches.npz      groups; for each mini-batch, its trained rows, and the rows in the denominators of its loss
                rng_00000.safetensors states of the random number generators, one file per rank
                weights/              Hugging Face folder of the weights before the mini-batch, if the dump contains weights

Steps are numbered as in metrics.jsonl: the first step is 1, and step 7 begins with the weights of step 6.
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
from mrl.workers.worker import DUMPED_BATCH, DUMPED_WEIGHTS
from parallel.dims import ParallelDims
from parallel.file_hashes import check_folder

MANIFEST, MINI_BATCHES = "step_dump.json", "mini_batches.npz"
FORMAT = 4  # number of the file format, which increases when the format changes
_PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy")


@dataclass(frozen=True)
class WeightsLocation:
    """Where the weights for a replay are stored."""

    path: str  # folder with the weights: an absolute path, or a path relative to the step dump
    step: int  # weight version, which is the number of steps that have trained these weights
    checkpoint: bool = False  # True: a Megatron checkpoint; False: a Hugging Face folder
    hf_folder: str = ""  # for a Megatron checkpoint: a Hugging Face folder of the same model


@dataclass(frozen=True)
class StepDescription:
    """Description of a dumped step, which the driver writes."""

    step: int  # index of the step, from 1
    reason: str  # why the step was dumped: on request, because of a spike, or because a gradient is not finite
    # Weights for the replay. After a spike, these may be the weights of an earlier step. None: no weights were on disk.
    weights: WeightsLocation | None
    mini_batch: int  # index of the mini-batch that a replay computes, from 0
    lrs: list[float]  # learning rate of each mini-batch
    temperature: float  # sampling temperature
    coefs: dict[str, float]  # name of a term of the loss (kl_loss, entropy) -> its coefficient
    grad_norms: list[float]  # gradient norm of each mini-batch that the run finished
    losses: list[float]  # loss of each mini-batch that the run finished
    layout: dict[str, Any]  # parallel layout of the trainer ranks
    config: dict[str, Any]  # composed config of the run; `mrl replay` builds the loss and its aggregation from it

    @property
    def dims(self) -> ParallelDims:
        """Parallel layout of the trainer ranks."""
        return ParallelDims(**self.layout)


@dataclass(frozen=True)
class StepDump:
    """A complete step dump on disk."""

    path: Path
    description: StepDescription
    versions: dict[str, str]  # package, or "python" -> its version in the run that wrote the dump

    @classmethod
    def read(cls, path: Path) -> "StepDump":
        """Read a step dump and check that it is complete and unchanged.

        Of the files in weights/, only the sizes are checked. Raises a ValueError that names the missing or changed file.
        """
        try:
            manifest = json.loads((path / MANIFEST).read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{path}: has no {MANIFEST}, so it is not a complete step dump; name a folder such as "
                "RUN/step_dumps/step_000007."
            ) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path / MANIFEST}: cannot be read ({error}); copy the step dump again.") from None
        if manifest.get("format") != FORMAT:
            raise ValueError(
                f"{path}: a step dump of format {manifest.get('format')}; this version of mrl reads {FORMAT}."
            )
        for name, expected in manifest["files"].items():
            _check_file(path, name, expected)
        fields = manifest["step"]
        weights = fields.pop("weights")
        location = WeightsLocation(**weights) if weights else None
        return cls(path, StepDescription(**fields, weights=location), manifest["versions"])

    def block(self) -> TokenBlock:
        """Read the tokens and the columns of all rows."""
        return TokenBlock.load(self.path / DUMPED_BATCH)[0]

    def batch(self, block: TokenBlock) -> TrainBatch:
        """Read the mini-batch that a replay computes."""
        with np.load(self.path / MINI_BATCHES, allow_pickle=False) as file:
            groups = file["groups"] if "groups" in file.files else None
            # The file calls denominator_rows "counted".
            rows, denominator_rows = (file[f"{name}_{self.description.mini_batch}"] for name in ("rows", "counted"))
        lengths = block.prompt_lengths, block.response_lengths, block.sampled_lengths
        return TrainBatch(block, *lengths, groups, rows, denominator_rows)

    def weights_folder(self, weights: WeightsLocation) -> Path:
        """Return the folder that contains these weights.

        Raises ValueError if the folder no longer exists, or if it is a Megatron checkpoint and a file in it is damaged.
        """
        folder = self.path / weights.path
        if not folder.is_dir():
            raise ValueError(
                f"{self.path}: its weights, {folder}, no longer exist; name other weights of the same model: "
                "weights=FOLDER, a Hugging Face folder."
            )
        if weights.checkpoint:
            check_folder(folder)
        return folder


def write_mini_batches(folder: Path, mini_batches: Sequence[TrainBatch]) -> None:
    """Write the groups of a step and the rows of each of its mini-batches."""
    arrays = {f"rows_{n}": mini_batch.rows for n, mini_batch in enumerate(mini_batches)}
    arrays |= {f"counted_{n}": mini_batch.denominator_rows for n, mini_batch in enumerate(mini_batches)}
    groups = {} if mini_batches[0].groups is None else dict(groups=mini_batches[0].groups)
    with (folder / MINI_BATCHES).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays, **groups)


def write_manifest(folder: Path, description: StepDescription) -> None:
    """Write the manifest, which completes a step dump."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    files = {str(path.relative_to(folder)): _describe_file(folder, path) for path in paths}
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    write_json(folder / MANIFEST, dict(format=FORMAT, step=asdict(description), versions=versions, files=files))


def _describe_file(folder: Path, path: Path) -> dict[str, Any]:
    described: dict[str, Any] = dict(bytes=path.stat().st_size)
    # Weights may have hundreds of gigabytes, so their checksums would take too long.
    if path.relative_to(folder).parts[0] != DUMPED_WEIGHTS:
        described["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return described


def _check_file(folder: Path, name: str, expected: dict[str, Any]) -> None:
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder}: {name} is missing; copy the step dump again, with all its files.")
    if (size := path.stat().st_size) != expected["bytes"]:
        raise ValueError(
            f"{folder}: {name} has {size} bytes but was written with {expected['bytes']}; copy the step dump again."
        )
    if "sha256" in expected and hashlib.sha256(path.read_bytes()).hexdigest() != expected["sha256"]:
        raise ValueError(
            f"{folder}: {name} has changed since it was written (SHA-256 differs); copy the step dump again."
        )
