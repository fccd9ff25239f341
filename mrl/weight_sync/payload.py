"""What a bucket's bytes are: pieces laid out flat, hashed, and optionally encoded as the difference from the last version.

A difference is the bitwise XOR with the bytes sent before, its bytes grouped by significance (a weight that moves a little
changes its low bytes only), compressed by Zstandard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
import zstandard
from torch import Tensor

from mrl.weight_sync.plan import Bucket, Piece

ZSTD_LEVEL = 1  # of 22; higher ones take longer than they save on a network


@dataclass(frozen=True)
class Header:
    """What a receiver is told of a bucket."""

    nbytes: int  # on the way
    checksums: tuple[int, ...]  # of each piece, as it should be in the engine
    encoding: Literal["raw", "delta"] = "raw"


def views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """The pieces of a bucket laid out in `flat` (bytes), each in its own dtype and shape."""
    return [
        flat[start : start + piece.nbytes].view(getattr(torch, piece.dtype)).view(piece.box.sizes)
        for piece, start in zip(bucket.pieces, bucket.offsets, strict=False)
    ]


def fill(flat: Tensor, bucket: Bucket, tensor_of: Callable[[Piece], Tensor]) -> tuple[int, ...]:
    """Lay the pieces out in `flat`, cast to the engine's dtype; returns their checksums."""
    checksums = []
    for piece, place in zip(bucket.pieces, views(flat, bucket), strict=True):
        place.copy_(tensor_of(piece))
        checksums.append(checksum(place))
    return tuple(checksums)


def checksum(tensor: Tensor) -> int:
    """64-bit hash of a tensor's bytes, the same on both sides of a sync: XXH3 on a CPU, a weighted sum on a GPU."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return _weighted_sum(data) if data.is_cuda else xxhash.xxh3_64_intdigest(memoryview(data.numpy()))


def _weighted_sum(data: Tensor) -> int:
    """Sum of the bytes' 4-byte words (the last one filled up), each times an odd number of its place, and of their number,
    modulo 2**64."""
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + chunk.numel(), device=data.device)
        total += (chunk * ((place * _ODD) ^ (place >> 7)).mul_(2).add_(1)).sum()
    return int(total.item()) & (2**64 - 1)


_CHUNK, _ODD = 1 << 24, 0x9E3779B97F4A7C15 - 2**64  # the golden ratio's 64 bits, as int64 spells them


def encode(new: Tensor, old: Tensor, bucket: Bucket) -> bytes | None:
    """The difference of two layouts of a bucket, compressed; None where that saves nothing. [nbytes] uint8 on a CPU, both."""
    planes = torch.cat([plane for part, width in _parts(new ^ old, bucket) for plane in part.view(-1, width).T])
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(memoryview(planes.numpy()))
    return packed if len(packed) < new.numel() else None


def decode(packed: Tensor, bucket: Bucket) -> Tensor:
    """The XOR that `encode` compressed, laid out as the bucket; [nbytes] uint8."""
    data = zstandard.ZstdDecompressor().decompress(memoryview(packed.cpu().numpy()), max_output_size=bucket.nbytes)
    planes, result = torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.zeros(bucket.nbytes, dtype=torch.uint8)
    start = 0
    for part, width in _parts(result, bucket):
        part.view(-1, width).copy_(planes[start : start + part.numel()].view(width, -1).T)
        start += part.numel()
    return result


def _parts(flat: Tensor, bucket: Bucket) -> list[tuple[Tensor, int]]:
    """(bytes of a piece, bytes of one of its numbers)."""
    return [(flat[s : s + p.nbytes], p.itemsize) for s, p in zip(bucket.offsets, bucket.pieces, strict=False)]
