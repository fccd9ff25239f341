"""ServedModels: the SGLang servers of the reward models, judges and teachers that the key `roles` names.

A served teacher returns the k most probable tokens, with their log-probabilities, at the position of each sampled token.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import numpy as np
from numpy.typing import NDArray

from mrl.config.process_schema import PauseMode
from mrl.core.types import TeacherOutputs, TokenBlock
from mrl.rewards.remote_models import set_servers
from mrl.rollout.client import EngineClient
from mrl.rollout.engines.hosts import EngineServers
from mrl.rollout.spec import ServerGroup
from mrl.weight_sync.engine_control import EngineControl, EngineError, MemoryTag
from parallel.trainer_config import MIN_REST_PROB

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 2.0  # seconds between two checks whether the servers run
CONTROL_TIMEOUT_S = 300.0  # deadline of a request that releases or allocates memory, and of the wait for new servers
MEMORY_TAGS: list[MemoryTag] = ["kv_cache", "weights", "cuda_graph"]


class ServedModelError(RuntimeError):
    """The servers of a model ended too often, so the run cannot call the model."""


class ServedModels:
    """Starts the servers of all served models, replaces each server that ends, and tells rewards the URLs of the servers.

    The weights of these models never change, so a new server is ready as soon as it answers. While a server is replaced,
    rewards repeat failed requests on the other servers of the model, but only until the reward's own deadline (`deadline_s`)
    passes.
    """

    def __init__(self, groups: Sequence[ServerGroup], max_restarts: int) -> None:
        """Start all servers. Returns before they are ready.

        If servers that were ready end, at most `max_restarts` servers of each model are replaced.
        """
        self._servers = {group.name: EngineServers(group) for group in groups}
        self._max_restarts = max_restarts
        self._restarts = dict.fromkeys(self._servers, 0)  # name of a model -> number of its servers that have ended
        self._lost: str | None = None  # why a model is lost: its servers ended too often; None: no model is lost
        self._announced: dict[str, set[str]] = {}  # name -> URLs that `set_servers` has told the rewards
        # Name of an offloaded model -> URLs of the servers that have released their device memory
        self._released: dict[str, list[str]] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()  # held while servers are replaced, offloaded or loaded
        self._watcher: threading.Thread | None = None

    @property
    def num_restarts(self) -> int:
        """Number of servers that have ended so far."""
        return sum(self._restarts.values())

    def wait_ready(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all servers take requests, tell their URLs to the rewards, and begin to watch the servers.

        Raises the errors of EngineServers.wait_ready.
        """
        deadline = time.monotonic() + timeout_s
        for name, servers in self._servers.items():
            servers.wait_ready(max(1.0, deadline - time.monotonic()))
            self._announce(name, servers)
        if self._servers and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="served models", daemon=True)
            self._watcher.start()

    def urls(self, name: str) -> list[str]:
        """Return the URLs of the servers of a model. Raises ServedModelError if the servers of any model ended too often."""
        self.check()
        return self._servers[name].urls

    def check(self) -> None:
        """Raise ServedModelError if the servers of any model ended too often."""
        if self._lost:
            raise ServedModelError(self._lost)

    def _watch(self) -> None:
        while not self._ended.wait(CHECK_INTERVAL_S):
            for name, servers in self._servers.items():
                try:
                    with self._lock:
                        self._check_servers(name, servers)
                except Exception:  # an error must not end this thread; the next check tries again
                    logger.exception("the servers of roles.%s could not be checked or replaced", name)

    def _check_servers(self, name: str, servers: EngineServers) -> None:
        """Replace the servers of a model that have ended, and wait for new servers whose URLs the rewards do not have yet.

        Does nothing while the model is offloaded, because trainers use its devices.
        """
        ended = [server.url for server in servers.servers if not server.alive()]
        if self._ended.is_set() or name in self._released:
            return
        if ended:
            self._replace(name, servers, ended)
        elif set(servers.urls) != self._announced[name]:  # an earlier replacement was not ready in time
            self._wait_and_announce(name, servers)

    def _announce(self, name: str, servers: EngineServers) -> None:
        self._announced[name] = set(servers.urls)
        set_servers(name, servers.urls)

    def _wait_and_announce(self, name: str, servers: EngineServers) -> None:
        """Wait until all servers of a model take requests, and tell their URLs to the rewards."""
        try:
            servers.wait_ready(CONTROL_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:  # the next check waits again, or counts another restart
            logger.warning("roles.%s: %s", name, error)
            return
        self._announce(name, servers)

    def _replace(self, name: str, servers: EngineServers, urls: Sequence[str]) -> None:
        """Replace these servers of a model, which have ended. Meanwhile, rewards call the other servers of the model."""
        self._restarts[name] += len(urls)
        if self._restarts[name] > self._max_restarts:
            self._lost = (
                f"roles.{name}: its servers ended {self._restarts[name]} times (fault_tolerance.max_restarts="
                f"{self._max_restarts}); the logs are run.dir/logs/{name}_*.log"
            )
            logger.error(self._lost)
            self._ended.set()
            return
        for url in urls:
            logger.warning("%s of roles.%s: %s; it is replaced", url, name, servers.end_reason(url))
            self._announced[name].discard(url)
            servers.replace(url)
        self._wait_and_announce(name, servers)

    def offload(self, name: str) -> None:
        """Release the device memory of a model. Its weights stay on the host. Does nothing if the model is offloaded already."""
        with self._lock:
            if name not in self._released:
                urls = [url for url in self._servers[name].urls if url in self._announced[name]]
                _control(urls, lambda server: (server.pause(PauseMode.retract), server.release_memory(MEMORY_TAGS)))
                self._released[name] = urls

    def load(self, name: str) -> None:
        """Load an offloaded model to its devices again. Does nothing if the model is loaded already."""
        with self._lock:
            if name in self._released:
                _control(self._released[name], lambda server: (server.resume_memory(MEMORY_TAGS), server.resume()))
                del self._released[name]

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, of all processes of the servers."""
        return sum(servers.cpu_seconds() for servers in self._servers.values())

    def close(self) -> None:
        """End all servers."""
        self._ended.set()
        for servers in self._servers.values():
            servers.stop()


def _control(urls: Sequence[str], action: Callable[[EngineControl], object]) -> None:
    """Call `action` for each server. A server that cannot be reached is skipped. If it has ended, the watcher replaces it.

    Raises EngineError if a server refuses the request, or if it does not answer in time.
    """

    def control(url: str) -> None:
        with EngineControl(url, CONTROL_TIMEOUT_S) as server, suppress(httpx.TransportError):
            try:
                action(server)
            except httpx.TimeoutException as error:
                raise EngineError(f"{url} did not answer within {CONTROL_TIMEOUT_S:g} s: {error!r}") from error

    with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="served models") as pool:
        for answer in [pool.submit(control, url) for url in urls]:
            answer.result()


CONCURRENCY = 32  # number of concurrent requests to each server
RETRY_PAUSE_S = 1.0  # pause before a failed request is repeated, because a new server needs time to start


def top_k_of_rows(
    urls: Callable[[], Sequence[str]], block: TokenBlock, rows: NDArray[np.int64], k: int, timeout_s: float
) -> TeacherOutputs:
    """Return the k most probable tokens at each sampled token of these rows of `block` (see TeacherOutputs).

    `urls()` returns the URLs of the teacher's servers, which may change when a server is replaced. The rows are distributed over
    the servers. If a server cannot be reached, its requests are repeated on the next server until `timeout_s` seconds have
    passed.

    Raises:
        EngineError: a server refuses a request.
        TimeoutError: a row has no answer within `timeout_s`.
    """
    deadline, sampled = time.monotonic() + timeout_s, block.sampled_index
    with ThreadPoolExecutor(CONCURRENCY * len(urls()), thread_name_prefix="teacher") as pool:
        calls = []
        for number, row in enumerate(rows.tolist()):
            start, end = block.cu_seqlens[row], block.cu_seqlens[row + 1]
            first, last = np.searchsorted(sampled, [start, end])
            positions = sampled[first:last] - start
            calls.append(pool.submit(_top_k_of_row, urls, number, block.tokens[start:end], positions, k, deadline))
        answers = [_no_top_k(k), *(call.result() for call in calls)]
    logprobs, ids = (np.concatenate(arrays) for arrays in zip(*answers, strict=True))
    # [n, 1] probability of all other tokens together. Because of rounding errors, the difference could be 0 or negative.
    rest = np.maximum(1 - np.exp(logprobs, dtype=np.float64).sum(1, keepdims=True), MIN_REST_PROB)
    return {"top_logprobs": np.concatenate([logprobs, np.log(rest)], 1).astype(np.float32), "top_ids": ids}


def _no_top_k(k: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    return np.empty((0, k), np.float32), np.empty((0, k), np.int32)


def _top_k_of_row(
    urls: Callable[[], Sequence[str]],
    first_server: int,
    row: NDArray[np.int32],
    sampled: NDArray[np.int64],
    k: int,
    deadline: float,
) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Return log-probabilities [n, k] and token ids [n, k] for the n sampled tokens of a row.

    `row`: the tokens of the row. `sampled`: [n] index of each sampled token in `row`. Attempt i sends the request to the server
    with the index `first_server` + i, modulo the number of servers.
    """
    if not len(sampled):
        return _no_top_k(k)
    tokens, first = row.tolist(), int(sampled[0])
    while True:
        servers = urls()
        url, left_s = servers[first_server % len(servers)], deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(
                "the teacher did not answer in time; raise rollout.request_timeout_s, or use more servers."
            )
        try:
            with EngineClient(url, left_s) as client:
                logprobs, ids = client.top_logprobs(tokens, first, k)
            return logprobs[sampled - first], ids[sampled - first]
        except httpx.TransportError:
            first_server += 1
            time.sleep(RETRY_PAUSE_S)
