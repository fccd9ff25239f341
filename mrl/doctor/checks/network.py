"""Hosts and ports that cannot be reached."""

from collections import defaultdict
from collections.abc import Iterator

from mrl.doctor import reachable
from mrl.doctor.finding import Finding, error, shortened
from mrl.doctor.seen import Seen

NAME = "network"
PORTS = {"ray": "6379 (Ray's head)", "engine": "20000-32000 (engines)"}


def check(seen: Seen) -> Iterator[Finding]:
    """Hosts that others reach by no address; ports that are closed on addresses that are open otherwise."""
    for host in seen.hosts:
        unreached = _unreached(seen, host.host)
        for other, problem in unreached.items():
            what = f"{other} reaches it by none of its addresses ({problem})"
            mend = f"ping -c1 {host.host} on {other}; ip route; ask who runs the network for TCP between compute nodes"
            yield error(NAME, [host.host], what, "Ray, NCCL and gloo connect every host with every other", mend)
        yield from _closed(seen, host.host, set(unreached))
        yield from _rays_address(seen, host.host, host.network.route_address, set(unreached))


def _unreached(seen: Seen, host: str) -> dict[str, str]:
    """Who reaches `host` by no address, and how the last try failed."""
    found = {}
    for other in seen.hosts:
        tries = [contact for contact in other.contacts if contact.host == host and contact.port == "any"]
        if other.host != host and tries and all(contact.problem for contact in tries):
            found[other.host] = tries[-1].problem
    return found


def _closed(seen: Seen, host: str, unreached: set[str]) -> Iterator[Finding]:
    closed: dict[str, dict[str, str]] = defaultdict(dict)
    for other in seen.hosts:
        if other.host in unreached:
            continue
        open_ones = {c.address for c in other.contacts if c.host == host and c.port == "any" and not c.problem}
        for contact in other.contacts:
            if contact.host == host and contact.address in open_ones and contact.port in PORTS and contact.problem:
                closed[contact.port][other.host] = contact.problem
    for port, others in closed.items():
        what = f"port {PORTS[port]} is closed to {shortened(list(others))} ({next(iter(others.values()))}), others are open"
        why = "Ray's nodes join the head there" if port == "ray" else "requests and weights reach the engines there"
        mend = "open all TCP ports between compute nodes, at least 6379, 10002-32000 and 32768-60999 (nft list ruleset)"
        yield error(NAME, [host], what, why, mend)


def _rays_address(seen: Seen, host: str, address: str, unreached: set[str]) -> Iterator[Finding]:
    """The address that Ray takes for this node, where others do not reach it."""
    failed = {other: why for other, why in reachable.failures(seen, host, address).items() if other not in unreached}
    if failed:
        facts = next(one for one in seen.hosts if one.host == host)
        better = next((one.address for one in reachable.serving(seen, facts)), "ADDRESS")
        what = f"Ray takes {address} for this node, which {shortened(list(failed))} cannot reach ({next(iter(failed.values()))})"
        why = "other nodes find neither its objects nor its processes: calls to it wait for ever"
        yield error(NAME, [host], what, why, f"ray start --node-ip-address={better} ... on {host}")
