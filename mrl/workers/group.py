"""Worker group: all trainer ranks of one model. It partitions batches, calls every rank, and combines the reports.

mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate

import ray

from models.architecture import ModelSpec
from mrl.algorithms.objective import TokenWeighting
from mrl.core.run_errors import StartError
from mrl.core.types import Handle, RankColumns, ReplicaBatch, TeacherPart, TokenBlock, TrainBatch, UpdateReport
from mrl.hang_report.process_registry import registry_folder, unregister_processes
from mrl.hang_report.ray_wait import RayWaiter
from mrl.workers.dp_partition import MEAN_OVER_TOKENS, Packing, StepPartition, partition_step
from mrl.workers.trace_comparison import StepTrace
from mrl.workers.worker import TrainWorker, must_be_loaded_first
from parallel.dims import ParallelDims

RANK_TIMEOUT_MARGIN_S = 60.0
"""Difference in seconds between the driver's timeout of a call and the timeout of the ranks.

The ranks' process groups wait longer than the driver, so the ranks still wait when the driver writes its hang report. For a
checkpoint, the driver waits longer than the ranks instead, because each rank itself checks the deadline of the checkpoint.
"""


def _do_nothing(role: str) -> None:
    pass


@dataclass(frozen=True)
class StepRecording:
    """What trainer ranks record of the steps of a run."""

    timeline: bool = False  # the spans of every rank and step
    profile_steps: Sequence[int] = ()  # steps that torch.profiler profiles; the first step is 1
    profile_ranks: Sequence[int] = ()  # ranks that torch.profiler profiles
    profile_memory: bool = False  # whether profiles also record the allocation of memory

    def of_rank(self, rank: int, step: int) -> tuple[bool, bool, bool]:
        """Return the arguments of TrainWorker.begin_step that follow `step`."""
        return self.timeline, step in self.profile_steps and rank in self.profile_ranks, self.profile_memory


@dataclass(frozen=True)
class PendingCall[T]:
    """A call that the ranks of a model run while the driver continues. Calls to different models can run at the same time."""

    result: Callable[[], T]  # waits for the call and returns its result; raises the errors of WorkerGroup

    def then[U](self, convert: Callable[[T], U]) -> "PendingCall[U]":
        """Return the same call with a converted result."""
        return PendingCall(lambda: convert(self.result()))


@dataclass(frozen=True)
class ComputedColumns:
    """Columns [R] of a forward pass over the responses of a step."""

    columns: Mapping[str, list[Handle]]  # name -> for each replica, a handle to the values of the replica's rows
    seconds: float  # duration of the pass on the slowest rank
    # teacher -> locations of the outputs that distillation reads. The classmethod `of` does not know the teacher, so it uses the
    # key "".
    teachers: Mapping[str, Sequence[TeacherPart]] = field(default_factory=dict)

    @classmethod
    def of(cls, by_rank: Sequence[RankColumns]) -> "ComputedColumns":
        """Combine the results of all ranks."""
        columns: dict[str, list[Handle]] = {}
        for rank in by_rank:
            for name, part in rank.parts.items():
                columns.setdefault(name, []).append(part)
        parts = [part for rank in by_rank for part in rank.teacher_parts]
        return cls(columns, max(rank.seconds for rank in by_rank), {"": parts} if parts else {})

    def renamed(self, names: Mapping[str, str]) -> "ComputedColumns":
        """Return the same columns with other names, without outputs of teachers. `names`: present name -> new name."""
        return ComputedColumns({names[name]: parts for name, parts in self.columns.items()}, self.seconds)


class WorkerGroup:
    """The `dims.world_size` Ray actors of a model. Every call has a deadline of `timeout_s` seconds.

    A call raises StalledError if its deadline passes, and RankLostError if a rank has died (see mrl.hang_report). If a rank
    raises an error, the call raises the same error.
    """

    def __init__(
        self,
        dims: ParallelDims,
        run_dir: str,
        timeout_s: float,
        options: Callable[[], Sequence[Mapping[str, Any]]],
        model: str = "",
        before_device_use: Callable[[str], object] = _do_nothing,
    ) -> None:
        """Ask Ray for the processes, without waiting for their start.

        `options` returns the Ray actor options of every rank. It is called again at every restart. `model` is the name of the
        model, and is empty for the actor. Each rank logs to the folder `run_dir`/logs/`model`. `before_device_use` is called
        with the role before each call that needs the model on its device. The role is "actor" or the name of the model.
        """
        self.dims, self.timeout_s, self.before_device_use = dims, timeout_s, before_device_use
        self.role = model or "actor"
        self._waiter = RayWaiter(Path(run_dir), "rank", model)
        (Path(run_dir) / "logs" / model).mkdir(parents=True, exist_ok=True)
        self._unregister()
        self._options, self._actor_args = options, (dims, run_dir, model)
        self.workers = self.create_workers()
        assert len(self.workers) == dims.world_size, f"{len(self.workers)} actors for {dims.world_size} ranks"
        self._ready: list[Any] = []

    # Life cycle.

    def create_workers(self) -> list[Any]:
        """Ask Ray for the actor of every rank. Tests override this to return other objects."""
        remote = ray.remote(TrainWorker)
        return [
            remote.options(**options).remote(rank, *self._actor_args) for rank, options in enumerate(self._options())
        ]

    def start(self, spec: ModelSpec, seed: int, timeout_s: float, head: str = "vocabulary") -> None:
        """Start to build the model, which has the output head `head`, on every rank. `wait_ready` waits until it is built."""
        rank_timeout_s = max(timeout_s, self.timeout_s) + RANK_TIMEOUT_MARGIN_S
        address = self.workers[0].rendezvous_address.remote()  # a future, whose value Ray passes to setup()
        self._ready = [w.setup.remote(spec, seed, address, rank_timeout_s, head) for w in self.workers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every rank has built its part of the model.

        Raises StartError if Megatron cannot build this model in this layout.
        """
        try:
            self._waiter.get(self._ready, timeout_s, f"the start of {self._description}", starting=True)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (ValueError, RuntimeError)):
                raise StartError(f"the trainer ranks cannot build the model: {error.cause}") from error
            raise

    def restart(self) -> None:
        """Kill every process and ask Ray for new ones. Call `start` afterwards."""
        for worker in self.workers:
            ray.kill(worker)
        self._unregister()
        self.workers = self.create_workers()

    def alive(self, timeout_s: float = 30.0) -> bool:
        """Return whether every rank answers. A rank does not answer while it runs another call."""
        try:
            ray.get([worker.cpu_seconds.remote() for worker in self.workers], timeout=timeout_s)
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Ask every process to close, then kill all processes."""
        with suppress(ray.exceptions.RayError, TimeoutError):  # a rank that hangs is killed below
            ray.get([w.close.remote() for w in self.workers], timeout=timeout_s)
        for worker in self.workers:
            ray.kill(worker)
        self._unregister()

    def _unregister(self) -> None:
        """Remove the records of this model's ranks. Hang reports then do not list ranks that were ended on purpose."""
        unregister_processes(registry_folder(self._waiter.run_dir), f"{self._waiter.model or 'trainer'}_*")

    # Calls.

    def call[W: TrainWorker, **P, R](
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method of TrainWorker on every rank with the same arguments, and return the results by rank.

        If an argument is a handle, the method receives the object to which the handle refers.
        """
        return self._send(method, args, kwargs).result()

    def call_rank_0[W: TrainWorker, **P, R](
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of TrainWorker on rank 0 only."""
        return self._send(method, args, kwargs, self.workers[:1]).result()[0]

    def _send(
        self,
        method: Callable,
        args: Sequence[Any],
        options: Mapping[str, Any],
        workers: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> PendingCall[list[Any]]:
        """Call a method on `workers` (default: all ranks). The results are in the order of the ranks.

        If the method takes batches, every rank gets a handle to one list with the batches of all replicas. The batches share
        their arrays, so the list is only slightly larger than one batch. If the method needs the model on its devices,
        `before_device_use` first waits for running calls of other models on these devices, offloads these models, and loads this
        model.
        """
        name = method.__name__
        if must_be_loaded_first(method):
            self.before_device_use(self.role)
        futures = [getattr(worker, name).remote(*args, **options) for worker in workers or self.workers]
        deadline_s = self.timeout_s if timeout_s is None else timeout_s
        return PendingCall(lambda: self._waiter.get(futures, deadline_s, f"{name}() on {self._description}"))

    @property
    def _description(self) -> str:
        name = self._waiter.model or "trainer"
        return f"{self.dims.world_size} {name} rank{'s' if self.dims.world_size > 1 else ''}"

    # Training.

    def begin_columns(
        self, method: Callable, batch: TrainBatch, packing: Packing, **options: Any
    ) -> PendingCall[ComputedColumns]:
        """Begin a forward pass over all rows. The pass computes columns [R].

        `method`: a method of TrainWorker that returns RankColumns. `options`: further arguments of `method`.
        """
        partition = partition_step(batch, self.dims, packing.for_forward_pass())
        return self._send(method, (batch.block, ray.put(partition.replica_batches)), options).then(ComputedColumns.of)

    def evaluate(
        self, batch: TrainBatch, packing: Packing, *, weighting: TokenWeighting = MEAN_OVER_TOKENS, **options: Any
    ) -> UpdateReport:
        """Compute the loss of a batch without gradients. `options`: further arguments of the model's `evaluate`, such as loss."""
        partition = partition_step(batch, self.dims, packing.for_forward_pass(), weighting)
        call = self._send(TrainWorker.evaluate, (batch.block, ray.put(partition.replica_batches)), options)
        return self._combine(call.result(), partition)

    def update(self, mini_batches: list[TrainBatch], packing: Packing, **options: Any) -> list[UpdateReport]:
        """Call `begin_update`, and wait for the reports."""
        return self.begin_update(mini_batches, packing, **options).result()

    def begin_update(
        self,
        mini_batches: list[TrainBatch],
        packing: Packing,
        *,
        lrs: list[float],
        weighting: TokenWeighting = MEAN_OVER_TOKENS,
        **options: Any,
    ) -> PendingCall[list[UpdateReport]]:
        """Begin one optimizer step for each batch in `mini_batches`, partitioned over replicas and micro-batches.

        All mini-batches have rows of the same block, and the same columns. `lrs`: learning rate of each optimizer step.
        `weighting` computes the token weights in the loss. `options` are further arguments of the model's own `update`: loss and
        temperature.
        """
        partitions = [partition_step(batch, self.dims, packing, weighting) for batch in mini_batches]
        by_replica = list(zip(*(partition.replica_batches for partition in partitions), strict=True))
        first = mini_batches[0]
        options = dict(columns=first.columns, teachers=first.teachers, lrs=lrs, **options)
        call = self._send(TrainWorker.update, (first.block, ray.put(by_replica)), options)
        return call.then(lambda by_rank: self._combine_all(by_rank, partitions))

    def _combine_all(
        self, by_rank: Sequence[Sequence[UpdateReport]], partitions: Sequence[StepPartition]
    ) -> list[UpdateReport]:
        by_step = zip(*by_rank, strict=True)
        return [self._combine(reports, part) for reports, part in zip(by_step, partitions, strict=True)]

    def _combine(self, reports: Sequence[UpdateReport], partition: StepPartition) -> UpdateReport:
        """Combine the reports of all ranks on one optimizer step.

        Only ranks of the last pipeline stage report sums. All ranks of a tensor-parallel group report the same sums, so only the
        sums of one rank in each group are added.
        """
        sums: dict[str, list[float]] = {}
        maxima: dict[str, list[float]] = {}
        for rank, report in enumerate(reports):
            if self.dims.coords(rank).tp == 0:
                for name, value in report.sums.items():
                    sums.setdefault(name, []).append(value)
            for name, value in report.maxima.items():
                maxima.setdefault(name, []).append(value)
        return UpdateReport(
            {name: sum(values) for name, values in sums.items()},
            {name: max(values) for name, values in maxima.items()} | partition.metrics,
        )

    # Parity checks.

    def trace_step(self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], **options: Any) -> StepTrace:
        """Trace one optimizer step, with one batch for each replica. `options`: loss, lr, temperature, folder."""
        call = self._send(TrainWorker.trace_step, (block, ray.put(list(replica_batches))), options)
        return StepTrace.merge(call.result())

    def trace_layers(self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], **options: Any) -> StepTrace:
        """Trace a step up to its gradients, layer by layer. `options`: loss, temperature, folder."""
        call = self._send(TrainWorker.trace_layers, (block, ray.put(list(replica_batches))), options)
        return StepTrace.merge(call.result())

    def forward_outputs(
        self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], *, temperature: float
    ) -> dict[int, Any]:
        """Return row -> log-probabilities (actor) or values (critic) of its sampled tokens, under the current weights."""
        options = dict(temperature=temperature)
        call = self._send(TrainWorker.forward_outputs, (block, ray.put(list(replica_batches))), options)
        return {row: column for part in call.result() for row, column in part.items()}

    # What the ranks record.

    def begin_step(self, step: int, recording: StepRecording) -> None:
        """Tell every rank which step begins, and what the rank records of this step. Does not wait for the ranks."""
        for rank, worker in enumerate(self.workers):
            worker.begin_step.remote(step, *recording.of_rank(rank, step))

    # Memory.

    def offload(self, keep_weights: bool = False) -> int:
        """Release the device memory of the model. If `keep_weights` is true, the weights stay.

        If the weights were already offloaded, `keep_weights` loads them. Returns the largest number of bytes that a rank still
        occupies.
        """
        return max(self.call(TrainWorker.offload, keep_weights))

    def load_to_device(self) -> None:
        """Load the whole model to its devices again. Only the gradients are lost."""
        self.call(TrainWorker.load_to_device)

    # Checkpoints, see mrl.checkpoint.saver. Each rank itself checks the deadline of a checkpoint.

    def begin_save(self, folder: str, asynchronous: bool, timeout_s: float) -> None:
        """Take a snapshot of the model's state and start to write it into `folder`. If not `asynchronous`, wait for the write."""
        deadline_s = timeout_s + RANK_TIMEOUT_MARGIN_S
        self._send(TrainWorker.begin_save, (folder, asynchronous), {}, timeout_s=deadline_s).result()

    def save_has_ended(self) -> bool:
        """Return whether every rank has written its part, or has failed to write it."""
        return all(self.call(TrainWorker.save_has_ended))

    def finish_save(self, timeout_s: float) -> None:
        """Wait until every rank has written its part. Raises the error of a rank that failed."""
        deadline_s = timeout_s + RANK_TIMEOUT_MARGIN_S
        self._send(TrainWorker.finish_save, (timeout_s,), {}, timeout_s=deadline_s).result()

    def abandon_save(self) -> None:
        """Stop writing the current checkpoint. Does nothing if none is being written."""
        self.call(TrainWorker.abandon_save)
