"""Random numbers that follow from a request's own seed, for SGLang on a CPU: its hash there is part of another package."""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bits) of the 16 bytes (seed, position, column), as SGLang's GPU kernel computes it.

    seed [N] 64 bits, positions [N] and col_indices [V] 32 bits; returns [N, V] int64 from 0 to 2**32 - 1.
    """
    seed_N, positions_N = seed.view(torch.int64), positions.to(torch.int64) & _LOW
    hash_N = torch.zeros_like(positions_N)
    for block_N in (seed_N & _LOW, (seed_N >> 32) & _LOW, positions_N):
        hash_N = _mix(hash_N, block_N)
    return _finish(_mix(hash_N[:, None], col_indices.to(torch.int64)[None, :]))


def _mix(state: Tensor, block: Tensor) -> Tensor:
    """Take 4 bytes into the state; products wrap, and their low 32 bits are right."""
    block = _rotate((block * 0xCC9E2D51) & _LOW, 15)
    return (_rotate(state ^ ((block * 0x1B873593) & _LOW), 13) * 5 + 0xE6546B64) & _LOW


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW


def _finish(state: Tensor) -> Tensor:
    state = state ^ 16  # bytes that were hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW
    return state ^ (state >> 16)
