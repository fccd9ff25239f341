"""Folders written whole or not at all, which an interrupted writer can take up again."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

from parallel.durable_files import fsync_path

_MANIFEST = "conversion.json"
_UNFINISHED = ".unfinished"


class ByteProgress(Protocol):
    """Who wants to know how far a conversion is, in bytes."""

    def begin(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


class ResumableFolder:
    """A folder on its way to the name `target`. Files appear in it when they are whole; a manifest lists them.

    The manifest also says what they were made from, so that a later process keeps them only where that is still so. Used as
    a context: it is this process's alone until the end.
    """

    def __init__(self, target: Path, folder: Path, made_from: dict[str, Any]) -> None:
        self.target, self.folder, self.made_from = target, folder, made_from
        self.finished: dict[str, Any] = {}
        self._lock: int | None = None

    @classmethod
    def beside(cls, target: str | Path, made_from: dict[str, Any]) -> "ResumableFolder":
        """`TARGET.partial`, new or as an interrupted writer left it; raises ValueError when the target exists."""
        target = Path(target)
        refuse_existing(target)
        made_from = json.loads(json.dumps(made_from))  # as the manifest will read back
        return cls(target, target.with_name(target.name + ".partial"), made_from)

    def __enter__(self) -> "ResumableFolder":
        """Start it, or take it up; raises ValueError when it holds parts of something else, or is being written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        manifest = self.folder / _MANIFEST
        if manifest.is_file():
            before = json.loads(manifest.read_text())
            if before["made_from"] != self.made_from:
                self.__exit__()
                raise ValueError(_changed(self.folder, before["made_from"], self.made_from))
            self.finished = before["finished"]
        self._write_manifest()
        return self

    def __exit__(self, *error: object) -> None:
        """Let others write it; what is finished stays."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def unfinished(self, name: str) -> Path:
        """Where the file `name` is written until it is whole."""
        return self.folder / (name + _UNFINISHED)

    def finish(self, name: str, note: Any = None) -> None:
        """The file is whole: it gets its name, on the disk for good; `note` (JSON) is in `finished` from now on."""
        fsync_path(self.unfinished(name))
        self.unfinished(name).rename(self.folder / name)
        self.finished[name] = note
        self._write_manifest()

    def require_space(self, num_bytes: int) -> None:
        """Raise ValueError unless the disk has room for `num_bytes` more (files cut short count as free)."""
        for path in self.folder.glob("*" + _UNFINISHED):
            path.unlink()
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            if not self.finished:
                self.discard()
            raise ValueError(
                f"{self.target}: {num_bytes / 1e9:.2f} GB are to be written, and {free / 1e9:.2f} GB are free on that "
                "disk; make room, or name an output elsewhere."
            )

    def complete(self) -> None:
        """Give the folder its name."""
        for path in [*self.folder.iterdir(), self.folder]:
            fsync_path(path)
        self.folder.chmod(0o755)
        self.folder.rename(self.target)
        (self.target / _MANIFEST).unlink()
        fsync_path(self.target.parent)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_manifest(self) -> None:
        manifest = self.folder / _MANIFEST
        new = manifest.with_suffix(".new")
        new.write_text(json.dumps({"made_from": self.made_from, "finished": self.finished}))
        fsync_path(new)
        new.rename(manifest)


def refuse_existing(target: Path) -> None:
    """Raise ValueError when there is something under this name already."""
    if target.exists():
        raise ValueError(f"{target} exists already and is never replaced; name another output, or remove it.")


def fingerprint(files: list[Path]) -> dict[str, list[int]]:
    """Size and time of change of each file, by path: what tells a changed source."""
    return {str(path.resolve()): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"{folder} is being written by another process; wait for it, or name another output."
        ) from None
    except OSError:  # a file system without locks: two writers are then the user's to avoid
        pass
    return descriptor


def _changed(folder: Path, before: dict, now: dict) -> str:
    files, others = before.pop("files", {}), now.get("files", {})
    changed = [
        f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in before if before[key] != now.get(key)
    ]
    changed += [f"{name} has changed" for name in others if others[name] != files.get(name)]
    changed += [f"{name} is gone" for name in files.keys() - others.keys()]
    return (
        f"{folder} holds parts of a conversion that was interrupted, and was made from something else "
        f"({'; '.join(changed[:3])}); remove it to start over, or name another output."
    )
