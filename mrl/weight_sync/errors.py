"""What can go wrong with a weight sync."""


class SyncError(RuntimeError):
    """Weights could not be brought to every engine; `failed` says which engines are to blame, and why."""

    def __init__(self, message: str, failed: dict[str, str] | None = None) -> None:
        super().__init__(message, failed or {})
        self.failed = failed or {}

    def __str__(self) -> str:
        return str(self.args[0])


class WeightMismatchError(RuntimeError):
    """An engine does not hold the weights that were sent to it."""


class PeerError(RuntimeError):
    """Another rank of the sync failed or did not answer in time."""
