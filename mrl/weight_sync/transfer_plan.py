"""Transfer plan: which trainer rank sends which part of which tensor to which engine ranks.

The plan is computed once per session. It depends only on the layouts of trainer and engines, not on the values of the weights.
This module also chooses the transport.

A box is a rectangular part of a tensor: one range of indices along each dimension. The trainer layout gives the boxes of each
Hugging Face tensor that a trainer rank has. The engine layout gives the boxes that an engine rank needs. A chunk is the
intersection of two such boxes, or a part of a large intersection. A bucket is a set of chunks that one message carries.

Each engine rank receives each of its weights exactly once. No rank has to gather the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from models.architecture import VISION_PREFIX
from models.conversion.fp8_blocks import SCALE_SUFFIX, block_box, quantized_shapes
from models.conversion.mapping import Box, ParamMapping
from mrl.config.process_schema import Transport
from mrl.weight_sync.engine_layout import EngineLayout, EngineShard
from parallel.dims import ParallelDims

ALIGNMENT = 16  # bytes; every chunk starts at a multiple of this, so that it can be viewed as any dtype
MIN_CHUNK_BYTES = 1 << 20  # smallest size limit of chunks, unless buckets are smaller
CHUNKS_PER_SENDER = 16  # size limit of chunks: 1/16 of the average bytes per sender, at least MIN_CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a Hugging Face tensor that is sent as one unit."""

    name: str  # name of the Hugging Face tensor
    box: Box  # part of the Hugging Face tensor
    param: str  # name of the SGLang parameter that contains the chunk
    dtype: str  # dtype of the SGLang parameter, without the prefix "torch."
    itemsize: int  # bytes per element

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{s.start}:{s.stop}' for s in self.box.slices)}]"


