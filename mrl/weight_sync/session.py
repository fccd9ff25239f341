"""Live weight sync: trainer ranks send the weights directly to the engine ranks, following the transfer plan.

A session is opened once for a set of engines. Trainer rank 0 begins the session with each engine, compiles the transfer plan and
tells the engines to check the plan. Then every rank opens its endpoint of the transport. After that, each push sends one version
of the weights.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from models.conversion.fp8_blocks import SCALE_SUFFIX, quantized_shapes, quantizing_reader
from models.conversion.mapping import Box, ParamMapping
from models.conversion.mtp_mapping import MTP_PREFIX
from mrl.config.process_schema import PauseMode, Transport, WeightSyncConfig
from mrl.core.types import SyncReport
from mrl.weight_sync.control_channel import (
    RECEIVER_TIMEOUT_FACTOR,
    TRANSPORT_KEY,
    ControlChannel,
    receiver_plan_key,
    sender_plan_key,
)
from mrl.weight_sync.coordinator import Coordinator, common_server_info
from mrl.weight_sync.engine_control import WeightMismatchError, WeightSyncError
from mrl.weight_sync.engine_layout import HF_OUTPUT_WEIGHT, EngineLayout, EngineParallelSizes, check_engine_parameters
from mrl.weight_sync.receiver import EngineRankInfo
from mrl.weight_sync.sender import BucketSender, ReadTensor, RelaySender
from mrl.weight_sync.transfer_plan import (
    Bucket,
    Destination,
    ProcessLocation,
    RelayStep,
    TransferPlan,
    choose_transport,
    compile_transfer_plan,
    relay_ranks,
    relay_steps,
    trainer_shards,
)
from mrl.weight_sync.transports import (
    CudaIpcSendEndpoint,
    ProcessGroupEndpoint,
    ProcessGroupSetup,
    SendEndpoint,
    SharedBuffersSetup,
    SharedMemorySendEndpoint,
    location_of,
)
from parallel.device import backend, device
from parallel.dims import ParallelDims
from parallel.spans import span

logger = logging.getLogger(__name__)
RANK_TIMEOUT_FACTOR = 4 * RECEIVER_TIMEOUT_FACTOR
"""A trainer rank waits at most this many times weight_sync.timeout_s for another trainer rank.

This is so long because the other rank may itself wait for engines."""

LayoutOf = Callable[[EngineParallelSizes], EngineLayout]
"""Function that returns the layout of an engine with given parallel sizes."""


class TrainerWeights(Protocol):
    """The methods of WeightBridge that LiveSync uses. A WeightBridge has the weights of one trainer rank."""

    @property
    def dims(self) -> ParallelDims:
        """Parallel layout of the trainer."""

    @property
    def rows(self) -> Sequence[ParamMapping]:
        """The family's table, expanded to all layers and experts of the model."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model by name, see Architecture.sizes."""

    def stage(self, name: str) -> int:
        """Return the pipeline stage that has the Megatron parameter `name`."""

    def reader(self) -> ReadTensor:
        """Return a function that reads this rank's current weights. Use the function for one push only."""


def negative_exp_reader(read: ReadTensor, names: Set[str]) -> ReadTensor:
    """Return a function like `read`, which however returns -exp(x) in float32 for each value x of the tensors `names`."""

    def read_value(name: str, box: Box) -> Tensor:
        return -read(name, box).float().exp() if name in names else read(name, box)

    return read_value


