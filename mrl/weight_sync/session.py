"""Opening a session between the trainer ranks and the engines: greet, compile the plan, prove it, open the wires."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from models.conversion.mapping import Box, Mapping
from mrl.config.schema import WeightSyncConfig
from mrl.core.types import SyncReport
from mrl.weight_sync.control_channel import ControlChannel
from mrl.weight_sync.coordinator import Coordinator
from mrl.weight_sync.engine_control import EngineControl, PauseMode
from mrl.weight_sync.engine_layout import OUTPUT, EngineLayout, Topology
from mrl.weight_sync.errors import SyncError, WeightMismatchError
from mrl.weight_sync.sender import ENGINE_PATIENCE, BucketSender
from mrl.weight_sync.transfer_plan import Bucket, compile_transfer_plan, trainer_shards
from mrl.weight_sync.transports import CudaIpcSendEnd, ProcessGroupEnd, SendEnd, SharedMemorySendEnd, join_group
from parallel.dims import ParallelDims

# FROM: The trainer ranks of a weight sync, as one: what one of them learns, all know; what fails on one fails on all.
# FROM: Live weight sync: every trainer rank sends what the plan says, straight to the engine ranks that need it.

log = logging.getLogger(__name__)
PATIENCE = 4 * ENGINE_PATIENCE  # times `timeout_s`: of trainer ranks that wait for one that waits for engines


class Weights(Protocol):
    """One trainer rank's weights, as the conversion layer shows them."""

    @property
    def dims(self) -> ParallelDims: ...

    @property
    def rows(self) -> Sequence[Mapping]: ...

    @property
    def sizes(self) -> dict[str, int]: ...

    def stage(self, name: str) -> int:
        """Pipeline stage that holds Megatron's parameter `name`."""

    def reader(self) -> Callable[[str, Box], Tensor]:
        """To read parts of Hugging Face tensors that this rank holds, as they are now; for one pass."""


LayoutOf = Callable[[Topology], EngineLayout]


@dataclass(frozen=True)
class SenderSession:
    """One trainer rank's end of an open session."""

    team: TrainerRanks
    channel: ControlChannel
    coordinator: Coordinator | None  # on rank 0
    outlet: SendEnd
    buckets: list[Bucket]  # that this rank sends
    closing: ExitStack

    def close(self) -> None:
        """Let go of everything; engines that are gone already do not matter."""
        self.closing.close()


def open_session(
    urls: Sequence[str], weights: Weights, layout_of: LayoutOf, settings: WeightSyncConfig
) -> SenderSession:
    """Every trainer rank calls this. Raises SyncError or ValueError, the same on all ranks, and leaves nothing behind."""
    with ExitStack() as stack:
        team = TrainerRanks(PATIENCE * settings.timeout_s)
        stack.callback(team.close)
        opening = _Opening(team, urls, weights, settings, stack)
        coordinator = opening.coordinator
        channel, where = opening.join()
        ready = team.first(lambda: opening.compile(layout_of, channel, where))
        buckets: list[Bucket] = channel.get(f"send/{team.rank}")
        outlet = opening.open_wires(ready, channel, buckets)
        return SenderSession(team, channel, coordinator, outlet, buckets, stack.pop_all())
    raise AssertionError("the stack does not swallow exceptions")


