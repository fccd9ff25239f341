"""Transports: how a bucket gets from its sender (a trainer rank) to its receivers (engine ranks).

A transfer buffer is a memory area of a sender that holds one bucket. A sender writes its buckets alternately into two transfer
buffers. It reuses a transfer buffer after all receivers have acknowledged the bucket in this buffer. The location of the
weights decides how the bytes reach the receivers:

- On the CPUs of one machine, the receivers map the transfer buffers into their own processes (shared memory).
- If every engine rank shares its GPU with a trainer rank, the bytes travel in two hops. First, the trainer ranks pass the bucket
  on to each other. Then each engine rank reads the bucket from a transfer buffer of the trainer rank on its own GPU (CUDA IPC),
  because an engine sees only its own GPUs.
- Otherwise, the senders send the bytes through process groups of torch.

To add a transport, change these places: the enum Transport in mrl/config/process_schema.py; choose_transport in
mrl/weight_sync/transfer_plan.py; a class for each endpoint in this file; `open_transport` in session.py; `_connect` in
receiver.py; and the table in docs/concepts/placement.md. A transport that sends no buckets, such as `disk`, has its own class,
which `connect_engines` in mrl/workers/megatron_model.py chooses.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.core.code_locations import environment_variables
from mrl.weight_sync.transfer_plan import ProcessLocation

logger = logging.getLogger(__name__)
NUM_TRANSFER_BUFFERS = 2  # transfer buffers of each sender
SHARED_MEMORY = Path("/dev/shm")  # folder for files that contain transfer buffers
NCCL_TIMEOUT_FACTOR = 24
"""NCCL's own timeout, as a multiple of weight_sync.timeout_s. All waits of a push are shorter, so NCCL ends no process."""

NCCL_GROUP_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 0: torch's watchdog reports an error, but does not end the process
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # 1 ms: while the watchdog waits for a dump, sends of the group are blocked
}
"""Variables that torch (2.14) reads when it creates a group. With these values, no trainer rank ends because an engine dies.

In addition, the whole process needs TORCH_NCCL_DUMP_ON_TIMEOUT=0 (mrl/rollout/engines/server_args.py). Otherwise, the watchdog's
report makes the monitor of the default group end the process some minutes later.
"""

_DEVICE_ARGUMENT = 6  # position of the device index among the arguments of torch's rebuild_cuda_tensor


def location_of(device: torch.device) -> ProcessLocation:
    """Return the location of this process, whose weights are on `device`."""
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return ProcessLocation(socket.gethostname(), gpu)


class SendEndpoint(Protocol):
    """A sender's endpoint of a transport."""

    @property
    def transfer_buffers(self) -> Sequence[Tensor]:
        """The transfer buffers of the sender, each a uint8 tensor [bytes]."""

    def handle(self) -> Any:
        """Return what a receiver needs to map the transfer buffers. The value can be pickled."""

    def on_connected(self) -> None:
        """Called once, after every receiver has mapped the transfer buffers."""

    def send(self, index: int, nbytes: int, receivers: Sequence[int]) -> None:
        """Start to send bucket `index`, the first `nbytes` bytes of its transfer buffer, to the engine ranks `receivers`.

        Does not wait until the bytes arrive.
        """

    def exclude(self, receiver: int) -> None:
        """Stop sending to the engine of the engine rank `receiver`, which has failed."""

    def close(self) -> None:
        """Release all resources."""


class RecvEndpoint(Protocol):
    """A receiver's endpoint of a transport."""

    def receive(self, sender: int, index: int, nbytes: int) -> Tensor:
        """Return the bytes of a bucket. Copy them before you acknowledge it: they may be in the sender's transfer buffer."""

    def close(self) -> None:
        """Release all resources."""


