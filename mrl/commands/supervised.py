"""A command in a process of its own, started again when it vanishes: killed, crashed, or ended by Ray when its raylet dies.

The process that the user started only waits. Signals to leave are passed on; the child's own end, good or bad, is the end. A
child says "ended" on a pipe when Python ends it in an orderly way: without that word it has vanished, whatever its status.
"""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from mrl.core.preemption import REQUEUE

PIPE = "MRL_SUPERVISOR_PIPE"  # environment variable of the child: the file descriptor to speak on
PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BACKOFF_S = 1.0  # before the first new start; doubles each time
TIMES = 5  # of new starts
LONG_S = 3600.0  # after so long the count of new starts begins again

_pipe: int | None = None  # of the child


def register() -> None:
    """In the child, first of all: speak on the pipe when Python ends the process."""
    if PIPE in os.environ:
        global _pipe
        _pipe = int(os.environ.pop(PIPE))
        os.set_inheritable(_pipe, False)
        atexit.register(say, "ended")


def say(word: str) -> None:
    """In the child: "ended", or an argument that a new start must have, so that it goes on in the same folder."""
    if _pipe is not None:
        os.write(_pipe, f"{word}\n".encode())


def start_again() -> None:
    """In the child: its end, however orderly, is one after which a new start may do better."""
    global _pipe
    _pipe = None


def supervise(module: str, argv: Sequence[str]) -> int:
    """Run `python -m module argv` until it has ended by itself, with TIMES new starts at most; returns its exit status."""
    watcher = _Watcher()
    for number in PASSED_ON:
        signal.signal(number, watcher.pass_on)
    arguments, attempt = list(argv), 0
    while True:
        status, words, seconds = watcher.run(module, arguments)
        if "ended" in words or watcher.asked:
            return watcher.exit_status(status)
        arguments += [word for word in words if word not in arguments]
        attempt = 1 if seconds > LONG_S else attempt + 1
        sys.stderr.write(f"mrl: the command vanished (status {status}); ")
        sys.stderr.write(f"new start {attempt} of {TIMES}\n" if attempt <= TIMES else "no new start is left\n")
        if attempt > TIMES or watcher.pause(BACKOFF_S * 2 ** (attempt - 1)):
            return watcher.exit_status(status)


class _Watcher:
    """One child at a time, and the signals that came."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.asked: list[int] = []

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        if self.child is not None:
            self.child.send_signal(number)

    def run(self, module: str, argv: Sequence[str]) -> tuple[int, list[str], float]:
        """(status, what it said, seconds) of a child; one that was asked to leave meanwhile is told as soon as it is there."""
        begun = time.monotonic()
        self.child, hears = _start(module, argv)
        for number in self.asked[:1]:
            self.child.send_signal(number)
        status = self.child.wait()
        with os.fdopen(hears, "rb") as pipe:
            return status, pipe.read().decode().split("\n")[:-1], time.monotonic() - begun

    def pause(self, seconds: float) -> bool:
        """Wait; whether a signal came meanwhile."""
        self.child, end = None, time.monotonic() + seconds
        while not self.asked and time.monotonic() < end:
            time.sleep(0.05)
        return bool(self.asked)

    def exit_status(self, status: int) -> int:
        """As a shell has it; where a signal to leave came before the child could heed it, it asks for another start."""
        leaves = {signal.SIGTERM, signal.SIGUSR1} & set(self.asked)
        if leaves and (self.child is None or -status in leaves):
            return REQUEUE
        return status if status >= 0 else 128 - status


_prctl = ctypes.CDLL(None).prctl  # loaded before any fork


def as_ours() -> None:
    """In a new child, before its program: it heeds signals, and is asked to leave when its parent is gone."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it, and so would Python


def _start(module: str, argv: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    hears, speaks = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", module, *argv],
        env=os.environ | {PIPE: str(speaks)},
        pass_fds=[speaks],
        preexec_fn=as_ours,
        process_group=0,  # a terminal's Ctrl-C comes to us alone, and is passed on once
    )
    os.close(speaks)
    return child, hears
