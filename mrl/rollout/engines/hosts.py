"""The engine servers of a rollout worker: child processes, Ray actors on device slots, or external servers.

On a cluster each engine has its own slots (GPUs). On each node of an engine, a Ray actor (EngineNodeActor) starts the server's
processes, which see exactly the engine's GPUs of that node. On a single machine without GPUs, engines are child processes of
the rollout worker.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mrl.core.types import DeviceSlot
from mrl.hang_report.process_registry import (
    REGISTRY_FOLDER_ENV,
    REGISTRY_NAME_ENV,
    registry_folder,
    unregister_processes,
)
from mrl.rollout.engines.server import EngineServer, ExternalEngine
from mrl.rollout.spec import RolloutSpec

log = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.2  # between checks of a server's processes
RPC_MARGIN_S = 10.0  # how much longer a Ray call may take than the wait inside it


type AnyEngineServer = EngineServer | RayEngine | ExternalEngine
"""A child process, Ray actors on device slots, or a server that the user runs."""


class EngineServers:
    """All engine servers of one rollout worker, by index. A new server takes the index of the failed server that it replaces."""

    def __init__(self, spec: RolloutSpec) -> None:
        """Start the servers. Returns at once; `wait_ready` waits for them."""
        self.spec = spec
        self._arguments = dict(spec.server_args, model_path=spec.model_path, tp_size=spec.engine_tp)
        if spec.routed_experts:
            self._arguments["enable_return_routed_experts"] = True
        self._registry = registry_folder(spec.run_dir)
        unregister_processes(self._registry, "engine_*")  # entries of an earlier start in this run directory
        self._numbers = itertools.count()  # counts all engines that were ever started
        self._replacing = threading.Lock()
        self._were_ready = False  # whether all servers were ready at least once
        self.servers: list[AnyEngineServer] = [ExternalEngine(url) for url in spec.engine_urls]
        self.servers = self.servers or [self._start(index) for index in range(spec.num_engines)]

    def _start(self, index: int) -> EngineServer | RayEngine:
        number = next(self._numbers)
        name = f"engine_{number}"
        arguments = dict(self._arguments, random_seed=self.spec.seed + number)
        log_path = Path(self.spec.run_dir) / "logs" / f"{name}.log"
        env = {REGISTRY_FOLDER_ENV: str(self._registry), REGISTRY_NAME_ENV: name}
        server: EngineServer | RayEngine
        if self.spec.slots is not None:
            server = RayEngine(partial(self.spec.slots, index), arguments, log_path, env)
        else:
            server = EngineServer(dict(arguments, host=listen_address()), log_path, env=env)
        server.start()
        return server

    @property
    def urls(self) -> list[str]:
        """URLs of all servers, including those that are still starting."""
        return [server.url for server in self.servers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server takes requests.

        A server that ends before it is ready is replaced up to `fault_tolerance.max_response_attempts` times. At the first start,
        it is replaced only if it was killed, and only once: a server that exits by itself would fail again, for example because
        of a wrong argument. Raises the error of the server, and TimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        for index in range(len(self.servers)):
            replacements = self.spec.fault_tolerance.max_response_attempts if self._were_ready else 1
            for replacements_left in range(replacements, -1, -1):
                server = self.servers[index]
                try:
                    server.wait_ready(max(1.0, deadline - time.monotonic()))
                    break
                except RuntimeError as error:
                    replaceable = not isinstance(server, ExternalEngine) and (self._were_ready or server.was_killed)
                    if not replaceable or not replacements_left:
                        raise
                    log.warning("%s", error)
                    self.replace(server.url)
        self._were_ready = True

    def replace(self, url: str) -> None:
        """End the server at this URL and start another one. Does nothing for an unknown URL: its server was replaced already.

        Does nothing for an external server either: it may recover.
        """
        with self._replacing:
            for index, server in enumerate(self.servers):
                if server.url == url and not isinstance(server, ExternalEngine):
                    log.warning("engine %s is replaced", url)
                    server.stop(timeout_s=5.0)
                    unregister_processes(self._registry, server.log_path.stem)
                    self.servers[index] = self._start(index)

    def cpu_seconds(self) -> float:
        """Return the user and system CPU seconds of all servers' process trees."""
        return sum(server.cpu_seconds() for server in self.servers)

    def stop(self) -> None:
        """End every server that is not external."""
        for server in self.servers:
            server.stop()


