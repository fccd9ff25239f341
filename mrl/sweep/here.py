"""Points on this machine: some at one time, each a process that is ended with this one."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType

from mrl.sweep.outcome import DONE, FAILED, Outcome, read, write_status
from mrl.sweep.plan import Sweep
from mrl.sweep.trials import Trials

POLL_S = 0.5
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Here:
    """Runs what has not ended well."""

    def __init__(self, sweep: Sweep, at_once: int, start: Callable[[Sweep, int], subprocess.Popen[bytes]]) -> None:
        """`start(sweep, index)`: a point's process."""
        self.sweep, self.at_once, self.start = sweep, at_once, start
        self.asked: list[int] = []  # signals to leave
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def run(
        self, show: Callable[[Sequence[Outcome]], None], trials: Trials | None = None, num_trials: int = 0
    ) -> Sweep:
        """Until every point has ended, or a signal to leave came and those that ran have left; the sweep as it is then.

        `trials` chooses points beyond those known, up to `num_trials` in all. `show` hears of all again and again.
        """
        former = {number: signal.signal(number, self._leave) for number in PASSED_ON}
        queue = [outcome.index for outcome in self.outcomes() if outcome.state != DONE]
        try:
            while self._fill(queue, trials, num_trials) or self._running:
                time.sleep(POLL_S)
                for index in self._ended():
                    if trials:
                        trials.tell(self.outcomes()[index])
                show(self.outcomes())
        finally:
            for process in self._running.values():
                process.terminate()
            for number, handler in former.items():
                signal.signal(number, handler)
        return self.sweep

    def outcomes(self) -> list[Outcome]:
        """Of every point, in order."""
        sweep = self.sweep
        return [read(index, point, sweep.of(index), sweep.metric) for index, point in enumerate(sweep.points)]

    def _fill(self, queue: list[int], trials: Trials | None, num_trials: int) -> bool:
        """Start what there is room for; whether anything waits."""
        while len(self._running) < self.at_once and not self.asked:
            if not queue and trials and len(self.sweep.points) < num_trials:
                queue.append(len(self.sweep.points))
                self.sweep = replace(self.sweep, points=(*self.sweep.points, trials.ask(queue[-1])))
                self.sweep.write()
            if not queue:
                break
            index = queue.pop(0)
            self._running[index] = self.start(self.sweep, index)
        return bool(queue) and not self.asked

    def _ended(self) -> list[int]:
        ended = [index for index, process in self._running.items() if process.poll() is not None]
        for index in ended:
            status = self._running.pop(index).returncode
            if status < 0:  # killed, it could not say so
                write_status(self.sweep.of(index), 128 - status, 0.0)
        return ended

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        for process in self._running.values():
            process.send_signal(number)


def unfinished(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that neither ended well nor failed."""
    return [outcome for outcome in outcomes if outcome.state not in (DONE, FAILED)]
