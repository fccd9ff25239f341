"""Where processes run, and the phases of a step: who uses the hardware now, and for how long."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

# One thread per process: ranks and engines share the cores, and GNU OpenMP's waiting threads would burn them.
PROCESS_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@contextmanager
def ray_cluster(address: str | None) -> Iterator[dict[str, Any]]:
    """Connect to the cluster at `address`, or run one on this machine; yields Ray actor options for a GPU process.

    On a machine without GPUs a process asks for no resource: it is one rank, and ranks share the cores.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = dict(logging_level=logging.ERROR, log_to_driver=False)
    if address:
        checkout = str(Path(__file__).resolve().parent.parent)
        env = PROCESS_ENV | {"PYTHONPATH": checkout}
        ray.init(address=address, runtime_env={"env_vars": env}, **quiet)
    else:
        os.environ.update(PROCESS_ENV)  # inherited by every process of a local cluster
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers are the job here, not a guest on the machine
        ray.init(address="local", include_dashboard=False, object_store_memory=512 * 1024**2, **quiet)
    try:
        yield dict(num_gpus=1) if ray.cluster_resources().get("GPU", 0) else dict(num_cpus=0)
    finally:
        ray.shutdown()


class Phases:
    """Names and times the phases of a step. Colocated engines and trainers share their device by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """`time/<phase>_s` of the phases since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
