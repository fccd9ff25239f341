"""The driver's side of the actor: which rows are trained, at which learning rate, and what is reported of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.losses import Loss
from mrl.types import Rollouts, SyncReport, TrainBatch, UpdateReport
from mrl.workers.group import WorkerGroup
from mrl.workers.shares import Packing, split
from parallel.optimizer_settings import AdamW


@dataclass(frozen=True)
class ActorPolicy:
    """A WorkerGroup that holds an actor, trained with one loss."""

    group: WorkerGroup
    loss: Loss
    optimizer: AdamW
    aggregation: str
    packing: Packing
    temperature: float  # of sampling
    skip_zero_advantage: bool
    mini_batches: int  # optimizer steps per rollout

    def update(self, rollouts: Rollouts, advantages: NDArray[np.float32], step: int) -> dict[str, float]:
        """Optimizer steps on the whole batch; rows that cannot change the gradient are left out."""
        batch = TrainBatch(
            rollouts.block,
            rollouts.prompt_lengths,
            rollouts.response_lengths,
            rollouts.groups,
            advantages,
            rows=self._trained(advantages),
            counted=np.arange(len(advantages)),
        )
        steps = split(batch, self.mini_batches)
        lrs = [self.optimizer.lr_at(step * self.mini_batches + number) for number in range(len(steps))]
        reports = self.group.update(
            steps,
            self.packing,
            aggregation=self.aggregation,
            lrs=lrs,
            loss=self.loss,
            temperature=self.temperature,
        )
        return {**_mean(reports), "batch/zero_advantage_fraction": float((advantages == 0).mean()), "optim/lr": lrs[-1]}

    def _trained(self, advantages: NDArray[np.float32]) -> NDArray[np.int64]:
        every = np.arange(len(advantages))
        if not (self.skip_zero_advantage and self.loss.zero_without_advantage):
            return every
        rows = np.flatnonzero(advantages)
        return rows if len(rows) else every[:1]  # one row always, so that the mismatch is measured

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


def _mean(reports: list[UpdateReport]) -> dict[str, float]:
    """Numbers of all optimizer steps of a rollout: counts and seconds add up, the rest is averaged or the largest.

    A mini-batch all of whose rows were left out reports no tokens.
    """
    tokens, gap, entropy = (sum(r.sums.pop(name, 0.0) for r in reports) for name in ("tokens", "gap", "entropy"))
    seconds, computed = (sum(r.maxima.pop(name) for r in reports) for name in ("seconds", "batch/computed_tokens"))
    largest_gap = max(r.maxima.pop("gap", float("-inf")) for r in reports)
    losses = [r.sums.pop("loss", 0.0) for r in reports]
    rest = [r.sums | r.maxima for r in reports]
    names = dict.fromkeys(name for numbers in rest for name in numbers)
    return {
        "loss/policy": float(np.mean(losses)),
        "policy/entropy_mean": entropy / tokens,
        "mismatch/logprob_abs_mean": gap / tokens,
        "mismatch/logprob_abs_max": largest_gap,
        "batch/trained_tokens": tokens,
        "batch/computed_tokens": computed,
        "batch/optimizer_steps": float(len(reports)),
        "spent/megatron_s": seconds,
        **{name: float(np.mean([numbers[name] for numbers in rest if name in numbers])) for name in names},
    }
