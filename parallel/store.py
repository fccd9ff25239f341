"""A key-value store that listens on one address: torch's own constructor listens on every interface of the machine."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def host_store(address: str, port: int, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Open a store in this process, for peers that reach it at `address`; `port` 0: any that is free (`store.port`).

    With `world_size` it waits until so many processes have joined, itself included. Raises OSError where this machine has
    no such address, or the port is taken.
    """
    ((family, *_), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    with socket.create_server((address, port), family=family, backlog=2048) as listener:
        bound = listener.getsockname()[1]
        return TCPStore(
            address,
            bound,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=world_size is not None,
            master_listen_fd=listener.detach(),  # the store closes it
        )
