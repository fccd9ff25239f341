"""Log-probabilities of given tokens under logits whose vocabulary is cut over the tensor-parallel group.

Shapes: T positions, V/tp vocabulary rows of this rank.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class _VocabParallelLogprobs(torch.autograd.Function):
    """log softmax(logits)[target]; d/dlogits = onehot(target) - softmax(logits)."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, first_row: int, group: ProcessGroup) -> Tensor:
        rows = logits.size(-1)
        peak = logits.max(-1, keepdim=True).values
        if group.size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak
        local = targets - first_row
        mine = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)
        chosen = shifted.gather(-1, local[:, None])[:, 0].masked_fill(~mine, 0.0)
        exp = shifted.exp_()
        total = exp.sum(-1)
        if group.size() > 1:
            both = torch.stack([chosen, total])
            dist.all_reduce(both, group=group)
            chosen, total = both
        ctx.save_for_backward(exp.div_(total[:, None]), local, mine)
        return chosen - total.log()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        softmax, local, mine = ctx.saved_tensors
        out = softmax * -grad[:, None]
        out.scatter_add_(-1, local[:, None], (grad * mine)[:, None])
        return out, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor,  # [T, V/tp], any float dtype
    targets: Tensor,  # [T] token ids in the whole vocabulary
    group: ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:  # [T] float32
    """Log-probability of each target under softmax(logits / temperature), differentiable in the logits.

    Rows that only pad the vocabulary to a multiple of tp have no probability.
    """
    rows = logits.size(-1)
    first_row = group.rank() * rows
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    real = vocab_size - first_row
    if real < rows:
        padding = torch.arange(rows, device=logits.device) >= real
        scaled = scaled.masked_fill(padding, torch.finfo(scaled.dtype).min)
    return _VocabParallelLogprobs.apply(scaled, targets, first_row, group)
