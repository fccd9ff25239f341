"""Checkpoints on disk: folders that are whole or absent, of which the newest are kept. What is in them others write and read.

run.dir/checkpoints/step_000050/    actor/ critic/   Megatron's distributed checkpoints, RNG states included
                                    state.json       position of everything else, and the size of every file
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

from parallel.disk import sync

logger = logging.getLogger(__name__)

FORMAT = 1
STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    path: Path
    step: int  # optimizer steps of the actor have been taken for so many steps of the loop
    state: Mapping[str, Any]  # what the driver wrote
    score: float | None = None  # the greater the better

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Look whether the checkpoint in `path` is whole; raises ValueError that says what is not."""
        try:
            content = json.loads((path / STATE).read_text())
            if content["format"] != FORMAT:
                raise ValueError(
                    f"{path}: a checkpoint of format {content['format']}, this version of mrl reads {FORMAT}."
                )
            files, step, state = content["files"], content["step"], content["state"]
        except FileNotFoundError:
            raise ValueError(f"{path}: has no {STATE}, so it is no whole checkpoint of a run.") from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: {STATE} cannot be read ({type(error).__name__}: {error}).") from None
        for name, size in files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                got = "is missing" if found is None else f"has {found} bytes"
                raise ValueError(f"{path}: {name} {got}, was written with {size}; the checkpoint is torn.")
        return cls(path, step, state, content.get("score"))


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    keep_last: int = 2
    keep_best: int = 0  # besides those, with the highest score
    copy_to: str | None = None  # fsspec URL of a folder that gets a copy of each
    _copying: list[threading.Thread] = field(default_factory=list)  # the one copy under way

    def begin(self) -> Path:
        """An empty folder to write the next checkpoint in; remains of earlier ones are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for remains in self.folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(remains, ignore_errors=True)
        partial = self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}"
        partial.mkdir()
        return partial

    def link_latest(self, name: str, partial: Path) -> bool:
        """Have the newest checkpoint's part `name` in this one too, without writing it again; False where that is impossible."""
        newest = self.latest()
        if newest is None or not (newest.path / name).is_dir():
            return False
        try:
            shutil.copytree(newest.path / name, partial / name, copy_function=os.link)
        except (OSError, shutil.Error):  # a file system without links
            shutil.rmtree(partial / name, ignore_errors=True)
            return False
        return True

    def commit(self, partial: Path, step: int, state: Mapping[str, Any], score: float | None = None) -> Checkpoint:
        """Make what was written in `partial` the checkpoint of `step`; then remove those that are not kept.

        `score`: the greater the better. Raises OSError where the disk does not take it; `partial` is then to be abandoned.
        """
        files = {str(file.relative_to(partial)): file.stat().st_size for file in _files(partial)}
        content = dict(format=FORMAT, step=step, score=score, files=files, state=state)
        with (partial / STATE).open("w") as file:
            json.dump(content, file, indent=1)
        sync(partial / STATE)
        sync(partial)
        path, old = self._path(step), self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}"
        if path.exists():
            path.rename(old)
        partial.rename(path)
        sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        self._copy_beside(path)
        return Checkpoint(path, step, state, score)

    def abandon(self, partial: Path) -> None:
        """Remove what was not finished."""
        shutil.rmtree(partial, ignore_errors=True)

    def all_torn(self) -> bool:
        """Whether there are checkpoints, and none is whole."""
        return bool(self._steps()) and self.latest() is None

    def latest(self) -> Checkpoint | None:
        """The newest whole one; torn ones are passed over with a warning."""
        return next(self._whole(), None)

    def _whole(self) -> Iterator[Checkpoint]:
        """Those that are whole, the newest first."""
        for step in sorted(self._steps(), reverse=True):
            try:
                yield Checkpoint.read(self._path(step))
            except ValueError as error:
                logger.warning("passed over: %s", error)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("step_*")]
        return [int(name[1]) for name in names if name]

    def _prune(self) -> None:
        whole = list(self._whole())[::-1]  # oldest first; torn ones take nobody's place
        scores = {one.step: one.score for one in whole if one.score is not None}
        best = sorted(scores, key=lambda step: scores[step], reverse=True)[: self.keep_best]
        steps = [one.step for one in whole]
        for step in set(steps) - set(steps[-self.keep_last :]) - set(best):
            doomed = self._path(step).rename(self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}")
            shutil.rmtree(doomed, ignore_errors=True)  # from its new name: a kill midway leaves no torn checkpoint

    def _copy_beside(self, path: Path) -> None:
        """Begin to copy a whole checkpoint to `copy_to`; nobody waits for a store that is slow, but at the end."""
        if self.copy_to and self.copied(timeout_s=0):
            self._copying[:] = [threading.Thread(target=self._copy, args=[path], name="copy", daemon=True)]
            self._copying[0].start()
        elif self.copy_to:
            logger.warning("%s is not copied: the copy of an earlier checkpoint is still under way", path)

    def copied(self, timeout_s: float) -> bool:
        """Wait for the copy under way; whether there is none any more."""
        for thread in self._copying:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._copying)

    def _copy(self, path: Path) -> None:
        """Copy a whole checkpoint, its state last; a store that does not take it is a warning."""
        import fsspec  # seconds, for those who use it

        try:
            files, root = fsspec.url_to_fs(self.copy_to or "")
            target = f"{root.rstrip('/')}/{path.name}"
            for file in sorted(_files(path), key=lambda file: file.name == STATE):
                place = f"{target}/{file.relative_to(path)}"
                files.makedirs(place.rpartition("/")[0], exist_ok=True)
                files.put_file(str(file), place)
        except Exception as error:  # a plug-in of fsspec's may raise anything
            logger.warning("%s was not copied to %s: %s: %s", path, self.copy_to, type(error).__name__, error)


def find(where: str) -> Checkpoint:
    """The checkpoint that a user names: its folder, that of a run, or that of a run's checkpoints. Raises ValueError."""
    path = Path(where)
    if not path.is_dir():
        raise ValueError(f"resume={where}: no such folder; name a checkpoint, or use auto or never.")
    if (path / STATE).is_file() or _NAME.fullmatch(path.name):
        return Checkpoint.read(path)
    for folder in (path, path / "checkpoints"):
        if found := CheckpointStore(folder).latest():
            return found
    raise ValueError(f"resume={where}: holds no whole checkpoint; name a folder such as RUN/checkpoints/step_000050.")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
