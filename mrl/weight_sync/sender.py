"""Sender: sends the buckets of a trainer rank and waits for acknowledgements.

With weight_sync.delta, a bucket is sent as its difference from the last push: the bitwise XOR of the new and the old bytes. The
bytes of the difference are grouped by significance, because a small change of a weight changes only its low bytes. Then
Zstandard compresses them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
import zstandard
from torch import Tensor

from models.conversion.mapping import Box
from mrl.weight_sync.control_channel import ControlChannel, ack_key, chain_header_key, failure_key, header_key
from mrl.weight_sync.transfer_plan import Bucket, RelayStep
from mrl.weight_sync.transports import NUM_TRANSFER_BUFFERS, SendEndpoint
from parallel.spans import span

ZSTD_LEVEL = 1  # the lowest of 22 levels; a higher level takes more time than it saves on a network
_BLOCK_WORDS = 1 << 18  # number of 4-byte words in a block of the checksum that a GPU computes
_BLOCKS_AT_ONCE = 32  # number of blocks that a GPU hashes at once; this needs twice the memory of these blocks
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64  # the 64-bit golden-ratio constant, as an int64

ReadTensor = Callable[[str, Box], Tensor]
"""Function that takes the name of a Hugging Face tensor and a box. It returns the values in this box of the tensor.

