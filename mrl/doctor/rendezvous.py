"""Exchanges JSON values between hosts, through a shared folder or a TCP server.

One process on each host takes part. Each host has one rank, and the first host has rank 0.
"""

import contextlib
import errno
import json
import os
import shutil
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

POLL_S = 0.1  # time between two attempts to read values or to reach the server
REQUEST_TIMEOUT_S = 5.0  # longest time for one request to the TCP server
MAX_VALUE_BYTES = 64 * 2**20  # longest request that the TCP server reads


class RendezvousStore(Protocol):
    """Key-value store that all hosts reach. Each key is written by one process only."""

    def claim_rank(self, rank: int | None, size: int) -> int:
        """Claim this rank, or the first free rank below `size` if `rank` is None. Raises ValueError if no such rank is free."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value. If the first host has left, the value is lost without an error."""
        ...

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Return key -> value for all keys with this prefix. Returns {} if the first host is gone."""
        ...

    def close(self) -> None:
        """Release the store's resources."""
        ...


class Rendezvous:
    """Exchange of values between `size` processes in named stages. Each process sends at most one value in each stage."""

    def __init__(self, store: RendezvousStore, rank: int | None, size: int) -> None:
        """Join with this rank, or with the first free rank if `rank` is None. Raises ValueError if no such rank is free."""
        self.store, self.size = store, size
        self.rank = store.claim_rank(rank, size)

    def send(self, stage: str, value: Any) -> None:
        """Send the value of this process in a stage to all processes."""
        self.store.put(f"{stage}/{self.rank}", value)

    def receive(self, stage: str, ranks: Collection[int], timeout_s: float) -> dict[int, Any]:
        """Wait for the values that these ranks send in a stage. Returns rank -> value for the values that arrived in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            values = {int(key.rpartition("/")[2]): value for key, value in self.store.get_prefix(f"{stage}/").items()}
            if set(ranks) <= values.keys() or time.monotonic() > deadline:
                return {rank: values[rank] for rank in ranks if rank in values}
            time.sleep(POLL_S)

    def leave(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Leave the exchange. Rank 0 first waits for the other ranks to leave, because they may still read from its store."""
        self.send("left", True)
        if self.rank == 0:
            self.receive("left", range(self.size), timeout_s)
        self.store.close()


class SharedFolderStore:
    """RendezvousStore in a folder that all hosts share. Each key is a file, which gets its final name when it is complete."""

    def __init__(self, folder: str | Path) -> None:
        """Create the folder if it does not exist. Raises ValueError if that fails."""
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--rendezvous {folder}: the folder cannot be created ({error.strerror}); name another folder."
            ) from None
        self.owns_folder = False  # whether this process has rank 0, which removes the folder at the end

    def claim_rank(self, rank: int | None, size: int) -> int:
        """Claim a rank by creating a folder for it. Only one process can succeed."""
        for candidate in range(size) if rank is None else [rank]:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"rank_{candidate}").mkdir()
                self.owns_folder = candidate == 0
                return candidate
        taken = "all ranks are taken" if rank is None else f"rank {rank} is taken"
        raise ValueError(f"{self.folder}: {taken} by another process; name a new folder for each check.")

    def put(self, key: str, value: Any) -> None:
        """Write the file of the key. Does nothing if rank 0 has removed the folder."""
        unfinished = self.folder / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            unfinished.write_text(json.dumps(value))
            os.replace(unfinished, self.folder / key.replace("/", "-"))

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Read the files that exist at this moment. Returns {} if rank 0 has removed the folder."""
        start, values = prefix.replace("/", "-"), {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name.startswith(start):
                    values[prefix + name.removeprefix(start)] = json.loads((self.folder / name).read_text())
        return values

    def close(self) -> None:
        """Remove the folder on rank 0. Does nothing on other ranks."""
        if self.owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class _ServerState:
    """Claimed ranks and stored values of a TCP server."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), dict[str, str]()
        self.ranks: set[int] = set()

    def answer(self, request: dict[str, Any]) -> Any:
        """Answer one request, which has one of the keys `claim`, `put` and `prefix`."""
        with self.lock:
            if "claim" in request:
                rank = request["claim"]
                free = [r for r in (range(request["size"]) if rank is None else [rank]) if r not in self.ranks]
                self.ranks.update(free[:1])
                return free[0] if free else None
            if "put" in request:
                self.values[request["put"]] = request["value"]
                return True
            prefix = request["prefix"]
            return {key: value for key, value in self.values.items() if key.startswith(prefix)}


class _RequestHandler(socketserver.StreamRequestHandler):
    server: Any
    timeout = REQUEST_TIMEOUT_S

    def handle(self) -> None:
        """Read a request, which is one line of JSON, and write the answer."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a client that is not mrl gets no answer
            answer = self.server.state.answer(json.loads(self.rfile.readline(MAX_VALUE_BYTES)))
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    def __init__(self, address: tuple[str, int]) -> None:
        self.state = _ServerState()
        super().__init__(address, _RequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class TcpRendezvousStore:
    """RendezvousStore on a TCP server in the process of rank 0. Every process that can connect can read and write values."""

    def __init__(self, address: str, port: int, rank: int | None, timeout_s: float) -> None:
        """Start the server if `rank` is 0. If `rank` is None, start it only if this host has the address and the port is free.

        `timeout_s`: longest wait for the server of another host. Raises ValueError if rank 0 cannot listen at the address.
        """
        self.address, self.server, self.deadline = (address, port), None, time.monotonic() + timeout_s
        if rank in (0, None):
            try:
                self.server = _Server((socket.gethostbyname(address), port))
            except OSError as error:
                if rank == 0 or error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    raise ValueError(
                        f"--rendezvous {address}:{port}: rank 0 cannot listen there ({error.strerror or error}); "
                        "name an address of the first host and a free port."
                    ) from None

    def _request(self, request: dict[str, Any]) -> Any:
        if self.server:
            return json.loads(json.dumps(self.server.state.answer(request)))
        with (
            socket.create_connection(self.address, REQUEST_TIMEOUT_S) as connection,
            connection.makefile("rwb") as lines,
        ):
            lines.write(json.dumps(request).encode() + b"\n")
            lines.flush()
            return json.loads(lines.readline())

    def claim_rank(self, rank: int | None, size: int) -> int:
        """Claim a rank at the server of the first host.

        Raises ValueError if the server does not answer before the timeout, or if the rank is taken.
        """
        request = dict(claim=0 if self.server else rank, size=size)
        while True:
            try:
                claimed = self._request(request)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > self.deadline:
                    raise ValueError(
                        f"--rendezvous {':'.join(map(str, self.address))} does not answer ({error}); start the process on "
                        "the first host, and check that this host may connect to it."
                    ) from None
            time.sleep(POLL_S)
        if claimed is None:
            raise ValueError(
                f"--rendezvous: {f'all {size} ranks are' if rank is None else f'rank {rank} of {size} is'} taken; "
                "start one process per host."
            )
        return claimed

    def put(self, key: str, value: Any) -> None:
        """Store a value at the first host. Does nothing if the first host is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._request(dict(put=key, value=value))

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Read values from the first host. Returns {} if the first host is gone."""
        try:
            return self._request(dict(prefix=prefix))
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        """Stop the server on the first host. Does nothing on other hosts."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
