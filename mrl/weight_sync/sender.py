"""A trainer rank's part in bringing weights to the engines: lay out, hash, send, wait for acknowledgements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrl.weight_sync.channel import Channel
from mrl.weight_sync.payload import Header, encode, fill
from mrl.weight_sync.plan import Bucket, Piece
from mrl.weight_sync.wires import SLOTS, Outlet

ENGINE_PATIENCE = 3
"""Times the deadline of a sender's wait: how long an engine waits for a bucket. A sender may first wait for another engine."""


@dataclass
class Sent:
    """What one push was from this rank."""

    payload_bytes: int = 0  # over all who got them
    raw_bytes: int = 0  # the same, had nothing been compressed
    messages: int = 0
    waited_s: float = 0.0  # for acknowledgements


@dataclass
class Sender:
    """One trainer rank. Engine ranks that fail on the way, or do not acknowledge in time, are left out of the push."""

    channel: Channel
    outlet: Outlet
    buckets: Sequence[Bucket]
    delta: bool = False
    _before: dict[int, Tensor] = field(default_factory=dict)  # bucket number -> bytes sent last, kept for differences
    _dead: set[int] = field(default_factory=set)

    def push(self, push: str, tensor_of: Callable[[Piece], Tensor], full: bool) -> Sent:
        """Send every bucket of this rank's weights; `full`: as it is, not as a difference from the last push."""
        sent, self._dead = Sent(), set()
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.number >= SLOTS:
                    self._finish(push, self.buckets[bucket.number - SLOTS], sent)
                self._send(push, bucket, tensor_of, full, sent)
        for bucket in self.buckets[-SLOTS:]:
            self._finish(push, bucket, sent)
        return sent

    def _send(self, push: str, bucket: Bucket, tensor_of: Callable[[Piece], Tensor], full: bool, sent: Sent) -> None:
        slot = self.outlet.slots[bucket.number % SLOTS]
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
        self.channel.put(f"{push}/bucket/{bucket.key}", Header(nbytes, checksums, encoding))
        self.outlet.send(bucket.number, nbytes, alive)
        sent.payload_bytes += nbytes * len(alive)
        sent.raw_bytes += bucket.nbytes * len(alive)
        sent.messages += len(alive)

    def _finish(self, push: str, bucket: Bucket, sent: Sent) -> None:
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
