"""What a run survives: processes that are gone or hang, and being asked to leave."""

from collections.abc import Callable


class Lost(RuntimeError):
    """Processes of the run died, hang or cannot be reached; others in their place can go on from what was saved."""

    role = "rank"  # of what was lost: rank (trainer processes) or rollout (the rollout worker)


class NotUp(Lost):
    """Processes were lost before all of the run were there: nothing can recover yet, but another start of the command."""


class Preempted(Exception):
    """The run was asked to leave (SIGTERM, SIGUSR1), and to come back later."""


def _nothing() -> None:
    pass


_on_wait: list[Callable[[], None]] = [_nothing]


def on_wait(check: Callable[[], None] | None) -> None:
    """Have `check` called again and again while the driver waits; it raises what shall end the wait. None: nothing is."""
    _on_wait[0] = check or _nothing


def check_wait() -> None:
    """Called by whoever waits for the run's processes, a few times a second."""
    _on_wait[0]()
