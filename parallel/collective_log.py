"""Log of the last collective of each process group, in a file that other processes can read if this process hangs or dies.

With any backend, torch calls a hook before it issues a collective. The hook writes 48 bytes into a memory-mapped file, which
keeps them if the process is killed. On a GPU, a collective is issued before it runs. The rank that has issued fewer collectives
than the others is nevertheless the rank that the others wait for.
"""

import atexit
import json
import mmap
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOT = struct.Struct("<QQqqqd")  # collectives, point-to-point messages, last operation, peer or root, bytes, time
MAX_GROUPS = 1024
HOOK = 0x6D726C  # "mrl" in ASCII: torch identifies hooks by a number


@dataclass(frozen=True)
class LastCollective:
    """Progress of one rank in one process group."""

    group: str  # torch's name of the group, the same on all members
    purpose: str  # Megatron's description, such as TENSOR_MODEL_PARALLEL_GROUP
    ranks: tuple[int, ...]  # global ranks of the members
    entered: int  # number of collectives issued so far, without point-to-point messages
    messages: int  # number of sends and receives so far
    operation: str  # torch's name of the last operation
    peer: int  # group rank of the other end of a message, or of the root of a broadcast; else -1
    nbytes: int  # bytes of the first tensor of the last operation
    at: float  # time.time() when the last operation was issued


class CollectiveLog:
    """Collective log of this process. Call `watch` after process groups are created, and `close` before they are destroyed."""

    def __init__(self, path: str | Path) -> None:
        """Create the file `path`; the names of the groups are written to `path`.json."""
        self._path = Path(path)
        self._file = self._path.open("wb+")
        self._file.truncate(MAX_GROUPS * SLOT.size)
        self._memory = mmap.mmap(self._file.fileno(), MAX_GROUPS * SLOT.size)
        self._groups: list[dict[str, Any] | None] = []  # by slot; None: free slot
        self._watched: dict[Any, int] = {}  # group -> slot
        atexit.register(self.close)  # torch crashes if hooks remain when the interpreter exits

    def watch(self) -> None:
        """Log all process groups with more than one member: add new groups and free the slots of destroyed ones."""
        import torch.distributed as dist  # heavy; readers of logs do not need it
        from torch._C._distributed_c10d import HookOpName
        from torch.distributed.distributed_c10d import _world  # torch has no public list of all groups

        operations = {int(operation): name.lower() for name, operation in HookOpName.__members__.items()}  # type: ignore[bad-argument-type]
        messages = {number for number, name in operations.items() if name.startswith(("send", "recv"))}

        for group in [group for group in self._watched if group not in _world.pg_map]:
            self._free(group)
        for group in list(_world.pg_map):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) == 1 or group in self._watched or (slot := self._free_slot()) is None:
                continue
            self._groups[slot] = dict(group=_world.pg_names[group], purpose=group.group_desc, ranks=ranks)
            self._watched[group] = slot
            group.register_pre_hook(HOOK, _make_hook(self._memory, slot * SLOT.size, messages))
        text = json.dumps(dict(operations=operations, groups=self._groups))
        self._path.with_name(self._path.name + ".json").write_text(text)

    def close(self) -> None:
        """Stop logging; the file stays."""
        for group in self._watched:
            _remove_hook(group)
        self._watched.clear()
        atexit.unregister(self.close)

    def _free(self, group: Any) -> None:
        """Free the slot of a group that was destroyed."""
        _remove_hook(group)
        slot = self._watched.pop(group)
        self._groups[slot] = None
        self._memory[slot * SLOT.size : (slot + 1) * SLOT.size] = bytes(SLOT.size)

    def _free_slot(self) -> int | None:
        if None in self._groups:
            return self._groups.index(None)
        if len(self._groups) == MAX_GROUPS:
            return None
        self._groups.append(None)
        return len(self._groups) - 1


def _remove_hook(group: Any) -> None:
    with suppress(RuntimeError):  # the group was destroyed meanwhile
        group.unregister_pre_hook(HOOK)


def _make_hook(memory: mmap.mmap, offset: int, message_operations: set[int]) -> Any:
    collectives = messages = 0

    # A call takes 4 microseconds; reading the name of the operation instead of its number would take one more.
    def on_collective(call: Any) -> None:
        nonlocal collectives, messages
        operation = int(call.name)
        if operation in message_operations:
            messages += 1
        else:
            collectives += 1
        tensors = call.input_tensors or call.output_tensors
        nbytes = tensors[0].nbytes if tensors else 0
        SLOT.pack_into(memory, offset, collectives, messages, operation, call.root, nbytes, time.time())

    return on_collective


def read_collective_log(path: str | Path) -> list[LastCollective]:
    """Read the log of a process, without groups that the process never used; return [] if there is no log."""
    path = Path(path)
    with suppress(OSError, ValueError):
        known, slots = json.loads(path.with_name(path.name + ".json").read_text()), path.read_bytes()
        entries = [_last(known, number, slots) for number, group in enumerate(known["groups"]) if group]
        return [last for last in entries if last.entered or last.messages]
    return []


def _last(known: dict[str, Any], number: int, slots: bytes) -> LastCollective:
    group = known["groups"][number]
    entered, messages, operation, *rest = SLOT.unpack_from(slots, number * SLOT.size)
    name = known["operations"].get(str(operation), f"operation {operation}")
    return LastCollective(group["group"], group["purpose"], tuple(group["ranks"]), entered, messages, name, *rest)
