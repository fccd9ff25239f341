"""Connections between hosts: every address of every host from every other, and how far apart their clocks are."""

import contextlib
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mrl.doctor.facts import Contact, HostFacts
from mrl.doctor.gather.network import RAY_PORTS
from mrl.doctor.interfaces import is_loopback
from mrl.rollout.ports import PortLease

CONNECT_S = 3.0
PINGS = 5
AT_ONCE = 32


class _Echo(socketserver.StreamRequestHandler):
    server: Any
    timeout = CONNECT_S

    def handle(self) -> None:
        """For every line one with who this is and what time it is."""
        with contextlib.suppress(OSError):
            while self.rfile.readline(16):
                self.wfile.write(json.dumps(dict(nonce=self.server.nonce, now=self.server.clock())).encode() + b"\n")


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    def __init__(self, port: int, nonce: str, clock: Callable[[], float]) -> None:
        self.nonce, self.clock = nonce, clock
        super().__init__(("", port), _Echo)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@contextlib.contextmanager
def listening(nonce: str, clock: Callable[[], float] = time.time) -> Iterator[dict[str, int]]:
    """Answer other hosts on a port of each range that a run uses (any, ray, engine); yields those that are open here."""
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        lease = PortLease()
        stack.callback(lease.close)
        for name, port in dict(any=0, ray=RAY_PORTS[0], engine=lease.port).items():
            with contextlib.suppress(OSError):  # taken: a finding of another check
                listener = _Listener(port, nonce, clock)
                stack.callback(listener.server_close)
                stack.callback(listener.shutdown)
                ports[name] = listener.server_address[1]
        yield ports


@dataclass(frozen=True)
class Peer:
    """Another host, and where it answers."""

    facts: HostFacts
    ports: Mapping[str, int]
    nonce: str


def contacts(peers: Sequence[Peer], clock: Callable[[], float] = time.time) -> list[Contact]:
    """Try every address of every peer, and the other ports where one answers."""
    places = [
        (peer, one.address)
        for peer in peers
        for one in peer.facts.network.interfaces
        if one.up and not is_loopback(one.address)
    ]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        tried = threads.map(lambda place: list(_try(place[0], place[1], clock)), places)
        return [contact for found in tried for contact in found]


def _try(peer: Peer, address: str, clock: Callable[[], float]) -> Iterator[Contact]:
    for name, port in peer.ports.items():
        contact = _contact(peer, address, name, port, clock)
        yield contact
        if name == "any" and contact.problem:
            return  # the others would only take time


def _contact(peer: Peer, address: str, name: str, port: int, clock: Callable[[], float]) -> Contact:
    try:
        with socket.create_connection((address, port), CONNECT_S) as connection, connection.makefile("rwb") as lines:
            trips = [_ping(lines, peer.nonce, clock) for _ in range(PINGS)]
    except ConnectionRefusedError:
        return Contact(peer.facts.host, address, name, "connection refused")
    except TimeoutError:
        return Contact(peer.facts.host, address, name, "timed out")
    except (OSError, ValueError) as error:
        return Contact(peer.facts.host, address, name, getattr(error, "strerror", None) or str(error))
    seconds, ahead = min(trips)
    return Contact(peer.facts.host, address, name, "", seconds, ahead)


def _ping(lines, nonce: str, clock: Callable[[], float]) -> tuple[float, float]:
    """(seconds of the round trip, how far the other's clock is ahead); raises ValueError where it is somebody else."""
    begun, now = time.perf_counter(), clock()
    lines.write(b"?\n")
    lines.flush()
    said = json.loads(lines.readline() or b'{"nonce": ""}')
    seconds = time.perf_counter() - begun
    if said["nonce"] != nonce:
        raise ValueError("another host answers there: two have the same address")
    return seconds, said["now"] - (now + seconds / 2)
