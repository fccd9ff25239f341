"""What actor and critic have in common: one rank's part of a model, its gradients, its optimizer, and the ways in and out."""

import logging
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from models.build import Head, build_model
from models.conversion.bridge import Bridge
from models.conversion.hf_export import write_export
from models.conversion.hf_io import HFWeights
from models.families import family_of
from models.spec import HFConfig
from mrl.types import Share, TokenBlock, UpdateReport
from mrl.workers.batch import MicroBatch
from mrl.workers.spec import ModelSpec
from parallel import checkpoint, groups, schedule
from parallel.capabilities import capabilities
from parallel.device import device
from parallel.optimizer import build_optimizer, set_lr, wrap
from parallel.optimizer_settings import AdamW
from parallel.packing import pack
from parallel.schedule import LossOf, Report

logger = logging.getLogger(__name__)


class TrainedModel:
    """One rank's part; every rank of the layout holds one. torch.distributed and parallel.groups are initialised."""

    def __init__(self, spec: ModelSpec, head: Head) -> None:
        self.spec = spec
        self.hf = HFConfig.load(spec.model_path)
        self.vocab_size = family_of(self.hf).read(self.hf).vocab_size
        options = dict(head=head, share_prompts=spec.share_prompts)
        chunks = build_model(self.hf, spec.dims, getattr(torch, spec.dtype), **options, **spec.overrides)
        chunks = [chunk.to(device()) for chunk in chunks]
        self.bridge = Bridge(self.hf, chunks, spec.dims, head)
        self.bridge.load(HFWeights(spec.model_path))
        self.chunks = wrap(chunks)
        self.optimizer = build_optimizer(self.chunks, spec.optimizer)
        self._pack = partial(
            pack,
            device=device(),
            cp_rank=groups.cp_group().rank(),
            cp_size=spec.dims.cp,
            multiple=(spec.dims.tp if spec.dims.sequence_parallel else 1) * (16 if spec.overrides.get("fp8") else 1),
            cu_seqlens=capabilities().transformer_engine and not spec.share_prompts,
        )

    def reset_optimizer(self, settings: AdamW) -> None:
        """Start over with fresh optimizer state around the current weights (between supervised and RL stages)."""
        self.optimizer = build_optimizer(self.chunks, settings)

    def micro_batches(self, block: TokenBlock, share: Share) -> list[MicroBatch]:
        """This rank's part of each of the share's micro-batches."""
        return [MicroBatch.build(block, rows, share, self._pack) for rows in share.micro_batches]

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
        self, micros: Sequence[MicroBatch], head: schedule.Head, loss_of: LossOf, share: Share, whole: bool = False
    ) -> list[Report]:
        """Gradients of the summed losses, from zero; `whole`: on every replica all of them, for a look at them."""
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        return schedule.run(
            self.chunks, micros, head, loss_of, aux_scale=1.0 / share.step_tokens, whole_gradients=whole
        )

    def step(self, lr: float) -> float:
        """One optimizer step on the accumulated gradients; returns their norm, before clipping.

        Raises FloatingPointError when it is not finite: the weights are then as they were.
        """
        set_lr(self.optimizer, lr)
        stepped, grad_norm, _ = self.optimizer.step()
        if not stepped or not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient is not finite (norm {grad_norm}); the run ends before engines see it."
            )
        return float(grad_norm)

    def gather_responses(self, outputs: list[Tensor], micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Output columns [R] of each micro-batch, put together from the context-parallel ranks' parts [R here]."""
        whole = []
        for output, micro in zip(outputs, micros, strict=True):
            column = output.new_zeros(micro.num_responses)
            column[micro.kept] = output
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

    def export_hf(self, folder: str | Path, notes: dict[str, str]) -> None:
        """Write a Hugging Face folder: current weights, the source's tokenizer, and `notes` (file name -> text)."""
        if torch.distributed.get_rank() == 0:
            write_export(self.export(), self.spec.model_path, folder, notes)
        elif self.takes_part:
            for _ in self.export():  # take part in the gathers
                pass

    def save(self, folder: str | Path) -> None:
        """Write a Megatron distributed checkpoint: weights and optimizer state, readable by any layout."""
        checkpoint.save(folder, self.chunks, self.optimizer)

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote, under any layout."""
        checkpoint.load(folder, self.chunks, self.optimizer)


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
