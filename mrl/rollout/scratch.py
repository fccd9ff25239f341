"""A server's scratch folder. It goes with its server; that of one whose supervisor was killed goes when the next is made."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "mrl-engine-"
HELD = "held"  # locked for as long as the server's supervisor lives
MAX_PATH = 60  # characters: SGLang puts Unix sockets (at most 107 characters) below it


class Scratch:
    """A new folder, held by a lock. The lock belongs to the file descriptor: pass it to the process the folder is for."""

    def __init__(self) -> None:
        """Make the folder, and remove those that nobody holds any more."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PATH else "/tmp")
        for folder in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                if not _is_held(folder):
                    remove(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        unnamed = self.path / "new"
        self.fd = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / HELD)  # locked before anybody looks for it

    def release(self) -> None:
        """Let go; the folder is held on by who was given the descriptor."""
        os.close(self.fd)

    def remove(self) -> None:
        """Remove what is still there."""
        if self.path.exists():
            remove(self.path)


def _is_held(folder: Path) -> bool:
    """Whether a process holds it, or it is so new that none does yet."""
    try:
        file = (folder / HELD).open("rb+")
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove(folder: Path) -> None:
    """Remove a folder, and what its server noted as left by it in shared memory."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "shared_memory").read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
