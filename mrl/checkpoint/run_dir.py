"""A run's folder: one run at a time writes there, and knows what an earlier part of itself left."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from mrl.core.durable_files import write_json

logger = logging.getLogger(__name__)

RUN = "run.json"  # in a run's folder: the command and config it was begun with
OWNER = "MRL_RUN_DIR"  # environment variable of every process of a run on this machine
OUTPUTS = (RUN, "metrics.jsonl", "sft.jsonl", "checkpoint", "checkpoints", "hf")
END_S = 20.0  # how long killed processes may take to disappear


@contextmanager
def own_run_dir(folder: Path, command: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder for this process alone, however it ends; processes that an earlier part of the run left are ended.

    Raises ValueError where a live process holds it.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"run.dir={folder}: a run that is alive writes there; name another folder, or end it."
        ) from None
    try:
        _end_leftovers(folder)
        os.environ[OWNER] = str(folder)
        if "NCCL_DEBUG" in os.environ:
            os.environ.setdefault("NCCL_DEBUG_FILE", str(folder / "logs/nccl_%h_%p.log"))
        write_json(folder / RUN, dict(command=command, config=config))
        yield
    finally:
        os.environ.pop(OWNER, None)
        lock.release()


def begun_with(folder: Path) -> dict[str, Any] | None:
    """What `own_run_dir` wrote when the run was begun or went on last; None where there is no run."""
    try:
        return json.loads((folder / RUN).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def check_unused(folder: Path) -> None:
    """Raise ValueError where the folder holds the results of a run."""
    for name in OUTPUTS:
        if (folder / name).exists():
            raise ValueError(f"run.dir={folder}: holds {name} of another run; name another folder.")


def _end_leftovers(folder: Path) -> None:
    """End processes of a run in this folder whose command is gone: they hold GPUs, and would end by themselves too late."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(OWNER) == str(folder) and process.pid != os.getpid():
                found.append(process)
    for process in found:
        logger.warning("process %d, left by an earlier part of this run, is ended", process.pid)
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=END_S)
