"""Sums over process groups that gradients flow through."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_over(values: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of every rank's `values`, the same on all; all ranks call this, and backward too.

    Each rank's loss may depend on the sum; the losses add up over ranks, so the gradients do.
    """
    return _Sum.apply(values, group) if group.size() > 1 else values


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _added(values, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[bad-override]
        return _added(gradient, ctx.group), None


def _added(values: Tensor, group: ProcessGroup) -> Tensor:
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
