"""Coordinator: controls the engines before and after a push. It runs on trainer rank 0.

Before a push, the coordinator pauses the engines and opens a weight update session of SGLang in each of them. After the push, it
waits until every engine rank has verified its new weights. Then it sets the weight version and resumes generation.

An engine that fails is excluded from the rest of the push, and its failure is reported. The push continues with the other
engines. An engine serves new weights only after it has verified their checksums.
"""

from __future__ import annotations

import io
import json
import logging
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import httpx
import torch

from mrl.config.process_schema import PauseMode
from mrl.weight_sync.control_channel import (
    NO_PUSH,
    RECEIVER_TIMEOUT_FACTOR,
    ControlChannel,
    EngineAction,
    connected_key,
    failure_key,
    plan_checked_key,
    rank_info_key,
    receipt_key,
)
from mrl.weight_sync.engine_control import (
    WEIGHT_LOADER,
    EngineControl,
    EngineError,
    PeerError,
    WeightMismatchError,
    WeightSyncError,
)
from mrl.weight_sync.engine_layout import EngineParallelSizes
from mrl.weight_sync.receiver import EngineRankInfo

logger = logging.getLogger(__name__)
# `call_all` excludes an engine after one of these errors, and raises all other errors.
ENGINE_FAILURES = (EngineError, PeerError, httpx.HTTPError, TimeoutError)


