"""Supervisor of a command: runs the command in a child process, and restarts the child when it is killed or crashes.

The process that the user started is the supervisor. It only waits and forwards signals to the child, so it imports no large
libraries. When the Python interpreter of the child exits normally, after a success or an error, it writes "ended" to a pipe. If
this message is missing, the child was killed, crashed, or was ended by Ray because its raylet died. The exit status alone does
not distinguish these cases from a normal exit. Three other kinds of children omit the message on purpose, and the supervisor
starts them again: a child that has called `request_restart`; a child that lost processes while it was starting, and whose
shutdown hangs; and a child that has finished the run, but whose shutdown hangs. `shutdown_deadline` (mrl.core.processes) ends a
child whose shutdown hangs. After a finished run, the new child only prints the result.
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
from contextlib import suppress
from functools import partial
from types import FrameType

import psutil

from mrl.core.processes import become_subreaper, call_before_exit, descendants, end_processes
from mrl.core.run_errors import REQUEUE_STATUS, describe_exit

PIPE_VARIABLE = "MRL_SUPERVISOR_PIPE"  # contains the file descriptor to which the child writes messages
RUN_VARIABLE = (
    "MRL_SUPERVISED"  # processes of the child inherit this variable; its value is the supervisor's process id
)
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
BACKOFF_S = 1.0  # pause before the first restart; it doubles with each restart
MAX_RESTARTS = 5  # largest number of consecutive restarts, see STABLE_S
STABLE_S = 3600.0  # if a child ran for this time, the restarts are counted from 0 again

_RUN_CHILD = "from mrl.launch import supervisor; supervisor.run_child()"
_pipe: int | None = None  # in the child: the file descriptor to which the child writes messages


def run_child() -> None:
    """Run a module as the main program of this child.

    `sys.argv[1]` is the name of the module. The other arguments are passed to the module.

    The child reports every normal exit from here on. So an error in the imports of the module does not look like a crash.
    """
    if PIPE_VARIABLE in os.environ:
        global _pipe
        _pipe = int(os.environ.pop(PIPE_VARIABLE))
        os.set_inheritable(_pipe, False)
        atexit.register(tell_supervisor, "ended")
        call_before_exit(partial(tell_supervisor, "ended"))  # if `shutdown_deadline` ends the child, with os._exit
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def tell_supervisor(message: str) -> None:
    """Send a message from the child to the supervisor.

    The message is "ended", or an argument such as run.dir=FOLDER, which the supervisor adds to the arguments of later children.
    """
    if _pipe is not None:
        os.write(_pipe, f"{message}\n".encode())


def request_restart() -> None:
    """Make the supervisor restart this child, although the child exits normally."""
    global _pipe
    _pipe = None


def supervise(module: str, argv: Sequence[str]) -> int:
    """Run `python -m module argv`. Restart it when it ends without the message "ended", at most MAX_RESTARTS times in a row.

    After a forwarded signal, the child is not restarted. Returns the exit status of the last child; see
    `_ChildWatcher.exit_status`.
    """
    become_subreaper()
    watcher = _ChildWatcher()
    for signum in FORWARDED_SIGNALS:
        signal.signal(signum, watcher.forward_signal)
    arguments, restarts = list(argv), 0
    while True:
        status, messages, seconds = watcher.run(module, arguments)
        if "ended" in messages or watcher.signals:
            return watcher.exit_status(status)
        arguments += [message for message in messages if message not in arguments]
        restarts = 1 if seconds > STABLE_S else restarts + 1
        sys.stderr.write(f"mrl: the process ended without finishing its work ({describe_exit(status)}); ")
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
        # processes that existed before the run; psutil also compares start times, because a later process may get the same id
        self.earlier = set(descendants())

    def forward_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signum)
        if self.child is not None and self.child.returncode is None:
            _send_signal(self.child, signum)

    def run(self, module: str, argv: Sequence[str]) -> tuple[int, list[str], float]:
        """Run one child. Return (its exit status, the messages that it sent, its duration in seconds).

        When the child has ended, its descendants are ended too, even processes that left its session and whose parents have
        ended. If a signal arrived before the child started, the child gets this signal immediately.
        """
        start = time.monotonic()
        read_end, write_end = os.pipe()
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN_CHILD, module, *argv],
            env=os.environ | {PIPE_VARIABLE: str(write_end), RUN_VARIABLE: str(os.getpid())},
            pass_fds=[write_end],
            preexec_fn=term_with_parent,
            process_group=0,  # Ctrl-C in a terminal then reaches only the supervisor, which forwards it once
        )
        os.close(write_end)
        for signum in self.signals[:1]:
            _send_signal(self.child, signum)
        status = _wait(self.child)
        end_processes(self._left_by_child())
        with os.fdopen(read_end, "rb") as pipe:
            return status, pipe.read().decode().split("\n")[:-1], time.monotonic() - start

    def _left_by_child(self) -> list[psutil.Process]:
        """Return the processes that an ended child has left behind.

        This process is the subreaper, so the kernel makes it the parent of these orphans. The result does not contain processes
        that are older than the run (`server & exec mrl train`), or their children. In two cases, this process can also inherit
        orphans of other programs: it had children before the run, or it is process 1 of a container, which also inherits the
        orphans of `docker exec`. In these cases, the result omits each orphan whose environment can be read, is not empty and
        lacks RUN_VARIABLE, because such an orphan does not belong to the run.
        """
        new = [each for each in _children() if each not in self.earlier]
        if self.earlier or os.getpid() == 1:
            new = [each for each in new if not _is_of_another_program(each)]
        return [process for each in new for process in (each, *descendants(each.pid))]

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`, or until a signal arrives. Return whether a signal has arrived."""
        self.child, end = None, time.monotonic() + seconds
        while not self.signals and time.monotonic() < end:
            time.sleep(0.05)
        return bool(self.signals)

    def exit_status(self, status: int) -> int:
        """Return the child's exit status in the form that a shell reports.

        Return REQUEUE_STATUS if a preemption signal ended the child before it could handle the signal, or arrived in a pause
        between two children.
        """
        preempted = {signal.SIGTERM, signal.SIGUSR1} & set(self.signals)
        if preempted and (self.child is None or -status in preempted):
            return REQUEUE_STATUS
        return status if status >= 0 else 128 - status


def _send_signal(child: subprocess.Popen[bytes], signum: int) -> None:
    """Send a signal to a child that is not yet reaped.

    Popen.send_signal is not used: it calls poll(), which could take the exit status before `_wait` does.
    """
    with suppress(ProcessLookupError):
        os.kill(child.pid, signum)


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def _is_of_another_program(process: psutil.Process) -> bool:
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return False
    return bool(environment) and RUN_VARIABLE not in environment


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait until the child ends, and return its exit status. Also reap the orphans that this process gets as the subreaper."""
    while True:
        try:
            pid, status = os.wait()
        except (
            ChildProcessError
        ):  # this process has inherited the setting to ignore SIGCHLD, so the kernel discards exit statuses
            return child.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


_prctl = ctypes.CDLL(None).prctl  # loaded before any fork
_PR_SET_PDEATHSIG = 1


def term_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent dies. Also restore the default handling of SIGINT.

    Runs in a forked child before exec. `kill_with_parent` in mrl.core.processes sends SIGKILL instead.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # A shell without job control, such as one that runs a script, starts background jobs with SIGINT ignored. Their children
    # inherit this setting.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
