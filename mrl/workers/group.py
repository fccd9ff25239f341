"""All trainer processes of one model, called as one: cut the batch, call every rank, add up what they report."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import ray

from mrl.algorithms.losses import Loss
from mrl.algorithms.reduce import token_weights
from mrl.data.batching import micro_batches, partition
from mrl.types import Share, TrainBatch, UpdateReport
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
        address = self.workers[0].address.remote()  # Ray hands the value on when it is there
        self._ready = [w.setup.remote(spec, seed, address, timeout_s) for w in self.workers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has its model; raises the first rank's error, or GetTimeoutError."""
        ray.get(self._ready, timeout=timeout_s)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; results by rank."""
        return ray.get([getattr(w, method).remote(*args, **kwargs) for w in self.workers], timeout=self.timeout_s)

    def call_first(self, method: str, *args: Any) -> Any:
        """Call `method` on rank 0 alone."""
        return ray.get(getattr(self.workers[0], method).remote(*args), timeout=self.timeout_s)

    def update(
        self, batch: TrainBatch, *, loss: Loss, aggregation: str, lr: float, max_tokens: int, temperature: float
    ) -> UpdateReport:
        """One optimizer step: `batch.rows` cut over replicas, and into micro-batches of at most `max_tokens`."""
        weights = np.zeros(len(batch.lengths))
        weights[batch.counted] = token_weights(batch.response_lengths[batch.counted], aggregation)
        shares = [
            Share(batch.block, tuple(micro_batches(batch.lengths, part, max_tokens)), batch.advantages, weights)
            for part in partition(batch.lengths, batch.rows, self.dims.dp)
        ]
        futures = [
            worker.update.remote(shares[self.dims.dp_rank(rank)], loss, lr, temperature)
            for rank, worker in enumerate(self.workers)
        ]
        return self._add_up(ray.get(futures, timeout=self.timeout_s))

    def _add_up(self, reports: list[UpdateReport]) -> UpdateReport:
        firsts = [r for rank, r in enumerate(reports) if self.dims.tp_rank(rank) == 0]
        return UpdateReport(_combine([r.sums for r in firsts], sum), _combine([r.maxima for r in firsts], max))

    def close(self, timeout_s: float = 10.0) -> None:
        """End every process, politely first."""
        with suppress(ray.exceptions.RayError, TimeoutError):  # a rank that is stuck or dead is killed below
            ray.get([w.close.remote() for w in self.workers], timeout=timeout_s)
        for worker in self.workers:
            ray.kill(worker)


def _combine(parts: list[dict[str, float]], how: Callable) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: how([part[name] for part in parts if name in part]) for name in names}
