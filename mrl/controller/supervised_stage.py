"""Supervised fine-tuning through the same trainer processes: cross-entropy on prompt/response rows."""

from dataclasses import dataclass

import numpy as np

from mrl.algorithms.losses import CrossEntropy
from mrl.core.types import Handle, TrainBatch
from mrl.data.prompts import PromptStream
from mrl.tracking.tracker import Tracker
from mrl.workers.group import WorkerGroup
from mrl.workers.shares import Packing


@dataclass(frozen=True)
class SupervisedStage:
    """A number of optimizer steps on a data set that the workers hold."""

    group: WorkerGroup
    block: Handle  # TokenBlock of the data set
    lengths: np.ndarray  # [rows] tokens
    response_lengths: np.ndarray  # [rows] tokens
    sampled_lengths: np.ndarray  # [rows] tokens in the loss: responses without their tool results
    steps: int
    batch_size: int  # rows per step
    lr: float  # peak; decays linearly to a tenth
    warmup_steps: int
    packing: Packing
    seed: int

    def run(self, tracker: Tracker) -> float:
        """Train; returns the last step's loss, in nats per response token."""
        stream = PromptStream(len(self.lengths), self.batch_size, seed=self.seed, shuffle=True)
        prompt_lengths = self.lengths - self.response_lengths
        loss = float("nan")
        for step in range(self.steps):
            rows = next(stream)
            lr = self._lr(step)
            lengths = (prompt_lengths, self.response_lengths, self.sampled_lengths)
            batch = TrainBatch(self.block, *lengths, None, rows, rows)
            (report,) = self.group.update(
                [batch], self.packing, aggregation="token_mean", lrs=[lr], loss=CrossEntropy(), temperature=1.0
            )
            loss = report.sums["loss"]
            grad_norm = report.maxima["optim/grad_norm"]
            tracker.log(step + 1, {"loss/sft": loss, "optim/grad_norm": grad_norm, "optim/lr": lr})
        return loss

    def _lr(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        return self.lr * warm * (1.0 - 0.9 * step / max(1, self.steps))
