"""Dumps steps of a run: requested steps, steps whose gradient is not finite, and steps with a spike of the gradient norm."""

import json
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mrl.algorithms.objective import Objective
from mrl.config.process_schema import StepDumpConfig
from mrl.core.run_errors import NonFiniteGradientError, ProcessesLostError
from mrl.core.types import UpdateReport
from mrl.diagnostics.step_dump import MANIFEST, StepDescription, WeightsLocation, write_manifest, write_mini_batches
from mrl.workers.group import WorkerGroup
from mrl.workers.model_trainers import UpdateRequest
from mrl.workers.worker import DUMPED_WEIGHTS, TrainWorker

logger = logging.getLogger(__name__)
SPIKE_REASON_START = "the gradient norm"  # the reason of a dump begins with these words if the step has a spike


@dataclass
class StepDumpRecorder:
    """Watches the training of the actor, and dumps some of the steps.

    The trainer ranks write the dumps. They fetch the tokens from Ray's object store, so no token passes through the driver.
    """

    folder: Path  # RUN/step_dumps
    settings: StepDumpConfig
    layout: dict[str, Any]  # parallel layout of the actor
    config: dict[str, Any]  # composed config of the run
    latest_weights: Callable[[], WeightsLocation | None]  # returns the location of the newest weights on disk
    num_critic_steps: int = 0  # number of steps at the start of the run that train only the critic
    _norms: deque[float] = field(init=False)  # largest gradient norm of each recent step
    _num_spikes: int = field(init=False)  # number of spikes that were dumped so far, also before a resume

    def __post_init__(self) -> None:
        self._norms = deque(maxlen=self.settings.spike_window)
        manifests = [json.loads(path.read_text()) for path in self.folder.glob(f"step_*/{MANIFEST}")]
        self._num_spikes = sum(manifest["step"]["reason"].startswith(SPIKE_REASON_START) for manifest in manifests)

    @contextmanager
    def watch(self, group: WorkerGroup, update: UpdateRequest, step: int) -> Iterator[list[UpdateReport]]:
        """Watch the optimizer steps of one training step.

        The caller must append the report of each optimizer step to the list that this context yields. `update` describes the
        optimizer steps. `step` is the number of earlier training steps that trained the actor.

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
        return self.folder / f"step_{description.step:06d}"

    def _dump(self, group: WorkerGroup, update: UpdateRequest, description: StepDescription) -> None:
        """Make the trainer ranks write their parts of the dump, and the current weights if the dump contains weights."""
        folder, batch = self._path(description), update.steps[0]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with_weights = description.weights is not None and description.weights.path == DUMPED_WEIGHTS
        group.call(TrainWorker.dump_step, batch.block, batch.columns, str(folder), with_weights)
        write_mini_batches(folder, update.steps)

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