class LiveSync:
    """One trainer rank's part in a live weight sync. Every trainer rank creates a LiveSync. Rank 0 also controls the engines."""

    def __init__(
        self, urls: Sequence[str], weights: TrainerWeights, layout_of: LayoutOf, settings: WeightSyncConfig
    ) -> None:
        """Open a session with the engines. All ranks call this.

        If this fails, all ranks raise the same WeightSyncError or ValueError, and everything that was opened is closed.
        """
        self._weights, self._delta = weights, settings.delta
        with ExitStack() as stack:
            opener = _SessionOpener(urls, weights, settings, stack)
            channel, locations = opener.join_channel()
            choice = opener.ranks.on_rank_0(lambda: opener.distribute_plan(layout_of, channel, locations))
            part: _SenderPart = channel.get(sender_plan_key(opener.ranks.rank))
            self.send_endpoint = opener.open_transport(choice, channel, part.buckets)
            self._closing = stack.pop_all()  # closes everything that was opened
        self._ranks = opener.ranks
        if opener.coordinator is not None:
            self._coordinator = opener.coordinator  # only rank 0 talks to the engines
        self.sender = part.sender(channel, self.send_endpoint, settings.delta)
        self._num_tensors = len({chunk.name for bucket in part.buckets for chunk in bucket.chunks})
        # Name of each matrix that is sent in FP8 with block scales -> its shape
        self._quantized = quantized_shapes(weights.rows, weights.sizes) if part.block_scales else {}
        # names of the tensors of which engines store -exp(x)
        self._negative_exp = frozenset(name for row in weights.rows if row.negative_exp_in_engine for name in row.hf)
        self._verified_push: str | None = None  # the last push, if every engine has verified it
        self._version = -1

    def push(self, version: int, engines_offloaded: bool = False) -> SyncReport:
        """Send the current weights to every engine. The engines then serve them as `version`. All ranks call this.

        `engines_offloaded`: whether the engines had released their weights. If so, the push sends all weights, not a difference,
        and the engines stay paused, because they have no KV cache yet.

        The report says what this rank sent and which engines failed. Failed engines are out of service. If engines failed, the
        caller must open a new session with the other engines and with replacements of the failed engines. If an engine holds
        wrong weights after a push of all weights, all ranks raise WeightMismatchError. If it holds wrong weights after a push
        of a difference, no error is raised, but `must_repeat` of the report is True: the caller must push again.
        """
        assert version >= self._version, f"weight versions only grow: {version} was pushed after {self._version}"
        start = time.perf_counter()
        base_push = self._verified_push if self._delta and not engines_offloaded else None
        with span("begin push", "weight_sync", version=version):
            push_name = self._ranks.on_rank_0(lambda: self._coordinator.begin_push(version, base_push))
        begun = time.perf_counter()
        stats = self.sender.send_all(push_name, self._reader(), full=base_push is None)
        sent = time.perf_counter()
        with span("finish push", "weight_sync", version=version):
            failed, must_repeat = self._ranks.on_rank_0(
                lambda: self._finish_push(
                    push_name, version, is_delta=base_push is not None, resume=not engines_offloaded
                )
            )
        done = time.perf_counter()
        self._version, self._verified_push = version, None if failed or must_repeat else push_name
        return SyncReport(
            bytes=stats.sent_bytes,
            uncompressed_bytes=stats.uncompressed_bytes,
            tensors=self._num_tensors,
            buckets=stats.messages,
            seconds=done - start,
            engine_wait_seconds=begun - start + stats.waited_s + done - sent,
            failed=failed,
            must_repeat=must_repeat,
        )

    def _reader(self) -> ReadTensor:
        read = self._weights.reader()
        read = negative_exp_reader(read, self._negative_exp) if self._negative_exp else read
        return quantizing_reader(read, self._quantized) if self._quantized else read

    def _finish_push(self, push_name: str, version: int, is_delta: bool, resume: bool) -> tuple[dict[str, str], bool]:
        """Wait until the engines have verified the weights, and have the engines serve `version`. Only rank 0 calls this.

        Returns URL -> reason for each engine that failed, and whether the version must be pushed again in full.
        """
        must_repeat = False
        try:
            self._coordinator.wait_receipts(push_name)
            self._coordinator.publish(push_name, version, resume)
        except WeightMismatchError as error:
            if not is_delta:
                raise
            logger.warning("version %d is pushed again in full: %s", version, error)
            must_repeat = True
        return self._coordinator.failures, must_repeat

    def close(self) -> None:
        """Close the session. This works also if engines have ended."""
        self._closing.close()


