"""The interface that NCCL and gloo would take by themselves: does it lead to the other hosts, and back?"""

from collections.abc import Iterator

from mrl.doctor import reachable
from mrl.doctor.facts import HostFacts, Interface
from mrl.doctor.finding import Finding, error, shortened
from mrl.doctor.interfaces import for_gloo, for_nccl, is_loopback
from mrl.doctor.seen import Seen

NAME = "interfaces"
WHY = "ranks that open their connections there wait for each other for ever, without a word"
VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}


def check(seen: Seen) -> Iterator[Finding]:
    """NCCL's choice where there are GPUs, gloo's where there are several hosts."""
    for host in seen.hosts:
        choices: dict[str, Interface | None] = {}
        if host.gpus.cards:
            choices["NCCL"] = next(
                iter(for_nccl(host.network.interfaces, host.environment.get(VARIABLES["NCCL"], ""))), None
            )
        if seen.several:
            variable = host.environment.get(VARIABLES["gloo"], "")
            choices["gloo"] = for_gloo(host.network.interfaces, host.network.own_name, variable)
        for library, chosen in choices.items():
            yield from _judge(seen, host, library, chosen)


def _judge(seen: Seen, host: HostFacts, library: str, chosen: Interface | None) -> Iterator[Finding]:
    cure, variable = reachable.cure(seen), VARIABLES[library]
    if chosen is None:
        named = host.environment.get(variable)
        what = (
            f"{variable}={named}: there is no such interface that is up" if named else f"{library} finds no interface"
        )
        yield error(NAME, [host.host], f"{what}; there are {_all(host)}", f"{library} fails at its start", cure)
    elif seen.several and is_loopback(chosen.address):
        named = host.environment.get(variable)
        reason = (
            f"{variable}={named}"
            if named
            else f"this host's name is {' and '.join(host.network.own_name) or 'unknown'} here"
        )
        what = f"{library} would open its connections on {chosen.name} ({chosen.address}), as {reason}"
        yield error(NAME, [host.host], what, WHY, cure)
    elif problem := _problem(seen, host, chosen):
        what = f"{library} would open its connections on {chosen.name} ({chosen.address}): {problem}"
        yield error(NAME, [host.host], what, WHY, cure)


def _problem(seen: Seen, host: HostFacts, chosen: Interface) -> str:
    """Why connections to this interface of the host fail; "" where they do not."""
    if chosen.problem:
        return f"a connection from it to itself fails ({chosen.problem})"
    failed = reachable.failures(seen, host.host, chosen.address)
    return f"a connection from {shortened(list(failed))} fails ({next(iter(failed.values()))})" if failed else ""


def _all(host: HostFacts) -> str:
    return ", ".join(one.name for one in host.network.interfaces if one.up)
