"""The scorer runs a reward on batches of responses. If the reward fails on a response, the response gets a failed score.

Rewards run in worker processes, except those that declare `in_process`. A call in a worker process ends at its time limit.
"""

import fcntl
import inspect
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from pebble import ProcessExpired, ProcessFuture, ProcessPool

from mrl.core.code_locations import describe_error
from mrl.core.processes import descendants, end_processes
from mrl.core.run_warnings import forward_warnings
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

DEADLINE_PASSED = "not scored before the deadline of the whole batch (scoring.timeout_s)."  # reason of a failed score

REGISTRATION_S = 0.5  # largest time from the fork of a worker process until multiprocessing knows the worker
_FORK_SERVER_SETUP = "mrl.rewards.fork_server"  # only the fork server imports this module
_rewards: list[Reward] | str = []  # only set in a worker process: the rewards, or the reason why they cannot be loaded


def _init_worker(pickled: bytes, memory_bytes: int) -> None:
    """Limit the memory of a worker process, load the rewards, and make the process end when the owner of the pool ends."""
    global _rewards
    forward_warnings("reward")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGTERM must also end code that never returns to the interpreter
    owner = multiprocessing.parent_process()
    assert owner is not None, "a worker has a parent"
    # The kernel ends this process with SIGIO when the owner ends.
    fcntl.fcntl(owner.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(owner.sentinel, fcntl.F_SETFL, fcntl.fcntl(owner.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or memory_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))
    try:
        _rewards = pickle.loads(pickled)
    except Exception as error:  # an error of the user's module; every call of a reward returns this text as its failure
        _rewards = f"the reward cannot be loaded in a worker process: {describe_error(error)}"


def _call_in_worker(reward_index: int, responses: list[Response]) -> CallResult:
    try:
        return _rewards if isinstance(_rewards, str) else call_reward(_rewards[reward_index], responses)
    except BaseException as error:  # a KeyboardInterrupt that the reward raises must not end the pool
        return describe_error(error)


def _do_nothing() -> None:
    """Do nothing. When this call returns, a worker process is ready to take calls."""


class WorkerPool:
    """Runs calls of rewards in worker processes. A process that hangs or crashes is replaced.

    Workers are forked from a fork server, which has only one thread and has already imported the slow modules. A fork of
    this process could deadlock because the process has threads. Spawned workers would repeat the imports.
    """

    def __init__(self, rewards: Sequence[Reward], workers: int, memory_gb: float) -> None:
        """Prepare the pool. No process is started yet.

        `memory_gb` is the memory limit of each worker in GiB. Allocations above the limit raise MemoryError. Raises
        ValueError if a reward cannot be pickled.
        """
        try:
            self._pickled = pickle.dumps(list(rewards))
        except Exception as error:  # pickle may raise any error
            raise ValueError(
                f"the reward cannot be sent to a worker process ({error}); use a class or function at the top level of a module."
            ) from error
        # A reward need not have the attribute `imports`.
        shared = {name for reward in rewards for name in getattr(reward, "imports", ())}
        self._imports = [_FORK_SERVER_SETUP, __name__, *sorted(shared)]
        self._workers, self._memory_bytes = workers, int(memory_gb * 2**30)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def start(self) -> None:
        """Start the processes now. Otherwise the first call of a reward starts them and waits for them."""
        with self._lock:
            assert self._started_pool().active, "the pool is started"

    def run(
        self, reward_index: int, batches: list[list[Response]], sample_s: float, deadline: float
    ) -> list[CallResult]:
        """Call the reward with index `reward_index` in `rewards` for each batch of responses. Returns the result of each call.

        If the pool breaks before a call ends, the call is repeated once. `deadline` is a time of time.monotonic. The time limit
        of a call is `sample_s` seconds per response, but at most half of the time until the deadline. In the rest of the time,
        the reward can be called again, after the pool broke or with smaller batches. Calls that still run at the deadline are
        ended.
        """
        results = self._run(reward_index, batches, sample_s, deadline)
        lost = [i for i, result in enumerate(results) if result is None]
        retried = self._run(reward_index, [batches[i] for i in lost], sample_s, deadline) if lost else []
        for i, result in zip(lost, retried, strict=True):
            results[i] = result
        return ["the worker processes died" if result is None else result for result in results]

    def _run(
        self, reward_index: int, batches: list[list[Response]], sample_s: float, deadline: float
    ) -> list[CallResult | None]:
        limits = [min(len(batch) * sample_s, max(0.1, deadline - time.monotonic()) / 2) for batch in batches]
        with self._lock:
            pool = self._started_pool()
            try:
                futures = [
                    pool.schedule(_call_in_worker, (reward_index, batch), timeout=limit)
                    for batch, limit in zip(batches, limits, strict=True)
                ]
            except RuntimeError:  # the pool broke in the meantime
                return [None for _ in batches]
        results = [_result(future, limit, deadline) for future, limit in zip(futures, limits, strict=True)]
        if DEADLINE_PASSED in results:  # otherwise the workers would still start the queued calls
            self.close()
        return results

    def _started_pool(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            self._stop()
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(self._imports)
            arguments = (self._pickled, self._memory_bytes)
            self._pool = ProcessPool(self._workers, initializer=_init_worker, initargs=arguments, context=context)
        return self._pool

    def wait_started(self, timeout_s: float) -> bool:
        """Wait until a worker process takes calls. Return False if none does within `timeout_s` seconds.

        Call this method before `close`, because a worker process that is killed while it starts prints a traceback.
        """
        with self._lock:
            future = self._started_pool().schedule(_do_nothing, timeout=timeout_s)
        try:
            future.result(timeout=timeout_s)
        except Exception:  # the process did not start in time, or died
            return False
        return True

    def close(self) -> None:
        """Kill every worker process."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
            end_processes(_leftovers(), exit_patience_s=0)


def _leftovers() -> list[psutil.Process]:
    """Return the processes that rewards have started and that outlived their worker processes.

    These processes are descendants of the fork server, because the fork server is a subreaper. Worker processes of other pools
    are also descendants of the fork server; the result does not contain them.
    """
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[missing-attribute]  # there is no public name
    if server is None:
        return []
    left = _not_of_pools(descendants(server))
    # A process that has just started may be a worker of another pool, which multiprocessing has not registered yet.
    if left and (wait_s := REGISTRATION_S - min(map(_age_s, left))) > 0:
        time.sleep(wait_s)
        left = _not_of_pools(left)
    return left


def _not_of_pools(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are neither worker processes nor descendants of worker processes."""
    workers = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    spared = {*workers, *(each.pid for worker in workers for each in descendants(worker))}
    return [each for each in processes if each.pid not in spared]


def _age_s(process: psutil.Process) -> float:
    """Return the seconds since a process started; infinity if it has ended.

    The start time and the current time are seconds since the boot of the machine. psutil's create_time can be wrong by a second,
    because the kernel rounds the time of the boot.
    """
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _result(future: ProcessFuture, limit: float, deadline: float) -> CallResult | None:
    """Return the result of a call, or None if the pool broke. Another call may have broken the pool."""
    try:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        if future.done():
            return f"no score within {limit:.1f} s; the worker process was ended."
        future.cancel()
        return DEADLINE_PASSED
    except ProcessExpired as error:
        return f"the worker process died (exit code {error.exitcode})."
    except BrokenProcessPool:
        return None
    except Exception as error:  # a result that cannot be pickled
        return describe_error(error)


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
        self._pooled_rewards = [each for each in singles if not _declares(each, "in_process")]
        cores = len(os.sched_getaffinity(0))
        self._pool = (
            WorkerPool(self._pooled_rewards, workers or min(8, cores), memory_gb) if self._pooled_rewards else None
        )

    def start(self) -> None:
        """Start the worker processes now, so that the first call does not wait. `in_process` rewards need no worker processes."""
        if self._pool:
            self._pool.start()

    def __call__(self, responses: list[Response], reward: Reward | None = None) -> list[Score]:
        """Return one score per response, in the order of the responses.

        `reward`: the reward of the scorer, or one of `further_rewards`. None: the reward of the scorer.
        """
        if not responses:
            return []
        scores = self._score(self.reward if reward is None else reward, responses, time.monotonic() + self.timeout_s)
        failures = [score.failure for score in scores if score.failure is not None]
        for failure in failures[:SHOWN_FAILURES]:
            logger.warning(
                "%d of %d responses could not be scored and get the reward 0. One of the reasons: %s",
                len(failures),
                len(scores),
                failure,
            )
        return scores

    def _score(self, reward: Reward, responses: list[Response], deadline: float) -> list[Score]:
        if isinstance(reward, CombinedReward):

            def run_parallel(calls: Calls) -> list[list[Score]]:
                with ThreadPoolExecutor(max(1, len(calls))) as threads:
                    jobs = [
                        threads.submit(self._score, inner, inner_responses, deadline)
                        for inner, inner_responses in calls
                    ]
                    return [job.result() for job in jobs]

            return reward.score(responses, run_parallel)

        def run(batches: list[list[Response]]) -> list[CallResult]:
            reward_index = next((i for i, each in enumerate(self._pooled_rewards) if each is reward), None)
            if reward_index is None or self._pool is None:
                return [
                    _call_in_process(reward, batch) if time.monotonic() < deadline else DEADLINE_PASSED
                    for batch in batches
                ]
            return self._pool.run(reward_index, batches, self.sample_timeout_s, deadline)

        return _score_in_smaller_batches(run, responses, list(_batch_keys(reward, responses)), deadline)

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
        ValueError: the reward declares both `per_sample` and `whole_groups`.
    """
    for each in single_rewards(reward):
        if _declares(each, "per_sample") and _declares(each, "whole_groups"):
            raise ValueError(
                f"reward {each!r:.120} declares both per_sample and whole_groups: with per_sample a call gets one response, with "
                "whole_groups it gets all responses to a prompt; remove one of the two attributes."
            )
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


BatchBy = Callable[[int], Hashable]
"""Function that maps the index of a response to a key. One call of the reward scores all responses with the same key."""


def _score_in_smaller_batches(
    run: Callable[[list[list[Response]]], list[CallResult]],
    responses: list[Response],
    keys: list[BatchBy],
    deadline: float,
) -> list[Score]:
    """Score the responses in the batches that the first key defines.

    Split each failed batch by the next key, and score the parts. `run` calls the reward once for each batch.
    """
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
            if isinstance(result, str):  # the reason of a failure
                failed.add(batch)
                result = [Score.failed(result) for _ in batch]
            else:
                scored.update(batch)
            scores.update(zip(batch, result, strict=True))
        unscored = [i for i in unscored if i not in scored]
    return [scores[i] for i in range(len(responses))]


def _group_by_key(indices: list[int], key: BatchBy) -> list[tuple[int, ...]]:
    batches: dict[Hashable, list[int]] = {}
    for index in indices:
        batches.setdefault(key(index), []).append(index)
    return [tuple(batch) for batch in batches.values()]


def _batch_keys(reward: Reward, responses: list[Response]) -> Iterator[BatchBy]:
    """Yield the keys in the order in which they are tried.

    The first key gives one batch, the second key one batch per prompt, and the third key one batch per response. With
    `per_sample`, there is only the third key. With `whole_groups`, there are only the first two keys.
    """
    if not _declares(reward, "per_sample"):
        yield lambda index: None
        yield lambda index: responses[index].group
    if not _declares(reward, "whole_groups"):
        yield lambda index: index


def _declares(reward: Any, attribute: str) -> bool:
    """Return whether a reward has the attribute and its value is true. A plain function has no such attribute."""
    return bool(getattr(reward, attribute, False))
