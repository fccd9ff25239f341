"""The Ray cluster of a run: connected to, or started on this machine."""

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from mrl.config.secrets import ENGINE_KEY, engine_key
from mrl.core.errors import ProcessesLostError

# FROM: Whether every node of a job is in its Ray cluster: `python -m mrl.placement.ray_cluster ADDRESS TIMEOUT_S NODE...`.

# One thread per process: ranks and engines share the cores, and GNU OpenMP's waiting threads would burn them.
# Ray's processes take other titles: they must keep the environment that they are found by (setproctitle's SPT_NOENV).
PROCESS_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
PROCESS_ENV |= {"SPT_NOENV": "1"}


@contextmanager
def ray_cluster(address: str | None, num_slots: int | None = None) -> Iterator[dict[str, Any]]:
    """Connect to the cluster at `address`, or run one on this machine; yields Ray actor options for a GPU process in no pool.

    `num_slots`: what the pools of a run on this machine need. Ray counts them as CPUs: a slot is a place for a process,
    however many cores there are. Without GPUs a process in no pool asks for no resource. Raises ProcessesLostError when a cluster on this
    machine does not come up.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    engine_key()  # made here, for every process of the run
    quiet: dict[str, Any] = dict(logging_level=logging.ERROR, log_to_driver=False)
    heeded = signal.getsignal(signal.SIGTERM)
    if address:
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = PROCESS_ENV | {"PYTHONPATH": os.pathsep.join(paths)}
        # The key goes as a function: Ray writes the variables of a runtime environment to its logs.
        ray.init(address=address, runtime_env={"env_vars": env, "worker_process_setup_hook": _key_setter()}, **quiet)
    else:
        os.environ.update(PROCESS_ENV)  # inherited by every process of a local cluster
        _close_to_others()
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers are the job here, not a guest on the machine
        plain = dict(include_dashboard=False, object_store_memory=512 * 1024**2)
        try:
            ray.init(address="local", num_cpus=num_slots, **plain, **quiet)
        except ValueError:
            raise
        except Exception as error:  # Ray's own is a bare Exception
            raise ProcessesLostError(f"a process of Ray was gone before it was up: {error}") from error
    if heeded is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, heeded)  # Ray's own handler, set meanwhile, would abort this process
    try:
        yield dict(num_gpus=1) if ray.cluster_resources().get("GPU", 0) else dict(num_cpus=0)
    finally:
        ray.shutdown()


def _close_to_others() -> None:
    """Have the local cluster, and what gloo opens in it, listen on loopback only, and Ray ask for a token.

    Ray's switch was made for other systems' firewalls. It is read where Ray is imported: here, and in every child. Ray asks
    for a token by itself, unless RAY_AUTH_MODE says otherwise; without one it would leave one in a file that others can read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _key_setter() -> Callable[[], None]:
    """Run first in each worker process of a cluster that was there before us."""
    key = engine_key()

    def take_engine_key() -> None:
        os.environ[ENGINE_KEY] = key

    return take_engine_key


LOOK_S = 0.5  # between looks


def missing(expected: Collection[str], alive: Callable[[], Collection[str]], timeout_s: float) -> list[str]:
    """Names of nodes that are not alive by then; none as soon as all are."""
    end = time.monotonic() + timeout_s
    while (left := set(expected).difference(alive())) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return [name for name in expected if name in left]


def _alive_in(address: str) -> Callable[[], set[str]]:
    """A look at the cluster, with which this process is connected at the first that succeeds."""

    def look() -> set[str]:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError):  # it is not up yet
            return set()
        return {node["NodeName"] for node in ray.nodes() if node["Alive"]}

    return look


def main(argv: list[str]) -> int:
    """Entry point; the exit status is 0 when all are there."""
    address, timeout_s, *nodes = argv
    begun = time.monotonic()
    if left := missing(nodes, _alive_in(address), float(timeout_s)):
        sys.stdout.write(
            f"{len(left)} of {len(nodes)} nodes are not in the Ray cluster at {address} after {timeout_s} s: {', '.join(left)}; "
            "logs/ray_NODE.log in the run's folder says what each did.\n"
        )
        return 1
    sys.stdout.write(f"{len(nodes)} nodes are in the Ray cluster at {address} after {time.monotonic() - begun:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
