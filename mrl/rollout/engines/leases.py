"""Reserves ports and a scratch directory for one SGLang server.

Each lease is a lock file; its lock ends when the server's processes end.
"""

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

    SGLang binds its ports seconds after they are chosen. A bound placeholder socket would block SGLang's own bind; a lock file
    does not. The lock belongs to the file descriptor: a child process that inherits the descriptor keeps the lease.
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
        """Close the descriptor. The lease ends when every process that inherited the descriptor has closed it, too."""
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
SHARED_MEMORY_LIST = "shared_memory"  # lists the server's files in /dev/shm; supervisor.py repeats the name
MAX_PARENT_LENGTH = 60
"""Longest path, in characters, of the folder above the scratch directory.

SGLang makes Unix sockets in the scratch directory, and the path of a Unix socket has at most 107 characters.
"""


class ScratchDir:
    """Temporary directory of one server, held by a lock file.

    The server's supervisor removes it. If the supervisor was killed, the next ScratchDir on this machine removes it. The lock
    belongs to the file descriptor: the process that inherits the descriptor holds the directory.
    """

    def __init__(self) -> None:
        """Create the directory, and remove directories whose holders have ended."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PARENT_LENGTH else "/tmp")
        for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):  # the folder belongs to another user, or was removed meanwhile
                if not _is_held(folder):
                    remove_scratch(folder)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
        new_lock = self.path / "new"
        self.fd = os.open(new_lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new_lock.rename(self.path / LOCK_FILE)  # only now, so other processes never see the lock file unlocked

    def hand_over(self) -> None:
        """Close this process's descriptor; the process that inherited a copy holds the directory from now on."""
        os.close(self.fd)

    def remove(self) -> None:
        """Remove the directory if it is still there."""
        if self.path.exists():
            remove_scratch(self.path)


def _is_held(folder: Path) -> bool:
    """Return whether a process holds the directory, or the directory is so new that it has no lock file yet."""
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
    """Remove a directory, and the files in shared memory that its server listed in the directory."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / SHARED_MEMORY_LIST).read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
