"""Log of collectives in a file that other processes can read if this process hangs or dies.

An operation is a collective or a message (a send or a receive). For each process group with several ranks, the log contains the
last operation, and the numbers of collectives and of messages so far. With every backend, torch calls a hook before it issues an
operation. The hook writes 48 bytes into a memory-mapped file, and the file keeps these bytes if the process is killed. On a GPU,
the log tells which operations were issued, but not which of them have finished. If a process group hangs, its ranks wait for the
rank that has issued the fewest collectives.
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

RECORD = struct.Struct("<QQqqqd")
"""48 bytes for one process group: the fields of LastCollective from `num_collectives` on, with the operation as an integer."""
MAX_GROUPS = 1024  # number of records in the file; further process groups are not logged
HOOK_ID = 0x6D726C  # torch identifies each hook by an integer; this integer is "mrl" in ASCII


@dataclass(frozen=True)
class LastCollective:
    """Progress of one rank in one process group."""

    group: str  # torch's name of the group, the same on all members
    purpose: str  # Megatron's description, such as TENSOR_MODEL_PARALLEL_GROUP
    ranks: tuple[int, ...]  # global ranks of the members
    num_collectives: int  # number of collectives issued so far
    num_messages: int  # number of sends and receives issued so far
    operation: str  # torch's name of the last operation
    peer: int  # group rank of the other end of a message, or of the root of a broadcast; -1 for other operations
    nbytes: int  # bytes of the first tensor of the last operation
    issued_at: float  # time.time() when the last operation was issued


class CollectiveLog:
    """Collective log of this process. The file contains one record for each process group."""

    def __init__(self, path: str | Path) -> None:
        """Create the file `path`. The names of the groups are written to a second file, `path`.json."""
        self._path = Path(path)
        self._file = self._path.open("wb+")
        self._file.truncate(MAX_GROUPS * RECORD.size)
        self._memory = mmap.mmap(self._file.fileno(), MAX_GROUPS * RECORD.size)
        self._groups: list[dict[str, Any] | None] = []  # description of the group of each record; None: unused record
        self._record_of: dict[Any, int] = {}  # group -> index of its record
        atexit.register(self.close)  # torch crashes if hooks remain when the interpreter exits

    def watch(self) -> None:
        """Log all process groups with more than one member. Call it again after groups were created or destroyed."""
        import torch.distributed as dist  # slow to import, and readers of logs do not need it
        from torch._C._distributed_c10d import HookOpName
        from torch.distributed.distributed_c10d import _world  # torch has no public list of all groups

        operations = {int(operation): name.lower() for name, operation in HookOpName.__members__.items()}  # type: ignore[bad-argument-type]
        messages = {number for number, name in operations.items() if name.startswith(("send", "recv"))}

        for group in [group for group in self._record_of if group not in _world.pg_map]:
            self._remove_destroyed(group)
        for group in list(_world.pg_map):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) == 1 or group in self._record_of or (record := self._unused_record()) is None:
                continue
            self._groups[record] = dict(group=_world.pg_names[group], purpose=group.group_desc, ranks=ranks)
            self._record_of[group] = record
            group.register_pre_hook(HOOK_ID, _make_hook(self._memory, record * RECORD.size, messages))
        text = json.dumps(dict(operations=operations, groups=self._groups))
        self._path.with_name(self._path.name + ".json").write_text(text)

    def close(self) -> None:
        """Stop logging. Call this before the groups are destroyed. The files remain."""
        for group in self._record_of:
            _remove_hook(group)
        self._record_of.clear()
        atexit.unregister(self.close)

    def _remove_destroyed(self, group: Any) -> None:
        """Clear the record of a group that was destroyed."""
        _remove_hook(group)
        record = self._record_of.pop(group)
        self._groups[record] = None
        self._memory[record * RECORD.size : (record + 1) * RECORD.size] = bytes(RECORD.size)

    def _unused_record(self) -> int | None:
        """Return the index of an unused record; None if all MAX_GROUPS records are used."""
        if None in self._groups:
            return self._groups.index(None)
        if len(self._groups) == MAX_GROUPS:
            return None
        self._groups.append(None)
        return len(self._groups) - 1


def _remove_hook(group: Any) -> None:
    with suppress(RuntimeError):  # the group was destroyed meanwhile
        group.unregister_pre_hook(HOOK_ID)


def _make_hook(memory: mmap.mmap, offset: int, message_operations: set[int]) -> Any:
    collectives = messages = 0

    # A call takes 4 microseconds. If the hook stored the operation's name instead of an integer, a call would take 5.
    def on_collective(call: Any) -> None:
        nonlocal collectives, messages
        operation = int(call.name)
        if operation in message_operations:
            messages += 1
        else:
            collectives += 1
        tensors = call.input_tensors or call.output_tensors
        nbytes = tensors[0].nbytes if tensors else 0
        RECORD.pack_into(memory, offset, collectives, messages, operation, call.root, nbytes, time.time())

    return on_collective


def read_collective_log(path: str | Path) -> list[LastCollective]:
    """Read the log of a process, without the groups that the process never used. Returns [] if there is no log."""
    path = Path(path)
    with suppress(OSError, ValueError):
        names, records = json.loads(path.with_name(path.name + ".json").read_text()), path.read_bytes()
        entries = [_last_collective(names, index, records) for index, group in enumerate(names["groups"]) if group]
        return [last for last in entries if last.num_collectives or last.num_messages]
    return []


def _last_collective(names: dict[str, Any], index: int, records: bytes) -> LastCollective:
    group = names["groups"][index]
    collectives, messages, operation, *rest = RECORD.unpack_from(records, index * RECORD.size)
    name = names["operations"].get(str(operation), f"operation {operation}")
    return LastCollective(group["group"], group["purpose"], tuple(group["ranks"]), collectives, messages, name, *rest)
