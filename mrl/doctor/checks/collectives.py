"""The all-reduces that were tried."""

from collections.abc import Iterator

from mrl.doctor import reachable
from mrl.doctor.finding import Finding, error
from mrl.doctor.seen import Seen

NAME = "collectives"


def check(seen: Seen) -> Iterator[Finding]:
    """An all-reduce that failed, or had not ended at its deadline. Groups after it are not judged: one hangs, all do."""
    for one in seen.collectives:
        if one.seconds is None:
            yield error(
                NAME,
                one.hosts,
                f"an all-reduce of {one.backend} in group {one.group} fails: {one.problem}",
                "trainer ranks would wait in their first step, or at their start",
                reachable.cure(seen) if seen.several else "NCCL_DEBUG=INFO mrl doctor --all-reduce; nvidia-smi topo -m",
            )
            return
