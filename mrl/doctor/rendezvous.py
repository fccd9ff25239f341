"""Rendezvous of one process per host. The processes exchange JSON values through a shared folder or a TCP server."""

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

POLL_S = 0.1
REQUEST_TIMEOUT_S = 5.0  # of one request to the first host
MAX_VALUE_BYTES = 64 * 2**20


class RendezvousStore(Protocol):
    """Key-value store that all hosts reach. Each key is written by one process only."""

    def claim_rank(self, rank: int | None, size: int) -> int:
        """Claim this rank, or the first free rank for None. Raises ValueError if no such rank is free."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Store a JSON value. If the first host is gone, the value is lost without an error."""
        ...

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Return all keys with this prefix and their values; {} if the first host is gone."""
        ...

    def close(self) -> None:
        """Release the store's resources."""
        ...


class Rendezvous:
    """One of `size` processes that exchange values in named stages."""

    def __init__(self, store: RendezvousStore, rank: int | None, size: int) -> None:
        """Join with this rank, or with the first free rank for None. Raises ValueError if another check uses the store."""
        self.store, self.size = store, size
        self.rank = store.claim_rank(rank, size)

    def send(self, stage: str, value: Any) -> None:
        """Publish this process's value of a stage."""
        self.store.put(f"{stage}/{self.rank}", value)

    def receive(self, stage: str, ranks: Collection[int], timeout_s: float) -> dict[int, Any]:
        """Wait for the values of these ranks. Returns the values that arrived in time, by rank."""
        deadline = time.monotonic() + timeout_s
        while True:
            values = {int(key.rpartition("/")[2]): value for key, value in self.store.get_prefix(f"{stage}/").items()}
            if set(ranks) <= values.keys() or time.monotonic() > deadline:
                return {rank: values[rank] for rank in ranks if rank in values}
            time.sleep(POLL_S)

    def leave(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Leave. Rank 0 waits up to `timeout_s` until the other ranks have left, because they may still read values from it."""
        self.send("left", True)
        if self.rank == 0:
            self.receive("left", range(self.size), timeout_s)
        self.store.close()


class SharedFolderStore:
    """RendezvousStore in a folder that all hosts share: one file per key, written to a temporary name and then renamed."""

    def __init__(self, folder: str | Path) -> None:
        """Create the folder if necessary; raises ValueError if that fails."""
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--rendezvous {folder}: the folder cannot be created ({error.strerror}); name another folder."
            ) from None
        self.owns_folder = False

    def claim_rank(self, rank: int | None, size: int) -> int:
        """Create the rank's folder, which succeeds in one process only."""
        for candidate in range(size) if rank is None else [rank]:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"rank_{candidate}").mkdir()
                self.owns_folder = candidate == 0
                return candidate
        taken = "all ranks are taken" if rank is None else f"rank {rank} is taken"
        raise ValueError(f"{self.folder}: {taken} by another process; name a new folder for each check.")

    def put(self, key: str, value: Any) -> None:
        """Write a file; does nothing if rank 0 has removed the folder."""
        unfinished = self.folder / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            unfinished.write_text(json.dumps(value))
            os.replace(unfinished, self.folder / key.replace("/", "-"))

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Read the files that exist now. Returns {} if rank 0 has removed the folder."""
        start, values = prefix.replace("/", "-"), {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name.startswith(start):
                    values[prefix + name.removeprefix(start)] = json.loads((self.folder / name).read_text())
        return values

    def close(self) -> None:
        """Remove the folder, on rank 0."""
        if self.owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class _ServerState:
    """Claimed ranks and stored values of a TCP server."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), dict[str, str]()
        self.ranks: set[int] = set()

    def answer(self, request: dict[str, Any]) -> Any:
        """Answer one request: claim, put or prefix."""
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
        """Read a request, one line of JSON, and write the answer."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the client is not mrl: no answer
            answer = self.server.state.answer(json.loads(self.rfile.readline(MAX_VALUE_BYTES)))
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    def __init__(self, address: tuple[str, int]) -> None:
        self.state = _ServerState()
        super().__init__(address, _RequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class TcpRendezvousStore:
    """RendezvousStore on a TCP server in the first process. Every process that reaches the port can read and write."""

    def __init__(self, address: str, port: int, rank: int | None, timeout_s: float) -> None:
        """Start the server on rank 0. If `rank` is None, start it if the address belongs to this host and the port is free.

        `timeout_s`: longest wait for the server of another host. Raises ValueError if rank 0 cannot listen.
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
        """Claim a rank at the first host's server. Waits for the server up to the timeout.

        Raises ValueError if the server does not answer or the rank is taken.
        """
        request = dict(claim=0 if self.server else rank, size=size)
        while True:
            try:
                claimed = self._request(request)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > self.deadline:
                    raise ValueError(
                        f"--rendezvous {':'.join(map(str, self.address))} does not answer ({error}); is the first host's "
                        "process running, and may this host connect to it?"
                    ) from None
            time.sleep(POLL_S)
        if claimed is None:
            raise ValueError(
                f"--rendezvous: {f'all {size} ranks are' if rank is None else f'rank {rank} of {size} is'} taken; "
                "start one process per host."
            )
        return claimed

    def put(self, key: str, value: Any) -> None:
        """Store a value at the first host; does nothing if that host is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._request(dict(put=key, value=value))

    def get_prefix(self, prefix: str) -> dict[str, Any]:
        """Read values from the first host. Returns {} if that host is gone."""
        try:
            return self._request(dict(prefix=prefix))
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        """Stop the server, on the first host."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