def listen_address() -> str:
    """Return the address that engines listen on: loopback if the cluster has one node, else this node's address."""
    if not ray.is_initialized():
        return "127.0.0.1"
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ray.util.get_node_ip_address() if len(nodes) > 1 else "127.0.0.1"


class EngineNodeActor:
    """Ray actor that runs one node's processes of an engine. They end with the actor (mrl.rollout.engines.supervisor)."""

    def __init__(self, arguments: Mapping[str, Any], log_path: str, env: Mapping[str, str]) -> None:
        """Prepare the server without starting it."""
        self.server = EngineServer(dict(arguments, host=listen_address()), log_path, env=env)

    def rendezvous(self) -> str:
        """Return host:port at which the first node's ranks wait for the ranks of other nodes."""
        return f"{self.server.server_args['host']}:{self.server.server_args['nccl_port']}"

    def start(self, node: str, rendezvous: str | None) -> str:
        """Start the server's processes; return its URL. Raises RuntimeError if this node is not `node`, where the slots were."""
        if ray.get_runtime_context().get_node_id() != node:
            raise RuntimeError(
                f"the node of {self.server.log_path.stem} was lost while the engine started, and its slots moved"
            )
        if rendezvous:
            self.server.server_args["dist_init_addr"] = rendezvous
        self.server.start()
        return self.server.url

    def wait_ready(self, timeout_s: float, url: str) -> None:
        """Wait as EngineServer.wait_ready. `url`: the result of `start`, so that Ray calls this method after `start`."""
        self.server.wait_ready(timeout_s)

    def wait_ended(self, url: str) -> bool:
        """Wait until the server's processes have ended; return whether they were killed. `url`: as in `wait_ready`."""
        while self.server.alive():
            time.sleep(POLL_INTERVAL_S)
        return self.server.was_killed

    def cpu_seconds(self) -> float:
        """Return what EngineServer.cpu_seconds returns."""
        return self.server.cpu_seconds()

    def stop(self, timeout_s: float) -> None:
        """End the server's processes, as EngineServer.stop."""
        self.server.stop(timeout_s)


