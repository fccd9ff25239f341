"""Log-probabilities and entropies straight from hidden states, with the vocabulary cut over the tensor-parallel group.

The output layer, softmax and their gradients run over `chunk_size` positions at a time, so no more than that many rows
of logits exist at once (as in Liger Kernel's fused linear cross-entropy, Hsu et al. 2024); the backward pass computes
them again (as in Cut Cross-Entropy, Wijmans et al. 2024). Beyond hidden, weight and their gradients, at most three
float32 chunks [chunk_size, V/tp] live at one time: two without entropy, two and a half if the inputs have 16 bits.

For logits x = hidden @ weight.T / temperature, p = softmax(x), log p_j = x_j - log sum_k exp x_k:
    entropy H = -sum_j p_j log p_j = log sum_k exp x_k - sum_j p_j x_j
    d log p_t / d x_j = [j = t] - p_j        d H / d x_j = -p_j (log p_j + H)

Shapes: T positions, n of a chunk, H hidden size, V/tp vocabulary rows of this rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

# Logit of a row that only pads the vocabulary: no probability, yet finite, so that 0 * it is 0.
PADDING = -1e30


def linear_logprobs(  # noqa: PLR0913  the terms of one formula
    hidden: Tensor,  # [T, H] any float dtype; its gradient is this rank's part, to be summed over the group
    weight: Tensor,  # [V/tp, H] this rank's vocabulary rows of the output layer, of the same dtype
    targets: Tensor,  # [T] token ids in the whole vocabulary
    group: ProcessGroup,
    vocab_size: int,  # real tokens; rows beyond it only pad and have no probability
    temperature: float = 1.0,
    chunk_size: int = 1024,  # rows of logits that exist at one time
    needs_entropy: bool = False,
) -> tuple[Tensor, Tensor]:  # log-probabilities [T], entropies [T] in nats (zeros if not needed)
    """Log-probability of each target, and entropy, under softmax(hidden @ weight.T / temperature).

    Matrix products are in the inputs' dtype, all else and both results in float32 (float64 for float64 inputs). Both are
    differentiable in `hidden` and `weight`. Every rank of the group gives the same T, and gets the same results.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} leaves no logits to work on; give 1 or more, such as 1024.")
    first = group.rank() * weight.size(0)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    head = _Head(group, first, vocab_size - first, temperature, chunk_size, needs_entropy, needs_grad)
    return _LinearLogprobs.apply(hidden, weight, targets, head)


