"""The driver's side of the actor: which rows are trained, at which learning rate, and what is reported of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.losses import Loss
from mrl.types import Rollouts, SyncReport, TrainBatch
from mrl.workers.group import WorkerGroup
from parallel.optimizer_settings import AdamW


@dataclass(frozen=True)
class ActorPolicy:
    """A WorkerGroup that holds an actor, trained with one loss."""

    group: WorkerGroup
    loss: Loss
    optimizer: AdamW
    aggregation: str
    max_tokens: int  # per micro-batch
    temperature: float  # of sampling
    skip_zero_advantage: bool

    def update(self, rollouts: Rollouts, advantages: NDArray[np.float32], step: int) -> dict[str, float]:
        """One optimizer step on the whole batch; rows that cannot change the gradient are left out."""
        every = np.arange(len(advantages))
        rows = every
        if self.skip_zero_advantage and self.loss.zero_without_advantage:
            rows = np.flatnonzero(advantages)
            rows = rows if len(rows) else every[:1]  # one row always, so that the mismatch is measured
        lr = self.optimizer.lr_at(step)
        batch = TrainBatch(rollouts.block, rollouts.lengths, rollouts.response_lengths, advantages, rows, every)
        report = self.group.update(
            batch,
            loss=self.loss,
            aggregation=self.aggregation,
            lr=lr,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
        )
        tokens = report.sums.pop("tokens")
        return {
            "loss/policy": report.sums.pop("loss"),
            "mismatch/logprob_abs_mean": report.sums.pop("gap") / tokens,
            "mismatch/logprob_abs_max": report.maxima.pop("gap"),
            "batch/trained_tokens": tokens,
            "batch/zero_advantage_fraction": float((advantages == 0).mean()),
            "optim/lr": lr,
            "spent/megatron_s": report.maxima.pop("seconds"),
            **report.sums,
            **report.maxima,
        }

    def push_weights(self, version: int) -> dict[str, float]:
        """Send the weights to the engines as `version`."""
        report = self.group.call("push_weights", version)[0] or SyncReport()
        return {
            "weight_sync/version": float(version),
            "spent/sync_engine_s": report.engine_seconds,
            "weight_sync/bytes": float(report.bytes),
            "weight_sync/tensors": float(report.tensors),
            "weight_sync/buckets": float(report.buckets),
        }

    def save(self, folder: str) -> None:
        """Write `folder/checkpoint` (Megatron, any layout reads it) and `folder/hf` (Hugging Face)."""
        self.group.call("save", f"{folder}/checkpoint")
        self.group.call("export_hf", f"{folder}/hf")
