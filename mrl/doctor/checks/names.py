"""Name resolution."""

from collections.abc import Iterator

from mrl.doctor.facts import HostFacts
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "names"


def check(seen: Seen) -> Iterator[Finding]:
    """`localhost`, each host's own name, and the names of the others."""
    addresses = {host.host: {one.address for one in host.network.interfaces} for host in seen.hosts}
    for host in seen.hosts:
        yield from _own(host)
        for peer, found in host.peers.items():
            yield from _peer(host.host, peer, found, addresses.get(peer, set()))


def _own(host: HostFacts) -> Iterator[Finding]:
    local, where = host.network.localhost, [host.host]
    if "127.0.0.1" not in local:
        what = f"localhost is {' and '.join(local) or 'no name'} here; 127.0.0.1 is expected"
        why = "servers of a run listen on 127.0.0.1: who asks localhost for them finds nobody"
        yield error(NAME, where, what, why, "echo '127.0.0.1 localhost' >> /etc/hosts")
    if host.network.ipv6_only:
        why = "Ray, gloo and the engines' servers are tested with IPv4; none of their addresses would be reachable"
        yield error(
            NAME,
            where,
            "this host has IPv6 addresses only",
            why,
            "ask who runs the network for IPv4 addresses of the compute nodes",
        )
    if not host.network.own_name:
        what = f"its own name, {host.host.partition('#')[0]}, has no address here"
        why = "gloo looks itself up by it, and falls back to loopback, where no other host finds it"
        yield warning(NAME, where, what, why, f"echo 'ADDRESS {host.host}' >> /etc/hosts, or mend the cluster's DNS")
    elif all(":" in address for address in host.network.own_name):
        what = f"its own name, {host.host}, has IPv6 addresses only ({host.network.own_name[0]})"
        why = "gloo would open its connections there, Ray and the engines on IPv4"
        yield warning(NAME, where, what, why, f"echo 'ADDRESS {host.host}' >> /etc/hosts with its IPv4 address")


def _peer(host: str, peer: str, found: list[str], has: set[str]) -> Iterator[Finding]:
    cure = f"getent hosts {peer}; mend /etc/hosts on {host}, or name hosts by address (cluster.address=ADDRESS:6379)"
    why = "what is told to join the head by its name does not find it, or finds another host"
    if not found:
        yield warning(NAME, [host], f"the name {peer} has no address here", why, cure)
    elif not has & set(found) and has and not all(":" in address for address in found):
        yield warning(
            NAME, [host], f"the name {peer} is {found[0]} here, and no interface of {peer} has that address", why, cure
        )
