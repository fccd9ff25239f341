"""Processes that were lost are started again, and the run goes on: from memory where it can, else from its last checkpoint."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.controller.processes import Processes
from mrl.core.errors import Lost

logger = logging.getLogger(__name__)
State = dict[str, Any]
PAUSE_S = 60.0  # longest, before a restart


@dataclass
class Recovery:
    """Restarts at most `limit` times without a new checkpoint in between, with growing pauses."""

    processes: Processes
    store: CheckpointStore
    base: Checkpoint | None  # what the run began with, until it has checkpoints itself
    limit: int
    resumed: Callable[[Checkpoint | None], None]  # is told where the run goes on from, when the trainers are new
    initial: State = field(default_factory=dict)  # of a run that begins
    restarts: int = 0  # since the newest checkpoint was another
    newest: int | None = None

    def begin(self) -> None:
        """Bring everything up for the first time."""
        try:
            self.processes.bring_up(self.base)
            self.processes.wait_engines()
            self.processes.connect_all()
        except Lost as error:
            self(error, None)

    def __call__(self, error: Lost, boundary: State | None) -> State:
        """Bring everything back; returns the state that the trainers' weights belong to now (see Trainer).

        Raises the error when there were too many.
        """
        while True:
            checkpoint = self.store.latest() or self.base
            step = checkpoint.step if checkpoint else None
            self.restarts, self.newest = self.restarts + 1 if step == self.newest else 1, step
            if self.restarts > self.limit:
                logger.error("no restart is left of faults.max_restarts=%d", self.limit)
                raise error
            time.sleep(min(PAUSE_S, 2.0 ** (self.restarts - 1) - 1))
            self.processes.startup.ready(f"restart {self.restarts} of {self.limit} at most: {error}; begun")
            try:
                return self._restarted(error, boundary, checkpoint)
            except Lost as again:
                error, boundary = again, None
            except (
                RuntimeError,
                ValueError,
            ) as failure:  # a port that was taken meanwhile, memory that is not free yet
                error, boundary = Lost(f"{type(failure).__name__}: {failure}"), None

    def _restarted(self, error: Lost, boundary: State | None, checkpoint: Checkpoint | None) -> State:
        processes = self.processes
        processes.restart_rollout_if_lost()
        if boundary is None or error.role != "rollout" or not processes.trainers_alive():
            processes.restart_trainers()
            processes.bring_up(checkpoint)
            self.resumed(checkpoint)
            boundary = dict(checkpoint.state) if checkpoint else self.initial
        processes.connect_all()
        return boundary
