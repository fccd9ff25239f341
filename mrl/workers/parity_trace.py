"""Traces one optimizer step on a trainer rank, for parity checks and replays.

A trace records the values that the step computes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.preference import ScoreLoss
from mrl.core.types import ReplicaBatch, TokenBlock
from mrl.workers.actor_critic import MegatronActor, MegatronCritic
from mrl.workers.megatron_model import MegatronModel, reduce_statistics
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.trace_comparison import (
    EMBEDDING,
    FINAL_NORM,
    NUM_PROJECTIONS,
    ActivationSketch,
    StepTrace,
    merge_sketches,
)
from parallel import groups


def trace_step(
    model: MegatronActor | MegatronCritic,
    block: TokenBlock,
    batch: ReplicaBatch,
    loss: Loss | ValueLossFunction | ScoreLoss,
    lr: float,
    temperature: float,
) -> StepTrace:
    """Run one optimizer step, and trace the step and the outputs before and after the step. All ranks call this.

    The outputs are log-probabilities (actor) or values (critic). The loss of a critic is a value loss. For an actor, the block
    should have a column old_logprobs. Without this column, the probability ratio is always 1, so wrong
    log-probabilities would not change the value of the loss.
    """
    outputs = forward_outputs(model, block, batch, temperature)
    total = _accumulate(model, block, batch, loss, temperature)
    gradients, before = _gather(model, model.export_gradients()), _gather(model, model.export())
    grad_norm = model.optimizer_step(lr)
    weights = _gather(model, model.export())
    updates = {name: weights[name] - before[name] for name in weights}
    after = forward_outputs(model, block, batch, temperature)
    return StepTrace(
        loss=total,
        grad_norm=grad_norm,
        outputs=outputs,
        gradients=gradients,
        weights=weights,
        updates=updates,
        outputs_after_step=after,
    )


def trace_layers(
    model: MegatronActor | MegatronCritic,
    block: TokenBlock,
    batch: ReplicaBatch,
    loss: Loss | ValueLossFunction | ScoreLoss,
    temperature: float,
) -> StepTrace:
    """Trace everything before the optimizer step, and the hidden states between layers. All ranks call this.

    Values that are not finite raise no error. The gradient norm is computed on rank 0, from the complete gradients.
    """
    with ActivationHooks(model.chunks, model.spec.dims.sequence_parallel) as hooks:
        outputs = forward_outputs(model, block, batch, temperature)
    total = _accumulate(model, block, batch, loss, temperature)
    gradients = _gather(model, model.export_gradients())
    squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values())
    return StepTrace(
        loss=total,
        grad_norm=math.sqrt(squares),
        outputs=outputs,
        gradients=gradients,
        sketches=hooks.sketches(),
    )


def forward_outputs(
    model: MegatronActor | MegatronCritic, block: TokenBlock, batch: ReplicaBatch, temperature: float
) -> dict[int, NDArray]:
    """Return row -> log-probabilities (actor) or values (critic).

    Only one rank of a replica has these outputs; the other ranks return an empty dict.
    """
    if isinstance(model, MegatronCritic):
        columns = model.compute_values(block, batch)
    else:
        columns = model.compute_logprobs(block, batch, temperature)
    part = model.column_part(columns, batch)
    return part.by_row(block.sampled_lengths) if part else {}


def _accumulate(
    model: MegatronModel,
    block: TokenBlock,
    batch: ReplicaBatch,
    loss: Loss | ValueLossFunction | ScoreLoss,
    temperature: float,
) -> float:
    """Accumulate the gradients, summed over all replicas, on every replica. Return this rank's part of the loss.

    Only ranks of the last pipeline stage that have tensor-parallel rank 0 return a part. The other ranks return 0.
    """
    head, loss_function = model.head_and_loss(loss, temperature)
    micros = model.micro_batches(block, batch, trains_mtp=True)
    statistics = model.accumulate_gradients(micros, head, loss_function, batch, all_reduce=True)
    knows_loss = groups.tp_group().rank() == 0 and groups.is_last_stage()
    return reduce_statistics(statistics, {}).sums.get("loss", 0.0) if knows_loss else 0.0


def _gather(model: MegatronModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray]:
    """Return all tensors on rank 0, and an empty dict on the other ranks."""
    if not model.participates_in_export:
        return {}
    gathered = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            gathered[name] = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return gathered


class ActivationHooks:
    """Context with forward hooks that sketch the hidden states after each of this rank's layers.

    mrl.workers.trace_comparison explains sketches. Between layers, a rank has all H elements of a hidden state under every
    layout. Turn off activation recomputation, because a recomputed state could not be assigned to its tokens.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], sequence_parallel: bool) -> None:
        """Prepare hooks for the model parts in `chunks`.

        With `sequence_parallel`, each tensor-parallel rank has its own tokens. Otherwise, all tensor-parallel ranks have the same
        tokens.
        """
        self._models: list[Any] = [chunk.module for chunk in chunks]
        self._num_parts = groups.tp_group().size() if sequence_parallel else 1
        self._part = groups.tp_group().rank() if sequence_parallel else 0
        self._is_duplicate = not sequence_parallel and groups.tp_group().rank() > 0
        self._hooks: list[Any] = []
        self._sketches: list[ActivationSketch] = []
        # [local L]: index in the block of each token of this rank; -1: padding. `local L` is L / tp with
        # `sequence_parallel`, otherwise L. L: number of tokens of the micro-batch on this context-parallel rank
        self._tokens = np.empty(0, np.int64)

    def __enter__(self) -> "ActivationHooks":
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._begin_micro_batch, with_kwargs=True))
            if model.pre_process:
                self._add_hook(model.embedding, EMBEDDING)
            for layer in model.decoder.layers:
                self._add_hook(layer, layer.layer_number)
            if model.post_process:
                self._add_hook(model.decoder.final_layernorm, FINAL_NORM)
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def sketches(self) -> tuple[ActivationSketch, ...]:
        """Return one sketch for each depth on this rank. The result is empty if another rank sketches the same states."""
        return merge_sketches(self._sketches)

    def _add_hook(self, module: torch.nn.Module, depth: int) -> None:
        if not self._is_duplicate:
            self._hooks.append(module.register_forward_hook(self._sketch_output(depth)))

    def _begin_micro_batch(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        micro: MicroBatch = kwargs["output_processor_context"]
        self._tokens = np.split(micro.block_index, self._num_parts)[self._part]

    def _sketch_output(self, depth: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # [local L, 1, H]
            # An image model splits its embeddings over the ranks only after the tower's outputs have been inserted.
            if len(hidden) > len(self._tokens):
                hidden = hidden.chunk(self._num_parts)[self._part]
            is_token = self._tokens >= 0
            values = sketch(hidden.detach()[:, 0])[torch.from_numpy(is_token).to(hidden.device)]
            self._sketches.append(ActivationSketch(depth, self._tokens[is_token], values.cpu().numpy()))

        return hook


@torch.no_grad()
def sketch(hidden: Tensor) -> Tensor:
    """Return the sketches, float32 [n, 1 + K] with K = NUM_PROJECTIONS, of hidden states [n, H]. Column 0 is the norm."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(hidden.size(1), NUM_PROJECTIONS, generator=generator, dtype=torch.float64).to(hidden.device)
    wide = hidden.double()  # float64, so that the round-off of the sketch is negligible
    return torch.cat([wide.norm(dim=1, keepdim=True), wide @ vectors], dim=1).float()
