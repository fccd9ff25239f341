"""What actor and critic have in common: one rank's part of a model, its gradients, its optimizer, and the ways in and out."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.conversion.hf_reader import HFWeights
from models.conversion.hf_writer import write_export
from models.conversion.weight_bridge import Bridge
from models.families import family_of
from models.hf_config import HFConfig
from models.model_builder import Head, build_model
from mrl.config.schema import WeightSyncConfig
from mrl.core.types import RankBatch, SyncReport, TokenBlock, UpdateReport
from mrl.weight_sync.disk_sync import DiskSync
from mrl.weight_sync.engine_layout import EngineLayout, Topology
from mrl.weight_sync.session import LiveSync
from mrl.workers.capsule import NonFiniteGradientError
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.model_spec import ModelSpec
from parallel import checkpoint, groups, schedule
from parallel.checkpoint_writer import Save
from parallel.collectives import all_reduce_sum
from parallel.device import capabilities, device
from parallel.offload import Offload
from parallel.optimizer import build_optimizer, set_learning_rate, wrap
from parallel.packing import pack
from parallel.schedule import LossFunction, Report
from parallel.trainer_config import AdamWConfig, OffloadLevel


class MegatronModel:
    """One rank's part; every rank of the layout holds one. torch.distributed and parallel.groups are initialised."""

    def __init__(self, spec: ModelSpec, head: Head) -> None:
        self.spec = spec
        self.hf = HFConfig.load(spec.model_path, spec.family)
        self.vocab_size = family_of(self.hf).read(self.hf).vocab_size
        options = dict(head=head, share_prompts=spec.share_prompts)
        chunks = build_model(self.hf, spec.dims, getattr(torch, spec.dtype), **options, **spec.overrides)
        chunks = [chunk.to(device()) for chunk in chunks]
        self.bridge = Bridge(self.hf, chunks, spec.dims, head)
        self.bridge.load(HFWeights(spec.model_path))
        if spec.optimizer is None:
            for chunk in chunks:
                chunk.requires_grad_(False)  # no gradient buffers
        self.chunks = wrap(chunks)
        if spec.optimizer is not None:
            self.optimizer = build_optimizer(self.chunks, spec.optimizer)
        self._reference: list[Tensor] | None = None
        self._save: Save | None = None
        self.offload = Offload(self.chunks, lambda: self.optimizer if spec.optimizer is not None else None)
        self._pack = partial(
            pack,
            device=device(),
            cp_rank=groups.cp_group().rank(),
            cp_size=spec.dims.cp,
            multiple=(spec.dims.tp if spec.dims.sequence_parallel else 1) * (16 if spec.overrides.get("fp8") else 1),
            cu_seqlens=capabilities().transformer_engine and not spec.share_prompts,
        )

    def reset_optimizer(self, settings: AdamWConfig) -> None:
        """Start over with fresh optimizer state around the current weights (between supervised and RL stages)."""
        self.optimizer = build_optimizer(self.chunks, settings)

    def sleep(self, keep_weights: bool) -> int:
        """Give back the device's memory, but for the weights where they are to be kept; all ranks call this.

        Returns the bytes that this process still has there.
        """
        return self.offload.move(OffloadLevel.WEIGHTS_LOADED if keep_weights else OffloadLevel.FULLY_OFFLOADED)

    def wake(self) -> None:
        """Have all memory on the device again; what was there is, bit by bit, but for gradients. All ranks call this."""
        self.offload.move(OffloadLevel.FULLY_LOADED)

    def keep_reference(self) -> None:
        """Remember the current weights, on the host, as those of the reference policy."""
        self._reference = [tensor.to("cpu", copy=True) for tensor in self._weights()]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Have the reference policy's weights in place of the current ones, which come back bit by bit."""
        assert self._reference is not None, "keep_reference() comes first"
        self._swap(self._reference)
        try:
            yield
        finally:
            self._swap(self._reference)

    def _weights(self) -> Iterator[Tensor]:
        for chunk in self.chunks:
            yield from (tensor.data for tensor in (*chunk.module.parameters(), *chunk.module.buffers()))

    def _swap(self, kept: Sequence[Tensor]) -> None:
        for tensor, other in zip(self._weights(), kept, strict=True):
            current = tensor.to("cpu", copy=True)
            tensor.copy_(other)
            other.copy_(current)

    def micro_batches(self, block: TokenBlock, share: RankBatch) -> list[MicroBatch]:
        """This rank's part of each of the share's micro-batches."""
        reduce = partial(all_reduce_sum, group=groups.cp_group())
        return [MicroBatch.build(block, rows, share, self._pack, reduce) for rows in share.micro_batches]

    def forward(self, micros: Sequence[MicroBatch], head: schedule.Head) -> list[Tensor]:
        """What `head` makes of each micro-batch [rows of output, R here]; empty except on the last pipeline stage."""
        for chunk in self.chunks:
            chunk.eval()

        def keep(output: Tensor, micro: MicroBatch) -> tuple[Tensor, Report]:
            return output.sum(), {"output": output}

        with torch.no_grad():
            reports = schedule.run(self.chunks, micros, head, keep, forward_only=True)
        return [report["output"] for report in reports]

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        head: schedule.Head,
        loss_of: LossFunction,
        share: RankBatch,
        whole: bool = False,
    ) -> list[Report]:
        """Gradients of the summed losses, from zero; `whole`: on every replica all of them, for a look at them."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return schedule.run(
            self.chunks, micros, head, loss_of, aux_scale=1.0 / share.step_tokens, whole_gradients=whole
        )

    def step(self, lr: float, number: int = 0) -> float:
        """One optimizer step on the accumulated gradients; returns their norm, before clipping.

        Raises NonFiniteGradientError, which tells the mini-batch's `number`, on every rank: the weights are then as they were.
        """
        set_learning_rate(self.optimizer, lr)
        # Without a loss scale Megatron 0.19 looks at nothing before it steps: a NaN would be in every weight.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteGradientError(number, norm)
        stepped, norm, _ = self.optimizer.step()
        assert stepped, "only a loss scale, which is not used, makes Megatron leave out a step"
        return float(norm)

    def score(self, block: TokenBlock, share: RankBatch, head: schedule.Head) -> list[Tensor]:
        """The first row [R] of what `head` makes of each micro-batch, from the context-parallel ranks' parts [R here].

        Empty except on the last pipeline stage.
        """
        micros = self.micro_batches(block, share)
        outputs, whole = self.forward(micros, head), []
        for output, micro in zip(outputs, micros[: len(outputs)], strict=True):
            column = output.new_zeros(micro.num_sampled)
            column[micro.kept] = output[0]
            if self.spec.dims.cp > 1:
                torch.distributed.all_reduce(column, group=groups.cp_group())
            whole.append(column)
        return whole

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of the current weights; all ranks of which `takes_part` is true iterate along."""
        return self.bridge.export()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole gradient) after `accumulate(whole=True)`; iterate along as with `export`."""
        return self.bridge.export(_gradient, torch.float32)

    @property
    def takes_part(self) -> bool:
        """Whether this rank must iterate `export` and `gradients` along with rank 0."""
        return self.bridge.takes_part(torch.distributed.get_rank())

    def connect(self, urls: list[str], settings: WeightSyncConfig, folder: str) -> "LiveSync | FolderSync":
        """This rank's end of the weight sync with these engines; all ranks call this."""
        layout_of = partial(EngineLayout.of, self.bridge.family, self.bridge.arch)
        if settings.transport == "disk":
            return FolderSync(self, urls, Path(folder), layout_of, settings.timeout_s)
        return LiveSync(urls, self.bridge, layout_of, settings)

    def hand_over[T](self, take: Callable[[Iterable[tuple[str, Tensor]]], T]) -> T | None:
        """Give all whole tensors to `take` on rank 0; the others take part in the gathers. All ranks call this."""
        tensors = self.export() if self.takes_part else iter(())
        try:
            return take(tensors) if torch.distributed.get_rank() == 0 else None
        finally:
            for (
                _
            ) in tensors:  # on the others all; on rank 0 what is left after a failure, as the others are in its gathers
                pass

    def export_hf(self, folder: str | Path, notes: dict[str, str]) -> None:
        """Write a Hugging Face folder: current weights, the source's tokenizer, and `notes` (file name -> text)."""
        self.hand_over(lambda tensors: self.write_hf(tensors, folder, notes))

    def write_hf(self, tensors: Iterable[tuple[str, Tensor]], folder: str | Path, notes: dict[str, str]) -> None:
        """Write these whole tensors as a Hugging Face folder like the one this model came from."""
        write_export(tensors, self.spec.model_path, folder, notes, self.spec.family)

    def save(self, folder: str | Path) -> None:
        """Write a Megatron distributed checkpoint: weights, optimizer state and random number generators.

        Any layout reads it. `folder` appears under its name only when it is complete.
        """
        checkpoint.save(folder, self.chunks, self.optimizer, self.spec.dims)

    def load(self, folder: str | Path) -> bool:
        """Restore what `save` wrote, under any layout; whether that included the generators: under the same layout only.

        Raises ValueError, before a weight is touched, when `folder` is no whole checkpoint of such a model.
        """
        return checkpoint.load(folder, self.chunks, self.optimizer, self.spec.dims)

    def begin_save(self, folder: str | Path, asynchronous: bool) -> None:
        """Start `save` into `folder`, in place; training may go on. At most one save is on its way.

        Raises CheckpointSaveError on all ranks.
        """
        assert self._save is None, "finish_save() comes first"
        self._save = checkpoint.begin_save(folder, self.chunks, self.optimizer, self.spec.dims, asynchronous)

    def save_finished(self) -> bool:
        """Whether this rank's part is written, or failed; asks no other rank."""
        return self._save is None or self._save.written()

    def finish_save(self, timeout_s: float) -> None:
        """Wait for every rank's part of the save on its way: its folder is then complete, and on the disk.

        Raises CheckpointSaveError on all ranks, naming folder and cause; the folder is then no checkpoint.
        """
        assert self._save is not None, "begin_save() comes first"
        save, self._save = self._save, None
        save.finish(timeout_s)

    def abandon_save(self) -> None:
        """End the save on its way, if any; its folder stays incomplete."""
        if self._save is not None:
            self._save.abandon()
        self._save = None

    def save_reference(self, folder: str | Path) -> None:
        """Write the reference policy's weights; `folder` appears when it is complete. All ranks call this."""
        with self.reference():
            checkpoint.save_weights(folder, self.chunks)

    def load_reference(self, folder: str | Path) -> None:
        """Take the reference policy's weights from `folder`, written by any layout. All ranks call this."""
        self.keep_reference()
        with self.reference():
            checkpoint.load_weights(folder, self.chunks)

    def load_weights(self, folder: str | Path) -> None:
        """Take the weights alone from what `save` wrote, under any layout; the optimizer starts from them."""
        checkpoint.load_weights(folder, self.chunks)
        self.optimizer.reload_model_params()


