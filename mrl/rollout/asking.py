"""Requests to several engines: what a failing engine leaves unanswered is asked of those that live.

An engine fails when its processes end, when it answers with errors again and again, or when it has requests and its scheduler
computes nothing for `faults.engine_stall_s`. One that is only slow goes on computing and does not fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
    work: float = 0.0  # expected of them, in tokens or whatever callers count in
    faults: int = 0  # since its last answer
    failure: str | None = None  # why it is out of service
    requests: set[asyncio.Task[list[Completion]]] = field(default_factory=set)


@dataclass
class Seat:
    """With which engine a response is: its next turn finds the earlier ones in that engine's cache."""

    engine: Engine


class Service:
    """The engines in service: watched, and asked. Lives in one event loop; `redone` counts responses asked for again."""

    def __init__(self, tries: int, stall_s: float, end: Callable[[Engine], None], look_s: float = LOOK_S) -> None:
        """`tries`: of one request. `end`: ends a failed engine; may take its time, in a thread of its own."""
        self.engines: list[Engine] = []
        self.tries, self.stall_s = tries, stall_s
        self.redone = 0
        self.held = False  # engines are paused on purpose: that they compute nothing is no failure
        self._end, self._look_s = end, min(look_s, stall_s / 4)
        self._watches: dict[Engine, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Before anything is asked."""
        import aiohttp  # half a second; a request costs it a tenth of what it costs httpx

        limits = dict(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        self._http: aiohttp.ClientSession = aiohttp.ClientSession(**limits)

    async def enlist(self, engines: Sequence[Engine]) -> None:
        """These are in service from now on; those of them that were already go on as they were."""
        for engine in [engine for engine in self._watches if engine not in engines]:
            self._watches.pop(engine).cancel()
        self.engines = list(engines)
        for engine in engines:
            if engine not in self._watches:
                self._watches[engine] = asyncio.create_task(self._watch(engine))

    async def close(self) -> None:
        """Stop watching, once failed engines have ended."""
        await self.enlist([])
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._http.close()

    async def ask(
        self,
        seat: Seat,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        *,
        routed_experts: bool = False,
        work: float | None = None,
    ) -> list[Completion]:
        """One response to each prompt, in order, from the engine of this seat or, where that fails, from another.

        `work`: what is expected of the engine; by default the number of prompts. Raises NoEngineError where none is left, and
        EngineError for a request that is refused or fails `tries` times.
        """
        trying = AsyncRetrying(
            stop=stop_after_attempt(self.tries),
            wait=wait_random_exponential(multiplier=PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type(EngineFault),
            reraise=True,
        )
        try:
            expected = float(len(prompts)) if work is None else work
            return await trying(self._try, seat, prompts, sampling, routed_experts, expected)
        except EngineFault as fault:
            raise EngineError(
                f"a request failed {self.tries} times (faults.engine_tries), at last so: {fault}"
            ) from fault

    async def _try(
        self,
        seat: Seat,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        routed_experts: bool,
        work: float,
    ) -> list[Completion]:
        if seat.engine.failure is not None:
            seat.engine = self.idlest()
        engine = seat.engine
        task = asyncio.create_task(engine.client.ask(self._http, prompts, sampling, routed_experts=routed_experts))
        engine.requests.add(task)
        engine.pending += len(prompts)
        engine.work += work
        try:
            answer = await task
        except EngineGone as gone:
            self._fail(engine, str(gone), cancel=False)  # its other requests find out by themselves
            return await self._try(
                seat, prompts, sampling, routed_experts, work
            )  # it never had the request: that was no try
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
            engine.work -= work
        self.redone += len(prompts)
        seat.engine = self.idlest()
        raise EngineFault(why)

    def idlest(self) -> Engine:
        """The engine in service with the fewest faults, and of these with the least work. Raises NoEngineError."""
        if alive := [engine for engine in self.engines if engine.failure is None]:
            return min(alive, key=lambda engine: (engine.faults, engine.work))
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
            elif self.held or not engine.pending or now not in (None, beat):
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
            ending = asyncio.create_task(asyncio.to_thread(self._end, engine))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
