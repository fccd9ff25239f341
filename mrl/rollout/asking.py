"""One round of requests to several engines: what a failing engine leaves unanswered is asked of those that live.

An engine fails when its processes end, when it answers with errors again and again, or when it has requests and its scheduler
computes nothing for `faults.engine_stall_s`. One that is only slow goes on computing and does not fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mrl.rollout.client import Completion, EngineClient, EngineError, EngineFault, EngineGone, SamplingParams

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)
LOOK_S = 5.0  # between looks at an engine, at most
PAUSE_S = 0.1  # before a second try, about; then twice as long each time, up to LONGEST_PAUSE_S
LONGEST_PAUSE_S = 5.0


class NoEngineError(EngineError):
    """All engines have failed."""


@dataclass(eq=False)
class Engine:
    """An engine in service."""

    client: EngineClient
    alive: Callable[[], bool]  # whether its processes run, as far as that is known
    where: str  # its own words can be read
    pending: int = 0  # responses it is asked for
    faults: int = 0  # since its last answer
    failure: str | None = None  # why it is out of service
    requests: set[asyncio.Task[list[Completion]]] = field(default_factory=set)


@dataclass
class Seat:
    """With which engine a response is: its next turn finds the earlier ones in that engine's cache."""

    engine: Engine


class Round:
    """A context in which engines are watched while they are asked; `redone` counts responses that were asked for again."""

    def __init__(
        self,
        engines: Sequence[Engine],
        tries: int,
        stall_s: float,
        end: Callable[[Engine], None],
        look_s: float = LOOK_S,
    ) -> None:
        """`tries`: of one request. `end`: ends a failed engine; may take its time, in a thread of its own."""
        self.engines, self.tries, self.stall_s = engines, tries, stall_s
        self.redone = 0
        self._end, self._look_s = end, min(look_s, stall_s / 4)
        self._ending: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        import aiohttp  # half a second; a request costs it a tenth of what it costs httpx

        limits = dict(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        self._http: aiohttp.ClientSession = aiohttp.ClientSession(**limits)
        self._watches = [asyncio.create_task(self._watch(engine)) for engine in self.engines]
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._http.close()
        await asyncio.gather(*self._ending)

    async def ask(
        self,
        seat: Seat,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        *,
        routed_experts: bool = False,
    ) -> list[Completion]:
        """One response to each prompt, in order, from the engine of this seat or, where that fails, from another.

        Raises NoEngineError where none is left, and EngineError for a request that is refused or fails `tries` times.
        """
        trying = AsyncRetrying(
            stop=stop_after_attempt(self.tries),
            wait=wait_random_exponential(multiplier=PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type(EngineFault),
            reraise=True,
        )
        try:
            return await trying(self._try, seat, prompts, sampling, routed_experts)
        except EngineFault as fault:
            raise EngineError(
                f"a request failed {self.tries} times (faults.engine_tries), at last so: {fault}"
            ) from fault

    async def _try(
        self, seat: Seat, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], routed_experts: bool
    ) -> list[Completion]:
        if seat.engine.failure is not None:
            seat.engine = self._idlest()
        engine = seat.engine
        task = asyncio.create_task(engine.client.ask(self._http, prompts, sampling, routed_experts=routed_experts))
        engine.requests.add(task)
        engine.pending += len(prompts)
        try:
            answer = await task
        except EngineGone as gone:
            self._fail(engine, str(gone), cancel=False)  # its other requests find out by themselves
            return await self._try(seat, prompts, sampling, routed_experts)  # it never had the request: that was no try
        except EngineFault as fault:
            self._blame(engine, fault)
            why = f"{fault} ({engine.where})"
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if engine.failure is None or (me and me.cancelling()):
                raise  # we are given up, not the engine
            why = f"{engine.client.url} {engine.failure}"
        else:
            engine.faults = 0
            return answer
        finally:
            engine.requests.discard(task)
            engine.pending -= len(prompts)
        self.redone += len(prompts)
        seat.engine = self._idlest()
        raise EngineFault(why)

    def _idlest(self) -> Engine:
        """The engine in service with the fewest faults, and of these with the least work. Raises NoEngineError."""
        if alive := [engine for engine in self.engines if engine.failure is None]:
            return min(alive, key=lambda engine: (engine.faults, engine.pending))
        raise NoEngineError("; ".join(f"{engine.client.url} {engine.failure}" for engine in self.engines))

    def _blame(self, engine: Engine, fault: EngineFault) -> None:
        engine.faults += 1
        if not engine.alive():
            self._fail(engine, "its processes have ended")
        elif engine.faults >= self.tries:
            self._fail(engine, f"failed {engine.faults} times in a row, at last so: {fault}")

    async def _watch(self, engine: Engine) -> None:
        beat, since = None, time.monotonic()
        while engine.failure is None:
            await asyncio.sleep(self._look_s)
            now = await engine.client.heartbeat(self._http, self._look_s)
            if not engine.alive():
                self._fail(engine, "its processes have ended")
            elif not engine.pending or now not in (None, beat):
                beat, since = now, time.monotonic()
            elif time.monotonic() - since >= self.stall_s:
                self._fail(engine, f"has computed nothing for {self.stall_s:g} s (faults.engine_stall_s)")

    def _fail(self, engine: Engine, why: str, *, cancel: bool = True) -> None:
        """Out of service from now on: what it has not answered is asked of others."""
        if engine.failure is None:
            engine.failure = f"{why} ({engine.where})"
            log.warning(
                "engine %s fails with %d responses to go: %s", engine.client.url, engine.pending, engine.failure
            )
            for request in engine.requests if cancel else ():
                request.cancel()
            self._ending.append(asyncio.create_task(asyncio.to_thread(self._end, engine)))
