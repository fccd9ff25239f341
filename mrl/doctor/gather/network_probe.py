"""Facts about this host's network (names, interfaces, ports, InfiniBand), and tests of its connections to the other hosts."""

import contextlib
import errno
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mrl.core.processes import PortLease
from mrl.doctor.host_facts import HostFacts, InfinibandPort, NetworkFacts, PeerConnection
from mrl.hang_report.network_interfaces import is_loopback, probe_interfaces

ECHO_TIMEOUT_S = 1.0  # longest wait for an answer of another job's preflight check on this host
RAY_PORTS = (6379,)  # ports on which `ray start --head` listens for nodes that join
# An address that is reserved for documentation. No packet is sent to this address; the kernel only looks up the route.
UNROUTED_ADDRESS = "192.0.2.1"
CONNECT_TIMEOUT_S = 3.0  # longest wait for a connection to another host, and for an answer
NUM_PINGS = 5  # round trips that are measured on each connection; the shortest is used
MAX_PARALLEL_CONNECTIONS = 32


def read_network() -> NetworkFacts:
    """Read the network facts of this host, and try a connection from each interface to itself."""
    return NetworkFacts(
        interfaces=probe_interfaces(),
        own_addresses=resolve(socket.gethostname()),
        localhost=resolve("localhost"),
        route_address=_route_address(),
        ipv6_only=_ipv6_only(),
        busy_ports=busy_ports(RAY_PORTS),
        outgoing_ports=_outgoing_ports(),
        infiniband=read_infiniband(),
    )


def resolve(name: str) -> list[str]:
    """Return the addresses to which this host resolves a name, in the order in which clients try them; [] if there are none."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _route_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((UNROUTED_ADDRESS, 9))
        return probe.getsockname()[0]
    return ""


def _ipv6_only() -> bool:
    entries = [e for name, entries in psutil.net_if_addrs().items() if name != "lo" for e in entries]
    families = {e.family for e in entries if not e.address.startswith("fe80")}
    return socket.AF_INET6 in families and socket.AF_INET not in families


def busy_ports(ports: tuple[int, ...]) -> dict[str, str]:
    """Return the ports on which a process listens: port -> description of the process.

    The result does not contain ports on which another job's preflight check listens, because that check ends soon.
    """
    return {str(port): _port_owner(port) for port in ports if _is_busy(port) and not is_echo_server(port)}


def is_echo_server(port: int) -> bool:
    """Return whether the process that listens on this port is the server of a preflight check (`serve_peers`)."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), ECHO_TIMEOUT_S) as connection:
        connection.settimeout(ECHO_TIMEOUT_S)
        connection.sendall(b"\n")
        return b'"nonce"' in connection.recv(1024)
    return False


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        # A port whose last connection is still closing (TIME_WAIT) counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _port_owner(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                process = psutil.Process(one.pid)
                return f"{process.name()} (process {one.pid} of {process.username()})"
    return "another user's process"


def _outgoing_ports() -> tuple[int, int]:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(first), int(last)


def read_infiniband(root: Path = Path("/sys/class/infiniband")) -> list[InfinibandPort]:
    """Read the ports of InfiniBand and RoCE cards."""
    return [
        InfinibandPort(
            f"{port.parent.parent.name}/{port.name}",
            re.sub(r"^\d+:\s*", "", (port / "state").read_text().strip()) == "ACTIVE",
            (port / "rate").read_text().strip(),
            (port / "link_layer").read_text().strip(),
        )
        for port in sorted(root.glob("*/ports/*"))
    ]


class _EchoHandler(socketserver.StreamRequestHandler):
    server: Any
    timeout = CONNECT_TIMEOUT_S

    def handle(self) -> None:
        """Answer each line with the nonce, which identifies this host, and the time."""
        with contextlib.suppress(OSError):
            while self.rfile.readline(16):
                self.wfile.write(json.dumps(dict(nonce=self.server.nonce, now=self.server.clock())).encode() + b"\n")


class _EchoServer(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    def __init__(self, port: int, nonce: str, clock: Callable[[], float]) -> None:
        self.nonce, self.clock = nonce, clock
        super().__init__(("", port), _EchoHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@contextlib.contextmanager
def serve_peers(nonce: str, clock: Callable[[], float] = time.time) -> Iterator[dict[str, int]]:
    """Run servers that answer other hosts, one on each kind of port that a run uses.

    Yields kind (any, ray, engine) -> port of the server. `nonce`: random text that identifies this host.
    """
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        lease = PortLease()
        stack.callback(lease.close)
        for kind, port in dict(any=0, ray=RAY_PORTS[0], engine=lease.port).items():
            with contextlib.suppress(OSError):  # the port is busy, which another check reports
                server = _EchoServer(port, nonce, clock)
                stack.callback(server.server_close)
                stack.callback(server.shutdown)
                ports[kind] = server.server_address[1]
        yield ports


@dataclass(frozen=True)
class PeerHost:
    """Another host, and the ports on which it answers."""

    facts: HostFacts
    ports: Mapping[str, int]  # kind (any, ray, engine) -> port
    nonce: str  # random text of that host; an answer with another nonce comes from another host


def connect_to_peers(peers: Sequence[PeerHost], clock: Callable[[], float] = time.time) -> list[PeerConnection]:
    """Connect to the port `any` at each address of the peers. If this port answers, also connect to the other ports.

    Loopback addresses, and addresses of interfaces that are down, are left out.
    """
    targets = [
        (peer, one.address)
        for peer in peers
        for one in peer.facts.network.interfaces
        if one.up and not is_loopback(one.address)
    ]
    with ThreadPoolExecutor(MAX_PARALLEL_CONNECTIONS) as threads:
        results = threads.map(lambda target: list(_connect_to_address(target[0], target[1], clock)), targets)
        return [connection for connections in results for connection in connections]


def _connect_to_address(peer: PeerHost, address: str, clock: Callable[[], float]) -> Iterator[PeerConnection]:
    for kind, port in peer.ports.items():
        connection = _connect_to_port(peer, address, kind, port, clock)
        yield connection
        if kind == "any" and connection.problem:
            return  # the address cannot be reached, so the other ports would only time out


def _connect_to_port(peer: PeerHost, address: str, kind: str, port: int, clock: Callable[[], float]) -> PeerConnection:
    host = peer.facts.host
    try:
        with (
            socket.create_connection((address, port), CONNECT_TIMEOUT_S) as connection,
            connection.makefile("rwb") as lines,
        ):
            pings = [_ping(lines, peer.nonce, clock) for _ in range(NUM_PINGS)]
    except ConnectionRefusedError:
        return PeerConnection(host, address, kind, "connection refused")
    except TimeoutError:
        return PeerConnection(host, address, kind, "timed out")
    except (OSError, ValueError) as error:
        return PeerConnection(host, address, kind, getattr(error, "strerror", None) or str(error))
    seconds, ahead = min(pings)
    return PeerConnection(host, address, kind, seconds=seconds, clock_ahead_s=ahead)


def _ping(lines, nonce: str, clock: Callable[[], float]) -> tuple[float, float]:
    """Return (round-trip time, peer's clock minus this host's clock) in seconds. Raises ValueError if another host answers."""
    begun, now = time.perf_counter(), clock()
    lines.write(b"?\n")
    lines.flush()
    answer = json.loads(lines.readline() or b'{"nonce": ""}')
    seconds = time.perf_counter() - begun
    if answer["nonce"] != nonce:
        raise ValueError("another host answers there, so two hosts have the same address")
    return seconds, answer["now"] - (now + seconds / 2)
