"""Finds and ends processes: orphans of a command, and processes that a run left behind. Reserves ports for new processes.

The processes of a run end in this order, within a limited time:

1. The driver closes trainer ranks, the rollout worker with its engines and reward workers, and placement groups. Then it ends
   Ray. All this runs within `shutdown_deadline`. After the deadline, a thread ends all processes that the driver has started.
2. The driver ends processes of the run that no longer have a parent in the run (`end_orphans`).
3. The supervisor of `mrl train` ends the descendants of the driver that are still alive (mrl.launch.supervisor).
"""

import ctypes
import fcntl
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from mrl.core.run_errors import (
    REQUEUE_STATUS,
    UNHEALTHY_STATUS,
    PreemptedError,
    StartError,
    StartupLostError,
    UnhealthyRunError,
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # options of the system call prctl
_prctl = ctypes.CDLL(None, use_errno=True).prctl

EXIT_PATIENCE_S = 2.0  # how long `end_processes` waits for processes that are about to end by themselves
TERM_PATIENCE_S = 10.0  # how long `end_processes` waits after SIGTERM
KILL_PATIENCE_S = 10.0  # how long killed processes may take to disappear
_POLL_INTERVAL_S = 0.05


def become_subreaper() -> None:
    """Make this process the parent of its orphaned descendants, so that they stay its descendants.

    Otherwise a process whose parent has ended becomes a child of process 1, for example after a double fork.
    """
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")


def kill_with_parent() -> None:
    """Make the kernel end this process with SIGKILL when the thread that started this process ends.

    `term_with_parent` in mrl.launch.supervisor sends SIGTERM instead.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")


def descendants(pid: int | None = None) -> list[psutil.Process]:
    """Return the descendants of a process, by default of this process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def with_variable(name: str, value: str) -> list[psutil.Process]:
    """Return the processes that inherited an environment variable with this value, except this process and its ancestors.

    The kernel shows the environment with which a program was executed. So a process that was forked without exec is found if the
    program that forked it was executed with this variable.
    """
    own = psutil.Process()
    excluded = {own.pid, *(each.pid for each in own.parents())}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # the process has ended, or belongs to another user
            if process.pid not in excluded and process.environ().get(name) == value:
                found.append(process)
    return found


def end_processes(
    processes: Iterable[psutil.Process], exit_patience_s: float = EXIT_PATIENCE_S
) -> list[psutil.Process]:
    """End processes. Return those that had to be ended by a signal.

    A process first gets `exit_patience_s` seconds to end by itself. Then it gets SIGTERM, and SIGCONT so that a stopped process
    handles SIGTERM. If it still runs after TERM_PATIENCE_S, it gets SIGKILL.
    """
    ended = remaining = _wait(list(processes), exit_patience_s)
    for number, patience_s in ((signal.SIGTERM, TERM_PATIENCE_S), (signal.SIGKILL, KILL_PATIENCE_S)):
        for process in remaining:
            with suppress(psutil.Error):  # psutil also checks that the process id was not given to another process
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)
        remaining = _wait(remaining, patience_s)
    return ended


