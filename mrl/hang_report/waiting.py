"""How the driver waits for its processes: with a deadline, and with an autopsy where it passes or a process dies."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from mrl.core.errors import check_wait
from mrl.hang_report.collect import Autopsy, perform
from mrl.hang_report.errors import Diagnosed, RankLost, Stalled, WorkerLost
from mrl.hang_report.register import Record

logger = logging.getLogger(__name__)

# How gloo, NCCL and the store say that another rank is gone, or has kept them waiting too long
OF_PEERS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "timed out after",  # gloo's connectFullMesh, the store
    "NCCL communicator was aborted",
    "remote process exited",
    "Watchdog caught collective operation timeout",
    "failed to recv, got 0 bytes",
)
LOST = (RayActorError, NodeDiedError, OutOfMemoryError)  # the last: Ray itself ends processes when memory is short
LOOK_S = 0.5  # longest single wait
FOUND_DEAD_S = 5.0  # after peers noticed: until Ray knows which process died


@dataclass(frozen=True)
class Waiter:
    """Waits for the processes of one role: a model's trainer ranks, or the rollout worker."""

    run_dir: Path
    role: str  # rank or rollout
    group: str = ""  # of ranks: which model's

    def get(self, futures: Sequence[ObjectRef], timeout_s: float, what: str, *, starting: bool = False) -> list[Any]:
        """All answers, by rank. `what`: the call in words; `starting`: processes come up, so the network is looked at.

        Raises Stalled when the deadline passes, RankLost or WorkerLost when a process died, and what a process raised.
        """
        try:
            answers = _until_there(futures, timeout_s)
            return [answers[future] for future in futures]
        except GetTimeoutError as error:
            raise self._stalled(futures, f"{what} has not ended after {timeout_s:g} s", starting) from error
        except LOST as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise
            raise self._lost(futures, what, error) from error
        except RayError as error:
            if _data_gone(error):
                raise self._without_data(futures, what, error) from error
            if self.role != "rank" or not isinstance(error, RayTaskError) or not of_peers(error.cause):
                raise
            raise self._after_peers(futures, what, error, starting) from error

    def _after_peers(self, futures: Sequence[ObjectRef], what: str, error: RayError, starting: bool) -> Exception:
        """Ranks lost another one: the error that says which, and what it raised where it did."""
        ray.wait(list(futures), num_returns=len(futures), timeout=FOUND_DEAD_S)
        errors = [found for future in futures if (found := failure(future))]
        own = [e for e in errors if isinstance(e, RayTaskError) and not of_peers(e.cause)]
        dead = [e for e in errors if isinstance(e, LOST)]
        if own or dead:
            return own[0] if own else self._lost(futures, what, dead[0])
        reason = str(error).strip().splitlines()[-1]
        return self._stalled(futures, f"{what}: ranks gave up waiting for another one ({reason})", starting)

    def _stalled(self, futures: Sequence[ObjectRef], what: str, starting: bool) -> Diagnosed:
        pending = {number for number, future in enumerate(futures) if not _answered(future)}
        return self._diagnosed(Stalled, what, self._asked(pending), starting)

    def _lost(self, futures: Sequence[ObjectRef], what: str, error: RayError) -> Diagnosed:
        dead = tuple(n for n, future in enumerate(futures) if isinstance(failure(future), LOST))
        pending = {number for number, future in enumerate(futures) if not _answered(future)}
        kind = RankLost if self.role == "rank" else WorkerLost
        why = ", ended by Ray because the host is short of memory" if isinstance(error, OutOfMemoryError) else ""
        what = f"{what}: a process died{why}"
        lost = self._diagnosed(kind, what, self._asked(pending), False, [f"Ray says: {error}"])
        lost.ranks = lost.ranks or (dead if self.role == "rank" else ())
        return lost

    def _without_data(self, futures: Sequence[ObjectRef], what: str, error: RayError) -> Diagnosed:
        """What was asked for is gone with the process that made it: the other role's."""
        kind = WorkerLost if self.role == "rank" else RankLost
        lost = self._diagnosed(kind, f"{what}: its data is gone", self._asked(set()), False, [f"Ray says: {error}"])
        lost.role = "rollout" if self.role == "rank" else "rank"
        return lost

    def _asked(self, numbers: set[int]) -> Callable[[Record], bool]:
        def asked(record: Record) -> bool:
            return (record.role, record.group) == (self.role, self.group) and max(record.rank, 0) in numbers

        return asked

    def _diagnosed(
        self,
        kind: type[Diagnosed],
        what: str,
        asked: Callable[[Record], bool],
        starting: bool,
        more: Sequence[str] = (),
    ) -> Diagnosed:
        try:
            found: Autopsy = perform(self.run_dir, what, asked, check_network=starting, more=more)
        except Exception as error:  # of a look at processes that break: what they are lost for is the news
            logger.exception("no autopsy")
            diagnosed = kind(f"{what}. There is no report, as the autopsy failed: {error!r}", None)
            diagnosed.role = self.role
            return diagnosed
        own = [seen.record for seen in found.verdict.culprits if seen.record.role == "rank"]
        ranks = tuple(record.rank for record in own if record.group == self.group)
        where = f"The whole report: {found.report}" if found.report else "There is no report: it could not be written."
        diagnosed = kind(f"{what}. {found.verdict.sentence}. {where}", found.report, found.names, ranks)
        diagnosed.role = self.role
        return diagnosed


def _until_there(futures: Sequence[ObjectRef], timeout_s: float) -> dict[ObjectRef, Any]:
    """Wait for all answers, or for the first error, which is raised; in short waits, as a signal must not raise inside Ray's.

    Raises GetTimeoutError, and what the run's `check_wait` raises.
    """
    end, pending, answers = time.monotonic() + timeout_s, list(futures), {}
    while pending:
        left = max(0.0, end - time.monotonic())
        there, pending = ray.wait(pending, num_returns=len(pending), timeout=min(LOOK_S, left), fetch_local=False)
        answers |= zip(there, ray.get(there), strict=True)
        if pending and left <= LOOK_S and time.monotonic() >= end:
            raise GetTimeoutError(f"{len(pending)} of {len(futures)} answers are missing after {timeout_s:g} s")
        check_wait()
    return answers


def _data_gone(error: RayError) -> bool:
    """Whether an object is lost: what a process made goes with it."""
    return isinstance(error, ObjectLostError) or (
        isinstance(error, RayTaskError) and isinstance(error.cause, ObjectLostError)
    )


def of_peers(error: BaseException) -> bool:
    """Whether what a rank raised, if torch raised it, only says that another one is gone or late."""
    of_torch = isinstance(error, RuntimeError) and type(error).__module__.startswith(("builtins", "torch"))
    return of_torch and any(words in str(error) for words in OF_PEERS)


def failure(future: ObjectRef) -> RayError | None:
    """Why a call failed; None where it did not, or goes on."""
    try:
        if ray.wait([future], timeout=0)[0]:
            ray.get(future)
    except RayError as error:
        return error
    return None


def _answered(future: ObjectRef) -> bool:
    return bool(ray.wait([future], timeout=0)[0]) and failure(future) is None
