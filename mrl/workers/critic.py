"""The value function being trained: one rank's part of it. Any layout serves, the actor's or another."""

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms.losses import ValueLoss
from mrl.core.types import RankBatch, TokenBlock, UpdateReport
from mrl.workers.megatron_model import MegatronModel, summarise
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.model_spec import ModelSpec
from parallel.megatron_layers import gather_sequence
from parallel.schedule import Report


class MegatronCritic(MegatronModel):
    """A decoder whose head predicts one number per token: the return from there on."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="value")

    def update(
        self, block: TokenBlock, shares: Sequence[RankBatch], loss: ValueLoss, lrs: Sequence[float]
    ) -> list[UpdateReport]:
        """An optimizer step on this replica's share of each mini-batch, towards the column `returns`."""
        reports = []
        for number, (share, lr) in enumerate(zip(shares, lrs, strict=True)):
            micros = self.micro_batches(block, share)
            start = time.perf_counter()
            found = self.accumulate(micros, self.head, partial(value_loss, loss=loss), share)
            maxima = {"critic/grad_norm": self.step(lr, number), "seconds": time.perf_counter() - start}
            reports.append(summarise(found, maxima))
        return reports

    def compute_values(self, block: TokenBlock, share: RankBatch) -> list[Tensor]:
        """Values [R] before each sampled token of each micro-batch; empty except on the last pipeline stage."""
        return self.score(block, share, self.head)

    def head(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> Tensor:
        """[1, R here] values, from [L, H] hidden states."""
        whole = gather_sequence(hidden, self.spec.dims.sequence_parallel, replicated=True)
        return output_layer(whole.index_select(0, micro.predict))[None]


def value_loss(output: Tensor, micro: MicroBatch, loss: ValueLoss) -> tuple[Tensor, Report]:
    """The micro-batch's part of the loss, and what is reported of it; `output` [1, R here] is the critic's head's."""
    values, returns = output[0], micro.columns["returns"]
    weights = micro.weights.to(values.dtype)
    total = (loss(values, returns, micro.columns.get("values", values.detach())) * weights).sum()
    error, now = (returns - values).detach(), values.detach()
    report = {"loss": total.detach(), "tokens": torch.tensor(len(values))}
    for name, column in (("values", now), ("returns", returns), ("errors", error)):
        report |= {name: column.sum(), f"{name}_squared": (column**2).sum()}
    return total, {f"sum:{name}": value for name, value in report.items()}
