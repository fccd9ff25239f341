"""When checkpoints and Hugging Face folders are written during a run; at most one checkpoint at a time, beside the training."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.core.errors import Lost

logger = logging.getLogger(__name__)


class Savable(Protocol):
    """The processes of one model."""

    def begin_save(self, folder: str, asynchronous: bool, timeout_s: float) -> None:
        """Take a snapshot; what follows may change the weights. One that is not asynchronous is written now."""
        ...

    def save_finished(self) -> bool:
        """Whether `finish_save` would not have to wait."""
        ...

    def finish_save(self, timeout_s: float) -> None:
        """Wait until the files are on disk; raises what went wrong."""
        ...

    def abandon_save(self) -> None:
        """Give up what was begun, if anything."""
        ...


@dataclass(frozen=True)
class Cadence:
    """How often what is written."""

    every: int  # steps between checkpoints; 0: at the end only
    export_every: int  # steps between Hugging Face folders; 0: none
    asynchronous: bool
    timeout_s: float  # of one checkpoint
    at_end: bool  # a checkpoint and a Hugging Face folder
    best_metric: str


@dataclass(frozen=True)
class _InFlight:
    folder: Path
    step: int
    state: Mapping[str, Any]
    score: float | None
    deadline: float


@dataclass
class Saver:
    """Writes what `resume` needs: the models' processes their part, the driver's state last."""

    store: CheckpointStore
    models: Mapping[str, Savable]  # actor, critic
    constant: Mapping[
        str, Callable[[str], None]
    ]  # what never changes, and is written once: name -> writes it to a folder
    cadence: Cadence
    notes: Mapping[str, Any]  # of the run: which model, layout and config; kept in each checkpoint
    forget: Callable[[int], None]  # nothing from before this step is needed to resume
    export: Callable[[str], None]  # write the actor's weights as a Hugging Face folder
    run_dir: Path
    failed: int = 0  # checkpoints that could not be written
    _in_flight: _InFlight | None = None
    _newest: int | None = None

    def between_steps(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Begin what is due now, and finish what was begun; a checkpoint that fails is a warning."""
        step, cadence = state["progress"]["step"], self.cadence
        if step == 0:
            return
        at_hand = bool(cadence.every) and step % cadence.every == 0
        if self._in_flight and (at_hand or self._arrived()):
            self._tolerated(self._finish)
        if at_hand and step != self._newest:
            self._tolerated(lambda: self._begin(state, metrics.get(cadence.best_metric), cadence.asynchronous))
            if not cadence.asynchronous and self._in_flight:
                self._tolerated(self._finish)
        if cadence.export_every and step % cadence.export_every == 0:
            try:
                self._export(self.run_dir / "exports" / f"step_{step:06d}")
            except OSError as error:
                logger.error("the weights of step %d were not exported: %s", step, error)

    def now(self, state: Mapping[str, Any]) -> None:
        """Have a checkpoint of this state on disk before it returns. Raises what keeps it from that."""
        if self._in_flight:
            self._tolerated(self._finish)
        if self._newest != state["progress"]["step"]:
            self._begin(state, None, asynchronous=False)
            self._finish()

    def finish(self, state: Mapping[str, Any]) -> None:
        """The end of the run: the last checkpoint, and its weights as hf/."""
        if self.cadence.at_end:
            self.now(state)
            self._export(self.run_dir / "hf")
            if not self.store.copied(self.cadence.timeout_s):
                logger.error("the last checkpoint is still being copied, and is left behind")
        elif self._in_flight:
            self._tolerated(self._finish)

    def resumed(self, checkpoint: Checkpoint | None) -> None:
        """The run goes on from this checkpoint, or from its beginning: what was in flight is given up."""
        self._in_flight, self._newest = None, checkpoint.step if checkpoint else None

    def _begin(self, state: Mapping[str, Any], score: float | None, asynchronous: bool) -> None:
        folder = self.store.begin()
        deadline = time.monotonic() + self.cadence.timeout_s
        self._in_flight = _InFlight(folder, state["progress"]["step"], state, score, deadline)
        for name, write in self.constant.items():
            if not self.store.link_latest(name, folder):
                write(str(folder / name))
        for name, model in self.models.items():
            model.begin_save(str(folder / name), asynchronous, self.cadence.timeout_s)

    def _arrived(self) -> bool:
        assert self._in_flight, "nothing was begun"
        late = time.monotonic() > self._in_flight.deadline
        return late or all(model.save_finished() for model in self.models.values())

    def _finish(self) -> None:
        """Wait for what is in flight, and make it a checkpoint."""
        assert self._in_flight, "nothing was begun"
        saved = self._in_flight
        try:
            for model in self.models.values():
                model.finish_save(max(1.0, saved.deadline - time.monotonic()))
            self.store.commit(saved.folder, saved.step, {**saved.state, **self.notes}, saved.score)
        finally:
            self._in_flight = None
            self.store.abandon(saved.folder)
        self._newest = saved.step
        self.forget(saved.step)

    def _tolerated(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Lost:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            self.failed += 1
            for model in self.models.values():
                model.abandon_save()
            if self._in_flight:
                self.store.abandon(self._in_flight.folder)
            self._in_flight = None
            logger.error("a checkpoint was not written (%d so far); earlier ones are intact: %s", self.failed, error)

    def _export(self, folder: Path) -> None:
        """Write a Hugging Face folder, in place of one from before the run went back or on."""
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        self.export(str(folder))
        shutil.rmtree(old, ignore_errors=True)
