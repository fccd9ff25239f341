"""Cores, memory, limits, and the variables that steer the libraries."""

import hashlib
import os
import resource
import stat
from pathlib import Path

import psutil

from mrl.doctor.facts import Machine, Token

LIMITS = dict(nofile=resource.RLIMIT_NOFILE, nproc=resource.RLIMIT_NPROC, memlock=resource.RLIMIT_MEMLOCK)
STEERING = ("NCCL_", "GLOO_", "TORCH_NCCL_", "UCX_")
VARIABLES = (
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_ORDER",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ),
    *("TORCH_DISTRIBUTED_DEBUG", "HF_HUB_OFFLINE"),
)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
NO_LIMIT = 2**60  # control groups write "none" as a very large number, too


def machine() -> Machine:
    """Cores, memory, and what this process may have of them."""
    memory = psutil.virtual_memory()
    return Machine(
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit_bytes=memory_limit(),
        overcommit=int(_read(Path("/proc/sys/vm/overcommit_memory")) or 0),
        slurm_job=os.environ.get("SLURM_JOB_ID"),
    )


def memory_limit(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Smallest limit of the control groups that this process is in, bytes; None where there is none."""
    limits = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if controllers == "memory" else root
        name = "memory.limit_in_bytes" if controllers == "memory" else "memory.max"
        if controllers in ("", "memory"):
            group = base / path.lstrip("/")
            limits += [_read(folder / name) for folder in (group, *group.parents) if folder.is_relative_to(base)]
    numbers = [int(text) for text in limits if text.isdigit() and int(text) < NO_LIMIT]
    return min(numbers, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def limits() -> dict[str, tuple[int, int]]:
    """Name -> (soft, hard) of this process's limits; -1 where there is none."""
    return {name: resource.getrlimit(number) for name, number in LIMITS.items()}


def environment() -> dict[str, str]:
    """Variables that steer libraries; of proxies whether they are set, for their addresses can hold passwords."""
    found = {name: value for name, value in os.environ.items() if name.startswith(STEERING) or name in VARIABLES}
    for name in PROXIES:
        value = os.environ.get(name) or os.environ.get(name.upper())
        if value:
            found[name] = value if name == "no_proxy" else "set"
    return found


def token() -> Token:
    """How Ray would prove itself here, as Ray looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    mode, text = os.environ.get("RAY_AUTH_MODE", "").lower(), os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if text:
        return Token(mode, _digest(text), "RAY_AUTH_TOKEN")
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray/auth_token"
    text = _read(path)
    if not text:
        return Token(mode, "", str(path) if named else "")
    return Token(mode, _digest(text), str(path), _readable(path.absolute()))


def _readable(path: Path) -> bool:
    """Whether other users can read a file: it lets them, and so does every folder above it."""
    return bool(path.stat().st_mode & stat.S_IROTH) and all(p.stat().st_mode & stat.S_IXOTH for p in path.parents)


def _digest(text: str) -> str:
    """Enough to see whether two hosts have the same one, too little to find it by trying."""
    return hashlib.sha256(b"mrl doctor" + text.encode()).hexdigest()[:6]
