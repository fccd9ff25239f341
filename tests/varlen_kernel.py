"""CPU stand-in for torch's attention kernel for sequences of variable length."""

from itertools import pairwise

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
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous()
    assert window_size[1] == 0, "causal, aligned at the last query and the last key"
    repeat = query.size(1) // key.size(1)
    assert enable_gqa or repeat == 1
    with torch._C.DisableTorchFunction():  # hidden from HostWaits: the CUDA kernel reads these numbers on the GPU
        spans = [list(pairwise(bounds.tolist())) for bounds in (cu_seq_q, cu_seq_k)]
    assert [max(end - start for start, end in part) for part in spans] == [max_q, max_k]
    key, value = (x.repeat_interleave(repeat, dim=1) for x in (key, value))
    out = []
    for (first_query, last_query), (first_key, last_key) in zip(*spans, strict=True):
        q, k, v = query[first_query:last_query], key[first_key:last_key], value[first_key:last_key]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        if window_size[0] >= 0:
            mask = mask.triu(len(k) - len(q) - window_size[0])
        scores = torch.einsum("qnd,knd->nqk", q, k) * scale
        out.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v))
    return torch.cat(out)
