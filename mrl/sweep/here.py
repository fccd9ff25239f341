"""Points on this machine: some at one time, each a process that is ended with this one."""

import subprocess
from collections.abc import Callable
from dataclasses import replace

from mrl.core.preemption import REQUEUE
from mrl.sweep.outcome import DONE, FAILED, write_status
from mrl.sweep.plan import Sweep
from mrl.sweep.runner import Runner
from mrl.sweep.trials import Trials


class Here(Runner):
    """`at_once` processes; a signal to leave is passed on to them, and they are waited for."""

    poll_s = 0.5

    def __init__(
        self,
        sweep: Sweep,
        at_once: int,
        start: Callable[[Sweep, int], subprocess.Popen[bytes]],
        trials: Trials | None = None,
        num_trials: int = 0,
    ) -> None:
        """`start(sweep, index)`: a point's process. `trials` chooses points beyond those known, `num_trials` in all."""
        super().__init__(sweep)
        self.at_once, self.start, self.trials, self.num_trials = at_once, start, trials, num_trials
        self._queue: list[int] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        self._queue = [outcome.index for outcome in self.outcomes() if outcome.state != DONE]

    def goes_on(self) -> bool:
        while len(self._running) < self.at_once and not self.asked and (index := self._next()) is not None:
            self._running[index] = self.start(self.sweep, index)
        return bool(self._running)

    def look(self) -> None:
        for index in [index for index, process in self._running.items() if process.poll() is not None]:
            status = self._running.pop(index).returncode
            if status != REQUEUE and self.sweep.outcome(index).state not in (DONE, FAILED):  # it could not say so
                write_status(self.sweep.of(index), status if status >= 0 else 128 - status, 0.0)
            if self.trials:
                self.trials.tell(self.sweep.outcome(index))

    def leave(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)

    def left(self) -> str:
        return "the points were saved: the same line goes on with them"

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()

    def _next(self) -> int | None:
        """The point to start now."""
        if not self._queue and self.trials and len(self.sweep.points) < self.num_trials:
            index = len(self.sweep.points)
            self.sweep = replace(self.sweep, points=(*self.sweep.points, self.trials.ask(index)))
            self.sweep.write()
            self._queue.append(index)
        return self._queue.pop(0) if self._queue else None
