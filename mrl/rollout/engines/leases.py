"""Reservations of ports and scratch directories for SGLang servers.

Each reservation is a lock on a file. The kernel releases the lock when the processes of the server have ended.
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
"""Range of ports that may be reserved. The kernel uses other ports, from 32768, for outgoing connections."""


class PortLease:
    """Reservation of a free port of this machine. No other mrl process of this user can reserve the same port.

    SGLang binds its ports several seconds after mrl has chosen them. A socket that keeps the port bound until then would block
    SGLang. Therefore a locked file reserves the port. The lock belongs to the file descriptor `fd`: a child process that inherits
    the descriptor keeps the reservation.
    """

    def __init__(self) -> None:
        """Reserve a free port. Raises RuntimeError if no port is free."""
        folder = Path(tempfile.gettempdir()) / f"mrl-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        candidates = range(FIRST_PORT, LAST_PORT)
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            fd = os.open(folder / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if self._lock(fd) and _is_free(port):
                self.port, self.fd = port, fd
                return
            os.close(fd)
        raise RuntimeError(
            f"no free port in {FIRST_PORT}-{LAST_PORT}: all ports are in use or reserved (lock files in {folder})."
        )

    @staticmethod
    def _lock(fd: int) -> bool:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Close this process's descriptor. The reservation ends when all processes with an inherited copy have closed it."""
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
LOCK_FILE = "held"  # file in the scratch directory that is locked while the supervisor of the server lives
SHARED_MEMORY_LIST = "shared_memory"  # file that lists the server's files in /dev/shm; supervisor.py has the same value
MAX_PARENT_LENGTH = 60
"""Scratch directories are in the temporary folder if its path has fewer characters than this, and otherwise in /tmp.

SGLang creates Unix sockets in the scratch directory, and the path of a Unix socket has at most 107 characters.
"""


class ScratchDir:
    """Temporary directory of one server, with a lock file that shows that the directory is in use.

    The supervisor of the server removes the directory. If the supervisor was killed, the next ScratchDir on this machine removes
    the directory. The lock belongs to the file descriptor `fd`: the directory is in use while a process has this descriptor open.
    """

    def __init__(self) -> None:
        """Create the directory. Also remove the scratch directories that no process uses any more."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PARENT_LENGTH else "/tmp")
        for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):  # the folder belongs to another user, or another process has removed it
                if not _is_in_use(folder):
                    remove_scratch(folder)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
        new_lock = self.path / "new"
        self.fd = os.open(new_lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new_lock.rename(self.path / LOCK_FILE)  # last, so that other processes never see the lock file unlocked

    def hand_over(self) -> None:
        """Close this process's descriptor. The directory stays in use while the supervisor has its inherited copy open."""
        os.close(self.fd)

    def remove(self) -> None:
        """Remove the directory if it exists."""
        if self.path.exists():
            remove_scratch(self.path)


def _is_in_use(folder: Path) -> bool:
    """Return whether a process uses the directory. A directory without a lock file is new, and counts as in use."""
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
    """Remove a scratch directory, and the files in shared memory that its server has listed in SHARED_MEMORY_LIST."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / SHARED_MEMORY_LIST).read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
