"""All trainer processes of one model, called as one: cut the batch, call every rank, add up what they report."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray

from mrl.types import Share, TokenBlock, TrainBatch, UpdateReport
from mrl.workers.certificate import Trace
from mrl.workers.shares import Packing, StepPlan, plan_step
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims


class StartError(ValueError):
    """The trainer processes cannot build the model that the config describes."""


class WorkerGroup:
    """`dims.world_size` Ray actors. Every call has a deadline of `timeout_s` seconds."""

    def __init__(self, dims: ParallelDims, log_dir: str, timeout_s: float, options: dict[str, Any]) -> None:
        """Ask Ray for the processes; returns at once. `options` are Ray actor options (resources, environment)."""
        self.dims, self.timeout_s = dims, timeout_s
        remote = ray.remote(TrainWorker).options(**options)
        self.workers = [remote.remote(rank, dims, log_dir) for rank in range(dims.world_size)]
        self._ready: list[Any] = []

    def start(self, spec: Any, seed: int, timeout_s: float, critic: bool = False) -> None:
        """Begin building the model on every rank; `wait_ready` waits for it."""
        address = self.workers[0].address.remote()  # Ray hands the value on when it is there
        self._ready = [w.setup.remote(spec, seed, address, timeout_s, critic) for w in self.workers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has its model; raises the first rank's error, or GetTimeoutError.

        Raises StartError where a rank refuses what it was told to build.
        """
        try:
            ray.get(self._ready, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (ValueError, RuntimeError)):
                raise StartError(f"Megatron refuses this model or layout: {error.cause}") from error
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; results by rank."""
        return ray.get([getattr(w, method).remote(*args, **kwargs) for w in self.workers], timeout=self.timeout_s)

    def call_first(self, method: str, *args: Any) -> Any:
        """Call `method` on rank 0 alone."""
        return ray.get(getattr(self.workers[0], method).remote(*args), timeout=self.timeout_s)

    def update(
        self, steps: list[TrainBatch], packing: Packing, *, aggregation: str, lrs: list[float], **how: Any
    ) -> list[UpdateReport]:
        """One optimizer step per mini-batch, each cut over replicas and micro-batches; `how`: loss and temperature.

        All `steps` are rows of the same block.
        """
        plans = [plan_step(step, self.dims, packing, aggregation) for step in steps]
        futures = []
        for rank, worker in enumerate(self.workers):
            replica = self.dims.coords(rank).dp
            shares = [plan.shares[replica] for plan in plans]
            futures.append(worker.update.remote(steps[0].block, shares, lrs=lrs, **how))
        reports = ray.get(futures, timeout=self.timeout_s)
        return [self._add_up(per_rank, plan) for per_rank, plan in zip(zip(*reports, strict=True), plans, strict=True)]

    def trace(self, block: TokenBlock, shares: Sequence[Share], **how: Any) -> Trace:
        """One optimizer step, looked at from all sides; a share for each replica; `how`: loss, lr, temperature, folder."""
        return Trace.joined(self._on_shares("trace", block, shares, how))

    def look(self, block: TokenBlock, shares: Sequence[Share], *, temperature: float) -> dict[int, Any]:
        """Row of the block -> [R of the row] log-probabilities or values under the current weights."""
        parts = self._on_shares("look", block, shares, dict(temperature=temperature))
        return {row: column for part in parts for row, column in part.items()}

    def _on_shares(self, method: str, block: TokenBlock, shares: Sequence[Share], how: dict[str, Any]) -> list[Any]:
        futures = [
            getattr(worker, method).remote(block, shares[self.dims.coords(rank).dp], **how)
            for rank, worker in enumerate(self.workers)
        ]
        return ray.get(futures, timeout=self.timeout_s)

    def _add_up(self, reports: Sequence[UpdateReport], plan: StepPlan) -> UpdateReport:
        """Losses are known on the last pipeline stages, to each tensor-parallel rank the same."""
        heads = [report for rank, report in enumerate(reports) if self.dims.coords(rank).tp == 0]
        maxima = _combine([report.maxima for report in reports], max)
        return UpdateReport(_combine([report.sums for report in heads], sum), maxima | plan.numbers)

    def close(self, timeout_s: float = 10.0) -> None:
        """End every process, politely first."""
        with suppress(ray.exceptions.RayError, TimeoutError):  # a rank that is stuck or dead is killed below
            ray.get([w.close.remote() for w in self.workers], timeout=timeout_s)
        for worker in self.workers:
            ray.kill(worker)


def _combine(parts: list[dict[str, float]], how: Callable) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: how([part[name] for part in parts if name in part]) for name in names}
