"""Network interfaces of this host, and the environment variables of NCCL, gloo, UCX and torch.distributed (network variables).

The module tests each interface, and predicts which interface NCCL or gloo uses. Hangs often have this cause: NCCL opens its
connections on an interface that cannot connect to its own address. All ranks then wait forever without an error message.

The network variables decide how the processes of a run connect to each other. In all processes, the variables have the same
values, except that names of network interfaces may differ.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

NETWORK_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_DEBUG", "GLOO_", "UCX_")
"""Beginnings of the names of network variables."""

INTERFACE_VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
"""Library -> the variable that names its network interfaces. On different hosts, interfaces may have different names."""

LOOPBACK = "lo"
"""Default value of both INTERFACE_VARIABLES if a run starts Ray on this machine and all processes of the run are here."""


def network_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the network variables of an environment, except INTERFACE_VARIABLES."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(NETWORK_PREFIXES) and name not in INTERFACE_VARIABLES.values()
    }


def interface_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that are in INTERFACE_VARIABLES."""
    return {name: environment[name] for name in INTERFACE_VARIABLES.values() if name in environment}


CONNECT_TIMEOUT_S = 1.0  # longest wait for a connection from an address to the same address
NCCL_LAST_CHOICES = ("docker", "lo", "virbr")  # name prefixes of interfaces that NCCL uses only if there is no other
VIRTUAL_PREFIXES = (*NCCL_LAST_CHOICES, "veth", "br-", "cni", "flannel", "cali", "tun", "tap")  # see is_virtual


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface with an IPv4 address."""

    name: str
    address: str
    up: bool = True
    speed_mbps: int = 0  # megabits per second; 0: the driver does not report it
    # why a TCP connection from its address to the same address fails; "" if it works or `up` is False
    problem: str = ""


def probe_interfaces() -> list[NetworkInterface]:
    """List the interfaces with an IPv4 address, and test whether each of them can connect to itself over TCP.

    The result has the kernel's order, in which NCCL also considers the interfaces.
    """
    states = psutil.net_if_stats()
    addresses = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    addresses.sort(key=lambda pair: _interface_index(pair[0]))
    up = [states[name].isup if name in states else False for name, _ in addresses]
    with ThreadPoolExecutor(max(1, len(addresses))) as threads:
        problems = threads.map(lambda pair: connect_to_itself(pair[1]), addresses)
    return [
        NetworkInterface(name, address, is_up, states[name].speed if name in states else 0, problem if is_up else "")
        for (name, address), is_up, problem in zip(addresses, up, problems, strict=True)
    ]


def _interface_index(name: str) -> int:
    with contextlib.suppress(OSError):
        return socket.if_nametoindex(name)
    return 2**31  # the interface is an alias or was just removed


def connect_to_itself(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Try a TCP connection from one of this host's addresses to the same address. Returns the error; "" on success."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(timeout_s)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout_s, source_address=(address, 0)):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def describe_broken_interfaces(host: str, interfaces: Sequence[NetworkInterface]) -> list[str]:
    """Return a line for each interface that NCCL may choose but that cannot connect to itself. The line also gives the fix."""
    eligible = [one for one in interfaces if one.up and not is_virtual(one.name)]
    working = [one.name for one in eligible if not one.problem]
    fix = (
        f"set NCCL_SOCKET_IFNAME={working[0]}"
        if working
        else "no other interface of this host works; ask the network's administrator"
    )
    return [
        f"{host}: a connection from {one.name} ({one.address}) to itself fails ({one.problem}); ranks that open their "
        f"connections there wait forever: {fix}."
        for one in eligible
        if one.problem
    ]


def nccl_interfaces(interfaces: Sequence[NetworkInterface], variable: str = "") -> list[NetworkInterface]:
    """Return the interfaces on which NCCL opens its connections. NCCL's bootstrap uses the first of these interfaces.

    `variable`: the value of NCCL_SOCKET_IFNAME. If it is empty, NCCL uses the first of these lists that is not empty: the
    interfaces whose names begin with "ib"; all interfaces that match no prefix of NCCL_LAST_CHOICES; the interfaces that match
    the first prefix of NCCL_LAST_CHOICES; the interfaces that match its second prefix; and so on.
    """
    up = [one for one in interfaces if one.up]
    if variable:
        return [one for one in up if matches_nccl_rule(one.name, variable)]
    for rule in ("ib", "^" + ",".join(NCCL_LAST_CHOICES), *NCCL_LAST_CHOICES):
        chosen = [one for one in up if matches_nccl_rule(one.name, rule)]
        if chosen:
            return chosen
    return []


def matches_nccl_rule(name: str, rule: str) -> bool:
    """Return whether an interface name matches a rule, which has the syntax of NCCL_SOCKET_IFNAME.

    A rule is a comma-separated list of prefixes. After a leading `^`, names with these prefixes do not match, and all other
    names match. After a leading `=`, the list has whole names instead of prefixes.
    """
    exclude, exact = rule.startswith("^"), rule.lstrip("^").startswith("=")
    parts = [part for part in rule.lstrip("^=").split(",") if part]
    hit = any(name == part or (not exact and name.startswith(part)) for part in parts)
    return hit != exclude


def gloo_interface(
    interfaces: Sequence[NetworkInterface], host_addresses: Sequence[str], variable: str = ""
) -> NetworkInterface | None:
    """Return the interface on which gloo opens its connections; None if gloo finds no interface.

    If `variable` (the value of GLOO_SOCKET_IFNAME) names an interface, gloo uses that interface. Otherwise gloo uses the
    interface that has one of `host_addresses`, the addresses to which the host's name resolves. If no interface has one of
    these addresses, gloo uses loopback.
    """
    if variable:
        return next((one for one in interfaces if one.name == variable.split(",")[0]), None)
    by_address = {one.address: one for one in interfaces if one.up}
    named = next((by_address[address] for address in host_addresses if address in by_address), None)
    if named or not any(is_loopback(address) for address in host_addresses):
        return named or by_address.get("127.0.0.1")
    # The host's name resolves to a loopback address that no interface has, such as 127.0.1.1.
    return next((one for one in interfaces if is_loopback(one.address)), None)


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address, which only the same host can reach."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_virtual(name: str) -> bool:
    """Return whether the name of an interface belongs to loopback, containers, virtual machines or tunnels.

    Such an interface usually does not reach other hosts.
    """
    return name.startswith(VIRTUAL_PREFIXES)


def interface_exports(names: Mapping[str, str]) -> str:
    """Return the shell command that makes NCCL and gloo use an interface.

    `names`: host -> interface. If the hosts have different interfaces, the result has one command for each host.
    """
    if len(set(names.values())) == 1:
        return _export_command(next(iter(names.values())))
    return "; ".join(f"on {host}: {_export_command(name)}" for host, name in sorted(names.items()))


def _export_command(name: str) -> str:
    return f"export NCCL_SOCKET_IFNAME={name} GLOO_SOCKET_IFNAME={name}"
