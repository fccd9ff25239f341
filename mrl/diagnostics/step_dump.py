"""Step dumps: folders with all inputs of a training step, without pickles. `mrl replay` repeats the step under any layout.

step_000007/    step_dump.json        description of the step: reason, config, layout, and size and checksum of the other files
                batch.npz             tokens and columns of all rows, as the trainer ranks received them
                mini_batches.npz      prompt index of each row; per mini-batch: trained rows, and rows in the mean of the loss
                rng_00000.safetensors states of the random number generators, one file per rank
                weights/              Hugging Face folder of the weights before the replayed mini-batch; absent in dumps of spikes

Steps are numbered as in metrics.jsonl: the first step is 1, and step 7 begins with the weights after step 6. If a training step
calls `update` several times, each update has a dump of its own. The folder of the second update is step_000007_update_2.
"""

import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mrl.algorithms.objective import Objective
from mrl.config.process_schema import StepDumpConfig
from mrl.core.jsonl import write_json
from mrl.core.run_errors import NonFiniteGradientError, ProcessesLostError
from mrl.core.types import TokenBlock, TrainBatch, UpdateReport
from mrl.workers.group import WorkerGroup
from mrl.workers.model_trainers import UpdateRequest
from mrl.workers.worker import DUMPED_BATCH, DUMPED_WEIGHTS, TrainWorker
from parallel.dims import ParallelDims
from parallel.durable_files import check_folder

MANIFEST, MINI_BATCHES = "step_dump.json", "mini_batches.npz"
FORMAT = 5  # number of the file format, which increases when the format changes
_PACKAGES = ("torch", "megatron-core", "sglang", "ray", "transformers", "numpy")


@dataclass(frozen=True)
class WeightsLocation:
    """Where the weights for a replay are stored."""

    path: str  # folder with the weights: an absolute path, or a path relative to the step dump
    step: int  # weight version: number of finished steps of the run
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
    update: int = 1  # index of the update in the step, from 1

    @property
    def folder_name(self) -> str:
        """Name of the step dump's folder."""
        return f"step_{self.step:06d}" + (f"_update_{self.update}" if self.update > 1 else "")

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

        For files in weights/, only the sizes are checked. Raises a ValueError that names the missing or changed file.
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
            mini_batch = self.description.mini_batch
            rows, denominator_rows = (file[f"{name}_{mini_batch}"] for name in ("rows", "denominator_rows"))
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
    arrays |= {f"denominator_rows_{n}": mini_batch.denominator_rows for n, mini_batch in enumerate(mini_batches)}
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


logger = logging.getLogger(__name__)
SPIKE_REASON_START = "the gradient norm"  # the reason of a dump begins with these words if the step has a spike