def _wait(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all processes have ended or are zombies. Return those that still run after the timeout."""
    end = time.monotonic() + timeout_s
    while (processes := [each for each in processes if _runs(each)]) and time.monotonic() < end:
        time.sleep(_POLL_INTERVAL_S)
    return processes


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def describe(processes: Iterable[psutil.Process], shown: int = 8) -> str:
    """Return names, process ids and unusual states of processes, stopped processes first."""
    texts = []
    for process in processes:
        with suppress(psutil.Error):
            stopped = process.status() == psutil.STATUS_STOPPED
            texts.append((not stopped, f"{process.name()} (pid {process.pid}{', stopped' if stopped else ''})"))
    names = [text for _, text in sorted(texts)]
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # how long the processes of a run may take to end
NOTICE_S = 10.0  # interval between two messages that say what the end of the run waits for
EXIT_S = 60.0  # how long this process may continue to wait after the processes that it started were ended
STATUS_OF_EXIT = 1  # exit status after EXIT_S, unless the exception that ends the run has another status
_STATUS_OF_ERROR: dict[type[BaseException], int] = {
    PreemptedError: REQUEUE_STATUS,
    UnhealthyRunError: UNHEALTHY_STATUS,
    StartError: 2,
    KeyboardInterrupt: 128 + signal.SIGINT,
}

_before_exit: list[Callable[[], None]] = []


def call_before_exit(function: Callable[[], None]) -> None:
    """Make `_exit` first call `function` if an exception other than StartupLostError ends the run.

    A function that an earlier call has set is no longer called.
    """
    _before_exit[:] = [function]


@contextmanager
def shutdown_deadline(what: str, since: float) -> Iterator[None]:
    """Limit the time in which the `with` block ends processes. `what` is the text that names these processes in messages.

    A process of Ray that is stopped or hangs can block calls of Ray forever. So a thread logs every NOTICE_S seconds which
    processes still run. After TIMEOUT_S seconds, the thread ends the descendants that this process started after `since`, a value
    of time.time(). Calls that wait for these processes then return. If the block continues for another EXIT_S seconds, this
    process exits. The exception that was being handled when the context began determines the exit status.
    """
    finished, reason = threading.Event(), sys.exception()
    watchdog = threading.Thread(target=_watch, args=(finished, what, since, reason), name="shutdown", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        finished.set()


def _watch(finished: threading.Event, what: str, since: float, reason: BaseException | None) -> None:
    start = time.monotonic()
    while not finished.wait(min(NOTICE_S, max(0.0, start + TIMEOUT_S - time.monotonic()))):
        running, waited_s = _started_since(since), time.monotonic() - start
        if waited_s >= TIMEOUT_S:
            break
        logger.warning(
            "shutdown has taken %.0f s; waiting for %s to end. %.0f s after the start of the shutdown, mrl ends: %s",
            waited_s, what, TIMEOUT_S, describe(running),
        )  # fmt: skip
    else:
        return
    logger.warning("%s did not end within %.0f s; ending %s", what, TIMEOUT_S, describe(running))
    end_processes(running, exit_patience_s=0)
    if not finished.wait(EXIT_S):
        logger.error("%s still blocks this process %.0f s after its processes were ended; exiting", what, EXIT_S)
        _exit(reason)


def _exit(reason: BaseException | None) -> NoReturn:
    """End this process at once. `reason`: the exception that ends the run; None if the run is finished.

    The function that `call_before_exit` has set tells the supervisor not to start the command again. It is not called in two
    cases, so that the supervisor starts the command again: if the run lost processes while it was starting, and if the run is
    finished and only its processes hang. In the second case, the new process only prints the result.
    """
    sys.stdout.flush()
    if reason is not None and not isinstance(reason, StartupLostError):
        for function in _before_exit:
            function()
    if isinstance(reason, SystemExit) and isinstance(reason.code, int):
        os._exit(reason.code)
    statuses = (status for kind, status in _STATUS_OF_ERROR.items() if isinstance(reason, kind))
    os._exit(next(statuses, STATUS_OF_EXIT))


def _started_since(since: float) -> list[psutil.Process]:
    found = []
    for process in descendants():
        with suppress(psutil.Error):
            if process.create_time() >= since - 1 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_orphans(variable: str, value: str) -> None:
    """End processes that inherited an environment variable with this value, and that are no descendants of this process.

    Such a process was started by a reward, an agent or an engine of the run, and has lost its parent, for example after a double
    fork. Descendants of this process stay alive, because libraries end their helper processes when this process exits.
    """
    own = {each.pid for each in descendants()}
    if ended := end_processes(each for each in with_variable(variable, value) if each.pid not in own):
        logger.info("ended %d processes that the run left behind", len(ended))


FIRST_PORT, LAST_PORT = 20000, 32000
"""The ports from FIRST_PORT to LAST_PORT - 1 may be reserved. By default, the kernel uses ports from 32768 on for outgoing
connections."""


class PortLease:
    """Reservation of a free port of this machine. No other mrl process of this user can reserve the same port.

    SGLang and Ray's agents bind their ports several seconds after mrl has chosen the ports. If a socket of mrl kept a port bound
    until then, they could not bind it. Therefore a locked file reserves the port. The lock belongs to the file descriptor `fd`: a
    child process that inherits the descriptor keeps the reservation.
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
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Close this process's descriptor. The reservation ends when the processes that inherited it have closed it, too."""
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
