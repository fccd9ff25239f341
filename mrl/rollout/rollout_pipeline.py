"""The rollout pipeline: samples the groups of prompt requests, scores them, and stores them in the staleness buffer."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from mrl.data.tokenizer import load_tokenizer
from mrl.hang_report.process_registry import track_activity
from mrl.rollout.client import TRAINING, SamplingParams, seed_of
from mrl.rollout.engine_pool import EnginePool, NoEngineError, deadline_error
from mrl.rollout.rollout_log import CompletionCache
from mrl.rollout.spec import RolloutSpec
from mrl.rollout.staleness_buffer import (
    PromptRequest,
    ResponseLengths,
    StalenessBuffer,
    longest_first,
    split_over_engines,
)
from mrl.rollout.trajectory import Group, StepGroups, Trajectory


@dataclass(frozen=True)
class UnscoredGroup:
    """The G responses to a prompt request, before they are scored."""

    request: PromptRequest
    prompt: list[int]
    trajectories: list[Trajectory]
    greedy: Trajectory | None = None


class GroupSampler:
    """Samples the groups of prompt requests from the engine pool.

    This is not part of RolloutWorker: Ray runs calls of an actor concurrently if its class has a coroutine.
    """

    def __init__(self, spec: RolloutSpec, engines: EnginePool, cache: CompletionCache) -> None:
        """`cache`: completions in it are not sampled again, and new completions are added to it."""
        self.spec, self._engines, self._cache = spec, engines, cache
        self._conversation = None
        if spec.agent:
            self._conversation = spec.agent.prepare(load_tokenizer(spec.model_path, spec.chat), spec.chat.args)
        self.lengths = ResponseLengths(spec.max_response_tokens / 2)
        self._one_group_per_request = bool(spec.extra_groups or spec.staleness or spec.agent)

    def split(self, requests: Sequence[PromptRequest]) -> Sequence[Sequence[PromptRequest]]:
        """Split prompt requests into HTTP requests, in sending order.

        If a step waits for all groups anyway, several groups share an HTTP request, which costs the engines less.
        """
        if self._one_group_per_request:
            return [
                [request] for request in longest_first(requests, lambda request: self.lengths.expected(request.row))
            ]
        return split_over_engines(requests, len(self._engines.urls), self.spec.responses_per_prompt)

    async def sample(self, requests: Sequence[PromptRequest]) -> list[UnscoredGroup]:
        """Sample G responses to each prompt, and a greedy response if the advantage needs one, all on one engine."""
        size, rows = self.spec.responses_per_prompt, ", ".join(str(request.row) for request in requests)
        prompts = []
        for request in requests:
            with track_activity(f"tokenising the prompt of row {request.row}"):
                prompts.append(self.spec.train.encode(request.row))
        numbers = [size * request.number + member for request in requests for member in range(size)]
        sampling = self._sampling_params(self.spec.temperature, [(TRAINING, number) for number in numbers])
        expected_work = None
        if self._one_group_per_request:
            expected_work = size * sum(self.lengths.expected(request.row) for request in requests)
        with track_activity(f"sampling {len(requests)} x {size} responses to rows {rows}"):
            repeated = [prompt for prompt in prompts for _ in range(size)]
            trajectories = await self._respond(repeated, sampling, numbers, self._cache, expected_work)
            greedy: Sequence[Trajectory | None] = [None] * len(requests)
            if self.spec.needs_greedy:
                params = self._sampling_params(0.0, [()] * len(requests))
                greedy = await self._respond(prompts, params, range(len(prompts)))
        return [
            UnscoredGroup(request, prompt, trajectories[n * size : (n + 1) * size], greedy_response)
            for n, (request, prompt, greedy_response) in enumerate(zip(requests, prompts, greedy, strict=True))
        ]

    async def _respond(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        numbers: Sequence[int],
        cache: CompletionCache | None = None,
        expected_work: float | None = None,
    ) -> list[Trajectory]:
        """Sample one response to each prompt, all on the engine with the least expected work."""
        session = self._engines.open_session()
        if self._conversation:
            sessions = [session] * len(prompts)
            return await self._engines.converse(self._conversation, numbers, prompts, sampling, cache, sessions)
        completions = await self._engines.generate(numbers, prompts, sampling, cache, session, expected_work)
        return [Trajectory.from_completion(completion) for completion in completions]

    def respond_now(
        self, prompts: list[list[int]], temperature: float, seed_paths: Sequence[tuple[int, ...]]
    ) -> list[Trajectory]:
        """Sample one response to each prompt, spread over all engines, and wait. Do not call this in the event loop."""
        sampling = self._sampling_params(temperature, seed_paths)
        if self._conversation:
            return self._engines.converse_all(self._conversation, prompts, sampling)
        return [Trajectory.from_completion(completion) for completion in self._engines.generate_all(prompts, sampling)]

    def _sampling_params(self, temperature: float, seed_paths: Sequence[tuple[int, ...]]) -> list[SamplingParams]:
        """Return sampling parameters for one response per seed path; with `rollout.deterministic` they include its seed."""
        params = SamplingParams(self.spec.max_response_tokens, temperature)
        if not self.spec.deterministic:
            return [params] * len(seed_paths)
        return [replace(params, seed=seed_of(self.spec.seed, *path)) for path in seed_paths]


class RolloutPipeline:
    """Samples in the event loop of the engine pool and scores in another thread, while the caller does other things.

    The caller admits prompts, sends their requests and waits for the groups of a step. One thread must call all public methods.
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
        self._running: dict[int, Future[None]] = {}  # number of a prompt request -> the coroutine that samples it
        self._error: BaseException | None = None
        self._num_restarts = 0  # results from before the last restart are ignored
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
                running = self._engines.submit(self._sample(list(requests), self._num_restarts))
                self._running |= dict.fromkeys((request.number for request in requests), running)

    def wait_step(self, step: int, timeout_s: float) -> StepGroups[Group] | None:
        """Wait for the groups of a step. Returns None if more prompts may be drawn in place of rejected groups.

        Raises NoEngineError if no engine is left (`send_requests` then sends the requests again), EngineError at the
        deadline, and the errors of sampling and scoring.
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
        """Return the seconds that `wait_step` waited for engines, and for scoring, since the last call."""
        scored = min(self._waited_scoring_s, self._waited_s)
        waited, self._waited_s, self._waited_scoring_s = self._waited_s, 0.0, 0.0
        return waited - scored, scored

    def room(self) -> int:
        """Return the number of prompts that may be drawn now."""
        with self._changed:
            return self.buffer.room()

    def waiting(self) -> list[PromptRequest]:
        """Return the prompt requests that no step has taken."""
        with self._changed:
            return self.buffer.waiting

    def finished(self) -> dict[int, Group]:
        """Return the kept groups that wait for a step, by number of their prompt request."""
        with self._changed:
            return self.buffer.finished

    def has_requests(self, numbers: Sequence[int], rows: Sequence[int]) -> bool:
        """Return whether these prompt requests are waiting and have these rows. Requests not drawn yet are not compared."""
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
            self._num_restarts += 1
            self._cancel(list(self._running))
            self._error = None
            self.buffer.restore(drawn, requests, step)

    def close(self) -> None:
        """Cancel everything and end the scoring thread. The caller ends the engines."""
        self.restart(0, [], 0)
        self._unscored.put(None)

    async def _sample(self, requests: list[PromptRequest], num_restarts: int) -> None:
        """Sample the groups of one HTTP request, and pass them to the scoring thread."""
        try:
            groups = await self._sampler.sample(requests)
            if self._scoring is None:
                self._scoring = threading.Thread(target=self._score_all, name="scoring", daemon=True)
                self._scoring.start()
            self._unscored.put((num_restarts, groups))
        except Exception as error:
            with self._changed:
                if num_restarts == self._num_restarts:
                    for request in requests:
                        self._running.pop(request.number, None)
                    self._fail(error)

    def _take_unscored(self) -> list[tuple[int, list[UnscoredGroup]] | None]:
        """Wait for unscored groups and take all that are in the queue. A None among them tells the thread to end."""
        found = [self._unscored.get()]
        while not self._unscored.empty():
            found.append(self._unscored.get())
        return found

    def _score_all(self) -> None:
        while None not in (found := self._take_unscored()):
            num_restarts = self._num_restarts
            unscored = [group for entry in found if entry and entry[0] == num_restarts for group in entry[1]]
            start = time.perf_counter()
            try:
                groups = self._score(unscored) if unscored else []
                kept = [self._keep(group) for group in groups]
            except Exception as error:
                with self._changed:
                    if num_restarts == self._num_restarts:
                        self._fail(error)
                continue
            with self._changed:
                if num_restarts != self._num_restarts:
                    continue
                self._scoring_s += time.perf_counter() - start
                for sampled, group, keep in zip(unscored, groups, kept, strict=True):
                    self._running.pop(sampled.request.number, None)
                    self.buffer.finish(sampled.request.number, group, keep)
                self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Make `wait_step` raise this error. Keep the first error; any error replaces a NoEngineError."""
        if self._error is None or isinstance(self._error, NoEngineError):
            self._error = error
        self._changed.notify_all()

    def _cancel(self, numbers: Sequence[int]) -> None:
        """Cancel the HTTP requests of these prompt requests, unless other prompt requests share them."""
        for number in numbers:
            running: Future[Any] | None = self._running.pop(number, None)
            if running is not None and running not in self._running.values():
                running.cancel()
