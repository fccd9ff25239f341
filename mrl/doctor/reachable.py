"""What the connections between hosts have shown: which addresses are reached, and which interface serves everybody."""

from mrl.doctor.facts import HostFacts, Interface
from mrl.doctor.interfaces import is_loopback, is_virtual, variables
from mrl.doctor.seen import Seen

NOBODY = "ask who runs the network: no interface is reached by all hosts"


def failures(seen: Seen, host: str, address: str, port: str = "any") -> dict[str, str]:
    """Who cannot connect to an address of `host`, and why."""
    return {
        other.host: contact.problem
        for other in seen.hosts
        for contact in other.contacts
        if (contact.host, contact.address, contact.port) == (host, address, port) and contact.problem
    }


def serving(seen: Seen, host: HostFacts) -> list[Interface]:
    """Interfaces of a host that lead back to itself and that all others reach; the best first."""
    found = [
        one
        for one in host.network.interfaces
        if one.up and not one.problem and not is_loopback(one.address) and not failures(seen, host.host, one.address)
    ]
    return sorted(found, key=lambda one: (is_virtual(one.name), not one.name.startswith("ib"), -one.mb_per_s))


def cure(seen: Seen) -> str:
    """The command that makes NCCL and gloo take an interface that serves everybody."""
    by_host = {host.host: [one.name for one in serving(seen, host)] for host in seen.hosts}
    if not all(by_host.values()):
        return NOBODY
    first, *others = by_host.values()
    common = next((name for name in first if all(name in names for names in others)), None)
    return variables({host: common or names[0] for host, names in by_host.items()})
