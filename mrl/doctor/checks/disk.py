"""Folders that a run writes to."""

from collections.abc import Iterator

from mrl.doctor.facts import GB, Folder, HostFacts
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "disk"
FREE_BYTES = 5 * GB
FULL = 0.95  # Ray makes no more objects on a file system that is fuller
INODES = 10_000
SLOW = 20e6  # bytes/s


def check(seen: Seen) -> Iterator[Finding]:
    """Room, inodes, permission, and speed of one written file."""
    for host in seen.hosts:
        for folder in host.folders:
            yield from _judge(host, folder, seen)


def _judge(host: HostFacts, folder: Folder, seen: Seen) -> Iterator[Finding]:
    what, where = f"{folder.path} ({folder.purpose})", [host.host]
    if folder.error:
        why = "a run would end, or hang, at its first write"
        yield error(
            NAME,
            where,
            f"{what} cannot be written: {folder.error}",
            why,
            f"df {folder.path}; mount | grep {folder.path}; choose another: {_choose(folder)}",
        )
        return
    yield from _room(host, folder, what, seen.wanted.checkpoint_bytes if seen.wanted else 0)
    if folder.free_inodes is not None and folder.free_inodes < INODES:
        why = "'No space left on device' although there is room"
        yield warning(
            NAME,
            where,
            f"{what} has room for {folder.free_inodes} more files",
            why,
            f"df -i {folder.path}; remove old files, or {_choose(folder)}",
        )
    if folder.bytes_per_s is not None and folder.bytes_per_s < SLOW:
        why = "checkpoints and logs wait for it"
        yield warning(
            NAME,
            where,
            f"{what} takes {folder.bytes_per_s / 1e6:.1f} MB/s",
            why,
            f"use local or parallel storage: {_choose(folder)}",
        )


def _room(host: HostFacts, folder: Folder, what: str, checkpoints: int) -> Iterator[Finding]:
    free, used = folder.free_bytes, 1 - folder.free_bytes / max(1, folder.total_bytes)
    if folder.purpose == "run" and checkpoints > free:
        whole = (
            f"{what} has {free / GB:.1f} GB free; the checkpoints that are kept need about {checkpoints / GB:.1f} GB"
        )
        yield error(
            NAME,
            [host.host],
            whole,
            "the run would end at a checkpoint",
            f"{_choose(folder)}, or fewer of them: checkpoint.keep_last=1",
        )
    elif folder.purpose == "temporary" and used > FULL:
        whole = f"{what} is {used:.0%} full"
        why = f"Ray makes no objects on a file system that is more than {FULL:.0%} full"
        yield error(NAME, [host.host], whole, why, f"remove old sessions (ls /tmp/ray), or {_choose(folder)}")
    elif free < FREE_BYTES:
        whole = f"{what} has {free / GB:.1f} GB free"
        yield warning(
            NAME,
            [host.host],
            whole,
            "logs and checkpoints of a run fill it",
            f"remove what is old, or {_choose(folder)}",
        )


def _choose(folder: Folder) -> str:
    return "run.dir=FOLDER" if folder.purpose == "run" else "export TMPDIR=FOLDER RAY_TMPDIR=FOLDER"
