"""Ports that nobody else takes between choosing and binding."""

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

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
