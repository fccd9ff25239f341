"""Computes divergences between a teacher and a student from their hidden states, with vocabulary-parallel output layers.

A model's distribution is softmax(hidden @ weight.T / temperature). The student's distribution is called s, and the teacher's t.
Student and teacher have the same vocabulary, but their hidden sizes may differ.

`linear_divergence` compares the distributions over the whole vocabulary. Three functions together compare k + 1 probabilities:
- `linear_top_k` computes the teacher's k most probable tokens.
- `linear_top_k_rest_logprobs` computes the student's log-probabilities of these tokens.
- `divergence_of` compares the probabilities of the k tokens, and the probability of all other tokens together.
The divergence of the k + 1 probabilities is at most the divergence over the whole vocabulary (data-processing inequality). If k
is V, the size of the vocabulary, the two are equal, except for the lower bound MIN_REST_PROB of the last probability.

As in parallel.logprobs, at most a few chunks of logits exist at a time, and the backward pass computes the logits again.
`linear_divergence` computes the logits of two models, so it halves the number of positions in a chunk. In addition to the inputs
and their gradients, at most five tensors [chunk_size / 2, V/tp] exist at a time. These tensors are in float32 (float64 for
float64 inputs). For 16-bit inputs, there is also a 16-bit tensor of this shape. No tensor [T, V/tp] is saved for the
backward pass.

The backward pass of `linear_divergence` divides the vocabulary instead of the positions: it computes the logits of all positions
for one slice of the vocabulary at a time. One matrix product over all positions then gives the gradient of the slice's weight
rows, so the gradient of `weight` needs no sum over chunks. (A sum over chunks would be in float32. For 16-bit inputs, it would
need twice as many bytes as the student's output layer.) Only the gradient of `hidden`, which is much smaller, is summed over the
slices.

Each divergence has the form D = sum_j F_j, where F_j depends on t_j and s_j. With u_j = s_j dF_j/ds_j (`slopes` in the code), the
gradient of D with respect to a student's logit x_j is

    dD / dx_j = u_j - s_j sum_k u_k

With m_j = beta t_j + (1 - beta) s_j, where beta is a parameter of js (see Divergence), the terms of the three divergences are

                F_j                                                       u_j, up to a constant times s_j
    forward_kl  t_j log(t_j / s_j)                                        -t_j
    reverse_kl  s_j log(s_j / t_j)                                        s_j log(s_j / t_j)
    js          beta t_j log(t_j / m_j) + (1 - beta) s_j log(s_j / m_j)   (1 - beta) s_j log(s_j / m_j)

Adding a constant times s_j to u_j does not change the gradient, because the s_j sum to 1.

In shapes, T is the number of positions, n the number of positions in a chunk, H and H_t the hidden sizes of student and teacher,
and V/tp the number of vocabulary rows on this rank.
"""

from math import log

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from parallel.logprobs import OutputLayer, accumulation_dtype, add_product
from parallel.trainer_config import MIN_REST_PROB, Divergence, DivergenceKind


