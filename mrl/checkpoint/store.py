"""CheckpointStore: the checkpoint folders of a run.

A checkpoint folder gets its name only when it is complete. Old checkpoints are removed. The checkpoint folder
run.dir/checkpoints/step_000050/ has:

    actor/ critic/ reference/    distributed checkpoints and random number generator states (parallel/checkpoint.py)
    state.json                   state of the driver, size and hash of every file, and the hash of its own text

A run may keep a part, such as the critic, in fewer checkpoints than the other parts. This part is then removed from older
checkpoints, and their state.json says so. Such a checkpoint is intact, but a run continues only from a checkpoint with all
parts that the run needs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parallel.durable_files import (
    FileHash,
    find_damage,
    fsync_path,
    hash_file,
    hash_files,
    hash_stream,
    read_hashes,
    read_sealed_json,
    rename_durably,
    sealed_json,
    write_file,
)

logger = logging.getLogger(__name__)

FORMAT = 3  # format of checkpoint folders; checkpoints of another format are refused
STATE_FILE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL = ".partial-"  # prefix of the name of an incomplete folder


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int  # number of finished training steps
    state: Mapping[str, Any]  # state of the driver
    score: float | None = None  # value of checkpoint.best_metric, higher is better; None if it was not known
    files: Mapping[str, FileHash] = field(default_factory=dict)  # path in the folder -> (size in bytes, hash)
    removed: tuple[str, ...] = ()  # parts, such as critic, that were removed later

    @property
    def parts(self) -> set[str]:
        """Names of the parts that the checkpoint has, such as actor."""
        return {name.partition("/")[0] for name in self.files}

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a checkpoint. Raises ValueError if it is incomplete; the message says what is missing.

        This method compares the hash of state.json, but only the sizes of all other files. `check_hashes` compares their hashes.
        """
        content = _read_state(path)
        if damage := find_damage(path, content["files"], content=False):
            raise ValueError(f"{path}: {damage}; the checkpoint is incomplete.")
        name = _NAME.fullmatch(path.name)
        if name and int(name[1]) != content["step"]:
            raise ValueError(f"{path}: the folder has the checkpoint of step {content['step']}; rename the folder.")
        removed = tuple(content.get("removed", ()))
        return cls(path, content["step"], content["state"], content["score"], content["files"], removed)

    def write_state(self, folder: Path) -> None:
        """Replace state.json in `folder`, and wait until it is on the disk."""
        content = dict(format=FORMAT, step=self.step, score=self.score, files=self.files, state=self.state)
        content |= dict(removed=self.removed) if self.removed else {}
        write_file(folder / STATE_FILE, sealed_json(content), durable=True)
        fsync_path(folder)

    def check_hashes(self) -> None:
        """Read all files. Raises ValueError if one differs from what was written; the message names the file and the cause."""
        start = time.perf_counter()
        if damage := find_damage(self.path, self.files):
            raise ValueError(f"{self.path}: {damage}; use another checkpoint.")
        seconds, size = time.perf_counter() - start, sum(size for size, _ in self.files.values())
        logger.info("%s is intact (%.2f GB read in %.1f s)", self.path, size / 1e9, seconds)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one run."""

    folder: Path
    keep_last: int = 2  # number of newest checkpoints to keep
    keep_last_of: Mapping[str, int] = field(default_factory=dict)  # part -> its own value of `keep_last`
    keep_best: int = 0  # number of checkpoints with the highest scores to keep, even if they are old
    copy_to: str | None = None  # fsspec URL of a folder to which each checkpoint is copied
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoints have files with wrong hashes
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
        """Turn the folder `partial` into the checkpoint of `step`. Then remove old checkpoints and begin the copy to `copy_to`.

        `score`: higher is better. Raises OSError if the disk fails; the caller then abandons `partial`.
        """
        path, old = self._path(step), self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}"
        checkpoint = Checkpoint(path, step, state, score, _hashes(partial))
        checkpoint.write_state(partial)
        if path.exists():
            path.rename(old)
        rename_durably(partial, path)
        self.damaged.discard(step)
        shutil.rmtree(old, ignore_errors=True)
        self._prune()
        self._start_copy(checkpoint)
        return checkpoint

    def abandon(self, partial: Path) -> None:
        """Remove an incomplete folder."""
        shutil.rmtree(partial, ignore_errors=True)

    def is_empty(self) -> bool:
        """Return whether no folder has the name of a checkpoint. The content of the folders does not matter."""
        return not self._steps()

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint that has all parts and that is not in `damaged`.

        Incomplete checkpoints are skipped with a warning.
        """
        return next(self._with_all_parts(), None)

    def latest_intact(self, *, check_hashes: bool = True) -> Checkpoint | None:
        """Return the newest checkpoint that has all parts, and whose files all have the recorded hashes.

        Incomplete and damaged checkpoints are skipped with a warning, and those with wrong hashes are added to `damaged`. The
        function reads all files of a checkpoint, so it takes time. If `check_hashes` is False, it compares only the sizes of the
        files.
        """
        if not check_hashes:
            return self.latest()
        for checkpoint in self._with_all_parts():
            try:
                checkpoint.check_hashes()
                return checkpoint
            except (OSError, ValueError) as error:
                self.damaged.add(checkpoint.step)
                logger.warning("checkpoint skipped: %s", error)
        return None

    def _complete(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints that are not in `damaged`, newest first."""
        for step in sorted(set(self._steps()) - self.damaged, reverse=True):
            try:
                yield Checkpoint.read(self._path(step))
            except (OSError, ValueError) as error:
                logger.warning("checkpoint skipped: %s", error)

    def _with_all_parts(self) -> Iterator[Checkpoint]:
        """Yield the complete checkpoints from which a run can continue, newest first."""
        return (checkpoint for checkpoint in self._complete() if not checkpoint.removed)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def _steps(self) -> list[int]:
        names = [_NAME.fullmatch(path.name) for path in self.folder.glob("step_*")]
        return [int(name[1]) for name in names if name]

    def _prune(self) -> None:
        """Remove the parts that old checkpoints need not keep. The newest and the `keep_best` best checkpoints keep all parts."""
        complete = list(self._complete())
        scores = {one.step: one.score for one in complete if one.score is not None}
        best = sorted(sorted(scores), key=lambda step: scores[step], reverse=True)[: self.keep_best]
        for age, checkpoint in enumerate(complete):
            parts = checkpoint.parts or {""}  # "" stands for a checkpoint that has only a state
            kept = {part for part in parts if age < self.keep_last_of.get(part, self.keep_last)}
            try:
                if not kept and checkpoint.step not in best:
                    self._remove(checkpoint.path)
                    continue
                dropped = () if checkpoint.step in best else tuple(sorted(checkpoint.parts - kept))
                self._remove_parts(checkpoint, dropped)
            except OSError as error:
                logger.warning("%s: an old checkpoint could not be removed: %s", checkpoint.path, error)

    def _remove_parts(self, checkpoint: Checkpoint, parts: tuple[str, ...]) -> None:
        """Remove `parts` of a checkpoint, and parts that an earlier, interrupted call has left.

        state.json is written first. If the process is killed after that, the checkpoint is complete, but its folder still has
        files that do not belong to it.
        """
        if parts:
            files = {name: entry for name, entry in checkpoint.files.items() if name.partition("/")[0] not in parts}
            checkpoint = replace(checkpoint, files=files, removed=(*checkpoint.removed, *parts))
            checkpoint.write_state(checkpoint.path)
        for part in checkpoint.removed:
            if (checkpoint.path / part).exists():
                self._remove(checkpoint.path / part)

    def _remove(self, path: Path) -> None:
        """Remove a folder. It is renamed first, so a kill during the removal leaves no incomplete checkpoint."""
        renamed = path.rename(self.folder / f"{_PARTIAL}{uuid.uuid4().hex[:8]}")
        shutil.rmtree(renamed, ignore_errors=True)

    def _start_copy(self, checkpoint: Checkpoint) -> None:
        """Start a thread that copies a complete checkpoint to `copy_to`. Only CheckpointSaver.finish waits for the copy."""
        if self.copy_to and self.wait_for_copy(timeout_s=0):
            self._copying[:] = [threading.Thread(target=self._copy, args=[checkpoint], name="copy", daemon=True)]
            self._copying[0].start()
        elif self.copy_to:
            logger.warning("%s is not copied: an earlier checkpoint is still being copied", checkpoint.path)

    def wait_for_copy(self, timeout_s: float) -> bool:
        """Wait for the running copy, if there is one. Returns whether it has ended."""
        for thread in self._copying:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._copying)

    def _copy(self, checkpoint: Checkpoint) -> None:
        """Copy a complete checkpoint, its state file last. A failure is logged as a warning.

        Each copied file is read again. If its hash is wrong, the copy gets no state file, so it is not a complete checkpoint.
        """
        import fsspec  # the import takes seconds

        try:
            files, root = fsspec.url_to_fs(self.copy_to or "")
            target = f"{root.rstrip('/')}/{checkpoint.path.name}"
            for name in [*sorted(checkpoint.files), STATE_FILE]:
                expected = checkpoint.files.get(name) or hash_file(checkpoint.path / name)
                destination = f"{target}/{name}"
                files.makedirs(destination.rpartition("/")[0], exist_ok=True)
                files.put_file(str(checkpoint.path / name), destination)
                with files.open(destination, "rb") as copied:
                    if (found := hash_stream(copied)) != tuple(expected):
                        raise ValueError(f"size and hash of the copied file {name} are {found}, expected {expected}")
        except Exception as error:  # plug-ins of fsspec may raise any error
            path = checkpoint.path
            logger.warning("%s was not copied to %s: %s: %s", path, self.copy_to, type(error).__name__, error)


def find_checkpoint(path_or_run: str, *, check_hashes: bool = True) -> Checkpoint:
    """Return the checkpoint in a folder. For a run directory or its folder checkpoints/, return the newest checkpoint there.

    If `check_hashes` is False, only the sizes of the files are compared. Raises ValueError if there is no complete checkpoint,
    or if the named checkpoint is damaged.
    """
    path = Path(path_or_run)
    if not path.is_dir():
        raise ValueError(
            f"resume={path_or_run}: no such folder; name a checkpoint or a run directory, or use auto or never."
        )
    if (path / STATE_FILE).is_file() or _NAME.fullmatch(path.name):
        checkpoint = Checkpoint.read(path)
        if check_hashes:
            checkpoint.check_hashes()
        return checkpoint
    for folder in (path, path / "checkpoints"):
        if found := CheckpointStore(folder).latest_intact(check_hashes=check_hashes):
            return found
    raise ValueError(
        f"resume={path_or_run}: the folder has no complete and undamaged checkpoint; name a folder such as "
        "RUN/checkpoints/step_000050."
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read_state(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Raises ValueError if it is missing, damaged or of another format."""
    file = path / STATE_FILE
    try:
        text = file.read_text(errors="replace")
        content = json.loads(text)
        found = content["format"] if isinstance(content, dict) else type(content).__name__
    except FileNotFoundError:
        raise ValueError(f"{path}: the folder has no {STATE_FILE}, so it is not a complete checkpoint.") from None
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path}: {STATE_FILE} cannot be read ({type(error).__name__}: {error}).") from None
    if found != FORMAT:
        raise ValueError(f"{path}: the checkpoint has format {found}; this version of mrl reads format {FORMAT}.")
    content = read_sealed_json(file, {"format", "step", "score", "files", "state"} | ({"removed"} & content.keys()))
    return content | {"files": {name: (size, digest) for name, (size, digest) in content["files"].items()}}


def _hashes(folder: Path) -> dict[str, FileHash]:
    """Return path -> (size, hash) of every file of a checkpoint. Files that their writers have hashed are not read again."""
    known: dict[str, FileHash] = {}
    for part in folder.iterdir():
        if part.is_dir():
            known |= {f"{part.name}/{name}": entry for name, entry in read_hashes(part).items()}
    names = [str(file.relative_to(folder)) for file in _files(folder)]
    if damage := find_damage(folder, known, content=False):
        raise OSError(f"{damage}")
    return dict(sorted((known | hash_files(folder, [name for name in names if name not in known])).items()))
