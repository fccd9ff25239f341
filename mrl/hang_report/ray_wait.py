"""Waits for the answers of Ray calls, at most until a deadline (RayWaiter).

If the deadline passes or a process dies, the driver writes a hang report about the run's processes on all hosts and raises an
error that has the path of the report. The errors are ProcessesLostErrors, because the run may continue after a restart of the
lost processes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.core.run_errors import ProcessesLostError, check_wait
from mrl.hang_report.diagnosis import HangDiagnosis, diagnose, report_text
from mrl.hang_report.network_interfaces import describe_broken_interfaces, probe_interfaces
from mrl.hang_report.process_registry import ProcessRecord, read_process_records, registry_folder
from mrl.hang_report.process_snapshot import UNREACHABLE, ProcessSnapshot, snapshot_processes

logger = logging.getLogger(__name__)

# Parts of the error messages of gloo, NCCL and torch's store that mean that another rank is gone or late
PEER_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "timed out after",  # gloo's connectFullMesh, torch's store
    "NCCL communicator was aborted",
    "remote process exited",
    "Watchdog caught collective operation timeout",
    "failed to recv, got 0 bytes",
)
# Errors of calls to dead processes. OutOfMemoryError means that Ray has killed the process because its host is short of memory.
DEATH_ERRORS = (RayActorError, NodeDiedError, OutOfMemoryError)
POLL_S = 0.5  # longest single wait inside Ray
DEATH_NOTICE_S = 5.0  # time for Ray to notice the death of a rank after other ranks have failed because of it
REMOTE_TIMEOUT_S = 8.0  # longest wait for the snapshots of all other hosts


class DiagnosedError(ProcessesLostError):
    """Some processes are stuck or dead, and the run cannot continue without a restart; a hang report names the processes."""

    def __init__(
        self, message: str, report: Path | None, names: tuple[str, ...] = (), ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.report = report  # file of the hang report; None if it could not be written
        self.names = names  # titles of the processes to blame, as in the message
        self.ranks = ranks  # the trainer ranks among these processes: index of each rank among the ranks of its model

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.report, self.names, self.ranks), {"role": self.role}


class StalledError(DiagnosedError):
    """A deadline passed, or ranks gave up waiting for a rank that is alive."""


class RankLostError(DiagnosedError):
    """Trainer ranks died."""


class RolloutWorkerLostError(DiagnosedError):
    """The rollout worker died."""


@dataclass(frozen=True)
class HangReport:
    """Diagnosis of a hang and the file of its report."""

    diagnosis: HangDiagnosis
    path: Path | None  # None if the file could not be written

    @property
    def names(self) -> tuple[str, ...]:
        """Titles of the processes to blame."""
        return tuple(snapshot.title for snapshot in self.diagnosis.blamed)


def make_hang_report(
    run_dir: Path,
    reason: str,
    is_pending: Callable[[ProcessRecord], bool],
    *,
    check_network: bool = False,
    extra_lines: Sequence[str] = (),
) -> HangReport:
    """Take snapshots of all processes of a run, diagnose them and write run_dir/hang_report_<n>.txt.

    `reason`: first line of the report. `is_pending`: whether a process was called and has not answered. `check_network`: also
    test the network interfaces that NCCL may use; set this if the call starts the processes. `extra_lines`: last lines of the
    report.
    """
    snapshots, host_lines = _snapshot_all_hosts(str(registry_folder(run_dir)), check_network)
    diagnosis = diagnose(snapshots, lambda snapshot: is_pending(snapshot.record))
    try:
        return HangReport(
            diagnosis, write_report(run_dir, report_text(reason, diagnosis, snapshots, host_lines, extra_lines))
        )
    except OSError as error:  # for example a full disk; the error message still has the diagnosis
        logger.warning("the hang report could not be written: %s", error)
        return HangReport(diagnosis, None)


def write_report(folder: Path, text: str) -> Path:
    """Write `text` to hang_report_<n>.txt in `folder`; n is the smallest number from 1 for which no file exists.

    Raises OSError if the disk fails; no file is left in that case.
    """
    number = 1  # n in the name of the file
    while True:
        path = folder / f"hang_report_{number}.txt"
        try:
            file = path.open("x")
        except FileExistsError:
            number += 1
            continue
        try:
            with file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


def _snapshot_all_hosts(folder: str, check_network: bool) -> tuple[list[ProcessSnapshot], list[str]]:
    """Return (snapshots of all registered processes, lines about their hosts)."""
    by_host: dict[str, list[ProcessRecord]] = {}
    for record in read_process_records(folder):
        by_host.setdefault(record.host, []).append(record)
    local = by_host.pop(gethostname(), [])
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]} if by_host else {}
    tasks = {
        host: _submit_snapshot_task(nodes[host], folder, records, check_network)
        for host, records in by_host.items()
        if host in nodes
    }
    deadline = time.monotonic() + REMOTE_TIMEOUT_S
    snapshots, lines = snapshot_host(folder, local, check_network)
    for host, records in by_host.items():
        try:
            remote_snapshots, remote_lines = ray.get(tasks[host], timeout=max(0.0, deadline - time.monotonic()))
        except (KeyError, ray.exceptions.RayError) as error:
            remote_snapshots = [ProcessSnapshot(record, UNREACHABLE) for record in records]
            remote_lines = [f"{host} did not answer: {type(error).__name__}"]
        snapshots, lines = snapshots + remote_snapshots, lines + remote_lines
    return snapshots, lines


def _submit_snapshot_task(node: str, folder: str, records: list[ProcessRecord], check_network: bool) -> ray.ObjectRef:
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    options = dict(num_cpus=0, scheduling_strategy=on_node)
    return ray.remote(snapshot_host).options(**options).remote(folder, records, check_network)


def snapshot_host(
    folder: str, records: list[ProcessRecord], check_network: bool
) -> tuple[list[ProcessSnapshot], list[str]]:
    """Take snapshots of this host's processes. Returns (snapshots, a line for each broken network interface)."""
    lines = describe_broken_interfaces(gethostname(), probe_interfaces()) if check_network else []
    return snapshot_processes(folder, records), lines


