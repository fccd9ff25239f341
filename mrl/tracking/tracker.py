"""Tracker: passes the metrics of each step to sinks. This module also has JsonlSink, the sink that writes JSON Lines files.

Other modules contain the other sinks: mrl.tracking.console for the terminal, mrl.tracking.backends for trackers such as wandb,
and mrl.tracking.curve for the learning curve. A sink must not slow or stop a run. For this reason, separate threads import
matplotlib and the packages of trackers after the run has started.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from mrl.core import metrics as declared
from mrl.core.jsonl import JsonLinesFile
from mrl.core.run_errors import PreemptedError

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Sink(Protocol):
    """A destination of metrics."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Discard the metrics of steps after `last_step`, because the run repeats these steps.

        If `evaluated` is False, the metrics eval/* of `last_step` are discarded too.
        """
        ...

    def close(self, failed: bool = False) -> None:
        """End the output. `failed`: whether the run ends with an error. Preemption is not an error."""
        ...


class Tracker:
    """Passes metrics to all sinks. At the end of a `with` block, the tracker closes the sinks, also after an error.

    with Tracker([JsonlSink(folder / "metrics.jsonl"), ConsoleSink(total=200)]) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = list(sinks)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step. Raises ValueError for a name that mrl/core/metrics.py does not declare."""
        declared.check(metrics)
        if not metrics:
            return
        for sink in self.sinks:
            sink.log(step, metrics)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Rewind all sinks to `last_step`; see Sink.rewind."""
        for sink in self.sinks:
            sink.rewind(last_step, evaluated)

    def close(self, failed: bool = False) -> None:
        """Close all sinks in order, even if closing one of them fails."""
        for sink in self.sinks:
            try:
                sink.close(failed)
            except Exception:
                logger.exception("closing %s failed", type(sink).__name__)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.close(failed=kind is not None and not issubclass(kind, PreemptedError))


class JsonlSink:
    """Writes one JSON object per step to a file. If the file exists, the sink first removes lines of steps after `last_step`.

    If `evaluations` is True, the sink writes only the metrics eval/*. Otherwise it writes only the other metrics. A step with
    no metrics to write gets no line.
    """

    def __init__(self, path: Path, *, evaluations: bool = False, last_step: int = 0) -> None:
        self._evaluations = evaluations
        self._file = JsonLinesFile(path, last_step, every_step=not evaluations)

    def log(self, step: int, metrics: Metrics) -> None:
        chosen = {name: value for name, value in metrics.items() if name.startswith("eval/") == self._evaluations}
        if chosen:
            self._file.write(step, chosen)

    def rewind(self, last_step: int, evaluated: bool) -> None:
        self._file.rewind(last_step - 1 if self._evaluations and not evaluated else last_step)

    def close(self, failed: bool = False) -> None:
        self._file.close()
