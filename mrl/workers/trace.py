"""Takes the certificate's trace of one step, on every rank of a layout."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.losses import Loss, ValueLoss
from mrl.types import Share, TokenBlock
from mrl.workers.actor import Actor, policy_loss
from mrl.workers.certificate import Trace
from mrl.workers.critic import Critic, value_loss
from mrl.workers.model import TrainedModel, summarise
from parallel import groups


def trace(
    model: Actor | Critic, block: TokenBlock, share: Share, loss: Loss | None, lr: float, temperature: float
) -> Trace:
    """Log-probabilities or values, then one optimizer step; a critic needs no loss. Every rank of the layout calls this.

    The block's rollout log-probabilities are the old ones: on policy a ratio of 1 would hide the model from the loss.
    """
    if isinstance(model, Critic):
        head, loss_of = model.head, partial(value_loss, loss=ValueLoss())
    else:
        assert loss is not None, "an actor is trained with a loss"
        head = partial(model.head, temperature=temperature, entropy_gradient=loss.uses_entropy)
        loss_of = partial(policy_loss, loss=loss)
    outputs = look(model, block, share, temperature)
    micros = [micro.after(micro.rollout_logprobs) for micro in model.micro_batches(block, share)]
    reports = model.accumulate(micros, head, loss_of, share, whole=True)
    gradients, before = _whole(model, model.gradients()), _whole(model, model.export())
    grad_norm = model.step(lr)
    weights = _whole(model, model.export())
    updates = {name: weights[name] - before[name] for name in weights}
    is_head = groups.tp_group().rank() == 0 and groups.is_last_stage()
    total = summarise(reports, {}).sums.get("loss", 0.0) if is_head else 0.0
    return Trace(total, grad_norm, outputs, gradients, weights, updates, look(model, block, share, temperature))


def look(model: Actor | Critic, block: TokenBlock, share: Share, temperature: float) -> dict[int, NDArray]:
    """Log-probabilities or values by row, on one rank of those that have them; nothing on the others."""
    if isinstance(model, Critic):
        columns = model.compute_values(block, share)
    else:
        columns = model.compute_logprobs(block, share, temperature)
    is_first = groups.tp_group().rank() == 0 and groups.cp_group().rank() == 0
    return _by_row(block, share, columns) if is_first and groups.is_last_stage() else {}


def _by_row(block: TokenBlock, share: Share, columns: list[Tensor]) -> dict[int, NDArray]:
    found = {}
    for rows, column in zip(share.micro_batches, columns, strict=True):
        ends = np.cumsum(block.response_lengths[rows])[:-1]
        found |= dict(zip(rows.tolist(), np.split(column.float().cpu().numpy(), ends), strict=False))
    return found


def _whole(model: TrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, NDArray]:
    """All tensors on rank 0, which takes them from the others; nothing elsewhere."""
    if not model.takes_part:
        return {}
    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().float().cpu().numpy().copy()
    return kept
