"""Runs forward and backward passes over the micro-batches of one optimizer step, through Megatron's schedules."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from parallel import groups, routing
from parallel.packing import PackedSequences

Report = dict[str, Tensor]


class Pack(Protocol):
    """What a micro-batch brings."""

    @property
    def tokens(self) -> Tensor: ...  # [L] on this rank, padding included

    @property
    def packed(self) -> PackedSequences: ...

    @property
    def routing(self) -> Tensor | None: ...  # [L, layers, topk] experts to take, see parallel.routing


# The last stage's hidden states [L, H] (cut over tp under sequence parallelism), the output layer, a tied embedding's weight
# or None, and the micro-batch -> what the loss is made of
Head = Callable[[Tensor, torch.nn.Module, Tensor | None, Any], Tensor]
# What the head made of the micro-batch -> (loss to add up, numbers to report)
LossOf = Callable[[Tensor, Any], tuple[Tensor, Report]]


def run(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[Pack],
    head: Head,
    loss_of: LossOf,
    *,
    forward_only: bool = False,
    aux_scale: float = 1.0,
    whole_gradients: bool = False,
) -> list[Report]:
    """Accumulate gradients of the summed losses of all micro-batches; the last stage returns each one's reported numbers.

    `chunks` are this rank's virtual stages. A rank without any micro-batch still takes part in the gradient reduction, so
    replicas may hold any number of them (unless they exchange tokens, see ParallelDims.lockstep). `aux_scale` multiplies
    the experts' balancing losses, which Megatron weighs by tokens: 1 / (tokens of the step) makes their mean.
    `whole_gradients` leaves every replica with the whole summed gradient, not only the part that its optimizer steps.
    """
    config = chunks[0].config
    config.moe_grad_scale_func = lambda: aux_scale
    if not micro_batches:
        if not forward_only:
            config.finalize_model_grads_func(chunks, force_all_reduce=whole_gradients)
        return []
    try:
        return _run(chunks, micro_batches, head, loss_of, forward_only, whole_gradients)
    finally:
        routing.forget(chunks)


def _run(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[Pack],
    head: Head,
    loss_of: LossOf,
    forward_only: bool,
    whole_gradients: bool,
) -> list[Report]:
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=_forward_step(head, loss_of),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # variable: each pack brings its own
        micro_batch_size=1,
        forward_only=forward_only,
        force_all_reduce=whole_gradients,
    )


def _forward_step(head: Head, loss_of: LossOf) -> Callable:
    def process(*, hidden_states: Tensor, output_layer, output_weight, context, **unused) -> Tensor:
        return head(hidden_states[:, 0], output_layer, output_weight, context)

    def forward_step(iterator, module):
        micro = next(iterator)
        with routing.replayed(module, micro.routing):
            output = module(
                micro.tokens[None],
                micro.packed.position_ids[None],
                None,
                packed_seq_params=micro.packed,
                padding_mask=_padding(micro, module),
                output_processor=process,
                output_processor_context=micro,
            )

        def loss_func(output: Tensor):
            loss, report = loss_of(output, micro)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

        return output, loss_func

    return forward_step


def _padding(micro: Pack, module: DistributedDataParallel) -> Tensor | None:
    """[1, L] which tokens only pad, for the experts' statistics; Megatron cuts it over tp on the first stage only."""
    padding = micro.packed.padding
    if padding is None or not module.config.num_moe_experts:
        return None
    if module.config.sequence_parallel and not module.module.pre_process:
        padding = padding.chunk(groups.tp_group().size())[groups.tp_group().rank()]
    return padding[None]
