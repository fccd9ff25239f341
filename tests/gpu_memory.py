"""Measures the GPU memory of single processes, also on a GPU that other processes use."""

from collections.abc import Iterable, Mapping


def bytes_by_pid() -> dict[int, int]:
    """Return the bytes that each process holds on all GPUs of this machine, as NVML reports them."""
    import pynvml

    pynvml.nvmlInit()
    held: dict[int, int] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index)):
            held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    return held


def bytes_of(pids: Iterable[int], listed_before: Mapping[int, int]) -> int:
    """Return the bytes that the processes `pids` hold. `listed_before` is the result of `bytes_by_pid` before their start.

    In a container, NVML may list the pids of the host. Then the processes are those that NVML did not list before.
    """
    held = bytes_by_pid()
    own = held.keys() & set(pids) or held.keys() - listed_before.keys()
    assert sum(held[pid] for pid in own), f"NVML does not report the memory of these processes, but only {held}"
    return sum(held[pid] for pid in own)
