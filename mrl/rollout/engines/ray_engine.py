"""RayEngine: an engine on the device slots of a Ray cluster.

Each engine has its own device slots, which are GPUs, or CPUs if the cluster has no GPUs. An engine may span several nodes. On
each of its nodes, a Ray actor (EngineNodeActor) starts processes of the server. These processes see only the GPUs of the
engine's slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mrl.core.types import DeviceSlot
from mrl.rollout.engines.server import EngineServer, listen_address

POLL_INTERVAL_S = 0.2  # seconds between two checks whether a server's processes still run
RAY_CALL_MARGIN_S = 10.0  # how much longer a Ray call may take than the deadline of the method that it runs


class EngineNodeActor:
    """Ray actor that runs the processes of an engine on one node. The processes end with it (server_supervisor.py)."""

    def __init__(self, arguments: Mapping[str, Any], log_path: str, env: Mapping[str, str]) -> None:
        """Prepare the server without starting it. `arguments`: fields of SGLang's ServerArgs."""
        self.server = EngineServer(dict(arguments, host=listen_address()), log_path, env=env)

    def rendezvous(self) -> str:
        """Return the address (host:port) at which this node waits for the ranks of other nodes. Called on the first node."""
        return f"{self.server.server_args['host']}:{self.server.server_args['nccl_port']}"

    def start(self, node: str, rendezvous: str | None) -> str:
        """Start the server's processes, and return the server's URL.

        `node`: Ray's id of the node on which Ray had placed the slots. `rendezvous`: result of the method `rendezvous` on the
        first node; None if the engine has a single node. Raises RuntimeError if this actor runs on another node than `node`.
        """
        if ray.get_runtime_context().get_node_id() != node:
            raise RuntimeError(
                f"the node of {self.server.log_path.stem} was lost while the engine started, and Ray moved its slots"
            )
        if rendezvous:
            self.server.server_args["dist_init_addr"] = rendezvous
        self.server.start()
        return self.server.url

    def wait_ready(self, timeout_s: float, url: str) -> None:
        """Wait until the server takes requests, as in EngineServer.wait_ready.

        `url`: the result of `start`, which the method does not use. Because of this argument, Ray calls the method only after
        `start` has returned.
        """
        self.server.wait_ready(timeout_s)

    def wait_ended(self, url: str) -> bool:
        """Wait until the server's processes have ended. Returns whether they were killed. `url`: see `wait_ready`."""
        while self.server.alive():
            time.sleep(POLL_INTERVAL_S)
        return self.server.was_killed

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of the server's processes on this node."""
        return self.server.cpu_seconds()

    def stop(self, timeout_s: float) -> None:
        """End the server's processes on this node, as in EngineServer.stop."""
        self.server.stop(timeout_s)


