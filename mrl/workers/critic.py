"""The value function being trained: one rank's part of it. Any layout serves, the actor's or another."""

import time
from functools import partial

import torch
from torch import Tensor

from mrl.algorithms.losses import ValueLoss
from mrl.types import Share, TokenBlock, UpdateReport
from mrl.workers.batch import MicroBatch
from mrl.workers.model import TrainedModel, summarise
from mrl.workers.spec import ModelSpec
from parallel.modules import whole_sequence
from parallel.schedule import Report


class Critic(TrainedModel):
    """A decoder whose head predicts one number per token: the return from there on."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, head="value")

    def update(self, block: TokenBlock, share: Share, loss: ValueLoss, lr: float) -> UpdateReport:
        """One optimizer step towards the share's returns, which stand where the actor's have advantages."""
        micros = self.micro_batches(block, share)
        start = time.perf_counter()
        found = self.accumulate(micros, self.head, partial(value_loss, loss=loss), share)
        grad_norm = self.step(lr)
        return summarise(found, {"optim/critic_grad_norm": grad_norm, "seconds": time.perf_counter() - start})

    def compute_values(self, block: TokenBlock, share: Share) -> list[Tensor]:
        """Values [R] before each response token of each micro-batch; empty except on the last pipeline stage."""
        micros = self.micro_batches(block, share)
        outputs = self.forward(micros, self.head)
        return self.gather_responses([output[0] for output in outputs], micros[: len(outputs)])

    def head(
        self, hidden: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, micro: MicroBatch
    ) -> Tensor:
        """[1, R here] values, from [L, H] hidden states."""
        whole = whole_sequence(hidden, self.spec.dims.sequence_parallel, replicated=True)
        return output_layer(whole.index_select(0, micro.predict))[None]


def value_loss(output: Tensor, micro: MicroBatch, loss: ValueLoss) -> tuple[Tensor, Report]:
    """The micro-batch's part of the loss, and what is reported of it; `output` [1, R here] is the critic's head's."""
    values = output[0]
    weights = micro.weights.to(values.dtype)
    total = (loss(values, micro.advantages) * weights).sum()
    return total, {"sum:loss": total.detach(), "sum:tokens": torch.tensor(len(values))}
