"""Takes a trace of one step on every rank of a layout, for the certificate and for replays."""

import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.losses import Loss, ValueLoss
from mrl.core.types import Share, TokenBlock
from mrl.workers.actor import Actor, policy_loss
from mrl.workers.certificate import Trace
from mrl.workers.columns import compute
from mrl.workers.critic import Critic, value_loss
from mrl.workers.model import TrainedModel, summarise
from mrl.workers.taps import Taps
from parallel import groups


def trace(
    model: Actor | Critic, block: TokenBlock, share: Share, loss: Loss | None, lr: float, temperature: float
) -> Trace:
    """Log-probabilities or values, then one optimizer step; a critic needs no loss. Every rank of the layout calls this.

    The block should have a column old_logprobs: on policy a ratio of 1 would hide the model from the loss.
    """
    outputs = look(model, block, share, temperature)
    total = _accumulate(model, block, share, loss, temperature)
    gradients, before = _whole(model, model.gradients()), _whole(model, model.export())
    grad_norm = model.step(lr)
    weights = _whole(model, model.export())
    updates = {name: weights[name] - before[name] for name in weights}
    return Trace(total, grad_norm, outputs, gradients, weights, updates, look(model, block, share, temperature))


def trace_layers(
    model: Actor | Critic, block: TokenBlock, share: Share, loss: Loss | None, temperature: float
) -> Trace:
    """All that comes before the optimizer step, and what passes between layers; every rank of the layout calls this.

    Nothing stops it at numbers that are not finite. The gradient norm is that of the whole gradients, on rank 0.
    """
    with Taps(model.chunks, model.spec.dims.sequence_parallel) as taps:
        outputs = look(model, block, share, temperature)
    total = _accumulate(model, block, share, loss, temperature)
    gradients = _whole(model, model.gradients())
    squares = sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values())
    return Trace(total, math.sqrt(squares), outputs, gradients, sketches=taps.sketches())


def _accumulate(model: Actor | Critic, block: TokenBlock, share: Share, loss: Loss | None, temperature: float) -> float:
    """Whole gradients on every replica; returns the loss of this rank's micro-batches, on one rank of those that know it."""
    if isinstance(model, Critic):
        head, loss_of = model.head, partial(value_loss, loss=ValueLoss())
    else:
        assert loss is not None, "an actor is trained with a loss"
        head = partial(model.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        loss_of = partial(policy_loss, loss=loss)
    reports = model.accumulate(model.micro_batches(block, share), head, loss_of, share, whole=True)
    is_head = groups.tp_group().rank() == 0 and groups.is_last_stage()
    return summarise(reports, {}).sums.get("loss", 0.0) if is_head else 0.0


def look(model: Actor | Critic, block: TokenBlock, share: Share, temperature: float) -> dict[int, NDArray]:
    """Log-probabilities or values by row, on one rank of those that have them; nothing on the others."""
    if isinstance(model, Critic):
        part = compute(model, "values", block, share)
    else:
        part = compute(model, "logprobs", block, share, temperature=temperature)
    return part.by_row(block.sampled_lengths) if part else {}


def _whole(model: TrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray]:
    """All tensors on rank 0, which takes them from the others; nothing elsewhere."""
    if not model.takes_part:
        return {}
    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().to("cpu", torch.float32, copy=True).numpy()
    return kept
