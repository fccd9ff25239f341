"""What is raised when processes of a run stand still or are lost. A new start may cure any of them."""

from pathlib import Path

from mrl.core.errors import Lost


class Diagnosed(Lost):
    """A run cannot go on as it is; a report says why."""

    def __init__(
        self, message: str, report: Path | None, names: tuple[str, ...] = (), ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.report = report  # file with everything that was seen; None where there is none
        self.names = names  # of the processes to blame, as in the message
        self.ranks = ranks  # those of them that are trainer ranks

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.report, self.names, self.ranks), {"role": self.role}


class Stalled(Diagnosed):
    """A deadline passed; or ranks gave up waiting for one of them that lives."""


class RankLost(Diagnosed):
    """Trainer processes died."""


class WorkerLost(Diagnosed):
    """The rollout worker died."""