@dataclass(frozen=True)
class _Head:
    """This rank's part of the output layer, apart from its weight."""

    group: ProcessGroup
    first_row: int  # the token of weight row 0
    real_rows: int  # rows from here on are padding; may lie outside this rank's rows
    temperature: float
    chunk_size: int
    needs_entropy: bool
    needs_grad: bool

    def chunks(self, positions: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_size, positions)) for i in range(0, positions, self.chunk_size)]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """logits / temperature [n, V/tp] of hidden [n, H], in float32 or wider."""
        logits = hidden @ weight.T
        logits = logits.to(_wide(logits.dtype))
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.real_rows < logits.size(1):
            logits[:, max(self.real_rows, 0) :] = PADDING
        return logits

    def softmax(self, hidden: Tensor, weight: Tensor, normalizer: Tensor) -> Tensor:
        """exp(logits - normalizer) [n, V/tp] for the log of the sum over the whole vocabulary [n]."""
        return self.logits(hidden, weight).sub_(normalizer[:, None]).exp_()

    def locate(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Weight row [n, 1] of each target, and whether it is one of this rank's `rows` [n, 1] (else row is any)."""
        row = (targets - self.first_row)[:, None]
        return row.clamp(0, rows - 1), (row >= 0) & (row < rows)


class _LinearLogprobs(torch.autograd.Function):
    """Saves its inputs, [T] statistics, and the last (often the only) chunk's softmax."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        positions, rows = len(hidden), len(weight)
        sums = hidden.new_empty(4, positions, dtype=_wide(hidden.dtype))
        exp = sums.new_empty(0, rows)
        for chunk in head.chunks(positions):
            del exp  # before the next chunk's logits take their place
            exp, sums[:, chunk] = _sum_rows(
                head.logits(hidden[chunk], weight), *head.locate(targets[chunk], rows), head.needs_entropy
            )
        peak, chosen, total, weighted = _sum_group(sums, head.group)
        log_total = total.log()
        logprobs = chosen - peak - log_total
        entropies = log_total - weighted / total if head.needs_entropy else torch.zeros_like(logprobs)
        if head.needs_grad:
            normalizer = peak + log_total
            last = slice(positions - len(exp), positions)
            softmax = exp.mul_((sums[0] - normalizer)[last, None].exp())
            ctx.save_for_backward(hidden, weight, targets, normalizer, entropies, softmax)
        ctx.head = head
        ctx.set_materialize_grads(False)
        if not head.needs_entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        hidden, weight, targets, normalizer, entropies, last_softmax = ctx.saved_tensors
        head, (needs_hidden, needs_weight, *_) = ctx.head, ctx.needs_input_grad
        d_logprobs, d_entropies = (None if grad is None else grad / head.temperature for grad in grads)
        slopes = _Slopes.of(d_logprobs, d_entropies, entropies)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = None
        for chunk in head.chunks(len(hidden)):
            saved = chunk.stop == len(hidden)
            softmax = last_softmax if saved else head.softmax(hidden[chunk], weight, normalizer[chunk])
            d_logits = slopes.d_logits(chunk, softmax, *head.locate(targets[chunk], len(weight)), in_place=not saved)
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if needs_weight:
                d_weight = _add_product(d_weight, d_logits.T, hidden[chunk])
            del softmax, d_logits  # before the next chunk's logits take their place
        if needs_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None


@dataclass(frozen=True)
class _Slopes:
    """The gradient of the loss in the logits is p_j (offset + factor log p_j) + [j = target] chosen; each [T]."""

    chosen: Tensor
    offset: Tensor
    factor: Tensor | None  # None: the loss does not depend on the entropies

    @classmethod
    def of(cls, d_logprobs: Tensor | None, d_entropies: Tensor | None, entropies: Tensor) -> "_Slopes":
        chosen = torch.zeros_like(entropies) if d_logprobs is None else d_logprobs
        if d_entropies is None:
            return cls(chosen, -chosen, None)
        return cls(chosen, -chosen - d_entropies * entropies, -d_entropies)

    def d_logits(self, chunk: slice, softmax: Tensor, row: Tensor, mine: Tensor, in_place: bool) -> Tensor:
        """Gradient [n, V/tp] of a chunk from its softmax [n, V/tp] and its targets' rows [n, 1]."""
        slope = self.offset[chunk, None]
        if self.factor is not None:
            tiny = torch.finfo(softmax.dtype).tiny  # 0 log 0 = 0
            slope = softmax.clamp_min(tiny).log_().mul_(self.factor[chunk, None]).add_(slope)
        d_logits = torch.mul(softmax, slope, out=softmax if in_place else None)
        return d_logits.scatter_add_(1, row, self.chosen[chunk, None] * mine)


def _sum_rows(logits: Tensor, row: Tensor, mine: Tensor, needs_entropy: bool) -> tuple[Tensor, Tensor]:
    """exp(x - m) [n, V/tp] of logits x and their largest here m, and m, x_target, sum exp(x - m), sum exp(x - m)(x - m).

    The four sums are [4, n]. A target of another rank counts 0, and so does an entropy sum not needed. Uses up `logits`.
    """
    peak = logits.amax(1)
    chosen = (logits.gather(1, row) * mine)[:, 0]
    logits.sub_(peak[:, None])
    exp = logits.exp() if needs_entropy else logits.exp_()
    weighted = logits.mul_(exp).sum(1) if needs_entropy else torch.zeros_like(peak)
    return exp, torch.stack([peak, chosen, exp.sum(1), weighted])


def _sum_group(sums: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """`_sum_rows` [4, T] of the whole vocabulary from those of each rank: two all-reduces, however many chunks."""
    if group.size() == 1 or sums.size(1) == 0:
        return sums.unbind()
    peak, chosen, total, weighted = sums.unbind()
    whole_peak = peak.clone()
    dist.all_reduce(whole_peak, dist.ReduceOp.MAX, group=group)
    lag = peak - whole_peak
    scale = lag.exp()
    parts = torch.stack([chosen, total * scale, (weighted + lag * total) * scale])
    dist.all_reduce(parts, group=group)
    return whole_peak, *parts.unbind()


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, summed in float32 or wider; in place where the dtypes allow it."""
    if total is None:
        return left @ right
    if total.dtype == left.dtype == _wide(left.dtype):
        return total.addmm_(left, right)
    return total.to(_wide(total.dtype)).add_(left @ right)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