@dataclass
class StepDumpRecorder:
    """Watches the training of the actor, and dumps some of the steps.

    It dumps the steps in `settings.steps`, each step with a gradient that is not finite, and steps with a spike. A step has a
    spike if its gradient norm is much larger than the median of the recent steps.

    The trainer ranks write the tokens, the states of the generators and the weights. They fetch the tokens from Ray's object
    store, so no token passes through the driver.
    """

    folder: Path  # RUN/step_dumps
    settings: StepDumpConfig
    layout: dict[str, Any]  # parallel layout of the actor
    config: dict[str, Any]  # composed config of the run
    latest_weights: Callable[[], WeightsLocation | None]  # returns the location of the newest weights on disk
    num_critic_steps: int = 0  # number of steps at the start of the run that train only the critic
    _norms: deque[float] = field(init=False)  # largest gradient norm of each recent update
    _num_spikes: int = field(init=False)  # number of spikes dumped so far, including those before a resume

    def __post_init__(self) -> None:
        self._norms = deque(maxlen=self.settings.spike_window)
        manifests = [json.loads(path.read_text()) for path in self.folder.glob(f"step_*/{MANIFEST}")]
        self._num_spikes = sum(manifest["step"]["reason"].startswith(SPIKE_REASON_START) for manifest in manifests)

    @contextmanager
    def watch(self, group: WorkerGroup, update: UpdateRequest, step: int) -> Iterator[list[UpdateReport]]:
        """Watch the optimizer steps of one update.

        The caller must append the report of each optimizer step to the list that this context yields. `update` describes the
        optimizer steps. `step` is the number of earlier training steps that trained the model.

        Raises FloatingPointError with the path of the dump if a gradient is not finite.
        """
        reports: list[UpdateReport] = []
        description = self._describe(update, step + self.num_critic_steps + 1)
        if description.step in self.settings.steps:
            requested = replace(description, reason="requested (step_dump.steps)")
            written = self._try_to_write(requested, lambda: self._dump(group, update, requested))
            description = requested if written else description
        try:
            yield reports
        except NonFiniteGradientError as error:
            raise self._dump_nonfinite(group, update, description, error) from error
        grad_norms, losses = _values(reports, "optim/grad_norm"), _values(reports, "loss")
        finished = replace(description, grad_norms=grad_norms, losses=losses)
        if finished.reason:
            self._try_to_write(finished, lambda: self._complete(finished))
        elif reason := self._spike_reason(grad_norms):
            spike = replace(finished, reason=reason, weights=self.latest_weights())
            self._num_spikes += self._try_to_write(spike, lambda: self._dump_and_complete(group, update, spike))
        self._norms.append(max(grad_norms))

    def _dump_nonfinite(
        self, group: WorkerGroup, update: UpdateRequest, description: StepDescription, error: NonFiniteGradientError
    ) -> FloatingPointError:
        """Dump the step with the current weights, which are the weights before the failed mini-batch.

        Returns the error that the caller must raise.
        """
        cause: NonFiniteGradientError = getattr(error, "cause", error)  # Ray 2.60 wraps the error in another class
        reason = f"the gradient of mini-batch {cause.mini_batch} is not finite (norm {cause.norm})"
        description = replace(description, reason=reason, mini_batch=cause.mini_batch)
        try:
            self._dump_and_complete(group, update, description)
        except Exception:  # the run ends because of the gradient, whether or not the dump succeeds
            logger.exception("step %d could not be dumped", description.step)
            return FloatingPointError(f"step {description.step}: {cause}")
        path = self._path(description)
        return FloatingPointError(
            f"step {description.step}: {cause} Its step dump is {path}; `mrl replay {path}` finds the first layer and "
            "token that are not finite."
        )

    def _describe(self, update: UpdateRequest, step: int) -> StepDescription:
        loss = update.options["loss"]
        return StepDescription(
            step=step,
            reason="",
            weights=WeightsLocation(DUMPED_WEIGHTS, step - 1),
            mini_batch=0,
            lrs=update.lrs,
            temperature=update.options["temperature"],
            coefs=loss.coefs if isinstance(loss, Objective) else {},
            grad_norms=[],
            losses=[],
            layout=self.layout,
            config=self.config,
            update=update.update_index + 1,
        )

    def _spike_reason(self, grad_norms: list[float]) -> str:
        """Return the reason for dumping the step as a spike, or "" if the step is not dumped.

        A step is not dumped if it has no spike, if too few steps came before, or if `max_spikes` spikes have been dumped.
        """
        factor, known = self.settings.spike_factor, len(self._norms)
        too_early = known < max(1, self.settings.spike_window // 2)
        if not factor or self._num_spikes >= self.settings.max_spikes or too_early:
            return ""
        largest, median = max(grad_norms), float(np.median(self._norms))
        if largest <= factor * median:
            return ""
        reason = f"{SPIKE_REASON_START} {largest:.4g} is more than {factor:g} times {median:.4g}"
        return f"{reason}, the median of {known} steps before"

    def _path(self, description: StepDescription) -> Path:
        return self.folder / description.folder_name

    def _dump(self, group: WorkerGroup, update: UpdateRequest, description: StepDescription) -> None:
        """Make the trainer ranks write their parts of the dump, and write the mini-batches.

        The trainer ranks also write the current weights if `description.weights` is a folder in the dump.
        """
        folder, batch = self._path(description), update.mini_batches[0]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with_weights = description.weights is not None and description.weights.path == DUMPED_WEIGHTS
        group.call(TrainWorker.dump_step, batch.block, batch.columns, str(folder), with_weights)
        write_mini_batches(folder, update.mini_batches)

    def _dump_and_complete(self, group: WorkerGroup, update: UpdateRequest, description: StepDescription) -> None:
        self._dump(group, update, description)
        self._complete(description)

    def _try_to_write(self, description: StepDescription, write: Callable[[], None]) -> bool:
        """Call `write`, and return whether it succeeded. If it fails, e.g. on a full disk, the dump is removed."""
        try:
            write()
        except ProcessesLostError:
            raise
        except Exception:  # any error of the disk, or of the model export
            logger.exception("step %d could not be dumped (reason: %s)", description.step, description.reason)
            shutil.rmtree(self._path(description), ignore_errors=True)
            return False
        return True

    def _complete(self, description: StepDescription) -> None:
        write_manifest(self._path(description), description)
        logger.warning("step %d was dumped to %s: %s", description.step, self._path(description), description.reason)


def _values(reports: list[UpdateReport], name: str) -> list[float]:
    """Return the metric `name` of each mini-batch. A mini-batch without rows has the value 0."""
    return [(report.sums | report.maxima).get(name, 0.0) for report in reports]
