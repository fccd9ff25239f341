"""Weights & Biases sink."""

import contextlib
import logging
import netrc
import os
import queue
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import psutil

from mrl.config.secrets import redacted
from mrl.tracking.tracker import Metrics

logger = logging.getLogger(__name__)


class WandbSink:
    """Logs to Weights & Biases from a thread: online if a login is configured, otherwise offline in `folder`.

    It never asks for a login. The wandb run id is stored in `folder`, so a resumed run continues the same wandb run, and
    repeated steps are ignored there. A failure of wandb is one warning; `close` waits at most `deadline_s` seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.deadline_s = deadline_s
        self._run: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "config": redacted(config or {}),
            "dir": folder,
        }
        self._run |= {"id": _stored_run_id(folder / "wandb_run_id"), "resume": "allow"}
        self._queue: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        self._queue.put((step, dict(metrics)))

    def rewind(self, last_step: int, evaluated: bool) -> None:
        """Do nothing: wandb accepts each step once."""

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(self.deadline_s)
        if self._thread.is_alive():
            logger.warning("wandb did not finish in %.0f s and was left behind", self.deadline_s)
            _kill_wandb_service()

    def _work(self) -> None:
        try:
            run = self._start()
            while (item := self._queue.get()) is not None:
                step, metrics = item
                if step >= run.step:  # wandb warns of all others
                    run.log(metrics, step=step)
            run.finish()
        except Exception as error:
            logger.warning("wandb failed and is off for this run: %s: %s", type(error).__name__, error)
            _kill_wandb_service()

    def _start(self) -> Any:
        import wandb  # takes seconds, for which the start of the run does not wait

        settings = wandb.Settings(console="off", silent=True, init_timeout=self.deadline_s)
        return wandb.init(**self._run, mode=cast(Any, wandb_mode()), settings=settings)


def _stored_run_id(path: Path) -> str:
    """The run id stored in `path`; a new one is stored first if there is none."""
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(uuid.uuid4().hex[:12])
    return path.read_text()


def wandb_mode() -> str:
    """WANDB_MODE if it is set; otherwise online if an API key or a netrc login exists, else offline."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        logins = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc")
    except (OSError, RuntimeError, netrc.NetrcParseError):
        return "offline"
    return "online" if logins.authenticators(host) else "offline"


def _kill_wandb_service() -> None:
    """Kill wandb's helper process, which would delay our exit until its server answers."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb"):
            child.kill()
