"""Transports: the choice between them, and slots in shared memory."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mrl.weight_sync import transports
from mrl.weight_sync.transfer_plan import ProcessLocation, choose_transport
from mrl.weight_sync.transports import SharedMemorySendEndpoint

CPU_A, CPU_B = ProcessLocation("a", None), ProcessLocation("b", None)
GPUS = [ProcessLocation("a", "g0"), ProcessLocation("a", "g1"), ProcessLocation("b", "g2")]


@pytest.mark.parametrize(
    ("senders", "receivers", "transport"),
    [
        ([CPU_A, CPU_A], [CPU_A], "shared_memory"),
        ([CPU_A], [CPU_B], "process_group"),
        ([GPUS[0], GPUS[1]], [GPUS[1]], "cuda_ipc"),
        (GPUS, [GPUS[2], GPUS[0]], "cuda_ipc"),
        ([GPUS[0]], [GPUS[1]], "process_group"),
        ([GPUS[0]], [GPUS[2]], "process_group"),
    ],
)
def test_auto_chooses_the_transport_that_fits_the_devices(senders, receivers, transport):
    assert choose_transport("auto", senders, receivers) == transport


def test_cuda_ipc_is_accepted_on_several_machines():
    assert choose_transport("cuda_ipc", GPUS, [GPUS[2], GPUS[0]]) == "cuda_ipc"


@pytest.mark.parametrize(
    ("requested", "senders", "receivers", "message"),
    [
        ("shared_memory", [CPU_A], [CPU_B], "2 machines; use process_group"),
        ("cuda_ipc", [GPUS[0]], [GPUS[1]], "no engine shares a GPU with the actor"),
        ("cuda_ipc", [CPU_A], [CPU_A], "does not fit the device"),
        ("shared_memory", [GPUS[0]], [GPUS[1]], "does not fit the device"),
        ("process_group", [GPUS[0]], [GPUS[0]], "NCCL cannot join two processes on one GPU"),
        ("process_group", GPUS, [GPUS[2]], "NCCL cannot join two processes on one GPU"),
        ("auto", [GPUS[0]], [GPUS[0], GPUS[1]], "1 of 2 engine ranks share .* at most 1 engine ranks"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(requested, senders, receivers, message):
    with pytest.raises(ValueError, match=message):
        choose_transport(requested, senders, receivers)


@pytest.fixture
def shared_memory(monkeypatch):
    """A folder in shared memory that no other process writes to."""
    with TemporaryDirectory(dir=transports.SHARED_MEMORY) as folder:
        monkeypatch.setattr(transports, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


def test_slots_that_do_not_fit_into_shared_memory_are_refused_and_leave_no_file(shared_memory):
    with pytest.raises(
        ValueError, match=r"2 slots of \d+ bytes do not fit into /dev/shm.*smaller weight_sync.bucket_bytes"
    ):
        SharedMemorySendEndpoint(1 << 50)
    assert not list(shared_memory.iterdir())


def test_slots_are_allocated_at_once_and_their_file_is_unlinked_after_connecting():
    send_endpoint = SharedMemorySendEndpoint(1 << 16)
    assert send_endpoint.path.stat().st_blocks * 512 >= 2 << 16, "not a sparse file"
    send_endpoint.slots[1][-1] = 7
    send_endpoint.on_connected()
    assert not send_endpoint.path.exists() and int(send_endpoint.slots[1][-1]) == 7
    send_endpoint.close()
