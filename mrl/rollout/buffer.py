"""The staleness buffer, which decides what each step trains, and the pipeline that samples and scores its groups.

A prompt request stands for a group of G responses. With N groups per step and a maximal staleness of K weight versions, at
most (K + 1) N groups are drawn and not yet trained. So memory is bounded, however fast engines and trainers are. Step s never
trains a token that is older than weight version s - K. K = 0 is synchronous training.
"""

import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mrl.rollout.engine_pool import EnginePool, NoEngineError, deadline_error
from mrl.rollout.request_builder import PromptRequest, UnscoredGroup
from mrl.rollout.trajectory import Group, StepGroups


@dataclass
class StalenessBuffer[T]:
    """The prompt requests that are drawn and not yet trained. A pure data structure; the planner simulates runs with it.

    - Over-sampling: `extra` groups are in flight beyond those that steps need. A step takes the groups that finish first, and
      drops the others once they are too old. Without over-sampling nothing is dropped: a step waits for every group that would
      be too old for the next one.
    - `in_order`: steps train groups in the order of drawing, so short responses are not preferred.
    - `max_replaced`: number of groups per step that are replaced if the group filter rejects them. If it rejects more, the
      step has fewer groups.
    """

    groups_per_step: int  # N
    staleness: int  # K, weight versions
    extra: int = 0  # groups
    in_order: bool = False
    max_replaced: int = 0
    drawn: int = 0  # prompt requests since the run began; the next one gets this number
    in_flight: dict[int, PromptRequest] = field(default_factory=dict)  # being sampled or scored, by number
    _finished: dict[int, tuple[PromptRequest, T]] = field(default_factory=dict)  # in the order of finishing
    _filtered: dict[int, T] = field(default_factory=dict)  # rejected by the group filter since the last step

    def room(self) -> int:
        """Number of prompts that may be drawn now."""
        not_replaced = max(0, len(self._filtered) - self.max_replaced)
        capacity = (self.staleness + 1) * self.groups_per_step + self.extra
        return max(0, capacity - len(self.in_flight) - len(self._finished) - not_replaced)

    def admit(self, rows: Iterable[int], version: int) -> list[PromptRequest]:
        """Create prompt requests for the next rows. `version`: weight version that the engines serve."""
        requests = [PromptRequest(self.drawn + place, row, version) for place, row in enumerate(rows)]
        assert len(requests) <= self.room(), f"{len(requests)} more prompt requests, room for {self.room()}"
        self.drawn += len(requests)
        self.in_flight |= {request.number: request for request in requests}
        return requests

    def finish(self, number: int, group: T, keep: bool) -> None:
        """Store a scored group. Without `keep`, no step trains it, and it may be replaced. A dropped group is ignored."""
        request = self.in_flight.pop(number, None)
        if request is None:
            return
        if keep:
            self._finished[number] = (request, group)
        else:
            self._filtered[number] = group

    def take_step(self, step: int) -> StepGroups[T] | None:
        """Remove the groups that `step` trains and return them; None while the step must wait for groups in flight."""
        numbers = self._select_in_order() if self.in_order else self._select_finished(step)
        is_short = not self.in_flight and not self.room()  # enough rejected groups were replaced
        if numbers is None or (len(numbers) < self.groups_per_step and not is_short):
            return None
        groups = {number: self._finished.pop(number)[1] for number in sorted(numbers)}
        filtered, self._filtered = self._filtered, {}
        return StepGroups(
            list(groups), list(groups.values()), list(filtered), list(filtered.values()), self._drop_stale(step)
        )

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove prompt requests that were trained or rejected already, or are dropped."""
        for number in numbers:
            self.in_flight.pop(number, None)
            self._finished.pop(number, None)

    def restore(self, drawn: int, requests: Sequence[PromptRequest], step: int) -> None:
        """Start over before `step`, after `drawn` prompts were drawn, with these requests (in the order of drawing) in flight.

        If there are more than this buffer holds, the last ones get a later admitted version: that of the step with room.
        """
        oldest = step - self.staleness
        versions = [
            max(request.admitted_version, oldest + place // self.groups_per_step)
            for place, request in enumerate(requests)
        ]
        self.in_flight = {
            request.number: replace(request, admitted_version=version)
            for request, version in zip(requests, versions, strict=True)
        }
        self.drawn, self._finished, self._filtered = drawn, {}, {}

    @property
    def waiting(self) -> list[PromptRequest]:
        """All requests that are drawn and not trained, in the order of drawing. A resumed run needs them again."""
        requests = [*self.in_flight.values(), *(request for request, _ in self._finished.values())]
        return sorted(requests, key=lambda request: request.number)

    @property
    def finished(self) -> dict[int, T]:
        """The groups that are sampled and wait for a step, by number."""
        return {number: group for number, (_, group) in self._finished.items()}

    def _select_in_order(self) -> list[int] | None:
        """The first N requests in the order of drawing, once all of them are finished."""
        first = sorted([*self.in_flight, *self._finished])[: self.groups_per_step]
        return None if any(number in self.in_flight for number in first) else first

    def _select_finished(self, step: int) -> list[int] | None:
        """Up to N finished groups, the first finished first, such that every remaining group can still be trained in time.

        Condition: at most d * N requests that are too old for any step after `step + d` remain, for d = 0 to K.
        """
        first = next(iter(self.in_flight.values()), None)  # the oldest request in flight
        if first and not self.extra and first.admitted_version <= step - self.staleness:
            return None  # a quick exit, because this runs after every group
        chosen: dict[int, None] = {}
        for later in range(0 if self.extra else self.staleness + 1):
            oldest = step - self.staleness + later
            num_old = sum(request.admitted_version <= oldest for request in self.waiting)
            old = [number for number, (request, _) in self._finished.items() if request.admitted_version <= oldest]
            missing = num_old - later * self.groups_per_step - sum(number in chosen for number in old)
            free = [number for number in old if number not in chosen]
            if missing > len(free):
                return None
            chosen |= dict.fromkeys(free[: max(0, missing)])
        rest = [number for number in self._finished if number not in chosen]
        return [*chosen, *rest[: max(0, self.groups_per_step - len(chosen))]]

    def _drop_stale(self, step: int) -> list[int]:
        """Remove requests that are too old for the next step. There are none without over-sampling."""
        stale = [request.number for request in self.waiting if request.admitted_version <= step - self.staleness]
        assert self.extra or not stale, f"step {step} left {stale} behind, which no later step may train"
        self.remove(stale)
        return stale


class GroupSampler(Protocol):
    """What the pipeline needs from RequestBuilder."""

    def split(self, requests: Sequence[PromptRequest]) -> Sequence[Sequence[PromptRequest]]:
        """Decide which prompt requests share an HTTP request. Groups that share one finish together."""
        ...

    def sample(self, requests: Sequence[PromptRequest]) -> Awaitable[list[UnscoredGroup]]:
        """Sample the groups of these requests, in the event loop of the engine pool."""
        ...


class RolloutPipeline:
    """Samples in the event loop of the engine pool and scores in a thread of its own, while the caller does other things.

    The caller admits prompts, sends their requests and waits for the groups of a step. All public methods belong to one thread.
    """

    def __init__(
        self,
        buffer: StalenessBuffer[Group],
        engines: EnginePool,
        sampler: GroupSampler,
        score: Callable[[list[UnscoredGroup]], list[Group]],
        keep: Callable[[Group], bool],
    ) -> None:
        """`score` and `keep` run in the scoring thread. `keep`: whether a group is trained."""
        self.buffer, self._engines, self._sampler = buffer, engines, sampler
        self._score, self._keep = score, keep
        self._waited_s = 0.0  # seconds that `wait_step` waited since the last `take_seconds`
        self._waited_scoring_s = 0.0  # scoring seconds during these waits
        self._scoring_s = 0.0  # scoring seconds since the start
        self._changed = threading.Condition()  # guards the buffer and the fields below
        self._running: dict[int, Future[None]] = {}  # number of a request -> the coroutine that samples it
        self._error: BaseException | None = None
        self._generation = 0  # number of restarts; results of an earlier generation are ignored
        self._unscored: queue.SimpleQueue[tuple[int, list[UnscoredGroup]] | None] = queue.SimpleQueue()
        self._scoring: threading.Thread | None = None

    def admit(self, first: int, rows: Sequence[int], version: int) -> None:
        """Admit prompts to the buffer; `first` is the number of the first one. Prompts that were admitted before are skipped."""
        with self._changed:
            self.buffer.admit(rows[max(0, self.buffer.drawn - first) :], version)

    def send_requests(self, version: int) -> None:
        """Send the admitted requests that are not sent yet. `version`: weight version that the engines serve."""
        with self._changed:
            self._error = None
            admitted = [request for request in self.buffer.in_flight.values() if request.admitted_version <= version]
            new = [request for request in admitted if request.number not in self._running]
            for requests in self._sampler.split(new) if new else ():
                running = self._engines.submit(self._sample(list(requests), self._generation))
                self._running |= dict.fromkeys((request.number for request in requests), running)

    def wait_step(self, step: int, timeout_s: float) -> StepGroups[Group] | None:
        """Wait for the groups of a step. Returns None if more prompts may be drawn in place of rejected groups.

        Raises NoEngineError if no engine is left (`send_requests` then sends the requests again), EngineError at the
        deadline, and whatever sampling or scoring raised.
        """
        start, scoring_s = time.monotonic(), self._scoring_s
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                groups = self.buffer.take_step(step)
                if groups is not None:
                    self._cancel(groups.dropped)
                    break
                if self.buffer.room():
                    break
                left = start + timeout_s - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise deadline_error(timeout_s)
        self._waited_s += time.monotonic() - start
        self._waited_scoring_s += self._scoring_s - scoring_s
        return groups

    def take_seconds(self) -> tuple[float, float]:
        """Seconds that `wait_step` waited for engines and for scoring since the last call."""
        scored = min(self._waited_scoring_s, self._waited_s)
        waited, self._waited_s, self._waited_scoring_s = self._waited_s, 0.0, 0.0
        return waited - scored, scored

    def room(self) -> int:
        """Number of prompts that may be drawn now."""
        with self._changed:
            return self.buffer.room()

    def waiting(self) -> list[PromptRequest]:
        """The prompt requests that no step has taken."""
        with self._changed:
            return self.buffer.waiting

    def finished(self) -> dict[int, Group]:
        """The sampled and kept groups that wait for a step, by number of their prompt request."""
        with self._changed:
            return self.buffer.finished

    def has_requests(self, numbers: Sequence[int], rows: Sequence[int]) -> bool:
        """Whether these prompt requests are waiting and have these rows. Requests that are not drawn yet are not compared."""
        with self._changed:
            waiting = {request.number: request.row for request in self.buffer.waiting}
            drawn = [pair for pair in zip(numbers, rows, strict=True) if pair[0] < self.buffer.drawn]
            return all(waiting.get(number) == row for number, row in drawn)

    def remove(self, numbers: Sequence[int]) -> None:
        """Cancel and remove prompt requests whose groups were trained or rejected already."""
        with self._changed:
            self.buffer.remove(numbers)
            self._cancel(numbers)

    def restart(self, drawn: int, requests: Sequence[PromptRequest], step: int) -> None:
        """Cancel everything, and start over before `step` with these prompt requests. `drawn`: prompts drawn so far."""
        with self._changed:
            self._generation += 1
            self._cancel(list(self._running))
            self._error = None
            self.buffer.restore(drawn, requests, step)

    def close(self) -> None:
        """Cancel everything and end the scoring thread. The caller ends the engines."""
        self.restart(0, [], 0)
        self._unscored.put(None)

    async def _sample(self, requests: list[PromptRequest], generation: int) -> None:
        """Sample the groups of one HTTP request, and pass them to the scoring thread."""
        try:
            groups = await self._sampler.sample(requests)
            if self._scoring is None:
                self._scoring = threading.Thread(target=self._score_all, name="scoring", daemon=True)
                self._scoring.start()
            self._unscored.put((generation, groups))
        except Exception as error:
            with self._changed:
                if generation == self._generation:
                    for request in requests:
                        self._running.pop(request.number, None)
                    self._fail(error)

    def _take_unscored(self) -> list[tuple[int, list[UnscoredGroup]] | None]:
        """Wait for unscored groups and take all that are in the queue. None among them ends the thread."""
        found = [self._unscored.get()]
        while not self._unscored.empty():
            found.append(self._unscored.get())
        return found

    def _score_all(self) -> None:
        while None not in (found := self._take_unscored()):
            generation = self._generation
            unscored = [group for entry in found if entry and entry[0] == generation for group in entry[1]]
            start = time.perf_counter()
            try:
                groups = self._score(unscored) if unscored else []
                kept = [self._keep(group) for group in groups]
            except Exception as error:
                with self._changed:
                    if generation == self._generation:
                        self._fail(error)
                continue
            with self._changed:
                if generation != self._generation:
                    continue
                self._scoring_s += time.perf_counter() - start
                for sampled, group, keep in zip(unscored, groups, kept, strict=True):
                    self._running.pop(sampled.request.number, None)
                    self.buffer.finish(sampled.request.number, group, keep)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Make `wait_step` raise this error. It replaces a NoEngineError, after which the caller only tries again."""
        if self._error is None or isinstance(self._error, NoEngineError):
            self._error = error
        self._changed.notify_all()

    def _cancel(self, numbers: Sequence[int]) -> None:
        """Cancel the HTTP requests of these prompt requests, unless other prompt requests share them."""
        for number in numbers:
            running: Future[Any] | None = self._running.pop(number, None)
            if running is not None and running not in self._running.values():
                running.cancel()
