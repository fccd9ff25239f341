"""The scorer runs a reward on batches of responses. If the reward fails on a response, the response gets a failed score."""

import inspect
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from mrl.hang_report.process_registry import track_activity
from mrl.rewards.reward_types import (
    CallResult,
    Calls,
    CombinedReward,
    Response,
    Reward,
    Score,
    call_reward,
    single_rewards,
)
from mrl.rewards.worker_pool import DEADLINE_PASSED, WorkerPool

logger = logging.getLogger(__name__)

SHOWN_FAILURES = 3  # largest number of failures that one call of a Scorer logs


class Scorer:
    """Scores batches of responses. mrl.rewards.reward_types.Reward describes how the reward is called.

        with Scorer(reward) as scorer:
            scores = scorer(responses)

    If the reward raises, hangs, crashes or returns an invalid result, the responses that cause this get failed scores.
    A failed score has the value 0, and its `failure` is the reason. A call of the scorer ends within `timeout_s` seconds or
    slightly later, unless a reward with `in_process` takes longer.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        further_rewards: Sequence[Reward] = (),
        workers: int | None = None,
        sample_timeout_s: float = 10.0,
        timeout_s: float = 300.0,
        memory_gb: float = 4.0,
    ) -> None:
        """Prepare scoring. No process is started yet.

        Args:
            reward: the reward, which may be a combined reward.
            further_rewards: other rewards that a call of the scorer may use instead. All rewards share the worker processes.
            workers: number of worker processes. None: one process per core, at most 8.
            sample_timeout_s: time limit per response in seconds.
            timeout_s: time limit of one call of the scorer in seconds. Responses that have no score by then get failed scores.
            memory_gb: memory limit of one worker process in GiB.

        Raises:
            ValueError: the reward cannot be pickled.
        """
        self.reward = reward
        self.sample_timeout_s, self.timeout_s = sample_timeout_s, timeout_s
        singles = [each for one in (reward, *further_rewards) for each in single_rewards(one)]
        self._worker_rewards = [each for each in singles if not _declares(each, "in_process")]
        cores = len(os.sched_getaffinity(0))
        self._pool = (
            WorkerPool(self._worker_rewards, workers or min(8, cores), memory_gb) if self._worker_rewards else None
        )

    def start(self) -> None:
        """Start the worker processes now, so that the first call does not wait for them. Rewards with `in_process` need none."""
        if self._pool:
            self._pool.start()

    def __call__(self, responses: list[Response], reward: Reward | None = None) -> list[Score]:
        """Return one score per response, in the order of the responses.

        `reward`: one of `further_rewards`; None: the reward of the scorer.
        """
        if not responses:
            return []
        scores = self._score(self.reward if reward is None else reward, responses, time.monotonic() + self.timeout_s)
        failures = [score.failure for score in scores if score.failure is not None]
        for failure in failures[:SHOWN_FAILURES]:
            logger.warning(
                "%d of %d responses could not be scored and get the reward 0: %s", len(failures), len(scores), failure
            )
        return scores

    def _score(self, reward: Reward, responses: list[Response], deadline: float) -> list[Score]:
        if isinstance(reward, CombinedReward):

            def run_parallel(calls: Calls) -> list[list[Score]]:
                with ThreadPoolExecutor(max(1, len(calls))) as threads:
                    jobs = [threads.submit(self._score, inner, given, deadline) for inner, given in calls]
                    return [job.result() for job in jobs]

            return reward.score(responses, run_parallel)

        def run(batches: list[list[Response]]) -> list[CallResult]:
            index = next((i for i, each in enumerate(self._worker_rewards) if each is reward), None)
            if index is None or self._pool is None:
                return [
                    _call_in_process(reward, batch) if time.monotonic() < deadline else DEADLINE_PASSED
                    for batch in batches
                ]
            return self._pool.run(index, batches, self.sample_timeout_s, deadline)

        return _retry_in_smaller_batches(run, responses, list(_batch_keys(reward, responses)), deadline)

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
        ValueError: the reward does not accept a list of responses, or it cannot be pickled for the worker processes.
    """
    for each in single_rewards(reward):
        try:
            inspect.signature(each).bind([])
        except TypeError as error:
            raise ValueError(f"reward {each!r:.120} cannot be called with a list of responses: {error}.") from error
    Scorer(reward)


def _call_in_process(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward in this process, without a time limit. The call is registered, so that a hang report can name it."""
    name = getattr(reward, "__qualname__", type(reward).__qualname__)  # name of the function or class
    with track_activity(f"reward {name} on {len(responses)} responses, the first {responses[0].text!r:.60}"):
        return call_reward(reward, responses)


BatchKey = Callable[[int], Hashable]
"""Function that maps the index of a response to a key. One call of the reward scores all responses with the same key."""


def _retry_in_smaller_batches(
    run: Callable[[list[list[Response]]], list[CallResult]],
    responses: list[Response],
    keys: list[BatchKey],
    deadline: float,
) -> list[Score]:
    """Score the responses in the batches that the first key defines. Divide failed batches by the next key; score them again."""
    scores: dict[int, Score] = {}
    unscored = list(range(len(responses)))  # indices of the responses without a score
    failed: set[tuple[int, ...]] = set()  # batches whose call failed
    for attempt, key in enumerate(keys):
        if not unscored or (attempt and time.monotonic() > deadline):
            break
        batches = [batch for batch in _group_by_key(unscored, key) if batch not in failed]
        results = run([[responses[i] for i in batch] for batch in batches]) if batches else []
        scored: set[int] = set()
        for batch, result in zip(batches, results, strict=True):
            if isinstance(result, str):
                failed.add(batch)
                result = [Score.failed(result) for _ in batch]
            else:
                scored.update(batch)
            scores.update(zip(batch, result, strict=True))
        unscored = [i for i in unscored if i not in scored]
    return [scores[i] for i in range(len(responses))]


def _group_by_key(indices: list[int], key: BatchKey) -> list[tuple[int, ...]]:
    batches: dict[Hashable, list[int]] = {}
    for index in indices:
        batches.setdefault(key(index), []).append(index)
    return [tuple(batch) for batch in batches.values()]


def _batch_keys(reward: Reward, responses: list[Response]) -> Iterator[BatchKey]:
    """Yield the keys in the order in which they are tried.

    These are: all responses in one batch, one batch per prompt, one batch per response.
    """
    if not _declares(reward, "per_sample"):
        yield lambda index: None
        yield lambda index: responses[index].group
    if not _declares(reward, "whole_groups"):
        yield lambda index: index


def _declares(reward: Any, attribute: str) -> bool:
    """Return whether a reward has the attribute and its value is true. A plain function has no such attribute."""
    return bool(getattr(reward, attribute, False))