@dataclass(frozen=True)
class RayWaiter:
    """Waits for Ray calls to the processes of one role: the trainer ranks of a model, or the rollout worker."""

    run_dir: Path
    role: str  # rank or rollout
    model: str = ""  # name of the trainer ranks' model; "" for the actor and for the rollout worker

    def get(self, futures: Sequence[ObjectRef], timeout_s: float, call: str, *, starting: bool = False) -> list[Any]:
        """Return the answers of all futures, in order.

        `call`: description of the call. `starting`: the call starts the processes, so a hang report also tests the network.
        Raises StalledError if the deadline passes or ranks gave up waiting for another rank, RankLostError or
        RolloutWorkerLostError if a process died, and any exception that a process raised.
        """
        try:
            answers = _wait_for_all(futures, timeout_s)
            return [answers[future] for future in futures]
        except GetTimeoutError as error:
            raise self._stalled_error(futures, f"{call} did not finish within {timeout_s:g} s", starting) from error
        except DEATH_ERRORS as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise
            raise self._process_lost_error(futures, call, error) from error
        except RayError as error:
            if _is_data_lost(error):
                raise self._data_lost_error(call, error) from error
            if self.role != "rank" or not isinstance(error, RayTaskError) or not is_peer_error(error.cause):
                raise
            raise self._resolve_peer_error(futures, call, error, starting) from error

    def _resolve_peer_error(
        self, futures: Sequence[ObjectRef], call: str, error: RayError, starting: bool
    ) -> Exception:
        """Return the error to raise after a rank's communication failed: another rank raised an error, died or hangs."""
        ray.wait(list(futures), num_returns=len(futures), timeout=DEATH_NOTICE_S)
        errors = [failure for future in futures if (failure := call_error(future))]
        own_errors = [e for e in errors if isinstance(e, RayTaskError) and not is_peer_error(e.cause)]
        dead = [e for e in errors if isinstance(e, DEATH_ERRORS)]
        if own_errors or dead:
            return own_errors[0] if own_errors else self._process_lost_error(futures, call, dead[0])
        reason = str(error).strip().splitlines()[-1]
        return self._stalled_error(futures, f"{call}: ranks gave up waiting for another rank ({reason})", starting)

    def _stalled_error(self, futures: Sequence[ObjectRef], reason: str, starting: bool) -> DiagnosedError:
        return self._diagnosed_error(StalledError, reason, self._pending_test(_pending_indices(futures)), starting)

    def _process_lost_error(self, futures: Sequence[ObjectRef], call: str, error: RayError) -> DiagnosedError:
        dead = tuple(index for index, future in enumerate(futures) if isinstance(call_error(future), DEATH_ERRORS))
        error_type = RankLostError if self.role == "rank" else RolloutWorkerLostError
        why = ", killed by Ray because the host is short of memory" if isinstance(error, OutOfMemoryError) else ""
        is_pending = self._pending_test(_pending_indices(futures))
        lost = self._diagnosed_error(
            error_type, f"{call}: a process died{why}", is_pending, False, [f"Ray says: {error}"]
        )
        lost.ranks = lost.ranks or (dead if self.role == "rank" else ())
        return lost

    def _data_lost_error(self, call: str, error: RayError) -> DiagnosedError:
        """Return the error of a call whose input is lost, because the process that made the input died.

        The rollout worker makes the inputs of the ranks' calls, and ranks make the inputs of the rollout worker's calls.
        """
        error_type = RolloutWorkerLostError if self.role == "rank" else RankLostError
        message = f"{call}: the input data of the call is lost"
        lost = self._diagnosed_error(error_type, message, self._pending_test(set()), False, [f"Ray says: {error}"])
        lost.role = "rollout" if self.role == "rank" else "rank"
        return lost

    def _pending_test(self, indices: set[int]) -> Callable[[ProcessRecord], bool]:
        """Return a function that tells whether a process was called and has not answered.

        `indices`: indices of the calls that have not succeeded. Call i is a call to rank i. A call to the rollout worker has
        index 0.
        """

        def is_pending(record: ProcessRecord) -> bool:
            return (record.role, record.model) == (self.role, self.model) and max(record.rank, 0) in indices

        return is_pending

    def _diagnosed_error(
        self,
        error_type: type[DiagnosedError],
        reason: str,
        is_pending: Callable[[ProcessRecord], bool],
        starting: bool,
        extra_lines: Sequence[str] = (),
    ) -> DiagnosedError:
        try:
            report = make_hang_report(self.run_dir, reason, is_pending, check_network=starting, extra_lines=extra_lines)
        except Exception as error:  # an error in making the report must not hide the original error
            logger.exception("the hang report failed")
            diagnosed = error_type(
                f"{reason}. There is no hang report, because making the report failed: {error!r}", None
            )
            diagnosed.role = self.role
            return diagnosed
        blamed = [snapshot.record for snapshot in report.diagnosis.blamed if snapshot.record.role == "rank"]
        ranks = tuple(record.rank for record in blamed if record.model == self.model)
        where = f"Hang report: {report.path}" if report.path else "The hang report could not be written."
        diagnosed = error_type(f"{reason}. {report.diagnosis.sentence}. {where}", report.path, report.names, ranks)
        diagnosed.role = self.role
        return diagnosed


