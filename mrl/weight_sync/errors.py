"""Errors of a weight sync."""


class WeightSyncError(RuntimeError):
    """The weights did not reach every engine. `failed` maps the URL of each engine that failed to the reason."""

    def __init__(self, message: str, failed: dict[str, str] | None = None) -> None:
        super().__init__(message, failed or {})
        self.failed = failed or {}

    def __str__(self) -> str:
        return str(self.args[0])


class WeightMismatchError(RuntimeError):
    """An engine does not hold the weights that were sent to it."""


class PeerError(RuntimeError):
    """Another rank of the weight sync failed, or did not answer before the deadline."""