class FolderSync:
    """Weight sync through Hugging Face folders: all ranks give their parts to rank 0, which writes them."""

    def __init__(
        self,
        model: MegatronModel,
        urls: list[str],
        folder: Path,
        layout_of: Callable[[Topology], EngineLayout],
        timeout_s: float,
    ) -> None:
        self._model = model
        self._disk: DiskSync | None = None
        if torch.distributed.get_rank() == 0:
            write = partial(model.write_hf, notes={})
            self._disk = DiskSync(urls, folder, layout_of, write, timeout_s)

    def push(self, version: int, released: bool = False) -> SyncReport:
        """Write the current weights and have the engines load them as `version`; `released` as for LiveSync."""
        return self._model.hand_over(partial(self._push, version, released)) or SyncReport()

    def _push(self, version: int, released: bool, tensors: Iterable[tuple[str, Tensor]]) -> SyncReport:
        assert self._disk is not None, "rank 0 talks with the engines"
        return self._disk.push(tensors, version, released)

    def close(self) -> None:
        """Let the engines go."""
        if self._disk is not None:
            self._disk.close()


def _gradient(param: Tensor) -> Tensor:
    return param.main_grad  # type: ignore[missing-attribute]  # Megatron's buffers add it


def summarise(reports: list[Report], maxima: dict[str, float]) -> UpdateReport:
    """Add up the micro-batches' numbers; sums and maxima are told apart by their prefix."""
    sums: dict[str, float] = {}
    for report in reports:
        for key, value in report.items():
            kind, _, name = key.partition(":")
            if kind == "sum":
                sums[name] = sums.get(name, 0.0) + value.item()
            else:
                largest, new = maxima.get(name, float("-inf")), value.item()
                maxima[name] = new if new > largest or math.isnan(new) else largest
    return UpdateReport(sums, maxima)


def largest(values: Tensor) -> Tensor:
    """The maximum, or minus infinity where there is nothing."""
    return values.max() if values.numel() else values.new_full((), float("-inf"))
