"""The transfer plan: who sends which part of which tensor to which engine ranks, in buckets. Pure, computed once.

Shapes and places are boxes of Hugging Face tensors: what a trainer rank owns of a tensor and what an engine rank holds of it
are cut by their own layouts, and what travels is their intersections. So every engine rank gets each byte it holds once, and
nothing else; no rank, sender or receiver, ever has the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from models.conversion.mapping import Box
from models.conversion.mapping import Mapping as Row
from mrl.weight_sync.engine_layout import EngineLayout, EngineShard
from parallel.dims import ParallelDims

# FROM: What a transfer plan means before anything runs: bytes, messages and seconds of every rank; how far from the least. Pure.

ALIGNMENT = 16  # bytes; pieces begin at multiples of it, so that any dtype can be read in place
GRAIN = 1 << 20  # bytes; pieces are not cut smaller than this to even out the senders
PIECES_OF_A_SHARE = 16  # of an even share of all that is sent, no piece is larger than one of so many parts


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a Hugging Face tensor on its way."""

    name: str  # Hugging Face
    box: Box
    param: str  # SGLang
    dtype: str  # the engine's, as torch spells it without "torch."
    itemsize: int  # bytes

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{s.start}:{s.stop}' for s in self.box.slices)}]"


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together, laid out one after another."""

    sender: int  # trainer rank
    number: int  # among the sender's; a sender sends, and everyone receives, in the order of (number, sender)
    audience: tuple[int, ...]  # engine ranks, counted over all engines; each needs every piece
    pieces: tuple[TensorChunk, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Where each piece begins in the flat buffer, and the end, bytes."""
        ends = [0]
        for piece in self.pieces:
            ends.append(ends[-1] + aligned(piece.nbytes))
        return ends

    @property
    def nbytes(self) -> int:
        return self.offsets[-1]

    @property
    def key(self) -> str:
        """Its name between sender and receivers."""
        return f"{self.sender}/{self.number}"


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Destination:
    """Where a received piece goes in one engine rank."""

    param: str
    box: Box  # in the parameter


@dataclass(frozen=True, repr=False)
class TransferPlan:
    """All buckets of a sync, and where their pieces go."""

    buckets: tuple[Bucket, ...]
    held: tuple[tuple[EngineShard, ...], ...]  # by tensor-parallel rank of an engine
    num_engines: int
    least_bytes: int  # that the engines' ranks hold together

    @property
    def engine_tp(self) -> int:
        return len(self.held)

    def of_sender(self, rank: int) -> list[Bucket]:
        """Buckets of one trainer rank, in the order of sending."""
        return [bucket for bucket in self.buckets if bucket.sender == rank]

    def of_receiver(self, engine_rank: int) -> list[tuple[Bucket, list[Destination]]]:
        """Buckets that an engine rank takes, in the order of taking, and where each piece goes."""
        where: dict[str, list[EngineShard]] = defaultdict(list)
        for held in self.held[engine_rank % self.engine_tp]:
            where[held.name].append(held)
        mine = sorted((b for b in self.buckets if engine_rank in b.audience), key=lambda b: (b.number, b.sender))
        return [(bucket, [_place(piece, where[piece.name]) for piece in bucket.pieces]) for bucket in mine]

    @property
    def sent_bytes(self) -> int:
        """Payload that arrives at engine ranks, all together."""
        return sum(bucket.nbytes * len(bucket.audience) for bucket in self.buckets)

    def __repr__(self) -> str:
        senders = len({bucket.sender for bucket in self.buckets})
        return (
            f"{len(self.buckets)} buckets from {senders} senders to {self.num_engines} engines of {self.engine_tp} ranks, "
            f"{self.sent_bytes:,} bytes ({self.least_bytes:,} held there)"
        )


def _place(piece: TensorChunk, candidates: Iterable[EngineShard]) -> Destination:
    held = next(h for h in candidates if h.param == piece.param and h.box.intersect(piece.box) == piece.box)
    return Destination(held.param, held.place(piece.box))


