"""Worker processes for rewards that may raise, hang or crash. A call that hangs is ended at its time limit."""

import fcntl
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from mrl.rewards.reward_types import CallResult, Response, Reward, call_reward, describe_error

DEADLINE_PASSED = "not scored before the deadline of the whole batch (scoring.timeout_s)."


_rewards: list[Reward] | str = []  # in a worker process: the rewards, or the reason why they could not be loaded


def _init_worker(pickled: bytes, memory_bytes: int) -> None:
    """Initialise a worker process: make it end when the owner of the pool ends, limit its memory, and load the rewards."""
    global _rewards
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # must also end code that never returns to the interpreter
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
    except Exception as error:  # from a user module; every call returns it as the reason of its failure
        _rewards = f"the reward cannot be loaded in a worker process: {type(error).__name__}: {error}"


def _call_in_worker(place: int, responses: list[Response]) -> CallResult:
    try:
        return _rewards if isinstance(_rewards, str) else call_reward(_rewards[place], responses)
    except BaseException as error:  # an interrupt raised by the reward must not end the pool
        return describe_error(error)


class WorkerPool:
    """Runs calls of rewards in worker processes. A process that hangs or crashes is replaced.

    Workers are forked from a single-threaded fork server that has preloaded the shared imports. Forking this process
    could deadlock because it has threads, and spawned workers would repeat the imports.
    """

    def __init__(self, rewards: Sequence[Reward], workers: int, memory_gb: float) -> None:
        """Prepare the pool without starting processes.

        `memory_gb` is the limit of each worker in GiB; beyond it, allocations raise MemoryError. Raises ValueError if
        a reward cannot be pickled.
        """
        try:
            self._pickled = pickle.dumps(list(rewards))
        except Exception as error:  # pickle raises errors of many types
            raise ValueError(
                f"the reward cannot be sent to a worker process ({error}); use a class or function at the top level of a module."
            ) from error
        shared = {name for reward in rewards for name in getattr(reward, "imports", ())}  # optional in user classes
        self._imports = [__name__, *sorted(shared)]
        self._workers, self._memory_bytes = workers, int(memory_gb * 2**30)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def start(self) -> None:
        """Start the processes now. Otherwise the first call starts them and waits for them."""
        with self._lock:
            assert self._started().active, "the property starts the pool"

    def run(self, place: int, parts: list[list[Response]], sample_s: float, deadline: float) -> list[CallResult]:
        """Call reward number `place` once for each part of the responses.

        The time limit of a call is `sample_s` seconds per response, but at most half of the time until `deadline`
        (time.monotonic), so that time remains for a second attempt. Calls that still run at the deadline are ended.
        """
        results = self._run(place, parts, sample_s, deadline)
        lost = [i for i, result in enumerate(results) if result is None]
        again = self._run(place, [parts[i] for i in lost], sample_s, deadline) if lost else []
        for i, result in zip(lost, again, strict=True):
            results[i] = result
        return ["the worker processes died" if result is None else result for result in results]

    def _run(
        self, place: int, parts: list[list[Response]], sample_s: float, deadline: float
    ) -> list[CallResult | None]:
        limits = [min(len(part) * sample_s, max(0.1, deadline - time.monotonic()) / 2) for part in parts]
        with self._lock:
            pool = self._started()
            try:
                futures = [
                    pool.schedule(_call_in_worker, (place, part), timeout=limit)
                    for part, limit in zip(parts, limits, strict=True)
                ]
            except RuntimeError:  # the pool broke in the meantime
                return [None for _ in parts]
        results = [_result(future, limit, deadline) for future, limit in zip(futures, limits, strict=True)]
        if DEADLINE_PASSED in results:  # otherwise the workers would still start the queued calls
            self.close()
        return results

    def _started(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            self._stop()
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(self._imports)
            arguments = (self._pickled, self._memory_bytes)
            self._pool = ProcessPool(self._workers, initializer=_init_worker, initargs=arguments, context=context)
        return self._pool

    def close(self) -> None:
        """Kill every worker process."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _result(future: ProcessFuture, limit: float, deadline: float) -> CallResult | None:
    """Return the result of a call; None if the pool broke, which another call may have caused."""
    try:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        if future.done():
            return f"no score within {limit:.1f} s; its process was ended."
        future.cancel()
        return DEADLINE_PASSED
    except ProcessExpired as error:
        return f"the process that scored it died (exit code {error.exitcode})."
    except BrokenProcessPool:
        return None
    except Exception as error:  # a result that cannot be pickled
        return describe_error(error)
