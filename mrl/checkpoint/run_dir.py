"""The run directory: locked by one process at a time, with a record of the command and config that the run began with."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from mrl.core.jsonl import write_json

logger = logging.getLogger(__name__)

RUN = "run.json"  # in the run directory: command and config
OWNER = "MRL_RUN_DIR"  # environment variable of every process of the run: its run directory
OUTPUTS = (RUN, "metrics.jsonl", "sft.jsonl", "checkpoint", "checkpoints", "hf")
END_S = 20.0  # timeout for killed processes to end


@contextmanager
def lock_run_dir(folder: Path, command: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Lock the folder for this process, and kill processes that an earlier part of the run left behind.

    The lock ends with the process at the latest. Raises ValueError if a live process holds it.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"run.dir={folder}: another run is using it; name another folder, or end that run.") from None
    try:
        _kill_leftovers(folder)
        os.environ[OWNER] = str(folder)
        if "NCCL_DEBUG" in os.environ:
            os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "logs/nccl_%h_%p.log"))
        write_json(folder / RUN, dict(command=command, config=config))
        yield
    finally:
        os.environ.pop(OWNER, None)
        lock.release()


def read_run_record(folder: Path) -> dict[str, Any] | None:
    """Return the command and config of the run in this folder; None if there is no run."""
    try:
        return json.loads((folder / RUN).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def check_unused(folder: Path) -> None:
    """Raise ValueError if the folder has the results of a run."""
    for name in OUTPUTS:
        if (folder / name).exists():
            raise ValueError(f"run.dir={folder}: has {name} of another run; name another folder.")


def _kill_leftovers(folder: Path) -> None:
    """Kill processes of an earlier command in this folder. They would end by themselves, but hold GPUs until then."""
    leftovers = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(OWNER) == str(folder) and process.pid != os.getpid():
                leftovers.append(process)
    for process in leftovers:
        logger.warning("killing process %d, which an earlier part of this run left behind", process.pid)
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(leftovers, timeout=END_S)
