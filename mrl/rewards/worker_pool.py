"""Worker processes for rewards that may raise, hang or die: a call costs at most its time limit and its process."""

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

from mrl.rewards.reward_calls import CallResult, call_reward, describe_error
from mrl.rewards.reward_types import Response, Reward

LATE = "not scored before the deadline of the whole batch (scoring.timeout_s)."


_rewards: list[Reward] | str = []  # of a worker process


def _enter(pickled: bytes, memory_bytes: int) -> None:
    """First thing in a worker: end with the process that owns the pool, keep to its memory, and load the rewards."""
    global _rewards
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # code that never returns to the interpreter must end too
    owner = multiprocessing.parent_process()
    assert owner is not None, "a worker has a parent"
    fcntl.fcntl(owner.sentinel, fcntl.F_SETOWN, os.getpid())  # its end raises SIGIO, which the kernel answers for us
    fcntl.fcntl(owner.sentinel, fcntl.F_SETFL, fcntl.fcntl(owner.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or memory_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, hard))
    try:
        _rewards = pickle.loads(pickled)
    except Exception as error:  # a user's module; told in answer to each task, where it can be recorded
        _rewards = f"the reward cannot be loaded in a worker process: {type(error).__name__}: {error}"


def _task(place: int, responses: list[Response]) -> CallResult:
    try:
        return _rewards if isinstance(_rewards, str) else call_reward(_rewards[place], responses)
    except BaseException as error:  # the process is the reward's: an interrupt that it raises is meant for nobody else
        return describe_error(error)


class WorkerPool:
    """Runs calls of given rewards in processes of their own; a process that hangs or dies is replaced.

    Processes are forked from a server with one thread that has imported what they share: forking this process, which
    has threads, could deadlock, and a start from nothing would cost each new worker the imports again.
    """

    def __init__(self, rewards: Sequence[Reward], workers: int, memory_gb: float) -> None:
        """Starts nothing. `memory_gb`: of each worker, in 2**30 bytes; more is a MemoryError there.

        Raises: ValueError when a reward cannot be sent to another process.
        """
        try:
            self._pickled = pickle.dumps(list(rewards))
        except Exception as error:  # pickle raises many kinds
            raise ValueError(
                f"the reward cannot be sent to a worker process ({error}); use a class or function that a module names."
            ) from error
        shared = {name for reward in rewards for name in getattr(reward, "imports", ())}  # a user's class may have none
        self._imports = [__name__, *sorted(shared)]
        self._workers, self._memory_bytes = workers, int(memory_gb * 2**30)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None

    def start(self) -> None:
        """Start the processes, which the first call would do as well, and wait for."""
        with self._lock:
            assert self._started().active, "asking starts it"

    def run(self, place: int, parts: list[list[Response]], sample_s: float, deadline: float) -> list[CallResult]:
        """Call reward number `place` with each part.

        A call may take `sample_s` seconds for each of its responses, but at most half of the time that is left until
        `deadline` (of time.monotonic), so that another attempt remains; after the deadline calls are ended.
        """
        outcomes = self._run(place, parts, sample_s, deadline)
        broken = [i for i, outcome in enumerate(outcomes) if outcome is None]
        again = self._run(place, [parts[i] for i in broken], sample_s, deadline) if broken else []
        for i, outcome in zip(broken, again, strict=True):
            outcomes[i] = outcome
        return ["the worker processes died" if outcome is None else outcome for outcome in outcomes]

    def _run(
        self, place: int, parts: list[list[Response]], sample_s: float, deadline: float
    ) -> list[CallResult | None]:
        limits = [min(len(part) * sample_s, max(0.1, deadline - time.monotonic()) / 2) for part in parts]
        with self._lock:
            pool = self._started()
            try:
                futures = [
                    pool.schedule(_task, (place, part), timeout=limit)
                    for part, limit in zip(parts, limits, strict=True)
                ]
            except RuntimeError:  # the pool broke this moment
                return [None for _ in parts]
        outcomes = [_outcome(future, limit, deadline) for future, limit in zip(futures, limits, strict=True)]
        if LATE in outcomes:  # a worker would still begin each task that waits for it, to be ended for that
            self.close()
        return outcomes

    def _started(self) -> ProcessPool:
        if self._pool is None or not self._pool.active:
            self._stop()
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(self._imports)
            arguments = (self._pickled, self._memory_bytes)
            self._pool = ProcessPool(self._workers, initializer=_enter, initargs=arguments, context=context)
        return self._pool

    def close(self) -> None:
        """End every worker process, whatever it does."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None


def _outcome(future: ProcessFuture, limit: float, deadline: float) -> CallResult | None:
    """What a task came to; None: its pool broke, for which it may not be to blame."""
    try:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        if future.done():
            return f"no score within {limit:.1f} s; its process was ended."
        future.cancel()
        return LATE
    except ProcessExpired as error:
        return f"the process that scored it died (exit code {error.exitcode})."
    except BrokenProcessPool:
        return None
    except Exception as error:  # of the way to the worker and back: what cannot be pickled
        return describe_error(error)
