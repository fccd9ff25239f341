"""Connects to an existing Ray cluster, or starts one on this machine.

`python -m mrl.placement.ray_cluster ADDRESS TIMEOUT_S NODE...` waits until all nodes have joined the cluster. Slurm jobs run this
command before the driver.

A Ray cluster that mrl starts has a private folder for its logs, sockets and other files. Ray gives its folders the mode 777, so
other users of the machine could read the logs and replace the sockets. Therefore mrl puts Ray's folder into a folder that only
the user of the run can enter.
"""

import inspect
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray._private import (
    parameter,  # private: ray.init has no arguments for the flags of `ray start` that `_local_start` sets
    ray_constants,  # private: Ray has no public way to bind a local cluster to loopback
    services,  # private: Ray has no setting for the times that a node and its agents may take to start
)

# private: Ray compares the object store's size with the result of this function
from ray._private.utils import estimate_available_memory
from ray._raylet import (  # private: `_local_start` writes the ports of Ray's agents to files
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)
from ray.job_config import JobConfig

from mrl.config.process_schema import ClusterConfig
from mrl.config.ray_settings import init_arguments
from mrl.config.secrets import ENGINE_KEY, ENGINE_KEYS, engine_key
from mrl.core.code_locations import environment_variables, import_environment, python_path
from mrl.core.processes import PortLease, shutdown_deadline
from mrl.core.run_errors import ProcessesLostError
from mrl.hang_report.network_interfaces import INTERFACE_VARIABLES, LOOPBACK, interface_variables, network_variables

# How long the node of a local cluster may take to start. Ray's own limit, 30 s, is too short on a busy machine.
NODE_START_S = 120.0

MAX_PATH_BYTES = 41
"""Largest length of the path of Ray's folder.

The path of a Unix socket has at most 107 bytes, and the names that Ray appends (session_DATE_TIME_PID/sockets/plasma_store.N)
have up to 66 bytes.
"""

RAY = "r"
"""Name of Ray's folder. It is short, because it is a part of the path of each socket."""


def private_ray_folder() -> Path:
    """Return the path of Ray's folder, whose parent has the mode 700. Create the parent if it is missing.

    The parent is RAY_TMPDIR itself if only this user can enter it. Otherwise the parent is mrl-ray-UID in RAY_TMPDIR. If
    RAY_TMPDIR is not set, the parent is mrl-ray-UID in the folder of temporary files, or in /tmp if the path would be too long
    for sockets. Raises ValueError if RAY_TMPDIR is too long, or if another user has created mrl-ray-UID or could access it.
    """
    chosen, name = os.environ.get("RAY_TMPDIR"), f"mrl-ray-{os.getuid()}"
    base = Path(chosen or tempfile.gettempdir()).absolute()
    path = base / RAY if chosen and _is_private(base) else base / name / RAY
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        if chosen:
            raise ValueError(
                f"RAY_TMPDIR={chosen}: the path of Ray's folder {path} has {len(os.fsencode(path))} bytes; it may have at "
                f"most {MAX_PATH_BYTES}, so that Ray can create sockets in it. Set RAY_TMPDIR to a shorter path, or, if you own "
                "this folder, run `chmod 700` on it; the path is then shorter."
            )
        path = Path("/tmp") / name / RAY
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        found = folder.lstat()
        raise ValueError(
            f"{folder}, the folder for Ray's logs and sockets, has the mode {stat.filemode(found.st_mode)} and the owner "
            f"{found.st_uid}; expected a folder with the mode drwx------ and the owner {os.getuid()}. Remove it, or set "
            "RAY_TMPDIR to another folder."
        )
    return path  # Ray creates this folder with the mode 777; the parent keeps other users out


def _is_private(folder: Path) -> bool:
    """Return whether `folder` is a folder and not a link, belongs to this user, and gives other users no permission."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


# OMP_WAIT_POLICY: ranks and engines share the cores, and by default the idle threads of GNU OpenMP busy-wait.
# THP_MEM_ALLOC_ENABLE: torch allocates large tensors in huge pages, so that the kernel spends less time on page faults.
# TOKENIZERS_PARALLELISM: tokenizers of Hugging Face start no threads. With threads, they warn when the process forks.
# CUDA_DEVICE_MAX_CONNECTIONS: with 1, a GPU starts kernels in the order of the launches. So a collective that Megatron launches
# first also starts before the matrix product with which it overlaps.
# SPT_NOENV: setproctitle, with which Ray renames its processes, must not overwrite their environment. mrl finds the processes
# of a run by their environment.
PROCESS_ENV = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
PROCESS_ENV |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "SPT_NOENV": "1"}
SHARED_MEMORY = Path("/dev/shm")  # folder in which Ray creates the object store
MIN_OBJECT_STORE_BYTES = 512 * 1024**2  # smallest object store of a local cluster
POLL_INTERVAL_S = 0.2  # time between two questions whether nodes have started


def copy_for_actor[T](value: T) -> T:
    """Return the copy of a value that an actor would get. Raises the errors of pickling."""
    return cloudpickle.loads(cloudpickle.dumps(value))


class _RunJobConfig(JobConfig):
    """Job config with which Ray does not put the driver's working directory in front of the `sys.path` of worker processes.

    At the front, a user's module such as `parallel.py` would hide a package of mrl. Instead, mrl appends the directory to
    `sys.path` when mrl is imported (mrl.core.code_locations).
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


