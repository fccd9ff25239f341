"""The engines of `mrl generate` and `mrl evaluate`: on this machine, in a Ray cluster, or servers that the user runs.

All engines belong to one EnginePool. If an engine fails, EngineWatcher replaces it, while the other engines continue to sample.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx

from mrl.config.schema import Config
from mrl.core.run_errors import StartError
from mrl.placement.resource_pools import Pools, make_pools, slot_demands
from mrl.rollout.client import EngineError
from mrl.rollout.engine_pool import EnginePool, NoEngineError
from mrl.rollout.engines.server import check_seed_support
from mrl.rollout.spec import EngineSettings, ServerGroup
from mrl.weight_sync.engine_control import EngineControl

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5  # seconds between two checks whether engines have failed
URL_POLL_INTERVAL_S = 0.2  # seconds between two checks whether external servers answer
PROBE_TIMEOUT_S = 30.0  # deadline of one request that finds out whether an external server answers
LATE_URL_S = 30.0  # longest wait for the other external servers when the first one has answered


def engine_group(config: Config, server_args: Mapping[str, Any], folder: Path) -> ServerGroup:
    """Return the group of servers that serve the model in `folder`. `_on_cluster` adds their device slots.

    A device slot is a device that is reserved for one server. `server_args`: fields of SGLang's ServerArgs.
    """
    return ServerGroup(
        name="engine",
        run_dir=str(Path(config.run.dir).resolve()),
        arguments=server_args,
        model_path=str(folder.resolve()),
        count=config.rollout.num_engines,
        tp_size=config.rollout.engine_tp,
        seed=config.run.seed,
        # how many times a server of a replaced engine is started again if it ends before it is ready
        max_replacements=config.fault_tolerance.max_response_attempts,
        external_urls=tuple(dict.fromkeys(url.rstrip("/") for url in config.rollout.engine_urls)),
    )


def engine_pools(config: Config) -> Pools:
    """Return the resource pools of a command that has only engines.

    placement.pools is not read, because it describes the pools of a training run.

    Raises ValueError if the engines are servers that already run, because such servers need no devices.
    """
    demands = slot_demands(config.rollout, {})
    if not demands:
        raise ValueError(
            f"rollout.engine_urls={config.rollout.engine_urls}: servers that already run need no devices of a cluster; leave "
            "out cluster.address and cluster=slurm, or rollout.engine_urls."
        )
    return make_pools({}, demands)


@contextmanager
def running_engines(config: Config, group: ServerGroup, *, logprobs: bool = True) -> Iterator["EngineWatcher"]:
    """Start the engines of a group and wait until they take requests. Yields a watcher of their pool.

    Engines are child processes of this process, or, with cluster.address, processes of a Ray cluster. They end when the context
    exits. External servers keep running. `logprobs`: whether engines return log-probabilities.

    Raises:
        EngineError: an engine does not start, or no external server answers.
        StartError: the Ray cluster has no room for the engines.
        ValueError: an external server does not support seeds.
    """
    timeout_s = config.cluster.start_timeout_s
    with ExitStack() as stack:
        if group.external_urls:
            # lm-evaluation-harness (evaluate.harness) sends its own requests, without seeds
            seeded = config.generate.deterministic and not config.evaluate.harness
            group = replace(group, external_urls=answering_urls(group.external_urls, timeout_s, seeded))
        elif config.cluster.address:
            group = stack.enter_context(_on_cluster(config, group))
        settings = EngineSettings(
            engine_group=group,
            fault_tolerance=config.fault_tolerance,
            request_timeout_s=config.rollout.request_timeout_s,
            logprobs=logprobs,
        )
        pool = EnginePool(settings)
        stack.callback(pool.close)
        try:
            pool.wait_ready(timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise EngineError(str(error)) from None
        yield stack.enter_context(EngineWatcher(pool, config.fault_tolerance.max_restarts, timeout_s))


@contextmanager
def _on_cluster(config: Config, group: ServerGroup) -> Iterator[ServerGroup]:
    """Reserve devices of the Ray cluster at cluster.address. Yields the group with its servers' slots."""
    # These modules import Ray. The import takes a second, and a command without a cluster does not need Ray.
    from mrl.placement.device_map import device_map_text
    from mrl.placement.placement_groups import PlacementError, current_device_map, place_pools
    from mrl.placement.ray_cluster import ray_cluster

    pools = engine_pools(config)
    with ExitStack() as stack:
        stack.enter_context(ray_cluster(config.cluster))
        try:
            placements = stack.enter_context(place_pools(pools, config.cluster.start_timeout_s))
            devices = current_device_map(pools, placements)
        except (ValueError, PlacementError) as error:
            raise StartError(str(error)) from error
        logger.info("placement:\n%s", device_map_text(devices))
        yield replace(group, slots=placements["engines"].engine_slots)


