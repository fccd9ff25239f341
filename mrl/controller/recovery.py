"""Restarts lost processes and continues the run: from the trainers' weights if they are intact, else from the last checkpoint."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.controller.processes import RunProcesses
from mrl.controller.trainer import State
from mrl.core.run_errors import ProcessesLostError

logger = logging.getLogger(__name__)
MAX_PAUSE_S = 60.0  # before a restart


@dataclass
class ProcessRecovery:
    """Restarts at most `max_restarts` times without a new checkpoint in between, with growing pauses."""

    processes: RunProcesses
    store: CheckpointStore
    base: Checkpoint | None  # checkpoint that the run began with; used until the run has one of its own
    max_restarts: int
    resumed: Callable[[Checkpoint | None], None]  # called with the checkpoint that new trainers were loaded from
    initial: State = field(default_factory=dict)  # of a run without a checkpoint
    restarts: int = 0  # since the newest checkpoint was written
    newest: int | None = None  # step of the newest checkpoint at the last restart

    def begin(self) -> None:
        """Bring up all processes for the first time."""
        try:
            self.processes.bring_up(self.base)
            self.processes.engines.wait_started()
            self.processes.engines.connect()
        except ProcessesLostError as error:
            self(error, None)

    def __call__(self, error: ProcessesLostError, boundary: State | None) -> State:
        """Restart what was lost; returns the run's state that belongs to the trainers' weights now (see LossRecovery).

        Raises the error if no restart is left.
        """
        while True:
            checkpoint = self.store.latest() or self.base
            step = checkpoint.step if checkpoint else None
            self.restarts, self.newest = self.restarts + 1 if step == self.newest else 1, step
            if self.restarts > self.max_restarts:
                logger.error("no restart is left of fault_tolerance.max_restarts=%d", self.max_restarts)
                raise error
            time.sleep(min(MAX_PAUSE_S, 2.0 ** (self.restarts - 1) - 1))
            self.processes.startup.ready(f"restart {self.restarts} of at most {self.max_restarts}: {error}; begun")
            try:
                return self._restart(error, boundary, checkpoint)
            except ProcessesLostError as another:
                error, boundary = another, None
            except (RuntimeError, ValueError) as failure:  # e.g. a port is taken, or memory is not free yet
                error, boundary = ProcessesLostError(f"{type(failure).__name__}: {failure}"), None

    def _restart(self, error: ProcessesLostError, boundary: State | None, checkpoint: Checkpoint | None) -> State:
        processes = self.processes
        processes.engines.restart_if_lost(processes.models.alive)
        if boundary is None or error.role != "rollout" or not processes.models.alive():
            processes.restart_trainers()
            processes.bring_up(checkpoint)
            self.resumed(checkpoint)
            boundary = dict(checkpoint.state) if checkpoint else self.initial
        processes.engines.connect()
        return boundary
