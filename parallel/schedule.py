"""Runs forward and backward passes over the micro-batches of one optimizer step, through Megatron's schedules."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

# One micro-batch: the model's logits [1, S, V/tp] -> (loss to add up, numbers to report)
LossOf = Callable[[Tensor, Any], tuple[Tensor, dict[str, Tensor]]]


def run(
    model: torch.nn.Module, micro_batches: Sequence[Any], loss_of: LossOf, forward_only: bool = False
) -> list[dict[str, Tensor]]:
    """Accumulate gradients of the summed losses of all micro-batches; returns each one's reported numbers.

    A micro-batch has `tokens` [S], and `packed` (parallel.packing.PackedSequences). A rank without any micro-batch
    still takes part in the gradient reduction, so data-parallel ranks may hold any number of them.
    """
    if not micro_batches:
        if not forward_only:
            model.config.finalize_model_grads_func([model])
        return []

    def forward_step(iterator, module):
        micro = next(iterator)
        logits = module(
            micro.tokens[None], micro.packed.position_ids[None], None, packed_seq_params=micro.packed
        )  # [1, S, V/tp]

        def loss_func(output: Tensor):
            loss, report = loss_of(output[0], micro)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

        return logits, loss_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=0,  # variable: each pack brings its own
        micro_batch_size=1,
        forward_only=forward_only,
    )