The trainer rank that calls the function must have these values.
"""


@dataclass(frozen=True)
class BucketHeader:
    """Description of a bucket. Receivers read the header before they receive the bucket."""

    nbytes: int  # number of sent bytes
    checksums: tuple[int, ...]  # checksum of the new values of each chunk
    encoding: Literal["raw", "delta"] = "raw"


@dataclass
class SendStats:
    """Traffic and waiting time of one trainer rank in one push."""

    sent_bytes: int = 0  # summed over receivers
    uncompressed_bytes: int = 0  # as `sent_bytes`, but before compression
    messages: int = 0  # number of sent buckets, summed over receivers
    waited_s: float = 0.0  # seconds of waiting for acknowledgements


@dataclass
class BucketSender:
    """Sends the buckets of one trainer rank. An engine rank that fails or acknowledges too late is excluded from the push."""

    channel: ControlChannel
    send_endpoint: SendEndpoint
    buckets: Sequence[Bucket]
    delta: bool = False  # send differences from the last push
    _last_sent: dict[int, Tensor] = field(default_factory=dict)  # Bucket.index -> bytes of the bucket in the last push
    _failed: set[int] = field(default_factory=set)  # engine ranks that are excluded from the push

    def send_all(self, push_name: str, read: ReadTensor, full: bool) -> SendStats:
        """Send every bucket. If `full` is true, send the weights themselves, not their difference from the last push."""
        stats, self._failed = SendStats(), set()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.index >= NUM_TRANSFER_BUFFERS:
                    self._wait_acks(push_name, self.buckets[bucket.index - NUM_TRANSFER_BUFFERS], stats)
                with span("send bucket", "weight_sync", bucket=bucket.index, bytes=bucket.nbytes):
                    self._send(push_name, bucket, read, full, stats)
        for bucket in self.buckets[-NUM_TRANSFER_BUFFERS:]:
            self._wait_acks(push_name, bucket, stats)
        return stats

    def _send(self, push_name: str, bucket: Bucket, read: ReadTensor, full: bool, stats: SendStats) -> None:
        buffer = self.send_endpoint.transfer_buffers[bucket.index % NUM_TRANSFER_BUFFERS]
        checksums = fill_buffer(buffer, bucket, read)
        nbytes, encoding = bucket.nbytes, "raw"
        if self.delta:
            raw = buffer[:nbytes].cpu().clone()
            packed = None if full else encode_delta(raw, self._last_sent[bucket.index], bucket)
            self._last_sent[bucket.index] = raw
            if packed is not None:
                nbytes, encoding = len(packed), "delta"
                buffer[:nbytes].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        receivers = [rank for rank in bucket.receivers if rank not in self._failed]
        # The header goes first, because a rank receives the bucket only after it has read the header. With NCCL, the first
        # send to a rank blocks until that rank receives.
        self.channel.put(header_key(push_name, bucket.key), BucketHeader(nbytes, checksums, encoding))
        self.send_endpoint.send(bucket.index, nbytes, receivers)
        stats.sent_bytes += nbytes * len(receivers)
        stats.uncompressed_bytes += bucket.nbytes * len(receivers)
        stats.messages += len(receivers)

    def _wait_acks(self, push_name: str, bucket: Bucket, stats: SendStats) -> None:
        """Wait until every receiver has copied the bucket out of its transfer buffer."""
        start = time.perf_counter()
        acks = {rank: ack_key(push_name, bucket.key, rank) for rank in bucket.receivers}
        with span("wait for engines", "weight_sync", bucket=bucket.index):
            for rank, ack in acks.items():
                if rank not in self._failed and not self.channel.wait_or_mark_failed(ack, failure_key(push_name, rank)):
                    self._failed.add(rank)
                    self.send_endpoint.exclude(rank)
        self.channel.delete([header_key(push_name, bucket.key), *acks.values()])
        stats.waited_s += time.perf_counter() - start


@dataclass
class RelaySender(BucketSender):
    """Sends buckets in two hops: from trainer rank to trainer rank, and from a trainer rank to the engine rank on its own GPU.

    Trainer ranks send bytes to each other in the trainer's default process group. Call `send_all` on all ranks, while the
    communicators of the trainer are not suspended (parallel.groups.suspend_communicators). A rank whose engine has failed still
    passes the buckets on, so all other engines still get them.
    """

    steps: Sequence[RelayStep] = ()  # one for each of `buckets`
    # Index of a transfer buffer -> unfinished sends of this buffer to the next trainer rank
    _forwarding: dict[int, list[dist.Work]] = field(default_factory=dict)
    _chain_headers: list[str] = field(default_factory=list)  # keys that this rank set in the last push

    def send_all(self, push_name: str, read: ReadTensor, full: bool) -> SendStats:
        """Process every step. `full` must be true, because an engine that shares its GPU does not keep the last weights."""
        assert full and not self.delta, "engines that share their GPUs receive all weights, not differences"
        # This all-reduce has two purposes. The first operation of an NCCL group needs every rank, and the sends below do not have
        # every rank. And when item() returns, all ranks have entered this push, so no rank still reads the headers of the last
        # push, which are deleted next.
        dist.all_reduce(ranks := torch.ones(1, device=self.send_endpoint.transfer_buffers[0].device))
        assert int(ranks.item()) == dist.get_world_size(), "every trainer rank takes part in a push"
        self.channel.delete(self._chain_headers)
        self._chain_headers.clear()
        stats = super().send_all(push_name, read, full)
        for buffer_index in list(self._forwarding):
            self._finish_forwarding(buffer_index)
        return stats

    def _send(self, push_name: str, bucket: Bucket, read: ReadTensor, full: bool, stats: SendStats) -> None:
        step, buffer_index = self.steps[bucket.index], bucket.index % NUM_TRANSFER_BUFFERS
        self._finish_forwarding(buffer_index)
        data, header = self.send_endpoint.transfer_buffers[buffer_index][: bucket.nbytes], None
        if step.previous is None:
            header = BucketHeader(bucket.nbytes, fill_buffer(data, bucket, read))
            if step.next is not None:
                # The header is set before the bytes are sent, so that the next ranks find it when the bytes arrive.
                self._chain_headers.append(chain_header_key(push_name, step.chain))
                self.channel.put(self._chain_headers[-1], header)
        else:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, data, step.previous)]):
                work.wait()
        if step.next is not None:
            self._forwarding[buffer_index] = dist.batch_isend_irecv([dist.P2POp(dist.isend, data, step.next)])
        receivers = [rank for rank in bucket.receivers if rank not in self._failed]
        if receivers:
            self.send_endpoint.send(bucket.index, bucket.nbytes, receivers)  # waits until the bytes are in the buffer
            header = header or self.channel.get(chain_header_key(push_name, step.chain))
            self.channel.put(header_key(push_name, bucket.key), header)
            stats.sent_bytes += bucket.nbytes
            stats.uncompressed_bytes += bucket.nbytes
            stats.messages += 1

    def _finish_forwarding(self, buffer_index: int) -> None:
        """Wait until the next rank has the bytes of this transfer buffer. On a GPU, only the current stream waits."""
        for work in self._forwarding.pop(buffer_index, []):
            work.wait()


def chunk_views(buffer: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return a view of each chunk of a bucket in `buffer` [bytes], in the chunk's own dtype and shape."""
    return [
        buffer[start : start + chunk.nbytes].view(getattr(torch, chunk.dtype)).view(chunk.box.sizes)
        for chunk, start in zip(bucket.chunks, bucket.offsets, strict=False)
    ]


