"""Log-probabilities, entropies and sums of squared probabilities from hidden states, with a vocabulary-parallel output layer.

The output layer, the softmax and their gradients are computed for `chunk_size` positions at a time, so at most `chunk_size` rows
of logits exist at once (as in Liger Kernel's fused linear cross-entropy, Hsu et al. 2024). The backward pass computes the logits
again (as in Cut Cross-Entropy, Wijmans et al. 2024). In addition to the inputs and their gradients, at most three float32 tensors
`[chunk_size, V/tp]` exist at a time. Without entropies, at most two such tensors exist. In this case, 16-bit inputs need an
additional 16-bit tensor of this shape. The gradient of `weight` is a sum over chunks. With several chunks, this sum is in float32
or wider.

For 16-bit inputs, a GPU returns the float32 sums of the matrix products. Other devices round these sums to 16 bits first.

Formulas for the logits x = hidden @ weight.T / temperature, with p = softmax(x) and log p_j = x_j - log sum_k exp x_k:
    entropy E = -sum_j p_j log p_j = log sum_k exp x_k - sum_j p_j x_j
    sum of squares = sum_j p_j^2 = sum_j exp(2 x_j) / (sum_k exp x_k)^2
    d log p_t / d x_j = [j = t] - p_j        d E / d x_j = -p_j (log p_j + E)
where t is the target, and [j = t] is 1 if j is the target and 0 otherwise.

In shapes, T is the number of positions, n the number of positions in a chunk, H the hidden size, and V/tp the number of
vocabulary rows on this rank.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

PADDING_LOGIT = -1e30
"""Logit of the padding rows of the vocabulary. It gives these rows probability 0, and 0 * PADDING_LOGIT is 0, not NaN."""
MAX_PRODUCT_ROWS = 8192
"""`add_product` computes at most this many rows of a matrix product at a time, and adds them to a sum of a wider dtype."""
ALIGNED_ROWS = 64
"""If a slice of the vocabulary has more rows than this, its size is rounded down to a multiple of this number.

Matrix products of such sizes are fast. A slice that contains all rows is not rounded.
"""


def linear_logprobs(  # noqa: PLR0913  terms of one formula
    hidden: Tensor,  # [T, H] any float dtype; the caller must sum the gradient of `hidden` over the group
    weight: Tensor,  # [V/tp, H] vocabulary rows of the output layer on this rank, in the dtype of `hidden`
    targets: Tensor,  # [T] token ids in the whole vocabulary
    group: ProcessGroup,
    vocab_size: int,  # number of real tokens; the rows after them are padding and have probability 0
    temperature: float = 1.0,
    chunk_size: int = 1024,  # largest number of rows of logits that exist at the same time
    needs_entropy: bool = False,
    needs_sum_pi_squared: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # log-probabilities [T], entropies [T] in nats, sums of squared probabilities [T]
    """Compute the log-probability of each target, and the entropy and the sum of squares of p.

    Here p = softmax(hidden @ weight.T / temperature), and the sum of squares is sum_j p_j^2.

    A result that is not needed is a tensor of zeros. Matrix products have factors in the dtype of the inputs. All other
    computations and the results are in float32 (float64 for float64 inputs). Log-probabilities and entropies are differentiable
    with respect to `hidden` and `weight`. All ranks of the group must pass the same number of positions, and all ranks get the
    same results.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected 1 or more, such as 1024.")
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    needs = needs_entropy, needs_sum_pi_squared, needs_grad
    head = _Head(group, group.rank() * weight.size(0), vocab_size, temperature, chunk_size, *needs)
    return _LinearLogprobs.apply(hidden, weight, targets, head)


