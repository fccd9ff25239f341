"""Takes a trace of one step on every rank of a layout, for the certificate and for replays."""

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
from mrl.workers.columns import compute
from mrl.workers.critic import MegatronCritic, value_loss
from mrl.workers.megatron_model import MegatronModel, summarise
from mrl.workers.micro_batch import MicroBatch
from mrl.workers.trace_comparison import EMBEDDING, NORM, PROJECTIONS, ActivationSketch, StepTrace, merge_sketches
from parallel import groups

# FROM: Looks at what passes between layers in a forward pass, whatever the layout: hidden states are whole in H there.


def trace(
    model: MegatronActor | MegatronCritic,
    block: TokenBlock,
    share: RankBatch,
    loss: Loss | None,
    lr: float,
    temperature: float,
) -> StepTrace:
    """Log-probabilities or values, then one optimizer step; a critic needs no loss. Every rank of the layout calls this.

    The block should have a column old_logprobs: on policy a ratio of 1 would hide the model from the loss.
    """
    outputs = look(model, block, share, temperature)
    total = _accumulate(model, block, share, loss, temperature)
    gradients, before = _whole(model, model.gradients()), _whole(model, model.export())
    grad_norm = model.step(lr)
    weights = _whole(model, model.export())
    updates = {name: weights[name] - before[name] for name in weights}
    return StepTrace(total, grad_norm, outputs, gradients, weights, updates, look(model, block, share, temperature))


def trace_layers(
    model: MegatronActor | MegatronCritic, block: TokenBlock, share: RankBatch, loss: Loss | None, temperature: float
) -> StepTrace:
    """All that comes before the optimizer step, and what passes between layers; every rank of the layout calls this.

    Nothing stops it at numbers that are not finite. The gradient norm is that of the whole gradients, on rank 0.
    """
    with Taps(model.chunks, model.spec.dims.sequence_parallel) as taps:
        outputs = look(model, block, share, temperature)
    total = _accumulate(model, block, share, loss, temperature)
    gradients = _whole(model, model.gradients())
    squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values())
    return StepTrace(total, math.sqrt(squares), outputs, gradients, sketches=taps.sketches())


def _accumulate(
    model: MegatronActor | MegatronCritic, block: TokenBlock, share: RankBatch, loss: Loss | None, temperature: float
) -> float:
    """Whole gradients on every replica; returns the loss of this rank's micro-batches, on one rank of those that know it."""
    if isinstance(model, MegatronCritic):
        head, loss_of = model.head, partial(value_loss, loss=ValueLoss())
    else:
        assert loss is not None, "an actor is trained with a loss"
        head = partial(model.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        loss_of = partial(policy_loss, loss=loss)
    reports = model.accumulate(model.micro_batches(block, share), head, loss_of, share, whole=True)
    is_head = groups.tp_group().rank() == 0 and groups.is_last_stage()
    return summarise(reports, {}).sums.get("loss", 0.0) if is_head else 0.0


def look(
    model: MegatronActor | MegatronCritic, block: TokenBlock, share: RankBatch, temperature: float
) -> dict[int, NDArray]:
    """Log-probabilities or values by row, on one rank of those that have them; nothing on the others."""
    if isinstance(model, MegatronCritic):
        part = compute(model, "values", block, share)
    else:
        part = compute(model, "logprobs", block, share, temperature=temperature)
    return part.by_row(block.sampled_lengths) if part else {}


def _whole(model: MegatronModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray]:
    """All tensors on rank 0, which takes them from the others; nothing elsewhere."""
    if not model.participates_in_export:
        return {}
    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return kept


class Taps:
    """Hooks on this rank's stages while the context is open.

    No pass may compute activations again meanwhile: it would not be known whose they are.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], sequence_parallel: bool) -> None:
        """`sequence_parallel`: each tensor-parallel rank has a part of the tokens; else all have the same."""
        self._models: list[Any] = [chunk.module for chunk in chunks]
        self._parts = groups.tp_group().size() if sequence_parallel else 1
        self._part = groups.tp_group().rank() if sequence_parallel else 0
        self._silent = not sequence_parallel and groups.tp_group().rank() > 0
        self._hooks: list[Any] = []
        self._found: list[ActivationSketch] = []
        self._tokens = np.empty(0, np.int64)  # [L here] of the micro-batch that passes, -1: pads

    def __enter__(self) -> "Taps":
        for model in self._models:
            self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            if model.pre_process:
                self._tap(model.embedding, EMBEDDING)
            for layer in model.decoder.layers:
                self._tap(layer, layer.layer_number)
            if model.post_process:
                self._tap(model.decoder.final_layernorm, NORM)
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def sketches(self) -> tuple[ActivationSketch, ...]:
        """What passed on this rank, one sketch a place; nothing where another rank says the same."""
        return merge_sketches(self._found)

    def _tap(self, module: torch.nn.Module, place: int) -> None:
        if not self._silent:
            self._hooks.append(module.register_forward_hook(self._keeping(place)))

    def _begin(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        micro: MicroBatch = kwargs["output_processor_context"]
        self._tokens = np.split(micro.origin, self._parts)[self._part]

    def _keeping(self, place: int) -> Callable[..., None]:
        def keep(module: torch.nn.Module, args: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden = output[0] if isinstance(output, tuple) else output  # [L here, 1, H]
            real = self._tokens >= 0
            values = sketch(hidden.detach()[:, 0])[torch.from_numpy(real).to(hidden.device)]
            self._found.append(ActivationSketch(place, self._tokens[real], values.cpu().numpy()))

        return keep


@torch.no_grad()
def sketch(hidden: Tensor) -> Tensor:
    """[n, 1 + K] float32 of hidden states [n, H]."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(hidden.size(1), PROJECTIONS, generator=generator, dtype=torch.float64).to(hidden.device)
    wide = hidden.double()  # the sketch's own round-off must not be seen
    return torch.cat([wide.norm(dim=1, keepdim=True), wide @ vectors], dim=1).float()
