"""Supervisor of a command: runs it in a child process, and restarts it when the child is killed or crashes.

The process that the user started only waits, so it imports nothing heavy. It forwards signals to the child. A child whose
Python interpreter exits in an orderly way, with success or with an error, writes "ended" to a pipe. If the word is missing, the
child was killed, crashed, or was ended by Ray because its raylet died. This holds for every exit status.
"""

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from mrl.core.run_errors import REQUEUE_STATUS

PIPE_VARIABLE = "MRL_SUPERVISOR_PIPE"  # environment variable of the child: file descriptor of the pipe's write end
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BACKOFF_S = 1.0  # before the first restart; doubles with each restart
MAX_RESTARTS = 5
STABLE_S = 3600.0  # a child that ran for this long resets the count of restarts

_RUN_CHILD = "from mrl.launch import supervisor; supervisor.run_child()"
_pipe: int | None = None  # in the child: write end of the pipe


def run_child() -> None:
    """Run the module that `sys.argv[1]` names as the main program of this child, with the remaining arguments.

    The child can report an orderly exit from here on, so an error in the imports of the module is not taken for a crash.
    """
    if PIPE_VARIABLE in os.environ:
        global _pipe
        _pipe = int(os.environ.pop(PIPE_VARIABLE))
        os.set_inheritable(_pipe, False)
        atexit.register(tell_supervisor, "ended")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def tell_supervisor(word: str) -> None:
    """Send "ended" from the child, or an argument that a restarted child must get, such as the run directory."""
    if _pipe is not None:
        os.write(_pipe, f"{word}\n".encode())


def request_restart() -> None:
    """Let the supervisor restart this child, although it exits in an orderly way."""
    global _pipe
    _pipe = None


def supervise(module: str, argv: Sequence[str]) -> int:
    """Run `python -m module argv` until it exits in an orderly way, with at most MAX_RESTARTS restarts.

    Returns the exit status of the last child.
    """
    watcher = _ChildWatcher()
    for number in FORWARDED_SIGNALS:
        signal.signal(number, watcher.forward_signal)
    arguments, restarts = list(argv), 0
    while True:
        status, words, seconds = watcher.run(module, arguments)
        if "ended" in words or watcher.signals:
            return watcher.exit_status(status)
        arguments += [word for word in words if word not in arguments]
        restarts = 1 if seconds > STABLE_S else restarts + 1
        sys.stderr.write(f"mrl: the process was killed or crashed (status {status}); ")
        sys.stderr.write(
            f"restart {restarts} of {MAX_RESTARTS}\n" if restarts <= MAX_RESTARTS else "no restart is left\n"
        )
        if restarts > MAX_RESTARTS or watcher.pause(BACKOFF_S * 2 ** (restarts - 1)):
            return watcher.exit_status(status)


class _ChildWatcher:
    """Runs one child at a time and records the signals that arrive."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.signals: list[int] = []

    def forward_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self.child is not None:
            self.child.send_signal(number)

    def run(self, module: str, argv: Sequence[str]) -> tuple[int, list[str], float]:
        """Run one child; returns its exit status, the words that it sent, and its duration in seconds.

        A signal that arrived before the child started is sent to it at once.
        """
        start = time.monotonic()
        read_end, write_end = os.pipe()
        self.child = subprocess.Popen(
            [sys.executable, "-c", _RUN_CHILD, module, *argv],
            env=os.environ | {PIPE_VARIABLE: str(write_end)},
            pass_fds=[write_end],
            preexec_fn=end_with_parent,
            process_group=0,  # Ctrl-C in a terminal reaches the supervisor only, which forwards it once
        )
        os.close(write_end)
        for number in self.signals[:1]:
            self.child.send_signal(number)
        status = self.child.wait()
        with os.fdopen(read_end, "rb") as pipe:
            return status, pipe.read().decode().split("\n")[:-1], time.monotonic() - start

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`; returns early, with True, if a signal arrives."""
        self.child, end = None, time.monotonic() + seconds
        while not self.signals and time.monotonic() < end:
            time.sleep(0.05)
        return bool(self.signals)

    def exit_status(self, status: int) -> int:
        """Return the child's exit status as a shell reports it.

        It is REQUEUE_STATUS if the child was preempted before it could handle the signal.
        """
        preempted = {signal.SIGTERM, signal.SIGUSR1} & set(self.signals)
        if preempted and (self.child is None or -status in preempted):
            return REQUEUE_STATUS
        return status if status >= 0 else 128 - status


_prctl = ctypes.CDLL(None).prctl  # loaded before any fork
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request SIGTERM when the parent dies, and restore the default handling of SIGINT. Runs in a forked child before exec."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it, and children inherit that