@dataclass(frozen=True)
class OutputLayer:
    """Settings of a vocabulary-parallel output layer on this rank, without its weight [V/tp, H]."""

    group: ProcessGroup
    first_row: int  # token id of weight row 0
    vocab_size: int  # number of real tokens; weight rows of larger token ids are padding
    temperature: float
    chunk_size: int

    def chunks(self, positions: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_size, positions)) for i in range(0, positions, self.chunk_size)]

    def vocabulary_slices(self, rows: int, positions: int) -> list[tuple[slice, "OutputLayer"]]:
        """Divide this rank's `rows` weight rows into slices. Return each slice with an OutputLayer for the rows of this slice.

        Over all positions, a slice has at most `chunk_size * rows` logits. This is the number of logits that a chunk of
        positions has over all rows. Only a slice of a single row may have more logits.
        """
        size = max(1, self.chunk_size * rows // max(1, positions))
        if ALIGNED_ROWS < size < rows:
            size -= size % ALIGNED_ROWS
        slices = [slice(i, min(i + size, rows)) for i in range(0, rows, size)]
        return [(each, replace(self, first_row=self.first_row + each.start)) for each in slices]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits / temperature [n, V/tp] of hidden [n, H], in float32 or wider."""
        logits = product(hidden, weight.T)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        real_rows = self.vocab_size - self.first_row  # may be negative, or larger than the number of rows
        if real_rows < logits.size(1):
            logits[:, max(real_rows, 0) :] = PADDING_LOGIT
        return logits

    def softmax(self, hidden: Tensor, weight: Tensor, normalizer: Tensor) -> Tensor:
        """Return exp(logits - normalizer) [n, V/tp]; `normalizer` [n] is the log-sum-exp over the whole vocabulary."""
        return self.logits(hidden, weight).sub_(normalizer[:, None]).exp_()

    def locate(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return two tensors [n, 1] for targets [n]: the weight row of each target, and whether this rank has the row.

        Targets [n, k] give two tensors [n, k]. If this rank does not have the row of a target, the row index is arbitrary.
        """
        row = (targets[:, None] if targets.dim() == 1 else targets) - self.first_row
        return row.clamp(0, rows - 1), (row >= 0) & (row < rows)


@dataclass(frozen=True)
class _Head(OutputLayer):
    """Settings of the output layer, and which results the caller needs."""

    needs_entropy: bool
    needs_sum_pi_squared: bool
    needs_grad: bool


class _LinearLogprobs(torch.autograd.Function):
    """Autograd function of `linear_logprobs`.

    For the backward pass, it saves the inputs, statistics [T], and the softmax of the last chunk, which is often the only chunk.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head) -> tuple[Tensor, Tensor, Tensor]:
        positions, rows = len(hidden), len(weight)
        sums = hidden.new_empty(5, positions, dtype=accumulation_dtype(hidden.dtype))
        exp = sums.new_empty(0, rows)
        for chunk in head.chunks(positions):
            del exp  # frees the memory before the logits of the next chunk are computed
            exp, sums[:, chunk] = _row_sums(
                head.logits(hidden[chunk], weight),
                *head.locate(targets[chunk], rows),
                head.needs_entropy,
                head.needs_sum_pi_squared,
            )
        peak, chosen, total, weighted, squares = _sum_over_group(sums, head.group)
        log_total = total.log()
        logprobs = chosen - peak - log_total
        entropies = log_total - weighted / total if head.needs_entropy else torch.zeros_like(logprobs)
        sum_pi_squared = squares / total.square() if head.needs_sum_pi_squared else torch.zeros_like(logprobs)
        if head.needs_grad:
            normalizer = peak + log_total
            last = slice(positions - len(exp), positions)
            softmax = exp.mul_((sums[0] - normalizer)[last, None].exp())
            ctx.save_for_backward(hidden, weight, targets, normalizer, entropies, softmax)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*([] if head.needs_entropy else [entropies]), sum_pi_squared)
        return logprobs, entropies, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        hidden, weight, targets, normalizer, entropies, last_softmax = ctx.saved_tensors
        head, (needs_hidden, needs_weight, *_) = ctx.head, ctx.needs_input_grad
        d_logprobs, d_entropies = (None if grad is None else grad / head.temperature for grad in grads[:2])
        logit_gradient = _LogitGradient.of(d_logprobs, d_entropies, entropies)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = None
        for chunk in head.chunks(len(hidden)):
            saved = chunk.stop == len(hidden)
            softmax = last_softmax if saved else head.softmax(hidden[chunk], weight, normalizer[chunk])
            d_logits = logit_gradient.d_logits(
                chunk, softmax, *head.locate(targets[chunk], len(weight)), in_place=not saved
            )
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if needs_weight:
                d_weight = add_product(d_weight, d_logits.T, hidden[chunk])
            del softmax, d_logits  # frees the memory before the logits of the next chunk are computed
        if needs_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None


@dataclass(frozen=True)
class _LogitGradient:
    """Terms [T] of the gradient with respect to logit x_j.

    The gradient is p_j * (offset + factor * log p_j) + [j = target] * chosen.
    """

    chosen: Tensor
    offset: Tensor
    factor: Tensor | None  # None: the loss does not depend on the entropies

    @classmethod
    def of(cls, d_logprobs: Tensor | None, d_entropies: Tensor | None, entropies: Tensor) -> "_LogitGradient":
        chosen = torch.zeros_like(entropies) if d_logprobs is None else d_logprobs
        if d_entropies is None:
            return cls(chosen, -chosen, None)
        return cls(chosen, -chosen - d_entropies * entropies, -d_entropies)

    def d_logits(self, chunk: slice, softmax: Tensor, row: Tensor, is_local: Tensor, in_place: bool) -> Tensor:
        """Return the gradient [n, V/tp] of a chunk from its softmax [n, V/tp] and the rows of its targets [n, 1]."""
        slope = self.offset[chunk, None]
        if self.factor is not None:
            tiny = torch.finfo(softmax.dtype).tiny  # makes 0 * log 0 equal to 0
            slope = softmax.clamp_min(tiny).log_().mul_(self.factor[chunk, None]).add_(slope)
        d_logits = torch.mul(softmax, slope, out=softmax if in_place else None)
        return d_logits.scatter_add_(1, row, self.chosen[chunk, None] * is_local)


def _row_sums(
    logits: Tensor, row: Tensor, is_local: Tensor, needs_entropy: bool, needs_squares: bool
) -> tuple[Tensor, Tensor]:
    """Return exp(x - m) [n, V/tp] for logits x with row maximum m on this rank, and five statistics [5, n].

    The statistics are m, x_target, and the sums of exp(x - m), of exp(x - m)(x - m) and of exp(x - m)^2. x_target is 0 if another
    rank has the target. The last two sums are 0 if they are not needed. The function overwrites `logits`.
    """
    peak = logits.amax(1)
    chosen = (logits.gather(1, row) * is_local)[:, 0]
    logits.sub_(peak[:, None])
    exp = logits.exp() if needs_entropy else logits.exp_()
    weighted = logits.mul_(exp).sum(1) if needs_entropy else torch.zeros_like(peak)
    squares = torch.linalg.vector_norm(exp, dim=1).square() if needs_squares else torch.zeros_like(peak)
    return exp, torch.stack([peak, chosen, exp.sum(1), weighted, squares])


def _sum_over_group(sums: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
    """Combine the statistics [5, T] of `_row_sums` over all ranks. This needs two all-reduces for any number of chunks."""
    if group.size() == 1 or sums.size(1) == 0:
        return sums.unbind()
    peak, chosen, total, weighted, squares = sums.unbind()
    whole_peak = peak.clone()
    dist.all_reduce(whole_peak, dist.ReduceOp.MAX, group=group)
    difference = peak - whole_peak
    scale = difference.exp()
    parts = [chosen, total * scale, (weighted + difference * total) * scale, squares * scale.square()]
    parts = torch.stack(parts)
    dist.all_reduce(parts, group=group)
    return whole_peak, *parts.unbind()


def add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right in float32 or wider. Overwrites `total` if the dtypes allow it.

    If `total` is None, the result has the dtype of the factors.

    For 16-bit factors, at most MAX_PRODUCT_ROWS rows of the product exist in float32 at a time.
    """
    if total is None:
        return left @ right
    if total.dtype == left.dtype == accumulation_dtype(left.dtype):
        return total.addmm_(left, right)
    total = total.to(accumulation_dtype(total.dtype))
    for start in range(0, len(total), MAX_PRODUCT_ROWS):
        rows = slice(start, start + MAX_PRODUCT_ROWS)
        total[rows].add_(product(left[rows], right))
    return total


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product left @ right in float32 or wider."""
    wide = accumulation_dtype(left.dtype)
    if left.dtype != wide and returns_float32_products(left.device):
        return torch.mm(left, right, out_dtype=wide)
    return (left @ right).to(wide)


def returns_float32_products(device: torch.device) -> bool:
    """Whether torch has a kernel for this device that multiplies 16-bit matrices and returns the sums in float32."""
    return device.type == "cuda" and "dtype" in torch.ops.aten.mm.overloads()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
