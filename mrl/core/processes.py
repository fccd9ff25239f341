"""Finds and ends operating system processes: orphans of a command, and processes that a run left behind."""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

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


def end_with_parent() -> None:
    """Make the kernel end this process with SIGKILL when the thread that started this process ends."""
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

    After a fork without exec, a process shows the environment of the program that forked it.
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
