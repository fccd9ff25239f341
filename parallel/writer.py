"""A fork that writes what this process holds at the moment, while this process goes on."""

import ctypes
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)  # before a fork: the child should load nothing
_PR_SET_PDEATHSIG = 1
_NICE = 10  # training comes first


class Writer[T]:
    """Runs `write` once: in a fork, or at once in this process. The fork sees memory as it is now, page by page.

    It dies with the thread that made it (Linux sends it SIGKILL), holds neither stdout nor stderr, and touches no GPU.
    """

    def __init__(self, write: Callable[[], T], in_fork: bool) -> None:
        self._outcome: tuple[T | None, str | None] | None = None if in_fork else _attempt(write)
        if in_fork:
            context = multiprocessing.get_context("fork")
            self._answer, theirs = context.Pipe(duplex=False)
            self._process = context.Process(target=_child, args=(os.getpid(), theirs, write), daemon=True)
            with (
                warnings.catch_warnings()
            ):  # about threads: the child writes files, and takes no lock of another thread
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process.start()
            theirs.close()

    def ended(self) -> bool:
        """Whether the result is there; a writer that was killed has ended too. What it held is free then."""
        if self._outcome is None and self._answer.poll():
            self._outcome = self._received(timeout_s=0)
        return self._outcome is not None

    def result(self, timeout_s: float) -> T:
        """What `write` returned; raises RuntimeError with its error, or when it was killed or takes longer than that.

        The fork is gone afterwards.
        """
        if self._outcome is None:
            self._outcome = self._received(timeout_s)
        found, error = self._outcome
        if error is not None:
            raise RuntimeError(error)
        return found  # type: ignore[bad-return]

    def end(self) -> None:
        """Kill the fork, if there is one; without a result, there is none to come."""
        if self._outcome is None:
            self._outcome = None, "it was given up"
            self._stop()

    def _received(self, timeout_s: float) -> tuple[T | None, str | None]:
        try:
            if self._answer.poll(timeout_s):
                return self._answer.recv()
            return None, f"its writer (process {self._process.pid}) did not end within {timeout_s:g} s"
        except EOFError:
            self._process.join()
            return None, f"its writer (process {self._process.pid}) was killed, exit code {self._process.exitcode}"
        finally:
            self._stop()

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._answer.close()


def _attempt[T](write: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return write(), None
    except Exception as error:  # told by `result`
        return None, f"{type(error).__name__}: {error}"


def _child(parent: int, answer: Connection, write: Callable[[], Any]) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handlers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group: the trainer decides
    with open(os.devnull, "wb") as nothing:
        for stream in (1, 2):  # readers of the trainer's output see its end
            os.dup2(nothing.fileno(), stream)
    gc.disable()  # a collection would write to every object's page, and may touch tensors of the GPU
    os.nice(_NICE)
    answer.send(_attempt(write))
    os._exit(0)  # exit hooks are the trainer's
