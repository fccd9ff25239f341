"""How the bytes of a bucket come from a sender to the engine ranks of its audience.

A sender lays buckets out in one of two slots in turn; a slot is used again when all have acknowledged the bucket that was there.
Where both sides are on one machine the slots themselves are shared (memory, or CUDA memory by IPC); otherwise they are sent.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

NUM_SLOTS = 2
SHARED_MEMORY = Path("/dev/shm")


class SendEnd(Protocol):
    """A sender's end."""

    @property
    def slots(self) -> Sequence[Tensor]:
        """[slot bytes] uint8 each."""

    def handle(self) -> Any:
        """What a receiver needs to find the slots; picklable."""

    def settle(self) -> None:
        """Called when every receiver has found them."""

    def send(self, number: int, nbytes: int, audience: Sequence[int]) -> None:
        """Bring the first bytes of the slot of bucket `number` to these engine ranks; returns before they are there."""

    def close(self) -> None:
        """Let go of everything."""


class RecvEnd(Protocol):
    """A receiver's end."""

    def take(self, sender: int, number: int, nbytes: int) -> Tensor:
        """The bytes of a bucket; they may lie in the sender's slot, so they are copied before it is acknowledged."""

    def close(self) -> None:
        """Let go of everything."""


class SharedMemorySendEnd:
    """Slots in a file that lives in memory; it loses its name once all have mapped it, so a crash later leaves nothing behind."""

    def __init__(self, slot_bytes: int) -> None:
        self.path = SHARED_MEMORY / f"mrl-weights-{uuid.uuid4().hex}"
        self.slot_bytes = slot_bytes
        try:
            with self.path.open("xb") as file:
                os.posix_fallocate(
                    file.fileno(), 0, max(1, NUM_SLOTS * slot_bytes)
                )  # a sparse file would end in a bus error
            self.slots = _mapped(self.path, slot_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise ValueError(
                f"weight_sync: {NUM_SLOTS} slots of {slot_bytes} bytes do not fit into {SHARED_MEMORY} beside those of other ranks "
                f"({error.strerror}); use a smaller weight_sync.bucket_bytes, or weight_sync.transport=process_group."
            ) from error

    def handle(self) -> tuple[str, int]:
        return str(self.path), self.slot_bytes

    def settle(self) -> None:
        self.path.unlink(missing_ok=True)

    def send(self, number: int, nbytes: int, audience: Sequence[int]) -> None:
        """Nothing: they see it."""

    def close(self) -> None:
        self.settle()
        self.slots = ()


def _mapped(path: Path, slot_bytes: int) -> Sequence[Tensor]:
    return torch.from_file(str(path), shared=True, size=NUM_SLOTS * slot_bytes, dtype=torch.uint8).split(slot_bytes)


class CudaIpcSendEnd:
    """Slots in this GPU's memory, opened by processes on the same machine."""

    def __init__(self, slot_bytes: int) -> None:
        self._whole = torch.empty(NUM_SLOTS * slot_bytes, dtype=torch.uint8, device="cuda")
        self.slots = self._whole.split(slot_bytes)
        self.slot_bytes = slot_bytes

    def handle(self) -> tuple[bytes, str, int]:
        from torch.multiprocessing.reductions import reduce_tensor  # where CUDA is

        rebuild, arguments = reduce_tensor(self._whole)
        index = arguments[_DEVICE]
        return (
            pickle.dumps((rebuild, arguments)),
            str(torch.cuda.get_device_properties(index).uuid),  # numbers differ between processes, this does not
            self.slot_bytes,
        )

    def settle(self) -> None:
        """Nothing: CUDA counts who has it open."""

    def send(self, number: int, nbytes: int, audience: Sequence[int]) -> None:
        torch.cuda.current_stream().synchronize()  # the receiver reads on a stream of its own

    def close(self) -> None:
        del self._whole
        self.slots = ()


_DEVICE = 6  # place of the device's number among the arguments of torch's rebuild_cuda_tensor


class SharedSlotsRecvEnd:
    """A receiver's view of its senders' shared slots."""

    def __init__(self, handles: dict[int, Any]) -> None:
        """`handles`: of SharedMemorySendEnd or CudaIpcSendEnd, by sender."""
        self._slots = {sender: _opened(handle) for sender, handle in handles.items()}

    def take(self, sender: int, number: int, nbytes: int) -> Tensor:
        return self._slots[sender][number % NUM_SLOTS][:nbytes]

    def close(self) -> None:
        self._slots = {}


def _opened(handle: Any) -> Sequence[Tensor]:
    if isinstance(handle[0], str):
        if not Path(handle[0]).exists():
            raise FileNotFoundError(
                f"{handle[0]} is not here: sender and engine are on different machines; use weight_sync.transport=process_group."
            )
        return _mapped(Path(handle[0]), handle[1])
    data, uuid_of_device, slot_bytes = handle
    rebuild, arguments = pickle.loads(data)
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if uuid_of_device not in devices:
        raise RuntimeError(f"GPU {uuid_of_device} of the sender is not visible to this engine.")
    arguments = (*arguments[:_DEVICE], devices[uuid_of_device], *arguments[_DEVICE + 1 :])
    return rebuild(*arguments).split(slot_bytes)


class ProcessGroupEnd:
    """Sends between one group of all senders and all engine ranks; each end makes one, with its own rank."""

    def __init__(
        self, group: dist.ProcessGroup, num_senders: int, slot_bytes: int, device: torch.device, slots: int = NUM_SLOTS
    ) -> None:
        """A receiver needs one slot."""
        self.group, self.num_senders = group, num_senders
        self.slots: Sequence[Tensor] = torch.empty(slots, slot_bytes, dtype=torch.uint8, device=device).unbind()
        self._sending: dict[int, list[dist.Work]] = {}

    def handle(self) -> None:
        """Nothing: the group is the way."""

    def settle(self) -> None:
        """Nothing is shared."""

    def send(self, number: int, nbytes: int, audience: Sequence[int]) -> None:
        data = self.slots[number % NUM_SLOTS][:nbytes]
        self._sending[number % NUM_SLOTS] = []  # those sent from this slot before are acknowledged
        for rank in audience:
            with suppress(RuntimeError):  # an engine that has died; its control connection says so
                work = dist.isend(data, group=self.group, group_dst=self.num_senders + rank)
                self._sending[number % NUM_SLOTS] += [work] if work else []

    def take(self, sender: int, number: int, nbytes: int) -> Tensor:
        data = self.slots[0][:nbytes]
        dist.recv(data, group=self.group, group_src=sender)
        return data

    def close(self) -> None:
        self.slots = ()
        dist.destroy_process_group(self.group)


def join_group(
    store: dist.Store, name: str, backend: str, rank: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup:
    """A group beside the default one, over processes that have none in common; torch has no public call for that.

    What sglang.srt.utils.common.init_custom_process_group (0.5.23) does, which costs a trainer 8 CPU-seconds to import.
    """
    from torch.distributed.distributed_c10d import (  # private: see above
        Backend,
        GroupName,
        _new_process_group_helper,
        _world,
    )

    timeout = timedelta(seconds=timeout_s)
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), store, group_name=GroupName(name), timeout=timeout
    )
    assert isinstance(group, dist.ProcessGroup), f"rank {rank} of {world_size} is not in its own group: {group}"
    _world.pg_group_ranks[group] = {each: each for each in range(world_size)}
    return group