def _wait_for_all(futures: Sequence[ObjectRef], timeout_s: float) -> dict[ObjectRef, Any]:
    """Wait for all answers. Raises the first error of a call.

    Each wait inside Ray is short, because an exception that a signal handler raises inside Ray would break Ray. This function
    also raises GetTimeoutError after `timeout_s`, and the errors of `mrl.core.run_errors.check_wait`.
    """
    end, pending, answers = time.monotonic() + timeout_s, list(futures), {}
    while pending:
        left = max(0.0, end - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=len(pending), timeout=min(POLL_S, left), fetch_local=False)
        answers |= zip(ready, ray.get(ready), strict=True)
        if pending and left <= POLL_S and time.monotonic() >= end:
            raise GetTimeoutError(f"{len(pending)} of {len(futures)} answers are missing after {timeout_s:g} s")
        check_wait()
    return answers


def _is_data_lost(error: RayError) -> bool:
    """Return whether an object of Ray's store is lost. This happens if the process that made the object died."""
    return isinstance(error, ObjectLostError) or (
        isinstance(error, RayTaskError) and isinstance(error.cause, ObjectLostError)
    )


def is_peer_error(error: BaseException) -> bool:
    """Return whether a rank's exception comes from torch and only says that another rank is gone or late."""
    from_torch = isinstance(error, RuntimeError) and type(error).__module__.startswith(("builtins", "torch"))
    return from_torch and any(words in str(error) for words in PEER_ERRORS)


def call_error(future: ObjectRef) -> RayError | None:
    """Return the error of a call; None if the call succeeded or is still running."""
    try:
        if ray.wait([future], timeout=0)[0]:
            ray.get(future)
    except RayError as error:
        return error
    return None


def _pending_indices(futures: Sequence[ObjectRef]) -> set[int]:
    """Return the indices of the calls that have not succeeded."""
    return {
        index
        for index, future in enumerate(futures)
        if not ray.wait([future], timeout=0)[0] or call_error(future) is not None
    }
