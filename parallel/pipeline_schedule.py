"""Runs the forward and backward passes of all micro-batches of a mini-batch through Megatron's pipeline schedules."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from parallel import groups, megatron_layers
from parallel.device import device
from parallel.packing import PackedSequences
from parallel.spans import is_recording, record, span


class PackedMicroBatch(Protocol):
    """Fields of a micro-batch that the schedule reads."""

    @property
    def tokens(self) -> Tensor: ...  # [L] token ids of this rank, padding included

    @property
    def packed(self) -> PackedSequences: ...

    @property
    def routing(self) -> Tensor | None: ...  # [L, layers, topk] experts to replay, see parallel.megatron_layers


OutputHead = Callable[[Tensor, torch.nn.Module, Tensor | None, Any], Any]
"""Function that computes the input of the loss function on the last pipeline stage.

Its arguments are the hidden states ([L, H], or [L/tp, H] under sequence parallelism; H is the hidden size), the output layer, the
weight of a tied embedding (None: not tied), and the micro-batch. If MTP layers run, the hidden states are
[L, (1 + MTP layers) * H], and the columns of the main model come first. The result is then a tuple, whose first element belongs
to the main model.
"""
type LossFunction[O] = Callable[[Any, Any], tuple[Tensor, O]]
"""Function that gets (result of the output head, micro-batch) and returns (loss, outputs of the micro-batch)."""


def run_forward_backward[O](
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[PackedMicroBatch],
    head: OutputHead,
    loss_function: LossFunction[O],
    *,
    forward_only: bool = False,
    aux_scale: float = 1.0,
    all_reduce_gradients: bool = False,
) -> list[O]:
    """Run all micro-batches and accumulate the gradients of the sum of their losses.

    Returns the outputs of each micro-batch on the last pipeline stage, and an empty list on other stages. `chunks` are this
    rank's virtual stages. With `forward_only`, no gradients are computed. A rank without micro-batches still takes part in
    the gradient reduction. So replicas may have different numbers of micro-batches, unless they send
    tokens to each other's experts (`ParallelDims.equal_micro_batch_counts`).

    `aux_scale` multiplies the load-balancing losses of the experts. Megatron multiplies the load-balancing loss of a pack by the
    pack's number of tokens, so `aux_scale` = 1 / (tokens of all packs of the optimizer step) gives the mean over tokens.

    With `all_reduce_gradients`, every replica gets the whole summed gradient, and not only the shard that its optimizer needs.
    """
    config = chunks[0].config
    # moe_grad_scale_func must return a tensor on the device. Megatron would copy a float to the GPU in each micro-batch, and
    # the host would wait for the copy.
    config.moe_grad_scale_func = lambda: torch.full((), aux_scale, device=device())
    for chunk in chunks:
        chunk.force_all_reduce = all_reduce_gradients  # GradientReducer reads this attribute before each reduction
    if not micro_batches:
        if not forward_only:
            config.finalize_model_grads_func(chunks, force_all_reduce=all_reduce_gradients)
        return []
    iterators = [iter(micro_batches) for _ in chunks]
    try:
        return get_forward_backward_func()(
            forward_step_func=_forward_step(head, loss_function),
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # Megatron ignores this value, because each pack has its own length
            micro_batch_size=1,
            forward_only=forward_only,
            force_all_reduce=all_reduce_gradients,
        )
    finally:
        megatron_layers.stop_replay(chunks)


def _forward_step(head: OutputHead, loss_function: LossFunction[Any]) -> Callable:
    def output_processor(*, hidden_states: Tensor, output_layer, output_weight, context, **unused) -> Any:
        return head(hidden_states.flatten(1), output_layer, output_weight, context)

    def forward_step(iterator, module):
        micro = next(iterator)
        with (
            span("forward", "micro_batch", tokens=len(micro.tokens)),
            megatron_layers.replay_routing(module, micro.routing),
        ):
            output = module(
                micro.tokens[None],
                micro.packed.position_ids[None],
                None,
                packed_seq_params=micro.packed,
                padding_mask=_padding_mask(micro, module),
                output_processor=output_processor,
                output_processor_context=micro,
            )

        def loss_func(output: Any):
            with span("loss", "micro_batch"):
                loss, report = loss_function(output, micro)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), report

        _record_backward(output[0] if isinstance(output, tuple) else output, len(micro.tokens))
        return output, loss_func

    return forward_step


def _record_backward(output: Tensor, tokens: int) -> None:
    """Record a span that begins when autograd has the gradient of `output`, and ends when the backward pass ends.

    The function uses a hook, because Megatron's schedules call the backward pass and do not measure its duration.
    """
    if not (is_recording() and output.requires_grad):
        return

    def on_gradient(gradient: Tensor) -> None:
        start, since = time.time(), time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore[missing-attribute]  # untyped
            lambda: record("backward", "micro_batch", start, time.perf_counter() - since, tokens=tokens)
        )

    output.register_hook(on_gradient)


def _padding_mask(micro: PackedMicroBatch, module: DistributedDataParallel) -> Tensor | None:
    """Return the mask [1, L] of padding tokens for the load-balancing loss of the experts.

    Returns None for a dense model, or if there is no padding. Under sequence parallelism, Megatron splits the mask over the
    tensor-parallel ranks on the first pipeline stage only. Therefore this function splits the mask on the other stages.
    """
    padding = micro.packed.padding
    if padding is None or not module.config.num_moe_experts:
        return None
    if module.config.sequence_parallel and not module.module.pre_process:
        padding = padding.chunk(groups.tp_group().size())[groups.tp_group().rank()]
    return padding[None]
