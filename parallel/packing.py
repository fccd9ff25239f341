"""Ragged batches: many sequences laid end to end in one row of tokens, no padding. Pure: no torch.distributed.

Shapes: S tokens in the pack, n sequences; `cu_seqlens` [n+1] holds the running sum of lengths, starting at 0.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with what our CPU modules read from it."""

    runs: tuple[tuple[int, int], ...] = ()  # (sequences, length) of consecutive sequences of equal length
    position_ids: Tensor | None = None  # [S] position of each token inside its own sequence


def pack(lengths: list[int], device: torch.device) -> PackedSequences:
    """Describe a pack of sequences with these `lengths` (tokens each, in order)."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a pack needs at least one sequence and no empty one, got lengths {lengths[:8]}.")
    sizes = torch.tensor(lengths)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), sizes)
    cu_seqlens = cu_seqlens.to(device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        runs=tuple((sum(1 for _ in run), length) for length, run in groupby(lengths)),
        position_ids=(torch.arange(len(starts)) - starts).to(device),
    )