class RayEngine:
    """One engine on device slots of a Ray cluster. RayEngine has the methods of EngineServer that the engine pool calls.

    The slots are looked up when the engine starts. The engine stays on these slots until it ends.
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[DeviceSlot]],
        arguments: Mapping[str, Any],
        log_path: Path,
        env: Mapping[str, str],
    ) -> None:
        """`slots()` returns one slot for each tensor-parallel rank. `log_path`: log of the first node.

        The log of node i > 0 has the suffix `_node_{i}`.
        """
        self._slots, self._arguments, self.log_path, self._env = slots, arguments, log_path, env
        # until the engine is ready, a text that identifies it in messages and in EngineServers.replace
        self.url = f"{log_path.stem}, which is not ready"
        self._node_actors: list[Any] = []  # one EngineNodeActor per node
        self._started: list[Any] = []  # one future per node: the result of EngineNodeActor.start
        # One future per node; the future is done when the node's processes or EngineNodeActor have ended
        self._ended: list[Any] = []

    def start(self) -> None:
        """Start the processes on every node. Returns before they are ready. Raises an error if Ray cannot provide the slots."""
        assert not self._node_actors, f"{self.url} was already started"
        nodes = group_by_node(self._slots())
        self._node_actors = [self._create_node_actor(index, slots, len(nodes)) for index, slots in enumerate(nodes)]
        rendezvous = self._node_actors[0].rendezvous.remote() if len(nodes) > 1 else None
        self._started = [
            actor.start.remote(slots[0].node, rendezvous) for actor, slots in zip(self._node_actors, nodes, strict=True)
        ]
        self._ended = [
            actor.wait_ended.remote(url) for actor, url in zip(self._node_actors, self._started, strict=True)
        ]

    def _create_node_actor(self, index: int, slots: Sequence[DeviceSlot], num_nodes: int) -> Any:
        """Create the EngineNodeActor of the engine's node `index`. `slots`: the engine's slots on this node."""
        multi_node = dict(nnodes=num_nodes, node_rank=index) if num_nodes > 1 else {}
        log_path = self.log_path.with_stem(f"{self.log_path.stem}_node_{index}") if index else self.log_path
        env = visible_devices_env(slots) | dict(self._env)
        actor_class = ray.remote(EngineNodeActor).options(max_concurrency=4, **slots[0].options)
        return actor_class.remote(dict(self._arguments, **multi_node), str(log_path), env)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests.

        Raises RuntimeError if the server ended, and TimeoutError if it is not ready after `timeout_s` seconds.
        """
        name, actor, deadline = self.log_path.stem, self._node_actors[0], time.monotonic() + timeout_s
        ready = actor.wait_ready.remote(timeout_s, self._started[0])
        done, _ = ray.wait([ready, *self._ended], timeout=timeout_s + RAY_CALL_MARGIN_S)
        try:
            # If the processes have ended, this call raises an error with the reason.
            ray.get(ready, timeout=RAY_CALL_MARGIN_S if done else 0)
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
        """Return whether the engine's processes run on every node, according to Ray."""
        return bool(self._ended) and not ray.wait(self._ended, timeout=0, fetch_local=False)[0]

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the engine, or a node or an EngineNodeActor of the engine was lost."""
        ended = ray.wait(self._ended, timeout=0)[0] if self._ended else []
        try:
            return any(ray.get(ended))
        except RayActorError:
            return True
        except RayError:
            return False

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, of the engine's processes; 0 if an EngineNodeActor does not answer."""
        with suppress(RayError):
            return sum(ray.get([actor.cpu_seconds.remote() for actor in self._node_actors], timeout=RAY_CALL_MARGIN_S))
        return 0.0

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the engine on every node. May be called twice."""
        with suppress(RayError):  # if an EngineNodeActor has ended, its processes have ended, too
            ray.get(
                [actor.stop.remote(timeout_s) for actor in self._node_actors], timeout=timeout_s + RAY_CALL_MARGIN_S
            )
        for actor in self._node_actors:
            ray.kill(actor)
        self._node_actors, self._started, self._ended = [], [], []


def visible_devices_env(slots: Sequence[DeviceSlot]) -> dict[str, str]:
    """Return environment variables that make exactly the GPUs of these slots visible to a server, in the order of its ranks."""
    devices = [slot.device for slot in slots if slot.device]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def group_by_node(slots: Sequence[DeviceSlot]) -> list[list[DeviceSlot]]:
    """Return the engine's slots on each node. Raises ValueError if nodes have different numbers of slots."""
    by_node: dict[str, list[DeviceSlot]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot)
    if len({len(part) for part in by_node.values()}) > 1:
        parts = ", ".join(f"{len(part)} on {part[0].host}" for part in by_node.values())
        raise ValueError(
            f"rollout.engine_tp={len(slots)}: an engine would have {parts}, and SGLang needs the same number of GPUs on each "
            "node; use an engine_tp that divides the number of GPUs per node or is a multiple of it, or the strategy "
            "STRICT_PACK for the engines' pool."
        )
    return list(by_node.values())