class TrainerRankGroup:
    """A gloo process group of all trainer ranks. Its timeout is longer than every wait in a weight sync."""

    def __init__(self, timeout_s: float) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def on_rank_0[T](self, call: Callable[[], T]) -> T:
        """Run `call` on rank 0. Every rank then returns the result of `call`, or raises the error of `call`."""
        outcome: list[Any] = [_try(call) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return _result_or_raise(outcome[0])

    def on_every_rank[T](self, call: Callable[[], T]) -> list[T]:
        """Run `call` on every rank. Every rank then returns the results of all ranks, by rank.

        If ranks fail, all ranks raise the error of the lowest rank that failed.
        """
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _try(call), group=self._group)
        return [_result_or_raise(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Destroy the group."""
        dist.destroy_process_group(self._group)


def _try(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return (result of `call`, None), or (None, the error that it raised)."""
    try:
        return call(), None
    except (WeightSyncError, WeightMismatchError, ValueError) as error:
        return None, error
    except Exception as error:  # all ranks raise the error; otherwise the other ranks would wait for this rank
        logger.exception("weight sync")
        return None, WeightSyncError(f"{type(error).__name__}: {error}")


def _result_or_raise(outcome: tuple[Any, Exception | None]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result


@dataclass(frozen=True)
class _SessionInfo:
    """A session that rank 0 has begun with all engines."""

    connection: dict[str, Any]  # arguments of ControlChannel.join: address, port and session
    parallel_sizes: EngineParallelSizes
    infos: dict[int, EngineRankInfo]  # by engine rank, numbered over all engines
    with_draft: bool  # whether the draft models of the engines get the weights of the MTP layer


@dataclass(frozen=True)
class _SenderPart:
    """One trainer rank's part of the plan."""

    buckets: list[Bucket]  # buckets that this rank puts into its transfer buffers, in order
    # One relay step for each bucket. None: there are no relays, and this rank sends its buckets directly to the receivers
    steps: list[RelayStep] | None = None
    block_scales: bool = False  # whether matrices are sent in FP8 with block scales

    def sender(self, channel: ControlChannel, send_endpoint: SendEndpoint, delta: bool) -> BucketSender:
        """Return the object that sends the buckets."""
        if self.steps is None:
            return BucketSender(channel, send_endpoint, self.buckets, delta)
        return RelaySender(channel, send_endpoint, self.buckets, delta, steps=self.steps)


type _ReceiverPart = list[tuple[Bucket, list[Destination]]]
"""An engine rank's part of the plan: its buckets in order, each with the destinations of its chunks."""


def _divide_plan(
    plan: TransferPlan, senders: Sequence[ProcessLocation], receivers: Sequence[ProcessLocation], relayed: bool
) -> tuple[list[_SenderPart], Iterator[_ReceiverPart]]:
    """Divide the plan into the parts of all trainer ranks and the parts of all engine ranks.

    If `relayed`, each engine rank gets all its buckets from the trainer rank on its own GPU.
    """
    parts = [plan.buckets_of_receiver(tp_rank) for tp_rank in range(plan.engine_tp)]  # the same in every engine
    if not relayed:
        by_sender = [_SenderPart(plan.buckets_of_sender(rank)) for rank in range(len(senders))]
        return by_sender, (parts[rank % plan.engine_tp] for rank in range(len(receivers)))
    relays = relay_ranks(senders, receivers)
    steps = relay_steps(plan, relays, [location.host for location in senders])

    def from_relay(rank: int) -> _ReceiverPart:
        buckets = [step.bucket for step in steps[relays[rank]] if step.bucket.receivers]
        return [(bucket, part[1]) for bucket, part in zip(buckets, parts[rank % plan.engine_tp], strict=True)]

    by_sender = [_SenderPart([step.bucket for step in each], each) for each in steps]
    return by_sender, map(from_relay, range(len(receivers)))


@dataclass(frozen=True)
class _TransportChoice:
    """The transport of the session, and what every trainer rank needs to open it."""

    transport: Transport
    num_engines: int
    engine_tp: int  # ranks of each engine


class _SessionOpener:
    """Opens a session. LiveSync calls the public methods in the order below. `stack` closes everything that is opened."""

    def __init__(
        self, urls: Sequence[str], weights: TrainerWeights, settings: WeightSyncConfig, stack: ExitStack
    ) -> None:
        self.urls, self.weights, self.settings, self.stack = urls, weights, settings, stack
        self.ranks = TrainerRankGroup(RANK_TIMEOUT_FACTOR * settings.timeout_s)
        stack.callback(self.ranks.close)
        self.coordinator: Coordinator | None = None  # on rank 0
        self.session = self.ranks.on_rank_0(self._begin_session)

    def _begin_session(self) -> _SessionInfo:
        """Host the control channel and begin a session with every engine. Only rank 0 calls this."""
        info = common_server_info(self.urls, self.settings.timeout_s)
        parallel_sizes = EngineParallelSizes.of(info)
        trains_mtp = any(row.megatron.startswith(MTP_PREFIX) for row in self.weights.rows)
        with_draft = trains_mtp and bool(info.get("speculative_algorithm"))
        session, address, timeout_s = uuid.uuid4().hex[:8], _local_address(self.urls[0]), self.settings.timeout_s
        hosted_channel, port = ControlChannel.host(address, session, timeout_s)
        # holds a reference: the TCP store of the channel ends with this object
        self.stack.callback(lambda: hosted_channel)
        connection = dict(address=address, port=port, session=session)
        join = partial(ControlChannel.join, **connection, timeout_s=timeout_s)
        self.coordinator = Coordinator(
            self.urls, parallel_sizes.tp, timeout_s, PauseMode(self.settings.pause_mode), join
        )
        self.stack.callback(self.coordinator.close)
        message = dict(connection, timeout_s=RECEIVER_TIMEOUT_FACTOR * timeout_s)
        return _SessionInfo(connection, parallel_sizes, self.coordinator.begin_session(message, with_draft), with_draft)

    def join_channel(self) -> tuple[ControlChannel, list[ProcessLocation]]:
        """Connect every rank to the control channel. Returns the channel, and the location of every trainer rank."""
        locations = self.ranks.on_every_rank(lambda: location_of(device()))
        address, hosts = self.session.connection["address"], {location.host for location in locations}
        if len(hosts) > 1 and address.startswith("127."):
            raise ValueError(
                f"trainers are on {len(hosts)} machines, but engines listen on {address}, which other machines cannot reach; "
                "use weight_sync.transport=disk."
            )
        # The channel is not a result of on_every_rank, because results are pickled and a channel cannot be pickled.
        channels: list[ControlChannel] = []
        self.ranks.on_every_rank(
            lambda: channels.append(ControlChannel.join(**self.session.connection, timeout_s=self.settings.timeout_s))
        )
        return channels[0], locations

    def distribute_plan(
        self, layout_of: LayoutOf, channel: ControlChannel, locations: Sequence[ProcessLocation]
    ) -> _TransportChoice:
        """Compile the plan, give every rank its part of the plan, have the engines check it, and choose the transport.

        Only rank 0 calls this.
        """
        assert self.coordinator is not None, "only rank 0 talks to the engines"
        infos, tp = self.session.infos, self.session.parallel_sizes.tp
        parameters, layout = infos[0].parameters, layout_of(self.session.parallel_sizes)
        layout = layout.with_draft() if self.session.with_draft else layout
        layout = (
            layout.with_output_copy()
            if HF_OUTPUT_WEIGHT in parameters and HF_OUTPUT_WEIGHT not in layout.row_of
            else layout
        )
        layout = layout.with_block_scales() if any(name.endswith(SCALE_SUFFIX) for name in parameters) else layout
        for rank, info in infos.items():
            check_engine_parameters(layout, rank % tp, info.parameters, f"engine rank {rank}")
        weights = self.weights
        dtypes = {name: (dtype, getattr(torch, dtype).itemsize) for name, (_, dtype) in parameters.items()}
        shards = trainer_shards(weights.rows, weights.sizes, weights.dims, weights.stage)
        bucket_bytes = self.settings.bucket_bytes
        plan = compile_transfer_plan(shards, layout, len(infos) // tp, dtypes.__getitem__, bucket_bytes)
        receivers = [infos[rank].location for rank in range(len(infos))]
        transport = choose_transport(self.settings.transport, locations, receivers)
        by_sender, by_receiver = _divide_plan(plan, locations, receivers, relayed=transport is Transport.cuda_ipc)
        for rank, part in enumerate(by_sender):
            channel.put(sender_plan_key(rank), replace(part, block_scales=layout.block_scales))
        for rank, buckets in enumerate(by_receiver):
            channel.put(receiver_plan_key(rank), buckets)
        self.coordinator.check_plan()
        logger.info("weight sync by %s: %s", transport, plan)
        return _TransportChoice(transport, len(infos) // tp, tp)

    def open_transport(
        self, choice: _TransportChoice, channel: ControlChannel, buckets: Sequence[Bucket]
    ) -> SendEndpoint:
        """Open this rank's endpoint of the transport, while the engines open their endpoints."""
        buffer_bytes = max((bucket.nbytes for bucket in buckets), default=0)
        if choice.transport is Transport.process_group:
            send_endpoint = self._open_process_group(choice, channel, buffer_bytes)
        else:
            send_endpoint = self._open_shared_buffers(choice.transport, channel, buffer_bytes)
        self.ranks.on_rank_0(self._wait_connected)
        send_endpoint.on_connected()
        return send_endpoint

    def _open_shared_buffers(self, transport: Transport, channel: ControlChannel, buffer_bytes: int) -> SendEndpoint:
        kind = SharedMemorySendEndpoint if transport is Transport.shared_memory else CudaIpcSendEndpoint
        ends: list[SharedMemorySendEndpoint | CudaIpcSendEndpoint] = []

        def allocate() -> Any:
            ends.append(kind(buffer_bytes))
            self.stack.callback(ends[0].close)
            return ends[0].handle()

        handles = dict(enumerate(self.ranks.on_every_rank(allocate)))
        self.ranks.on_rank_0(lambda: self._connect_receivers(channel, SharedBuffersSetup(handles)))
        return ends[0]

    def _open_process_group(self, choice: _TransportChoice, channel: ControlChannel, buffer_bytes: int) -> SendEndpoint:
        setup = ProcessGroupSetup(
            name=f"mrl_weights_{self.session.connection['session']}",
            backend=backend(),
            num_senders=self.ranks.size,
            num_engines=choice.num_engines,
            engine_tp=choice.engine_tp,
            timeout_s=self.settings.timeout_s,
        )
        ends: list[ProcessGroupEndpoint] = []

        def join() -> None:
            engines = range(choice.num_engines)
            ends.append(ProcessGroupEndpoint(channel.store, setup, self.ranks.rank, engines, buffer_bytes, device()))
            self.stack.callback(ends[0].close)

        self.ranks.on_rank_0(lambda: self._connect_receivers(channel, setup))
        try:
            self.ranks.on_every_rank(join)
        except WeightSyncError:
            self.ranks.on_rank_0(self._wait_connected)  # raises the error that names the engine
            raise
        return ends[0]

    def _connect_receivers(self, channel: ControlChannel, setup: SharedBuffersSetup | ProcessGroupSetup) -> None:
        assert self.coordinator is not None, "only rank 0 talks to the engines"
        channel.put(TRANSPORT_KEY, setup)
        self.coordinator.connect_receivers()

    def _wait_connected(self) -> None:
        assert self.coordinator is not None, "only rank 0 talks to the engines"
        self.coordinator.wait_connected()


def _local_address(engine_url: str) -> str:
    """Return the address under which the engine can reach this machine."""
    host = urlsplit(engine_url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel chooses the interface
        return probe.getsockname()[0]
