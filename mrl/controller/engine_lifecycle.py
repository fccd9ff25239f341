"""EngineLifecycle: the driver's record of the engines, and all operations that change the engines.

The record says which engines run, which memory each engine has released, which weight version each engine serves, and whether
the trainers are connected to the engines. The weight sync coordinator (in trainer rank 0) and the engine pool (in the rollout
worker) only detect failures and report them to the driver. EngineLifecycle then replaces the failed engines.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from mrl.config.process_schema import PauseMode, WeightSyncConfig
from mrl.controller.colocation import ENGINES, MemoryScheduler, MemoryState
from mrl.core.metrics import Metrics
from mrl.core.run_errors import StartError
from mrl.core.types import SyncReport
from mrl.tracking.console import Startup
from mrl.weight_sync.engine_control import EngineControl, EngineError, MemoryTag, WeightSyncError
from mrl.workers.worker import TrainWorker

logger = logging.getLogger(__name__)


class RolloutSideEngines(Protocol):
    """Operations on the processes of the engines.

    The rollout side (RolloutWorkerHandle) implements these operations, and the controller calls them.
    """

    def wait_ready(self, timeout_s: float) -> Sequence[str]:
        """Wait until every engine takes requests. Returns the URLs of the engines."""
        ...

    def rollout_worker_answers(self) -> bool:
        """Return whether the rollout worker answers."""
        ...

    def restart(self) -> None:
        """Kill the rollout worker and its engines. Start a new rollout worker, which starts new engines."""
        ...

    def replace_engines(self, urls: Sequence[str]) -> Sequence[str]:
        """End these engines and start others in their place. Returns the URLs of all engines."""
        ...

    def record_paused(self, paused: bool) -> None:
        """Record whether the engines are paused on purpose. If so, an engine without progress does not count as failed."""
        ...

    def recorded_as_paused(self) -> AbstractContextManager[None]:
        """Return a context in which the rollout worker regards the engines as paused."""
        ...

    def set_adapter(self, name: str, urls: Sequence[str]) -> None:
        """Let all further requests to these engines use the LoRA adapters `name`, which the engines have loaded."""
        ...


class ActorRanks(Protocol):
    """The actor's trainer ranks."""

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of TrainWorker on every rank. Returns the results by rank."""
        ...


@dataclass
class EngineRecord:
    """The driver's record of one engine."""

    released: set[MemoryTag] = field(default_factory=set)  # parts of the engine's device memory that are released
    was_offloaded: bool = False  # whether the engine was offloaded at least once since it started
    # Weight version that the engine received in its last push. None: no push has reached the engine since its start.
    weight_version: int | None = None