class SharedMemorySendEndpoint:
    """Transfer buffers in a file in /dev/shm.

    The file is unlinked after all receivers have mapped it, so that a later crash leaves no file.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.path = SHARED_MEMORY / f"mrl-weights-{os.getpid()}-{uuid.uuid4().hex}"
        self.buffer_bytes = buffer_bytes
        try:
            with self.path.open("xb") as file:  # in a sparse file, a later write could fail with SIGBUS
                os.posix_fallocate(file.fileno(), 0, max(1, NUM_TRANSFER_BUFFERS * buffer_bytes))
            self.transfer_buffers = _map_transfer_buffers(self.path, buffer_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise ValueError(
                f"weight_sync: {NUM_TRANSFER_BUFFERS} transfer buffers of {buffer_bytes} bytes do not fit into "
                f"{SHARED_MEMORY} with those of other ranks ({error.strerror}); use a smaller weight_sync.bucket_bytes, or "
                "weight_sync.transport=process_group."
            ) from error

    def handle(self) -> tuple[str, int]:
        return str(self.path), self.buffer_bytes

    def on_connected(self) -> None:
        self.path.unlink(missing_ok=True)

    def send(self, index: int, nbytes: int, receivers: Sequence[int]) -> None:
        """Do nothing: the receivers read the transfer buffer itself."""

    def exclude(self, receiver: int) -> None:
        """Do nothing: no send waits for a receiver."""

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.transfer_buffers = ()


def _map_transfer_buffers(path: Path, buffer_bytes: int) -> Sequence[Tensor]:
    return torch.from_file(str(path), shared=True, size=NUM_TRANSFER_BUFFERS * buffer_bytes, dtype=torch.uint8).split(
        buffer_bytes
    )


class CudaIpcSendEndpoint:
    """Transfer buffers in the memory of this GPU. Other processes on the same machine open them through CUDA IPC."""

    def __init__(self, buffer_bytes: int) -> None:
        self._memory = torch.empty(NUM_TRANSFER_BUFFERS * buffer_bytes, dtype=torch.uint8, device="cuda")
        self.transfer_buffers = self._memory.split(buffer_bytes)
        self.buffer_bytes = buffer_bytes

    def handle(self) -> tuple[bytes, str, int]:
        from torch.multiprocessing.reductions import reduce_tensor  # imported here because it initializes CUDA

        rebuild, arguments = reduce_tensor(self._memory)
        device = arguments[_DEVICE_ARGUMENT]
        return (
            pickle.dumps((rebuild, arguments)),
            str(torch.cuda.get_device_properties(device).uuid),  # the same in every process, unlike the device index
            self.buffer_bytes,
        )

    def on_connected(self) -> None:
        """Do nothing: CUDA counts the processes that have the memory open."""

    def send(self, index: int, nbytes: int, receivers: Sequence[int]) -> None:
        torch.cuda.current_stream().synchronize()  # the receiver reads on another stream

    def exclude(self, receiver: int) -> None:
        """Do nothing: no send waits for a receiver."""

    def close(self) -> None:
        del self._memory
        self.transfer_buffers = ()


class SharedBuffersRecvEndpoint:
    """The transfer buffers of the senders, mapped into the process of a receiver."""

    def __init__(self, handles: dict[int, Any]) -> None:
        """Map the transfer buffers. `handles`: trainer rank of a sender -> what `handle` of its SendEndpoint returned."""
        self._transfer_buffers = {sender: _open_handle(handle) for sender, handle in handles.items()}

    def receive(self, sender: int, index: int, nbytes: int) -> Tensor:
        return self._transfer_buffers[sender][index % NUM_TRANSFER_BUFFERS][:nbytes]

    def close(self) -> None:
        self._transfer_buffers = {}


def _open_handle(handle: Any) -> Sequence[Tensor]:
    if isinstance(handle[0], str):
        if not Path(handle[0]).exists():
            raise FileNotFoundError(
                f"{handle[0]} does not exist: the sender is on another machine; use weight_sync.transport=process_group."
            )
        return _map_transfer_buffers(Path(handle[0]), handle[1])
    data, device_uuid, buffer_bytes = handle
    rebuild, arguments = pickle.loads(data)
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if device_uuid not in devices:
        raise RuntimeError(
            f"the transfer buffers are on GPU {device_uuid}, but this engine sees only "
            f"{', '.join(devices) or 'no GPUs'}; each engine rank must read the transfer buffers of the trainer rank on its "
            "own GPU."
        )
    arguments = (*arguments[:_DEVICE_ARGUMENT], devices[device_uuid], *arguments[_DEVICE_ARGUMENT + 1 :])
    return rebuild(*arguments).split(buffer_bytes)


@dataclass(frozen=True)
class SharedBuffersSetup:
    """What receivers need to map the transfer buffers of the senders."""

    handles: dict[int, Any]  # trainer rank of a sender -> the value that `handle` of its SendEndpoint returned


@dataclass(frozen=True)
class ProcessGroupSetup:
    """The process groups that senders and receivers join, one for each engine.

    The ranks of a group are all trainer ranks, then the ranks of the engine. Engines have separate groups, so that the group of
    an engine that fails can be aborted while the other engines still receive buckets.
    """

    name: str  # prefix of the names of the groups
    backend: str  # nccl or gloo
    num_senders: int
    num_engines: int
    engine_tp: int  # ranks of each engine
    timeout_s: float


class ProcessGroupEndpoint:
    """Endpoint of the process group transport, for a sender or a receiver. Buckets are sent from rank to rank."""

    def __init__(
        self,
        store: dist.Store,
        setup: ProcessGroupSetup,
        rank: int,
        engines: Sequence[int],
        buffer_bytes: int,
        device: torch.device,
        num_buffers: int = NUM_TRANSFER_BUFFERS,
    ) -> None:
        """Join the groups of `engines` as `rank`. A sender joins all groups. A receiver joins one, and needs one buffer."""
        self.setup = setup
        self.groups: dict[int, dist.ProcessGroup] = {}  # engine -> its group, until the engine fails
        # Index of a transfer buffer -> its unfinished sends. The objects must stay alive until the buffer is reused.
        self._pending: dict[int, list[dist.Work]] = {}
        try:
            for engine in engines:
                self.groups[engine] = _join_group(store, setup, engine, rank, device)
            self.transfer_buffers: Sequence[Tensor] = torch.empty(
                num_buffers, buffer_bytes, dtype=torch.uint8, device=device
            ).unbind()
        except BaseException:
            self.close()
            raise

    def handle(self) -> None:
        """Return nothing: receivers reach the sender through a group."""

    def on_connected(self) -> None:
        """Do nothing: no transfer buffer is shared."""

    def send(self, index: int, nbytes: int, receivers: Sequence[int]) -> None:
        """Start all sends to an engine as one batch. NCCL runs the batches of several engines at the same time."""
        data = self.transfer_buffers[index % NUM_TRANSFER_BUFFERS][:nbytes]
        # The receivers have acknowledged the earlier bucket in this transfer buffer
        works = self._pending[index % NUM_TRANSFER_BUFFERS] = []
        tp, first = self.setup.engine_tp, self.setup.num_senders
        for engine, group in self.groups.items():
            peers = [first + rank % tp for rank in receivers if rank // tp == engine]
            sends = [dist.P2POp(dist.isend, data, group=group, group_peer=peer) for peer in peers]
            # A send fails if the engine has died. The failed HTTP request to this engine then excludes it from the push.
            with suppress(RuntimeError), self._abort_after_timeout(group):
                works += dist.batch_isend_irecv(sends) if sends else []

    @contextmanager
    def _abort_after_timeout(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Abort `group` if the block takes longer than the timeout.

        The first send of NCCL to a rank waits in this thread until that rank receives. It waits without a limit if the rank
        hangs. After the group is aborted, the send raises RuntimeError.
        """
        timer = threading.Timer(self.setup.timeout_s, group.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def exclude(self, receiver: int) -> None:
        """Abort the group of the engine that has failed. Otherwise, a send of NCCL would occupy the GPU without end."""
        if group := self.groups.pop(receiver // self.setup.engine_tp, None):
            _abort_group(group)

    def receive(self, sender: int, index: int, nbytes: int) -> Tensor:
        data, (group,) = self.transfer_buffers[0][:nbytes], self.groups.values()
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, data, group=group, group_peer=sender)]):
            # with a timeout, NCCL waits in this thread, as gloo does
            work.wait(timedelta(seconds=self.setup.timeout_s))
        return data

    def close(self) -> None:
        """Abort all groups. No bytes are lost, because the receivers have acknowledged all sends.

        The groups are aborted, because the regular end of an NCCL group would wait for dead engines.
        """
        self.transfer_buffers = ()
        while self.groups:
            _abort_group(self.groups.popitem()[1])


