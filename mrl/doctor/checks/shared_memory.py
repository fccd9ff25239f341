"""/dev/shm."""

from collections.abc import Iterator

from mrl.doctor.facts import GB
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "shared_memory"
OBJECT_STORE_BYTES = 512 * 2**20  # what a run on one machine gives Ray
GPU_BYTES = 2**30  # for each GPU: NCCL's and SGLang's exchange inside a host
CURE = "mount -o remount,size=16g /dev/shm; in a container --shm-size=16g (or --ipc=host)"


def check(seen: Seen) -> Iterator[Finding]:
    """Room for Ray's objects and for what NCCL and SGLang exchange."""
    for host in seen.hosts:
        shm, where = host.shm, [host.host]
        needed = OBJECT_STORE_BYTES + GPU_BYTES * len(host.gpus.cards)
        if shm.error:
            why = "processes of one host exchange tensors there: none would start"
            yield error(
                NAME, where, f"/dev/shm cannot be used: {shm.error}", why, "mount -t tmpfs -o size=16g tmpfs /dev/shm"
            )
        elif shm.total_bytes < needed:
            what = f"/dev/shm has {shm.total_bytes / GB:.2f} GB, {needed / GB:.1f} GB are needed"
            say = error if shm.total_bytes < OBJECT_STORE_BYTES else warning
            yield say(NAME, where, what, "a process that writes beyond its end is ended by SIGBUS (bus error)", CURE)
        elif shm.free_bytes < needed:
            what = f"/dev/shm has {shm.free_bytes / GB:.2f} of {shm.total_bytes / GB:.1f} GB free, {needed / GB:.1f} GB needed"
            why = "what processes that were killed have left there stays until somebody removes it; then: bus error"
            yield warning(NAME, where, what, why, "ls -la /dev/shm; remove what no process has open (lsof +D /dev/shm)")
