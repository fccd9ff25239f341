"""Traces of one optimizer step on a trainer rank, for parity checks and replays."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.losses import Loss, ValueLoss
from mrl.core.types import RankBatch, TokenBlock
from mrl.workers.actor import MegatronActor, policy_loss
from mrl.workers.critic import MegatronCritic, value_loss
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
    batch: RankBatch,
    loss: Loss | None,
    lr: float,
    temperature: float,
) -> StepTrace:
    """Record log-probabilities or values, then run and record one optimizer step; all ranks call this.

    A critic needs no loss. The block should have a column old_logprobs: without it the ratio is 1, and the loss does not depend
    on the model's outputs.
    """
    outputs = forward_outputs(model, block, batch, temperature)
    total = _accumulate(model, block, batch, loss, temperature)
    gradients, before = _gather(model, model.export_gradients()), _gather(model, model.export())
    grad_norm = model.optimizer_step(lr)
    weights = _gather(model, model.export())
    updates = {name: weights[name] - before[name] for name in weights}
    after = forward_outputs(model, block, batch, temperature)
    return StepTrace(total, grad_norm, outputs, gradients, weights, updates, after)


def trace_layers(
    model: MegatronActor | MegatronCritic, block: TokenBlock, batch: RankBatch, loss: Loss | None, temperature: float
) -> StepTrace:
    """Record everything that precedes the optimizer step, and the hidden states between layers; all ranks call this.

    Continues if numbers are not finite. The gradient norm is that of the complete gradients, on rank 0.
    """
    with ActivationHooks(model.chunks, model.spec.dims.sequence_parallel) as hooks:
        outputs = forward_outputs(model, block, batch, temperature)
    total = _accumulate(model, block, batch, loss, temperature)
    gradients = _gather(model, model.export_gradients())
    squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values())
    return StepTrace(total, math.sqrt(squares), outputs, gradients, sketches=hooks.sketches())


def forward_outputs(
    model: MegatronActor | MegatronCritic, block: TokenBlock, batch: RankBatch, temperature: float
) -> dict[int, NDArray]:
    """Return row -> log-probabilities or values on one rank of the replica, an empty dict on the others."""
    if isinstance(model, MegatronCritic):
        columns = model.compute_values(block, batch)
    else:
        columns = model.compute_logprobs(block, batch, temperature)
    part = model.column_part(columns, batch)
    return part.by_row(block.sampled_lengths) if part else {}


def _accumulate(
    model: MegatronActor | MegatronCritic, block: TokenBlock, batch: RankBatch, loss: Loss | None, temperature: float
) -> float:
    """Accumulate complete gradients on every replica.

    Returns the loss of this rank's micro-batches, on one tensor-parallel rank of the last stage; 0 on the others.
    """
    if isinstance(model, MegatronCritic):
        head, loss_function = model.head, partial(value_loss, loss=ValueLoss())
    else:
        assert loss is not None, "an actor needs a loss"
        head = partial(model.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        loss_function = partial(policy_loss, loss=loss)
    micros = model.micro_batches(block, batch)
    statistics = model.accumulate_gradients(micros, head, loss_function, batch, all_reduce=True)
    knows_loss = groups.tp_group().rank() == 0 and groups.is_last_stage()
    return reduce_statistics(statistics, {}).sums.get("loss", 0.0) if knows_loss else 0.0


def _gather(model: MegatronModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray]:
    """Gather all tensors on rank 0; returns an empty dict on the other ranks."""
    if not model.participates_in_export:
        return {}
    gathered = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            gathered[name] = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return gathered


class ActivationHooks:
    """Forward hooks that sketch the hidden states of this rank's layers while the context is open.

    Between layers, hidden states are complete in H under every layout. Turn off activation recomputation: a recomputed
    state could not be assigned to its tokens.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], sequence_parallel: bool) -> None:
        """`sequence_parallel`: each tensor-parallel rank has a part of the tokens; otherwise all have the same tokens."""
        self._models: list[Any] = [chunk.module for chunk in chunks]
        self._num_parts = groups.tp_group().size() if sequence_parallel else 1
        self._part = groups.tp_group().rank() if sequence_parallel else 0
        self._is_duplicate = not sequence_parallel and groups.tp_group().rank() > 0
        self._hooks: list[Any] = []
        self._sketches: list[ActivationSketch] = []
        self._tokens = np.empty(0, np.int64)  # [local L] indices in the block of the current micro-batch; -1: padding

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
        """Return one sketch for each depth on this rank; empty if another rank has the same states."""
        return merge_sketches(self._sketches)

    def _add_hook(self, module: torch.nn.Module, depth: int) -> None:
        if not self._is_duplicate:
            self._hooks.append(module.register_forward_hook(self._sketch_output(depth)))

    def _begin_micro_batch(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        micro: MicroBatch = kwargs["output_processor_context"]
        self._tokens = np.split(micro.origin, self._num_parts)[self._part]

    def _sketch_output(self, depth: int) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # [local L, 1, H]
            is_token = self._tokens >= 0
            values = sketch(hidden.detach()[:, 0])[torch.from_numpy(is_token).to(hidden.device)]
            self._sketches.append(ActivationSketch(depth, self._tokens[is_token], values.cpu().numpy()))

        return hook


@torch.no_grad()
def sketch(hidden: Tensor) -> Tensor:
    """Return [n, 1 + K] float32 sketches of hidden states [n, H]."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(hidden.size(1), NUM_PROJECTIONS, generator=generator, dtype=torch.float64).to(hidden.device)
    wide = hidden.double()  # so that round-off of the sketch itself is negligible
    return torch.cat([wide.norm(dim=1, keepdim=True), wide @ vectors], dim=1).float()
