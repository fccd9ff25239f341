"""The last collective of each process group, in a file that can be read from outside, also when this process is stopped or dead.

torch calls a hook of ours before it issues a collective, whatever the backend. A hook writes 48 bytes into mapped memory:
the kernel keeps them when the process is killed. On a GPU a collective is issued before it runs; a rank that lags behind
the others in issuing is still the one that they wait for.
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

SLOT = struct.Struct("<QQqqqd")  # collectives, messages between two ranks, last operation, peer or root, bytes, when
MAX_GROUPS = 1024
HOOK = 0x6D726C  # "mrl": hooks are known to torch by a number


@dataclass(frozen=True)
class LastCollective:
    """Where one rank is in one process group."""

    group: str  # torch's name, the same on all members
    purpose: str  # Megatron's description, such as TENSOR_MODEL_PARALLEL_GROUP
    ranks: tuple[int, ...]  # global
    entered: int  # collectives so far; messages between two ranks are not counted
    messages: int  # sends and receives so far
    operation: str  # the last one, in torch's words
    peer: int  # rank in the group: of a message its other end, of a broadcast its root; else -1
    nbytes: int  # of its first tensor
    at: float  # time.time() when it was entered


class CollectiveLog:
    """This process's log; `watch` after process groups were made, `close` before they are destroyed."""

    def __init__(self, path: str | Path) -> None:
        """Make the file `path`; the groups' names go to `path`.json."""
        self._path = Path(path)
        self._file = self._path.open("wb+")
        self._file.truncate(MAX_GROUPS * SLOT.size)
        self._memory = mmap.mmap(self._file.fileno(), MAX_GROUPS * SLOT.size)
        self._groups: list[dict[str, Any] | None] = []  # by slot; None: nobody's
        self._watched: dict[Any, int] = {}  # group -> slot
        atexit.register(self.close)  # torch crashes where hooks are left when the interpreter ends

    def watch(self) -> None:
        """Log every process group that this process shares with others; those watched already go on, destroyed ones go."""
        import torch.distributed as dist  # heavy, and readers of logs do without
        from torch._C._distributed_c10d import HookOpName
        from torch.distributed.distributed_c10d import _world  # the only list of all groups there is

        operations = {int(operation): name.lower() for name, operation in HookOpName.__members__.items()}  # type: ignore[bad-argument-type]
        messages = {number for number, name in operations.items() if name.startswith(("send", "recv"))}

        for group in [group for group in self._watched if group not in _world.pg_map]:
            self._leave(group)
        for group in list(_world.pg_map):
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) == 1 or group in self._watched or (slot := self._free_slot()) is None:
                continue
            self._groups[slot] = dict(group=_world.pg_names[group], purpose=group.group_desc, ranks=ranks)
            self._watched[group] = slot
            group.register_pre_hook(HOOK, _hook(self._memory, slot * SLOT.size, messages))
        text = json.dumps(dict(operations=operations, groups=self._groups))
        self._path.with_name(self._path.name + ".json").write_text(text)

    def close(self) -> None:
        """Stop logging; what was written stays."""
        for group in self._watched:
            _unhook(group)
        self._watched.clear()
        atexit.unregister(self.close)

    def _leave(self, group: Any) -> None:
        """Free the slot of a group that was destroyed."""
        _unhook(group)
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


def _unhook(group: Any) -> None:
    with suppress(RuntimeError):  # destroyed meanwhile
        group.unregister_pre_hook(HOOK)


def _hook(memory: mmap.mmap, offset: int, of_messages: set[int]) -> Any:
    collectives = messages = 0

    def entered(
        call: Any,
    ) -> None:  # 4 microseconds of CPU; the operation's name in place of its number would be one more
        nonlocal collectives, messages
        operation = int(call.name)
        if operation in of_messages:
            messages += 1
        else:
            collectives += 1
        tensors = call.input_tensors or call.output_tensors
        nbytes = tensors[0].nbytes if tensors else 0
        SLOT.pack_into(memory, offset, collectives, messages, operation, call.root, nbytes, time.time())

    return entered


def read(path: str | Path) -> list[LastCollective]:
    """What a process wrote so far, groups that it never used left out; nothing where it has no log."""
    path = Path(path)
    with suppress(OSError, ValueError):
        known, slots = json.loads(path.with_name(path.name + ".json").read_text()), path.read_bytes()
        found = [_last(known, number, slots) for number, group in enumerate(known["groups"]) if group]
        return [last for last in found if last.entered or last.messages]
    return []


def _last(known: dict[str, Any], number: int, slots: bytes) -> LastCollective:
    group = known["groups"][number]
    entered, messages, operation, *rest = SLOT.unpack_from(slots, number * SLOT.size)
    name = known["operations"].get(str(operation), f"operation {operation}")
    return LastCollective(group["group"], group["purpose"], tuple(group["ranks"]), entered, messages, name, *rest)
