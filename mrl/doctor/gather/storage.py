"""Folders: room, whether they can be written, and how fast."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mrl.doctor.facts import Folder

SAMPLE_BYTES = 32 * 2**20
DEADLINE_S = 30.0

# In a process of its own: a network file system that hangs holds whoever asks it anything.
_LOOK = """
import json, os, sys, time

def waited():  # seconds for a core: on a busy machine that says nothing of the disk
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

path, size = sys.argv[1], int(sys.argv[2])
room = os.statvfs(path)
said = dict(total=room.f_blocks * room.f_frsize, free=room.f_bavail * room.f_frsize,
            inodes=room.f_favail if room.f_files else None, error="", speed=None)
name = os.path.join(path, f".mrl-doctor-{os.getpid()}")
try:
    with open(name, "xb", buffering=0) as file:
        os.unlink(name)
        size = min(size, said["free"] // 4)
        block, written, begun = os.urandom(2**20), 0, time.perf_counter() - waited()
        while written < size:
            written += file.write(block)
        os.fsync(file.fileno())
        took = max(1e-9, time.perf_counter() - waited() - begun)
        said["speed"] = written / took if written else None
except OSError as error:
    said["error"] = error.strerror
print(json.dumps(said))
"""


def folder(path: str, purpose: str, sample_bytes: int = SAMPLE_BYTES, deadline_s: float = DEADLINE_S) -> Folder:
    """Room and speed of a folder; its speed is not measured where `sample_bytes` is 0."""
    command = [sys.executable, "-ISc", _LOOK, path, str(sample_bytes)]
    look = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = look.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        look.kill()  # one that the kernel holds ends when the file system answers; nobody waits for it
        return Folder(path, purpose, error=f"it has not answered for {deadline_s:.0f} s")
    if look.returncode:
        return Folder(path, purpose, error=(err.strip().splitlines() or ["it cannot be looked at"])[-1])
    return _read(path, purpose, out)


def _read(path: str, purpose: str, text: str) -> Folder:
    said = json.loads(text)
    return Folder(path, purpose, said["total"], said["free"], said["inodes"], said["error"], said["speed"])


def nearest(path: str | Path) -> str:
    """The folder itself, or the nearest above it that exists: there it would be made."""
    place = Path(path).expanduser().absolute()
    return str(next(folder for folder in (place, *place.parents) if folder.is_dir()))


def shared_memory() -> Folder:
    """/dev/shm: Ray's objects, and what NCCL and SGLang exchange inside a host."""
    return folder("/dev/shm", "shared memory", sample_bytes=0)


def temporary() -> str:
    """Where Ray keeps its sessions: sockets, logs, objects that do not fit into memory."""
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()


def fingerprint(path: str | None) -> str | None:
    """Checksum over names and sizes of a folder's files and its config.json; "" where it is missing, None for no path."""
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
