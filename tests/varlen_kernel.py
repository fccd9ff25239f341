"""CPU stand-ins for torch's attention kernels for sequences of variable length."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def varlen_attn(  # noqa: PLR0913  the signature of torch
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Return the result of `torch.nn.attention.varlen.varlen_attn`, and check the arguments as its CUDA kernel does."""
    assert query.size(2) == key.size(2) and key.shape == value.shape, "all heads have the same number of channels"
    assert window_size[1] == 0, "causal, aligned at the last query and the last key"
    repeat = query.size(1) // key.size(1)
    assert enable_gqa or repeat == 1
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    out = []
    for queries, keys in _spans(cu_seq_q, cu_seq_k, max_q, max_k):
        scores = _scores(query[queries], key[keys], scale, window_size)
        out.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), value[keys]))
    return torch.cat(out)


def _spans(cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous()
    with torch._C.DisableTorchFunction():  # hidden from HostWaits: the CUDA kernel reads these numbers on the GPU
        spans = [[slice(*pair) for pair in pairwise(bounds.tolist())] for bounds in (cu_seq_q, cu_seq_k)]
    assert [max(span.stop - span.start for span in part) for part in spans] == [max_q, max_k]
    return zip(*spans, strict=True)


def _scores(q: Tensor, k: Tensor, scale: float, window_size: Any) -> Tensor:
    """Return the logits [n, queries, keys] of a sequence; those of keys that a query does not see are -inf."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    if window_size[0] >= 0:
        mask = mask.triu(len(k) - len(q) - window_size[0])
    return (torch.einsum("qnd,knd->nqk", q, k) * scale).masked_fill(~mask, float("-inf"))


def sink_kernels() -> tuple[Any, Any]:
    """Return stand-ins for the kernels `torch_attn::_varlen_attn` and `torch_attn::_varlen_attn_backward`.

    As the CUDA kernels, the second one computes the weights from `lse`, and the sum of gradient times output from `out`.
    """

    def forward(query, key, value, *arguments):
        cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, enable_gqa = arguments
        assert window_size[1] == 0 and is_causal == (window_size[0] < 0) and enable_gqa
        key, value = (x.repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (key, value))
        out, lse = [], []
        for queries, keys in _spans(cu_seq_q, cu_seq_k, max_q, max_k):
            scores = _scores(query[queries], key[keys], scale, window_size)
            lse.append(scores.logsumexp(-1))
            out.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1), value[keys]))
        return torch.cat(out), torch.cat(lse, 1), torch.empty(0)

    def backward(grad, query, key, value, out, lse, *arguments):
        cu_seq_q, cu_seq_k, max_q, max_k, is_causal, _, scale, window_size = arguments
        assert grad.is_contiguous() and is_causal == (window_size[0] < 0)
        groups = key.size(1)
        key, value = (x.repeat_interleave(query.size(1) // groups, dim=1) for x in (key, value))
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for queries, keys in _spans(cu_seq_q, cu_seq_k, max_q, max_k):
            q, k, v, g = query[queries], key[keys], value[keys], grad[queries]
            weights = (_scores(q, k, scale, window_size) - lse[:, queries, None]).exp()
            product = (g * out[queries]).sum(-1).t().unsqueeze(-1)
            of_scores = weights * (torch.einsum("qnd,knd->nqk", g, v) - product) * scale
            grads[0][queries] += torch.einsum("nqk,knd->qnd", of_scores, k)
            grads[1][keys] += torch.einsum("nqk,qnd->knd", of_scores, q)
            grads[2][keys] += torch.einsum("nqk,qnd->knd", weights, g)
        of_groups = [x.unflatten(1, (groups, -1)).sum(2) for x in grads[1:]]
        return grads[0], *of_groups

    return forward, backward
