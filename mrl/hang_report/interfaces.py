"""NCCL's first trap: it opens its connections on an interface whose own address does not lead back to this host."""

import socket
from collections.abc import Callable, Mapping

import psutil

CONNECT_S = 1.0
OVERLAYS = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel")  # NCCL takes these last, or they lead nowhere


def advice(host: str, interfaces: Mapping[str, str], connect: Callable[[str], str]) -> list[str]:
    """A line for each interface (name -> IPv4 address) that NCCL could choose and that does not work, with the cure.

    `connect`: why a TCP connection from an address to itself fails; "" where it works.
    """
    eligible = {name: address for name, address in interfaces.items() if not name.startswith(OVERLAYS)}
    problems = {name: connect(address) for name, address in eligible.items()}
    good = [name for name, problem in problems.items() if not problem]
    cure = f"set NCCL_SOCKET_IFNAME={good[0]}" if good else "no other interface of it works: ask who runs the network"
    return [
        f"{host}: a connection from {name} ({eligible[name]}) to itself fails ({problem}); ranks that open theirs there "
        f"wait for ever: {cure}."
        for name, problem in problems.items()
        if problem
    ]


def interfaces() -> dict[str, str]:
    """Name -> IPv4 address of this host's interfaces that are up."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET
    }


def connect_to_itself(address: str, timeout_s: float = CONNECT_S) -> str:
    """Why a TCP connection from this address of ours to itself fails; "" where it works."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(timeout_s)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), timeout_s, source_address=(address, 0)):
                server.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