class RayEngine:
    """One engine on device slots of a Ray cluster, with the interface of EngineServer.

    The slots are looked up when the engine starts. The engine stays on these slots until it ends.
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[DeviceSlot]],
        arguments: Mapping[str, Any],
        log_path: Path,
        env: Mapping[str, str],
    ) -> None:
        """`slots`: returns one slot for each tensor-parallel rank. Every node but the first adds its number to the log's name."""
        self._slots, self._arguments, self.log_path, self._env = slots, arguments, log_path, env
        self.url = f"{log_path.stem}, which is not ready"
        self._node_actors: list[Any] = []  # EngineNodeActor actors, one per node
        self._started: list[Any] = []  # futures of URLs
        self._ended: list[Any] = []  # one future per node: done when its processes or its EngineNodeActor have ended

    def start(self) -> None:
        """Start the processes on every node. Returns at once. Raises if Ray has no room for the slots."""
        assert not self._node_actors, f"{self.url} was already started"
        nodes = group_by_node(self._slots())
        self._node_actors = [self._create_node_actor(number, slots, len(nodes)) for number, slots in enumerate(nodes)]
        rendezvous = self._node_actors[0].rendezvous.remote() if len(nodes) > 1 else None
        self._started = [
            actor.start.remote(slots[0].node, rendezvous) for actor, slots in zip(self._node_actors, nodes, strict=True)
        ]
        self._ended = [
            actor.wait_ended.remote(url) for actor, url in zip(self._node_actors, self._started, strict=True)
        ]

    def _create_node_actor(self, number: int, slots: Sequence[DeviceSlot], num_nodes: int) -> Any:
        multi_node = dict(nnodes=num_nodes, node_rank=number) if num_nodes > 1 else {}
        log_path = self.log_path.with_stem(f"{self.log_path.stem}_node_{number}") if number else self.log_path
        env = visible_devices_env(slots) | dict(self._env)
        actor_class = ray.remote(EngineNodeActor).options(max_concurrency=4, **slots[0].options)
        return actor_class.remote(dict(self._arguments, **multi_node), str(log_path), env)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests. Raises RuntimeError if it ended, TimeoutError at the deadline."""
        name, actor, deadline = self.log_path.stem, self._node_actors[0], time.monotonic() + timeout_s
        ready = actor.wait_ready.remote(timeout_s, self._started[0])
        done, _ = ray.wait([ready, *self._ended], timeout=timeout_s + RPC_MARGIN_S)
        try:
            ray.get(ready, timeout=RPC_MARGIN_S if done else 0)  # if the processes have ended, this raises the reason
            self.url = ray.get(self._started[0], timeout=max(1.0, deadline - time.monotonic()))
        except RayTaskError as error:
            if isinstance(error.cause, RuntimeError | TimeoutError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise RuntimeError(f"{name} ended before it was ready: its EngineNodeActor died ({error})") from error
        except GetTimeoutError:
            logs = f"its logs are {self.log_path.with_suffix('')}*.log"
            if done:
                raise RuntimeError(f"{name} ended on one of its nodes before it was ready; {logs}") from None
            raise TimeoutError(f"{name} was not ready after {timeout_s:g} s; {logs}") from None

    def alive(self) -> bool:
        """Return whether the engine's processes run on every node, as far as Ray knows."""
        return bool(self._ended) and not ray.wait(self._ended, timeout=0, fetch_local=False)[0]

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, or together with its node or its EngineNodeActor."""
        ended = ray.wait(self._ended, timeout=0)[0] if self._ended else []
        try:
            return any(ray.get(ended))
        except RayActorError:
            return True
        except RayError:
            return False

    def cpu_seconds(self) -> float:
        """Return the user and system CPU seconds of the engine's live processes; 0 if an EngineNodeActor does not answer."""
        with suppress(RayError):
            return sum(ray.get([actor.cpu_seconds.remote() for actor in self._node_actors], timeout=RPC_MARGIN_S))
        return 0.0

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the engine on every node. Safe to call twice."""
        with suppress(RayError):  # if an EngineNodeActor is gone, so are its processes
            ray.get([actor.stop.remote(timeout_s) for actor in self._node_actors], timeout=timeout_s + RPC_MARGIN_S)
        for actor in self._node_actors:
            ray.kill(actor)
        self._node_actors, self._started, self._ended = [], [], []


def visible_devices_env(slots: Sequence[DeviceSlot]) -> dict[str, str]:
    """Return environment variables that show a server exactly these slots' GPUs, in the order of its ranks."""
    devices = [slot.device for slot in slots if slot.device]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def group_by_node(slots: Sequence[DeviceSlot]) -> list[list[DeviceSlot]]:
    """Group an engine's slots by node. Raises ValueError if nodes have different numbers of slots, which SGLang refuses."""
    by_node: dict[str, list[DeviceSlot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot)
    if len({len(part) for part in by_node.values()}) > 1:
        parts = ", ".join(f"{len(part)} on {part[0].host}" for part in by_node.values())
        raise ValueError(
            f"rollout.engine_tp={len(slots)}: an engine would have {parts}, and SGLang needs equally many on each node; use "
            "an engine_tp that divides the GPUs of a node or is a multiple of them, or strategy STRICT_PACK for its pool."
        )
    return list(by_node.values())
