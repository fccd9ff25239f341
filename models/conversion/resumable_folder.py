"""Output folders that have a temporary name until they are complete. An interrupted write can be resumed."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from parallel.durable_files import FileHash, apply_umask, fsync_path, hash_file, write_file, write_hashes

_MANIFEST = "conversion.json"
_UNFINISHED = ".unfinished"


class ByteProgress(Protocol):
    """Shows the progress of a conversion in bytes."""

    def begin(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


class ResumableFolder:
    """A folder that is written as `folder` and renamed to `target` when it is complete.

    A file with weights has the path that `unfinished` returns until `finish` gives it its final name. A manifest lists the
    finished files. The manifest also stores `made_from`, the inputs and options from which the files are made. A later process
    uses the finished files only if its own inputs and options are the same. Inside the `with` block, this process has a lock on
    the folder. A complete folder contains the hashes of its files, see parallel.durable_files.
    """

    def __init__(self, target: Path, folder: Path, made_from: dict[str, Any]) -> None:
        self.target, self.folder, self.made_from = target, folder, made_from
        self.finished: dict[str, Any] = {}
        self._hashes: dict[str, FileHash] = {}  # hashes of the finished files
        self._lock: int | None = None

    @classmethod
    def beside(cls, target: str | Path, made_from: dict[str, Any]) -> "ResumableFolder":
        """Return a folder that is written as `TARGET.partial`. Raises ValueError if `target` exists.

        If `TARGET.partial` exists after an interrupted write, the `with` block resumes that write.
        """
        target = Path(target)
        refuse_existing(target)
        made_from = json.loads(json.dumps(made_from))  # so that a comparison with a manifest file sees the same types
        return cls(target, target.with_name(target.name + ".partial"), made_from)

    def __enter__(self) -> "ResumableFolder":
        """Create or resume the folder.

        Raises ValueError if the manifest has another `made_from`, or if another process writes the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock_folder(self.folder)
        manifest = self.folder / _MANIFEST
        if manifest.is_file():
            before = json.loads(manifest.read_text())
            if before["made_from"] != self.made_from:
                self.__exit__()
                raise ValueError(_describe_change(self.folder, before["made_from"], self.made_from))
            self.finished, self._hashes = before["finished"], before["hashes"]
        self._write_manifest()
        return self

    def __exit__(self, *error: object) -> None:
        """Release the lock. Finished files remain."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def unfinished(self, name: str) -> Path:
        """Return the path that the file `name` has until it is complete."""
        return self.folder / (name + _UNFINISHED)

    def finish(self, name: str, note: Any = None) -> None:
        """Sync a complete file to the disk, and rename it to its final name. `note` (JSON) is stored in `finished[name]`."""
        fsync_path(self.unfinished(name))
        self.unfinished(name).rename(self.folder / name)
        self.finished[name], self._hashes[name] = note, hash_file(self.folder / name)
        self._write_manifest()

    def require_space(self, num_bytes: int) -> None:
        """Remove unfinished files, then raise ValueError if fewer than `num_bytes` are free on the disk.

        If no file is finished, the folder is removed before the error is raised.
        """
        for path in self.folder.glob("*" + _UNFINISHED):
            path.unlink()
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            if not self.finished:
                self.discard()
            raise ValueError(
                f"{self.target}: the output needs {num_bytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free on "
                "its disk; remove other files, or name an output on another disk."
            )

    def complete(self) -> None:
        """Write the hashes of all files, sync the files to the disk and rename the folder to `target`."""
        write_hashes(self.folder, self._hashes, leave_out=_MANIFEST)
        for path in [*self.folder.iterdir(), self.folder]:
            fsync_path(path)
        apply_umask(self.folder)
        self.folder.rename(self.target)
        (self.target / _MANIFEST).unlink()
        fsync_path(self.target.parent)

    def discard(self) -> None:
        """Remove the folder and all its files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_manifest(self) -> None:
        content = json.dumps({"made_from": self.made_from, "finished": self.finished, "hashes": self._hashes})
        write_file(self.folder / _MANIFEST, content, durable=True)


def refuse_existing(target: Path) -> None:
    """Raise ValueError if `target` exists."""
    if target.exists():
        raise ValueError(f"{target} exists already and is never replaced; name another output, or remove it.")


def fingerprint(files: list[Path]) -> dict[str, list[int]]:
    """Return [size, modification time in ns] of each file by path, to detect changed inputs."""
    return {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _lock_folder(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{folder} is being written by another process; wait for it, or name another output."
        ) from None
    except OSError:  # the file system has no locks, so nothing prevents a second writer
        pass
    return descriptor


def _describe_change(folder: Path, before: dict, now: dict) -> str:
    files, current_files = before.pop("files", {}), now.get("files", {})
    changed = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now" for key in before if before[key] != now.get(key)
    ]
    changed += [f"{name} has changed" for name in current_files if current_files[name] != files.get(name)]
    changed += [f"{name} is missing" for name in files.keys() - current_files.keys()]
    return (
        f"{folder} holds an interrupted conversion with other inputs or options "
        f"({'; '.join(changed[:3])}); remove it to start over, or name another output."
    )
