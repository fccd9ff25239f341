"""The Ray cluster that the configuration names."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, error
from mrl.doctor.seen import Seen

NAME = "address"


def check(seen: Seen) -> Iterator[Finding]:
    """Whether somebody listens there."""
    for host in seen.hosts:
        if host.cluster:
            assert seen.wanted
            what = f"cluster.address={seen.wanted.address}: {host.cluster}"
            mend = "ray start --head --port=6379 on the head, then cluster.address=HEAD:6379; or leave it out"
            yield error(NAME, [host.host], what, "the run would not find its cluster", mend)
