"""What a transfer plan means before anything runs: bytes, messages and seconds of every rank; how far from the least. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mrl.weight_sync.plan import TransferPlan


@dataclass(frozen=True)
class Speeds:
    """What the explanation assumes of the hardware, each rank for itself."""

    send_gb_per_s: float
    receive_gb_per_s: float
    message_us: float  # what a message costs besides its bytes


@dataclass(frozen=True)
class Traffic:
    """One rank's part of a sync."""

    rank: str
    bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """A plan in numbers."""

    senders: list[Traffic]
    receivers: list[Traffic]
    sent_bytes: int
    least_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes that arrive over those that the engines hold."""
        return self.sent_bytes / self.least_bytes

    @property
    def seconds(self) -> float:
        """Of the whole sync, if senders and receivers work at once: the slowest rank's."""
        return max(traffic.seconds for traffic in [*self.senders, *self.receivers])

    @property
    def imbalance(self) -> float:
        """Bytes of the sender that has most over the mean."""
        sent = [traffic.bytes for traffic in self.senders]
        return max(sent) * len(sent) / sum(sent)


def explain(plan: TransferPlan, num_senders: int, speeds: Speeds, shared: bool) -> Explanation:
    """`shared`: receivers read what a sender wrote once (shared memory, CUDA IPC); else each is sent its own copy."""

    def traffic(rank: str, sizes: list[int], gb_per_s: float) -> Traffic:
        seconds = sum(sizes) / (gb_per_s * 1e9) + len(sizes) * speeds.message_us * 1e-6
        return Traffic(rank, sum(sizes), len(sizes), seconds)

    copies = {id(bucket): 1 if shared else len(bucket.audience) for bucket in plan.buckets}
    senders: list[list[int]] = [[] for _ in range(num_senders)]
    receivers: list[list[int]] = [[] for _ in range(plan.num_engines * plan.engine_tp)]
    for bucket in plan.buckets:
        senders[bucket.sender] += [bucket.nbytes] * copies[id(bucket)]
        for rank in bucket.audience:
            receivers[rank].append(bucket.nbytes)
    return Explanation(
        [traffic(f"trainer {n}", sizes, speeds.send_gb_per_s) for n, sizes in enumerate(senders)],
        [
            traffic(f"engine {n // plan.engine_tp} rank {n % plan.engine_tp}", sizes, speeds.receive_gb_per_s)
            for n, sizes in enumerate(receivers)
        ],
        plan.sent_bytes,
        plan.least_bytes,
    )
