"""Asked to leave: SIGTERM and SIGUSR1 (a cluster that preempts) end a run in a way that it can go on elsewhere."""

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from mrl.core.errors import Preempted, on_wait

logger = logging.getLogger(__name__)

REQUEUE = 75
"""Exit status of a run that was saved and wants to be started again: EX_TEMPFAIL of sysexits.h."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_S = 2.0


class Leaving:
    """Knows whether the run was asked to leave, and abandons a step that would take too long.

    The first signal is remembered; the second ends the process at once (processes that were started notice that, and end).
    The same again within SAME_S is no second one: Slurm tells every process of a step, and a supervisor passes its own on.
    Preempted is raised where the driver waits, if `abandons()` says that what is under way can be given up. Before any process
    is started (`abandons` is None) it is raised at once. A handler must not raise later: inside Ray's waits it would be lost.
    """

    def __init__(self, abandons: Callable[[], bool] | None = None) -> None:
        self.abandons = abandons
        self.asked: signal.Signals | None = None
        self._asked_at = 0.0
        self._former: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self.asked is not None

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._on_signal)
        on_wait(self._check)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        on_wait(None)
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[bad-argument-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked == number and time.monotonic() - self._asked_at < SAME_S:
            return
        if self.asked is not None:
            os._exit(128 + number)
        self.asked, self._asked_at = signal.Signals(number), time.monotonic()
        if self.abandons is None:
            raise Preempted(self._why())

    def _check(self) -> None:
        if self.asked is not None and self.abandons is not None and self.abandons():
            raise Preempted(self._why())

    def _why(self) -> str:
        assert self.asked is not None, "nobody asked"
        logger.warning("asked to leave by %s", self.asked.name)
        return f"asked to leave by {self.asked.name}"
