"""Ports that are taken, and ranges that overlap."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, warning
from mrl.doctor.seen import Seen
from mrl.rollout.ports import LAST

NAME = "ports"
FEWEST = 10_000


def check(seen: Seen) -> Iterator[Finding]:
    """Ray's port in a job, and the kernel's range for outgoing connections."""
    starts_ray = not (seen.wanted and seen.wanted.address)
    for host in seen.hosts:
        if starts_ray and (seen.several or host.machine.slurm_job):
            for port, owner in host.network.busy_ports.items():
                what = f"port {port} is taken by {owner}"
                why = "`ray start --head` takes it: it fails, or this job's nodes join somebody else's cluster"
                mend = "ray stop, if it is yours; or another port: ray start --head --port=6380, and cluster.address=HEAD:6380"
                yield warning(NAME, [host.host], what, why, mend)
        first, last = host.network.outgoing_ports
        if first <= LAST:
            what = f"the kernel gives outgoing connections ports from {first} on; engines take theirs up to {LAST}"
            why = "an outgoing connection can take the port that an engine is about to open: 'Address already in use'"
            yield warning(NAME, [host.host], what, why, 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"')
        elif last - first < FEWEST:
            what = f"there are {last - first + 1} ports for outgoing connections"
            why = "requests to engines and Ray's own connections use them up: 'Cannot assign requested address'"
            yield warning(NAME, [host.host], what, why, 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"')