def fill_buffer(buffer: Tensor, bucket: Bucket, read: ReadTensor) -> tuple[int, ...]:
    """Write all chunks of a bucket to `buffer`, cast to the engine's dtype, and return their checksums."""
    views = chunk_views(buffer, bucket)
    for chunk, view in zip(bucket.chunks, views, strict=True):
        view.copy_(read(chunk.name, chunk.box))
    return checksums(views)


def checksums(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return a 64-bit hash of the bytes of each tensor: XXH3 on a CPU, a weighted sum on a GPU.

    Sender and receiver have the same kind of device, so they compute the same kind of hash. The host waits for a GPU only once.
    """
    if tensors and tensors[0].is_cuda:
        return weighted_sums(tensors)
    return tuple(xxhash.xxh3_64_intdigest(memoryview(_bytes_of(tensor).numpy())) for tensor in tensors)


def weighted_sums(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return `_weighted_sum` of the bytes of each tensor, as numbers from 0 to 2**64 - 1."""
    totals = torch.stack([_weighted_sum(_bytes_of(tensor)) for tensor in tensors])
    return tuple(total & (2**64 - 1) for total in totals.tolist())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [nbytes]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _weighted_sum(data: Tensor) -> Tensor:
    """Return sum(factor * word) over the 4-byte words of uint8 [nbytes], plus a term for the number of bytes, modulo 2**64.

    The factor of a word is the product of two odd numbers: one for its position in its block, and one for the block. So the
    change of a single word always changes the sum. The words are padded with zeros. Returns int64 [].
    """
    nbytes = len(data)
    if len(data) % 4:
        data = F.pad(data, (0, -len(data) % 4))
    elif data.storage_offset() % 4:
        data = data.clone()
    of_position = _factors(0, _BLOCK_WORDS, data.device)
    of_block = _factors(_BLOCK_WORDS, _BLOCKS_AT_ONCE, data.device)  # these numbers differ from all of `of_position`
    total = torch.full((), nbytes, dtype=torch.int64, device=data.device)
    for part in data.view(torch.int32).split(_BLOCK_WORDS * _BLOCKS_AT_ONCE):
        blocks = F.pad(part, (0, -len(part) % _BLOCK_WORDS)) if len(part) % _BLOCK_WORDS else part
        sums = (blocks.view(-1, _BLOCK_WORDS) * of_position).sum(1)
        total = total * _GOLDEN_RATIO + (sums * of_block[: len(sums)]).sum()
    return total


@cache
def _factors(start: int, count: int, device: torch.device) -> Tensor:
    """Return elements `start` to `start + count` of a sequence of different odd numbers, int64 [count]."""
    number = torch.arange(start, start + count, device=device)
    return ((number * _GOLDEN_RATIO) ^ (number >> 7)).mul_(2).add_(1)


def encode_delta(new: Tensor, old: Tensor, bucket: Bucket) -> bytes | None:
    """Compress the XOR of `new` and `old`.

    `new` and `old` are uint8 [nbytes] on a CPU: the bytes of the bucket in this push and in the last push. Returns None if the
    compressed form is not smaller than the bucket.
    """
    # A plane has the bytes of one significance. The first plane of a chunk has the first bytes of all its elements, and so on.
    planes = torch.cat([plane for part, width in _chunk_bytes(new ^ old, bucket) for plane in part.view(-1, width).T])
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(memoryview(planes.numpy()))
    return packed if len(packed) < new.numel() else None


def decode_delta(packed: Tensor, bucket: Bucket) -> Tensor:
    """Return the XOR that `encode_delta` compressed, [nbytes] uint8 in the layout of the bucket."""
    data = zstandard.ZstdDecompressor().decompress(memoryview(packed.cpu().numpy()), max_output_size=bucket.nbytes)
    planes, result = torch.frombuffer(bytearray(data), dtype=torch.uint8), torch.zeros(bucket.nbytes, dtype=torch.uint8)
    start = 0
    for part, width in _chunk_bytes(result, bucket):
        part.view(-1, width).copy_(planes[start : start + part.numel()].view(width, -1).T)
        start += part.numel()
    return result


def _chunk_bytes(buffer: Tensor, bucket: Bucket) -> list[tuple[Tensor, int]]:
    """Return a pair for each chunk: (view of the bytes of the chunk in `buffer`, number of bytes per element)."""
    return [(buffer[s : s + c.nbytes], c.itemsize) for s, c in zip(bucket.offsets, bucket.chunks, strict=False)]
