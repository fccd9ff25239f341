"""Facts about this host apart from its network: cores, memory, limits, environment, Ray's token, software, folders and GPUs.

nvidia-smi supplies the facts about the GPUs: cards, driver, and the links between cards.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from mrl.core.code_locations import DATA_ROOT, PACKAGE_ROOT
from mrl.doctor.host_facts import FolderFacts, GpuCard, HostGpus, MachineFacts, RayAuthFacts, SoftwareFacts
from mrl.hang_report.network_interfaces import NETWORK_PREFIXES

CPU_LOCK_FILE, GPU_LOCK_FILE = "requirements.txt", "requirements-gpu.txt"
# Packages whose tested versions are in the lock files; TESTED_GPU: on hosts with GPUs
TESTED = ("torch", "ray", "sglang", "megatron-core", "transformers", "numpy")
TESTED_GPU = (*TESTED, "transformer-engine", "transformer-engine-torch", "nvidia-nccl-cu13")
CUDA_RUNTIME = "nvidia-cuda-runtime"  # package whose version is the CUDA version of torch
# Only NVIDIA's Apex has this subpackage. The package apex of PyPI is a library for web forms.
NVIDIA_APEX_PART = "multi_tensor_apply"
APEX_EXTENSIONS = ("amp_C", "fused_weight_gradient_mlp_cuda")  # compiled modules of NVIDIA's Apex that Megatron can use

# name of a resource limit -> its constant in the module resource
LIMITS = dict(nofile=resource.RLIMIT_NOFILE, nproc=resource.RLIMIT_NPROC, memlock=resource.RLIMIT_MEMLOCK)
# environment variables that are read: VARIABLES, PROXIES, and all variables that begin with one of NETWORK_PREFIXES
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "HF_HUB_OFFLINE",
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
UNLIMITED_BYTES = 2**60  # version 1 of control groups reports a very large number if there is no limit
SAMPLE_BYTES = 32 * 2**20  # size of the file that is written to measure the write speed of a folder
FOLDER_TIMEOUT_S = 30.0  # longest wait for the process that measures a folder

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s\\;]+)", re.MULTILINE)  # PACKAGE==VERSION in a lock file

# This program runs in a separate process, because a network file system that hangs blocks every process that accesses it.
_PROBE_FOLDER = """
import json, os, sys, time

def waited():  # seconds that this process waited for a core; subtracted, because the disk did not cause them
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

path, size = sys.argv[1], int(sys.argv[2])
stats = os.statvfs(path)
result = dict(total=stats.f_blocks * stats.f_frsize, free=stats.f_bavail * stats.f_frsize,
              inodes=stats.f_favail if stats.f_files else None, error="", speed=None)
