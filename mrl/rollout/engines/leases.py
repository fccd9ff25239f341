"""Leases of a server: ports, and a scratch directory, each held by a lock file that ends with the server's processes."""

import contextlib
import fcntl
import os
import random
import shutil
import socket
import tempfile
from pathlib import Path

FIRST_PORT, LAST_PORT = 20000, 32000
"""Ports below the kernel's range for outgoing connections (32768 and up), so no client socket can take a leased port."""


class PortLease:
    """A free port of this machine, reserved by a lock file among all mrl processes of this user.

    SGLang binds its ports seconds after they are chosen. A socket that reserved a port until then would be in its way; a lock
    file is not. The lock belongs to the file descriptor: a child process that inherits it keeps the lease.
    """

    def __init__(self) -> None:
        """Lease a free port. Raises RuntimeError if no port is free."""
        folder = Path(tempfile.gettempdir()) / f"mrl-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        candidates = range(FIRST_PORT, LAST_PORT)
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if self._lock(fd) and _is_free(port):
                self.port, self.fd = port, fd
                return
            os.close(fd)
        raise RuntimeError(f"no free port in {FIRST_PORT}-{LAST_PORT}: all are bound or leased (locks in {folder}).")

    @staticmethod
    def _lock(fd: int) -> bool:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Close the descriptor. The lease ends when every process that inherited it has closed it, too."""
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
LOCK_FILE = "held"  # locked while the server's supervisor lives
MAX_PATH = 60  # characters of the parent: SGLang puts Unix sockets below it, whose paths have at most 107 characters


class ScratchDir:
    """Temporary directory of one server, held by a lock file. A server removes its own.

    If its supervisor was killed, the next ScratchDir on this machine removes it. The lock belongs to the file descriptor: the
    process that inherits it holds the directory.
    """

    def __init__(self) -> None:
        """Create the directory, and remove directories whose holders have ended."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PATH else "/tmp")
        for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):  # it belongs to another user, or was removed meanwhile
                if not _is_held(folder):
                    remove_scratch(folder)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
        unlocked = self.path / "new"
        self.fd = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(self.path / LOCK_FILE)  # it is locked before another process can find it

    def release(self) -> None:
        """Close the descriptor; the process that inherited it holds the directory from now on."""
        os.close(self.fd)

    def remove(self) -> None:
        """Remove the directory if it is still there."""
        if self.path.exists():
            remove_scratch(self.path)


def _is_held(folder: Path) -> bool:
    """Whether a process holds the directory, or it is so new that its lock file does not exist yet."""
    try:
        file = (folder / LOCK_FILE).open("rb+")
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_scratch(folder: Path) -> None:
    """Remove a directory, and the files in shared memory that its server listed there."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "shared_memory").read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