@dataclass(kw_only=True)
class EngineLifecycle:
    """Starts, connects, offloads, loads and replaces the engines, and pushes weights to them.

    The constructor registers the object with the scheduler. After a successful push, every engine serves the pushed version.
    """

    engine_processes: RolloutSideEngines
    actor: ActorRanks
    scheduler: MemoryScheduler
    settings: WeightSyncConfig
    startup_display: Startup
    weights_dir: str  # folder through which the disk transport sends weights, and the adapter sync sends adapters
    start_timeout_s: float  # longest time until all engines take requests
    # Whether to tell the rollout worker about each push. Needed if requests run during a push, as they do with staleness > 0.
    marks_pushes_as_pauses: bool
    weight_version: int = field(default=-1, init=False)  # version of the last finished push; -1: there was none
    _engines: dict[str, EngineRecord] = field(default_factory=dict, init=False)  # by URL
    _connected: bool = field(default=False, init=False)  # whether the trainers are connected to all engines

    def __post_init__(self) -> None:
        self.scheduler.register_engines(self)

    # Start, restart, replace and connect.

    def wait_started(self) -> None:
        """Wait until every engine takes requests. Does nothing if the engines have started already."""
        if self.scheduler.state(ENGINES) is not MemoryState.NOT_STARTED:
            return
        self._engines = {url: EngineRecord() for url in self.engine_processes.wait_ready(self.start_timeout_s)}
        self.scheduler.mark_started(*self.scheduler.sglang_roles)
        self.startup_display.ready(f"engines ready ({len(self._engines)})")

    def restart_if_lost(self, trainers_alive: Callable[[], bool]) -> None:
        """Restart the rollout worker if it does not answer, and wait for its engines.

        After this call the trainers must connect again. `trainers_alive` returns whether the trainers answer. If they answer,
        the scheduler offloads them to make room for new engines.
        """
        self._connected = False
        if not self.engine_processes.rollout_worker_answers():
            self._restart(make_room=trainers_alive())
        self.wait_started()

    def reset_after_trainer_restart(self) -> None:
        """Forget the connection to the old trainers. Restart the engines if new trainers cannot connect to them.

        When trainers connect, each engine that has received no push yet compares its weights with the files of its model (see
        `_check_plan` in mrl/weight_sync/receiver.py). Equal weights prove that the transfer plan agrees with the engine's layout.
        An engine that was offloaded before its first push has lost the weights that it loaded at its start, so new trainers
        cannot connect to this engine.
        """
        self._connected = False
        if any(engine.was_offloaded and engine.weight_version is None for engine in self._engines.values()):
            self._restart(make_room=False)

    def _restart(self, make_room: bool) -> None:
        self.scheduler.mark_ended(*self.scheduler.sglang_roles)
        if make_room:
            self.scheduler.make_room_for_rollout()
        self.engine_processes.restart()
        self._engines = {}

    def connect(self) -> None:
        """Connect the trainers to all engines, and replace engines that fail. Does nothing if all engines are connected.

        Raises StartError after `weight_sync.max_attempts` attempts.
        """
        if self._connected:
            return
        failed: dict[str, str] = {}
        for _ in range(self.settings.max_attempts):
            if not (failed := self._connect(list(self._engines))):
                self._connected = True
                return
            logger.warning("engines failed before the trainers connected to them, and are replaced: %s", failed)
            self._replace(list(failed))
        raise StartError(
            f"engines failed while the trainers connected to them, in each of {self.settings.max_attempts} attempts; in the last "
            f"attempt: {failed}"
        )

    def _connect(self, urls: Sequence[str]) -> dict[str, str]:
        """Connect all trainer ranks to these engines. Returns the engines that failed, as URL -> reason."""
        return self.actor.call(TrainWorker.connect_engines, list(urls), self.settings, self.weights_dir)[0]

    def _replace(self, urls: Sequence[str]) -> list[str]:
        """End these engines and start others. Returns the URLs of all engines."""
        for url in urls:
            self._engines.pop(url, None)
        known, current = self._engines, self.engine_processes.replace_engines(urls)
        self._engines = {url: known.get(url, EngineRecord()) for url in current}
        return list(current)

    # Weights.

    def push(self, version: int) -> Metrics:
        """Push the actor's weights until every engine serves them as `version`. Returns the metrics of the push.

        Raises WeightSyncError after `weight_sync.max_attempts` attempts. Any other error of an attempt is raised at once.
        """
        metrics = self._push_until_served(version, {})
        self.weight_version = version
        return metrics

    def resync(self) -> None:
        """Push the current weight version again. Engines that were offloaded need this."""
        self.restore({})

    def restore(self, failed: Mapping[str, str]) -> None:
        """Replace failed engines (URL -> reason), and push the current weight version, which the actor must still hold.

        Raises the same errors as `push`.
        """
        assert self.weight_version >= 0, "engines get requests only after the first push"
        self._push_until_served(self.weight_version, dict(failed))

    def _push_until_served(self, version: int, failed: dict[str, str]) -> Metrics:
        num_replaced, reason = 0, "the engines' checksums differ after a delta push"
        for attempt in range(1, self.settings.max_attempts + 1):
            if failed:
                logger.warning(
                    "failed engines are replaced; the new engines get weight version %d: %s", version, failed
                )
                num_replaced, reason = num_replaced + len(failed), str(failed)
                if failed := self._connect(self._replace(list(failed))):
                    continue
            reports = self._push_once(version)
            failed = reports[0].failed
            if not failed and not reports[0].must_repeat:
                return _push_metrics(reports, version, num_replaced, attempt)
        raise WeightSyncError(
            f"weight version {version} did not reach every engine in {self.settings.max_attempts} attempts: {failed or reason}",
            failed,
        )

    def _push_once(self, version: int) -> list[SyncReport]:
        """Push from all trainer ranks. Returns the reports of the ranks, beginning with rank 0."""
        paused = self.engine_processes.recorded_as_paused() if self.marks_pushes_as_pauses else nullcontext()
        with paused, self.scheduler.during_push() as engines_were_offloaded:
            reports = self.actor.call(TrainWorker.push_weights, version, engines_were_offloaded)
            if (name := reports[0].adapter) is not None:
                self.engine_processes.set_adapter(name, [url for url in self._engines if url not in reports[0].failed])
        for url, engine in self._engines.items():
            if url not in reports[0].failed:
                engine.weight_version = version
        return reports

    # Memory. The rollout manager calls `load`. The scheduler calls the other methods, and `resync`.

    def load(self) -> None:
        """Load the engines, with their weights, and all served models. Does nothing if all of them are loaded."""
        self.scheduler.load_for_rollout()

    def offload(self) -> int:
        """Pause the engines, put their running requests back into their queues, and release the memory of all MemoryTags.

        Returns 0, because engines do not report the bytes that stay allocated. Raises EngineError if an engine fails.
        """
        self.engine_processes.record_paused(True)
        self._control_all(_release)
        return 0

    def load_weights(self) -> None:
        """Allocate the engines' memory for weights."""
        self._control_all(lambda engine, record: _allocate(engine, record, ["weights"]))

    def load_kv_cache(self) -> None:
        """Allocate the engines' KV cache and the memory of their CUDA graphs, and resume generation."""

        def resume(engine: EngineControl, record: EngineRecord) -> None:
            _allocate(engine, record, ["cuda_graph", "kv_cache"])
            engine.resume()

        self._control_all(resume)
        self.engine_processes.record_paused(False)

    def _control_all(self, action: Callable[[EngineControl, EngineRecord], None]) -> None:
        """Call `action` for all engines in parallel. Raises the first EngineError after all engines have answered.

        An engine that cannot be reached is skipped, because its process has probably ended. The next push replaces the engine.
        """

        def control(url: str, record: EngineRecord) -> None:
            timeout_s = self.settings.timeout_s
            with EngineControl(url, timeout_s) as engine, suppress(httpx.TransportError):
                try:
                    action(engine, record)
                except httpx.TimeoutException as error:
                    raise EngineError(f"{url} did not answer within {timeout_s} s: {error!r}") from error

        if not self._engines:
            return
        with ThreadPoolExecutor(len(self._engines), thread_name_prefix="engine_lifecycle") as pool:
            for answer in [pool.submit(control, *engine) for engine in self._engines.items()]:
                answer.result()


