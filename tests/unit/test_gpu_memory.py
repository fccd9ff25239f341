"""The memory of an engine on a GPU is told from that of other processes."""

import sys
from types import SimpleNamespace

import pytest
from gpu_memory import bytes_by_pid, bytes_of


@pytest.fixture
def nvml(monkeypatch):
    """Processes of each GPU that a stand-in of NVML lists: [{pid: bytes}]."""
    gpus: list[dict[int, int | None]] = []
    stand_in = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in gpu.items()
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return gpus


def test_other_processes_of_the_gpu_do_not_count(nvml):
    nvml += [{7: 100, 8: 20}, {8: 3, 9: None}]
    assert bytes_by_pid() == {7: 100, 8: 23, 9: 0}
    assert bytes_of([8, 11], {}) == 23


def test_in_a_container_the_new_pids_count(nvml):
    nvml.append({7: 100})
    before = bytes_by_pid()
    nvml[0] |= {4001: 50, 7: 300}
    assert bytes_of([8, 11], before) == 50


def test_memory_that_nvml_does_not_report_is_not_taken_for_zero(nvml):
    nvml.append({7: 100})
    with pytest.raises(AssertionError, match="does not report"):
        bytes_of([8], {7: 100})
