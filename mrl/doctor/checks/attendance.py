"""Hosts that did not come, and hosts that cannot be told apart."""

from collections import Counter
from collections.abc import Iterator

from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "attendance"


def check(seen: Seen) -> Iterator[Finding]:
    """Missing hosts, and names that several have."""
    for host in seen.absent:
        yield error(
            NAME,
            [host],
            "it did not come to the meeting point in time",
            "a run would wait for it for ever",
            f"scontrol show node {host}; ssh {host} true; or start without it: #SBATCH --exclude={host}",
        )
    for name, count in Counter(host.host.partition("#")[0] for host in seen.hosts).items():
        if count > 1:
            what = f"{count} hosts call themselves {name}"
            why = "logs and reports cannot tell them apart, and gloo looks its own address up by that name"
            yield warning(NAME, [name], what, why, "hostnamectl set-hostname NAME; in a container --hostname")
