"""SGLang servers. The processes of an EngineServer end when this process ends. An ExternalEngine is a server of the user.

An EngineServer reserves its ports and its scratch directory. Each reservation is a lock on a file. The kernel releases the lock
when the supervisor of the server has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from mrl.config.secrets import engine_key
from mrl.core.processes import PortLease
from mrl.rollout.engines.server_args import DETERMINISTIC, NO_TOKENIZER, releases_cuda_graphs
from mrl.weight_sync.engine_control import EngineControl

SCRATCH_PREFIX = "mrl-engine-"  # beginning of the name of every scratch directory
LOCK_FILE = "held"  # file in the scratch directory that is locked while the supervisor of the server lives
SHARED_MEMORY_LIST = "shared_memory"  # file that lists the server's files in /dev/shm; also in server_supervisor.py
MAX_PARENT_LENGTH = 60
"""Scratch directories are in the temporary folder if its path has fewer characters than this, and otherwise in /tmp.

SGLang creates Unix sockets in the scratch directory, and the path of a Unix socket has at most 107 characters.
"""


class ScratchDir:
    """Temporary directory of one server, with a lock file that shows that the directory is in use.

    The supervisor of the server removes the directory. If the supervisor was killed, the next ScratchDir on this machine removes
    the directory. The lock belongs to the file descriptor `fd`: the directory is in use while a process has this descriptor open.
    """

    def __init__(self) -> None:
        """Create the directory. Also remove the scratch directories that no process uses any more."""
        parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_PARENT_LENGTH else "/tmp")
        for folder in parent.glob(f"{SCRATCH_PREFIX}*"):
            with contextlib.suppress(OSError):  # the folder belongs to another user, or another process has removed it
                if not _is_in_use(folder):
                    remove_scratch(folder)
        self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=parent))
        new_lock = self.path / "new"
        self.fd = os.open(new_lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file gets its final name only after it is locked, so that other processes never see the lock file unlocked.
        new_lock.rename(self.path / LOCK_FILE)

    def hand_over(self) -> None:
        """Close this process's descriptor. The directory stays in use while the supervisor has its inherited copy open."""
        os.close(self.fd)

    def remove(self) -> None:
        """Remove the directory if it exists."""
        if self.path.exists():
            remove_scratch(self.path)


def _is_in_use(folder: Path) -> bool:
    """Return whether a process uses the directory. A directory without a lock file is new, and counts as in use."""
    try:
        file = (folder / LOCK_FILE).open("rb+")
    except FileNotFoundError:
        return True
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_scratch(folder: Path) -> None:
    """Remove a scratch directory, and the files in shared memory that its server has listed in SHARED_MEMORY_LIST."""
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / SHARED_MEMORY_LIST).read_text().splitlines():
            path = Path(line)
            if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_"):
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


POLL_INTERVAL_S = 0.05  # seconds between two checks whether an EngineServer is ready
EXTERNAL_POLL_INTERVAL_S = 0.2  # seconds between two checks whether an ExternalEngine is ready
WARM_UP_TIMEOUT_S = (
    "86400"  # seconds; SGLang's limit for its warm-up request. mrl stops waiting earlier, after cluster.start_timeout_s
)
LOG_TAIL_BYTES = 4000  # length of the part of the log that an error message quotes


