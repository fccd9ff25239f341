"""The engine pool: sends requests to the engines, retries failed requests, and takes failed engines out of service.

An engine has failed if its processes have ended, if it takes no connections, or if
`fault_tolerance.max_response_attempts` requests in a row have failed. An engine with pending requests has also failed if its
scheduler computes nothing for `fault_tolerance.engine_stall_timeout_s` seconds. A slow engine still computes, so it has not
failed. Another engine samples the pending responses of a failed engine.

`open_session` chooses the engine for `generate`, `generate_multi_turn` and `forward`: the engine with the fewest failed requests
in a row and, among several such engines, the one with the least expected work. `generate_all` and `generate_multi_turn_all` get
all prompts at once, and divide them evenly among the engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from mrl.data.images import RequestImages
from mrl.rollout.agents.tool_agent import BoundToolAgent, ConcurrencyLimits, GenerateTurn, generate_multi_turn_responses
from mrl.rollout.client import (
    Completion,
    EngineClient,
    EngineError,
    EngineFaultError,
    EngineUnreachableError,
    EventLoopThread,
    ResponsesAbortedError,
    SamplingParams,
)
from mrl.rollout.engines.hosts import AnyEngineServer, EngineServers
from mrl.rollout.engines.server import ExternalEngine, check_seed_support, check_stop_support
from mrl.rollout.rollout_log import CompletionCache
from mrl.rollout.spec import PoolSettings
from mrl.rollout.staleness_buffer import MAX_RESPONSES_PER_REQUEST
from mrl.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

MAX_HEARTBEAT_INTERVAL_S = 5.0  # the interval is shorter if `fault_tolerance.engine_stall_timeout_s` is below 20 s
FIRST_RETRY_PAUSE_LIMIT_S = 0.1  # limit of the random pause before the first retry; the limit doubles with each retry
MAX_RETRY_PAUSE_S = 5.0  # upper limit of the pause before any retry
CLOSE_TIMEOUT_S = 15.0  # how long `close` waits until failed engines have ended


class NoEngineError(EngineError):
    """No engine is in service."""


@dataclass(eq=False)
class PooledEngine:
    """One engine of the pool and its current load."""

    client: EngineClient
    alive: Callable[[], bool]  # returns whether the engine's processes run; always true for an external engine
    log_source: str  # log file of the engine, or the config key of an external engine; error messages contain it
    pending: int = 0  # number of responses that were requested and have not arrived
    expected_work: float = 0.0  # sum over the pending requests; for its unit, see `generate`
    faults: int = 0  # number of failed requests in a row
    failure: str | None = None  # reason why the engine has failed; None: it has not failed
    requests: set[asyncio.Task[Any]] = field(default_factory=set)  # pending HTTP requests
    needs_adapter: bool = False  # whether the engine gets requests only after a push has loaded LoRA adapters into it

    @property
    def in_service(self) -> bool:
        """Whether the engine gets requests."""
        return self.failure is None and (not self.needs_adapter or self.client.adapter is not None)


type EngineRequest[T] = Callable[[EngineClient, aiohttp.ClientSession], Coroutine[Any, Any, T]]
"""Function that sends one request to an engine. Its coroutine raises EngineFaultError if the engine failed."""


@dataclass
class StickySession:
    """Keeps all turns of a response on the same engine, because this engine caches the earlier turns.

    If a request fails, the session continues on the engine that EnginePool._least_busy then returns.
    """

    engine: PooledEngine


class EnginePool:
    """All engines of one process (a rollout worker, `mrl generate` or `mrl evaluate`). The pool replaces engines that fail.

    External servers are not replaced, because they may recover. A new engine, or an external server that has recovered, is in
    service after the next call of `wait_ready` or `replace`. In training, the driver then pushes the current weights to it. If
    the engine uses LoRA adapters, it is in service only after this push and `set_adapter`.
    """

    def __init__(self, spec: PoolSettings) -> None:
        """Start the engines. Returns before the engines are ready; `wait_ready` waits for them."""
        self.spec = spec
        self._paused = False
        self._num_pauses = 0  # number of pauses that have begun
        self.engines: list[PooledEngine] = []  # changed in the event loop only
        self._servers = EngineServers(spec.engine_group)
        self._loop = EventLoopThread("engines")
        self.submit = self._loop.submit  # runs a coroutine, for example `generate`, in the pool's event loop
        self._http: aiohttp.ClientSession | None = None
        self._heartbeat_interval_s = min(MAX_HEARTBEAT_INTERVAL_S, spec.fault_tolerance.engine_stall_timeout_s / 4)
        self._heartbeats: dict[PooledEngine, asyncio.Task[None]] = {}  # the running `_check_heartbeat` of each engine
        self._replacements: set[asyncio.Task[None]] = set()  # running replacements of failed servers
        self._limits: ConcurrencyLimits | None = None  # set by `generate_multi_turn`, for multi-turn responses only
        self._reported: set[PooledEngine] = set()  # failed engines that `take_failed` returned
        # URL -> reason of failure, for external engines that failed and recovered before `take_failed` was called
        self._unreported: dict[str, str] = {}
        self._num_replaced = 0  # engines that `take_failed` has returned since the last call of `take_metrics`
        self._num_retried = self._num_retried_before = 0  # retried responses: now, and at the last `take_metrics`

    @property
    def paused(self) -> bool:
        """Whether the driver has paused the engines. In a pause, `_check_heartbeat` checks only that their processes run."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._num_pauses += paused

    @property
    def urls(self) -> list[str]:
        """URLs of all engines, including those that are still starting."""
        return self._servers.urls

    def wait_ready(self, timeout_s: float) -> list[str]:
        """Wait for all engines, as EngineServers.wait_ready does, and let the pool use them. Returns the URLs of all engines."""
        self._servers.wait_ready(timeout_s)
        failed = self._unreported_failures()
        in_service = {engine.client.url: engine for engine in self.engines if engine.failure is None}
        engines = [in_service.get(server.url) or self._to_pooled(server) for server in self._servers.servers]
        self.submit(self._set_engines(engines)).result()
        self._reported = set()
        self._unreported |= {url: reason for url, reason in failed.items() if url in self.urls}
        return self.urls

    def _to_pooled(self, server: AnyEngineServer) -> PooledEngine:
        client = EngineClient(server.url, timeout_s=self.spec.request_timeout_s)
        if not isinstance(server, ExternalEngine):
            return PooledEngine(client, server.alive, str(server.log_path), needs_adapter=self.spec.uses_adapters)
        if self.spec.deterministic:
            check_seed_support(client, "rollout.deterministic")
        if self.spec.has_stop_texts:
            check_stop_support(client)
        return PooledEngine(client, server.alive, "rollout.engine_urls")

    async def _set_engines(self, engines: Sequence[PooledEngine]) -> None:
        """Let the pool use exactly these engines. An engine that the pool used before keeps its pending requests."""
        if self._http is None and engines:
            # aiohttp needs a tenth of the CPU time of httpx. It is imported here because the import takes 0.5 s.
            import aiohttp

            no_limits = dict(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
            self._http = aiohttp.ClientSession(**no_limits)
        for engine in [engine for engine in self._heartbeats if engine not in engines]:
            self._heartbeats.pop(engine).cancel()
        self.engines = list(engines)
        for engine in engines:
            if engine not in self._heartbeats:
                self._heartbeats[engine] = asyncio.create_task(self._check_heartbeat(engine))

    def set_adapter(self, name: str, urls: Sequence[str]) -> None:
        """Let all further requests to these engines use the LoRA adapters `name`, which the engines have loaded."""
        for engine in self.engines:
            if engine.client.url in urls:
                engine.client.adapter = name

    def replace(self, urls: Sequence[str], timeout_s: float) -> list[str]:
        """Replace these engines by new engines, and wait until the new engines take requests. Returns the URLs of all engines."""
        for url in urls:
            self._servers.replace(url)
        return self.wait_ready(timeout_s)

    def open_session(self) -> StickySession:
        """Open a session with the engine that `_least_busy` returns. Raises NoEngineError if no engine is in service."""
        return StickySession(self._least_busy())

    async def generate(
        self,
        numbers: Sequence[int],
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        cache: CompletionCache | None = None,
        session: StickySession | None = None,
        expected_work: float | None = None,
        images: Sequence[RequestImages | None] = (),
    ) -> list[Completion]:
        """Sample one completion of each prompt, with one HTTP request. Returns the completions in the order of the prompts.

        Must run in the pool's event loop (see `submit`). Completions that `cache` holds are not sampled again. `numbers`:
        serial numbers of the responses, under which `cache` stores completions. `session` selects the engine; without a session,
        the least busy engine is used. `expected_work`: work of this request, such as tokens; default: number of responses.
        `images`: images of each prompt; empty: no prompt has images.
        Raises NoEngineError if no engine is left. Raises EngineError if an engine refuses the request, or if the request fails
        `fault_tolerance.max_response_attempts` times.
        """
        found = {}
        if cache is not None:
            cached = ((number, cache.get(number, prompt)) for number, prompt in zip(numbers, prompts, strict=True))
            found = {number: completion for number, completion in cached if completion is not None}
        missing = [index for index, number in enumerate(numbers) if number not in found]
        if missing:
            inputs, params = [prompts[index] for index in missing], [sampling[index] for index in missing]
            work = float(len(inputs)) if expected_work is None else expected_work
            options: dict[str, Any] = dict(logprobs=self.spec.logprobs, routed_experts=self.spec.routed_experts)
            if images:
                options["images"] = [images[index] for index in missing]
            request = partial(EngineClient.generate_async, input_ids=inputs, sampling=params, **options)
            completions = await self._retrying(self._send, session or self.open_session(), request, len(inputs), work)
            sampled = [numbers[index] for index in missing]
            if cache is not None:
                cache.put(sampled, inputs, completions)
            found |= dict(zip(sampled, completions, strict=True))
        return [found[number] for number in numbers]

    async def forward(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        """Send a JSON body to the least busy engine. Returns the status, the content and the content type of the answer.

        Must run in the pool's event loop. Repeats failed requests and raises errors as `generate` does. If the engine refuses
        the request, returns the engine's answer.
        """
        request = partial(EngineClient.post_async, path=path, body=body)
        return await self._retrying(self._send, self.open_session(), request, 1, 1.0)

    @property
    def _retrying(self) -> AsyncRetrying:
        """Return an object that calls a coroutine function again if the function raises EngineFaultError.

        The object raises EngineError after `fault_tolerance.max_response_attempts` failed calls, including the first call.
        """
        max_attempts = self.spec.fault_tolerance.max_response_attempts

        def give_up(state: RetryCallState) -> NoReturn:
            fault = state.outcome.exception() if state.outcome else None
            raise EngineError(
                f"a request failed {max_attempts} times (fault_tolerance.max_response_attempts); the last failure: {fault}"
            ) from fault

        return AsyncRetrying(
            stop=stop_after_attempt(max_attempts),
            wait=wait_random_exponential(multiplier=FIRST_RETRY_PAUSE_LIMIT_S, max=MAX_RETRY_PAUSE_S),
            retry=retry_if_exception_type(EngineFaultError),
            retry_error_callback=give_up,
        )

    async def _send[T](self, session: StickySession, request: EngineRequest[T], count: int, expected_work: float) -> T:
        """Send one request to the session's engine.

        If the engine takes no connections, the request goes to another engine at once. If a pause of the engines aborts the
        request (weight_sync.pause_mode=abort), the request is sent again. If the request fails in another way, this method
        chooses the engine for the next attempt and raises EngineFaultError.

        `count`: number of responses for which the request asks. `expected_work`: work that the request adds to the engine.
        """
        assert self._http is not None, "wait_ready() opens the HTTP session"
        while True:
            if not session.engine.in_service:
                session.engine = self._least_busy()
            engine, num_ended_pauses = session.engine, self._num_pauses - self._paused
            task = asyncio.create_task(request(engine.client, self._http))
            engine.requests.add(task)
            engine.pending += count
            engine.expected_work += expected_work
            try:
                answer = await task
                engine.faults = 0
                return answer
            except EngineUnreachableError as error:
                # The engine's other requests need not be cancelled, because they fail by themselves.
                self._take_out_of_service(engine, str(error), cancel=False)
                continue  # not a failed attempt, because the engine did not get the request
            except EngineFaultError as fault:
                if isinstance(fault, ResponsesAbortedError) and self._num_pauses > num_ended_pauses:
                    await asyncio.sleep(FIRST_RETRY_PAUSE_LIMIT_S)
                    continue  # not a failed attempt, because the engine ended the request on purpose
                self._count_fault(engine, fault)
                reason = f"{fault} ({engine.log_source})"
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if engine.failure is None or (current and current.cancelling()):
                    raise  # the caller was cancelled
                reason = f"{engine.client.url} {engine.failure}"
            finally:
                engine.requests.discard(task)
                engine.pending -= count
                engine.expected_work -= expected_work
            self._num_retried += count
            session.engine = self._least_busy()
            raise EngineFaultError(reason)

    def _least_busy(self) -> PooledEngine:
        """Return the engine with the fewest failed requests in a row and, among such engines, the least expected work.

        Raises NoEngineError if no engine is in service.
        """
        if serving := [engine for engine in self.engines if engine.in_service]:
            return min(serving, key=lambda engine: (engine.faults, engine.expected_work))
        reasons = (f"{engine.client.url} {engine.failure or 'has no LoRA adapters yet'}" for engine in self.engines)
        raise NoEngineError("; ".join(reasons))

    def _count_fault(self, engine: PooledEngine, fault: EngineFaultError) -> None:
        engine.faults += 1
        if not engine.alive():
            self._take_out_of_service(engine, self._servers.end_reason(engine.client.url))
        elif engine.faults >= self.spec.fault_tolerance.max_response_attempts:
            self._take_out_of_service(engine, f"failed {engine.faults} times in a row; the last failure: {fault}")

    async def _check_heartbeat(self, engine: PooledEngine) -> None:
        """Take the engine out of service when its processes end or its scheduler computes nothing for too long."""
        stall_s = self.spec.fault_tolerance.engine_stall_timeout_s
        last, last_change = None, time.monotonic()
        while engine.failure is None:
            await asyncio.sleep(self._heartbeat_interval_s)
            assert self._http is not None, "engines are in service"
            heartbeat = await engine.client.heartbeat(self._http, self._heartbeat_interval_s)
            if not engine.alive():
                self._take_out_of_service(engine, self._servers.end_reason(engine.client.url))
            elif self.paused or not engine.pending or heartbeat not in (None, last):
                last, last_change = heartbeat, time.monotonic()
            elif time.monotonic() - last_change >= stall_s:
                self._take_out_of_service(
                    engine, f"has computed nothing for {stall_s:g} s (fault_tolerance.engine_stall_timeout_s)"
                )

    def _take_out_of_service(self, engine: PooledEngine, reason: str, *, cancel: bool = True) -> None:
        """Take an engine out of service and replace its server. If `cancel`, the engine's requests are cancelled and retried."""
        if engine.failure is not None:
            return
        engine.failure = f"{reason} ({engine.log_source})"
        log.warning("engine %s failed with %d pending responses: %s", engine.client.url, engine.pending, engine.failure)
        for request in engine.requests if cancel else ():
            request.cancel()
        replacement = asyncio.create_task(asyncio.to_thread(self._servers.replace, engine.client.url))
        self._replacements.add(replacement)
        replacement.add_done_callback(self._replacements.discard)

    async def generate_multi_turn(
        self,
        bound_agent: BoundToolAgent,
        numbers: Sequence[int],
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        cache: CompletionCache | None,
        sessions: Sequence[StickySession],
    ) -> list[Trajectory]:
        """Sample one multi-turn response to each prompt. Returns the responses in the order of the prompts.

        Must run in the pool's event loop (see `submit`). If an engine fails during a turn, another engine samples this turn.
        Earlier turns and their tool calls are not repeated. For `numbers`, `cache` and `sessions`, see `generate`.
        """

        def generate_turn_of(index: int) -> GenerateTurn:
            async def generate_turn(inputs: list[int], params: SamplingParams) -> Completion:
                (completion,) = await self.generate([numbers[index]], [inputs], [params], cache, sessions[index])
                return completion

            return generate_turn

        self._limits = self._limits or ConcurrencyLimits(bound_agent.agent)
        return await generate_multi_turn_responses(bound_agent, generate_turn_of, prompts, sampling, self._limits)

    def generate_all(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        cache: CompletionCache | None = None,
        images: Sequence[RequestImages | None] = (),
    ) -> list[Completion]:
        """Sample like `generate`, but spread the prompts evenly over the engines, and wait for the completions.

        In `cache`, the response to the prompt with index i has the serial number i.
        """

        def pick[T](values: Sequence[T], indices: Sequence[int]) -> list[T]:
            return [values[index] for index in indices] if values else []

        async def run() -> list[Completion]:
            engines = self._in_service()
            parts = [(StickySession(engines[engine]), part) for engine, part in _even_parts(len(prompts), len(engines))]
            requests = (
                self.generate(
                    part, pick(prompts, part), pick(sampling, part), cache, session, images=pick(images, part)
                )
                for session, part in parts
            )
            return [completion for completions in await asyncio.gather(*requests) for completion in completions]

        return self._wait(run())

    def generate_multi_turn_all(
        self,
        bound_agent: BoundToolAgent,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        cache: CompletionCache | None = None,
    ) -> list[Trajectory]:
        """Sample like `generate_multi_turn`, but spread the prompts evenly over the engines, and wait for the responses.

        In `cache`, the response to the prompt with index i has the serial number i.
        """

        async def run() -> list[Trajectory]:
            engines, count = self._in_service(), len(prompts)
            sessions = [StickySession(engines[index * len(engines) // count]) for index in range(count)]
            return await self.generate_multi_turn(bound_agent, range(count), prompts, sampling, cache, sessions)

        return self._wait(run())

    def _in_service(self) -> list[PooledEngine]:
        """Return the engines that are in service. Raises NoEngineError if there is none."""
        self._least_busy()
        return [engine for engine in self.engines if engine.in_service]

    def _wait[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result. Raises EngineError after `rollout.request_timeout_s`."""

        async def run() -> T:
            async with asyncio.timeout(self.spec.request_timeout_s):
                return await coroutine

        try:
            return self.submit(run()).result()
        except TimeoutError:
            raise deadline_error(self.spec.request_timeout_s) from None

    @property
    def num_in_service(self) -> int:
        """Number of engines that take requests."""
        return sum(engine.in_service for engine in self.engines)

    def take_failed(self) -> dict[str, str]:
        """Return URL -> reason of failure, for the engines that failed since the last call."""
        failed, self._unreported = self._unreported | self._unreported_failures(), {}
        self._reported |= {engine for engine in self.engines if engine.failure}
        self._num_replaced += len(failed)
        return failed

    def _unreported_failures(self) -> dict[str, str]:
        unreported = [engine for engine in self.engines if engine not in self._reported]
        return {engine.client.url: engine.failure for engine in unreported if engine.failure}

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of failures since the last call. A failed engine is counted when `take_failed` returns it."""
        retried, self._num_retried_before = self._num_retried - self._num_retried_before, self._num_retried
        replaced, self._num_replaced = self._num_replaced, 0
        return {"rollout/replaced_engines": float(replaced), "rollout/retried_responses": float(retried)}

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, of all processes of the engines."""
        return self._servers.cpu_seconds()

    def close(self) -> None:
        """End every engine that this pool started."""
        if self._http is not None:
            with suppress(TimeoutError):  # server_supervisor.py kills a failed engine that hangs while it ends
                self.submit(self._close_requests()).result(CLOSE_TIMEOUT_S)
        self._loop.close()
        self._servers.stop()

    async def _close_requests(self) -> None:
        """Stop the heartbeats, wait until failed engines have ended, and close the HTTP session."""
        await self._set_engines([])
        await asyncio.gather(*self._replacements, return_exceptions=True)
        assert self._http is not None, "close() checks this before the call"
        await self._http.close()


def deadline_error(deadline_s: float) -> EngineError:
    """Return the error for responses that take longer than `rollout.request_timeout_s`."""
    return EngineError(
        f"not all responses arrived within rollout.request_timeout_s={deadline_s:g}, although the engines kept computing; "
        "raise rollout.request_timeout_s, or lower rollout.max_response_tokens."
    )


def _even_parts(num_responses: int, num_engines: int) -> list[tuple[int, list[int]]]:
    """Spread responses evenly over the engines. Returns (index of the engine, indices of its responses) for each HTTP request."""
    return [
        (engine, responses[start : start + MAX_RESPONSES_PER_REQUEST].tolist())
        for engine, responses in enumerate(np.array_split(np.arange(num_responses), num_engines))
        for start in range(0, len(responses), MAX_RESPONSES_PER_REQUEST)
    ]
