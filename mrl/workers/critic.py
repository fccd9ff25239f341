"""The critic on one trainer rank: a value model, which is trained to predict returns."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from models.architecture import ModelSpec
from mrl.algorithms.losses import ValueLoss
from mrl.core.types import RankBatch, TokenBlock, UpdateReport
from mrl.workers.megatron_model import MegatronModel, MicroBatchStatistics, reduce_statistics
from mrl.workers.micro_batch import MicroBatch
from parallel.megatron_layers import gather_sequence


class MegatronCritic(MegatronModel):
    """One rank's part of the critic: a decoder whose head predicts one number per token."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="value")

    def update(
        self, block: TokenBlock, batches: Sequence[RankBatch], loss: ValueLoss, lrs: Sequence[float]
    ) -> list[UpdateReport]:
        """Run one optimizer step for each mini-batch, on this replica's rows. The target is the column `returns`.

        Raises NonFiniteGradientError if a gradient is not finite.
        """
        reports = []
        for number, (batch, lr) in enumerate(zip(batches, lrs, strict=True)):
            micros = self.micro_batches(block, batch)
            start = time.perf_counter()
            statistics = self.accumulate_gradients(micros, self.head, partial(value_loss, loss=loss), batch)
            grad_norm = self.optimizer_step(lr, number)
            seconds = time.perf_counter() - start
            reports.append(reduce_statistics(statistics, {"critic/grad_norm": grad_norm, "seconds": seconds}))
        return reports

    def compute_values(self, block: TokenBlock, batch: RankBatch) -> list[Tensor]:
        """Return for each micro-batch the value before each sampled token: [R]. Only the last pipeline stage returns them."""
        return self.compute_column(block, batch, self.head)

    def head(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> Tensor:
        """Return the values [1, local R] that follow from hidden states [L, H]."""
        gathered = gather_sequence(hidden, self.spec.dims.sequence_parallel, replicated=True)
        return output_layer(gathered.index_select(0, micro.predictor_index))[None]


def value_loss(output: Tensor, micro: MicroBatch, loss: ValueLoss) -> tuple[Tensor, MicroBatchStatistics]:
    """Return the micro-batch's part of the loss, and its statistics. `output` [1, local R] comes from MegatronCritic.head."""
    values, returns = output[0], micro.columns["returns"]
    weights = micro.weights.to(values.dtype)
    total = (loss(values, returns, micro.columns.get("values", values.detach())) * weights).sum()
    sums = {"loss": total.detach(), "tokens": torch.tensor(len(values))}
    columns = {"values": values.detach(), "returns": returns, "errors": (returns - values).detach()}
    for name, column in columns.items():
        sums |= {name: column.sum(), f"{name}_squared": (column**2).sum()}
    return total, MicroBatchStatistics(sums)
