"""The phases of a step: who uses the hardware now, and for how long."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Names and times the phases of a step. Colocated engines and trainers share their device by phase."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.interrupted: str | None = None  # the last phase, if it was cut short
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.current = self.interrupted = name
        try:
            yield
            self.interrupted = None
        finally:
            self.current = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """`time/<phase>_s` of the phases since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
