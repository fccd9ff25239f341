"""CheckpointSaver: writes checkpoints and Hugging Face folders.

Only one checkpoint is written at a time. Training can continue while a checkpoint is written.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.core.jsonl import write_json
from mrl.core.run_errors import ProcessesLostError, check_in_place

logger = logging.getLogger(__name__)


_EXPORT = re.compile(r"step_(\d{6,})")  # name of a folder in exports/
_STEP_FILE = "mrl_step.json"  # last file that is written to the folder hf/; it has the step of the weights


def exported_step(run_dir: Path) -> int | None:
    """Return the step of the weights in the folder hf/. None: hf/ is missing, incomplete or from an older mrl."""
    try:
        return int(json.loads((run_dir / "hf" / _STEP_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class SavableModel(Protocol):
    """The trainer ranks of one model, which together write this model's part of a checkpoint."""

    def begin_save(self, folder: str, asynchronous: bool, timeout_s: float) -> None:
        """Take a snapshot of the model and begin to write it. If not `asynchronous`, return when the files are written."""
        ...

    def save_has_ended(self) -> bool:
        """Return whether every rank has written its part of the checkpoint, or has failed to write it."""
        ...

    def finish_save(self, timeout_s: float) -> None:
        """Wait until the files are on disk. Raises the error of a rank that failed to write."""
        ...

    def abandon_save(self) -> None:
        """Abandon the save in progress, if there is one."""
        ...


@dataclass(frozen=True)
class CheckpointSchedule:
    """When checkpoints and exports are written."""

    every: int  # training steps between two checkpoints; 0: a checkpoint is written only when the run ends
    export_every: int  # training steps between two Hugging Face folders in exports/; 0: there are none
    asynchronous: bool  # whether training continues while a checkpoint is written
    timeout_s: float  # longest time for writing one checkpoint
    at_end: bool  # whether to write a checkpoint and a Hugging Face folder at the end of the run
    best_metric: str  # name of the metric that ranks checkpoints
    keep_last_exports: int | None = None  # number of newest folders in exports/ to keep; None: all


@dataclass(frozen=True)
class _PendingSave:
    """A checkpoint that is being written."""

    folder: Path
    step: int
    state: Mapping[str, Any]  # state of the driver
    score: float | None  # value of the schedule's `best_metric`; None if this value is unknown
    deadline: float  # value of time.monotonic() until which the checkpoint must be complete


