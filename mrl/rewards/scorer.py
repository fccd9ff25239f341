"""Runs a reward on batches of responses. A failing reward gives failed scores and never ends the run."""

import inspect
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from mrl.hang_report.process_registry import track_activity
from mrl.rewards.reward_types import CallResult, Response, Reward, Score, Weighted, call_reward
from mrl.rewards.worker_pool import DEADLINE_PASSED, WorkerPool

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3  # failures logged per call


class Scorer:
    """Scores batches of responses. mrl.rewards.reward_types.Reward describes how a reward is called.

        with Scorer(reward) as scorer:
            scores = scorer(responses)

    If the reward raises, hangs, crashes or returns an invalid result, the responses that cause this get failed scores
    (a `failure`, and value 0). A call takes at most a little longer than `timeout_s`.
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
        """Prepare scoring without starting processes.

        Args:
            workers: number of processes; default: one per core, at most 8.
            sample_timeout_s: time limit per response.
            timeout_s: time limit of one call of the scorer. Responses that have no score by then fail.
            memory_gb: memory limit of one process, in GiB.

        Raises:
            ValueError: the reward cannot be pickled.
        """
        self.reward = reward
        self.sample_timeout_s, self.timeout_s = sample_timeout_s, timeout_s
        self._isolated = [leaf for leaf in _leaves(reward) if not _declares(leaf, "in_process")]
        cores = len(os.sched_getaffinity(0))
        self._pool = WorkerPool(self._isolated, workers or min(8, cores), memory_gb) if self._isolated else None

    def start(self) -> None:
        """Start the worker processes now, if the reward needs any, so that the first call does not wait for them."""
        if self._pool:
            self._pool.start()

    def __call__(self, responses: list[Response]) -> list[Score]:
        """Return one score per response, in order."""
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
                return [
                    _call_in_process(reward, part) if time.monotonic() < deadline else DEADLINE_PASSED for part in parts
                ]
            return self._pool.run(place, parts, self.sample_timeout_s, deadline)

        return _retry_on_smaller_parts(run, responses, list(_splits(reward, responses)), deadline)

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
    """Check a reward without calling it.

    Raises:
        ValueError: it cannot be called with a list of responses, or it cannot be pickled for the worker processes.
    """
    for leaf in _leaves(reward):
        try:
            inspect.signature(leaf).bind([])
        except TypeError as error:
            raise ValueError(f"reward {leaf!r:.120} cannot be called with a list of responses: {error}.") from error
    Scorer(reward)


def _call_in_process(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward in this process, without a time limit. The call is registered so that a hang report can name it."""
    name = getattr(reward, "__qualname__", type(reward).__qualname__)  # name of the function or class
    with track_activity(f"reward {name} on {len(responses)} responses, the first {responses[0].text!r:.60}"):
        return call_reward(reward, responses)


PartKey = Callable[[int], Hashable]  # number of a response -> key of its part; one call scores one part


def _retry_on_smaller_parts(
    run: Callable[[list[list[Response]]], list[CallResult]],
    responses: list[Response],
    splits: list[PartKey],
    deadline: float,
) -> list[Score]:
    """Score the responses, and score the responses of failed calls again in smaller parts, split by the next of `splits`."""
    scores: dict[int, Score] = {}
    left = list(range(len(responses)))  # responses without a score
    tried: set[tuple[int, ...]] = set()  # parts whose call failed
    for number, split in enumerate(splits):
        if not left or (number and time.monotonic() > deadline):
            break
        parts = [part for part in _parts(left, split) if part not in tried]
        results = run([[responses[i] for i in part] for part in parts]) if parts else []
        answered: set[int] = set()
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, str):
                tried.add(part)
                result = [Score.failed(result) for _ in part]
            else:
                answered.update(part)
            scores.update(zip(part, result, strict=True))
        left = [i for i in left if i not in answered]
    return [scores[i] for i in range(len(responses))]


def _parts(numbers: list[int], key: PartKey) -> list[tuple[int, ...]]:
    parts: dict[Hashable, list[int]] = {}
    for number in numbers:
        parts.setdefault(key(number), []).append(number)
    return [tuple(part) for part in parts.values()]


def _splits(reward: Reward, responses: list[Response]) -> Iterator[PartKey]:
    """Yield the splits to try in turn: the whole batch, one part per prompt, one part per response."""
    if not _declares(reward, "per_sample"):
        yield lambda number: None
        yield lambda number: responses[number].group
    if not _declares(reward, "whole_groups"):
        yield lambda number: number


def _leaves(reward: Reward) -> Iterator[Reward]:
    """Yield the rewards that a weighted sum consists of, or the reward itself."""
    if isinstance(reward, Weighted):
        for part in reward.parts.values():
            yield from _leaves(part)
    else:
        yield reward


def _declares(reward: Any, attribute: str) -> bool:
    """Whether a reward has the attribute with a true value. A plain function has none of these attributes."""
    return bool(getattr(reward, attribute, False))