@dataclass(frozen=True)
class TrainerShard:
    """A box of a Hugging Face tensor and the trainer ranks that all have it."""

    box: Box
    ranks: tuple[int, ...]


def trainer_shards(
    rows: Iterable[Row], sizes: dict[str, int], dims: ParallelDims, stage_of: Callable[[str], int]
) -> dict[str, list[TrainerShard]]:
    """Who has what, by Hugging Face name. `stage_of`: pipeline stage by Megatron's parameter name (experts numbered)."""
    at = {rank: dims.coords(rank) for rank in range(dims.world_size)}
    experts_at = {rank: dims.expert_coords(rank) for rank in range(dims.world_size)}
    members: dict[tuple[int, int | None, int], tuple[int, ...]] = {}  # stage, expert group, shard (-1: any) -> ranks
    for rank in range(dims.world_size):
        etp, ep = experts_at[rank]
        stage, tp = at[rank].pp, at[rank].tp
        for key in ((stage, None, tp), (stage, None, -1), (stage, ep, etp), (stage, ep, -1)):
            members[key] = (*members.get(key, ()), rank)
    found: dict[str, list[TrainerShard]] = {}
    for row in rows:
        stage, group = stage_of(row.megatron), None
        if row.expert is not None:
            group = row.expert * dims.ep // sizes["experts"]
        for name, boxes in row.cut(sizes, dims.expert_tp if row.expert is not None else dims.tp).items():
            shards = range(len(boxes)) if len(boxes) > 1 else [-1]
            parts = [
                TrainerShard(box, members[stage, group, s]) for box, s in zip(boxes, shards, strict=True) if box.numel
            ]
            found[name] = parts
    return found


def even_pipeline_stages(num_layers: int, dims: ParallelDims) -> Callable[[str], int]:
    """Pipeline stage by Megatron's parameter name where all virtual stages have equally many layers."""
    per_chunk = num_layers // (dims.pp * dims.vpp)

    def stage_of(name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) // per_chunk % dims.pp
        return 0 if name.startswith("embedding.") else dims.pp - 1

    return stage_of


