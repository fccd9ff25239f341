"""Ray actor of one trainer rank. It passes token blocks from Ray's object store to the rank's part of the model."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Protocol

import numpy as np
import ray

from models.architecture import ModelSpec
from models.megatron_overrides import check_transformer_engine
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.config.process_schema import WeightSyncConfig
from mrl.core.code_locations import quick_imports
from mrl.core.run_warnings import forward_warnings
from mrl.core.types import (
    Column,
    ColumnPart,
    Handle,
    RankColumns,
    ReplicaBatch,
    SupervisedRows,
    SyncReport,
    TeacherOutputs,
    TeacherPart,
    TokenBlock,
    UpdateReport,
    assemble_column,
    teacher_outputs_by_row,
)
from mrl.data.supervised_dataset import RowForm
from mrl.data.tokenizer import ChatTemplate
from mrl.hang_report.process_registry import register_process, registry_folder, track_activity
from parallel import spans
from parallel.collective_log import CollectiveLog
from parallel.dims import ParallelDims
from parallel.spans import span
from parallel.trainer_config import OffloadLevel, OptimConfig

logger = logging.getLogger(__name__)
DUMPED_BATCH, DUMPED_WEIGHTS = "batch.npz", "weights"
"""Names in a step dump: the file with the batch, and the Hugging Face folder with the model weights."""


class _HasModel(Protocol):
    model: Any


def requires_on_device[W: _HasModel, **P, R](
    level: OffloadLevel, *, loaded_by_scheduler: bool = False
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Declare how much of the model must be on the device when a worker method is called.

    Before a call of such a method, WorkerGroup loads the whole model, whatever `level` is. With `loaded_by_scheduler`, it does
    not, because the caller is inside MemoryScheduler.during_push, which loads at least the actor's weights. If less than `level`
    is loaded, the method raises RuntimeError, because it would compute on released memory.
    """

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @wraps(method)
        def checked(self: W, *args: P.args, **kwargs: P.kwargs) -> R:
            current = self.model.offloader.level
            if current < level:
                raise RuntimeError(
                    f"{method.__name__}() needs offload level {level.name}, but the model is at "
                    f"{current.name}; call load_to_device() first."
                )
            return method(self, *args, **kwargs)

        checked.required_level = level  # type: ignore[missing-attribute]  # read by required_level
        checked.loaded_by_scheduler = loaded_by_scheduler  # type: ignore[missing-attribute]
        return checked

    return decorate


def required_level(method: Callable) -> OffloadLevel:
    """Return the level that `requires_on_device` declared for a worker method. The default is FULLY_OFFLOADED."""
    return getattr(method, "required_level", OffloadLevel.FULLY_OFFLOADED)


def must_be_loaded_first(method: Callable) -> bool:
    """Return whether the driver must load the model before it calls this worker method."""
    return required_level(method) > OffloadLevel.FULLY_OFFLOADED and not getattr(method, "loaded_by_scheduler", False)


