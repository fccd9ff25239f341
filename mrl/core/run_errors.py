"""Errors that end or interrupt a run, and PreemptionHandler, which raises PreemptedError after SIGTERM or SIGUSR1."""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

logger = logging.getLogger(__name__)

REQUEUE_STATUS = 75
"""Exit status of a preempted run. The run has a checkpoint, and must be started again. 75 is EX_TEMPFAIL of sysexits.h."""
UNHEALTHY_STATUS = 3
"""Exit status of a run that trainer.on_unhealthy=stop has ended. The run has a checkpoint."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
KILLED_ADVICE = "the kernel's out-of-memory killer is the usual cause; check `dmesg`"
DUPLICATE_S = 2.0  # seconds after a signal in which PreemptionHandler ignores the same signal


def describe_exit(status: int) -> str:
    """Return how a process ended. `status`: exit status, negative for a signal, as in subprocess.Popen.returncode."""
    if status >= 0:
        return f"exit status {status}"
    text = f"killed by signal {-status} ({signal.Signals(-status).name})"
    return f"{text}; {KILLED_ADVICE}" if -status == signal.SIGKILL else text


class ProcessesLostError(RuntimeError):
    """Processes of the run have died, hang, or cannot be reached. New processes can continue from the last checkpoint."""

    role = "rank"  # which process was lost: "rank" is a trainer rank, "rollout" is the rollout worker


class StartupLostError(ProcessesLostError):
    """Processes were lost while the run was starting. The whole command must be restarted."""


class StartError(ValueError):
    """The trainer ranks cannot build the model that the config describes, or the cluster has no room for the run."""


class NonFiniteGradientError(FloatingPointError):
    """The gradient of a mini-batch is NaN or infinite. The optimizer has not changed any model weight."""

    def __init__(self, mini_batch: int, norm: float, reason: str = "") -> None:
        super().__init__(mini_batch, norm, reason)
        self.mini_batch, self.norm, self.reason = mini_batch, norm, reason

    def __str__(self) -> str:
        reason = f" {self.reason}" if self.reason else ""
        return (
            f"the gradient of mini-batch {self.mini_batch} is not finite (norm {self.norm}); the run ends before it sends "
            f"weights to the engines.{reason}"
        )


class UnhealthyRunError(RuntimeError):
    """The health check of learning ends the run, because trainer.on_unhealthy=stop. The run writes a checkpoint first."""


class RunDirMovedError(RuntimeError):
    """The run directory, or a file in it, was moved, deleted or replaced while the run was writing to it."""


def check_in_place(descriptor: int, path: Path) -> None:
    """Raise RunDirMovedError if `path` is no longer the file or folder that this process has opened as `descriptor`."""
    try:
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return
    except FileNotFoundError:
        pass
    raise RunDirMovedError(
        f"{path} was moved, deleted or replaced while the run was writing to it. The run ends, because its files would be split "
        "over two folders. To continue from the last checkpoint, move the folder back and start the same command again."
    )


class PreemptedError(Exception):
    """SIGTERM or SIGUSR1 asked the run to end now. The run is started again later."""


def _do_nothing() -> None:
    pass


_wait_check: list[Callable[[], None]] = [_do_nothing]  # its only element is the function of `set_wait_check`


def set_wait_check(check: Callable[[], None] | None) -> None:
    """Set the function that the driver calls repeatedly during a wait; `check` raises to end the wait. None: no function."""
    _wait_check[0] = check or _do_nothing


def check_wait() -> None:
    """Call the function of `set_wait_check`. Every loop that waits for processes of the run does this a few times per second."""
    _wait_check[0]()


class PreemptionHandler:
    """Remembers the first preemption signal, and abandons the running step if the step would take too long.

    A second signal ends the process at once. Its child processes notice this end, and end too. The same signal again within
    DUPLICATE_S is ignored. Duplicate signals are normal: Slurm signals every process of a job step, and the supervisor of
    `mrl train` forwards the signals that it receives.

    After a signal, each call of `check_wait` calls `may_abandon`, and raises PreemptedError if the result is True.
    `may_abandon` is None until the first process of the run is started. Until then the signal handler itself raises
    PreemptedError. Later the signal handler must not raise, because Ray discards exceptions of signal handlers.
    """

    def __init__(self, may_abandon: Callable[[], bool] | None = None) -> None:
        self.may_abandon = may_abandon
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> Self:
        for number in PREEMPTION_SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        set_wait_check(self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        set_wait_check(None)
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received == number and time.monotonic() - self._received_at < DUPLICATE_S:
            return
        if self.received is not None:
            os._exit(128 + number)
        self.received, self._received_at = signal.Signals(number), time.monotonic()
        if self.may_abandon is None:
            raise PreemptedError(self._reason())

    def _check(self) -> None:
        if self.received is not None and self.may_abandon is not None and self.may_abandon():
            raise PreemptedError(self._reason())

    def _reason(self) -> str:
        assert self.received is not None, "only called after a signal"
        logger.warning("preempted by %s", self.received.name)
        return f"preempted by {self.received.name}"
