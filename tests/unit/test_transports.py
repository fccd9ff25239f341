"""Transports: the choice between them, transfer buffers in shared memory, and the calls of torch for process groups on GPUs."""

import inspect
import os
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`
from torch.distributed import distributed_c10d

from mrl.weight_sync import transports
from mrl.weight_sync.control_channel import failure_key
from mrl.weight_sync.sender import BucketSender, SendStats
from mrl.weight_sync.transfer_plan import ProcessLocation, choose_transport
from mrl.weight_sync.transports import (
    NCCL_GROUP_VARIABLES,
    ProcessGroupEndpoint,
    ProcessGroupSetup,
    SharedMemorySendEndpoint,
)

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
    """Use a folder in shared memory to which no other process writes."""
    with TemporaryDirectory(dir=transports.SHARED_MEMORY) as folder:
        monkeypatch.setattr(transports, "SHARED_MEMORY", Path(folder))
        yield Path(folder)


def test_transfer_buffers_that_do_not_fit_into_shared_memory_are_refused_and_leave_no_file(shared_memory):
    with pytest.raises(
        ValueError, match=r"2 transfer buffers of \d+ bytes do not fit into /dev/shm.*smaller weight_sync.bucket_bytes"
    ):
        SharedMemorySendEndpoint(1 << 50)
    assert not list(shared_memory.iterdir())


def test_transfer_buffers_are_allocated_at_once_and_their_file_is_unlinked_after_connecting():
    send_endpoint = SharedMemorySendEndpoint(1 << 16)
    assert send_endpoint.path.stat().st_blocks * 512 >= 2 << 16, "not a sparse file"
    send_endpoint.transfer_buffers[1][-1] = 7
    send_endpoint.on_connected()
    assert not send_endpoint.path.exists() and int(send_endpoint.transfer_buffers[1][-1]) == 7
    send_endpoint.close()


SETUP = ProcessGroupSetup("weights", "nccl", num_senders=2, num_engines=3, engine_tp=2, timeout_s=0.2)


@dataclass
class TorchCalls:
    """Records the calls of torch that the endpoint makes. No communicator is opened."""

    joined: list[dict[str, Any]] = field(default_factory=list)  # of each call: its arguments by name, and `environment`
    batches: list[list[dist.P2POp]] = field(default_factory=list)
    aborted: list[dist.ProcessGroup] = field(default_factory=list)


@pytest.fixture
def calls(monkeypatch):
    recorded, create = TorchCalls(), distributed_c10d._new_process_group_helper

    def join(*args, **kwargs):
        """Create the group with torch's backend `fake`, which opens no communicator and needs no GPU."""
        call = inspect.signature(create).bind(*args, **kwargs)
        environment = {name: os.environ.get(name) for name in NCCL_GROUP_VARIABLES}
        recorded.joined.append(call.arguments | {"environment": environment})
        call.arguments |= {"backend": "fake", "device_id": None}
        return create(*call.args, **call.kwargs)

    def batch(operations):
        recorded.batches.append(operations)
        return [SimpleNamespace(wait=lambda timeout: operations[0].tensor.fill_(7))]

    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: recorded.aborted.append(group))
    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", join)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    before = set(distributed_c10d._world.pg_group_ranks)
    yield recorded
    assert set(distributed_c10d._world.pg_group_ranks) == before, "torch holds no group of a closed endpoint"


def store_with_all_ranks(setup=SETUP):
    store = dist.HashStore()
    for engine, rank in product(range(setup.num_engines), range(setup.num_senders + setup.engine_tp)):
        store.set(f"{setup.name}_{engine}/ready/{rank}", "")
    return store


def test_nccl_opens_one_communicator_for_each_engine_when_the_group_is_joined(calls, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    gpu = torch.device("cuda", 1)
    group = transports._join_group(store_with_all_ranks(), SETUP, 2, 3, gpu)
    [joined] = calls.joined
    assert joined["device_id"] == gpu, "the communicator is opened at once, and pairs of ranks need none of their own"
    assert (joined["group_size"], joined["group_rank"], joined["backend"], joined["group_name"]) == (
        4,
        3,
        "nccl",
        "weights_2",
    )
    assert joined["environment"] == NCCL_GROUP_VARIABLES, "the watchdog of this group ends no process"
    assert joined["timeout"].total_seconds() > 10 * SETUP.timeout_s, "deadlines of the weight sync come first"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3", "other groups of the process keep the user's value"
    assert "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in os.environ
    transports._abort_group(group)


def test_a_rank_that_never_joins_is_an_error_and_the_joined_groups_are_ended(calls):
    store = store_with_all_ranks()
    store.delete_key("weights_1/ready/3")
    with pytest.raises(dist.DistStoreError, match=r"(?i)timeout"):
        ProcessGroupEndpoint(store, SETUP, 0, range(3), 8, torch.device("cpu"))
    assert [one["group_name"] for one in calls.joined] == ["weights_0"] and len(calls.aborted) == 1


def test_a_bucket_is_one_batch_for_each_engine_and_an_engine_that_failed_gets_none(calls):
    endpoint = ProcessGroupEndpoint(store_with_all_ranks(), SETUP, 0, range(3), 8, torch.device("cpu"))
    groups = dict(endpoint.groups)
    endpoint.send(3, 5, [0, 1, 3, 4])
    assert [[(groups[n] is op.group, op.group_peer) for op in ops] for n, ops in enumerate(calls.batches)] == [
        [(True, 2), (True, 3)],
        [(True, 3)],
        [(True, 2)],
    ]
    assert all(
        op.op is dist.isend and op.tensor.data_ptr() == endpoint.transfer_buffers[1].data_ptr()
        for [op, *_] in calls.batches
    )
    endpoint.exclude(3)
    endpoint.exclude(2)
    assert calls.aborted == [groups[1]], "both ranks belong to engine 1, whose group is aborted once"
    calls.batches.clear()
    endpoint.send(4, 5, [0, 2, 3, 5])
    assert [batch[0].group for batch in calls.batches] == [groups[0], groups[2]]
    endpoint.close()
    assert set(calls.aborted) == set(groups.values()), "no group waits for engines that ended"


def test_a_send_to_an_engine_that_hangs_is_aborted_and_the_others_are_sent(calls, monkeypatch):
    endpoint = ProcessGroupEndpoint(store_with_all_ranks(), SETUP, 0, range(3), 8, torch.device("cpu"))
    groups, sent = dict(endpoint.groups), []

    def batch(operations):
        """For engine 1, wait as NCCL does until the engine receives or the group is aborted."""
        [group] = {op.group for op in operations}
        if group is groups[1]:
            deadline = time.monotonic() + 60
            while group not in calls.aborted:
                assert time.monotonic() < deadline, "the send waits without a limit"
                time.sleep(0.01)
            raise dist.DistBackendError("NCCL communicator was aborted")
        sent.append(group)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    endpoint.send(0, 8, range(6))
    assert sent == [groups[0], groups[2]]
    endpoint.close()


def test_a_receiver_waits_for_a_bucket_in_its_own_thread(calls):
    endpoint = ProcessGroupEndpoint(store_with_all_ranks(), SETUP, 3, [1], 8, torch.device("cpu"), num_buffers=1)
    assert endpoint.receive(1, 9, 4).tolist() == [7] * 4, "the bytes are there when `receive` returns"
    [[operation]] = calls.batches
    assert (operation.op, operation.group_peer, operation.group) == (dist.irecv, 1, endpoint.groups[1])
    endpoint.close()


def test_a_sender_excludes_an_engine_rank_that_does_not_acknowledge_a_bucket():
    excluded: list[int] = []
    channel = SimpleNamespace(
        wait_or_mark_failed=lambda ack, failure: failure != failure_key("push", 4), delete=lambda keys: None
    )
    sender = BucketSender(channel, SimpleNamespace(exclude=excluded.append), [])
    sender._wait_acks("push", SimpleNamespace(receivers=[1, 4, 5], key="bucket", index=0), SendStats())
    assert excluded == [4] and sender._failed == {4}