class TrainWorker:
    """Ray actor of one trainer rank. WorkerGroup calls most methods on all ranks at once, and some only on rank 0.

    `replica_batches` has one batch for each data-parallel replica. Each rank takes the batch of its own replica.
    """

    def __init__(self, rank: int, dims: ParallelDims, run_dir: str, model: str = "") -> None:
        """Import torch and set up logging, without waiting for other ranks.

        `model` is the name of the rank's model, such as "critic". It is empty for the actor.
        """
        logging.basicConfig(
            filename=Path(run_dir) / "logs" / model / f"trainer_{rank}.log",
            level=logging.INFO,
            format="%(asctime)s %(name)s %(message)s",
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs a line for every request
        self.rank, self.dims, self.role, self.run_dir = rank, dims, model or "actor", Path(run_dir)
        self._sync: Any = None  # LiveSync, DiskSync or AdapterSync; None: no weight sync session is open
        self._listener: Any = None  # on rank 0: the socket of `rendezvous_address`, which keeps the port until `setup`
        self.model: Any = None  # MegatronActor, MegatronCritic or MegatronRewardModel, which `setup` builds
        title, name = f"{model} {dims.describe_rank(rank)}".strip(), f"{model or 'trainer'}_{rank}"
        forward_warnings(title, run_dir)
        record = register_process(registry_folder(run_dir), name, title, "rank", model=model, rank=rank)
        self._collectives = CollectiveLog(record.with_suffix(".ops"))
        with quick_imports():  # imports torch; this is not done above, because the driver does not need it
            from parallel import device

            device.patch_megatron_for_cpu()
            from parallel.step_profile import StepProfiler
        device.set_threads()
        self._profiler = StepProfiler(self.run_dir / "profile", f"{self.role}-rank{rank}")

    def rendezvous_address(self) -> tuple[str, int]:
        """Listen on a free port of this node, and return address and port. In `setup`, rank 0 waits there for the other ranks."""
        from parallel.collectives import listen  # imports torch

        self._listener = listen(address := ray.util.get_node_ip_address(), 0)
        return address, self._listener.getsockname()[1]

    def setup(
        self, spec: ModelSpec, seed: int, address: tuple[str, int], timeout_s: float, head: str = "vocabulary"
    ) -> None:
        """Build this rank's part of the model. `head`: vocabulary, value or score. Raises ValueError if a library is missing."""
        check_transformer_engine(spec.overrides)
        with quick_imports():  # imports Megatron, which must follow patch_megatron_for_cpu (see __init__)
            from mrl.workers.actor_critic import MegatronActor, MegatronCritic, MegatronRewardModel
            from parallel import collectives, groups
        collectives.init_process_group(self.rank, self.dims.world_size, *address, timeout_s, self._listener)
        groups.initialize(self.dims, seed)
        self._collectives.watch()
        models = dict(vocabulary=MegatronActor, value=MegatronCritic, score=MegatronRewardModel)
        self.model = models[head](spec)

    def load_supervised_dataset(
        self, form: RowForm, path: str, tokenizer: str, max_tokens: int, chat: ChatTemplate
    ) -> SupervisedRows:
        """Tokenize a data set whose rows are responses, pairs or labels (see RowForm), and put it into Ray's object store."""
        data = form.load(path, tokenizer, max_tokens, chat)
        block = data.block()
        lengths = (block.lengths, block.response_lengths, block.sampled_lengths)
        return SupervisedRows(ray.put(block), *lengths, data.num_rows, data.sequences_per_row)

    def add_column(self, block: TokenBlock, name: str, *parts: ColumnPart) -> Handle:
        """Return a handle to the block with a further column. Each part has rows of one rank. Rows in no part get NaN."""
        return ray.put(block.with_columns(**{name: assemble_column(parts, block.sampled_lengths, fill=float("nan"))}))

    def mean_log_ratio(self, block: TokenBlock, *parts: ColumnPart) -> float:
        """Return log pi(response) - log pi_ref(response), in nats, averaged over the rows whose log pi is in `parts`."""
        cu_sampled = np.concatenate([[0], np.cumsum(block.sampled_lengths)])
        reference = block.columns["ref_logprobs"].astype(np.float64)
        rows = {row: values for part in parts for row, values in part.by_row(block.sampled_lengths).items()}
        sums = [
            values.sum(dtype=np.float64) - reference[cu_sampled[row] : cu_sampled[row + 1]].sum()
            for row, values in rows.items()
        ]
        return float(np.mean(sums))

    # What the rank records.

    def begin_step(self, step: int, timeline: bool, profile: bool, profile_memory: bool) -> None:
        """Begin training step `step`; the first step is 1. `timeline`: whether to record spans; `profile`: whether to profile it.

        `profile_memory`: whether the profile also records the allocation of memory. Errors of the profiler are only logged.
        """
        if timeline:
            coords = asdict(self.dims.coords(self.rank))
            name = f"{self.role} rank {self.rank}"
            spans.start(self.run_dir / spans.FOLDER, self.role, self.rank, name, coords=coords)
        spans.begin_step(step)
        try:
            self._profiler.begin_step(step, profile, profile_memory)
        except Exception:  # a profiler must not end a run
            logger.exception("the profile of step %d failed", step)

    # Memory.

    def offload(self, keep_weights: bool = False) -> int:
        """Release the device memory of the model, but not of its weights if `keep_weights`. Returns the bytes still occupied.

        Until `load_to_device()`, methods that need the released memory raise RuntimeError. An asynchronous checkpoint continues.
        """
        with track_activity("offloading the model"), span("offload"):
            return self.model.offload(keep_weights)

    def load_to_device(self) -> None:
        """Load the whole model to the device again. Only the gradients are lost."""
        with track_activity("loading the model to its device"), span("load"):
            self.model.load_to_device()

    # Training.

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def reset_optimizer(self, **settings: Any) -> None:
        """Replace the optimizer with a new optimizer for the current weights. `settings` are fields of OptimConfig."""
        self.model.reset_optimizer(OptimConfig(**settings))

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def copy_weights_to_reference(self) -> None:
        """Copy the current weights to the host. The copy becomes the reference policy."""
        self.model.copy_weights_to_reference()

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def compute_columns(
        self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], temperature: float, names: Sequence[str]
    ) -> RankColumns:
        """Compute columns of this replica's rows in one forward pass. `names`: names of the columns, see MegatronActor.head."""
        with track_activity("computing log-probabilities"), span("log-probabilities"):
            batch, start = self._own_batch(replica_batches), time.perf_counter()
            return self._put_columns(self.model.compute_columns(block, batch, temperature, names), batch, start)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def compute_reference_logprobs(
        self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], temperature: float
    ) -> RankColumns:
        """Compute the column ref_logprobs of this replica's rows: log-probabilities under the weights of the reference."""
        with track_activity("computing reference log-probabilities"), span("reference log-probabilities"):
            batch, start = self._own_batch(replica_batches), time.perf_counter()
            columns = self.model.compute_reference_logprobs(block, batch, temperature)
            return self._put_columns(dict(ref_logprobs=columns), batch, start)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def compute_teacher_outputs(
        self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], temperature: float, top_k: int | None
    ) -> RankColumns:
        """Compute the outputs of this teacher that distillation reads, for this replica's rows."""
        with track_activity("computing teacher outputs"), span("teacher outputs"):
            batch, start = self._own_batch(replica_batches), time.perf_counter()
            outputs = self.model.compute_teacher_outputs(block, batch, temperature, top_k)
            parts = []
            if self.model.returns_columns:
                pairs = zip(batch.micro_batches, outputs, strict=True)
                parts = [TeacherPart(rows, ray.put(each)) for rows, each in pairs if len(rows)]
            return RankColumns({}, time.perf_counter() - start, parts)

    def load_teacher_weights(self, folders: Mapping[str, str]) -> None:
        """Load this rank's shard of each teacher's output layer to the host. `folders`: teacher -> Hugging Face folder."""
        with track_activity("loading the output layers of teachers"):
            self.model.load_teacher_weights(folders)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def compute_values(self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch]) -> RankColumns:
        """Compute the column `values` of this replica's rows."""
        with track_activity("computing values"), span("values"):
            batch, start = self._own_batch(replica_batches), time.perf_counter()
            return self._put_columns(dict(values=self.model.compute_values(block, batch)), batch, start)

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def update(
        self,
        block: TokenBlock,
        replica_batches: Sequence[Sequence[ReplicaBatch]],
        columns: Mapping[str, Column] | None = None,
        teachers: Mapping[str, Sequence[TeacherPart]] | None = None,
        **options: Any,
    ) -> list[UpdateReport]:
        """Run one optimizer step for each mini-batch, on this replica's rows.

        `replica_batches[r][m]`: the rows of replica r in mini-batch m. `teachers`: teacher -> locations of its outputs. `options`
        are further arguments of the model's own `update`.
        """
        batches = self._own_batch(replica_batches)
        block = block.with_columns(**columns or {})
        if teachers:
            with track_activity("fetching teacher outputs"), span("fetch teacher outputs"):
                block = self._with_teachers(block, teachers, batches)
        with track_activity("updating the weights"), span("update"):
            return self.model.update(block, batches, **options)

    def _with_teachers(
        self, block: TokenBlock, teachers: Mapping[str, Sequence[TeacherPart]], batches: Sequence[ReplicaBatch]
    ) -> TokenBlock:
        """Return the block with the teachers' outputs for the rows of `batches`.

        A rank without the output layer does not need these outputs, and returns the block unchanged.
        """
        if not self.model.has_output_layer:
            return block
        rows = np.concatenate([micro for batch in batches for micro in batch.micro_batches] or [np.empty(0, np.int64)])
        lengths, by_teacher = block.sampled_lengths, {}
        for teacher, parts in teachers.items():
            needed = [part for part in parts if np.isin(part.rows, rows).any()]
            by_row: dict[int, TeacherOutputs] = {}
            for part, outputs in zip(needed, ray.get([part.outputs for part in needed]), strict=True):
                by_row |= teacher_outputs_by_row(part.rows, outputs, lengths)
            by_teacher[teacher] = by_row
        return replace(block, teachers=by_teacher)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def evaluate(self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], **options: Any) -> UpdateReport:
        """Compute the loss of this replica's rows without gradients. `options`: arguments of the model's `evaluate`."""
        with track_activity("evaluating held-out rows"), span("evaluation"):
            return self.model.evaluate(block, self._own_batch(replica_batches), **options)

    # Parity checks and step dumps.

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def trace_step(
        self,
        block: TokenBlock,
        replica_batches: Sequence[ReplicaBatch],
        loss: Loss | ValueLossFunction,  # actor: Loss; critic: ValueLossFunction
        lr: float,
        temperature: float,
        folder: str,
    ) -> Any:
        """Trace one optimizer step for a parity check, and store its tensors in `folder`."""
        from mrl.workers.parity_trace import trace_step

        return trace_step(self.model, block, self._own_batch(replica_batches), loss, lr, temperature).store(folder)

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def trace_layers(
        self,
        block: TokenBlock,
        replica_batches: Sequence[ReplicaBatch],
        loss: Loss | ValueLossFunction,
        temperature: float,
        folder: str,
    ) -> Any:
        """Trace a step up to its gradients, layer by layer, and store its tensors in `folder`."""
        from mrl.workers.parity_trace import trace_layers

        return trace_layers(self.model, block, self._own_batch(replica_batches), loss, temperature).store(folder)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def forward_outputs(
        self, block: TokenBlock, replica_batches: Sequence[ReplicaBatch], temperature: float
    ) -> dict[int, Any]:
        """Return row -> log-probabilities (actor) or values (critic); {} on all ranks of a replica except one."""
        from mrl.workers.parity_trace import forward_outputs

        return forward_outputs(self.model, block, self._own_batch(replica_batches), temperature)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def trace_forward(
        self, block: TokenBlock, batches: list[ReplicaBatch], temperature: float, routing: Mapping[str, Any], path: str
    ) -> tuple[Any, dict[int, Any]]:
        """Store the tensors of a forward pass in the file `path`. Returns (reader of the file, log-probabilities)."""
        from mrl.workers.forward_trace import store_arrays, trace_forward  # explains trace points and `routing`

        trace, outputs = trace_forward(self.model, block, self._own_batch(batches), temperature, routing)
        return store_arrays(trace, path), outputs

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def store_weights(self, prefixes: Sequence[str], suffix: str, path: str) -> Any:
        """Store in the file `path` the weights whose Hugging Face names begin with a prefix or end with the suffix."""
        from mrl.workers.forward_trace import store_arrays, trainer_weights

        return store_arrays(trainer_weights(self.model, prefixes, suffix), path)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def dump_step(self, block: TokenBlock, columns: Mapping[str, Column] | None, folder: str, weights: bool) -> None:
        """Write this rank's part of a step dump: the states of its random number generators (RNG).

        Rank 0 also writes the batch. If `weights` is true, all ranks together export the current weights.
        """
        from parallel import checkpoint  # imports Megatron

        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / checkpoint.rng_file_name(self.rank)).write_bytes(checkpoint.rng_snapshot(self.dims))
            if self.rank == 0:
                block.with_columns(**columns or {}).save(path / DUMPED_BATCH)
        finally:  # also after an error on this rank, because the other ranks would wait for this rank in the export
            if weights:
                self.model.export_hf(path / DUMPED_WEIGHTS, {})

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def load_step_dump(self, folder: str, weights_folder: str | None) -> bool:
        """Load a step dump: its RNG states, and the weights of the checkpoint in `weights_folder` if this folder is given.

        Returns whether the RNG states were restored. They are not restored if the dump was written under another layout.
        """
        from parallel import checkpoint  # imports Megatron

        if weights_folder:
            self.model.load_weights(weights_folder)
        states = checkpoint.read_rng(folder, self.dims)
        if states is not None:
            checkpoint.restore_rng(states)
        return states is not None

    # Weight sync and export.

    def connect_engines(self, urls: list[str], settings: WeightSyncConfig, folder: str) -> dict[str, str]:
        """Close the last weight sync session, and open a new session with these engines.

        `folder` is the folder into which the disk transport writes weights, and into which the adapter sync writes adapters.
        Returns URL -> reason for each engine that failed. If an engine has failed, no session is open.
        """
        from mrl.weight_sync.engine_control import WeightSyncError  # imported here because the driver does not need it

        if self._sync is not None:
            self._sync.close()
        self._sync = None
        try:
            # A run with rollout.replay has no engines.
            self._sync = self.model.connect_engines(urls, settings, folder) if urls else None
        except WeightSyncError as error:
            if not error.failed:
                raise
            return error.failed
        self._collectives.watch()  # the session has its own process group
        return {}

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED, loaded_by_scheduler=True)
    def push_weights(self, version: int, engines_offloaded: bool = False) -> SyncReport:
        """Push the current weights to the engines as weight version `version`, and report what this rank sent.

        `engines_offloaded`: whether the engines had released their weights. Such engines stay paused after the push, because they
        have no KV cache yet.
        """
        with track_activity(f"pushing version {version} of the weights"), span("weight push", "weight_sync"):
            return self._sync.push(version, engines_offloaded) if self._sync is not None else SyncReport()

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def export_hf(self, folder: str, extra_files: dict[str, str] | None = None) -> None:
        """Write the current weights as a Hugging Face folder. `extra_files`: name of a further file -> text."""
        self.model.export_hf(folder, extra_files or {})

    # Checkpoints.

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def save(self, folder: str) -> None:
        """Write a distributed checkpoint. Its folder gets the name `folder` when it is complete."""
        self.model.save(folder)

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def load(self, folder: str) -> bool:
        """Load a distributed checkpoint. Returns whether RNG states were restored, too (only if this layout wrote them)."""
        return self.model.load(folder)

    @requires_on_device(OffloadLevel.FULLY_LOADED)
    def begin_save(self, folder: str, asynchronous: bool) -> None:
        """Start to write a distributed checkpoint into `folder`. `finish_save` completes it."""
        self.model.begin_save(folder, asynchronous)

    def save_has_ended(self) -> bool:
        """Return whether this rank has written its part of the checkpoint, or has failed to write it."""
        return self.model.save_has_ended()

    def finish_save(self, timeout_s: float) -> None:
        """Wait until the checkpoint that `begin_save` started is complete and on the disk."""
        self.model.finish_save(timeout_s)

    def abandon_save(self) -> None:
        """Stop writing the checkpoint that `begin_save` started. Does nothing if no checkpoint is being written."""
        self.model.abandon_save()

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def save_reference(self, folder: str) -> None:
        """Write the reference policy's weights as a checkpoint without optimizer state."""
        self.model.save_reference(folder)

    @requires_on_device(OffloadLevel.WEIGHTS_LOADED)
    def load_reference(self, folder: str) -> None:
        """Load the reference policy's weights that `save_reference` wrote."""
        self.model.load_reference(folder)

    # The process.

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that this process has used, in user and system mode. Benchmarks report this time."""
        return sum(os.times()[:2])

    def close(self) -> None:
        """Close the weight sync session, abandon an unfinished save, and leave the process groups."""
        import torch.distributed as dist

        if self._sync is not None:
            self._sync.close()
        if self.model is not None:
            self.model.abandon_save()
        self._collectives.close()
        spans.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _own_batch[T](self, replica_batches: Sequence[T]) -> T:
        """Return the batch of this rank's replica."""
        return replica_batches[self.dims.coords(self.rank).dp]

    def _put_columns(self, columns: Mapping[str, list[Any]], batch: ReplicaBatch, start: float) -> RankColumns:
        """Put columns into Ray's object store. `columns`: name -> values of each micro-batch. `start`: when the pass began."""
        parts = {name: self.model.column_part(values, batch) for name, values in columns.items()}
        handles = {name: ray.put(part) for name, part in parts.items() if part}
        return RankColumns(handles, time.perf_counter() - start)
