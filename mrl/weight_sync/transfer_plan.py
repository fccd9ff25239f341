"""Transfer plan: which trainer rank sends which part of which tensor to which engine ranks, grouped into buckets.

The plan is computed once per session, from the layouts alone. Every part is a box (a rectangular slice) of a Hugging Face
tensor. The trainer layout says which box a trainer rank has; the engine layout says which box an engine rank holds; their
intersection is sent. Each engine rank therefore receives every byte that it holds exactly once, and no rank ever has the whole
model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from models.conversion.mapping import Box, ParamMapping
from mrl.weight_sync.engine_layout import EngineLayout, EngineShard
from parallel.dims import ParallelDims

ALIGNMENT = 16  # bytes; chunks start at multiples of this, so that the buffer can be viewed as any dtype
MIN_CHUNK_BYTES = 1 << 20  # to balance the senders, tensors are not cut into smaller chunks than this
CHUNKS_PER_SENDER = 16  # a chunk is at most 1/16 of the bytes that one sender sends on average


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a Hugging Face tensor that is sent as one unit."""

    name: str  # of the Hugging Face tensor
    box: Box
    param: str  # SGLang's parameter that holds it
    dtype: str  # of the engine's parameter, without "torch."
    itemsize: int  # bytes per element

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{s.start}:{s.stop}' for s in self.box.slices)}]"


