"""The rollout pipeline: samples a group for each prompt request, scores the group, and stores it in the staleness buffer."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mrl.data.images import RequestImages
from mrl.data.tokenizer import load_tokenizer
from mrl.hang_report.process_registry import track_activity
from mrl.rewards.reward_types import single_rewards
from mrl.rollout.client import TRAINING, SamplingParams, response_seed
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
    """The G responses to one prompt request, before they are scored."""

    request: PromptRequest
    prompt: list[int]  # token ids
    trajectories: list[Trajectory]  # the G responses
    greedy: Trajectory | None = None  # the greedy response; None if the advantage needs no greedy response


class GroupSampler:
    """Samples the groups of prompt requests with the engine pool.

    The coroutines of this class must not be methods of RolloutWorker, because Ray runs the calls of an actor concurrently if the
    actor's class has a coroutine method.
    """

    def __init__(self, spec: RolloutSpec, engines: EnginePool, cache: CompletionCache) -> None:
        """Completions that `cache` holds are not sampled again. New completions are added to `cache`."""
        self.spec, self._engines, self._cache = spec, engines, cache
        self._bound_agent = None
        if spec.agent:
            self._bound_agent = spec.agent.prepare(load_tokenizer(spec.model_path, spec.chat), spec.chat.args)
        self.lengths = ResponseLengths(spec.sampling.max_new_tokens / 2)
        calls_server = any(getattr(each, "needs_server", False) for each in single_rewards(spec.reward))
        # A synchronous deterministic run sends the groups of a step together. Without batch-invariant kernels (on a CPU), the
        # rounding errors of a response's log-probabilities depend on the other responses in the batch.
        scores_early = calls_server and not spec.deterministic
        self._one_group_per_request = bool(spec.extra_groups or spec.staleness or spec.agent or scores_early)

    def split(self, requests: Sequence[PromptRequest]) -> Sequence[Sequence[PromptRequest]]:
        """Divide the prompt requests into lists, in the order of sending. Each list becomes the argument of a call of `sample`.

        Without an agent, `sample` requests the responses to all prompts of a list with one HTTP request. Several groups share a
        list, because fewer HTTP requests cost the engines less CPU. Each group has a list of its own in these cases:

        - A step does not wait for all groups in flight (staleness or over-sampling).
        - An agent samples the responses. Then each turn of each response is an HTTP request.
        - The run is not deterministic, and a reward calls a server. The server then scores a group while the engines sample
          other groups.
        """
        if self._one_group_per_request:
            return [
                [request] for request in longest_first(requests, lambda request: self.lengths.expected(request.row))
            ]
        return split_over_engines(requests, len(self._engines.urls), self.spec.largest_group)

    async def sample(self, requests: Sequence[PromptRequest]) -> list[UnscoredGroup]:
        """Sample G responses to each prompt. Also sample a greedy response to each prompt if the advantage needs one."""
        sizes = [request.size or self.spec.responses_per_prompt for request in requests]
        rows, prompts = ", ".join(str(request.row) for request in requests), []
        for request in requests:
            with track_activity(f"tokenizing the prompt of row {request.row}"):
                prompts.append(self.spec.train.encode(request.row))
        stride = self.spec.largest_group  # so that all responses of the run have different numbers
        numbers = [
            stride * request.serial_number + member
            for request, size in zip(requests, sizes, strict=True)
            for member in range(size)
        ]
        params = self.spec.sampling
        # TRAINING: so that responses to held-out prompts get other seeds
        sampling = self._seeded(params, [(TRAINING, number) for number in numbers])
        expected_work = None
        if self._one_group_per_request:
            expected_work = sum(
                size * self.lengths.expected(request.row) for request, size in zip(requests, sizes, strict=True)
            )
        count = f"{len(requests)} x {sizes[0]}" if len(set(sizes)) == 1 else str(sum(sizes))
        with track_activity(f"sampling {count} responses to rows {rows}"):
            repeated = [prompt for prompt, size in zip(prompts, sizes, strict=True) for _ in range(size)]
            images = self._images([request.row for request in requests])
            of_each = [image for image, size in zip(images, sizes, strict=True) for _ in range(size)] if images else ()
            trajectories = await self._respond(repeated, sampling, numbers, self._cache, expected_work, images=of_each)
            greedy: Sequence[Trajectory | None] = [None] * len(requests)
            if self.spec.needs_greedy:
                greedy_params = self._seeded(replace(params, temperature=0.0), [()] * len(requests))
                greedy = await self._respond(prompts, greedy_params, range(len(prompts)), images=images)
        found = iter(trajectories)
        return [
            UnscoredGroup(request, prompt, list(islice(found, size)), greedy_response)
            for request, prompt, size, greedy_response in zip(requests, prompts, sizes, greedy, strict=True)
        ]

    def _images(self, rows: Sequence[int]) -> list[RequestImages | None]:
        """Return the images of each of these rows of the training data; an empty list if no row of the data has images."""
        return [self.spec.train.request_images(row) for row in rows] if self.spec.train.has_images else []

    async def _respond(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        numbers: Sequence[int],
        cache: CompletionCache | None = None,
        expected_work: float | None = None,
        images: Sequence[RequestImages | None] = (),
    ) -> list[Trajectory]:
        """Sample one response to each prompt. All prompts go to one engine, which EnginePool.open_session chooses.

        For `numbers`, `cache`, `expected_work` and `images`, see EnginePool.generate.
        """
        session = self._engines.open_session()
        if self._bound_agent:
            sessions = [session] * len(prompts)
            return await self._engines.generate_multi_turn(
                self._bound_agent, numbers, prompts, sampling, cache, sessions
            )
        completions = await self._engines.generate(
            numbers, prompts, sampling, cache, session, expected_work, images=images
        )
        return [Trajectory.from_completion(completion) for completion in completions]

    def respond_now(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        response_ids: Sequence[tuple[int, ...]],
        images: Sequence[RequestImages | None] = (),
    ) -> list[Trajectory]:
        """Sample one response to each prompt, spread the prompts over all engines, and wait for the responses.

        `response_ids`: for each prompt, numbers that identify its response and determine its seed (response_seed). `images`: see
        EnginePool.generate. Must not be called in the event loop, because this call would block the loop.
        """
        sampling = self._seeded(params, response_ids)
        if self._bound_agent:
            return self._engines.generate_multi_turn_all(self._bound_agent, prompts, sampling)
        completions = self._engines.generate_all(prompts, sampling, images=images)
        return [Trajectory.from_completion(completion) for completion in completions]

    def _seeded(self, params: SamplingParams, response_ids: Sequence[tuple[int, ...]]) -> list[SamplingParams]:
        """Return the sampling parameters of each response: `params`, with a seed if `rollout.deterministic` is set."""
        if not self.spec.deterministic:
            return [params] * len(response_ids)
        return [replace(params, seed=response_seed(self.spec.seed, *response_id)) for response_id in response_ids]


class ScoringOverlap:
    """Measures the scoring time that delays no step: the engines sample other responses, or no step waits for groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the fields below, which three threads change
        self._running = dict(sampling=0, scoring=0, waiting=0)  # activity -> how often it runs now
        self._since = time.monotonic()  # when the last activity began or ended
        self._seconds = 0.0  # overlap since the last call of `take_seconds`

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Return a context in which an activity runs: "sampling", "scoring" or "waiting" (a step waits for its groups)."""
        self._change(activity, 1)
        try:
            yield
        finally:
            self._change(activity, -1)

    def take_seconds(self) -> float:
        """Return the seconds of overlap since the last call."""
        self._change("scoring", 0)
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _change(self, activity: str, by: int) -> None:
        with self._lock:
            now, running = time.monotonic(), self._running
            if running["scoring"] and (running["sampling"] or not running["waiting"]):
                self._seconds += now - self._since
            self._since = now
            running[activity] += by


class RolloutPipeline:
    """Samples in the event loop of the engine pool and scores in another thread, while the caller does other work.

    The caller adds prompts (`admit`), starts their sampling (`send_requests`) and waits for the groups of a step (`wait_step`).
    All public methods must be called from the same thread.
    """

    def __init__(
        self,
        buffer: StalenessBuffer[Group],
        engines: EnginePool,
        sampler: GroupSampler,
        score: Callable[[list[UnscoredGroup]], list[Group]],
        passes_filter: Callable[[Group], bool],
    ) -> None:
        """`score` and `passes_filter` run in the scoring thread. Steps train only on groups for which `passes_filter` is true."""
        self.buffer, self._engines, self._sampler = buffer, engines, sampler
        self._score, self._passes_filter = score, passes_filter
        self._waited_s = 0.0  # seconds that `wait_step` waited since the last call of `take_seconds`
        self._waited_scoring_s = 0.0  # seconds of scoring during these waits
        self._scoring_s = 0.0  # seconds of scoring since the start
        self._overlap = ScoringOverlap()
        self._changed = threading.Condition()  # guards the buffer and the next three fields
        # Serial number of a prompt request -> the coroutine that samples its group
        self._running: dict[int, Future[None]] = {}
        self._error: BaseException | None = None  # error that `wait_step` raises
        # Number of calls of `restart`. Groups that were requested before the last call are ignored.
        self._num_restarts = 0
        # (`_num_restarts` when the groups were requested, sampled groups); None tells the scoring thread to end
        self._unscored: queue.SimpleQueue[tuple[int, list[UnscoredGroup]] | None] = queue.SimpleQueue()
        self._scoring_thread: threading.Thread | None = None

    def admit(self, first_number: int, rows: Sequence[int], version: int, sizes: Sequence[int] | None = None) -> None:
        """Add a prompt request for each row to the buffer. Skips the requests that an earlier call added.

        `first_number`: serial number of the prompt request for the first row. `version`: weight version that the engines serve.
        `sizes`: number of responses to each row. None: all rows get rollout.responses_per_prompt responses.
        """
        with self._changed:
            missing = slice(max(0, self.buffer.num_drawn - first_number), None)
            self.buffer.admit(rows[missing], version, None if sizes is None else sizes[missing])

    def send_requests(self, version: int) -> None:
        """Send the engines all prompt requests that have not been sent yet. `version`: weight version that the engines serve.

        A prompt request is sent only if its `min_weight_version` <= `version`.
        """
        with self._changed:
            self._error = None
            allowed = [request for request in self.buffer.in_flight.values() if request.min_weight_version <= version]
            new = [request for request in allowed if request.serial_number not in self._running]
            for requests in self._sampler.split(new) if new else ():
                running = self._engines.submit(self._sample(list(requests), self._num_restarts))
                self._running |= dict.fromkeys((request.serial_number for request in requests), running)

    def wait_step(self, step: int, timeout_s: float) -> StepGroups[Group] | None:
        """Wait for the groups of a step. Returns None if the caller must first draw more prompts, in place of rejected groups.

        Raises NoEngineError if no engine is left, EngineError after `timeout_s` seconds, and the errors of sampling and scoring.
        After an error of sampling or scoring, the next call of `send_requests` sends the failed requests again.
        """
        start, scoring_s = time.monotonic(), self._scoring_s
        with self._overlap.during("waiting"), self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                groups = self.buffer.take_step(step)
                if groups is not None:
                    self._cancel(groups.dropped)
                    break
                if self.buffer.free_capacity():
                    break
                remaining_s = start + timeout_s - time.monotonic()
                if remaining_s <= 0 or not self._changed.wait(remaining_s):
                    raise deadline_error(timeout_s)
        self._waited_s += time.monotonic() - start
        self._waited_scoring_s += self._scoring_s - scoring_s
        return groups

    def take_seconds(self) -> tuple[float, float, float]:
        """Return seconds since the last call: (waiting for engines, waiting for scoring, overlap as in ScoringOverlap)."""
        scoring_s = min(self._waited_scoring_s, self._waited_s)
        waited_s, self._waited_s, self._waited_scoring_s = self._waited_s, 0.0, 0.0
        return waited_s - scoring_s, scoring_s, self._overlap.take_seconds()

    def free_capacity(self) -> int:
        """Return the number of prompts that may be drawn now."""
        with self._changed:
            return self.buffer.free_capacity()

    def untrained_requests(self) -> list[PromptRequest]:
        """Return the prompt requests that no step has taken."""
        with self._changed:
            return self.buffer.untrained_requests

    def finished(self) -> dict[int, Group]:
        """Return serial number of the prompt request -> group, for the groups that wait for a step.

        Only groups that passed the rollout filter wait for a step.
        """
        with self._changed:
            return self.buffer.finished

    def has_requests(self, numbers: Sequence[int], rows: Sequence[int]) -> bool:
        """Return whether the buffer holds prompt requests with these serial numbers and rows.

        Serial numbers that were not drawn yet are ignored.
        """
        with self._changed:
            row_of = {request.serial_number: request.row for request in self.buffer.untrained_requests}
            drawn = [pair for pair in zip(numbers, rows, strict=True) if pair[0] < self.buffer.num_drawn]
            return all(row_of.get(number) == row for number, row in drawn)

    def remove(self, numbers: Sequence[int]) -> None:
        """Cancel and remove the prompt requests with these serial numbers, because the rollout log has their groups."""
        with self._changed:
            self.buffer.remove(numbers)
            self._cancel(numbers)

    def restart(self, num_drawn: int, requests: Sequence[PromptRequest], step: int) -> None:
        """Cancel all running requests, and set the buffer to its contents before `step` (see StalenessBuffer.restore)."""
        with self._changed:
            self._num_restarts += 1
            self._cancel(list(self._running))
            self._error = None
            self.buffer.restore(num_drawn, requests, step)

    def close(self) -> None:
        """Cancel all running requests and end the scoring thread. The caller must end the engines."""
        self.restart(0, [], 0)
        self._unscored.put(None)

    async def _sample(self, requests: list[PromptRequest], num_restarts: int) -> None:
        """Sample the groups of `requests`, one list of GroupSampler.split, and pass the groups to the scoring thread."""
        try:
            with self._overlap.during("sampling"):
                groups = await self._sampler.sample(requests)
            if self._scoring_thread is None:
                self._scoring_thread = threading.Thread(target=self._score_all, name="scoring", daemon=True)
                self._scoring_thread.start()
            self._unscored.put((num_restarts, groups))
        except Exception as error:
            self._fail(error, requests, num_restarts)

    def _take_unscored(self) -> list[tuple[int, list[UnscoredGroup]] | None]:
        """Wait until the queue `_unscored` has an entry, and return all its entries."""
        found = [self._unscored.get()]
        while not self._unscored.empty():
            found.append(self._unscored.get())
        return found

    def _score_all(self) -> None:
        """Score the sampled groups until `close` is called. This is the main function of the scoring thread."""
        while None not in (found := self._take_unscored()):
            num_restarts = self._num_restarts
            unscored = [group for entry in found if entry and entry[0] == num_restarts for group in entry[1]]
            start = time.perf_counter()
            try:
                with self._overlap.during("scoring"):
                    groups = self._score(unscored) if unscored else []
                    passed_filter = [self._passes_filter(group) for group in groups]
            except Exception as error:
                self._fail(error, [sampled.request for sampled in unscored], num_restarts)
                continue
            with self._changed:
                if num_restarts != self._num_restarts:
                    continue
                self._scoring_s += time.perf_counter() - start
                for sampled, group, passed in zip(unscored, groups, passed_filter, strict=True):
                    self._running.pop(sampled.request.serial_number, None)
                    self.buffer.finish(sampled.request.serial_number, group, passed)
                self._changed.notify_all()

    def _fail(self, error: BaseException, requests: Sequence[PromptRequest], num_restarts: int) -> None:
        """Make `wait_step` raise this error, and let the next call of `send_requests` send these prompt requests again.

        The error replaces a stored error only if the stored error is a NoEngineError. `num_restarts`: number of calls of
        `restart` when the requests were sent. If it has changed, this method does nothing.
        """
        with self._changed:
            if num_restarts != self._num_restarts:
                return
            for request in requests:
                self._running.pop(request.serial_number, None)
            if self._error is None or isinstance(self._error, NoEngineError):
                self._error = error
            self._changed.notify_all()

    def _cancel(self, numbers: Sequence[int]) -> None:
        """Cancel the HTTP requests of these prompt requests. An HTTP request that also serves other prompt requests continues."""
        for number in numbers:
            running: Future[Any] | None = self._running.pop(number, None)
            if running is not None and running not in self._running.values():
                running.cancel()
