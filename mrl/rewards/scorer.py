"""Runs a reward so that a response whose scoring fails costs a recorded failure, never the run."""

import inspect
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from mrl.hang_report.process_registry import track_activity
from mrl.rewards.reward_calls import CallResult, call_reward
from mrl.rewards.reward_types import Response, Reward, Score, Weighted
from mrl.rewards.worker_pool import LATE, WorkerPool

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3  # of one call, in the log


class Scorer:
    """Scores lists of responses with a reward (see mrl.rewards.reward_types.Reward for how it is called).

        with Scorer(reward) as scorer:
            scores = scorer(responses)

    No exception, endless loop, crash or odd result of the reward comes through: it is the `failure` of the responses it
    belongs to, with value 0. A call ends soon after `timeout_s` at the latest.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        workers: int | None = None,
        sample_timeout_s: float = 10.0,
        timeout_s: float = 300.0,
        memory_gb: float = 4.0,
    ) -> None:
        """Starts nothing yet.

        `workers`: processes, by default one for each core, 8 at most. `sample_timeout_s`: for one response.
        `timeout_s`: for one call of the scorer; what has no score by then has failed. `memory_gb`: of one process.

        Raises: ValueError when the reward cannot be sent to a worker process.
        """
        self.reward = reward
        self.sample_timeout_s, self.timeout_s = sample_timeout_s, timeout_s
        self._isolated = [leaf for leaf in _leaves(reward) if not _says(leaf, "in_process")]
        cores = len(os.sched_getaffinity(0))
        self._pool = WorkerPool(self._isolated, workers or min(8, cores), memory_gb) if self._isolated else None

    def start(self) -> None:
        """Start the worker processes, if the reward needs any: so much earlier is the first call done."""
        if self._pool:
            self._pool.start()

    def __call__(self, responses: list[Response]) -> list[Score]:
        """One score for each response, in order."""
        if not responses:
            return []
        scores = self._score(self.reward, responses, time.monotonic() + self.timeout_s)
        failures = [score.failure for score in scores if score.failure is not None]
        for failure in failures[:SHOWN_FAILURES]:
            logger.warning("%d of %d responses could not be scored: %s", len(failures), len(scores), failure)
        return scores

    def _score(self, reward: Reward, responses: list[Response], deadline: float) -> list[Score]:
        if isinstance(reward, Weighted):
            with ThreadPoolExecutor(len(reward.parts)) as threads:
                jobs = {
                    name: threads.submit(self._score, part, responses, deadline) for name, part in reward.parts.items()
                }
                return reward.combine({name: job.result() for name, job in jobs.items()})

        def run(parts: list[list[Response]]) -> list[CallResult]:
            place = next((i for i, leaf in enumerate(self._isolated) if leaf is reward), None)
            if place is None or self._pool is None:
                return [_noted(reward, part) if time.monotonic() < deadline else LATE for part in parts]
            return self._pool.run(place, parts, self.sample_timeout_s, deadline)

        return _narrow(run, responses, list(_cuts(reward, responses)), deadline)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_reward(reward: Reward) -> None:
    """What can be known of a reward before it runs.

    Raises: ValueError when it cannot be called with a list of responses, or not be sent to a worker process.
    """
    for leaf in _leaves(reward):
        try:
            inspect.signature(leaf).bind([])
        except TypeError as error:
            raise ValueError(f"reward {leaf!r:.120} cannot be called with a list of responses: {error}.") from error
    Scorer(reward)


def _noted(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward in this process, where no time limit ends it: a hang report shall name it."""
    name = getattr(reward, "__qualname__", type(reward).__qualname__)  # a function's, or an object's class
    with track_activity(f"reward {name} on {len(responses)} responses, the first {responses[0].text!r:.60}"):
        return call_reward(reward, responses)


Key = Callable[[int], Hashable]  # response number -> which call it belongs to


def _narrow(
    run: Callable[[list[list[Response]]], list[CallResult]], responses: list[Response], cuts: list[Key], deadline: float
) -> list[Score]:
    """Scores from calls with ever smaller parts: whatever fails in one cut is tried again in the next, finer one."""
    scores: dict[int, Score] = {}
    left, tried = list(range(len(responses))), set[tuple[int, ...]]()  # numbers not answered; calls that failed
    for number, cut in enumerate(cuts):
        if not left or (number and time.monotonic() > deadline):
            break
        parts = [part for part in _parts(left, cut) if part not in tried]
        outcomes = run([[responses[i] for i in part] for part in parts]) if parts else []
        answered: set[int] = set()
        for part, outcome in zip(parts, outcomes, strict=True):
            if isinstance(outcome, str):
                tried.add(part)
                outcome = [Score.failed(outcome) for _ in part]
            else:
                answered.update(part)
            scores.update(zip(part, outcome, strict=True))
        left = [i for i in left if i not in answered]
    return [scores[i] for i in range(len(responses))]


def _parts(numbers: list[int], key: Key) -> list[tuple[int, ...]]:
    parts: dict[Hashable, list[int]] = {}
    for number in numbers:
        parts.setdefault(key(number), []).append(number)
    return [tuple(part) for part in parts.values()]


def _cuts(reward: Reward, responses: list[Response]) -> Iterator[Key]:
    if not _says(reward, "per_sample"):
        yield lambda number: None
        yield lambda number: responses[number].group
    if not _says(reward, "whole_groups"):
        yield lambda number: number


def _leaves(reward: Reward) -> Iterator[Reward]:
    if isinstance(reward, Weighted):
        for part in reward.parts.values():
            yield from _leaves(part)
    else:
        yield reward


def _says(reward: Any, attribute: str) -> bool:
    """Whether a reward, perhaps a user's plain function, has a class attribute that is true."""
    return bool(getattr(reward, attribute, False))
