"""All trainer processes of one model, called as one: cut the batch, call every rank, add up what they report."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mrl.algorithms.losses import Loss
from mrl.algorithms.reduce import token_weights
from mrl.data.batching import micro_batches, partition
from mrl.types import Handle, Share, UpdateReport
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims


class WorkerGroup:
    """`dims.world_size` Ray actors. Every call has a deadline of `timeout_s` seconds."""

    def __init__(self, dims: ParallelDims, log_dir: str, timeout_s: float, options: dict[str, Any]) -> None:
        """Ask Ray for the processes; returns at once. `options` are Ray actor options (resources, environment)."""
        self.dims, self.timeout_s = dims, timeout_s
        remote = ray.remote(TrainWorker).options(**options)
        self.workers = [remote.remote(rank, dims, log_dir) for rank in range(dims.world_size)]
        self._ready: list[Any] = []

    def start(self, spec: Any, seed: int, timeout_s: float) -> None:
        """Begin building the model on every rank; `wait_ready` waits for it."""
        address, port = ray.get(self.workers[0].address.remote(), timeout=timeout_s)
        self._ready = [w.setup.remote(spec, seed, address, port, timeout_s) for w in self.workers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has its model; raises the first rank's error, or GetTimeoutError."""
        ray.get(self._ready, timeout=timeout_s)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; results by rank."""
        return ray.get([getattr(w, method).remote(*args, **kwargs) for w in self.workers], timeout=self.timeout_s)

    def update(
        self,
        block: Handle,
        lengths: NDArray[np.int64],
        response_lengths: NDArray[np.int64],
        advantages: NDArray[np.float32],
        rows: NDArray[np.int64],
        denominator_rows: NDArray[np.int64],
        *,
        loss: Loss,
        aggregation: str,
        lr: float,
        max_tokens: int,
    ) -> UpdateReport:
        """One optimizer step on `rows` of a block, normalised over `denominator_rows` (which contain them)."""
        weights = np.zeros(len(lengths))
        weights[denominator_rows] = token_weights(response_lengths[denominator_rows], aggregation)
        shares = [
            Share(block, tuple(micro_batches(lengths, part, max_tokens)), advantages, weights)
            for part in partition(lengths, rows, self.dims.dp)
        ]
        futures = [
            worker.update.remote(shares[self.dims.dp_rank(rank)], loss, lr) for rank, worker in enumerate(self.workers)
        ]
        return self._add_up(ray.get(futures, timeout=self.timeout_s))

    def _add_up(self, reports: list[UpdateReport]) -> UpdateReport:
        firsts = [r for rank, r in enumerate(reports) if self.dims.tp_rank(rank) == 0]
        return UpdateReport(_combine([r.sums for r in firsts], sum), _combine([r.maxima for r in firsts], max))

    def close(self, timeout_s: float = 10.0) -> None:
        """End every process, politely first."""
        end = time.monotonic() + timeout_s
        try:
            ray.get([w.close.remote() for w in self.workers], timeout=max(0.1, end - time.monotonic()))
        except (ray.exceptions.RayError, TimeoutError):
            pass  # a rank that is stuck or dead is killed below
        for worker in self.workers:
            ray.kill(worker)


def _combine(parts: list[dict[str, float]], how: Callable) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: how([part[name] for part in parts if name in part]) for name in names}
