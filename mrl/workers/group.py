"""All trainer processes of one model, called as one: cut the batch, call every rank, add up what they report."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from mrl.core.types import Handle, RankBatch, TokenBlock, TrainBatch, UpdateReport
from mrl.hang_report.process_registry import registry_folder, unregister_processes
from mrl.hang_report.ray_wait import RayWaiter
from mrl.workers.awake import NEEDS
from mrl.workers.dp_partition import Packing, StepPartition, partition_step
from mrl.workers.trace_comparison import StepTrace
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims


def nothing(role: str) -> None:
    """Nobody shares devices."""


PATIENCE_S = 60.0  # how much longer ranks wait for each other than the driver for them


class StartError(ValueError):
    """The trainer processes cannot build the model that the config describes."""


class WorkerGroup:
    """`dims.world_size` Ray actors. Every call has a deadline of `timeout_s` seconds.

    Any call raises StalledError when its deadline passes, RankLostError when a rank died (see mrl.hang_report), and what a rank raised.
    """

    def __init__(
        self,
        dims: ParallelDims,
        run_dir: str,
        timeout_s: float,
        options: Callable[[], Sequence[Mapping[str, Any]]],
        model: str = "",
        before: Callable[[str], object] = nothing,
    ) -> None:
        """Ask Ray for the processes; returns at once. `options`: Ray actor options by rank, asked whenever ranks are made.

        `run_dir`: its logs/ get a file for each rank, those of a `model` beside the actor in a folder of that name.
        `before` is told the model's name (actor, where it is empty) before each call that needs its memory on the device.
        """
        self.dims, self.timeout_s, self.before = dims, timeout_s, before
        self.role = model or "actor"
        self._waiter = RayWaiter(Path(run_dir), "rank", model)
        (Path(run_dir) / "logs" / model).mkdir(parents=True, exist_ok=True)
        self._forget()
        self._options, self._of_ranks = options, (dims, run_dir, model)
        self.workers = self.processes()
        assert len(self.workers) == dims.world_size, f"{len(self.workers)} places for {dims.world_size} ranks"
        self._ready: list[Any] = []

    def processes(self) -> list[Any]:
        """Ask Ray for the process of every rank; anything whose methods have a `remote` may stand for one."""
        remote = ray.remote(TrainWorker)
        return [remote.options(**place).remote(rank, *self._of_ranks) for rank, place in enumerate(self._options())]

    def start(self, spec: Any, seed: int, timeout_s: float, critic: bool = False) -> None:
        """Begin building the model on every rank; `wait_ready` waits for it.

        Ranks wait longer for each other than the driver waits for them, so that it finds them where they are stuck.
        """
        patience_s = max(timeout_s, self.timeout_s) + PATIENCE_S
        address = self.workers[0].address.remote()  # Ray hands the value on when it is there
        self._ready = [w.setup.remote(spec, seed, address, patience_s, critic) for w in self.workers]

    def renew(self) -> None:
        """End every process at once, and ask Ray for others in their place; `start` comes next."""
        for worker in self.workers:
            ray.kill(worker)
        self._forget()
        self.workers = self.processes()

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Whether every rank answers, which it does between calls."""
        try:
            ray.get([worker.cpu_seconds.remote() for worker in self.workers], timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has its model; raises the first rank's error, or StalledError.

        Raises StartError where a rank refuses what it was told to build.
        """
        try:
            self._waiter.get(self._ready, timeout_s, f"the start of {self._all}", starting=True)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (ValueError, RuntimeError)):
                raise StartError(f"Megatron refuses this model or layout: {error.cause}") from error
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; results by rank."""
        self._prepare(method)
        return self._wait(method, [getattr(worker, method).remote(*args, **kwargs) for worker in self.workers])

    def call_first(self, method: str, *args: Any) -> Any:
        """Call `method` on rank 0 alone."""
        self._prepare(method)
        return self._wait(method, [getattr(self.workers[0], method).remote(*args)])[0]

    def begin_save(self, folder: str, asynchronous: bool, timeout_s: float) -> None:
        """Take a snapshot of everything and begin to write it; see mrl.checkpoint.saver."""
        self._saving("begin_save", timeout_s, folder, asynchronous)

    def save_finished(self) -> bool:
        """Whether every rank has written its part."""
        return all(self.call("save_finished"))

    def finish_save(self, timeout_s: float) -> None:
        """Wait until every rank has; raises what went wrong."""
        self._saving("finish_save", timeout_s, timeout_s)

    def _saving(self, method: str, timeout_s: float, *args: Any) -> None:
        """A call whose deadline is a checkpoint's, which the ranks look at themselves."""
        self._prepare(method)
        futures = [getattr(worker, method).remote(*args) for worker in self.workers]
        self._waiter.get(futures, timeout_s + PATIENCE_S, f"{method}() on {self._all}")

    def abandon_save(self) -> None:
        """Give up what was begun, if anything."""
        self.call("abandon_save")

    def compute(self, what: str, batch: TrainBatch, packing: Packing, **how: Any) -> list[Handle]:
        """A column [R] of all rows (see mrl.workers.columns), as handles of the replicas' parts."""
        plan = partition_step(batch, self.dims, packing, "token_mean")
        parts = self._on_shares("compute", batch.block, plan.shares, dict(what=what, **how))
        return [part for part in parts if part is not None]

    def update(
        self,
        steps: list[TrainBatch],
        packing: Packing,
        *,
        aggregation: str,
        lrs: list[float],
        longest: int | None = None,
        **how: Any,
    ) -> list[UpdateReport]:
        """One optimizer step per mini-batch, each cut over replicas and micro-batches; `how`: loss and temperature.

        All `steps` are rows of the same block, with the same columns; `longest` see `partition_step`.
        """
        plans = [partition_step(step, self.dims, packing, aggregation, longest) for step in steps]
        by_replica = list(zip(*(plan.shares for plan in plans), strict=True))
        options = dict(columns=steps[0].columns, lrs=lrs, **how)
        reports = self._on_shares("update", steps[0].block, by_replica, options)
        return [self._add_up(per_rank, plan) for per_rank, plan in zip(zip(*reports, strict=True), plans, strict=True)]

    def trace(self, block: TokenBlock, shares: Sequence[RankBatch], **how: Any) -> StepTrace:
        """One optimizer step, looked at from all sides; a share for each replica; `how`: loss, lr, temperature, folder."""
        return StepTrace.joined(self._on_shares("trace", block, shares, how))

    def trace_layers(self, block: TokenBlock, shares: Sequence[RankBatch], **how: Any) -> StepTrace:
        """A step up to its gradients, layer by layer; `how`: loss, temperature, folder."""
        return StepTrace.joined(self._on_shares("trace_layers", block, shares, how))

    def look(self, block: TokenBlock, shares: Sequence[RankBatch], *, temperature: float) -> dict[int, Any]:
        """Row of the block -> [R of the row] log-probabilities or values under the current weights."""
        parts = self._on_shares("look", block, shares, dict(temperature=temperature))
        return {row: column for part in parts for row, column in part.items()}

    def _on_shares(self, method: str, block: Handle, shares: Sequence[Any], how: dict[str, Any]) -> list[Any]:
        """Call `method` on every rank with the block and the shares of all replicas; results by rank.

        Shares have columns [B] in common, so that all of them together are little more than one, and are sent once.
        """
        self._prepare(method)
        everyones = ray.put(list(shares))
        return self._wait(method, [getattr(worker, method).remote(block, everyones, **how) for worker in self.workers])

    def sleep(self, keep_weights: bool = False) -> int:
        """Give the memory on the devices back, but for the weights where they are to be kept; the most bytes a rank still has."""
        return max(self.call("sleep", keep_weights))

    def wake(self) -> None:
        """Have all of it on the devices again, as it was."""
        self.call("wake")

    def _prepare(self, method: str) -> None:
        if (
            method in NEEDS and method != "push_weights"
        ):  # around which engines are awake, see mrl.controller.colocation
            self.before(self.role)

    def _wait(self, method: str, futures: list[Any]) -> list[Any]:
        return self._waiter.get(futures, self.timeout_s, f"{method}() on {self._all}")

    @property
    def _all(self) -> str:
        name = self._waiter.group or "trainer"
        return f"{self.dims.world_size} {name} rank{'s' if self.dims.world_size > 1 else ''}"

    def _add_up(self, reports: Sequence[UpdateReport], plan: StepPartition) -> UpdateReport:
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
        self._forget()

    def _forget(self) -> None:
        """Ranks that were ended on purpose, or are of an earlier start in this folder, are not missed."""
        unregister_processes(registry_folder(self._waiter.run_dir), f"{self._waiter.group or 'trainer'}_*")


def _combine(parts: list[dict[str, float]], how: Callable) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: how([part[name] for part in parts if name in part]) for name in names}