class _Opening:
    """The steps, in their order. What is opened is put on the stack."""

    def __init__(
        self, team: TrainerRanks, urls: Sequence[str], weights: Weights, settings: WeightSyncConfig, stack: ExitStack
    ) -> None:
        self.team, self.urls, self.weights, self.settings, self.stack = team, urls, weights, settings, stack
        self.coordinator: Coordinator | None = None
        self.begun: dict[str, Any] = team.first(self._begin)

    def _begin(self) -> dict[str, Any]:
        """Rank 0: host the control channel and greet the engines."""
        infos, unreachable = [], {}
        for url in self.urls:
            try:
                with EngineControl(url, self.settings.timeout_s) as engine:
                    infos.append(engine.server_info())
            except Exception as error:  # an engine that has died; all the others are looked at as well
                unreachable[url] = f"{type(error).__name__}: {error}"
        if unreachable:
            raise SyncError(f"engines do not answer: {unreachable}", unreachable)
        kinds = {(info["device"], info["dtype"], Topology.of(info)) for info in infos}
        if len(kinds) != 1:
            raise ValueError(f"engines must agree in device, dtype and topology, got {kinds} of {list(self.urls)}.")
        ((_, _, topology),) = kinds
        session, address, timeout_s = uuid.uuid4().hex[:8], _own_address(self.urls[0]), self.settings.timeout_s
        mode = cast("PauseMode", self.settings.pause_mode)  # checked when the run was planned
        hosted, port = ControlChannel.host(address, session, timeout_s)
        self.stack.callback(lambda: hosted)  # the store lives as long as the session
        reach = dict(address=address, port=port, session=session)
        join = partial(ControlChannel.join, **reach, timeout_s=timeout_s)
        self.coordinator = Coordinator(self.urls, topology.tp, timeout_s, mode, join)
        self.stack.callback(self.coordinator.close)
        hello = self.coordinator.hello(dict(reach, timeout_s=ENGINE_PATIENCE * timeout_s))
        return dict(reach=reach, topology=topology, hello=hello)

    def join(self) -> tuple[ControlChannel, list[Any]]:
        """Reach the control channel; (host, GPU) of every trainer rank."""

        def reach() -> ControlChannel:
            return ControlChannel.join(**self.begun["reach"], timeout_s=self.settings.timeout_s)

        where = self.team.everyone(_place)
        address, hosts = self.begun["reach"]["address"], {host for host, _ in where}
        if len(hosts) > 1 and address.startswith("127."):
            raise ValueError(
                f"trainers are on {len(hosts)} machines, but engines listen on {address}, where only those of one reach them; "
                "use weight_sync.transport=disk."
            )
        channels: list[ControlChannel] = []
        self.team.everyone(lambda: channels.append(reach()))
        return channels[0], where

    def compile(self, layout_of: LayoutOf, channel: ControlChannel, where: list[Any]) -> dict[str, Any]:
        """Rank 0: compile the plan, hand everyone its part, have the engines prove it, choose the wires."""
        assert self.coordinator is not None, "only rank 0 talks with the engines"
        hello, tp = self.begun["hello"], self.begun["topology"].tp
        parameters, layout = hello[0]["parameters"], layout_of(self.begun["topology"])
        layout = layout.with_output_copy() if OUTPUT in parameters and OUTPUT not in layout.row_of else layout
        for rank, said in hello.items():
            check_parameters(layout, rank % tp, said["parameters"], f"engine rank {rank}")
        w, sizes = self.weights, {name: (dtype, _itemsize(dtype)) for name, (_, dtype) in parameters.items()}
        owned = trainer_shards(w.rows, w.sizes, w.dims, w.stage)
        plan = compile_transfer_plan(owned, layout, len(hello) // tp, sizes.__getitem__, self.settings.bucket_bytes)
        for rank in range(self.team.size):
            channel.put(f"send/{rank}", plan.of_sender(rank))
        for tp_rank in range(tp):  # the same for all engines
            parts = plan.of_receiver(tp_rank)
            for rank in range(tp_rank, len(hello), tp):
                channel.put(f"plan/{rank}", parts)
        self.coordinator.prove()
        transport = choose_transport(self.settings.transport, where, [said["where"] for said in hello.values()])
        log.info("weight sync by %s: %s", transport, plan)
        return dict(transport=transport, cuda=hello[0]["where"][1] is not None, receivers=len(hello))

    def open_wires(self, ready: dict[str, Any], channel: ControlChannel, buckets: Sequence[Bucket]) -> SendEnd:
        """Every rank: open this end, while the engines open theirs."""
        slot_bytes = max((bucket.nbytes for bucket in buckets), default=0)
        outlets: list[SendEnd] = []

        def shared() -> Any:
            outlets.append(
                (SharedMemorySendEnd if ready["transport"] == "shared_memory" else CudaIpcSendEnd)(slot_bytes)
            )
            self.stack.callback(outlets[0].close)
            return outlets[0].handle()

        def group() -> None:
            outlets.append(self._join_group(ready, channel, slot_bytes))
            self.stack.callback(outlets[0].close)

        if ready["transport"] == "process_group":
            name = f"mrl_weights_{self.begun['reach']['session']}"
            how = dict(backend="nccl" if ready["cuda"] else "gloo", name=name, num_senders=self.team.size)
            self.team.first(lambda: self._tell_wires(channel, how | dict(num_receivers=ready["receivers"])))
            try:
                self.team.everyone(group)
            except SyncError:
                self.team.first(self._opened)  # says which engine did not come
                raise
        else:
            handles = dict(enumerate(self.team.everyone(shared)))
            self.team.first(lambda: self._tell_wires(channel, dict(backend=None, handles=handles)))
        self.team.first(self._opened)
        outlets[0].settle()
        return outlets[0]

    def _tell_wires(self, channel: ControlChannel, how: dict[str, Any]) -> None:
        assert self.coordinator is not None, "only rank 0 talks with the engines"
        channel.put("wires", how | dict(timeout_s=self.settings.timeout_s))
        self.coordinator.open()

    def _opened(self) -> None:
        assert self.coordinator is not None, "only rank 0 talks with the engines"
        self.coordinator.opened()

    def _join_group(self, ready: dict[str, Any], channel: ControlChannel, slot_bytes: int) -> ProcessGroupEnd:
        how = channel.get("wires")
        size, device = how["num_senders"] + how["num_receivers"], torch.device("cuda" if ready["cuda"] else "cpu")
        group = join_group(channel.store, how["name"], how["backend"], self.team.rank, size, how["timeout_s"])
        return ProcessGroupEnd(group, self.team.size, slot_bytes, device)


def check_parameters(
    layout: EngineLayout, tp_rank: int, found: dict[str, tuple[tuple[int, ...], str]], who: str
) -> None:
    """Raise ValueError unless the engine's parameters are exactly those that the family's table says."""
    expected, shapes = layout.shapes(tp_rank), {name: tuple(shape) for name, (shape, _) in found.items()}
    problems = [f"{name} {list(shapes[name])} is not in the table" for name in shapes.keys() - expected.keys()]
    problems += [f"{name} {list(expected[name])} is missing" for name in expected.keys() - shapes.keys()]
    problems += [
        f"{name} is {list(shapes[name])}, the table says {list(expected[name])}"
        for name in expected.keys() & shapes.keys()
        if expected[name] != shapes[name]
    ]
    if problems:
        raise ValueError(
            f"{who} stores {len(problems)} parameters otherwise than the family's table says: "
            f"{'; '.join(sorted(problems)[:5])}. Nothing was sent; weight_sync.transport=disk leaves the loading to SGLang."
        )


def choose_transport(wanted: str, senders: Sequence[Any], receivers: Sequence[Any]) -> str:
    """`auto` spelled out: shared memory or CUDA IPC where both sides share one machine or its GPUs, a process group elsewhere.

    `senders`, `receivers`: (host, GPU or None) of each rank. Raises ValueError where the wish cannot be met.
    """
    hosts = {host for host, _ in [*senders, *receivers]}
    gpus = [{gpu for _, gpu in side if gpu is not None} for side in (senders, receivers)]
    colocated = bool(gpus[0] & gpus[1])
    if wanted == "auto":
        here = "cuda_ipc" if colocated else "process_group" if any(gpus) else "shared_memory"
        wanted = here if colocated or len(hosts) == 1 else "process_group"
    if wanted in ("shared_memory", "cuda_ipc") and len(hosts) > 1:
        raise ValueError(
            f"weight_sync.transport={wanted}: trainers and engines are on {len(hosts)} machines; use process_group where "
            "they have GPUs of their own, or disk."
        )
    if (wanted == "cuda_ipc") != all(gpus) and wanted != "process_group":
        raise ValueError(f"weight_sync.transport={wanted} does not fit the device that weights are on; use auto.")
    if wanted == "process_group" and colocated:
        raise ValueError(
            "weight_sync.transport=process_group: NCCL cannot join two processes on one GPU; use cuda_ipc."
        )
    return wanted


def _place() -> tuple[str, str | None]:
    """(host, GPU) of this process."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None
    return socket.gethostname(), gpu


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _own_address(engine_url: str) -> str:
    """The address of this machine that the engine can reach."""
    host = urlsplit(engine_url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]


class TrainerRanks:
    """All ranks of the default group, over a gloo group of their own, whose patience is longer than every wait of a sync."""

    def __init__(self, timeout_s: float) -> None:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def first[T](self, call: Callable[[], T]) -> T:
        """What rank 0 makes of `call`, on every rank; its error too."""
        outcome: list[Any] = [_outcome(call) if self.rank == 0 else None]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return _unpacked(outcome[0])

    def everyone[T](self, call: Callable[[], T]) -> list[T]:
        """What each rank makes of its own `call`, by rank, on every rank; the first rank's error that has one."""
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, _outcome(call), group=self._group)
        return [_unpacked(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def _outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except (SyncError, WeightMismatchError, ValueError) as error:
        return None, error
    except Exception as error:  # told to all ranks, which raise it: one that is left alone would wait for the others
        log.exception("weight sync")
        return None, SyncError(f"{type(error).__name__}: {error}")


def _unpacked(outcome: tuple[Any, Exception | None]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result


class LiveSync:
    """One trainer rank's end. Every rank makes one, and calls `push` with the same version; rank 0 talks with the engines."""

    def __init__(self, urls: Sequence[str], weights: Weights, layout_of: LayoutOf, settings: WeightSyncConfig) -> None:
        """Reach the engines, compile the plan, open the wires; raises SyncError or ValueError, the same on all ranks."""
        self._weights, self._delta = weights, settings.delta
        self.session = open_session(urls, weights, layout_of, settings)
        self.sender = BucketSender(self.session.channel, self.session.outlet, self.session.buckets, settings.delta)
        self._num_tensors = len({piece.name for bucket in self.session.buckets for piece in bucket.pieces})
        self._base: str | None = None  # the last push that every engine holds, checked
        self._version = -1

    def push(self, version: int, released: bool = False) -> SyncReport:
        """Bring the current weights to every engine, which then serves them as `version`.

        `released`: engines had given the memory of their weights back, and stay paused until they have all of it again.
        What this rank sent; and which engines failed on the way (they are out of service; a new LiveSync over those that are
        left and their successors brings them in). Raises WeightMismatchError on all ranks.
        """
        assert version >= self._version, f"versions only grow: {version} after {self._version}"
        team, base, start = self.session.team, None, time.perf_counter()
        if self._delta and not released:
            base = self._base
        push = team.first(lambda: self._begin(version, base))
        begun = time.perf_counter()
        read = self._weights.reader()
        sent = self.sender.push(push, lambda piece: read(piece.name, piece.box), full=base is None)
        sending = time.perf_counter()
        failed, again = team.first(lambda: self._finish(push, version, base is not None, not released))
        done = time.perf_counter()
        self._version, self._base = version, None if failed or again else push
        return SyncReport(
            bytes=sent.payload_bytes,
            raw_bytes=sent.raw_bytes,
            tensors=self._num_tensors,
            buckets=sent.messages,
            seconds=done - start,
            engine_seconds=begun - start + sent.waited_s + done - sending,
            failed=failed,
            again=again,
        )

    def _begin(self, version: int, base: str | None) -> str:
        """Rank 0: name the push and have the engines wait for it."""
        push = f"push/{version}/{uuid.uuid4().hex[:8]}"
        self._coordinator.begin(push, base)
        return push

    def _finish(self, push: str, version: int, delta: bool, go_on: bool) -> tuple[dict[str, str], bool]:
        """Rank 0: have the engines serve; which failed, and whether a difference did not arrive as it was meant."""
        coordinator, again = self._coordinator, False
        try:
            coordinator.finish(push)
            coordinator.serve(push, version, go_on)
        except WeightMismatchError as error:
            if not delta:
                raise
            log.warning("version %d is sent again in full: %s", version, error)
            again = True
        return coordinator.failures, again

    def close(self) -> None:
        """Let the engines go; those that are gone already do not matter."""
        self.session.close()

    @property
    def _coordinator(self) -> Coordinator:
        assert self.session.coordinator is not None, "only rank 0 talks with the engines"
        return self.session.coordinator