name = os.path.join(path, f".mrl-doctor-{os.getpid()}")
try:
    with open(name, "xb", buffering=0) as file:
        os.unlink(name)
        size = min(size, result["free"] // 4)
        block, written, begun = os.urandom(2**20), 0, time.perf_counter() - waited()
        while written < size:
            written += file.write(block)
        os.fsync(file.fileno())
        took = max(1e-9, time.perf_counter() - waited() - begun)
        result["speed"] = written / took if written else None
except OSError as error:
    result["error"] = error.strerror
print(json.dumps(result))
"""


def read_machine() -> MachineFacts:
    """Read this host's cores and memory, and how much of them this process may use."""
    memory = psutil.virtual_memory()
    return MachineFacts(
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit_bytes=memory_limit(),
        overcommit=int(_read_text(Path("/proc/sys/vm/overcommit_memory")) or 0),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
    )


def memory_limit(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the smallest memory limit of this process's control groups and their parents, in bytes; None if none has a limit."""
    limits = []
    for line in _read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if controllers == "memory" else root
        name = "memory.limit_in_bytes" if controllers == "memory" else "memory.max"
        if controllers in ("", "memory"):
            group = base / path.lstrip("/")
            limits += [_read_text(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(base)]
    numbers = [int(text) for text in limits if text.isdigit() and int(text) < UNLIMITED_BYTES]
    return min(numbers, default=None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_limits() -> dict[str, tuple[int, int]]:
    """Read this process's resource limits: name -> (soft, hard); -1 means no limit."""
    return {name: resource.getrlimit(constant) for name, constant in LIMITS.items()}


def read_environment() -> dict[str, str]:
    """Read the variables that configure the libraries of a run.

    The value of a proxy variable is replaced by "set", because it may contain a password. Only no_proxy keeps its value.
    """
    found = {
        name: value for name, value in os.environ.items() if name.startswith(NETWORK_PREFIXES) or name in VARIABLES
    }
    for name in PROXIES:
        value = os.environ.get(name) or os.environ.get(name.upper())
        if value:
            found[name] = value if name == "no_proxy" else "set"
    return found


def read_token() -> RayAuthFacts:
    """Find Ray's token where Ray looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    mode, text = os.environ.get("RAY_AUTH_MODE", "").lower(), os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if text:
        return RayAuthFacts(mode, _digest(text), "RAY_AUTH_TOKEN")
    path_variable = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(path_variable) if path_variable else Path.home() / ".ray/auth_token"
    text = _read_text(path)
    if not text:
        return RayAuthFacts(mode, "", str(path) if path_variable else "")
    return RayAuthFacts(mode, _digest(text), str(path), _is_world_readable(path.absolute()))


def _is_world_readable(path: Path) -> bool:
    """Return whether the permissions of a file and of all folders above it let other users read the file."""
    return bool(path.stat().st_mode & stat.S_IROTH) and all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)


def _digest(text: str) -> str:
    """Return a checksum that is long enough to compare the tokens of two hosts, and too short to reveal the token."""
    return hashlib.sha256(b"mrl doctor" + text.encode()).hexdigest()[:6]


def read_pins(lock: str, folder: Path = DATA_ROOT) -> dict[str, str]:
    """Read the versions in a lock file: package -> version. Returns {} if there is no such file."""
    path = folder / lock
    return {name.lower(): version for name, version in _PIN.findall(path.read_text())} if path.is_file() else {}


def locked_versions(gpu: bool, folder: Path = DATA_ROOT) -> dict[str, str]:
    """Return the tested versions for hosts with or without GPUs: package -> version."""
    pins = read_pins(GPU_LOCK_FILE if gpu else CPU_LOCK_FILE, folder)
    return {name: pins[name] for name in (TESTED_GPU if gpu else TESTED) if name in pins}


def locked_cuda(folder: Path = DATA_ROOT) -> tuple[int, int]:
    """Return the version (major, minor) of the CUDA runtime in the lock file; (0, 0) if there is no lock file."""
    major, minor, *_ = read_pins(GPU_LOCK_FILE, folder).get(CUDA_RUNTIME, "0.0").split(".")
    return int(major), int(minor)


def read_software(package_root: Path = PACKAGE_ROOT) -> SoftwareFacts:
    """Read the versions of Python and the tested packages, and a checksum of mrl's code, without importing the packages."""
    packages = {name: _installed_version(name) for name in TESTED_GPU}
    apex = [name for name in APEX_EXTENSIONS if PathFinder.find_spec(name)]
    return SoftwareFacts(platform.python_version(), packages, source_checksum(package_root), foreign_apex(), apex)


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def foreign_apex() -> str | None:
    """Return the folder of the package that `import apex` would find, if it is not NVIDIA's Apex. Otherwise return None."""
    spec = PathFinder.find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    is_nvidia = any((folder / NVIDIA_APEX_PART).is_dir() for folder in folders)
    return str(folders[0]) if folders and not is_nvidia else None


def source_checksum(package_root: Path) -> str:
    """Return a checksum over names and contents of the source files of mrl, models and parallel."""
    checksum = hashlib.sha256()
    for package in ("mrl", "models", "parallel"):
        for path in sorted((package_root / package).rglob("*.py")):
            checksum.update(str(path.relative_to(package_root)).encode() + b"\0" + path.read_bytes())
    return checksum.hexdigest()[:16]


def probe_folder(
    path: str, purpose: str, sample_bytes: int = SAMPLE_BYTES, timeout_s: float = FOLDER_TIMEOUT_S
) -> FolderFacts:
    """Measure free space and write speed of a folder. If `sample_bytes` is 0, the speed is not measured."""
    command = [sys.executable, "-ISc", _PROBE_FOLDER, path, str(sample_bytes)]
    probe = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = probe.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        probe.kill()  # no wait(), because a process that is blocked in the kernel ends only when the file system answers
        return FolderFacts(path, purpose, error=f"it did not answer within {timeout_s:.0f} s")
    if probe.returncode:
        return FolderFacts(path, purpose, error=(err.strip().splitlines() or ["it cannot be accessed"])[-1])
    result = json.loads(out)
    sizes = result["total"], result["free"], result["inodes"]
    return FolderFacts(path, purpose, *sizes, result["error"], result["speed"])


def nearest_existing_folder(path: str | Path) -> str:
    """Return `path` if it is a folder, otherwise its nearest parent that exists."""
    absolute = Path(path).expanduser().absolute()
    return str(next(folder for folder in (absolute, *absolute.parents) if folder.is_dir()))


def probe_shared_memory() -> FolderFacts:
    """Measure /dev/shm, which holds Ray's objects and the buffers of NCCL and SGLang that processes of a host share."""
    return probe_folder("/dev/shm", "shared memory", sample_bytes=0)


def ray_temporary_folder() -> str:
    """Return the folder below which a local Ray cluster has its files: sockets, logs, and objects that do not fit into memory.

    In a Slurm job, Ray has its files below /tmp instead (slurm/ray_cluster.sh).
    """
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()


def model_checksum(path: str | None) -> str | None:
    """Return a checksum over names and sizes of a folder's files and the content of its config.json.

    Returns "" if the folder or its config.json is missing, and None if `path` is None.
    """
    if path is None:
        return None
    checksum = hashlib.sha256()
    with contextlib.suppress(OSError):
        for file in sorted(Path(path).iterdir()):
            if file.is_file():
                checksum.update(f"{file.name} {file.stat().st_size}\n".encode())
        checksum.update(Path(path, "config.json").read_bytes())
        return checksum.hexdigest()[:16]
    return ""


# Fields of `nvidia-smi --query-gpu`
CARD_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current")
ERROR_FIELD = "ecc.errors.uncorrected.volatile.total"
NO_DEVICES = "no devices were found"  # message of nvidia-smi in a job without GPUs on a host that has GPUs
TIMEOUT_S = 20.0  # if nvidia-smi takes longer, the driver probably hangs
MIB = 2**20


class NvidiaSmiError(Exception):
    """nvidia-smi failed; the message has the reason."""


def read_gpus() -> HostGpus:
    """Read the GPUs of this host, and how many of them Slurm allocated.

    The result has no card and no error if nvidia-smi is not installed and /dev has no GPU, or if nvidia-smi finds no device.
    """
    return replace(_query_gpus(), allocated=_slurm_allocation())


def _slurm_allocation() -> int | None:
    """Return the number of GPUs that Slurm gave this job on this host; None outside of a job."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return _number(os.environ.get("SLURM_GPUS_ON_NODE", "0"))


def _query_gpus() -> HostGpus:
    if not shutil.which("nvidia-smi"):
        devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
        return HostGpus(error=f"/dev has {', '.join(devices)}, but no nvidia-smi is on PATH" if devices else "")
    try:
        lines = _query(*CARD_FIELDS)
        errors = dict(enumerate(map(_number, _query_optional(ERROR_FIELD))))
        cards = [
            _parse_card(line, errors) for line in lines if is_visible(line, os.environ.get("CUDA_VISIBLE_DEVICES"))
        ]
        fabric = next(iter(_query_optional("fabric.state")), "")
        visible = {str(card.index) for card in cards}
        links = parse_links(_run("topo", "-m", required=False))
        links = {pair: link for pair, link in links.items() if visible.issuperset(pair.split("-"))}
        return HostGpus(cards, "", _cuda_version(), links, fabric, hidden=len(cards) < len(lines))
    except NvidiaSmiError as error:
        return HostGpus(error="" if NO_DEVICES in str(error).lower() else str(error))


def _parse_card(line: str, errors: Mapping[int, int]) -> GpuCard:
    try:
        index, _, name, total, used, driver, mig = (part.strip() for part in line.split(","))
        card_index = int(index)
    except ValueError:
        raise NvidiaSmiError(f"unexpected output of nvidia-smi: {line!r}") from None
    memory, taken = _number(total) * MIB, _number(used) * MIB
    return GpuCard(card_index, name, memory, taken, driver, mig == "Enabled", errors.get(card_index, 0))


def is_visible(line: str, variable: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES shows a card to this process: by its index, or by a prefix of its UUID.

    `line`: the card's line in nvidia-smi's answer to a query of CARD_FIELDS. `variable`: the value of CUDA_VISIBLE_DEVICES.
    """
    if variable is None:
        return True
    index, uuid = (part.strip() for part in line.split(",")[:2])
    return any(
        part == index or (len(part) > 3 and uuid.startswith(part)) for part in variable.replace(" ", "").split(",")
    )


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0  # nvidia-smi may print [N/A] or [Not Supported]


def _query_optional(field: str) -> list[str]:
    """Return the value of a field for each card; [] if the driver does not know the field."""
    try:
        return [line.strip() for line in _query(field)]
    except NvidiaSmiError:
        return []


def _query(*fields: str) -> list[str]:
    return _run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits").splitlines()


def _cuda_version() -> str:
    """Return the newest CUDA version that the driver supports. The label of the version in the output differs between drivers."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", _run(required=False))
    return match[1] if match else ""


def _run(*arguments: str, required: bool = True) -> str:
    """Return the output of nvidia-smi, or "" if its exit status is not 0 and `required` is false.

    Raises NvidiaSmiError if the exit status is not 0 and `required` is true, or if nvidia-smi does not answer or cannot be run.
    """
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NvidiaSmiError(f"nvidia-smi did not answer within {TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise NvidiaSmiError(f"nvidia-smi cannot be run: {error}") from None
    if done.returncode and required:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise NvidiaSmiError(lines[0] if lines else f"nvidia-smi ended with status {done.returncode}")
    return "" if done.returncode else done.stdout


def parse_links(matrix: str) -> dict[str, str]:
    """Return pair of GPUs ("0-1") -> kind of link, from the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines()]
    columns = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    links = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            for name, link in zip(columns, row[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and int(name[3:]) > int(row[0][3:]):
                    links[f"{row[0][3:]}-{name[3:]}"] = link
    return links
