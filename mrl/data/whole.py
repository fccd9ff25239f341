"""Folders that appear under their name only when they are complete."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(folder: str | Path) -> Iterator[Path | None]:
    """A folder to write to, which becomes `folder` in the end; None where that exists already.

    Of two processes that make it at once, one wins. Nothing is left of one that fails.
    """
    folder = Path(folder)
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield partial
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # somebody else's is as good
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
