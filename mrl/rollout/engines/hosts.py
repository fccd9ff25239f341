"""The servers of an engine pool or of a served model: child processes, processes on Ray nodes, or external servers.

On a Ray cluster with GPUs or several nodes, each server has its own device slots (see mrl.rollout.engines.ray_engine).
Otherwise, servers are child processes of the process that holds the EngineServers.
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.core.run_errors import describe_exit
from mrl.hang_report.process_registry import (
    REGISTRY_FOLDER_ENV,
    REGISTRY_NAME_ENV,
    registry_folder,
    unregister_processes,
)
from mrl.rollout.engines.server import EngineServer, ExternalEngine, listen_address
from mrl.rollout.spec import ServerGroup
from parallel import spans

if TYPE_CHECKING:
    from mrl.rollout.engines.ray_engine import RayEngine

log = logging.getLogger(__name__)

type AnyEngineServer = EngineServer | RayEngine | ExternalEngine
"""A server that is a child process of this process, a server that Ray actors start on device slots, or a server of the user."""


class EngineServers:
    """The servers of one group. A new server takes the index of the failed server that it replaces."""

    def __init__(self, group: ServerGroup) -> None:
        """Start the servers. Returns before they are ready; `wait_ready` waits for them."""
        self.group = group
        self._arguments = dict(group.arguments, model_path=group.model_path, tp_size=group.tp_size)
        self._registry = registry_folder(group.run_dir)
        # entries that an earlier process left in this run directory
        unregister_processes(self._registry, f"{group.name}_*")
        self._serial_numbers = itertools.count()  # one for each started server; a replacement gets a new number
        self._replacing = threading.Lock()  # held while a server is replaced
        self._were_ready = False  # whether all servers were ready at least once
        self._ready: list[EngineServer | RayEngine] = []  # servers that were ready at least once
        self.servers: list[AnyEngineServer] = [ExternalEngine(url) for url in group.external_urls]
        self.servers = self.servers or [self._start(index) for index in range(group.count)]

    def _start(self, index: int) -> EngineServer | RayEngine:
        """Start the server with the index `index`. Returns before the server is ready."""
        serial_number, group = next(self._serial_numbers), self.group
        name = f"{group.name}_{serial_number}"
        arguments: dict[str, Any] = dict(random_seed=group.seed + serial_number) | self._arguments
        log_path = Path(group.run_dir) / "logs" / f"{name}.log"
        env = {**group.env, REGISTRY_FOLDER_ENV: str(self._registry), REGISTRY_NAME_ENV: name}
        if group.timeline:
            folder = Path(group.run_dir) / spans.FOLDER
            # the last argument is the number of the first rank of this server in the timeline
            env |= spans.child_environment(folder, group.name, serial_number * group.tp_size)
        server: EngineServer | RayEngine
        if group.slots is not None:
            from mrl.rollout.engines.ray_engine import (
                RayEngine,  # imports Ray, which a pool without slots does not need
            )

            server = RayEngine(partial(group.slots, index), arguments, log_path, env)
        else:
            if arguments.get("device") == "cuda":  # each server of this machine gets its own GPUs
                arguments["base_gpu_id"] = arguments.get("base_gpu_id", 0) + index * group.tp_size
            server = EngineServer(dict(arguments, host=listen_address()), log_path, env=env)
        server.start()
        return server

    @property
    def urls(self) -> list[str]:
        """URLs of all servers, including those that are still starting."""
        return [server.url for server in self.servers]

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server is ready for requests.

        A server that mrl has started counts as ready if it was ready before and still runs. It is not asked again, because it
        may be paused or offloaded now.

        At the first start, a server that ends before it is ready is replaced only once, and only if it was killed. A server
        that exits by itself would fail again, for example because of a wrong argument. Later, a server that ends before it is
        ready is replaced up to `max_replacements` times.

        Raises RuntimeError if a server ended and is not replaced, and TimeoutError if a server is not ready after `timeout_s`
        seconds.
        """
        deadline = time.monotonic() + timeout_s
        for index in range(len(self.servers)):
            replacements = self.group.max_replacements if self._were_ready else 1
            for replacements_left in range(replacements, -1, -1):
                server = self.servers[index]
                if server in self._ready and server.alive():
                    break
                try:
                    server.wait_ready(max(1.0, deadline - time.monotonic()))
                    if not isinstance(server, ExternalEngine):
                        self._ready.append(server)
                    break
                except RuntimeError as error:
                    replaceable = not isinstance(server, ExternalEngine) and (self._were_ready or server.was_killed)
                    if not replaceable or not replacements_left:
                        raise
                    log.warning("%s", error)
                    self.replace(server.url)
        self._were_ready = True

    def end_reason(self, url: str) -> str:
        """Return why the processes of the server at this URL have ended."""
        own = [server for server in self.servers if server.url == url and not isinstance(server, ExternalEngine)]
        killed = f": {describe_exit(-signal.SIGKILL)}" if any(server.was_killed for server in own) else ""
        return f"its processes have ended{killed}"

    def replace(self, url: str) -> None:
        """End the server at this URL and start another server.

        Does nothing for an unknown URL, because its server was replaced already. Does nothing for an external server, because an
        external server may recover.
        """
        with self._replacing:
            for index, server in enumerate(self.servers):
                if server.url == url and not isinstance(server, ExternalEngine):
                    log.warning("engine %s is replaced", url)
                    server.stop(timeout_s=5.0)
                    unregister_processes(self._registry, server.log_path.stem)
                    self._ready = [each for each in self._ready if each is not server]
                    self.servers[index] = self._start(index)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, of all processes of the servers."""
        return sum(server.cpu_seconds() for server in self.servers)

    def stop(self) -> None:
        """End all servers, except external servers."""
        for server in self.servers:
            server.stop()
