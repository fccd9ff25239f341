"""An engine as a queue: continuous batching whose steps take longer the more requests run. No clock of its own, no threads."""

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from mrl.weight_sync.engine_control import PauseMode


@dataclass(frozen=True)
class EngineSpeeds:
    """Seconds of one engine. A decoding step of b running requests takes `step_s + b * request_s`."""

    step_s: float  # a: of a step, whatever runs
    request_s: float  # c: of a step, for each running request
    prefill_s: float  # d: for each token that is computed before a request's first new one; nothing decodes meanwhile
    max_running: int  # requests; others wait in order

    def token_s(self, running: int) -> float:
        """Seconds of one decoding step."""
        return self.step_s + running * self.request_s


@dataclass(eq=False)
class Request:
    """A response in the making."""

    key: Hashable  # whose it is
    prompt: Hashable  # equal for requests that share a prompt: only the first computes it
    prompt_tokens: int
    response_tokens: int
    decoded: float = 0.0  # tokens, when it last left the running batch
    cached_tokens: int = 0  # of the prompt, when it was admitted first
    started: bool = False  # admitted once
    _joined: float = 0.0  # steps of the engine when it was admitted last


@dataclass(eq=False)
class Decoding:
    """One engine: first come, first served, at most `max_running` at a time; time only goes forward.

    A pause that retracts sends what runs back to the end of the queue, as SGLang does: its tokens are kept, and computed again
    when it is admitted again.
    """

    speeds: EngineSpeeds
    now: float = 0.0  # s
    waiting: deque[Request] = field(default_factory=deque)
    paused: bool = False
    busy_s: float = 0.0  # that something ran
    request_seconds: float = 0.0  # integral of the running requests over time
    prefilled_tokens: int = 0
    _running: list[tuple[float, int, Request]] = field(
        default_factory=list
    )  # heap: (step at which it ends, order, request)
    _steps: float = 0.0  # decoded so far
    _stall_s: float = 0.0  # prefill still to do before decoding goes on
    _cached: set[Hashable] = field(default_factory=set)  # prompts
    _order: count = field(default_factory=count)

    @property
    def running(self) -> list[Request]:
        """In the order of admission."""
        return [request for _, _, request in sorted(self._running, key=lambda entry: entry[1])]

    @property
    def pending(self) -> int:
        """Requests that are not finished."""
        return len(self._running) + len(self.waiting)

    def next_finish(self) -> float:
        """When the next running request is done, if nothing else happens; infinite where none runs."""
        if self.paused or not self._running:
            return inf
        return self.now + self._stall_s + self._left() * self.speeds.token_s(len(self._running))

    def advance(self, now: float) -> list[Request]:
        """Go on until `now`; what is finished by then, in order."""
        done: list[Request] = []
        while (then := self.next_finish()) <= now:
            self._spend(then - self.now)
            self.now, self._stall_s, self._steps = max(self.now, then), 0.0, self._running[0][0]
            while self._running and self._running[0][0] <= self._steps:
                _, _, request = heapq.heappop(self._running)
                request.decoded = float(request.response_tokens)
                done.append(request)
            self._admit()
        self._decode(now - self.now)
        self.now = max(self.now, now)
        return done

    def decoded(self, request: Request) -> int:
        """Whole tokens that a request has so far."""
        running = any(other is request for _, _, other in self._running)
        return int(request.decoded + (self._steps - request._joined if running else 0.0) + 1e-9)

    def add(self, request: Request) -> None:
        """Queue a request; as of `now`, so `advance` first."""
        self.waiting.append(request)
        self._admit()

    def pause(self, mode: PauseMode) -> list[Request]:
        """Stop until `resume`; requests that are given up, with the tokens they have (`abort` only)."""
        self.paused = True
        given_up = self.abort(lambda _: True) if mode == "abort" else []
        if mode == "retract":
            self.waiting.extend(self._leave(self.running))
            self._stall_s = 0.0
        return given_up

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self._admit()

    def flush(self) -> None:
        """Forget the prompts in the cache."""
        self._cached.clear()

    def abort(self, chosen: Callable[[Request], bool]) -> list[Request]:
        """Give requests up; they have `decoded` tokens."""
        gone = [request for request in [*self.running, *self.waiting] if chosen(request)]
        self._leave(gone)
        ids = {id(request) for request in gone}
        self.waiting = deque(request for request in self.waiting if id(request) not in ids)
        self._admit()
        return gone

    def _left(self) -> float:
        """Steps until the next running request is done."""
        return self._running[0][0] - self._steps

    def _decode(self, seconds: float) -> None:
        """Prefill and decode for a while in which nothing finishes."""
        if self.paused or not self._running or seconds <= 0:
            return
        self._spend(seconds)
        stalled = min(seconds, self._stall_s)
        self._stall_s -= stalled
        self._steps += (seconds - stalled) / self.speeds.token_s(len(self._running))

    def _spend(self, seconds: float) -> None:
        self.busy_s += seconds
        self.request_seconds += seconds * len(self._running)

    def _admit(self) -> None:
        while self.waiting and not self.paused and len(self._running) < self.speeds.max_running:
            request = self.waiting.popleft()
            known = request.prompt_tokens - 1 if request.prompt in self._cached else 0
            tokens = request.prompt_tokens - known + int(request.decoded)
            if not request.started:
                request.started, request.cached_tokens = True, known
            self._cached.add(request.prompt)
            self._stall_s += tokens * self.speeds.prefill_s
            self.prefilled_tokens += tokens
            request._joined = self._steps
            end = self._steps + request.response_tokens - request.decoded
            heapq.heappush(self._running, (end, next(self._order), request))

    def _leave(self, requests: list[Request]) -> list[Request]:
        """Take these from the running batch; they keep what they have decoded."""
        leaving = {id(request) for request in requests}
        for _, _, request in self._running:
            if id(request) in leaving:
                request.decoded += self._steps - request._joined
        self._running = [entry for entry in self._running if id(entry[2]) not in leaving]
        heapq.heapify(self._running)
        return requests