def compile_transfer_plan(
    owned: Mapping[str, Sequence[TrainerShard]],
    layout: EngineLayout,
    num_engines: int,
    dtype_of: Callable[[str], tuple[str, int]],
    bucket_bytes: int,
) -> TransferPlan:
    """Routes from trainer ranks to `num_engines` engines of one layout; `dtype_of`: (dtype, bytes) of an engine's parameter.

    Of the ranks that have a box, the one with the least to send sends it. A bucket has at most `bucket_bytes`; so has a piece,
    and less where one piece would be much of a sender's share.
    """
    tp = layout.topology.tp
    held = tuple(layout.rank(rank) for rank in range(tp))
    least = sum(part.box.numel * dtype_of(part.param)[1] for rank in held for part in rank)
    senders = len({rank for parts in owned.values() for part in parts for rank in part.ranks})
    most_bytes = min(bucket_bytes, max(GRAIN, least // (senders * PIECES_OF_A_SHARE)))
    routes = list(_routes(owned, held, dtype_of, most_bytes))
    load: dict[int, int] = defaultdict(int)
    of_sender: dict[int, list[tuple[int, TensorChunk, tuple[int, ...]]]] = defaultdict(list)
    for order in sorted(range(len(routes)), key=lambda i: -routes[i][0].nbytes):  # large ones first: evener
        piece, tp_ranks, candidates = routes[order]
        sender = min(candidates, key=lambda rank: (load[rank], rank))
        load[sender] += aligned(piece.nbytes)
        audience = tuple(engine * tp + rank for engine in range(num_engines) for rank in tp_ranks)
        of_sender[sender].append((order, piece, audience))
    buckets = [b for sender in sorted(of_sender) for b in _buckets(sender, sorted(of_sender[sender]), bucket_bytes)]
    return TransferPlan(tuple(buckets), held, num_engines, least * num_engines)


def _routes(
    owned: Mapping[str, Sequence[TrainerShard]],
    held: Sequence[Sequence[EngineShard]],
    dtype_of: Callable[[str], tuple[str, int]],
    most_bytes: int,
) -> Iterator[tuple[TensorChunk, tuple[int, ...], tuple[int, ...]]]:
    """(piece, tensor-parallel ranks of an engine that need it, trainer ranks that have it), in the table's order.

    A piece has at most `most_bytes`.
    """
    wanted: dict[tuple[str, Box, str], list[int]] = {}  # ranks that hold the same box get the same bytes
    for rank, parts in enumerate(held):
        for part in parts:
            wanted.setdefault((part.name, part.box, part.param), []).append(rank)
    for (name, box, param), ranks in wanted.items():
        dtype, itemsize = dtype_of(param)
        for owner in owned[name]:
            common = box if box == owner.box else owner.box.intersect(box)
            for part in common.pieces(max(1, most_bytes // itemsize)) if common.numel else ():
                yield TensorChunk(name, part, param, dtype, itemsize), tuple(ranks), owner.ranks


def _buckets(
    sender: int, pieces: Iterable[tuple[int, TensorChunk, tuple[int, ...]]], bucket_bytes: int
) -> Iterator[Bucket]:
    """A sender's pieces, in their order, in buckets of one audience each; the audiences' buckets are numbered as they fill."""
    filling: dict[tuple[int, ...], list[TensorChunk]] = {}
    size: dict[tuple[int, ...], int] = defaultdict(int)
    number = 0
    for _, piece, audience in pieces:
        if filling.get(audience) and size[audience] + aligned(piece.nbytes) > bucket_bytes:
            yield Bucket(sender, number, audience, tuple(filling.pop(audience)))
            number, size[audience] = number + 1, 0
        filling.setdefault(audience, []).append(piece)
        size[audience] += aligned(piece.nbytes)
    for audience, rest in filling.items():
        yield Bucket(sender, number, audience, tuple(rest))
        number += 1


@dataclass(frozen=True)
class LinkSpeeds:
    """What the explanation assumes of the hardware, each rank for itself."""

    send_gb_per_s: float
    receive_gb_per_s: float
    message_us: float  # what a message costs besides its bytes


@dataclass(frozen=True)
class RankTraffic:
    """One rank's part of a sync."""

    rank: str
    bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class TransferCost:
    """A plan in numbers."""

    senders: list[RankTraffic]
    receivers: list[RankTraffic]
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


def estimate_transfer_cost(plan: TransferPlan, num_senders: int, speeds: LinkSpeeds, shared: bool) -> TransferCost:
    """`shared`: receivers read what a sender wrote once (shared memory, CUDA IPC); else each is sent its own copy."""

    def traffic(rank: str, sizes: list[int], gb_per_s: float) -> RankTraffic:
        seconds = sum(sizes) / (gb_per_s * 1e9) + len(sizes) * speeds.message_us * 1e-6
        return RankTraffic(rank, sum(sizes), len(sizes), seconds)

    copies = {id(bucket): 1 if shared else len(bucket.audience) for bucket in plan.buckets}
    senders: list[list[int]] = [[] for _ in range(num_senders)]
    receivers: list[list[int]] = [[] for _ in range(plan.num_engines * plan.engine_tp)]
    for bucket in plan.buckets:
        senders[bucket.sender] += [bucket.nbytes] * copies[id(bucket)]
        for rank in bucket.audience:
            receivers[rank].append(bucket.nbytes)
    return TransferCost(
        [traffic(f"trainer {n}", sizes, speeds.send_gb_per_s) for n, sizes in enumerate(senders)],
        [
            traffic(f"engine {n // plan.engine_tp} rank {n % plan.engine_tp}", sizes, speeds.receive_gb_per_s)
            for n, sizes in enumerate(receivers)
        ],
        plan.sent_bytes,
        plan.least_bytes,
    )
