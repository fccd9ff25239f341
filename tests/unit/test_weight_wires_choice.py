"""Which way weights take, and what is said where there is none."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mrl.weight_sync import transports
from mrl.weight_sync.session import choose_transport
from mrl.weight_sync.transports import SharedMemorySendEnd

HERE, THERE = ("a", None), ("b", None)
GPU = [("a", "g0"), ("a", "g1"), ("b", "g2")]


@pytest.mark.parametrize(
    ("senders", "receivers", "found"),
    [
        ([HERE, HERE], [HERE], "shared_memory"),
        ([HERE], [THERE], "process_group"),
        ([GPU[0], GPU[1]], [GPU[1]], "cuda_ipc"),
        ([GPU[0]], [GPU[1]], "process_group"),
        ([GPU[0]], [GPU[2]], "process_group"),
    ],
)
def test_auto_takes_what_fits(senders, receivers, found):
    assert choose_transport("auto", senders, receivers) == found


@pytest.mark.parametrize(
    ("wanted", "senders", "receivers", "why"),
    [
        ("shared_memory", [HERE], [THERE], "2 machines; use process_group"),
        ("cuda_ipc", [HERE], [HERE], "does not fit the device"),
        ("shared_memory", [GPU[0]], [GPU[1]], "does not fit the device"),
        ("process_group", [GPU[0]], [GPU[0]], "NCCL cannot join two processes on one GPU"),
        ("auto", [GPU[0], GPU[2]], [GPU[0]], "2 machines"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(wanted, senders, receivers, why):
    with pytest.raises(ValueError, match=why):
        choose_transport(wanted, senders, receivers)


@pytest.fixture
def shared_memory(monkeypatch):
    """A folder in memory that no other process writes to."""
    with TemporaryDirectory(dir=transports.SHARED_MEMORY) as folder:
        monkeypatch.setattr(transports, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


def test_slots_that_do_not_fit_are_refused_and_leave_no_file(shared_memory):
    with pytest.raises(
        ValueError, match=r"2 slots of \d+ bytes do not fit into /dev/shm.*smaller weight_sync.bucket_bytes"
    ):
        SharedMemorySendEnd(1 << 50)
    assert not list(shared_memory.iterdir())


def test_slots_are_memory_that_exists_and_lose_their_name():
    outlet = SharedMemorySendEnd(1 << 16)
    assert outlet.path.stat().st_blocks * 512 >= 2 << 16, "not a sparse file"
    outlet.slots[1][-1] = 7
    outlet.settle()
    assert not outlet.path.exists() and int(outlet.slots[1][-1]) == 7
    outlet.close()
