"""Where the processes of several hosts meet: a folder that they share, or a port of the first host."""

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

LOOK_S = 0.1  # between looks
ANSWER_S = 5.0  # for one question to the first host
LARGEST_BYTES = 64 * 2**20  # of one value


class Store(Protocol):
    """Values under keys; whoever writes a key is the only one who does."""

    def claim(self, rank: int | None, size: int) -> int:
        """Take this rank, or the first that is free; raises ValueError where none is."""
        ...

    def put(self, key: str, value: Any) -> None:
        """Keep a value (JSON) under a key."""
        ...

    def under(self, prefix: str) -> dict[str, Any]:
        """All values whose key begins so; a question that gets no answer has no values."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class Meeting:
    """One of `size` processes that exchange values, stage by stage."""

    def __init__(self, store: Store, rank: int | None, size: int) -> None:
        """Join; `rank` None: the first that is free. Raises ValueError where the meeting point is of another meeting."""
        self.store, self.size = store, size
        self.rank = store.claim(rank, size)

    def say(self, stage: str, value: Any) -> None:
        """Tell the others."""
        self.store.put(f"{stage}/{self.rank}", value)

    def hear(self, stage: str, ranks: Collection[int], deadline_s: float) -> dict[int, Any]:
        """What those ranks said, as far as they did within the time."""
        end = time.monotonic() + deadline_s
        while True:
            said = {int(key.rpartition("/")[2]): value for key, value in self.store.under(f"{stage}/").items()}
            if set(ranks) <= said.keys() or time.monotonic() > end:
                return {rank: said[rank] for rank in ranks if rank in said}
            time.sleep(LOOK_S)

    def leave(self, deadline_s: float = ANSWER_S) -> None:
        """Go; the first waits a little for the others, who may not have read everything yet."""
        self.say("left", True)
        if self.rank == 0:
            self.hear("left", range(self.size), deadline_s)
        self.store.close()


class FolderStore:
    """Files in a folder that all hosts see. They appear whole: written beside, then renamed."""

    def __init__(self, folder: str | Path) -> None:
        """Use the folder, or make it; raises ValueError where that cannot be."""
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--rendezvous {folder}: it cannot be made ({error.strerror}); name a folder.") from None
        self.first = False

    def claim(self, rank: int | None, size: int) -> int:
        """A folder for each rank, which only one process can make."""
        for candidate in range(size) if rank is None else [rank]:
            with contextlib.suppress(FileExistsError):
                (self.folder / f"rank_{candidate}").mkdir()
                self.first = candidate == 0
                return candidate
        raise ValueError(f"{self.folder}: {self._taken(rank)} by another process; name a new folder for each check.")

    def _taken(self, rank: int | None) -> str:
        return "all ranks are taken" if rank is None else f"rank {rank} is taken"

    def put(self, key: str, value: Any) -> None:
        """As a file; lost where the first is gone, and the folder with it."""
        unfinished = self.folder / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            unfinished.write_text(json.dumps(value))
            os.replace(unfinished, self.folder / key.replace("/", "-"))

    def under(self, prefix: str) -> dict[str, Any]:
        """Of the files that are there now; none where the first is gone, and the folder with it."""
        start, found = prefix.replace("/", "-"), {}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if name.startswith(start):
                    found[prefix + name.removeprefix(start)] = json.loads((self.folder / name).read_text())
        return found

    def close(self) -> None:
        """The first removes the folder."""
        if self.first:
            shutil.rmtree(self.folder, ignore_errors=True)


class _Kept:
    """What the first host's server knows."""

    def __init__(self) -> None:
        self.lock, self.values = threading.Lock(), dict[str, str]()
        self.ranks: set[int] = set()

    def answer(self, question: dict[str, Any]) -> Any:
        """One question, one answer."""
        with self.lock:
            if "claim" in question:
                asked = question["claim"]
                free = [r for r in (range(question["size"]) if asked is None else [asked]) if r not in self.ranks]
                self.ranks.update(free[:1])
                return free[0] if free else None
            if "put" in question:
                self.values[question["put"]] = question["value"]
                return True
            prefix = question["under"]
            return {key: value for key, value in self.values.items() if key.startswith(prefix)}


class _Asked(socketserver.StreamRequestHandler):
    server: Any
    timeout = ANSWER_S

    def handle(self) -> None:
        """Read a line, answer a line."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a stranger's line: no answer
            answer = self.server.kept.answer(json.loads(self.rfile.readline(LARGEST_BYTES)))
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 1024

    def __init__(self, address: tuple[str, int]) -> None:
        self.kept = _Kept()
        super().__init__(address, _Asked)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class TcpStore:
    """A small server in the first process; the others ask it. Everybody who reaches the port can read and write."""

    def __init__(self, address: str, port: int, rank: int | None, deadline_s: float) -> None:
        """Serve where `rank` is 0, or where it is None and the address is this host's and free; raises ValueError, OSError."""
        self.address, self.server, self.end = (address, port), None, time.monotonic() + deadline_s
        if rank in (0, None):
            try:
                self.server = _Server((socket.gethostbyname(address), port))
            except OSError as error:
                if rank == 0 or error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                    raise ValueError(
                        f"--rendezvous {address}:{port}: rank 0 cannot listen there ({error.strerror or error}); "
                        "name an address of the first host and a free port."
                    ) from None

    def _ask(self, question: dict[str, Any]) -> Any:
        if self.server:
            return json.loads(json.dumps(self.server.kept.answer(question)))
        with socket.create_connection(self.address, ANSWER_S) as connection, connection.makefile("rwb") as lines:
            lines.write(json.dumps(question).encode() + b"\n")
            lines.flush()
            return json.loads(lines.readline())

    def claim(self, rank: int | None, size: int) -> int:
        """Wait for the first host's server, up to the deadline; raises ValueError."""
        asked = 0 if self.server else rank
        while True:
            try:
                claimed = self._ask(dict(claim=asked, size=size))
                break
            except (OSError, ValueError) as error:
                if time.monotonic() > self.end:
                    raise ValueError(
                        f"--rendezvous {':'.join(map(str, self.address))} does not answer ({error}); is the first host's "
                        "process there, and may this host connect to it?"
                    ) from None
            time.sleep(LOOK_S)
        if claimed is None:
            raise ValueError(
                f"--rendezvous: rank {'any' if rank is None else rank} of {size} is taken; start one process per host."
            )
        return claimed

    def put(self, key: str, value: Any) -> None:
        """At the first host; lost where it is gone."""
        with contextlib.suppress(OSError, ValueError):
            self._ask(dict(put=key, value=value))

    def under(self, prefix: str) -> dict[str, Any]:
        """Nothing where the first host is gone."""
        try:
            return self._ask(dict(under=prefix))
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        """The first stops serving."""
        if self.server:
            self.server.shutdown()
            self.server.server_close()
