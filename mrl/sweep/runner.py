"""What runs the points of a sweep, and heeds signals meanwhile."""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FrameType

from mrl.sweep.outcome import DONE, FAILED, Outcome
from mrl.sweep.plan import Sweep

Show = Callable[[Sequence[Outcome]], None]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Runner(ABC):
    """Runs what has not ended well, until every point has ended or a signal to leave came."""

    poll_s: float  # between looks

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.asked: list[int] = []  # signals to leave

    def run(self, show: Show) -> None:
        """`show` hears of all points again and again."""
        former = {number: signal.signal(number, self._heed) for number in SIGNALS}
        try:
            self.begin()
            while self.goes_on():
                time.sleep(self.poll_s)
                self.look()
                show(self.outcomes())
        finally:
            self.close()
            for number, handler in former.items():
                signal.signal(number, handler)

    def outcomes(self) -> list[Outcome]:
        """Of every point, in order."""
        return self.sweep.outcomes()

    @abstractmethod
    def left(self) -> str:
        """What to tell when this process was asked to leave."""

    @abstractmethod
    def begin(self) -> None:
        """Before the first look."""

    @abstractmethod
    def goes_on(self) -> bool:
        """Whether there is anything to wait for; starts what there is room for."""

    @abstractmethod
    def look(self) -> None:
        """Notice what has ended."""

    @abstractmethod
    def leave(self, number: int) -> None:
        """A signal to leave came."""

    @abstractmethod
    def close(self) -> None:
        """End what would outlive this process and should not."""

    def _heed(self, number: int, frame: FrameType | None) -> None:
        self.asked.append(number)
        self.leave(number)


def unfinished(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that neither ended well nor failed."""
    return [outcome for outcome in outcomes if outcome.state not in (DONE, FAILED)]
