"""Ports that nobody else takes between choosing and binding."""

import contextlib
import fcntl
import os
import random
import shutil
import socket
import tempfile
from pathlib import Path

# FROM: A server's scratch folder. It goes with its server; that of one whose supervisor was killed goes when the next is made.

FIRST, LAST = 20000, 32000
"""Below the kernel's range for outgoing connections (32768 and up), so no client socket can take a chosen port."""


class PortLease:
    """A port of this machine held by a lock file: among our processes, whoever holds the lock may bind the port.

    SGLang binds its ports seconds after they are chosen; a socket kept open meanwhile would be in its way, a lock is not.
    The lock belongs to the file descriptor: pass it to a child to let the child keep the lease.
    """

    def __init__(self) -> None:
        """Lease a free port. Raises RuntimeError when none is free."""
        folder = Path(tempfile.gettempdir()) / f"mrl-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        candidates = range(FIRST, LAST)
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if self._lock(fd) and _is_free(port):
                self.port, self.fd = port, fd
                return
            os.close(fd)
        raise RuntimeError(f"no free port in {FIRST}-{LAST}: all are bound or leased (locks in {folder}).")

    @staticmethod
    def _lock(fd: int) -> bool:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Let go; the lease ends when every process that was given the descriptor let go."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


SCRATCH_PREFIX = "mrl-engine-"
HELD = "held"  # locked for as long as the server's supervisor lives
MAX_PATH = 60  # characters: SGLang puts Unix sockets (at most 107 characters) below it


class ScratchDir:
    """A new folder, held by a lock. The lock belongs to the file descriptor: pass it to the process the folder is for."""

    def __init__(self) -> None:
        """Make the folder, and remove those that nobody holds any more."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PATH else "/tmp")
        for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                if not _is_held(folder):
                    remove_scratch(folder)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
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
            remove_scratch(self.path)


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


def remove_scratch(folder: Path) -> None:
    """Remove a folder, and what its server noted as left by it in shared memory."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "shared_memory").read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
