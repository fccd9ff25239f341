"""A trainer rank's part in bringing weights to the engines: lay out, hash, send, wait for acknowledgements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import xxhash
import zstandard
from torch import Tensor

from mrl.weight_sync.control_channel import ControlChannel
from mrl.weight_sync.transfer_plan import Bucket, TensorChunk
from mrl.weight_sync.transports import NUM_SLOTS, SendEnd

# FROM: What a bucket's bytes are: pieces laid out flat, hashed, and optionally encoded as the difference from the last version.

ENGINE_PATIENCE = 3
"""Times the deadline of a sender's wait: how long an engine waits for a bucket. A sender may first wait for another engine."""


@dataclass
class SendStats:
    """What one push was from this rank."""

    payload_bytes: int = 0  # over all who got them
    raw_bytes: int = 0  # the same, had nothing been compressed
    messages: int = 0
    waited_s: float = 0.0  # for acknowledgements


@dataclass
class BucketSender:
    """One trainer rank. Engine ranks that fail on the way, or do not acknowledge in time, are left out of the push."""

    channel: ControlChannel
    outlet: SendEnd
    buckets: Sequence[Bucket]
    delta: bool = False
    _before: dict[int, Tensor] = field(default_factory=dict)  # bucket number -> bytes sent last, kept for differences
    _dead: set[int] = field(default_factory=set)

    def push(self, push: str, tensor_of: Callable[[TensorChunk], Tensor], full: bool) -> SendStats:
        """Send every bucket of this rank's weights; `full`: as it is, not as a difference from the last push."""
        sent, self._dead = SendStats(), set()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.number >= NUM_SLOTS:
                    self._finish(push, self.buckets[bucket.number - NUM_SLOTS], sent)
                self._send(push, bucket, tensor_of, full, sent)
        for bucket in self.buckets[-NUM_SLOTS:]:
            self._finish(push, bucket, sent)
        return sent

    def _send(
        self, push: str, bucket: Bucket, tensor_of: Callable[[TensorChunk], Tensor], full: bool, sent: SendStats
    ) -> None:
        slot = self.outlet.slots[bucket.number % NUM_SLOTS]
        checksums = fill(slot, bucket, tensor_of)
        nbytes, encoding = bucket.nbytes, "raw"
        if self.delta:
            now = slot[:nbytes].cpu().clone()
            packed = None if full else encode(now, self._before[bucket.number], bucket)
            self._before[bucket.number] = now
            if packed is not None:
                nbytes, encoding = len(packed), "delta"
                slot[:nbytes].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        alive = [rank for rank in bucket.audience if rank not in self._dead]
        # First: NCCL's first send to a rank blocks until that rank receives, which it does when it has the header.
        self.channel.put(f"{push}/bucket/{bucket.key}", BucketHeader(nbytes, checksums, encoding))
        self.outlet.send(bucket.number, nbytes, alive)
        sent.payload_bytes += nbytes * len(alive)
        sent.raw_bytes += bucket.nbytes * len(alive)
        sent.messages += len(alive)

    def _finish(self, push: str, bucket: Bucket, sent: SendStats) -> None:
        """Wait until everyone has copied the bucket out of its slot."""
        start = time.perf_counter()
        for rank in bucket.audience:
            if rank not in self._dead and not self.channel.arrives(ack(push, bucket, rank), dead(push, rank)):
                self._dead.add(rank)
        self.channel.drop([f"{push}/bucket/{bucket.key}", *(ack(push, bucket, rank) for rank in bucket.audience)])
        sent.waited_s += time.perf_counter() - start


def ack(push: str, bucket: Bucket, engine_rank: int) -> str:
    """Key under which an engine rank says that it has copied a bucket."""
    return f"{push}/ack/{bucket.key}/{engine_rank}"


def dead(push: str, engine_rank: int) -> str:
    """Key under which it is said why an engine rank takes no further part."""
    return f"{push}/dead/{engine_rank}"


ZSTD_LEVEL = 1  # of 22; higher ones take longer than they save on a network


@dataclass(frozen=True)
class BucketHeader:
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


def fill(flat: Tensor, bucket: Bucket, tensor_of: Callable[[TensorChunk], Tensor]) -> tuple[int, ...]:
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