@dataclass(frozen=True)
class Bucket:
    """Chunks that are sent in one message, laid out one after another in a flat buffer."""

    sender: int  # trainer rank
    number: int  # position among the sender's buckets; all ranks process buckets in the order of (number, sender)
    receivers: tuple[int, ...]  # engine ranks, counted over all engines; each needs every chunk
    chunks: tuple[TensorChunk, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Start of each chunk in the flat buffer, and the end of the last chunk; in bytes."""
        ends = [0]
        for chunk in self.chunks:
            ends.append(ends[-1] + align(chunk.nbytes))
        return ends

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @property
    def key(self) -> str:
        """Identifier of the bucket on the control channel."""
        return f"{self.sender}/{self.number}"


def align(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Destination:
    """Where an engine rank writes a received chunk."""

    param: str
    box: Box  # of the parameter


@dataclass(frozen=True, repr=False)
class TransferPlan:
    """All buckets of a weight sync, and the engine shards that they fill."""

    buckets: tuple[Bucket, ...]
    engine_shards: tuple[tuple[EngineShard, ...], ...]  # by tensor-parallel rank of an engine
    num_engines: int
    min_bytes: int  # bytes that all engine ranks hold together; no plan can send less

    @property
    def engine_tp(self) -> int:
        return len(self.engine_shards)

    def buckets_of_sender(self, rank: int) -> list[Bucket]:
        """Return the buckets of one trainer rank, in sending order."""
        return [bucket for bucket in self.buckets if bucket.sender == rank]

    def buckets_of_receiver(self, engine_rank: int) -> list[tuple[Bucket, list[Destination]]]:
        """Return the buckets of one engine rank, in receiving order, each with the destination of every chunk."""
        shards: dict[str, list[EngineShard]] = defaultdict(list)
        for shard in self.engine_shards[engine_rank % self.engine_tp]:
            shards[shard.name].append(shard)
        received = sorted((b for b in self.buckets if engine_rank in b.receivers), key=lambda b: (b.number, b.sender))
        return [(bucket, [_destination(chunk, shards[chunk.name]) for chunk in bucket.chunks]) for bucket in received]

    @property
    def sent_bytes(self) -> int:
        """Bytes that all engine ranks together receive."""
        return sum(bucket.nbytes * len(bucket.receivers) for bucket in self.buckets)

    def __repr__(self) -> str:
        senders = len({bucket.sender for bucket in self.buckets})
        return (
            f"{len(self.buckets)} buckets from {senders} senders to {self.num_engines} engines of {self.engine_tp} ranks, "
            f"{self.sent_bytes:,} bytes (the engines hold {self.min_bytes:,})"
        )


def _destination(chunk: TensorChunk, candidates: Iterable[EngineShard]) -> Destination:
    shard = next(s for s in candidates if s.param == chunk.param and s.box.intersect(chunk.box) == chunk.box)
    return Destination(shard.param, shard.box_in_param(chunk.box))


@dataclass(frozen=True)
class TrainerShard:
    """A box of a Hugging Face tensor and the trainer ranks that each have a full copy of it."""

    box: Box
    ranks: tuple[int, ...]


def trainer_shards(
    rows: Iterable[ParamMapping], sizes: dict[str, int], dims: ParallelDims, stage_of: Callable[[str], int]
) -> dict[str, list[TrainerShard]]:
    """List the trainer's shards of every tensor, by Hugging Face name.

    `stage_of` returns the pipeline stage of a Megatron parameter name (with the expert's number in it).
    """
    ranks_of: dict[tuple[int, int | None, int], tuple[int, ...]] = {}  # (stage, expert group, shard; -1: all) -> ranks
    for rank in range(dims.world_size):
        etp, ep = dims.expert_coords(rank)
        stage, tp = dims.coords(rank).pp, dims.coords(rank).tp
        for key in ((stage, None, tp), (stage, None, -1), (stage, ep, etp), (stage, ep, -1)):
            ranks_of[key] = (*ranks_of.get(key, ()), rank)
    shards: dict[str, list[TrainerShard]] = {}
    for row in rows:
        stage, group = stage_of(row.megatron), None
        if row.expert is not None:
            group = row.expert * dims.ep // sizes["experts"]
        for name, boxes in row.split_over_ranks(sizes, dims.expert_tp if row.expert is not None else dims.tp).items():
            numbers = range(len(boxes)) if len(boxes) > 1 else [-1]
            shards[name] = [
                TrainerShard(box, ranks_of[stage, group, number])
                for box, number in zip(boxes, numbers, strict=True)
                if box.numel
            ]
    return shards


def even_pipeline_stages(num_layers: int, dims: ParallelDims) -> Callable[[str], int]:
    """Return the pipeline stage of a Megatron parameter name when all virtual stages have the same number of layers."""
    layers_per_chunk = num_layers // (dims.pp * dims.vpp)

    def stage_of(name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) // layers_per_chunk % dims.pp
        return 0 if name.startswith("embedding.") else dims.pp - 1

    return stage_of


def compile_transfer_plan(
    trainer: Mapping[str, Sequence[TrainerShard]],
    layout: EngineLayout,
    num_engines: int,
    dtype_of: Callable[[str], tuple[str, int]],
    bucket_bytes: int,
) -> TransferPlan:
    """Plan the transfer from the trainer's shards to `num_engines` engines of one layout.

    `dtype_of` returns (dtype, bytes per element) of an engine parameter. When several trainer ranks have a chunk, the rank
    with the fewest bytes to send so far sends it. Buckets and chunks have at most `bucket_bytes`. Chunks are smaller if
    a chunk would otherwise be a large part of a sender's total.
    """
    tp = layout.topology.tp
    engine = tuple(layout.shards(rank) for rank in range(tp))
    min_bytes = sum(shard.box.numel * dtype_of(shard.param)[1] for shards in engine for shard in shards)
    num_senders = len({rank for shards in trainer.values() for shard in shards for rank in shard.ranks})
    chunk_bytes = min(bucket_bytes, max(MIN_CHUNK_BYTES, min_bytes // (num_senders * CHUNKS_PER_SENDER)))
    routes = list(_routes(trainer, engine, dtype_of, chunk_bytes))
    load: dict[int, int] = defaultdict(int)
    by_sender: dict[int, list[tuple[int, TensorChunk, tuple[int, ...]]]] = defaultdict(list)
    for order in sorted(range(len(routes)), key=lambda i: -routes[i][0].nbytes):  # largest chunks first, for balance
        chunk, tp_ranks, candidates = routes[order]
        sender = min(candidates, key=lambda rank: (load[rank], rank))
        load[sender] += align(chunk.nbytes)
        receivers = tuple(number * tp + rank for number in range(num_engines) for rank in tp_ranks)
        by_sender[sender].append((order, chunk, receivers))
    buckets = [b for sender in sorted(by_sender) for b in _buckets(sender, sorted(by_sender[sender]), bucket_bytes)]
    return TransferPlan(tuple(buckets), engine, num_engines, min_bytes * num_engines)


def _routes(
    trainer: Mapping[str, Sequence[TrainerShard]],
    engine: Sequence[Sequence[EngineShard]],
    dtype_of: Callable[[str], tuple[str, int]],
    chunk_bytes: int,
) -> Iterator[tuple[TensorChunk, tuple[int, ...], tuple[int, ...]]]:
    """Yield (chunk, tensor-parallel ranks of an engine that need it, trainer ranks that have it), in the table's order.

    A chunk has at most `chunk_bytes`.
    """
    tp_ranks_of: dict[tuple[str, Box, str], list[int]] = {}  # engine ranks with the same box receive the same chunks
    for rank, shards in enumerate(engine):
        for shard in shards:
            tp_ranks_of.setdefault((shard.name, shard.box, shard.param), []).append(rank)
    for (name, box, param), tp_ranks in tp_ranks_of.items():
        dtype, itemsize = dtype_of(param)
        for shard in trainer[name]:
            common = box if box == shard.box else shard.box.intersect(box)
            for part in common.chunks(max(1, chunk_bytes // itemsize)) if common.numel else ():
                yield TensorChunk(name, part, param, dtype, itemsize), tuple(tp_ranks), shard.ranks


def _buckets(
    sender: int, chunks: Iterable[tuple[int, TensorChunk, tuple[int, ...]]], bucket_bytes: int
) -> Iterator[Bucket]:
    """Group a sender's chunks, in order, into buckets whose chunks all have the same receivers; number them as they fill."""
    open_chunks: dict[tuple[int, ...], list[TensorChunk]] = {}
    open_bytes: dict[tuple[int, ...], int] = defaultdict(int)
    number = 0
    for _, chunk, receivers in chunks:
        if open_chunks.get(receivers) and open_bytes[receivers] + align(chunk.nbytes) > bucket_bytes:
            yield Bucket(sender, number, receivers, tuple(open_chunks.pop(receivers)))
            number, open_bytes[receivers] = number + 1, 0
        open_chunks.setdefault(receivers, []).append(chunk)
        open_bytes[receivers] += align(chunk.nbytes)
    for receivers, rest in open_chunks.items():
        yield Bucket(sender, number, receivers, tuple(rest))
        number += 1


@dataclass(frozen=True)
class LinkSpeeds:
    """Network speeds that the cost estimate assumes for each rank."""

    send_gb_per_s: float
    receive_gb_per_s: float
    message_us: float  # fixed cost of a message, independent of its size


@dataclass(frozen=True)
class RankTraffic:
    """Traffic that one rank sends or receives in a weight sync."""

    rank: str
    bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class TransferCost:
    """Estimated bytes, messages and seconds of a transfer plan."""

    senders: list[RankTraffic]
    receivers: list[RankTraffic]
    sent_bytes: int
    min_bytes: int

    @property
    def ratio(self) -> float:
        """Received bytes divided by the bytes that the engines hold."""
        return self.sent_bytes / self.min_bytes

    @property
    def seconds(self) -> float:
        """Duration of the sync if all ranks work in parallel: the time of the slowest rank."""
        return max(traffic.seconds for traffic in [*self.senders, *self.receivers])

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest sender, divided by the mean over senders."""
        sent = [traffic.bytes for traffic in self.senders]
        return max(sent) * len(sent) / sum(sent)


def estimate_transfer_cost(plan: TransferPlan, num_senders: int, speeds: LinkSpeeds, shared: bool) -> TransferCost:
    """Estimate what a plan costs before anything runs.

    `shared`: all receivers read one copy that the sender wrote (shared memory, CUDA IPC). Otherwise the sender sends one copy to
    each receiver.
    """

    def traffic(rank: str, sizes: list[int], gb_per_s: float) -> RankTraffic:
        seconds = sum(sizes) / (gb_per_s * 1e9) + len(sizes) * speeds.message_us * 1e-6
        return RankTraffic(rank, sum(sizes), len(sizes), seconds)

    senders: list[list[int]] = [[] for _ in range(num_senders)]
    receivers: list[list[int]] = [[] for _ in range(plan.num_engines * plan.engine_tp)]
    for bucket in plan.buckets:
        senders[bucket.sender] += [bucket.nbytes] * (1 if shared else len(bucket.receivers))
        for rank in bucket.receivers:
            receivers[rank].append(bucket.nbytes)
    return TransferCost(
        [traffic(f"trainer {n}", sizes, speeds.send_gb_per_s) for n, sizes in enumerate(senders)],
        [
            traffic(f"engine {n // plan.engine_tp} rank {n % plan.engine_tp}", sizes, speeds.receive_gb_per_s)
            for n, sizes in enumerate(receivers)
        ],
        plan.sent_bytes,
        plan.min_bytes,
    )
