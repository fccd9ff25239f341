"""CheckpointStore: the checkpoint folders of a run.

A checkpoint folder gets its name only when it is complete. Old checkpoints are removed. The checkpoint folder
run.dir/checkpoints/step_000050/ has:

    actor/ critic/ reference/    Megatron's distributed checkpoints with random states; other modules write and read them
    state.json                   state of the driver, and the size of every file
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel.durable_files import fsync_path, rename_durably, write_file

logger = logging.getLogger(__name__)

FORMAT = 1  # format of checkpoint folders; checkpoints of another format are refused
STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".partial-"  # begins the name of an incomplete folder


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int  # number of finished training steps
    state: Mapping[str, Any]  # state of the driver
    score: float | None = None  # value of checkpoint.best_metric, higher is better; None if it was not known

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint. Raises ValueError if it is incomplete; the message names the missing part."""
        try:
            content = json.loads((path / STATE_FILE).read_text())
            if content["format"] != FORMAT:
                raise ValueError(
                    f"{path}: the checkpoint has format {content['format']}; this version of mrl reads format {FORMAT}."
                )
            files, step, state = content["files"], content["step"], content["state"]
        except FileNotFoundError:
            raise ValueError(f"{path}: the folder has no {STATE_FILE}, so it is not a complete checkpoint.") from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {STATE_FILE} cannot be read ({type(error).__name__}: {error}).") from None
        for name, size in files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                got = "is missing" if found is None else f"has {found} bytes"
                raise ValueError(
                    f"{path}: {name} {got} but was written with {size} bytes; the checkpoint is incomplete."
                )
        return cls(path, step, state, content.get("score"))


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    keep_last: int = 2  # number of newest checkpoints to keep
    keep_best: int = 0  # number of checkpoints to keep in addition: the ones with the highest scores
    copy_to: str | None = None  # fsspec URL of a folder to which each checkpoint is copied
    _copying: list[threading.Thread] = field(default_factory=list)  # thread of the latest copy

    def begin(self) -> Path:
        """Create an empty folder for the next checkpoint and return its path. Incomplete folders of earlier saves are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for remains in self.folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(remains, ignore_errors=True)
        partial = self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        return partial

    def link_latest(self, name: str, partial: Path) -> bool:
        """Hard-link the part `name` of the newest checkpoint into the folder `partial`. Returns False if that is impossible."""
        newest = self.latest()
        if newest is None or not (newest.path / name).is_dir():
            return False
        try:
            shutil.copytree(newest.path / name, partial / name, copy_function=os.link)
        except (OSError, shutil.Error):  # the file system has no hard links
            shutil.rmtree(partial / name, ignore_errors=True)
            return False
        return True

    def commit(self, partial: Path, step: int, state: Mapping[str, Any], score: float | None = None) -> Checkpoint:
        """Turn the folder `partial` into the checkpoint of `step`, then remove old checkpoints.

        `score`: higher is better. Raises OSError if the disk fails; the caller then abandons `partial`.
        """
        files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
        content = dict(format=FORMAT, step=step, score=score, files=files, state=state)
        write_file(partial / STATE_FILE, json.dumps(content, indent=1), durable=True)
        fsync_path(partial)
        path, old = self._path(step), self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}"
        if path.exists():
            path.rename(old)
        rename_durably(partial, path)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        self._start_copy(path)
        return Checkpoint(path, step, state, score)

    def abandon(self, partial: Path) -> None:
        """Remove an incomplete folder."""
        shutil.rmtree(partial, ignore_errors=True)

    def all_incomplete(self) -> bool:
        """Return whether there are checkpoint folders but none of them is complete."""
        return bool(self._steps()) and self.latest() is None

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint. Incomplete ones are skipped with a warning."""
        return next(self._complete(), None)

    def _complete(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints, newest first."""
        for step in sorted(self._steps(), reverse=True):
            try:
                yield Checkpoint.read(self._path(step))
            except ValueError as error:
                logger.warning("checkpoint skipped: %s", error)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("step_*")]
        return [int(name[1]) for name in names if name]

    def _prune(self) -> None:
        complete = list(self._complete())[::-1]  # oldest first
        scores = {one.step: one.score for one in complete if one.score is not None}
        best = sorted(scores, key=lambda step: scores[step], reverse=True)[: self.keep_best]
        steps = [one.step for one in complete]
        for step in set(steps) - set(steps[-self.keep_last :]) - set(best):
            removed = self._path(step).rename(self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}")
            # The folder was renamed first, so a kill during its removal leaves no incomplete checkpoint.
            shutil.rmtree(removed, ignore_errors=True)

    def _start_copy(self, path: Path) -> None:
        """Start a thread that copies a complete checkpoint to `copy_to`. The run waits for the thread only at its end."""
        if self.copy_to and self.wait_for_copy(timeout_s=0):
            self._copying[:] = [threading.Thread(target=self._copy, args=[path], name="copy", daemon=True)]
            self._copying[0].start()
        elif self.copy_to:
            logger.warning("%s is not copied: an earlier checkpoint is still being copied", path)

    def wait_for_copy(self, timeout_s: float) -> bool:
        """Wait for the running copy, if there is one. Returns whether it has ended."""
        for thread in self._copying:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._copying)

    def _copy(self, path: Path) -> None:
        """Copy a complete checkpoint, its state file last. A failure is logged as a warning."""
        import fsspec  # the import takes seconds

        try:
            files, root = fsspec.url_to_fs(self.copy_to or "")
            target = f"{root.rstrip('/')}/{path.name}"
            for file in sorted(_files(path), key=lambda file: file.name == STATE_FILE):
                destination = f"{target}/{file.relative_to(path)}"
                files.makedirs(destination.rpartition("/")[0], exist_ok=True)
                files.put_file(str(file), destination)
        except Exception as error:  # plug-ins of fsspec may raise any error
            logger.warning("%s was not copied to %s: %s: %s", path, self.copy_to, type(error).__name__, error)


def find_checkpoint(path_or_run: str) -> Checkpoint:
    """Return the checkpoint in a folder. The folder may also be a run directory or its checkpoints/; then return the newest.

    Raises ValueError if there is no complete checkpoint.
    """
    path = Path(path_or_run)
    if not path.is_dir():
        raise ValueError(
            f"resume={path_or_run}: no such folder; name a checkpoint or a run directory, or use auto or never."
        )
    if (path / STATE_FILE).is_file() or _NAME.fullmatch(path.name):
        return Checkpoint.read(path)
    for folder in (path, path / "checkpoints"):
        if checkpoint := CheckpointStore(folder).latest():
            return checkpoint
    raise ValueError(
        f"resume={path_or_run}: the folder has no complete checkpoint; name a folder such as RUN/checkpoints/step_000050."
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
