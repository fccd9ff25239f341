"""Which interface each library would take, by its own rules."""

import ipaddress
from collections.abc import Mapping, Sequence

from mrl.doctor.facts import Interface

LAST = ("docker", "lo", "virbr")  # prefixes that NCCL takes only where there is nothing else
VIRTUAL = (*LAST, "veth", "br-", "cni", "flannel", "cali", "tun", "tap")  # of containers and tunnels: not between hosts


def for_nccl(interfaces: Sequence[Interface], variable: str = "") -> list[Interface]:
    """Those NCCL would open connections on, the first for its bootstrap; `variable`: NCCL_SOCKET_IFNAME."""
    up = [one for one in interfaces if one.up]
    if variable:
        return [one for one in up if matches(one.name, variable)]
    for rule in ("ib", "^" + ",".join(LAST), *LAST):
        found = [one for one in up if matches(one.name, rule)]
        if found:
            return found
    return []


def matches(name: str, rule: str) -> bool:
    """NCCL's grammar: prefixes by comma; `^` in front: all but these; `=`: whole names."""
    without, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    parts = [part for part in rule.lstrip("^=").split(",") if part]
    hit = any(name == part or (not exact and name.startswith(part)) for part in parts)
    return hit != without


def for_gloo(interfaces: Sequence[Interface], own_name: Sequence[str], variable: str = "") -> Interface | None:
    """The one gloo would open connections on: GLOO_SOCKET_IFNAME, else the one of the host name, else loopback."""
    if variable:
        return next((one for one in interfaces if one.name == variable.split(",")[0]), None)
    by_address = {one.address: one for one in interfaces if one.up}
    named = next((by_address[address] for address in own_name if address in by_address), None)
    if named or not any(is_loopback(address) for address in own_name):
        return named or by_address.get("127.0.0.1")
    return next((one for one in interfaces if is_loopback(one.address)), None)  # 127.0.1.1 is on no interface


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the host that uses it."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_virtual(name: str) -> bool:
    """Whether an interface belongs to containers or tunnels, and leads to no other host."""
    return name.startswith(VIRTUAL)


def variables(names: Mapping[str, str]) -> str:
    """The command that chooses an interface; `names`: host -> interface. Where hosts differ, one line for each."""
    if len(set(names.values())) == 1:
        return _export(next(iter(names.values())))
    return "; ".join(f"on {host}: {_export(name)}" for host, name in sorted(names.items()))


def _export(name: str) -> str:
    return f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}"
