"""An engine as a queue: continuous batching, in which a decoding step takes longer the more requests run. Has no clock."""

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from math import inf

from mrl.config.schema import PauseMode


@dataclass(frozen=True)
class EngineSpeeds:
    """Seconds of one engine. A decoding step of b running requests takes `step_s + b * request_s`."""

    step_s: float  # a: fixed part of a decoding step
    request_s: float  # c: additional seconds of a decoding step for each running request
    prefill_s: float  # d: for each token that is prefilled; no request decodes meanwhile
    max_running: int  # requests; others wait in order

    def token_s(self, running: int) -> float:
        """Return the seconds of one decoding step of `running` requests."""
        return self.step_s + running * self.request_s


@dataclass(eq=False)
class SimulatedRequest:
    """A response that an engine decodes, with the progress of its decoding."""

    key: Hashable  # chosen by the caller, to find its requests again
    prompt: Hashable  # equal for requests that share a prompt: only the first of them prefills it
    prompt_tokens: int
    response_tokens: int
    decoded: float = 0.0  # tokens, as of when it last left the running batch
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at its first admission
    started: bool = False  # it was admitted at least once
    _admitted_at: float = 0.0  # decoding steps of the engine at its last admission


@dataclass(eq=False)
class EngineQueue:
    """One engine: first come, first served, at most `max_running` requests at a time. Time only moves forward.

    A pause with mode `retract` moves running requests to the end of the queue, as SGLang does. Their tokens are kept, and are
    prefilled again at the next admission.
    """

    speeds: EngineSpeeds
    now: float = 0.0  # s
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    paused: bool = False
    busy_s: float = 0.0  # seconds in which at least one request ran
    request_seconds: float = 0.0  # integral of the number of running requests over time
    prefilled_tokens: int = 0
    _running: list[tuple[float, int, SimulatedRequest]] = field(
        default_factory=list
    )  # heap of (decoding step at which it ends, order of admission, request)
    _steps: float = 0.0  # decoding steps so far
    _prefill_left_s: float = 0.0  # prefill that must end before decoding continues
    _cached: set[Hashable] = field(default_factory=set)  # prompts in the prefix cache
    _order: count = field(default_factory=count)

    @property
    def running(self) -> list[SimulatedRequest]:
        """Running requests in the order of admission."""
        return [request for _, _, request in sorted(self._running, key=lambda entry: entry[1])]

    @property
    def pending(self) -> int:
        """Number of requests that are not finished."""
        return len(self._running) + len(self.waiting)

    def next_finish(self) -> float:
        """Return the time at which the next running request finishes if nothing else happens; infinity if none runs."""
        if self.paused or not self._running:
            return inf
        return self.now + self._prefill_left_s + self._steps_left() * self.speeds.token_s(len(self._running))

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Move the time to `now`. Returns the requests that finish until then, in order."""
        finished: list[SimulatedRequest] = []
        while (then := self.next_finish()) <= now:
            self._count_busy(then - self.now)
            self.now, self._prefill_left_s, self._steps = max(self.now, then), 0.0, self._running[0][0]
            while self._running and self._running[0][0] <= self._steps:
                _, _, request = heapq.heappop(self._running)
                request.decoded = float(request.response_tokens)
                finished.append(request)
            self._admit()
        self._decode(now - self.now)
        self.now = max(self.now, now)
        return finished

    def decoded(self, request: SimulatedRequest) -> int:
        """Return the whole tokens that a request has so far."""
        running = any(other is request for _, _, other in self._running)
        return int(request.decoded + (self._steps - request._admitted_at if running else 0.0) + 1e-9)

    def add(self, request: SimulatedRequest) -> None:
        """Queue a request at time `now`; call `advance` first."""
        self.waiting.append(request)
        self._admit()

    def pause(self, mode: PauseMode) -> list[SimulatedRequest]:
        """Stop until `resume`. Returns the aborted requests with the tokens that they have (mode `abort` only)."""
        self.paused = True
        aborted = self.abort(lambda _: True) if mode is PauseMode.abort else []
        if mode is PauseMode.retract:
            self.waiting.extend(self._remove_running(self.running))
            self._prefill_left_s = 0.0
        return aborted

    def resume(self) -> None:
        """Continue after a pause."""
        self.paused = False
        self._admit()

    def flush(self) -> None:
        """Empty the prefix cache."""
        self._cached.clear()

    def abort(self, chosen: Callable[[SimulatedRequest], bool]) -> list[SimulatedRequest]:
        """Remove the chosen requests and return them. Their `decoded` says how many tokens they have."""
        aborted = [request for request in [*self.running, *self.waiting] if chosen(request)]
        self._remove_running(aborted)
        ids = {id(request) for request in aborted}
        self.waiting = deque(request for request in self.waiting if id(request) not in ids)
        self._admit()
        return aborted

    def _steps_left(self) -> float:
        """Return the decoding steps until the next running request finishes."""
        return self._running[0][0] - self._steps

    def _decode(self, seconds: float) -> None:
        """Prefill and decode for `seconds`, in which no request finishes."""
        if self.paused or not self._running or seconds <= 0:
            return
        self._count_busy(seconds)
        prefill_s = min(seconds, self._prefill_left_s)
        self._prefill_left_s -= prefill_s
        self._steps += (seconds - prefill_s) / self.speeds.token_s(len(self._running))

    def _count_busy(self, seconds: float) -> None:
        self.busy_s += seconds
        self.request_seconds += seconds * len(self._running)

    def _admit(self) -> None:
        """Start waiting requests while there is room. Each prefills its prompt, unless cached, and its earlier tokens."""
        while self.waiting and not self.paused and len(self._running) < self.speeds.max_running:
            request = self.waiting.popleft()
            cached = request.prompt_tokens - 1 if request.prompt in self._cached else 0
            tokens = request.prompt_tokens - cached + int(request.decoded)
            if not request.started:
                request.started, request.cached_tokens = True, cached
            self._cached.add(request.prompt)
            self._prefill_left_s += tokens * self.speeds.prefill_s
            self.prefilled_tokens += tokens
            request._admitted_at = self._steps
            end = self._steps + request.response_tokens - request.decoded
            heapq.heappush(self._running, (end, next(self._order), request))

    def _remove_running(self, requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
        """Remove these requests from the running batch; they keep the tokens that they have decoded."""
        removed = {id(request) for request in requests}
        for _, _, request in self._running:
            if id(request) in removed:
                request.decoded += self._steps - request._admitted_at
        self._running = [entry for entry in self._running if id(entry[2]) not in removed]
        heapq.heapify(self._running)
        return requests
