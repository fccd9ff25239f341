"""The first trainer rank's talk with the engines around a push: pause, update session, receipts, version, resume.

An engine that fails on the way is left out of service and named; the others go on. None serves weights that were not checked.
"""

from __future__ import annotations

import io
import json
import logging
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
import torch

from mrl.weight_sync.control_channel import ControlChannel
from mrl.weight_sync.engine_control import WEIGHT_LOADER, EngineControl, EngineError, PauseMode
from mrl.weight_sync.errors import PeerError, SyncError, WeightMismatchError
from mrl.weight_sync.sender import ENGINE_PATIENCE, dead

log = logging.getLogger(__name__)
FAILURES = (EngineError, PeerError, httpx.HTTPError, TimeoutError)


class Coordinator:
    """Talks to all engines at once. `failed` says which engines take no further part, and why."""

    def __init__(
        self,
        urls: Sequence[str],
        tp: int,
        timeout_s: float,
        pause_mode: PauseMode,
        join: Callable[[], ControlChannel] | None,
    ) -> None:
        """`join` opens the control channel; without one there is nobody to be told of failures."""
        self.engines = [EngineControl(url, timeout_s) for url in urls]
        self.tp, self.timeout_s, self.pause_mode = tp, timeout_s, pause_mode
        self.failed: dict[int, str] = {}  # engine's number -> reason
        # Two clients: one waits while the other, in the pool's threads, tells of failures.
        self._waiting, self._telling = (join(), join()) if join else (None, None)
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(urls)), thread_name_prefix="weight_sync")
        self._running: dict[int, Future[None]] = {}  # what each engine was told last and may still do

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that still take part."""
        return [number for number in range(len(self.engines)) if number not in self.failed]

    @property
    def failures(self) -> dict[str, str]:
        """Why engines take no further part, by their URL."""
        return {self.engines[number].url: reason for number, reason in self.failed.items()}

    def ranks(self, engines: Iterable[int]) -> list[int]:
        """Engine ranks, counted over all engines."""
        return [engine * self.tp + rank for engine in engines for rank in range(self.tp)]

    def hello(self, reach: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Begin a session with every engine; what each engine rank says of itself. Raises SyncError where one fails.

        An engine that trainers before left in the middle of a push is taken over as it is; the next push resumes it.
        """
        message = dict(reach, do="hello", tp=self.tp)
        self.each(EngineControl.abandon_weight_update)
        self.each(EngineControl.begin_weight_update)
        self.each(lambda engine: self._tell(engine, message | {"engine": self.engines.index(engine)}))
        said = {rank: self._hear(f"hello/{rank}", rank, "open") for rank in self.ranks(self.alive)}
        self._raise_failures("begin a session")
        return said

    def prove(self) -> None:
        """Have every engine take its plan and compare the places in it with what it has loaded by itself."""
        self.each(lambda engine: self._tell(engine, dict(do="plan")))
        for rank in self.ranks(self.alive):
            self._hear(f"plan/{rank}/taken", rank, "open")
        self._raise_failures("take the plan")

    def open(self) -> None:
        """Have every engine reach the senders; `opened` waits for it."""
        self._tell_all(dict(do="open"), "open")

    def opened(self) -> None:
        """Wait until every engine rank has reached the senders. Raises SyncError where one fails."""
        for rank in self.ranks(self.alive):
            self._hear(f"open/{rank}", rank, "open")
        self.each(EngineControl.end_weight_update)
        self._raise_failures("open a session")

    def begin(self, push: str, base: str | None) -> None:
        """Pause the engines and have them wait for buckets; returns at once."""
        for number in self.failed:  # of an earlier push: nobody waits for them
            self._tell_of_failure(number, push)
        self.each(lambda engine: engine.pause(self.pause_mode), push)
        self.each(EngineControl.begin_weight_update, push)
        self._tell_all(dict(do="load", push=push, base=base), push)

    def finish(self, push: str) -> None:
        """Wait until every engine has said that it holds what was sent. Raises WeightMismatchError."""
        wrong: dict[str, list[str]] = {}
        for rank in self.ranks(self.alive):
            number, receipt = rank // self.tp, self._hear(f"{push}/receipt/{rank}", rank, push)
            if receipt and receipt["wrong"]:
                wrong[f"{self.engines[number].url} rank {rank % self.tp}"] = receipt["wrong"]
        for number in self.alive:
            self._result(self._running[number], number, push)
        if wrong:
            self.each(EngineControl.end_weight_update, push)  # still paused
            named = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in wrong.items())
            raise WeightMismatchError(
                f"engines do not hold the weights that were sent: {named}. They stay out of service."
            )

    def serve(self, push: str, version: int, go_on: bool = True) -> None:
        """Let the engines have the new weights as `version`, and go on with them unless they have to wait."""
        self.each(EngineControl.end_weight_update, push)
        self.each(lambda engine: engine.set_weight_version(str(version)), push)
        if self.pause_mode != "in_place":  # that mode keeps the KV cache of the old weights
            self.each(lambda engine: engine.flush_cache(self.timeout_s), push)
        if go_on:
            self.each(EngineControl.resume, push)

    def each[T](self, call: Callable[[EngineControl], T], push: str = "open") -> dict[int, T]:
        """Call all engines that are alive at once; one that fails is noted and left out."""
        futures = {number: self._pool.submit(call, self.engines[number]) for number in self.alive}
        answers = {number: self._result(future, number, push) for number, future in futures.items()}
        return {number: answer for number, answer in answers.items() if number not in self.failed}

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for engine in self.engines:
            engine.close()

    def _tell(self, engine: EngineControl, message: dict[str, Any], patience: float = 1.0) -> None:
        payloads = [_packed(json.dumps(message))] * self.tp
        engine.update_weights_from_tensor(payloads, WEIGHT_LOADER, timeout_s=patience * self.timeout_s)

    def _tell_all(self, message: dict[str, Any], push: str) -> None:
        """Send a message whose work takes long; a failure is noted when it happens."""
        for number in self.alive:
            future = self._pool.submit(self._tell, self.engines[number], message, ENGINE_PATIENCE + 1)
            future.add_done_callback(lambda done, number=number: self._note(done, number, push))
            self._running[number] = future

    def _hear(self, key: str, rank: int, push: str) -> Any:
        """What an engine rank says; None where it has failed."""
        assert self._waiting is not None, "engines speak on the control channel"
        number = rank // self.tp
        if number in self.failed:
            return None
        try:
            said = self._waiting.get(key, [dead(push, rank)])
        except PeerError as error:
            return self._fail(number, error, push)
        self._waiting.drop([key])
        return said

    def _result(self, future: Future[Any], number: int, push: str) -> Any:
        try:
            return future.result(self.timeout_s)
        except FAILURES as error:
            return self._fail(number, error, push)

    def _note(self, done: Future[None], number: int, push: str) -> None:
        if not done.cancelled() and (error := done.exception()):
            self._fail(number, error, push)

    def _fail(self, number: int, error: BaseException, push: str) -> None:
        """Leave an engine out from now on; senders that wait for it are told."""
        if number not in self.failed:
            self.failed[number] = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
            log.warning("engine %s takes no further part in %s: %r", self.engines[number].url, push, error)
            self._tell_of_failure(number, push)

    def _tell_of_failure(self, number: int, push: str) -> None:
        if self._telling is not None:
            for rank in self.ranks([number]):
                self._telling.put(dead(push, rank), self.failed[number])

    def _raise_failures(self, what: str) -> None:
        if self.failed:
            named = "; ".join(f"{url}: {reason}" for url, reason in self.failures.items())
            raise SyncError(f"engines could not {what} of weight sync: {named}", self.failures)


def _packed(message: str) -> str:
    """A message in the form of named tensors: the name says it all."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump([(message, torch.empty(0))])
    return b64encode(buffer.getvalue()).decode()
