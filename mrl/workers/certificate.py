"""One step of a model, looked at from all sides: what `mrl certify` and the parity tests compare between layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mrl.algorithms.losses import Loss, ValueLoss
from mrl.types import Share, TokenBlock
from mrl.workers.actor import Actor, policy_loss
from mrl.workers.critic import Critic, value_loss
from mrl.workers.model import summarise
from parallel import groups

Tensors = dict[str, NDArray]


@dataclass(frozen=True)
class Trace:
    """What one rank knows of one step; `Trace.joined` puts the ranks' together."""

    loss: float = 0.0
    grad_norm: float = 0.0
    outputs: dict[int, NDArray] = field(
        default_factory=dict
    )  # row of the block -> [R of the row] log-probabilities or values
    gradients: Tensors = field(default_factory=dict)  # by Hugging Face name
    weights: Tensors = field(default_factory=dict)  # after the step

    @classmethod
    def joined(cls, traces: Sequence["Trace"]) -> "Trace":
        """The step as all ranks together saw it."""
        outputs = {row: column for trace in traces for row, column in trace.outputs.items()}
        loss = sum(trace.loss for trace in traces)
        return cls(loss, traces[0].grad_norm, outputs, traces[0].gradients, traces[0].weights)


def trace_actor(actor: Actor, block: TokenBlock, share: Share, loss: Loss, lr: float, temperature: float) -> Trace:
    """Log-probabilities, then one optimizer step of an actor; every rank of the layout calls this."""
    columns = actor.compute_logprobs(block, share, temperature)
    head = partial(actor._head, temperature=temperature)
    return _trace(actor, block, share, columns, head, partial(policy_loss, loss=loss), lr)


def trace_critic(critic: Critic, block: TokenBlock, share: Share, loss: ValueLoss, lr: float) -> Trace:
    """Values, then one optimizer step of a critic; every rank of the layout calls this."""
    columns = critic.compute_values(block, share)
    return _trace(critic, block, share, columns, critic._head, partial(value_loss, loss=loss), lr)


def _trace(model, block: TokenBlock, share: Share, columns: list[Tensor], head, loss_of, lr: float) -> Trace:
    reports = model.accumulate(model.micro_batches(block, share), head, loss_of, share, whole=True)
    gradients = _whole(model, model.gradients())
    grad_norm = model.step(lr)
    is_head = groups.tp_group().rank() == 0 and groups.is_last_stage()
    loss = summarise(reports, {}).sums.get("loss", 0.0) if is_head else 0.0
    outputs = _by_row(block, share, columns) if is_head and groups.cp_group().rank() == 0 else {}
    return Trace(loss, grad_norm, outputs, gradients, _whole(model, model.export()))


def _by_row(block: TokenBlock, share: Share, columns: list[Tensor]) -> dict[int, NDArray]:
    found = {}
    for rows, column in zip(share.micro_batches, columns, strict=True):
        ends = np.cumsum(block.response_lengths[rows])[:-1]
        found |= dict(zip(rows.tolist(), np.split(column.float().cpu().numpy(), ends), strict=False))
    return found


def _whole(model, tensors) -> Tensors:
    """All tensors on rank 0, which takes them from the others; nothing elsewhere."""
    if not model.takes_part:
        return {}
    import torch.distributed as dist

    kept = {}
    for name, tensor in tensors:
        if dist.get_rank() == 0:
            kept[name] = tensor.detach().float().cpu().numpy().copy()
    return kept


@dataclass(frozen=True)
class Difference:
    """One line of the certificate."""

    name: str
    absolute: float  # largest difference of two elements
    relative: float  # the same, over the largest element of the reference
    tolerance: float  # of `relative` for numbers and tensors, of `absolute` for log-probabilities

    @property
    def within(self) -> bool:
        return (self.absolute if self.name == "outputs" else self.relative) <= self.tolerance


def compare(reference: Trace, other: Trace, tolerance: float = 2e-5, outputs: float = 1e-5) -> list[Difference]:
    """Differences of everything, in the order in which a step makes it; a row or tensor that is missing is infinite."""
    found = [
        _difference("outputs", _joined(reference.outputs), _joined(other.outputs), outputs),
        _difference("loss", np.array([reference.loss]), np.array([other.loss]), tolerance),
        _difference("gradient norm", np.array([reference.grad_norm]), np.array([other.grad_norm]), tolerance),
    ]
    for what, mine, theirs in (
        ("gradient", reference.gradients, other.gradients),
        ("weight", reference.weights, other.weights),
    ):
        for name in mine | theirs:
            missing = np.empty(0)
            found.append(_difference(f"{what} {name}", mine.get(name, missing), theirs.get(name, missing), tolerance))
    return found


def _joined(rows: Mapping[int, NDArray]) -> NDArray:
    return np.concatenate([np.empty(0), *(rows[row] for row in sorted(rows))])


def _difference(name: str, reference: NDArray, other: NDArray, tolerance: float) -> Difference:
    if reference.shape != other.shape or not np.isfinite(other).all():
        return Difference(name, float("inf"), float("inf"), tolerance)
    absolute = float(np.abs(reference.astype(np.float64) - other).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    return Difference(name, absolute, absolute / scale if scale else float(absolute > 0), tolerance)
