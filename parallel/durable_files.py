"""Crash-safe writes: fsync, atomic replacement of files, and folders that appear only when they are complete.

The functions write under a temporary name in the same parent folder, and rename the result at the end. A reader sees either
the old content or the complete new content, even if the writer is killed.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(path: Path) -> None:
    """Give a file, or a folder and everything in it, the mode that new files and folders get.

    The mode is 0o666 for a file and 0o777 for a folder, without the bits of the umask. This function is needed because
    tempfile.mkdtemp and safetensors create folders and files that only their owner can read.
    """
    umask = _umask()
    for entry in [path, *path.rglob("*")] if path.is_dir() else [path]:
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~umask)


def _umask() -> int:
    """Return the umask of this process. os.umask would change it for a moment, also for files that other threads create."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`; if the block ends without an error, the temporary file replaces `path`.

    With `durable`, the bytes are on the disk before the rename. If the block fails, `path` stays as it was, and the temporary
    file is removed. The temporary name has the suffix of `path`, because some writers append a missing suffix. Two processes
    must not write the same path at the same time.
    """
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        if durable:
            fsync_path(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_file(path: Path, content: bytes | str, *, durable: bool = False) -> None:
    """Replace the content of `path` atomically; `str` is written as UTF-8. For `durable` see `atomic_file`."""
    with atomic_file(path, durable=durable) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_folder(folder: str | Path) -> Iterator[Path | None]:
    """Yield a temporary folder that becomes `folder` when the block ends, or None if `folder` exists already.

    If two processes create the same folder at the same time, the folder that is finished first stays, and the second folder is
    removed. If the block fails, the temporary folder is removed.
    """
    folder = Path(folder)
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield partial
        apply_umask(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # an existing folder was completed by another process
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder and wait until the new name is on the disk. The caller must already have synced the content."""
    source.rename(target)
    fsync_path(target.parent)
