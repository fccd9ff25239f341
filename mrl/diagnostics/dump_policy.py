"""Keeps steps of a run whole: those that are asked for, those whose gradient is not finite, and spikes."""

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
from mrl.config.schema import CapsuleConfig
from mrl.core.errors import Lost
from mrl.core.types import UpdateReport
from mrl.diagnostics.step_dump import MANIFEST, Content, Weights, complete, write_steps
from mrl.workers.capsule import WEIGHTS, NotFinite
from mrl.workers.group import WorkerGroup
from mrl.workers.policy import Update

logger = logging.getLogger(__name__)
SPIKE = "the gradient norm"  # how the reason of a spike's capsule begins


@dataclass
class Recorder:
    """Watches the actor's updates. Tokens go from the object store to trainer ranks, which write them."""

    folder: Path  # run.dir/capsules
    settings: CapsuleConfig
    layout: dict[str, Any]
    config: dict[str, Any]
    latest: Callable[[], Weights | None]  # the newest weights on disk
    first_step: int = 0  # steps in which the actor was not updated
    _norms: deque[float] = field(init=False)  # largest gradient norms of the last steps
    _spikes: int = field(init=False)  # capsules of spikes so far

    def __post_init__(self) -> None:
        self._norms = deque(maxlen=self.settings.window)
        written = [json.loads(path.read_text()) for path in self.folder.glob(f"step_*/{MANIFEST}")]
        self._spikes = sum(manifest["content"]["why"].startswith(SPIKE) for manifest in written)

    @contextmanager
    def watch(self, group: WorkerGroup, update: Update, step: int) -> Iterator[list[UpdateReport]]:
        """The context of the actor's update number `step`, whose reports are put into the list.

        Raises FloatingPointError, naming the capsule, where a gradient was not finite.
        """
        reports: list[UpdateReport] = []
        content = self._content(update, step + self.first_step + 1)
        if content.step in self.settings.steps:
            asked = replace(content, why="asked for (capsule.steps)")
            content = asked if self._tolerated(asked, lambda: self._keep(group, update, asked)) else content
        try:
            yield reports
        except NotFinite as error:
            raise self._of_not_finite(group, update, content, error) from error
        seen = replace(content, grad_norms=_all(reports, "optim/grad_norm"), losses=_all(reports, "loss"))
        if seen.why:
            self._tolerated(seen, lambda: self._complete(seen))
        elif why := self._spike(seen.grad_norms):
            spike = replace(seen, why=why, weights=self.latest())
            self._spikes += self._tolerated(spike, lambda: self._keep_whole(group, update, spike))
        self._norms.append(max(seen.grad_norms))

    def _of_not_finite(
        self, group: WorkerGroup, update: Update, content: Content, error: NotFinite
    ) -> FloatingPointError:
        """Keep the step with the weights as they are: those that the mini-batch began with. Returns what to raise."""
        found: NotFinite = getattr(error, "cause", error)  # Ray 2.60 raises a class of its own, which carries ours
        why = f"the gradient of mini-batch {found.mini_batch} is not finite (norm {found.norm})"
        content = replace(content, why=why, mini_batch=found.mini_batch)
        try:
            self._keep_whole(group, update, content)
        except Exception:  # the run ends for the gradient, whatever else happens
            logger.exception("step %d was not kept", content.step)
            return FloatingPointError(f"step {content.step}: {found}")
        where = self._path(content)
        return FloatingPointError(
            f"step {content.step}: {found} Its capsule is {where}; `mrl replay {where}` finds the first layer and token that "
            "are not finite."
        )

    def _content(self, update: Update, step: int) -> Content:
        loss = update.how["loss"]
        return Content(
            step=step,
            why="",
            weights=Weights(WEIGHTS, step - 1),
            mini_batch=0,
            lrs=update.lrs,
            aggregation=update.aggregation,
            longest=update.longest,
            temperature=update.how["temperature"],
            kl_coef=loss.kl.coef if isinstance(loss, Objective) and loss.kl else None,
            grad_norms=[],
            losses=[],
            layout=self.layout,
            config=self.config,
        )

    def _spike(self, norms: list[float]) -> str:
        """Why the step is a spike; empty if it is none, or too few steps are known, or there are capsules enough."""
        factor, known = self.settings.spike, len(self._norms)
        if not factor or self._spikes >= self.settings.keep or known < max(1, self.settings.window // 2):
            return ""
        usual = float(np.median(self._norms))
        if max(norms) <= factor * usual:
            return ""
        return f"{SPIKE} {max(norms):.4g} is more than {factor:g} times {usual:.4g}, the median of {known} steps before"

    def _path(self, content: Content) -> Path:
        return self.folder / f"step_{content.step:06d}"

    def _keep(self, group: WorkerGroup, update: Update, content: Content) -> None:
        """Have the trainers write their parts, weights too where the capsule is to hold them."""
        folder, batch = self._path(content), update.steps[0]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        own = content.weights is not None and content.weights.path == WEIGHTS
        group.call("keep_step", batch.block, batch.columns, str(folder), own)
        write_steps(folder, update.steps)

    def _keep_whole(self, group: WorkerGroup, update: Update, content: Content) -> None:
        self._keep(group, update, content)
        self._complete(content)

    def _tolerated(self, content: Content, write: Callable[[], None]) -> bool:
        """Whether a capsule, or a part of it, could be written: a full disk costs the capsule, not the run."""
        try:
            write()
        except Lost:
            raise
        except Exception:  # whatever a disk, and a model that writes to it, can raise
            logger.exception("step %d is not kept, though %s", content.step, content.why)
            shutil.rmtree(self._path(content), ignore_errors=True)
            return False
        return True

    def _complete(self, content: Content) -> None:
        complete(self._path(content), content)
        logger.warning("step %d is kept in %s: %s", content.step, self._path(content), content.why)


def _all(reports: list[UpdateReport], name: str) -> list[float]:
    """A number of every mini-batch; 0 where a mini-batch had no rows."""
    return [(report.sums | report.maxima).get(name, 0.0) for report in reports]
