"""One trainer rank's part of a Megatron model: forward and backward passes, optimizer, offload, weight export, checkpoints.

MegatronActor, MegatronCritic and MegatronRewardModel derive from MegatronModel, and add the head and the loss.
In array dimensions, R is the number of sampled tokens (see mrl.core.types). MicroBatch (mrl.workers.micro_batch) explains
`local R`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP
from torch import Tensor

from models.architecture import ModelSpec
from models.conversion.hf_reader import HFWeights
from models.conversion.hf_writer import write_export
from models.conversion.peft_folder import ADAPTER_FOLDER, on_host, write_peft
from models.conversion.weight_bridge import WeightBridge
from models.families import family_of
from models.hf_config import HFConfig
from models.image_model import tower_parameters
from models.lora import add_adapters
from models.megatron_overrides import FP8_MULTIPLE
from models.model_builder import HeadKind, build_model, uses_packed_attention
from models.mtp_model import embedding_for_mtp
from mrl.algorithms.objective import Objective
from mrl.config.process_schema import LoraSync, Transport, WeightSyncConfig
from mrl.core.code_locations import describe_plug_in
from mrl.core.run_errors import NonFiniteGradientError
from mrl.core.types import ColumnPart, ReplicaBatch, TokenBlock, UpdateReport
from mrl.weight_sync.adapter_sync import AdapterSync
from mrl.weight_sync.disk_sync import DiskSync, NamedTensors
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.weight_sync.session import LiveSync
from mrl.workers.micro_batch import MicroBatch
from parallel import checkpoint, groups
from parallel.attention import supports_varlen
from parallel.checkpoint_writer import CheckpointSave
from parallel.collectives import all_reduce_sum, object_group
from parallel.device import capabilities, device
from parallel.offload import ModelOffloader, WeightsOnHost
from parallel.optimizer import build_optimizer, set_learning_rate, wrap_ddp
from parallel.packing import pack
from parallel.pipeline_schedule import LossFunction, OutputHead, run_forward_backward
from parallel.spans import span
from parallel.trainer_config import OffloadLevel, OptimConfig


@dataclass(frozen=True)
class MicroBatchStatistics:
    """Scalars that a loss reports about one micro-batch, by name."""

    sums: dict[str, Tensor]  # summed over micro-batches, then by the driver over data- and context-parallel ranks
    maxima: dict[str, Tensor] = field(default_factory=dict)  # maximum over micro-batches, then over ranks by the driver


NONFINITE_LOSS_TOKENS = "nonfinite"
"""Name of the sum that counts the tokens whose loss is not finite although the model's output is finite."""


def _blame_loss(statistics: Sequence[MicroBatchStatistics], loss_name: str) -> str:
    """If the loss is the reason why a gradient is not finite, return a sentence for the error message, otherwise "".

    All ranks call this.
    """
    own = sum(micro.sums[NONFINITE_LOSS_TOKENS].item() for micro in statistics)
    counts: list[float] = [0.0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, own, group=object_group())
    if not any(counts):
        return ""
    return (
        f"The loss ({loss_name}) of at least {max(counts):.0f} sampled tokens is not finite, although the model's output is "
        "finite."
    )


def reduce_statistics(statistics: Sequence[MicroBatchStatistics], maxima: dict[str, float]) -> UpdateReport:
    """Combine the statistics of all micro-batches of an optimizer step. `maxima` are further statistics of this step."""
    sums: dict[str, float] = {}
    for micro in statistics:
        for name, value in micro.sums.items():
            sums[name] = sums.get(name, 0.0) + value.item()
        for name, value in micro.maxima.items():
            largest, new = maxima.get(name, float("-inf")), value.item()
            maxima[name] = new if new > largest or math.isnan(new) else largest
    return UpdateReport(sums, maxima)


