"""The policy being trained: one rank's Megatron model, optimizer, and its ways out (engines, checkpoint, export)."""

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from models.build import build_model
from models.conversion.bridge import Bridge
from models.conversion.hf_export import write_export
from models.conversion.hf_io import HFWeights
from models.families import family_of
from models.spec import HFConfig
from mrl.algorithms.losses import Loss, LossInputs
from mrl.types import Share, TokenBlock, UpdateReport
from mrl.workers.batch import MicroBatch
from mrl.workers.spec import ActorSpec
from parallel import checkpoint, groups, schedule
from parallel.device import device
from parallel.logprobs import vocab_parallel_logprobs
from parallel.optimizer import build_optimizer, set_lr, wrap
from parallel.optimizer_settings import AdamW

logger = logging.getLogger(__name__)


class Actor:
    """One rank's part; every rank of the layout holds one. torch.distributed and parallel.groups are initialised."""

    def __init__(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.hf = HFConfig.load(spec.model_path)
        self.vocab_size = family_of(self.hf).read(self.hf).vocab_size
        model = build_model(self.hf, spec.dims, getattr(torch, spec.dtype), **spec.overrides).to(device())
        self.bridge = Bridge(self.hf, model)
        self.bridge.load(HFWeights(spec.model_path))
        self.model = wrap(model)
        self.optimizer = build_optimizer(self.model, spec.optimizer)

    def reset_optimizer(self, settings: AdamW) -> None:
        """Start over with fresh optimizer state around the current weights (between supervised and RL stages)."""
        self.optimizer = build_optimizer(self.model, settings)

    def update(self, block: TokenBlock, share: Share, loss: Loss, lr: float, temperature: float = 1.0) -> UpdateReport:
        """One optimizer step on this replica's share of the batch; gradients are summed over replicas.

        Log-probabilities are those of logits / temperature. Raises FloatingPointError when the gradient is not finite.
        """
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        set_lr(self.optimizer, lr)
        micros = [MicroBatch.build(block, rows, share, device()) for rows in share.micro_batches]
        start = time.perf_counter()
        reports = schedule.run(self.model, micros, lambda logits, micro: self._loss(logits, micro, loss, temperature))
        stepped, grad_norm, _ = self.optimizer.step()
        seconds = time.perf_counter() - start
        if not stepped or not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient is not finite (norm {grad_norm}); the run ends before engines see it."
            )
        return _summarise(reports, {"optim/grad_norm": float(grad_norm), "seconds": seconds})

    @torch.no_grad()
    def compute_logprobs(self, block: TokenBlock, share: Share, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities [R] of the response tokens of each micro-batch under the current weights."""
        self.model.eval()
        micros = [MicroBatch.build(block, rows, share, device()) for rows in share.micro_batches]

        def keep(logits: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            logprobs = self._logprobs(logits, micro, temperature)
            return logprobs.sum(), {"logprobs": logprobs}

        return [r["logprobs"] for r in schedule.run(self.model, micros, keep, forward_only=True)]

    def _logprobs(self, logits: Tensor, micro: MicroBatch, temperature: float) -> Tensor:
        chosen = logits.index_select(0, micro.predict)  # [R, V/tp]
        return vocab_parallel_logprobs(chosen, micro.targets, groups.tp_group(), self.vocab_size, temperature)

    def _loss(
        self, logits: Tensor, micro: MicroBatch, loss: Loss, temperature: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = self._logprobs(logits, micro, temperature)
        now = logprobs.detach()
        # One update per rollout: the weights before it are the weights now.
        per_token, extra = loss(LossInputs(logprobs, now, micro.advantages))
        weights = micro.weights.to(per_token.dtype)
        total = (per_token * weights).sum()
        gap = (now - micro.rollout_logprobs).abs()  # NaN where nothing was sampled
        report = {
            "sum:loss": total.detach(),
            "max:gap": gap.max(),
            "sum:gap": gap.sum(),
            "sum:tokens": torch.tensor(len(gap)),
        }
        return total, report | {f"sum:{name}": (value * weights).sum() for name, value in extra.items()}

    def export(self) -> Iterable[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of the current weights; all ranks of the replica iterate along."""
        return self.bridge.export()

    def export_hf(self, folder: str | Path, notes: dict[str, str]) -> None:
        """Write a Hugging Face folder: current weights, the source's tokenizer, and `notes` (file name -> text)."""
        if groups.dp_group().rank() > 0:
            return
        if groups.tp_group().rank() == 0:
            write_export(self.export(), self.spec.model_path, folder, notes)
        else:
            for _ in self.export():  # take part in the gathers
                pass

    def save(self, folder: str | Path) -> None:
        """Write a Megatron distributed checkpoint: weights and optimizer state, readable by any layout."""
        checkpoint.save(folder, self.model, self.optimizer)

    def load(self, folder: str | Path) -> None:
        """Restore what `save` wrote, under any layout."""
        checkpoint.load(folder, self.model, self.optimizer)


def _summarise(reports: list[dict[str, Tensor]], maxima: dict[str, float]) -> UpdateReport:
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
