"""Engines on slots of their own: on each node of an engine a Ray actor starts the server there, with its GPUs visible.

Where the whole cluster is one machine without GPUs, engines stay children of the rollout worker: there is no other place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mrl.core.device_slot import Slot
from mrl.rollout.server import EngineServer

LOOK_S = 0.2  # between looks at a server's processes
PATIENCE_S = 10.0  # how much longer a call may take than what it waits for


def listen_address() -> str:
    """Where engines listen: on loopback where all of the cluster is on this machine, else on this node's address in it."""
    if not ray.is_initialized():
        return "127.0.0.1"
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ray.util.get_node_ip_address() if len(nodes) > 1 else "127.0.0.1"


class EngineHost:
    """A Ray actor that has one node's processes of an engine, which end when it does, however that is (mrl.rollout.supervise)."""

    def __init__(self, arguments: Mapping[str, Any], log_path: str, env: Mapping[str, str]) -> None:
        """Start nothing yet."""
        self.server = EngineServer(dict(arguments, host=listen_address()), log_path, env=env)

    def meeting(self) -> str:
        """Where this node's ranks, the first ones, wait for those of other nodes."""
        return f"{self.server.server_args['host']}:{self.server.server_args['nccl_port']}"

    def start(self, node: str, meeting: str | None) -> str:
        """Start the server's processes; returns its URL. Raises RuntimeError on another node than the one with its GPUs."""
        if ray.get_runtime_context().get_node_id() != node:
            raise RuntimeError(
                f"the node of {self.server.log_path.stem} was lost while it started, and its slots moved"
            )
        if meeting:
            self.server.server_args["dist_init_addr"] = meeting
        self.server.start()
        return self.server.url

    def wait_ready(self, timeout_s: float, url: str) -> None:
        """As of an EngineServer. `url`: what `start` returned, so that Ray calls this after it."""
        self.server.wait_ready(timeout_s)

    def wait_ended(self, url: str) -> bool:
        """Wait until the server's processes have ended; whether they were killed."""
        while self.server.alive():
            time.sleep(LOOK_S)
        return self.server.was_killed

    def cpu_seconds(self) -> float:
        """As of an EngineServer."""
        return self.server.cpu_seconds()

    def stop(self, timeout_s: float) -> None:
        """As of an EngineServer."""
        self.server.stop(timeout_s)


class HostedEngine:
    """Has what a rollout worker asks of an EngineServer. Wherever the slots are when it starts, there it is until it ends."""

    def __init__(
        self, slots: Callable[[], Sequence[Slot]], arguments: Mapping[str, Any], log_path: Path, env: Mapping[str, str]
    ) -> None:
        """`slots`: of its tensor-parallel ranks; on other nodes than the first its log has the node's number in its name."""
        self._slots, self._arguments, self.log_path, self._env = slots, arguments, log_path, env
        self.url = f"{log_path.stem}, which is not ready"
        self._hosts: list[Any] = []
        self._started: list[Any] = []  # URLs to come
        self._ended: list[Any] = []  # answers that come when processes have ended, or their host has

    def start(self) -> None:
        """Start the processes on every node and return at once. Raises where Ray has no room for the slots."""
        assert not self._hosts, f"{self.url} was already started"
        nodes = by_node(self._slots())
        self._hosts = [self._host(number, slots, len(nodes)) for number, slots in enumerate(nodes)]
        meeting = self._hosts[0].meeting.remote() if len(nodes) > 1 else None
        self._started = [
            host.start.remote(slots[0].node, meeting) for host, slots in zip(self._hosts, nodes, strict=True)
        ]
        self._ended = [host.wait_ended.remote(url) for host, url in zip(self._hosts, self._started, strict=True)]

    def _host(self, number: int, slots: Sequence[Slot], nodes: int) -> Any:
        several = dict(nnodes=nodes, node_rank=number) if nodes > 1 else {}
        log = self.log_path.with_stem(f"{self.log_path.stem}_node_{number}") if number else self.log_path
        env = visible(slots) | dict(self._env)
        remote = ray.remote(EngineHost).options(max_concurrency=4, **slots[0].options)
        return remote.remote(dict(self._arguments, **several), str(log), env)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests. Raises RuntimeError when it ended, TimeoutError at the deadline."""
        name, host, deadline = self.log_path.stem, self._hosts[0], time.monotonic() + timeout_s
        ready = host.wait_ready.remote(timeout_s, self._started[0])
        there, _ = ray.wait([ready, *self._ended], timeout=timeout_s + PATIENCE_S)
        try:
            ray.get(ready, timeout=PATIENCE_S if there else 0)  # what ended may have more to say
            self.url = ray.get(self._started[0], timeout=max(1.0, deadline - time.monotonic()))
        except RayTaskError as error:
            if isinstance(error.cause, RuntimeError | TimeoutError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise RuntimeError(f"{name} ended before it was ready: the process that had it died ({error})") from error
        except GetTimeoutError:
            why = "ended on one of its nodes before it was" if there else f"was not ready after {timeout_s:g} s, nor"
            kind = RuntimeError if there else TimeoutError
            raise kind(f"{name} {why} ready; its logs are {self.log_path.with_suffix('')}*.log") from None

    def alive(self) -> bool:
        """Whether its processes run on every node, as far as Ray knows."""
        return bool(self._ended) and not ray.wait(self._ended, timeout=0, fetch_local=False)[0]

    @property
    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, or with the node or process that had it."""
        ended = ray.wait(self._ended, timeout=0)[0] if self._ended else []
        try:
            return any(ray.get(ended))
        except RayActorError:
            return True
        except RayError:
            return False

    def cpu_seconds(self) -> float:
        """User and system seconds of its live processes; 0 where nobody can tell."""
        with suppress(RayError):
            return sum(ray.get([host.cpu_seconds.remote() for host in self._hosts], timeout=PATIENCE_S))
        return 0.0

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it on every node. Safe to call twice."""
        with suppress(RayError):  # processes of a host that is gone are gone, too
            ray.get([host.stop.remote(timeout_s) for host in self._hosts], timeout=timeout_s + PATIENCE_S)
        for host in self._hosts:
            ray.kill(host)
        self._hosts, self._started, self._ended = [], [], []


def visible(slots: Sequence[Slot]) -> dict[str, str]:
    """The environment in which a server sees exactly these slots' GPUs, in their order."""
    devices = [slot.device for slot in slots if slot.device]
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def by_node(slots: Sequence[Slot]) -> list[list[Slot]]:
    """An engine's slots, node by node. Raises ValueError where nodes have unequal parts of it, which SGLang cannot use."""
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.node, []).append(slot)
    if len({len(part) for part in found.values()}) > 1:
        parts = ", ".join(f"{len(part)} on {part[0].host}" for part in found.values())
        raise ValueError(
            f"rollout.engine_tp={len(slots)}: an engine would have {parts}, and SGLang wants as many on each node; use an "
            "engine_tp that divides the GPUs of a node or is a multiple of them, or strategy STRICT_PACK for its pool."
        )
    return list(found.values())