def linear_divergence(  # noqa: PLR0913  terms of one formula
    hidden: Tensor,  # [T, H] any float dtype; the caller must sum the gradient of `hidden` over the group
    weight: Tensor,  # [V/tp, H] vocabulary rows of the output layer on this rank, in the dtype of `hidden`
    teacher_hidden: Tensor,  # [T, H_t] any float dtype; gets no gradient
    teacher_weight: Tensor,  # [V/tp, H_t] the same rows of the teacher's output layer, in the dtype of `teacher_hidden`
    group: ProcessGroup,
    vocab_size: int,  # number of real tokens; the rows after them are padding and have probability 0
    divergence: Divergence,
    temperature: float = 1.0,
    chunk_size: int = 1024,  # limits the logits in memory to this many rows, half of them of each model
) -> Tensor:  # [T] in nats
    """Compute the divergence between teacher and student over the whole vocabulary at each position.

    The result is in float32 (float64 for float64 inputs), and differentiable with respect to `hidden` and `weight`. All ranks of
    the group must pass the same number of positions, and all ranks get the same result.
    """
    chunk_size = max(1, chunk_size // 2)
    layer = OutputLayer(group, group.rank() * weight.size(0), vocab_size, temperature, chunk_size)
    return _LinearDivergence.apply(hidden, weight, teacher_hidden, teacher_weight, layer, divergence)


class _LinearDivergence(torch.autograd.Function):
    """Autograd function of `linear_divergence`.

    For the backward pass, it saves the inputs and statistics [T]: log sum_j exp x_j of both models (the normalizers), and the sum
    of u_j.
    """

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, layer: OutputLayer, divergence: Divergence):
        normalizers = hidden.new_empty(2, len(hidden), dtype=accumulation_dtype(hidden.dtype))
        sums = torch.empty_like(normalizers)
        for chunk in layer.chunks(len(hidden)):
            logits_t = layer.logits(teacher_hidden[chunk], teacher_weight).to(sums.dtype)
            logits_s = layer.logits(hidden[chunk], weight)
            normalizers[:, chunk] = _log_sums((logits_t, logits_s), layer.group)
            norm_t, norm_s = normalizers[:, chunk, None]
            log_t, log_s = logits_t.sub_(norm_t), logits_s.sub_(norm_s)
            terms, slopes = _terms(divergence, log_t, log_s, log_s.exp())
            sums[:, chunk] = torch.stack([terms.sum(1), slopes.sum(1)])
            del logits_t, logits_s, log_t, log_s, terms, slopes  # frees the memory before the logits of the next chunk
        _all_reduce(sums, layer.group)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, normalizers, sums[1])
        ctx.layer, ctx.divergence = layer, divergence
        return sums[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight, teacher_hidden, teacher_weight, normalizers, slope_sums = ctx.saved_tensors
        layer, (needs_hidden, needs_weight, *_) = ctx.layer, ctx.needs_input_grad
        norm_t, norm_s = normalizers[..., None]
        grad, slope_sums = (grad / layer.temperature)[:, None], slope_sums[:, None]
        d_hidden, d_weight = None, torch.empty_like(weight) if needs_weight else None
        for rows, part in layer.vocabulary_slices(len(weight), len(hidden)):
            log_t = part.logits(teacher_hidden, teacher_weight[rows]).to(grad.dtype).sub_(norm_t)
            log_s = part.logits(hidden, weight[rows]).sub_(norm_s)
            s = log_s.exp()
            d_logits = _slopes(ctx.divergence, log_t, log_s, s)
            del log_t, log_s
            d_logits = d_logits.sub_(s.mul_(slope_sums)).mul_(grad).to(weight.dtype)
            del s
            if needs_hidden:
                d_hidden = add_product(d_hidden, d_logits, weight[rows])
            if d_weight is not None:
                torch.mm(d_logits.T, hidden, out=d_weight[rows])
            del d_logits
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def divergence_of(divergence: Divergence, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Return the divergence [T] of distributions over K events from log-probabilities [T, K]. Differentiable in `log_s`."""
    detached = log_s.detach()
    terms, slopes = _terms(divergence, log_t.clone(), detached.clone(), detached.exp())
    return terms.sum(1) + (slopes * (log_s - detached)).sum(1)


def _terms(divergence: Divergence, log_t: Tensor, log_s: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return F_j and u_j (see the docstring of the module), in the shape of the arguments.

    Each row of an argument is a distribution or a part of a distribution. `s` is exp(log_s). The function overwrites `log_t` and
    `log_s`.
    """
    if divergence.kind == DivergenceKind.forward_kl:
        t = log_t.exp()
        return log_s.neg_().add_(log_t).mul_(t), t.neg_()
    slopes = _slopes(divergence, log_t, log_s, s)
    if divergence.kind == DivergenceKind.reverse_kl:
        return slopes, slopes
    # _slopes has overwritten log_s with log m, and log_t with log(beta t).
    log_m, log_beta = log_s, log(divergence.beta)
    weighted_t = log_t.exp()
    return log_t.sub_(log_m).sub_(log_beta).mul_(weighted_t).add_(slopes), slopes


def _slopes(divergence: Divergence, log_t: Tensor, log_s: Tensor, s: Tensor) -> Tensor:
    """Return u_j. The function may overwrite `log_t` and `log_s`. For js, they become log(beta t_j) and log m_j."""
    if divergence.kind == DivergenceKind.forward_kl:
        return log_t.exp_().neg_()
    if divergence.kind == DivergenceKind.reverse_kl:
        return log_t.neg_().add_(log_s).mul_(s)
    beta, slopes = divergence.beta, log_s.clone()
    log_t.add_(log(beta))
    torch.logaddexp(log_s.add_(log(1 - beta)), log_t, out=log_s)
    return slopes.sub_(log_s).mul_(s).mul_(1 - beta)


def linear_top_k(
    hidden: Tensor,  # [T, H] any float dtype
    weight: Tensor,  # [V/tp, H] vocabulary rows on this rank, in the dtype of `hidden`
    group: ProcessGroup,
    vocab_size: int,  # number of real tokens
    k: int,  # 1 to vocab_size
    temperature: float = 1.0,
    chunk_size: int = 1024,  # largest number of rows of logits that exist at the same time
) -> tuple[Tensor, Tensor]:  # log-probabilities [T, k + 1], token ids [T, k] int64
    """Compute the k most probable tokens at each position, the most probable first, and their log-probabilities.

    The last column of the log-probabilities belongs to all other tokens together, as in `linear_top_k_rest_logprobs`. The results
    have no gradient.
    """
    layer = OutputLayer(group, group.rank() * weight.size(0), vocab_size, temperature, chunk_size)
    result = hidden.new_empty(len(hidden), k + 1, dtype=accumulation_dtype(hidden.dtype))
    ids = hidden.new_empty(len(hidden), k, dtype=torch.int64)
    with torch.no_grad():
        for chunk in layer.chunks(len(hidden)):
            logits = layer.logits(hidden[chunk], weight)
            logits.sub_(_log_sums((logits,), group)[0, :, None])
            best, rows = logits.topk(min(k, len(weight)), dim=1)
            best, candidates = _gather_columns(best, group), _gather_columns(rows + layer.first_row, group)
            ids[chunk] = candidates.gather(1, best.topk(k, dim=1).indices)
            result[chunk] = _local_summand(layer, logits, ids[chunk])
            del logits
        _all_reduce(result, group)
        result[:, k].clamp_(min=MIN_REST_PROB).log_()
    return result, ids


def linear_top_k_rest_logprobs(
    hidden: Tensor,  # [T, H] any float dtype; the caller must sum the gradient of `hidden` over the group
    weight: Tensor,  # [V/tp, H] vocabulary rows on this rank, in the dtype of `hidden`
    ids: Tensor,  # [T, k] token ids; a row contains no token id twice
    group: ProcessGroup,
    vocab_size: int,  # number of real tokens
    temperature: float = 1.0,
    chunk_size: int = 1024,  # largest number of rows of logits that exist at the same time
) -> Tensor:  # [T, k + 1]
    """Compute the log-probabilities of k tokens. The last column is the log-probability of all other tokens together.

    If the probability of the other tokens is below MIN_REST_PROB, the function uses MIN_REST_PROB. The result is in float32
    (float64 for float64 inputs), and differentiable with respect to `hidden` and `weight`.
    """
    layer = OutputLayer(group, group.rank() * weight.size(0), vocab_size, temperature, chunk_size)
    return _LinearTopKRest.apply(hidden, weight, ids, layer)


class _LinearTopKRest(torch.autograd.Function):
    """Autograd function of `linear_top_k_rest_logprobs`.

    For the backward pass, it saves the inputs, normalizers [T] and the probabilities [T, k + 1]. Let r be the probability of all
    other tokens together, and g_i and g_r the gradients of the loss with respect to log s_i and log r, where i is one of the k
    tokens. The gradient of the loss with respect to the logit x_j is then

        if j is one of the k tokens:  g_j - s_j (sum_i g_i + g_r)
        if j is another token:        s_j (g_r / r - sum_i g_i - g_r)
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, ids: Tensor, layer: OutputLayer) -> Tensor:
        k = ids.size(1)
        normalizers = hidden.new_empty(len(hidden), dtype=accumulation_dtype(hidden.dtype))
        result = normalizers.new_empty(len(hidden), k + 1)
        for chunk in layer.chunks(len(hidden)):
            logits = layer.logits(hidden[chunk], weight)
            (normalizers[chunk],) = _log_sums((logits,), layer.group)
            result[chunk] = _local_summand(layer, logits.sub_(normalizers[chunk, None]), ids[chunk])
            del logits
        _all_reduce(result, layer.group)
        rest = result[:, k].clone()
        result[:, k].clamp_(min=MIN_REST_PROB).log_()
        ctx.save_for_backward(hidden, weight, ids, normalizers, result[:, :k].exp(), rest)
        ctx.layer = layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        hidden, weight, ids, normalizers, probs_of_ids, rest = ctx.saved_tensors
        layer, (needs_hidden, needs_weight, *_) = ctx.layer, ctx.needs_input_grad
        k = ids.size(1)
        grad = grad / layer.temperature
        grad_rest = grad[:, k] * (rest >= MIN_REST_PROB)  # below MIN_REST_PROB, the result is constant
        total, per_rest = grad[:, :k].sum(1) + grad_rest, grad_rest / rest.clamp(min=MIN_REST_PROB)
        at_ids = grad[:, :k] - probs_of_ids * per_rest[:, None]
        d_hidden, d_weight = torch.empty_like(hidden) if needs_hidden else None, None
        for chunk in layer.chunks(len(hidden)):
            probs = layer.softmax(hidden[chunk], weight, normalizers[chunk])
            row, is_local = layer.locate(ids[chunk], len(weight))
            d_logits = probs.mul_((per_rest - total)[chunk, None]).scatter_add_(1, row, at_ids[chunk] * is_local)
            d_logits = d_logits.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[chunk])
            if needs_weight:
                d_weight = add_product(d_weight, d_logits.T, hidden[chunk])
            del probs, d_logits
        if needs_weight:
            d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None


def _local_summand(layer: OutputLayer, logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return this rank's summand of [n, k + 1] numbers. The caller sums them over the ranks.

    The sums are the log-probabilities of the tokens `ids` [n, k], and then the probability (not its logarithm) of all other
    tokens. `logprobs` [n, V/tp] are the log-probabilities of this rank's tokens. The function overwrites them.
    """
    row, is_local = layer.locate(ids, logprobs.size(1))
    chosen = logprobs.gather(1, row) * is_local
    probs = logprobs.exp_()
    probs.scatter_add_(1, row, -probs.gather(1, row) * is_local)  # exactly 0 for the k tokens
    return torch.cat([chosen, probs.sum(1, keepdim=True)], 1)


def _log_sums(logits: tuple[Tensor, ...], group: ProcessGroup) -> Tensor:
    """Return log sum_j exp x_j over the whole vocabulary for several tensors x [n, V/tp], as one tensor [len(logits), n]."""
    local = torch.stack([each.logsumexp(1) for each in logits])
    if group.size() == 1:
        return local
    peak = local.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    total = (local - peak).exp_()
    dist.all_reduce(total, group=group)
    return total.log_().add_(peak)


def _all_reduce(values: Tensor, group: ProcessGroup) -> None:
    if group.size() > 1 and values.numel():
        dist.all_reduce(values, group=group)


def _gather_columns(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the columns [n, m] of all ranks side by side: [n, tp * m]."""
    if group.size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