@dataclass
class CheckpointSaver:
    """Writes checkpoints: first the trainer ranks write their models, then the driver writes its state."""

    store: CheckpointStore
    models: Mapping[str, SavableModel]  # actor and, if there is one, critic
    # parts of a checkpoint that never change, such as the reference: name -> function that writes the part to a folder
    constant_parts: Mapping[str, Callable[[str], None]]
    schedule: CheckpointSchedule
    run_description: Mapping[str, Any]  # model, layout and config of the run, which each checkpoint records
    # with the argument n, removes the first n steps of the run from run.dir/rollout_log
    discard_rollout_log: Callable[[int], None]
    export: Callable[[str], None]  # writes the actor's weights as a Hugging Face folder
    run_dir: Path
    failed: int = 0  # number of checkpoints that could not be written
    _pending: _PendingSave | None = None  # None while no checkpoint is being written
    _newest: int | None = None  # step of the newest checkpoint

    def __post_init__(self) -> None:
        self._folder = os.open(self.run_dir, os.O_RDONLY)  # stays open; `check_in_place` compares it with the path

    def between_steps(self, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Finish the pending checkpoint if its files are written or the next one is due; begin a checkpoint or an export if due.

        If a checkpoint fails, or the disk fails in an export, the failure is logged and the run continues. `state`: state of
        the driver. `metrics`: metrics of the last step. Raises RunDirMovedError if the run directory was moved, deleted or
        replaced. The methods `save_now` and `finish` raise this error, too. Raises ProcessesLostError if trainer ranks died or
        hang.
        """
        check_in_place(self._folder, self.run_dir)
        step, schedule = state["progress"]["step"], self.schedule
        if step == 0:
            return
        is_due = bool(schedule.every) and step % schedule.every == 0
        if self._pending and (is_due or self._write_has_ended()):
            self._attempt(self._finish)
        if is_due and step != self._newest:
            self._attempt(lambda: self._begin(state, metrics.get(schedule.best_metric), schedule.asynchronous))
            if not schedule.asynchronous and self._pending:
                self._attempt(self._finish)
        if schedule.export_every and step % schedule.export_every == 0:
            try:
                self._export(self.run_dir / "exports" / f"step_{step:06d}")
                self._prune_exports(step)
            except OSError as error:
                logger.error("the weights of step %d were not exported: %s", step, error)

    def save_now(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of this state before returning. Raises an error if that fails."""
        check_in_place(self._folder, self.run_dir)
        if self._pending:
            self._attempt(self._finish)
        if self._newest != state["progress"]["step"]:
            self._begin(state, None, asynchronous=False)
            self._finish()

    def finish(self, state: Mapping[str, Any]) -> None:
        """If the schedule has `at_end`, write the last checkpoint of the run, and the actor's weights to the folder hf/.

        Otherwise, finish a pending checkpoint.
        """
        check_in_place(self._folder, self.run_dir)
        if self.schedule.at_end:
            self.save_now(state)
            self._export(self.run_dir / "hf")
            write_json(self.run_dir / "hf" / _STEP_FILE, {"step": state["progress"]["step"]})
            if not self.store.wait_for_copy(self.schedule.timeout_s):
                logger.error(
                    "the last checkpoint is still being copied to checkpoint.copy_to; the run ends without the copy"
                )
        elif self._pending:
            self._attempt(self._finish)

    def restart_from(self, checkpoint: Checkpoint | None) -> None:
        """Forget a pending save, because the trainers restart from `checkpoint`, or from step 0 if `checkpoint` is None."""
        self._pending, self._newest = None, checkpoint.step if checkpoint else None

    def _begin(self, state: Mapping[str, Any], score: float | None, asynchronous: bool) -> None:
        folder = self.store.begin()
        deadline = time.monotonic() + self.schedule.timeout_s
        self._pending = _PendingSave(folder, state["progress"]["step"], state, score, deadline)
        for name, write in self.constant_parts.items():
            if not self.store.link_latest(name, folder):
                write(str(folder / name))
        for name, model in self.models.items():
            model.begin_save(str(folder / name), asynchronous, self.schedule.timeout_s)

    def _write_has_ended(self) -> bool:
        """Return whether every rank's write has ended. After the deadline, return true."""
        assert self._pending, "a save is pending"
        late = time.monotonic() > self._pending.deadline
        return late or all(model.save_has_ended() for model in self.models.values())

    def _finish(self) -> None:
        """Wait for the pending save, and commit it as a checkpoint."""
        assert self._pending, "a save is pending"
        saved = self._pending
        try:
            for model in self.models.values():
                model.finish_save(max(1.0, saved.deadline - time.monotonic()))
            self.store.commit(saved.folder, saved.step, {**saved.state, **self.run_description}, saved.score)
        finally:
            self._pending = None
            self.store.abandon(saved.folder)
        self._newest = saved.step
        self.discard_rollout_log(saved.step)

    def _attempt(self, action: Callable[[], None]) -> None:
        """Call `action`. If it raises OSError, RuntimeError or ValueError, log the error and abandon the pending save.

        Raises ProcessesLostError, and all other errors.
        """
        try:
            action()
        except ProcessesLostError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            self.failed += 1
            for model in self.models.values():
                model.abandon_save()
            if self._pending:
                self.store.abandon(self._pending.folder)
            self._pending = None
            logger.error(
                "a checkpoint was not written (%d so far); earlier checkpoints are intact: %s", self.failed, error
            )

    def _export(self, folder: Path) -> None:
        """Write a Hugging Face folder. An existing folder is replaced when the new one is complete."""
        new, old = (folder.with_name(f".{folder.name}.{word}") for word in ("new", "old"))
        for remains in (new, old):
            shutil.rmtree(remains, ignore_errors=True)
        self.export(str(new))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def _prune_exports(self, step: int) -> None:
        """Remove old folders in exports/. Ignores folders of later steps, which the run wrote before it was resumed."""
        names = [_EXPORT.fullmatch(path.name) for path in (self.run_dir / "exports").iterdir()]
        steps = sorted(int(name[1]) for name in names if name and int(name[1]) <= step)
        keep = self.schedule.keep_last_exports
        for old in steps[:-keep] if keep else []:
            folder = self.run_dir / "exports" / f"step_{old:06d}"
            # The folder is renamed first: if the process is killed during the removal, no incomplete folder has the name step_N.
            folder.rename(folder.with_name(f".{folder.name}.old"))
        for word in ("new", "old"):
            for remains in (self.run_dir / "exports").glob(f".step_*.{word}"):
                shutil.rmtree(remains, ignore_errors=True)