class EngineServer:
    """One server in its own process session. A supervisor ends the server when this process ends, even by SIGKILL.

        with EngineServer(default_server_args("float32", 512) | {"model_path": path}, log_path) as server:
            server.wait_ready(timeout_s=120)
            client = EngineClient(server.url)

    `start()` does not wait, so that several servers and the trainer can start at the same time.
    """

    def __init__(
        self,
        server_args: Mapping[str, Any],
        log_path: str | Path,
        *,
        env: Mapping[str, str] | None = None,
        grace_s: float = 1.0,
    ) -> None:
        """Reserve the ports of the server. `start` starts the server.

        Args:
            server_args: fields of SGLang's ServerArgs, at least `model_path`. The default of `host` is the loopback address.
            log_path: file for the output of the server.
            env: environment variables that the server gets in addition to those of this process.
            grace_s: seconds between SIGTERM and SIGKILL in `stop()`.
        """
        self._leases = [PortLease(), PortLease()]
        self.port = self._leases[0].port
        self.server_args: dict[str, Any] = {"host": "127.0.0.1"} | dict(server_args)
        self.server_args |= {"port": self.port, "nccl_port": self._leases[1].port}
        self.log_path = Path(log_path)
        self.grace_s = grace_s
        self._extra_env = dict(env or {})
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._scratch: ScratchDir | None = None

    @property
    def url(self) -> str:
        """URL of the server. The server listens there when it is ready."""
        return f"http://{self.server_args['host']}:{self.port}"

    def start(self) -> None:
        """Start the server's processes. Returns before the server is ready."""
        assert self._supervisor is None, f"the server at {self.url} was already started"
        self._scratch = ScratchDir()
        arguments = self._scratch.path / "server_args.json"
        # The file contains the API key. Only this user can read the directory.
        arguments.write_text(json.dumps(self.server_args | {"api_key": engine_key()}))
        spec = dict(
            command=[sys.executable, "-P", "-m", "mrl.rollout.engines.launch_sglang", str(arguments)],
            env=self._environment(self._scratch.path),
            cwd=os.getcwd(),
            scratch=str(self._scratch.path),
            grace_s=self.grace_s,
        )
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("server_supervisor.py"))],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lease.fd for lease in self._leases] + [self._scratch.fd],
            )
        assert self._supervisor.stdin is not None
        self._supervisor.stdin.write(json.dumps(spec).encode() + b"\n")
        self._supervisor.stdin.flush()
        for lease in self._leases:
            lease.close()
        self._scratch.hand_over()

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Return the environment variables of the server."""
        env = os.environ | {
            "TMPDIR": str(scratch),  # SGLang does not remove its socket files; they are removed with this directory
            "MRL_ENGINE_SCRATCH": str(scratch),  # see launch_sglang.list_shared_memory_file
            "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",  # seconds; clients keep idle connections open between steps
            "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",  # seconds until SGLang notices that a client has disconnected
            "SPT_NOENV": "1",  # otherwise setproctitle overwrites the environment variables by which mrl finds processes
            "MASTER_ADDR": "127.0.0.1",  # SGLang names its shared-memory files after this address and this port
            "MASTER_PORT": str(self._leases[1].port),
        }
        if "dist_init_addr" not in self.server_args:  # all ranks are on this node
            # The ranks meet through a file, because torch's TCP store would listen on every network interface and unpickle
            # what it receives.
            env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/rendezvous"
        if releases_cuda_graphs(self.server_args):
            # Otherwise the memory of CUDA graphs stays allocated while the engine is offloaded.
            env.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        # Without cached byte code, each import of SGLang takes 12 more CPU-seconds.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
        if self.server_args.get("device") == "cuda":
            env["SGLANG_WARMUP_TIMEOUT"] = WARM_UP_TIMEOUT_S
            env |= cuda_compiler_env(env, scratch / "cuda_libraries")
        if self.server_args.get("device") == "cpu":
            env |= {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"), "OPENBLAS_NUM_THREADS": "1"}
            if not self.server_args.get("enable_torch_compile"):
                # Otherwise SGLang imports torch's compiler, which it does not use.
                env.setdefault("TORCHDYNAMO_DISABLE", "1")
            cores, ranks = sorted(os.sched_getaffinity(0)), int(self.server_args.get("tp_size", 1))
            if ranks > 1:  # SGLang requires one binding to CPU cores per rank
                bindings = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
                env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bindings)
        # SPT_NOENV must be the first variable: setproctitle finds the command line in memory only while the first variable keeps
        # its value, and SGLang changes other variables.
        return {"SPT_NOENV": env.pop("SPT_NOENV")} | env | self._extra_env

    def alive(self) -> bool:
        """Return whether the server's processes run. The server may not be ready for requests yet."""
        return self._supervisor is not None and self._supervisor.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the server or its supervisor."""
        return self._supervisor is not None and self._supervisor.poll() in (signal.SIGKILL, -signal.SIGKILL)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests.

        Raises RuntimeError if the server ended, and TimeoutError if it is not ready after `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_ready():
            server = f"the SGLang server at {self.url}"
            if not self.alive():
                raise RuntimeError(f"{server} ended before it was ready; {self._log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{server} was not ready after {timeout_s} s; {self._log_tail()}")
            time.sleep(POLL_INTERVAL_S)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _log_tail(self) -> str:
        text = self.log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log_path.exists() else ""
        return f"{self.log_path} ends with:\n{text}"

    def cpu_seconds(self) -> float:
        """Return the CPU seconds, user and system, of the server's running processes and of their children that have ended."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def processes(self) -> list[psutil.Process]:
        """Return the supervisor and all its descendants; an empty list if the server was not started."""
        if self._supervisor is None:
            return []
        with contextlib.suppress(psutil.Error):
            supervisor = psutil.Process(self._supervisor.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []

    def stop(self, timeout_s: float = 20.0) -> None:
        """Let the supervisor end the server with SIGTERM, and with SIGKILL after `grace_s` seconds. May be called twice.

        If the supervisor has not ended after `timeout_s` seconds, the supervisor and all processes of the server get SIGKILL.
        """
        for lease in self._leases:
            lease.close()
        if self._supervisor is None:
            return
        processes = self.processes()
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()  # the supervisor ends the server when its stdin closes
        try:
            self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            self._supervisor.wait(timeout_s)
        if self._scratch is not None:
            self._scratch.remove()  # does nothing if the supervisor has removed the directory

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def listen_address() -> str:
    """Return the address on which engines of this process listen.

    If this process is in no Ray cluster, or if the cluster has one node, this is the loopback address. Otherwise it is the
    address of this node.
    """
    ray = sys.modules.get("ray")  # a process that has not imported Ray is in no cluster
    if ray is None or not ray.is_initialized():
        return "127.0.0.1"
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ray.util.get_node_ip_address() if len(nodes) > 1 else "127.0.0.1"


def cuda_compiler_env(env: Mapping[str, str], libraries: Path) -> dict[str, str]:
    """Return variables with which FlashInfer and other packages find the CUDA compiler that the locked requirements install.

    These packages compile kernels when they are first used. They look for a CUDA toolkit in CUDA_HOME, and link with -lcudart and
    -lcuda. NVIDIA's packages contain only names such as libcudart.so.13, so this function creates the folder `libraries` with the
    names that the linker looks for. Returns {} if `env` names a toolkit, or if the package nvidia-cuda-nvcc is not installed.
    """
    toolkit = locked_cuda_toolkit()
    if env.get("CUDA_HOME") or env.get("CUDA_PATH") or toolkit is None:
        return {}
    libraries.mkdir()
    for file in (toolkit / "lib").glob("lib*.so.*"):
        link = libraries / f"{file.name.partition('.so.')[0]}.so"
        if not link.exists():
            link.symlink_to(file)
    (libraries / "libcuda.so").write_text("INPUT(-l:libcuda.so.1)\n")  # a linker script; the driver has libcuda.so.1

    def prepend(name: str, *folders: Path) -> str:
        return os.pathsep.join([*map(str, folders), *filter(None, [env.get(name)])])

    return {
        "CUDA_HOME": str(toolkit),
        "PATH": prepend("PATH", toolkit / "bin", Path(sys.executable).parent),  # nvcc and ninja
        "LIBRARY_PATH": prepend("LIBRARY_PATH", libraries),
        # g++ needs this variable, because only nvcc adds this folder by itself.
        "CPLUS_INCLUDE_PATH": prepend("CPLUS_INCLUDE_PATH", toolkit / "include" / "cccl"),
    }


def locked_cuda_toolkit() -> Path | None:
    """Return the folder with the compiler and headers of NVIDIA's packages on PyPI; None if these packages have no compiler."""
    spec = find_spec("nvidia")
    folders = map(Path, spec.submodule_search_locations or ()) if spec else ()
    compilers = [nvcc for folder in folders for nvcc in sorted(folder.glob("cu*/bin/nvcc"))]
    return compilers[-1].parents[1] if compilers else None


def check_seed_support(control: EngineControl, key: str) -> None:
    """Raise ValueError if an external server ignores the seeds of requests. `key`: config key that needs the seeds."""
    if not control.server_info().get(DETERMINISTIC):
        raise ValueError(
            f"rollout.engine_urls: {control.url} was started without --enable-deterministic-inference and ignores seeds; "
            f"start the server with this option, or set {key}=false."
        )


def check_stop_support(control: EngineControl) -> None:
    """Raise ValueError if an external server cannot find stop texts."""
    if control.server_info().get(NO_TOKENIZER):
        raise ValueError(
            f"rollout.engine_urls: {control.url} was started with --skip-tokenizer-init and cannot find the texts of `stop`; "
            "start the server without this option, or use stop_token_ids."
        )


class ExternalEngine:
    """A server that the user starts and ends. It has the methods of EngineServer that the engine pool calls."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests. Raises TimeoutError if it does not answer within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with EngineControl(self.url) as control:
            while not control.health():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rollout.engine_urls: {self.url} did not answer within {timeout_s} s.")
                time.sleep(EXTERNAL_POLL_INTERVAL_S)

    def alive(self) -> bool:
        """Return True, because mrl does not know the server's processes and a failed server may recover."""
        return True

    def stop(self) -> None:
        """Do nothing, because the user ends the server."""

    def cpu_seconds(self) -> float:
        """Return 0, because mrl does not know the server's processes."""
        return 0.0
