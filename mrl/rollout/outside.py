"""A server that somebody else runs: used, never started nor ended."""

import time

from mrl.rollout.server_args import DETERMINISTIC
from mrl.weight_sync.control import EngineControl

POLL_S = 0.2


def check_seeds(control: EngineControl, key: str) -> None:
    """Raise ValueError where a server that somebody else started heeds no seeds; `key` is what asks for them."""
    if not control.server_info().get(DETERMINISTIC):
        raise ValueError(
            f"rollout.engine_urls: {control.url} was started without --enable-deterministic-inference and heeds no seeds; "
            f"start it with that, or set {key}=false."
        )


class OutsideEngine:
    """Has what a rollout worker asks of an EngineServer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests. Raises TimeoutError at the deadline."""
        deadline = time.monotonic() + timeout_s
        with EngineControl(self.url) as control:
            while not control.health():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rollout.engine_urls: {self.url} did not answer within {timeout_s} s.")
                time.sleep(POLL_S)

    def alive(self) -> bool:
        """Not known of processes that are not ours; it may come back by itself."""
        return True

    def stop(self) -> None:
        """It goes on: it is not ours."""

    def cpu_seconds(self) -> float:
        """Not known."""
        return 0.0