def common_server_info(urls: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Check that all engines have the same device, dtype and parallel sizes, and return the server info of the first engine.

    Raises WeightSyncError if an engine does not answer, and ValueError if the engines differ.
    """
    infos, unreachable = [], {}
    for url in urls:
        try:
            with EngineControl(url, timeout_s) as engine:
                infos.append(engine.server_info())
        except Exception as error:  # a dead engine can fail in any way; all unreachable engines are reported below
            unreachable[url] = f"{type(error).__name__}: {error}"
    if unreachable:
        raise WeightSyncError(f"engines do not answer: {unreachable}", unreachable)
    kinds = {(info["device"], info["dtype"], EngineParallelSizes.of(info)) for info in infos}
    if len(kinds) != 1:
        raise ValueError(f"engines must have the same device, dtype and parallel sizes, got {kinds} from {list(urls)}.")
    return infos[0]


class Coordinator:
    """Sends requests to all engines in parallel. If a request fails, its engine is excluded from all further requests.

    `failed` maps the index of each excluded engine to the reason.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tp: int,
        timeout_s: float,
        pause_mode: PauseMode,
        join_channel: Callable[[], ControlChannel] | None,
    ) -> None:
        """Prepare the connections to the engines.

        `tp`: number of ranks of each engine. `join_channel` opens a connection to the control channel. It is None for DiskSync
        and AdapterSync, which have no control channel.
        """
        self.engines = [EngineControl(url, timeout_s) for url in urls]
        self.tp, self.timeout_s, self.pause_mode = tp, timeout_s, pause_mode
        self.failed: dict[int, str] = {}
        # There are two connections: threads of the pool report failures on one while this thread waits on the other.
        self._wait_channel, self._failure_channel = (join_channel(), join_channel()) if join_channel else (None, None)
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(urls)), thread_name_prefix="weight_sync")
        # Engine index -> the last request of `_send_to_all` to this engine, which may still be unanswered.
        self._last_message: dict[int, Future[None]] = {}

    @property
    def alive(self) -> list[int]:
        """Indices of the engines that are not excluded."""
        return [index for index in range(len(self.engines)) if index not in self.failed]

    @property
    def failures(self) -> dict[str, str]:
        """URL of each excluded engine -> reason."""
        return {self.engines[index].url: reason for index, reason in self.failed.items()}

    def engine_ranks(self, engines: Iterable[int]) -> list[int]:
        """Return the ranks of these engines. Ranks are numbered over all engines."""
        return [engine * self.tp + rank for engine in engines for rank in range(self.tp)]

    def begin_session(self, connection: dict[str, Any], with_draft: bool = False) -> dict[int, EngineRankInfo]:
        """Begin a session with every engine, and return what each engine rank reports about itself.

        `connection`: the arguments with which engine ranks call ControlChannel.join. `with_draft`: whether the session also sends
        weights to the draft models of the engines.

        An earlier trainer may have died during a push and left an update session open in an engine. This method closes that
        update session. The engine stays paused until the next push. Raises WeightSyncError if an engine fails.
        """
        message = dict(connection, action=EngineAction.BEGIN_SESSION, tp=self.tp, with_draft=with_draft)
        self.call_all(EngineControl.abandon_weight_update)
        self.call_all(EngineControl.begin_weight_update)
        if with_draft:
            register = dict(action=EngineAction.REGISTER_DRAFT)
            self.call_all(lambda engine: self._send(engine, register, selector="draft"))
        self.call_all(lambda engine: self._send(engine, message | {"engine": self.engines.index(engine)}))
        infos = {rank: self._receive(rank_info_key(rank), rank, NO_PUSH) for rank in self.engine_ranks(self.alive)}
        self._raise_failures("begin a session")
        return infos

    def check_plan(self) -> None:
        """Have every engine read its part of the plan, and check the destinations in it.

        Each destination must hold the values that the engine's Hugging Face folder has for it (see `misplaced_chunks` in
        mrl.weight_sync.receiver). Raises WeightSyncError if an engine fails.
        """
        self.call_all(lambda engine: self._send(engine, dict(action=EngineAction.CHECK_PLAN)))
        for rank in self.engine_ranks(self.alive):
            self._receive(plan_checked_key(rank), rank, NO_PUSH)
        self._raise_failures("check the plan")

    def connect_receivers(self) -> None:
        """Tell every engine to connect to the senders. `wait_connected` waits until the engines have connected."""
        self._send_to_all(dict(action=EngineAction.CONNECT), NO_PUSH)

    def wait_connected(self) -> None:
        """Wait until every engine rank has connected to the senders. Raises WeightSyncError if an engine fails."""
        for rank in self.engine_ranks(self.alive):
            self._receive(connected_key(rank), rank, NO_PUSH)
        self.call_all(EngineControl.end_weight_update)
        self._raise_failures("connect to the senders")

    def begin_push(self, version: int, base_push: str | None) -> str:
        """Pause the engines and tell them to receive the buckets of a new push. Does not wait until the buckets arrive.

        If `base_push` is the name of an earlier push, this push sends differences from the weights of that push. If `base_push`
        is None, this push sends the weights in full. Returns the name of the push.
        """
        push_name = f"push/{version}/{uuid.uuid4().hex[:8]}"
        for index in self.failed:  # an earlier push excluded this engine, so senders must not wait for it in this push
            self._announce_failure(index, push_name)
        self.call_all(lambda engine: engine.pause(self.pause_mode), push_name)
        self.call_all(EngineControl.begin_weight_update, push_name)
        self._send_to_all(dict(action=EngineAction.LOAD, push=push_name, version=version, base=base_push), push_name)
        return push_name

    def wait_receipts(self, push_name: str) -> None:
        """Wait until every engine has verified its new weights. Raises WeightMismatchError if weights are wrong."""
        wrong: dict[str, list[str]] = {}
        for rank in self.engine_ranks(self.alive):
            index = rank // self.tp
            if names := self._receive(receipt_key(push_name, rank), rank, push_name):
                wrong[f"{self.engines[index].url} rank {rank % self.tp}"] = names
        for index in self.alive:
            self._result(self._last_message[index], index, push_name)
        if wrong:
            self.call_all(EngineControl.end_weight_update, push_name)  # the engines stay paused
            named = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in wrong.items())
            raise WeightMismatchError(
                f"engines do not hold the weights that were sent: {named}. The engines stay out of service."
            )

    def publish(self, push_name: str, version: int, resume: bool = True) -> None:
        """Set the weight version of all engines, and resume generation if `resume` is true."""
        self.call_all(EngineControl.end_weight_update, push_name)
        self.call_all(lambda engine: engine.set_weight_version(str(version)), push_name)
        # With in_place, requests continue with the KV cache of the old weights, so this cache must stay.
        if self.pause_mode is not PauseMode.in_place:
            self.call_all(lambda engine: engine.flush_cache(self.timeout_s), push_name)
        if resume:
            self.call_all(EngineControl.resume, push_name)

    def call_all[T](self, call: Callable[[EngineControl], T], push_name: str = NO_PUSH) -> dict[int, T]:
        """Run `call` in parallel for all engines that are not excluded; return the results by engine index.

        An engine is excluded if its call fails.
        """
        futures = {index: self._pool.submit(call, self.engines[index]) for index in self.alive}
        results = {index: self._result(future, index, push_name) for index, future in futures.items()}
        return {index: result for index, result in results.items() if index not in self.failed}

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for engine in self.engines:
            engine.close()

    def _send(
        self,
        engine: EngineControl,
        message: dict[str, Any],
        timeout_factor: float = 1.0,
        selector: Literal["target", "draft"] = "target",
    ) -> None:
        payloads, timeout_s = [_pack_message(json.dumps(message))] * self.tp, timeout_factor * self.timeout_s
        engine.update_weights_from_tensor(payloads, WEIGHT_LOADER, timeout_s=timeout_s, selector=selector)

    def _send_to_all(self, message: dict[str, Any], push_name: str) -> None:
        """Send a message to all engines without waiting for answers. An engine is excluded as soon as its request fails."""
        for index in self.alive:
            future = self._pool.submit(self._send, self.engines[index], message, RECEIVER_TIMEOUT_FACTOR + 1)
            future.add_done_callback(lambda done, index=index: self._check_future(done, index, push_name))
            self._last_message[index] = future

    def _receive(self, key: str, rank: int, push_name: str) -> Any:
        """Wait for a value that an engine rank puts on the control channel. Returns None if the engine has failed."""
        assert self._wait_channel is not None, "engines answer on the control channel"
        index = rank // self.tp
        if index in self.failed:
            return None
        try:
            value = self._wait_channel.get(key, [failure_key(push_name, rank)])
        except PeerError as error:
            return self._exclude(index, error, push_name)
        self._wait_channel.delete([key])
        return value

    def _result(self, future: Future[Any], index: int, push_name: str) -> Any:
        try:
            return future.result(self.timeout_s)
        except ENGINE_FAILURES as error:
            return self._exclude(index, error, push_name)

    def _check_future(self, done: Future[None], index: int, push_name: str) -> None:
        if not done.cancelled() and (error := done.exception()):
            self._exclude(index, error, push_name)

    def _exclude(self, index: int, error: BaseException, push_name: str) -> None:
        """Exclude an engine from all further requests, and tell the senders not to wait for it."""
        if index not in self.failed:
            self.failed[index] = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
            logger.warning("engine %s is excluded from %s: %r", self.engines[index].url, push_name, error)
            self._announce_failure(index, push_name)

    def _announce_failure(self, index: int, push_name: str) -> None:
        if self._failure_channel is not None:
            for rank in self.engine_ranks([index]):
                self._failure_channel.put(failure_key(push_name, rank), self.failed[index])

    def _raise_failures(self, action: str) -> None:
        if self.failed:
            named = "; ".join(f"{url}: {reason}" for url, reason in self.failures.items())
            raise WeightSyncError(f"engines could not {action} of the weight sync: {named}", self.failures)


def _pack_message(message: str) -> str:
    """Serialize a message as an empty tensor with the message as its name: a request can carry only named tensors."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(message, torch.empty(0))])
    return b64encode(buffer.getvalue()).decode()