def _release(engine: EngineControl, record: EngineRecord) -> None:
    record.was_offloaded = True
    engine.pause(PauseMode.retract)
    tags: list[MemoryTag] = ["kv_cache", "weights", "cuda_graph"]
    if tags := [tag for tag in tags if tag not in record.released]:
        engine.release_memory(tags)
        record.released.update(tags)


def _allocate(engine: EngineControl, record: EngineRecord, tags: Sequence[MemoryTag]) -> None:
    if tags := [tag for tag in tags if tag in record.released]:  # SGLang exits when memory is allocated twice
        engine.resume_memory(tags)
        record.released.difference_update(tags)


def _push_metrics(reports: Sequence[SyncReport], version: int, num_replaced: int, attempts: int) -> Metrics:
    """Return the metrics of one push, from the reports of all trainer ranks."""
    sent, raw = sum(r.bytes for r in reports), sum(r.uncompressed_bytes for r in reports)
    return {
        "weight_sync/version": float(version),
        "component_time/sync_engine_s": reports[0].engine_wait_seconds,
        "weight_sync/bytes": float(sent),
        "weight_sync/compressed_fraction": sent / raw if raw else 1.0,
        "weight_sync/senders": float(sum(r.bytes > 0 for r in reports)),
        "weight_sync/buckets": float(sum(r.buckets for r in reports)),
        "weight_sync/attempts": float(attempts),
        "weight_sync/replaced_engines": float(num_replaced),
    }