def _join_group(
    store: dist.Store, setup: ProcessGroupSetup, engine: int, rank: int, device: torch.device
) -> dist.ProcessGroup:
    """Join the group of an engine. Its processes share no default group, and torch has no public function for such a group.

    This function does the same as sglang.srt.utils.common.init_custom_process_group (0.5.23), whose import takes 8 CPU-seconds.
    On a GPU, the group is told the device of this rank, so NCCL opens one communicator now. Otherwise, NCCL would open a
    communicator for each pair of ranks, one after another, during the first push.

    Raises DistStoreError if a rank does not join within the timeout.
    """
    from torch.distributed.distributed_c10d import (  # private names: see the docstring
        Backend,
        GroupName,
        _new_process_group_helper,
        _world,
    )

    world_size, name, is_nccl = setup.num_senders + setup.engine_tp, f"{setup.name}_{engine}", device.type == "cuda"
    store.set(f"{name}/ready/{rank}", "")
    # NCCL waits for missing ranks without a limit, so a rank first waits here until all ranks are ready
    store.wait([f"{name}/ready/{member}" for member in range(world_size)], timedelta(seconds=setup.timeout_s))
    with environment_variables(NCCL_GROUP_VARIABLES if is_nccl else {}):
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(setup.backend),
            store,
            group_name=GroupName(name),
            timeout=timedelta(seconds=setup.timeout_s * (NCCL_TIMEOUT_FACTOR if is_nccl else 1)),
            device_id=device if is_nccl else None,
        )
    assert isinstance(group, dist.ProcessGroup), f"rank {rank} of {world_size} is not in its own group: {group}"
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def _abort_group(group: dist.ProcessGroup) -> None:
    """End a group without waiting for its other ranks."""
    from torch.distributed.distributed_c10d import _abort_process_group  # torch has no public function for this

    try:
        _abort_process_group(group)
    except RuntimeError:  # the other groups must still be ended
        logger.exception("a process group of the weight sync could not be aborted")
