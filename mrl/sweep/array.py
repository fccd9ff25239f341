"""Points as tasks of a Slurm array. What became of them is read from their folders: Slurm's word says less."""

import json
from collections.abc import Callable, Sequence

from mrl.sweep.outcome import DONE, FAILED, write_status
from mrl.sweep.plan import Sweep
from mrl.sweep.runner import Runner

JOBS = "jobs.json"  # in the sweep's folder: ids of the arrays that were submitted for it
LOOKS = 3  # in a row without the task, before a point without a word has failed: shared folders show files late


class Array(Runner):
    """Submits what no earlier array of this sweep still has; the jobs outlive this process."""

    poll_s = 5.0

    def __init__(
        self, sweep: Sweep, submit: Callable[[Sequence[int]], str], queued: Callable[[str], set[int] | None]
    ) -> None:
        """`submit(indices)`: an array of these points, its id. `queued(id)`: its points that wait or run; None: unknown."""
        super().__init__(sweep)
        self.submit, self.queued = submit, queued
        self._jobs: list[str] = []
        self._unseen: dict[int, int] = {}  # looks without the point's task

    def left(self) -> str:
        jobs = " ".join(self._jobs)
        return f"the jobs go on: mrl train -m --table {self.sweep.folder} tells how; scancel {jobs} ends them"

    def begin(self) -> None:
        path = self.sweep.folder / JOBS
        self._jobs = json.loads(path.read_text()) if path.exists() else []
        there = self._queued()
        if there is None:
            raise ValueError(f"squeue does not answer; whether jobs {self._jobs} of this sweep still run is unknown.")
        wanted = [one.index for one in self.outcomes() if one.state != DONE and one.index not in there]
        for index in wanted:
            self.sweep.forget(index)
        if wanted:
            self._jobs.append(self.submit(wanted))
            path.write_text(json.dumps(self._jobs))

    def goes_on(self) -> bool:
        return not self.asked and any(one.state not in (DONE, FAILED) for one in self.outcomes())

    def look(self) -> None:
        there = self._queued()
        if there is None:
            return
        for one in self.outcomes():
            lost = one.state not in (DONE, FAILED) and one.index not in there
            self._unseen[one.index] = self._unseen.get(one.index, 0) + 1 if lost else 0
            if self._unseen[one.index] == LOOKS:
                one.folder.mkdir(exist_ok=True)
                with (one.folder / "terminal.log").open("a") as log:
                    log.write(
                        f"mrl: its job ended without a word; {one.folder}/logs and {self.sweep.folder}/logs have what was said\n"
                    )
                write_status(one.folder, 1, 0.0)

    def leave(self, number: int) -> None:
        """The jobs go on."""

    def close(self) -> None:
        """They outlive this process."""

    def _queued(self) -> set[int] | None:
        found = [self.queued(job) for job in self._jobs]
        return None if None in found else {index for there in found for index in there or ()}
