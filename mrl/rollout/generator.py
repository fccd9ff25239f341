"""The driver's side of sampling: asks a rollout worker, sees lengths and rewards, never a token."""

from contextlib import suppress
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.rollout.spec import RolloutSpec
from mrl.rollout.worker import RolloutWorker
from mrl.types import Rollouts


class RolloutGenerator:
    """One rollout worker behind deadlines."""

    def __init__(self, spec: RolloutSpec, options: dict[str, Any], timeout_s: float) -> None:
        """Ask Ray for the worker, which starts its engines; returns at once."""
        self.worker = ray.remote(RolloutWorker).options(**options).remote(spec)
        self.timeout_s = timeout_s

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for the engines; returns their URLs."""
        return ray.get(self.worker.wait_ready.remote(timeout_s), timeout=timeout_s + 60)

    def generate(self, rows: NDArray[np.int64], step: int) -> Rollouts:
        """Sample G responses to each prompt row."""
        return ray.get(self.worker.generate.remote(rows, step), timeout=self.timeout_s)

    def score(self, rollouts: Rollouts) -> tuple[NDArray[np.float64], float]:
        """Rewards [B] of what was generated last, and the seconds they took where they were computed."""
        return ray.get(self.worker.score.remote(), timeout=self.timeout_s)

    def evaluate(self, temperature: float) -> float:
        """Mean reward on the held-out prompts."""
        return ray.get(self.worker.evaluate.remote(temperature), timeout=self.timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """End the engines and their worker."""
        with suppress(ray.exceptions.RayError, TimeoutError):  # engines end with their worker: a supervisor watches it
            ray.get(self.worker.close.remote(), timeout=timeout_s)
        ray.kill(self.worker)
