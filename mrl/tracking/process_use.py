"""Use of CPU, memory and GPUs by the processes of this host, and the load that SGLang engines publish in shared memory.

All values are read from /proc, from NVIDIA's management library and from files that the processes write anyway. No request is
sent to a process.
"""

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

CHILDREN_EVERY_S = 15.0  # time between two searches for the child processes of an engine
PROC = Path("/proc")
# Layout of the file in which an SGLang scheduler publishes its load: sglang.srt.managers.load_snapshot
LOAD_HEADER = struct.Struct("<4sHHI")  # magic, version, number of schedulers, bytes of a slot
LOAD_LENGTH = struct.Struct("<I")  # bytes of the content of a slot
LOAD_MAGIC, LOAD_VERSION = b"SLNS", 2  # first two fields of LOAD_HEADER
MAX_NVML_PROCESSES = 256  # if more processes than this use a GPU, none of them is read


@dataclass(frozen=True)
class ProcessStat:
    """State, CPU time and memory of one process."""

    letter: str  # state in /proc/PID/stat, such as R or Z
    started: int  # clock ticks since boot
    cpu_s: float  # user and system time of all threads
    rss_bytes: int  # resident memory


def read_process(pid: int) -> ProcessStat | None:
    """Return state, CPU time and memory of a process of this host; None if there is no such process."""
    with suppress(OSError, ValueError, IndexError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return ProcessStat(fields[0], int(fields[19]), seconds, int(fields[21]) * mmap.PAGESIZE)
    return None


def lock_holder(path: Path) -> int | None:
    """Return the pid of the process on this host that locks a file, or None. Does not acquire the lock."""
    with suppress(OSError, IndexError):
        status = path.stat()
        for line in (PROC / "locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and words[5].rpartition(":")[2] == str(status.st_ino) and _has_open(words[4], status):
                return int(words[4])
    return None


def _has_open(pid: str, status: os.stat_result) -> bool:
    """Return whether a process has this file open. If this user may not read the open files of the process, return True."""
    try:
        for name in os.listdir(PROC / pid / "fd"):
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(PROC / pid / "fd" / name), status):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _children(pid: int) -> Iterator[int]:
    """Yield all descendants of a process; none if the kernel does not list children."""
    with suppress(OSError):
        for thread in os.listdir(PROC / str(pid) / "task"):
            with suppress(OSError):
                for child in map(int, (PROC / str(pid) / "task" / thread / "children").read_text().split()):
                    yield child
                    yield from _children(child)


@dataclass(frozen=True)
class Use:
    """What one registered process uses. The use of an engine includes that of its child processes."""

    cpu_percent: float | None  # 100 is one core; None before the second measurement
    rss_bytes: int  # resident memory
    gpus: tuple[int, ...] = ()  # indices of the GPUs on which the process has memory
    gpu_bytes: int = 0  # memory on these GPUs together


class UseMeter:
    """Measures the use of processes. A CPU percentage covers the time since the last measurement of the process."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, float]] = {}  # pid -> (time.monotonic(), CPU seconds)
        self._families: dict[int, tuple[float, list[int]]] = {}  # pid -> (time of the search, pids of the descendants)

    def measure(self, pid: int, gpu_memory: dict[int, dict[int, int]], *, with_children: bool) -> Use | None:
        """Return the use of a process; None if it has ended. `with_children`: add the use of its descendants.

        `gpu_memory`: pid -> index of a GPU -> bytes.
        """
        members = [pid, *self._descendants(pid)] if with_children else [pid]
        found = {member: times for member in members if (times := read_process(member)) is not None}
        if pid not in found:
            return None
        now, cpu_s = time.monotonic(), sum(times.cpu_s for times in found.values())
        before = self._last.get(pid)
        self._last[pid] = now, cpu_s
        percent = 100 * max(0.0, cpu_s - before[1]) / (now - before[0]) if before and now > before[0] else None
        on_gpus = [item for member in found for item in gpu_memory.get(member, {}).items()]
        gpus = tuple(sorted({gpu for gpu, _ in on_gpus}))
        rss = sum(times.rss_bytes for times in found.values())
        return Use(percent, rss, gpus, sum(size for _, size in on_gpus))

    def _descendants(self, pid: int) -> list[int]:
        searched, found = self._families.get(pid, (-CHILDREN_EVERY_S, []))
        if time.monotonic() - searched >= CHILDREN_EVERY_S:
            found = list(_children(pid))
            self._families[pid] = time.monotonic(), found
        return found


@dataclass(frozen=True)
class EngineLoad:
    """Load of one engine: the sum over its schedulers."""

    running: int  # requests
    waiting: int  # requests
    # sampled tokens, as SGLang last measured them; 0 while no request runs, or before the first measurement
    tokens_per_s: float


def read_engine_load(pid: int) -> EngineLoad | None:
    """Return the load that an engine publishes; None if it publishes none. `pid`: server process of the engine.

    The file `shared_memory` in the engine's scratch folder lists the files in which the schedulers publish their loads.
    """
    loads = []
    with suppress(OSError, ValueError):
        variables = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        scratch = next((each[19:] for each in variables if each.startswith(b"MRL_ENGINE_SCRATCH=")), None)
        names = (Path(os.fsdecode(scratch)) / "shared_memory").read_text().splitlines() if scratch else []
        for name in dict.fromkeys(names):
            loads += _read_loads(Path(name))
    if not loads:
        return None
    running = sum(load.get("num_running_reqs", 0) for load in loads)
    waiting = sum(load.get("num_waiting_reqs", 0) for load in loads)
    rate = sum(load.get("gen_throughput", 0.0) for load in loads if load.get("num_running_reqs"))
    return EngineLoad(running, waiting, rate)


def _read_loads(path: Path) -> list[dict]:
    """Return the load of each scheduler, read from its slot in the file. A slot that SGLang is writing now is skipped."""
    content, loads = path.read_bytes(), []
    magic, version, count, slot_bytes = (
        LOAD_HEADER.unpack_from(content) if len(content) > LOAD_HEADER.size else (b"", 0, 0, 0)
    )
    if (magic, version) != (LOAD_MAGIC, LOAD_VERSION):
        return []
    for offset in range(LOAD_HEADER.size, LOAD_HEADER.size + count * slot_bytes, slot_bytes):
        with suppress(struct.error, msgspec.DecodeError):
            (length,) = LOAD_LENGTH.unpack_from(content, offset)
            start = offset + LOAD_LENGTH.size
            load = msgspec.msgpack.decode(content[start : start + length])
            loads += [load] if isinstance(load, dict) else []
    return loads


@dataclass(frozen=True)
class GpuUse:
    """Use of one GPU of this host."""

    index: int
    busy_percent: int | None  # percentage of the last sample period in which a kernel ran; None: not reported
    used_bytes: int
    total_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Gpus:
    """The GPUs of this host, read with NVIDIA's management library. Without the library, there are no GPUs."""

    def __init__(self, library: str = "libnvidia-ml.so.1") -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = ctypes.CDLL(library)
        except OSError:
            return
        count = ctypes.c_uint()
        if self._call("nvmlInit_v2") and self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            for index in range(count.value):
                handle = ctypes.c_void_p()
                if self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)):
                    self._handles.append(handle)

    def _call(self, function: str, *arguments: object) -> bool:
        """Call a function of the library. Returns whether the call succeeded; False if this driver lacks the function."""
        called = getattr(self._nvml, function, None)
        return called is not None and called(*arguments) == 0

    def read(self) -> list[GpuUse]:
        """Return the use of each GPU. The result omits GPUs whose memory the library does not report."""
        found = []
        for index, handle in enumerate(self._handles):
            busy, memory = _Utilization(), _Memory()
            if self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
                is_known = self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(busy))
                found.append(GpuUse(index, busy.gpu if is_known else None, memory.used, memory.total))
        return found

    def memory_by_process(self) -> dict[int, dict[int, int]]:
        """Return pid -> GPU -> bytes of GPU memory. In a container with its own process ids, the result is empty."""
        found: dict[int, dict[int, int]] = {}
        for index, handle in enumerate(self._handles):
            count, processes = ctypes.c_uint(MAX_NVML_PROCESSES), (_Process * MAX_NVML_PROCESSES)()
            if self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), processes):
                for process in processes[: count.value]:
                    known = process.used if process.used != ctypes.c_ulonglong(-1).value else 0
                    found.setdefault(process.pid, {})[index] = known
        return found