@dataclass(frozen=True)
class Bucket:
    """Chunks that one message carries, one after another in a flat buffer."""

    sender: int  # trainer rank that sends the bucket
    index: int  # position among the sender's buckets, from 0; every rank processes its buckets in the order of (index, sender)
    receivers: tuple[int, ...]  # engine ranks that need these chunks, numbered over all engines
    chunks: tuple[TensorChunk, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Byte offset of each chunk in the flat buffer, followed by the end of the last chunk."""
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
        return f"{self.sender}/{self.index}"


def align(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Destination:
    """Part of an engine parameter into which a received chunk is written."""

    param: str  # name of the SGLang parameter
    box: Box  # part of the SGLang parameter


@dataclass(frozen=True, repr=False)
class TransferPlan:
    """All buckets of a weight sync, and the engine shards that they fill."""

    buckets: tuple[Bucket, ...]
    engine_shards: tuple[tuple[EngineShard, ...], ...]  # by tensor-parallel rank, the same in every engine
    num_engines: int
    min_bytes: int  # bytes that all engine ranks hold together; every plan sends at least this many

    @property
    def engine_tp(self) -> int:
        return len(self.engine_shards)

    def buckets_of_sender(self, rank: int) -> list[Bucket]:
        """Return the buckets that one trainer rank sends, in order."""
        return [bucket for bucket in self.buckets if bucket.sender == rank]

    def buckets_of_receiver(self, engine_rank: int) -> list[tuple[Bucket, list[Destination]]]:
        """Return the buckets that one engine rank receives, in order, each with the destinations of its chunks."""
        shards: dict[str, list[EngineShard]] = defaultdict(list)
        for shard in self.engine_shards[engine_rank % self.engine_tp]:
            shards[shard.name].append(shard)
        received = sorted((b for b in self.buckets if engine_rank in b.receivers), key=lambda b: (b.index, b.sender))
        return [(bucket, [_destination(chunk, shards[chunk.name]) for chunk in bucket.chunks]) for bucket in received]

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that the engine ranks receive, summed over all engine ranks."""
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
    """A box of a Hugging Face tensor, and the trainer ranks that each have a full copy of this box."""

    box: Box
    ranks: tuple[int, ...]


def trainer_shards(
    rows: Iterable[ParamMapping], sizes: dict[str, int], dims: ParallelDims, stage_of: Callable[[str], int]
) -> dict[str, list[TrainerShard]]:
    """Return the trainer's shards, by name of the Hugging Face tensor.

    `rows` is the table of the model family, which maps Hugging Face tensors to Megatron parameters; each expert has its own
    rows. `sizes` is Architecture.sizes. `stage_of` takes the name of a Megatron parameter and returns its pipeline stage.
    """
    # (pipeline stage, expert-parallel rank, index of the shard) -> trainer ranks. The expert-parallel rank is None for a
    # parameter that belongs to no expert. The index is -1 if the tensor is not sharded.
    ranks_of: dict[tuple[int, int | None, int], tuple[int, ...]] = {}
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
        ranks = row.split_over_ranks(sizes, dims.expert_tp if row.expert is not None else dims.tp)
        for name, boxes_of in ranks.items():
            indices = range(len(boxes_of)) if len(boxes_of) > 1 else [-1]
            shards[name] = [
                TrainerShard(box, ranks_of[stage, group, index])
                for boxes, index in zip(boxes_of, indices, strict=True)
                for box in boxes
                if box.numel
            ]
    return shards


def scale_shards(
    trainer: Mapping[str, Sequence[TrainerShard]], rows: Iterable[ParamMapping], sizes: dict[str, int]
) -> dict[str, list[TrainerShard]]:
    """Return the trainer's shards of the block scales of all quantized matrices, by name of the tensor of scales.

    A rank can compute the scales of the weights that it has. Raises ValueError if the trainer's layout splits a block
    (models/conversion/fp8_blocks.py).
    """
    shards: dict[str, list[TrainerShard]] = {}
    for name, shape in quantized_shapes(rows, sizes).items():
        try:
            boxes = [block_box(shard.box, shape) for shard in trainer[name]]
        except ValueError as error:
            raise ValueError(
                f"sglang.quantization=fp8: a rank of the actor has a part of {name} whose {error}; use a smaller "
                "parallel.tp (parallel.etp for experts) or engines without quantization."
            ) from None
        pairs = zip(boxes, trainer[name], strict=True)
        shards[name + SCALE_SUFFIX] = [TrainerShard(box, shard.ranks) for box, shard in pairs]
    return shards


def even_pipeline_stages(num_layers: int, dims: ParallelDims) -> Callable[[str], int]:
    """Return a function that takes the name of a Megatron parameter and returns its pipeline stage.

    The function assumes that all virtual pipeline stages have the same number of layers.
    """
    layers_per_virtual_stage = num_layers // (dims.pp * dims.vpp)

    def stage_of(name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) // layers_per_virtual_stage % dims.pp
        return 0 if name.startswith(("embedding.", VISION_PREFIX)) else dims.pp - 1

    return stage_of


def compile_transfer_plan(
    trainer: Mapping[str, Sequence[TrainerShard]],
    layout: EngineLayout,
    num_engines: int,
    dtype_of: Callable[[str], tuple[str, int]],
    bucket_bytes: int,
) -> TransferPlan:
    """Plan the transfer from the trainer's shards to `num_engines` engines that all have the layout `layout`.

    `dtype_of` takes the name of an engine parameter and returns (dtype, bytes per element). If several trainer ranks have a
    chunk, the chunk is assigned to the rank among them that has the fewest bytes to send so far. A bucket has at most
    `bucket_bytes`, rounded up to ALIGNMENT. Chunks may have a lower limit (see CHUNKS_PER_SENDER), to balance the senders.
    """
    if layout.block_scales:
        trainer = {**trainer, **scale_shards(trainer, layout.rows, layout.sizes)}
    tp = layout.parallel_sizes.tp
    engine = tuple(layout.shards(rank) for rank in range(tp))
    min_bytes = sum(shard.box.numel * dtype_of(shard.param)[1] for shards in engine for shard in shards)
    num_senders = len({rank for shards in trainer.values() for shard in shards for rank in shard.ranks})
    chunk_bytes = min(bucket_bytes, max(MIN_CHUNK_BYTES, min_bytes // (num_senders * CHUNKS_PER_SENDER)))
    routes = list(_routes(trainer, engine, dtype_of, chunk_bytes))
    load: dict[int, int] = defaultdict(int)
    by_sender: dict[int, list[tuple[int, TensorChunk, tuple[int, ...]]]] = defaultdict(list)
    # The largest chunks are assigned first, because this order balances the senders best.
    for order in sorted(range(len(routes)), key=lambda i: -routes[i][0].nbytes):
        chunk, tp_ranks, candidates = routes[order]
        sender = min(candidates, key=lambda rank: (load[rank], rank))
        load[sender] += align(chunk.nbytes)
        receivers = tuple(engine_index * tp + rank for engine_index in range(num_engines) for rank in tp_ranks)
        by_sender[sender].append((order, chunk, receivers))
    buckets = [b for sender in sorted(by_sender) for b in _buckets(sender, sorted(by_sender[sender]), bucket_bytes)]
    return TransferPlan(tuple(buckets), engine, num_engines, min_bytes * num_engines)


def _routes(
    trainer: Mapping[str, Sequence[TrainerShard]],
    engine: Sequence[Sequence[EngineShard]],
    dtype_of: Callable[[str], tuple[str, int]],
    chunk_bytes: int,
) -> Iterator[tuple[TensorChunk, tuple[int, ...], tuple[int, ...]]]:
    """Yield each chunk, the tensor-parallel ranks of an engine that need the chunk, and the trainer ranks that have the chunk.

    Chunks come in the order of the engine layout's shards. A chunk has at most `chunk_bytes`.
    """
    # (tensor, box, parameter) -> the tensor-parallel ranks that need this box. They all receive the same chunks.
    tp_ranks_of: dict[tuple[str, Box, str], list[int]] = {}
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
    """Group a sender's chunks into buckets. All chunks of a bucket have the same receivers.

    A bucket is closed when the next chunk for its receivers does not fit into it. All other buckets are closed at the end. The
    index of a bucket is the number of the sender's buckets that were closed before it.
    """
    open_chunks: dict[tuple[int, ...], list[TensorChunk]] = {}
    open_bytes: dict[tuple[int, ...], int] = defaultdict(int)
    index = 0
    for _, chunk, receivers in chunks:
        if open_chunks.get(receivers) and open_bytes[receivers] + align(chunk.nbytes) > bucket_bytes:
            yield Bucket(sender, index, receivers, tuple(open_chunks.pop(receivers)))
            index, open_bytes[receivers] = index + 1, 0
        open_chunks.setdefault(receivers, []).append(chunk)
        open_bytes[receivers] += align(chunk.nbytes)
    for receivers, rest in open_chunks.items():
        yield Bucket(sender, index, receivers, tuple(rest))
        index += 1


class ProcessLocation(NamedTuple):
    """Host and GPU that hold the weights of one rank."""

    host: str
    gpu: str | None  # UUID of the GPU; None: the weights are on a CPU


def choose_transport(
    requested: str, senders: Sequence[ProcessLocation], receivers: Sequence[ProcessLocation]
) -> Transport:
    """Check weight_sync.transport against the locations of all ranks, and resolve `auto`.

    If every engine rank shares its GPU with a trainer rank, `auto` becomes CUDA IPC, on any number of machines. If all ranks
    are on the CPUs of one machine, `auto` becomes shared memory. Otherwise, `auto` becomes a process group. Raises ValueError
    if the requested transport cannot work, or if only some engine ranks share their GPUs with trainer ranks.
    Before the run starts, mrl.controller.plan_models calls this function with the planned locations.
    """
    transport = Transport(requested)
    num_hosts = len({host for host, _ in [*senders, *receivers]})
    on_gpus = any(gpu is not None for _, gpu in [*senders, *receivers])
    num_shared = len(relay_ranks(senders, receivers))
    if 0 < num_shared < len(receivers):
        raise ValueError(
            f"weight_sync.transport={transport}: {num_shared} of {len(receivers)} engine ranks share their GPUs with ranks of "
            f"the actor, and the others do not. Use at most {len(senders)} engine ranks (rollout.num_engines x engine_tp), "
            "the number of the actor's ranks; or set placement=disaggregated or weight_sync.transport=disk."
        )
    if transport is Transport.auto:
        needs_group = on_gpus or num_hosts > 1
        fitting = Transport.process_group if needs_group else Transport.shared_memory
        return Transport.cuda_ipc if num_shared else fitting
    if transport is Transport.process_group and num_shared:
        raise ValueError(
            "weight_sync.transport=process_group: NCCL cannot join two processes on one GPU; use cuda_ipc."
        )
    if (transport is Transport.shared_memory and on_gpus) or (transport is Transport.cuda_ipc and not on_gpus):
        raise ValueError(f"weight_sync.transport={transport} does not fit the device of the weights; use auto.")
    if transport is Transport.cuda_ipc and not num_shared:
        raise ValueError(
            "weight_sync.transport=cuda_ipc: no engine shares a GPU with the actor, and an engine can open only memory of its "
            "own GPUs; use process_group."
        )
    if transport is Transport.shared_memory and num_hosts > 1:
        raise ValueError(
            f"weight_sync.transport=shared_memory: trainers and engines are on {num_hosts} machines; use process_group or disk."
        )
    return transport


def relay_ranks(senders: Sequence[ProcessLocation], receivers: Sequence[ProcessLocation]) -> dict[int, int]:
    """Return engine rank -> trainer rank on the same GPU, for each engine rank that shares its GPU with a trainer rank."""
    rank_on = {gpu: rank for rank, (_, gpu) in enumerate(senders) if gpu is not None}
    return {rank: rank_on[gpu] for rank, (_, gpu) in enumerate(receivers) if gpu in rank_on}


@dataclass(frozen=True)
class RelayStep:
    """What one trainer rank does in the chain of trainer ranks through which a bucket travels.

    The chain begins with the bucket's sender and has all trainer ranks that share GPUs with receivers of the bucket. Each rank
    gets the bytes from the previous rank, passes them on, and keeps them in a transfer buffer for the engine rank on its GPU.
    """

    # Copy of the bucket for the engine rank on the same GPU: its sender is this trainer rank, its index is the number of this
    # step, and its only receiver is that engine rank. It has no receiver if that engine rank does not need the bucket.
    bucket: Bucket
    chain: str  # name of the chain: Bucket.key of the bucket in the transfer plan
    previous: int | None  # trainer rank from which this rank receives the bytes; None: this rank has the weights
    next: int | None  # trainer rank to which this rank sends the bytes; None: this rank is the last of the chain


def relay_steps(plan: TransferPlan, relays: Mapping[int, int], hosts: Sequence[str]) -> list[list[RelayStep]]:
    """Return the steps of every trainer rank, in order.

    `relays`: engine rank -> trainer rank on the same GPU. `hosts`: host of each trainer rank. Every rank processes the buckets
    in the order of (index, sender). So a rank waits only for ranks that still process an earlier bucket, or that come earlier
    in the chain of the same bucket. Therefore the ranks cannot deadlock.
    """
    steps: list[list[RelayStep]] = [[] for _ in hosts]
    for bucket in sorted(plan.buckets, key=lambda b: (b.index, b.sender)):
        receiver_on = {relays[engine_rank]: engine_rank for engine_rank in bucket.receivers}
        chain = _relay_chain(bucket.sender, receiver_on, hosts)
        for before, rank, after in zip([None, *chain], chain, [*chain[1:], None], strict=False):
            receivers = (receiver_on[rank],) if rank in receiver_on else ()
            own = replace(bucket, sender=rank, index=len(steps[rank]), receivers=receivers)
            steps[rank].append(RelayStep(own, bucket.key, before, after))
    return steps


def forwarded_bytes(steps: Sequence[Sequence[RelayStep]], hosts: Sequence[str]) -> tuple[int, int]:
    """Return the bytes that trainer ranks send to each other in one push: inside a host, and from host to host."""
    inside = between = 0
    for rank, each in enumerate(steps):
        for step in each:
            if step.next is not None and hosts[step.next] == hosts[rank]:
                inside += step.bucket.nbytes
            elif step.next is not None:
                between += step.bucket.nbytes
    return inside, between


def sent_bytes(plan: TransferPlan, hosts: Sequence[str], engine_hosts: Sequence[str]) -> tuple[int, int]:
    """Return the bytes that trainer ranks send directly to engine ranks in one push: inside a host, and from host to host.

    `hosts`: host of each trainer rank. `engine_hosts`: host of each engine rank.
    """
    inside = sum(
        bucket.nbytes * sum(engine_hosts[receiver] == hosts[bucket.sender] for receiver in bucket.receivers)
        for bucket in plan.buckets
    )
    return inside, plan.sent_bytes - inside


def _relay_chain(sender: int, relays: Iterable[int], hosts: Sequence[str]) -> list[int]:
    """Return the trainer ranks of a relay chain in order: the sender, and then every other rank of `relays`.

    The ranks of a host are consecutive, so the bytes enter each host only once. The rank at which a chain enters a host depends
    on the sender, so that a push uses the network cards of several ranks.
    """
    ranks_on: dict[str, list[int]] = {host: [] for host in hosts}  # in the order of the ranks
    for rank in sorted(set(relays) - {sender}):
        ranks_on[hosts[rank]].append(rank)
    order, chain = list(ranks_on), [sender]
    first = order.index(hosts[sender])
    for host in order[first:] + order[:first]:
        ranks = ranks_on[host]
        start = sender % max(1, len(ranks))
        chain += ranks[start:] + ranks[:start]
    return chain


@dataclass(frozen=True)
class LinkSpeeds:
    """Network speeds that the cost estimate assumes for each rank."""

    send_gb_per_s: float
    receive_gb_per_s: float
    message_us: float  # microseconds that a message takes in addition to the time for its bytes


@dataclass(frozen=True)
class RankTraffic:
    """Traffic that one rank sends or receives in a weight sync."""

    rank: str  # such as "trainer 0" or "engine 0 rank 1"
    bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class TransferCost:
    """Estimated bytes, messages and seconds of a transfer plan."""

    senders: list[RankTraffic]
    receivers: list[RankTraffic]
    sent_bytes: int  # as TransferPlan.sent_bytes
    min_bytes: int  # as TransferPlan.min_bytes

    @property
    def ratio(self) -> float:
        """Number of bytes that the engines receive, divided by the number of bytes that the engines hold."""
        return self.sent_bytes / self.min_bytes

    @property
    def seconds(self) -> float:
        """Duration of the sync if all ranks work in parallel: the time of the slowest rank."""
        return max(traffic.seconds for traffic in [*self.senders, *self.receivers])

    @property
    def imbalance(self) -> float:
        """Bytes of the sender that sends most, divided by the average over all senders."""
        sent = [traffic.bytes for traffic in self.senders]
        return max(sent) * len(sent) / sum(sent) if any(sent) else 1.0


def estimate_transfer_cost(
    plan: TransferPlan,
    num_senders: int,
    speeds: LinkSpeeds,
    shared: bool,
    steps: Sequence[Sequence[RelayStep]] | None = None,
) -> TransferCost:
    """Estimate bytes, messages and seconds of a plan, without running it.

    `shared` is true for shared memory: the sender writes one copy, which all receivers read. Otherwise the sender sends one copy
    to each receiver. With `steps` (see relay_steps), each trainer rank sends one copy to the next trainer rank in the chain.
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
    if steps is not None:
        senders = [[step.bucket.nbytes for step in each if step.next is not None] for each in steps]
    return TransferCost(
        [traffic(f"trainer {n}", sizes, speeds.send_gb_per_s) for n, sizes in enumerate(senders)],
        [
            traffic(f"engine {n // plan.engine_tp} rank {n % plan.engine_tp}", sizes, speeds.receive_gb_per_s)
            for n, sizes in enumerate(receivers)
        ],
        plan.sent_bytes,
        plan.min_bytes,
    )
