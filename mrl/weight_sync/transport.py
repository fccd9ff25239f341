"""Sends weights from the trainer to the engines: one broadcast per bucket, inside an update session of every engine."""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.types import SyncReport
from mrl.weight_sync.checksum import EngineLayout, ExpectedChecksums
from mrl.weight_sync.control import EngineControl, EngineError, PauseMode

log = logging.getLogger(__name__)

CLEANUP_TIMEOUT_S = 10.0  # per request, when engines are put back after a failure
POLL_S = 0.0005  # between looks at a broadcast and at the engines' answers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NamedTensors = Iterable[tuple[str, Tensor]]


class Transport(Protocol):
    """A way of bringing weights to engines."""

    def push(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        """Load these Hugging Face-named tensors into every engine as `version`."""

    def close(self) -> None:
        """Let the engines go."""


class SyncError(RuntimeError):
    """Weights could not be brought to every engine."""


def open_transport(
    urls: Sequence[str],
    fusions: Mapping[str, tuple[str, ...]],
    *,
    bucket_bytes: int = 512 * 1024 * 1024,
    verify: bool = True,
    timeout_s: float = 600.0,
    pause_mode: PauseMode = "retract",
    num_kv_heads: int | None = None,
) -> DistributedTransport:
    """Connect this process, the only sender, to engines that answer already; they must agree in dtype, device and sizes.

    `fusions`: as in `EngineLayout`. `pause_mode`: what becomes of requests that run during a push.
    """
    engines = [EngineControl(url, timeout_s) for url in urls]
    infos = [engine.server_info() for engine in engines]
    kinds = {(info["device"], info["dtype"], int(info["tp_size"]), int(info["ep_size"])) for info in infos}
    if len(kinds) != 1:
        raise ValueError(
            f"engines must agree in (device, dtype, tp_size, ep_size), got {sorted(kinds)} from {list(urls)}."
        )
    device, dtype, tp_size, ep_size = kinds.pop()
    layout = EngineLayout(fusions, tp_size, num_kv_heads, ep_size=ep_size)
    transport = DistributedTransport(
        engines, layout, DTYPES.get(dtype), "nccl" if device == "cuda" else "gloo", bucket_bytes, timeout_s, pause_mode
    )
    transport.verify = verify
    transport.open()
    return transport


class DistributedTransport:
    """Rank 0 of a process group that holds this process and every rank of every engine.

    A push pauses the engines, opens their update sessions, broadcasts bucket after bucket (the engines are told over HTTP what
    comes), closes the sessions, empties the KV caches, compares checksums, and lets the engines go on, also after a failure.
    """

    def __init__(
        self,
        engines: Sequence[EngineControl],
        layout: EngineLayout,
        dtype: torch.dtype | None,
        backend: str,
        bucket_bytes: int,
        timeout_s: float,
        pause_mode: PauseMode,
    ) -> None:
        """`dtype` of the engines' weights; None sends tensors as they are."""
        self.engines, self.layout, self.dtype, self.backend = list(engines), layout, dtype, backend
        self.bucket_bytes, self.timeout_s, self.pause_mode = bucket_bytes, timeout_s, pause_mode
        self.verify = True
        self._name = f"mrl_weights_{uuid.uuid4().hex[:8]}"
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.engines)), thread_name_prefix="weight_sync")
        self._group: dist.ProcessGroup | None = None
        self._broken: str | None = None
        self._engine_seconds = 0.0  # of the push, spent waiting for engines

    def open(self) -> None:
        """Form the process group with all engines."""
        address = _own_address(self.engines[0].url)
        world_size = 1 + len(self.engines) * self.layout.tp_size
        timeout = timedelta(seconds=self.timeout_s)
        # Port 0: the store takes a free one itself, so nobody can take it in between.
        store = dist.TCPStore(address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        joins = [
            self._pool.submit(
                engine.init_weights_group,
                address=address,
                port=store.port,
                rank_offset=1 + i * self.layout.tp_size,
                world_size=world_size,
                group=self._name,
                backend=self.backend,
            )
            for i, engine in enumerate(self.engines)
        ]
        self._group = _join_group(store, self._name, self.backend, world_size, timeout)
        for join in joins:
            join.result(self.timeout_s)

    def push(self, named_tensors: NamedTensors, version: int) -> SyncReport:
        """Load these tensors into every engine as `version`.

        Raises SyncError (an engine failed or did not answer in time) or WeightMismatchError.
        """
        if self._group is None or self._broken:
            raise SyncError(f"the weight transport is not open; {self._broken or 'open() was not called'}.")
        start, self._engine_seconds = time.perf_counter(), 0.0
        expected = ExpectedChecksums(self.layout) if self.verify else None
        total_bytes = tensors = buckets = 0
        with self._failures_named(), self._paused():
            with self._session():
                for bucket, is_last in _with_last(split_buckets(self._cast(named_tensors), self.bucket_bytes)):
                    total_bytes += self._send(bucket, str(version) if is_last else None, expected)
                    tensors, buckets = tensors + len(bucket), buckets + 1
            sent = time.perf_counter()
            self._each(lambda engine: engine.flush_cache(self.timeout_s))
            if expected is not None:
                for engine, reported in zip(self.engines, self._each(EngineControl.checksums), strict=True):
                    expected.compare(reported, engine.url)
            verified = time.perf_counter()
        seconds = time.perf_counter() - start
        log.info(
            "version %d: %d bytes in %d tensors and %d buckets to %d engines; send %.4f s, flush and verify %.4f s, all %.4f s",
            *(version, total_bytes, tensors, buckets, len(self.engines), sent - start, verified - sent, seconds),
        )
        return SyncReport(total_bytes, tensors, buckets, seconds, self._engine_seconds)

    def close(self) -> None:
        """Leave the process group; engines that are gone already do not matter."""
        if self._group is not None and not self._broken:
            leaving = [self._pool.submit(engine.destroy_weights_group, self._name) for engine in self.engines]
            for future in leaving:
                with suppress(EngineError, httpx.HTTPError, TimeoutError):
                    future.result(CLEANUP_TIMEOUT_S)
            dist.destroy_process_group(self._group)
        self._group = None
        self._pool.shutdown(wait=False, cancel_futures=True)
        for engine in self.engines:
            engine.close()

    def _cast(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            yield name, tensor.detach() if self.dtype is None else tensor.detach().to(self.dtype)

    def _send(self, bucket: list[tuple[str, Tensor]], version: str | None, expected: ExpectedChecksums | None) -> int:
        """Broadcast one bucket while the engines are told what it is; returns its bytes."""
        flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        answers = [
            self._pool.submit(
                engine.update_weights_from_distributed, names, dtypes, shapes, group=self._name, version=version
            )
            for engine in self.engines
        ]
        work = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        assert work is not None, "this process is not in the group"
        if expected is not None:  # while the bytes travel
            for name, tensor in bucket:
                expected.add(name, tensor)
        start = time.perf_counter()
        self._wait(work, answers)
        self._engine_seconds += time.perf_counter() - start
        return flat.numel()

    def _wait(self, work: dist.Work, answers: list[Future[None]]) -> None:
        """Until the broadcast is over and every engine has answered. An engine's refusal ends the wait at once: it may
        never have joined the broadcast, which then waits for ever."""
        deadline = time.monotonic() + self.timeout_s
        while not (work.is_completed() and all(answer.done() for answer in answers)):
            for answer in answers:
                if answer.done():
                    answer.result()
            if time.monotonic() > deadline:
                raise SyncError(f"a bucket did not reach every engine within {self.timeout_s} s.")
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:  # torch's, when the other end of a connection is gone
            raise SyncError(f"the broadcast failed, probably because an engine ended: {error}") from error
        for answer in answers:
            answer.result()

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """After a failure in the middle nobody knows who waits for whom in the group: it is not used again."""
        try:
            yield
        except (EngineError, SyncError, httpx.HTTPError, RuntimeError) as error:
            self._broken = f"it failed before: {error}"
            if isinstance(error, httpx.HTTPError):
                urls = [engine.url for engine in self.engines]
                raise SyncError(f"an engine did not answer: {error!r}; engines: {urls}") from error
            raise

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with self._restored(lambda engine: engine.resume()):
            self._each(lambda engine: engine.pause(self.pause_mode))
            yield

    @contextmanager
    def _session(self) -> Iterator[None]:
        with self._restored(lambda engine: engine.end_weight_update()):
            self._each(EngineControl.begin_weight_update)
            yield

    @contextmanager
    def _restored(self, restore: Callable[[EngineControl], None]) -> Iterator[None]:
        """Run `restore` on every engine at the end; after a failure with short deadlines, and without hiding it."""
        try:
            yield
        except BaseException:
            for engine in self.engines:
                with EngineControl(engine.url, CLEANUP_TIMEOUT_S) as short:
                    try:
                        restore(short)
                    except (EngineError, httpx.HTTPError) as error:
                        log.warning("could not put %s back after a failed weight sync: %r", engine.url, error)
            raise
        self._each(restore)

    def _each[T](self, call: Callable[[EngineControl], T]) -> list[T]:
        """Call all engines at once; answers in their order, or the first failure."""
        start = time.perf_counter()
        try:
            if len(self.engines) == 1:
                return [call(self.engines[0])]
            return [future.result() for future in [self._pool.submit(call, engine) for engine in self.engines]]
        finally:
            self._engine_seconds += time.perf_counter() - start


def split_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Runs of at most `bucket_bytes`; a larger tensor goes alone. Wide dtypes come first: the receiver wants each aligned."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield sorted(bucket, key=lambda item: -item[1].itemsize)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield sorted(bucket, key=lambda item: -item[1].itemsize)


def _with_last[T](items: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each item, and whether it is the last."""
    try:
        current = next(items)
    except StopIteration:
        return
    for following in items:
        yield current, False
        current = following
    yield current, True


def _own_address(engine_url: str) -> str:
    """The address of this machine that the engine can reach."""
    host = urlsplit(engine_url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; the kernel picks the interface
        return probe.getsockname()[0]


def _join_group(store: dist.Store, name: str, backend: str, world_size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Rank 0's side of sglang.srt.utils.common.init_custom_process_group (0.5.23), which costs 8 CPU-seconds to import.

    torch has no public call for a group that is not made of ranks of the default group.
    """
    from torch.distributed.distributed_c10d import (  # private: see above
        Backend,
        GroupName,
        _new_process_group_helper,
        _world,
    )

    prefixed = dist.PrefixStore(name, store)
    group, _ = _new_process_group_helper(
        world_size, 0, [], Backend(backend), prefixed, group_name=GroupName(name), timeout=timeout
    )
    assert isinstance(group, dist.ProcessGroup), f"rank 0 of {world_size} is not in its own group: {group}"
    _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group
