"""Names, interfaces, ports and InfiniBand of this host."""

import contextlib
import errno
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from mrl.doctor.facts import InfinibandPort, Interface, Network
from mrl.hang_report.network_interfaces import connect_to_itself

DOCTOR_S = 1.0  # for one to answer
RAY_PORTS = (6379,)  # of `ray start --head`: without it no node joins
FAR = "192.0.2.1"  # an address for documentation: nothing is sent, the kernel only says by which way it would go


def network() -> Network:
    """All of it; every interface also tries a connection to itself."""
    return Network(
        interfaces=interfaces(),
        own_name=addresses_of(socket.gethostname()),
        localhost=addresses_of("localhost"),
        route_address=_route_address(),
        ipv6_only=_ipv6_only(),
        busy_ports=busy_ports(RAY_PORTS),
        outgoing_ports=_outgoing_ports(),
        infiniband=infiniband(),
    )


def addresses_of(name: str) -> list[str]:
    """Addresses that a name has here, in the order in which they are tried; empty where it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def interfaces() -> list[Interface]:
    """Interfaces with an IPv4 address, in the kernel's order, which is the one NCCL takes them in."""
    states = psutil.net_if_stats()
    named = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    named.sort(key=lambda pair: _index(pair[0]))
    up = [states[name].isup if name in states else False for name, _ in named]
    with ThreadPoolExecutor(max(1, len(named))) as threads:
        problems = threads.map(lambda pair: connect_to_itself(pair[1]), named)
    return [
        Interface(name, address, is_up, states[name].speed if name in states else 0, problem if is_up else "")
        for (name, address), is_up, problem in zip(named, up, problems, strict=True)
    ]


def _index(name: str) -> int:
    with contextlib.suppress(OSError):
        return socket.if_nametoindex(name)
    return 2**31  # an alias, or gone meanwhile


def _route_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, contextlib.suppress(OSError):
        asked.connect((FAR, 9))
        return asked.getsockname()[0]
    return ""


def _ipv6_only() -> bool:
    found = [e for name, entries in psutil.net_if_addrs().items() if name != "lo" for e in entries]
    families = {e.family for e in found if not e.address.startswith("fe80")}
    return socket.AF_INET6 in families and socket.AF_INET not in families


def busy_ports(ports: tuple[int, ...]) -> dict[str, str]:
    """Ports that somebody listens on here -> who, where that can be seen; another job's doctor, soon gone, does not count."""
    return {str(port): _owner(port) for port in ports if _is_busy(port) and not answers_as_doctor(port)}


def answers_as_doctor(port: int) -> bool:
    """Whether who listens there answers as mrl.doctor.reach does."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), DOCTOR_S) as asked:
        asked.settimeout(DOCTOR_S)
        asked.sendall(b"\n")
        return b'"nonce"' in asked.recv(1024)
    return False


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is only closing does not count
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _owner(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                process = psutil.Process(one.pid)
                return f"{process.name()} (process {one.pid} of {process.username()})"
    return "a process of somebody else"


def _outgoing_ports() -> tuple[int, int]:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(first), int(last)


def infiniband(root: Path = Path("/sys/class/infiniband")) -> list[InfinibandPort]:
    """Ports of InfiniBand and RoCE cards."""
    return [
        InfinibandPort(
            f"{port.parent.parent.name}/{port.name}",
            re.sub(r"^\d+:\s*", "", (port / "state").read_text().strip()) == "ACTIVE",
            (port / "rate").read_text().strip(),
            (port / "link_layer").read_text().strip(),
        )
        for port in sorted(root.glob("*/ports/*"))
    ]