def answering_urls(urls: Sequence[str], timeout_s: float, needs_seeds: bool) -> tuple[str, ...]:
    """Return the URLs of the external servers that take requests. Logs a warning for each server that does not.

    Waits up to `timeout_s` in all, and at most LATE_URL_S after the first server has answered. Raises EngineError if no server
    answers, and ValueError if `needs_seeds` is true and a server ignores seeds.
    """
    with ExitStack() as stack:
        controls = {url: stack.enter_context(EngineControl(url, PROBE_TIMEOUT_S)) for url in urls}
        threads = stack.enter_context(ThreadPoolExecutor(len(controls), thread_name_prefix="engine urls"))
        deadline, ready = time.monotonic() + timeout_s, set[str]()
        while True:
            missing = [url for url in urls if url not in ready]
            reasons = dict(zip(missing, threads.map(_why_not_ready, [controls[url] for url in missing]), strict=True))
            if not ready and not all(reasons.values()):
                deadline = min(deadline, time.monotonic() + LATE_URL_S)
            ready |= {url for url, reason in reasons.items() if not reason}
            if len(ready) == len(urls) or time.monotonic() > deadline:
                break
            time.sleep(URL_POLL_INTERVAL_S)
        left_out = {url: reason for url, reason in reasons.items() if reason}
        if not ready:
            described = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
            raise EngineError(f"rollout.engine_urls: no server takes requests: {described}")
        for url, reason in left_out.items():
            logger.warning("rollout.engine_urls: %s is left out: %s", url, reason)
        for url in ready if needs_seeds else ():
            check_seed_support(controls[url], "generate.deterministic")
    return tuple(url for url in urls if url in ready)


def _why_not_ready(control: EngineControl) -> str:
    """Return why a server takes no requests (no answer, a refused API key, or not ready yet), or "" if it takes requests."""
    try:
        control.server_info()
    except (EngineError, httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{type(error).__name__}: {error}"
    return "" if control.health() else "it answers, but it is not ready for requests"


class EngineWatcher:
    """Sends requests through an engine pool, and replaces engines that fail.

    The pool ends the server of a failed engine and starts a new server, unless the server is external. The watcher waits until
    the new engine is ready, and puts it in service at once, because the weights never change. It puts at most `max_restarts` new
    engines in service. If a failed engine is external, or if no new engine enters service, the other engines sample the remaining
    responses. Requests that were sent to a failed engine are sent again.
    """

    def __init__(self, pool: EnginePool, max_restarts: int, start_timeout_s: float) -> None:
        self.pool = pool
        self.num_restarts = 0  # number of engines that were replaced
        self._max_restarts, self._start_timeout_s = max_restarts, start_timeout_s
        self._left_out: dict[str, str] = {}  # URL -> why the engine gets no more requests
        # Why no engine is left; None: engines are in service, or new engines are starting
        self.lost: str | None = None
        # Only the pool's event loop changes these two: the number of running requests, and the waiting calls with their `limit`
        self._running = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="engine watcher", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    async def call[T](self, request: Callable[[], Awaitable[T]], limit: int) -> T:
        """Return the result of `request()`, which sends one request through the pool. Must run in the pool's event loop.

        At most `limit` x pool.num_in_service requests run at the same time. If all engines have failed, the request is sent again
        when a new engine is ready. Raises EngineError if no engine is left, and the errors of EnginePool.generate.
        """
        while True:
            await self._enter(limit)
            try:
                return await request()
            except NoEngineError:
                continue  # the next iteration waits for a new engine
            finally:
                self._running -= 1
                self._admit()

    async def _enter(self, limit: int) -> None:
        """Wait until a request may run, and count it as running. Calls enter in the order in which they came."""
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((admitted, limit))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            # the call was admitted, and was cancelled before it continued
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self._running -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        """Let waiting calls enter as far as the limits allow. If no engine is left, let all of them fail."""
        while self._waiting:
            admitted, limit = self._waiting[0]
            if not self.lost and self._running >= limit * self.pool.num_in_service:
                return
            self._waiting.popleft()
            if admitted.done():  # the call was cancelled
                continue
            if self.lost:
                admitted.set_exception(EngineError(self.lost))
            else:
                self._running += 1
                admitted.set_result(None)

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_INTERVAL_S):
            if failed := self.pool.take_failed():
                self._replace(failed)
                if not self._ended.is_set():  # after the end, the pool is closed
                    self.pool.submit(self._notify()).result()

    def _replace(self, failed: Mapping[str, str]) -> None:
        """Replace failed engines, or send them no more requests. `failed`: URL -> reason."""
        self._left_out |= failed
        is_external = bool(self.pool.spec.engine_group.external_urls)
        if not is_external and self.num_restarts + len(failed) <= self._max_restarts:
            self.num_restarts += len(failed)
            try:
                self.pool.replace(list(failed), self._start_timeout_s)
                self._left_out = {url: why for url, why in self._left_out.items() if url not in failed}
                return
            except Exception as error:  # this thread must not end, because the other engines still work
                logger.warning("an engine could not be replaced: %s: %s", type(error).__name__, error)
        for url, reason in failed.items():
            logger.warning("engine %s is left out: %s", url, reason)
        if not self.pool.num_in_service:
            limit = f"; {self.num_restarts} were replaced (fault_tolerance.max_restarts={self._max_restarts})"
            reasons = "; ".join(f"{url} {reason}" for url, reason in self._left_out.items())
            self.lost = f"no engine is left{'' if is_external else limit}: {reasons}"

    async def _notify(self) -> None:
        self._admit()