@contextmanager
def ray_cluster(
    cluster: ClusterConfig, num_slots: int | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """Connect to the cluster at `cluster.address`, or start a cluster on this machine if the address is None.

    Yields Ray actor options for processes that are in no pool: one GPU if the cluster has GPUs, else no resources. `num_slots`:
    number of slots that the run's pools need on this machine. A cluster on this machine gets one Ray CPU for each slot,
    independently of the number of cores; if `num_slots` is None, it gets one for each core. `variables`: further environment
    variables for every process of the run. All processes also get the network variables of this process.

    Raises ProcessesLostError if the local cluster does not start, and ValueError if the folder for its files is not private.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    engine_key()  # generates the key, so that every process of the run inherits the same key
    settings: dict[str, Any] = dict(logging_level=logging.ERROR, log_to_driver=False)
    settings |= init_arguments(cluster.ray, connect=cluster.address is not None)
    since = time.time()
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    process_env = PROCESS_ENV | {"OMP_NUM_THREADS": str(cluster.cpu_threads)}
    further = import_environment() | dict(variables or {})
    with ExitStack() as stack:
        if cluster.address:
            env = process_env | network_variables(os.environ) | further | {"PYTHONPATH": python_path()}
            ray.init(
                address=cluster.address,
                runtime_env={"env_vars": env, "worker_process_setup_hook": _worker_setup()},
                job_config=_RunJobConfig(),
                **settings,
            )
        else:
            os.environ.update(process_env)  # every process of a local cluster inherits these variables
            _restrict_to_loopback()
            lease = stack.enter_context(closing(PortLease()))  # for Ray's agent, until Ray has ended
            os.environ.setdefault("RAY_worker_niceness", "0")  # Ray lowers the priority of workers by default
            store = object_store_bytes(estimate_available_memory(), _free_bytes(SHARED_MEMORY))
            plain = dict(include_dashboard=False, _temp_dir=str(private_ray_folder()))
            settings = dict(object_store_memory=store) | settings
            try:
                with environment_variables(further), _local_start(bool(settings["log_to_driver"]), lease.port):
                    ray.init(address="local", num_cpus=num_slots, job_config=_RunJobConfig(), **plain, **settings)
            except ValueError:
                raise
            except Exception as error:  # Ray raises a bare Exception
                logs = Path(plain["_temp_dir"]) / "session_latest/logs"
                raise ProcessesLostError(
                    f"Ray did not start on this machine: {error} Ray's logs are in {logs}."
                ) from error
        if sigterm_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm_handler)  # ray.init installs a handler that would abort this process
        try:
            yield dict(num_gpus=1) if ray.cluster_resources().get("GPU", 0) else dict(num_cpus=0)
        finally:
            with shutdown_deadline("Ray", since):
                ray.shutdown()


def cluster_hosts() -> list[dict[str, Any]]:
    """Return name, CPUs and GPUs of each live node of the cluster to which this process is connected."""
    return [
        dict(
            name=node["NodeManagerHostname"],
            cpus=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def object_store_bytes(memory: int, shared_memory: int) -> int:
    """Return the size of a local cluster's object store, in bytes.

    `memory`: free memory of the machine (bytes). `shared_memory`: free space of /dev/shm (bytes).

    The store gets a tenth of the memory, but at most half of the free space of /dev/shm, because engines and NCCL have buffers
    there, too. It gets at least MIN_OBJECT_STORE_BYTES. If the store does not fit in /dev/shm, Ray puts it on the disk. The store
    uses memory only for the objects in it.
    """
    return max(MIN_OBJECT_STORE_BYTES, min(memory // 10, shared_memory // 2))


def _free_bytes(folder: Path) -> int:
    """Return the free space of a folder, or 0 if the folder does not exist."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


@contextmanager
def _local_start(log_to_driver: bool, agent_port: int) -> Iterator[None]:
    """In this context, ray.init starts no autoscaler, and it starts a log monitor only if `log_to_driver` is true.

    A cluster on one machine never grows. The two processes would take about 4 CPU-seconds at the start of each run. The context
    does what the flags --no-monitor and --include-log-monitor of `ray start` do.

    Also, Ray's main process on the node, raylet, does not wait for its two agents, which are Python programs. It would end if the
    agents did not write their ports to files within 15 s (issue 65983 of Ray), as on a busy machine or a slow disk. Therefore
    this context writes these files before raylet starts. The port -1 says that no process uses the dashboard agent. `agent_port`:
    a free port for the other agent, which sets up runtime environments.

    ray.init waits for the node up to NODE_START_S seconds, but not longer than raylet lives.
    """
    raylets: list[subprocess.Popen[bytes]] = []
    params, start, get_node = parameter.RayParams, services.start_raylet, services.get_node

    def start_raylet(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(start).bind(*arguments, **options).arguments
        ports = {METRICS_AGENT_PORT_NAME: -1, METRICS_EXPORT_PORT_NAME: -1, DASHBOARD_AGENT_LISTEN_PORT_NAME: -1}
        for name, port in (ports | {RUNTIME_ENV_AGENT_PORT_NAME: agent_port}).items():
            persist_port(given["session_dir"], given["node_id"], name, port)
        info = start(*arguments, **options)
        raylets.append(info.process)
        return info

    def wait_for_node(*arguments: Any) -> Any:
        end = time.monotonic() + NODE_START_S
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError as error:
                # The node has not registered itself. The errors below are no RuntimeErrors, because Ray would call this again.
                if ended := [raylet.returncode for raylet in raylets if raylet.poll() is not None]:
                    raise ChildProcessError(f"raylet ended with status {ended[0]}; raylet.err says why.") from error
                if time.monotonic() > end:
                    raise TimeoutError(f"raylet did not register its node within {NODE_START_S:g} s.") from error
            time.sleep(POLL_INTERVAL_S)

    parameter.RayParams = partial(
        params, no_monitor=True, include_log_monitor=log_to_driver, runtime_env_agent_port=agent_port
    )
    services.start_raylet, services.get_node = start_raylet, wait_for_node
    try:
        yield
    finally:
        parameter.RayParams, services.start_raylet, services.get_node = params, start, get_node


def _restrict_to_loopback() -> None:
    """Bind the local cluster, and the sockets of NCCL and gloo, to the loopback interface, and set Ray's authentication token.

    Ray has a setting, meant for the firewalls of Windows and macOS, that binds a cluster to loopback. Ray reads this setting on
    import. So this function changes the setting both in Ray's module and in the environment of child processes. Ray also requires
    a token if RAY_AUTH_MODE does not disable tokens. Without RAY_AUTH_TOKEN, Ray would write a token to a file that other users
    can read.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    for name in INTERFACE_VARIABLES.values():
        os.environ.setdefault(name, LOOPBACK)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _worker_setup() -> Callable[[], None]:
    """Return a function that each worker process of an existing cluster runs first. It sets variables of the worker process.

    The engine keys are not in `env_vars` of the runtime environment, because they would appear in Ray's logs. The names of
    network interfaces are not there either, because a node must keep the names that were set when Ray was started on it.
    """
    keys = {ENGINE_KEY: engine_key()} | {name: os.environ[name] for name in (ENGINE_KEYS,) if name in os.environ}
    interfaces = interface_variables(os.environ)

    def set_variables() -> None:
        os.environ.update(keys)
        for name, value in interfaces.items():
            os.environ.setdefault(name, value)

    return set_variables


def missing_nodes(expected: Collection[str], alive: Callable[[], Collection[str]], timeout_s: float) -> list[str]:
    """Wait until all expected nodes are alive, for at most `timeout_s`. Returns the names of the nodes that are not alive."""
    end = time.monotonic() + timeout_s
    while (missing := set(expected).difference(alive())) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
    return [name for name in expected if name in missing]


def _alive_nodes_at(address: str) -> Callable[[], set[str]]:
    """Return a function that lists the names of the cluster's live nodes. A call first connects if there is no connection."""

    def alive() -> set[str]:
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError):  # the cluster is not ready yet
            return set()
        return {node["NodeName"] for node in ray.nodes() if node["Alive"]}

    return alive


def main(argv: list[str]) -> int:
    """Wait until all nodes have joined. Returns the exit status: 0, or 1 if a node has not joined before the timeout."""
    address, timeout_s, *nodes = argv
    start = time.monotonic()
    if missing := missing_nodes(nodes, _alive_nodes_at(address), float(timeout_s)):
        sys.stdout.write(
            f"{len(missing)} of {len(nodes)} nodes are not in the Ray cluster at {address} after {timeout_s} s: "
            f"{', '.join(missing)}; see logs/ray_NODE.log in the run directory.\n"
        )
        return 1
    sys.stdout.write(f"{len(nodes)} nodes are in the Ray cluster at {address} after {time.monotonic() - start:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