class MegatronModel:
    """Base class of actor, critic and reward model. Initialize torch.distributed and parallel.groups first."""

    grad_norm_key: ClassVar[str] = "optim/grad_norm"  # name of the gradient norm in the reports of optimizer steps
    loss_key: ClassVar[str] = "sft.objective"  # config key of a loss that is not an Objective, for error messages

    def __init__(self, spec: ModelSpec, head: HeadKind) -> None:
        self.spec = spec
        self.hf = HFConfig.load(spec.model_path, spec.family, train_mtp=spec.mtp_loss_coef is not None)
        self.arch = family_of(self.hf).read(self.hf)
        self.vocab_size = self.arch.vocab_size
        options = dict(head=head, share_prompts=spec.share_prompts)
        chunks = build_model(self.hf, spec.dims, getattr(torch, spec.dtype), **options, **spec.overrides)
        chunks = [chunk.to(device()) for chunk in chunks]
        self.bridge = WeightBridge(self.hf, chunks, spec.dims, head, spec.train_vision)
        self.bridge.load(HFWeights(spec.model_path))
        # bridge between the adapters and PEFT's tensors; None: the model has no adapters
        self.adapters = add_adapters(chunks, self.bridge, spec.lora, spec.seed) if spec.lora else None
        if spec.optimizer is None:
            for chunk in chunks:
                chunk.requires_grad_(False)  # then Megatron allocates no gradient buffers
        elif not spec.train_vision:
            for parameter in tower_parameters(chunks):
                parameter.requires_grad_(False)
        overlap = capabilities().cuda if spec.overlap_grad_reduce is None else spec.overlap_grad_reduce
        self.chunks = wrap_ddp(chunks, overlap, spec.ddp)  # one part of the model for each virtual pipeline stage
        if spec.optimizer is not None:
            self.optimizer = build_optimizer(self.chunks, spec.optimizer)
        self._reference: WeightsOnHost | None = None  # the reference policy's weights
        # the model's own weights, while the reference policy is loaded
        self._weights_backup = WeightsOnHost(self.chunks)
        self._save: CheckpointSave | None = None  # the checkpoint that is being written
        self.offloader = ModelOffloader(self.chunks, lambda: self.optimizer if spec.optimizer is not None else None)
        self._pack = partial(
            pack,
            device=device(),
            cp_rank=groups.cp_group().rank(),
            cp_size=spec.dims.cp,
            multiple=(spec.dims.tp if spec.dims.sequence_parallel else 1)
            * (FP8_MULTIPLE if spec.overrides.get("fp8") else 1),
            cu_seqlens=not uses_packed_attention(self.arch, spec.share_prompts),
            chunks_in_token_order=supports_varlen(device(), getattr(torch, spec.dtype)),
        )

    # Forward and backward passes.

    def micro_batches(self, block: TokenBlock, batch: ReplicaBatch, trains_mtp: bool = False) -> list[MicroBatch]:
        """Build this rank's part of each micro-batch in `batch`. With `trains_mtp`, MTP layers run, if the model has any."""
        options = dict(
            sum_over_ranks=partial(all_reduce_sum, group=groups.cp_group()),
            vision=self.arch.vision,
            mtp_layers=self.arch.mtp_layers if trains_mtp else 0,
        )
        return [MicroBatch.build(block, rows, batch, self._pack, **options) for rows in batch.micro_batches]

    def compute_outputs(self, block: TokenBlock, batch: ReplicaBatch, head: OutputHead) -> list[Tensor]:
        """Run a forward pass without gradients. Returns the head's output for each micro-batch: [number of outputs, R].

        Each context-parallel rank computes a part [number of outputs, local R], and returns the whole output. Only the last
        pipeline stage returns outputs; the other stages return an empty list.
        """
        for chunk in self.chunks:
            chunk.eval()

        def return_output(output: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            return output.sum(), output

        micros, whole_outputs = self.micro_batches(block, batch), []
        with torch.no_grad():
            outputs = run_forward_backward(self.chunks, micros, head, return_output, forward_only=True)
        for output, micro in zip(outputs, micros[: len(outputs)], strict=True):
            whole = output.new_zeros(len(output), micro.num_sampled)
            whole[:, micro.local_sampled] = output
            if self.spec.dims.cp > 1:
                torch.distributed.all_reduce(whole, group=groups.cp_group())
            whole_outputs.append(whole)
        return whole_outputs

    @property
    def has_output_layer(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return groups.is_last_stage()

    @property
    def returns_columns(self) -> bool:
        """Whether this rank returns the results of its replica. The other ranks of the replica return nothing."""
        return groups.is_last_stage() and groups.tp_group().rank() == 0 and groups.cp_group().rank() == 0

    def column_part(self, columns: Sequence[Tensor], batch: ReplicaBatch) -> ColumnPart | None:
        """Join the columns [R] of all micro-batches. Only one rank of a replica returns the result; the other ranks return None.

        That rank is on the last pipeline stage, and has tensor-parallel rank 0 and context-parallel rank 0.
        """
        if not self.returns_columns:
            return None
        rows = np.concatenate([np.empty(0, np.int64), *batch.micro_batches])
        values = [column.float().cpu().numpy() for column in columns]
        return ColumnPart(rows, np.concatenate([np.empty(0, np.float32), *values]))

    def accumulate_gradients(
        self,
        micros: Sequence[MicroBatch],
        head: OutputHead,
        loss_function: LossFunction[MicroBatchStatistics],
        batch: ReplicaBatch,
        all_reduce: bool = False,
    ) -> list[MicroBatchStatistics]:
        """Clear the gradients. Then run all micro-batches, and accumulate the gradients of their losses.

        If `all_reduce` is true, every replica has the complete gradients afterwards, so that they can be exported.
        """
        with span("forward and backward", micro_batches=len(micros)):
            for chunk in self.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            with embedding_for_mtp(self.chunks):
                return run_forward_backward(
                    self.chunks,
                    micros,
                    head,
                    loss_function,
                    aux_scale=1.0 / batch.step_tokens,
                    all_reduce_gradients=all_reduce,
                )

    def head_and_loss(self, loss: Any, temperature: float) -> tuple[OutputHead, LossFunction[MicroBatchStatistics]]:
        """Return the head of this model, and the function that computes `loss` of a micro-batch from the head's output."""
        raise NotImplementedError

    def update(
        self,
        block: TokenBlock,
        batches: Sequence[ReplicaBatch],
        loss: Any,
        lrs: Sequence[float],
        temperature: float = 1.0,
    ) -> list[UpdateReport]:
        """Run one optimizer step for each mini-batch, on this replica's rows. Gradients are summed over replicas.

        Log-probabilities are computed from logits / temperature. Raises NonFiniteGradientError if a gradient is not finite.
        """
        head, loss_function = self.head_and_loss(loss, temperature)
        source = loss.source if isinstance(loss, Objective) else f"{self.loss_key}: {describe_plug_in(loss)}"
        reports = []
        for index, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
            micros = self.micro_batches(block, batch, trains_mtp=True)
            start = time.perf_counter()
            statistics = self.accumulate_gradients(micros, head, loss_function, batch)
            grad_norm = self.optimizer_step(lr, index, statistics, source)
            seconds = time.perf_counter() - start
            reports.append(reduce_statistics(statistics, {self.grad_norm_key: grad_norm, "seconds": seconds}))
        return reports

    def evaluate(self, block: TokenBlock, batch: ReplicaBatch, loss: Any, temperature: float = 1.0) -> UpdateReport:
        """Compute the loss of this replica's rows without gradients.

        Returns the statistics of `update` without gradient norm, time and the statistics of MTP layers.
        """
        for chunk in self.chunks:
            chunk.eval()
        head, loss_function = self.head_and_loss(loss, temperature)
        with torch.no_grad():
            statistics = run_forward_backward(
                self.chunks, self.micro_batches(block, batch), head, loss_function, forward_only=True
            )
        return reduce_statistics(statistics, {})

    def optimizer_step(
        self, lr: float, mini_batch: int = 0, statistics: Sequence[MicroBatchStatistics] = (), loss_name: str = ""
    ) -> float:
        """Apply the accumulated gradients, and return their norm before clipping.

        If the norm is not finite, the weights stay unchanged, and all ranks raise NonFiniteGradientError with the index
        `mini_batch`. If `statistics` show that the loss is the cause, the error also contains `loss_name`.
        """
        with span("optimizer step"):
            set_learning_rate(self.optimizer, lr)
            # Without a loss scale, Megatron 0.19 does not check the gradients before the step: a NaN would reach every weight.
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if not math.isfinite(norm):
                raise NonFiniteGradientError(mini_batch, norm, _blame_loss(statistics, loss_name))
            # Megatron clips the gradients of MTP layers separately; `norm` does not include them
            if self.arch.mtp_layers:
                of_mtp = float(self.optimizer._compute_grad_norms_by_group()[MTP_GRAD_NORM_GROUP])
                if not math.isfinite(of_mtp):
                    raise NonFiniteGradientError(mini_batch, of_mtp, "It is the gradient of the MTP layers.")
            stepped, norm, _ = self.optimizer.step()
        assert stepped, "Megatron skips a step only because of a loss scale, and none is used"
        return float(norm)

    def reset_optimizer(self, settings: OptimConfig) -> None:
        """Replace the optimizer with a new one for the current weights. Used before and after the supervised warm start."""
        self.optimizer = build_optimizer(self.chunks, settings)

    # Memory.

    def offload(self, keep_weights: bool) -> int:
        """Release the device memory of the model. If `keep_weights` is true, the weights stay. All ranks call this.

        If the weights were already offloaded, `keep_weights` loads them. Returns the bytes that this process still occupies on
        the device.
        """
        return self.offloader.move_to(OffloadLevel.WEIGHTS_LOADED if keep_weights else OffloadLevel.FULLY_OFFLOADED)

    def load_to_device(self) -> None:
        """Load the whole model to the device again. Only the gradients are lost. All ranks call this."""
        self.offloader.move_to(OffloadLevel.FULLY_LOADED)

    # Reference policy.

    def copy_weights_to_reference(self) -> None:
        """Copy the current weights to the host. The copy becomes the reference policy."""
        if self._reference is None:
            self._reference = WeightsOnHost(self.chunks)
        self._reference.save()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Context in which the model has the weights of the reference policy. After it, the model has its own weights again.

        The reference overwrites the model's own weights on the device, so these are copied to the host first. They are copied at
        each use, because the weights may have changed since the last use.
        """
        assert self._reference is not None, "copy_weights_to_reference() comes first"
        self._weights_backup.save()
        try:
            self._reference.load()
            yield
        finally:
            self._weights_backup.load()

    def _weights(self) -> Iterator[Tensor]:
        """Yield this rank's parameters and buffers. Only tests use this method."""
        for chunk in self.chunks:
            yield from (tensor.data for tensor in (*chunk.module.parameters(), *chunk.module.buffers()))

    # Export and weight sync.

    @property
    def exported_config(self) -> HFConfig:
        """The config of an exported Hugging Face folder."""
        return self.hf

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights as pairs (name of the Hugging Face tensor, whole tensor).

        All ranks with `participates_in_export` must iterate to the end.
        """
        return self.bridge.export()

    def export_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradients of all trained tensors as pairs (name of the Hugging Face tensor, whole gradient).

        With LoRA, the trained tensors are the adapters, with the names of PEFT. Call `accumulate_gradients(all_reduce=True)`
        first. All ranks with `participates_in_export` must iterate to the end.
        """
        return (self.adapters or self.bridge).export(_gradient, torch.float32)

    @property
    def participates_in_export(self) -> bool:
        """Whether this rank must iterate over `export` and `export_gradients` together with rank 0."""
        return self.bridge.participates_in_export(torch.distributed.get_rank())

    def consume_on_rank_0[T](
        self, consume: Callable[[NamedTensors], T], export: Callable[[], NamedTensors] | None = None
    ) -> T | None:
        """Gather all tensors that `export` yields, and call `consume` with them on rank 0. All ranks call this.

        Rank 0 returns the result of `consume`, and the other ranks return None. The default of `export` is the method `export`.
        """
        tensors = iter((export or self.export)() if self.participates_in_export else ())
        try:
            return consume(tensors) if torch.distributed.get_rank() == 0 else None
        finally:
            # Every rank iterates to the end, because the other ranks wait for it in each gather. This holds for rank 0 even
            # after an error in `consume`.
            for _ in tensors:
                pass

    def export_hf(self, folder: str | Path, extra_files: dict[str, str]) -> None:
        """Write a Hugging Face folder with the current weights and the tokenizer. `extra_files`: file name -> text.

        MTP layers that are not trained are copied from the folder `spec.model_path`. With LoRA, the weights are
        W + (alpha / rank) B A, and the subfolder `adapter` has the adapters in the format of PEFT.
        """
        self.consume_on_rank_0(lambda tensors: write_export(tensors, self.exported_config, folder, extra_files))
        if self.adapters is not None:
            self.export_adapters(Path(folder) / ADAPTER_FOLDER)

    def export_adapters(self, folder: str | Path) -> None:
        """Write the adapters as a PEFT folder, which must not exist. All ranks call this."""
        lora, adapters = self.spec.lora, self.adapters
        assert lora is not None and adapters is not None, "the model has no adapters"
        self.consume_on_rank_0(
            lambda tensors: write_peft(on_host(tensors), lora, self.spec.model_path, folder), adapters.export
        )

    def write_hf(self, tensors: NamedTensors, folder: str | Path) -> None:
        """Write a Hugging Face folder for engines: these tensors, and config and tokenizer files of `spec.model_path`.

        MTP layers that are not trained are left out.
        """
        write_export(tensors, self.exported_config, folder, {}, copy_mtp=False)

    def connect_engines(
        self, urls: list[str], settings: WeightSyncConfig, folder: str
    ) -> LiveSync | DiskSync | AdapterSync:
        """Open a weight sync session with these engines. All ranks call this. Live weight sync does not use `folder`."""
        if settings.lora == LoraSync.adapter:
            lora, adapters = self.spec.lora, self.adapters
            assert lora is not None and adapters is not None, (
                "the plan refuses weight_sync.lora=adapter without lora.rank"
            )
            gather = partial(self.consume_on_rank_0, export=adapters.export)
            return AdapterSync(urls, Path(folder), gather, lora, self.spec.model_path, settings.timeout_s)
        layout_of = partial(EngineLayout.of, self.bridge.family, self.bridge.arch)
        if settings.transport == Transport.disk:
            return DiskSync(urls, Path(folder), self, layout_of, settings.timeout_s)
        return LiveSync(urls, self.bridge, layout_of, settings)

    # Checkpoints.

    def save(self, folder: str | Path) -> None:
        """Write a Megatron distributed checkpoint: weights, optimizer state and states of the random number generators.

        A model of any layout can load the checkpoint. The folder has another name until the checkpoint is complete.
        """
        checkpoint.save(folder, self.chunks, self.optimizer, self.spec.dims)

    def load(self, folder: str | Path) -> bool:
        """Load a checkpoint that was written under any layout. Returns whether it restored the random number generators, too.

        The generators are restored only if a model with this layout wrote the checkpoint. Raises ValueError, before any weight is
        changed, if `folder` is not a complete checkpoint of this model.
        """
        return checkpoint.load(folder, self.chunks, self.optimizer, self.spec.dims)

    def begin_save(self, folder: str | Path, asynchronous: bool) -> None:
        """Start to write a checkpoint into `folder`. Call `finish_save` or `abandon_save` before the next `begin_save`.

        If `asynchronous` is true, training may continue during the write. If a rank fails, all ranks raise CheckpointSaveError.
        """
        assert self._save is None, "finish_save() or abandon_save() comes first"
        self._save = checkpoint.begin_save(folder, self.chunks, self.optimizer, self.spec.dims, asynchronous)

    def save_has_ended(self) -> bool:
        """Return whether this rank has written its part, or has failed to write it. This does not wait for other ranks."""
        return self._save is None or self._save.writer_has_ended()

    def finish_save(self, timeout_s: float) -> None:
        """Wait until every rank has written its part. The folder is then a complete checkpoint on the disk.

        If a rank fails, all ranks raise CheckpointSaveError with folder and cause. The folder is then not a checkpoint.
        """
        assert self._save is not None, "begin_save() comes first"
        save, self._save = self._save, None
        save.finish(timeout_s)

    def abandon_save(self) -> None:
        """Stop writing the current checkpoint, and leave its folder incomplete. Does nothing if none is being written."""
        if self._save is not None:
            self._save.abandon()
        self._save = None

    def save_reference(self, folder: str | Path) -> None:
        """Write the reference policy's weights to `folder`, which appears when it is complete. All ranks call this."""
        with self.reference_weights():
            checkpoint.save_weights(folder, self.chunks)

    def load_reference(self, folder: str | Path) -> None:
        """Load the reference policy's weights, which may have been written under any layout. All ranks call this."""
        self.copy_weights_to_reference()
        with self.reference_weights():
            checkpoint.load_weights(folder, self.chunks)
            self.copy_weights_to_reference()

    def load_weights(self, folder: str | Path) -> None:
        """Load only the weights of a checkpoint, which may have been written under any layout.

        The optimizer's main weights are set to the loaded weights.
        """
        checkpoint.load_weights(folder, self.chunks)
        self.optimizer.reload_model_params()


def _gradient(param: Tensor) -> Tensor:
    return param.main_grad  # type: ignore[missing-attribute]  # Megatron adds this attribute
