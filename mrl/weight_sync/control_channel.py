"""The control channel of a sync: a key-value store on the first trainer rank that every sender and receiver reaches."""

from __future__ import annotations

import hmac
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from mrl.config.secrets import engine_key
from mrl.weight_sync.errors import PeerError
from parallel.collectives import open_tcp_store

SLICE_S = 0.5  # a wait looks this often whether those it waits for have failed
_PROOF_BYTES = 32  # SHA-256


class ControlChannel:
    """Values by key, one namespace per session. What never comes is a PeerError after `timeout_s` seconds."""

    def __init__(self, store: Store, session: str, timeout_s: float) -> None:
        self.store, self.session = PrefixStore(session, store), session
        self.timeout_s = timeout_s

    @classmethod
    def host(cls, address: str, session: str, timeout_s: float) -> tuple[ControlChannel, int]:
        """Open the store in this process; returns the channel and the store's port, which the store picks."""
        store = open_tcp_store(address, 0, timedelta(seconds=timeout_s))
        return cls(store, session, timeout_s), store.port

    @classmethod
    def join(cls, address: str, port: int, session: str, timeout_s: float) -> ControlChannel:
        """Reach the store that another process hosts."""
        store = TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
        return cls(store, session, timeout_s)

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, self._sealed(key, value))  # type: ignore[bad-argument-type]  # takes bytes too

    def get(self, key: str, dead: Sequence[str] = ()) -> Any:
        """The value, waited for; `dead`: keys whose presence means that it will never come."""
        self.wait([key], dead)
        return self._opened(key)

    def peek(self, key: str) -> Any:
        """The value, or None where there is none yet."""
        return self._opened(key) if self.store.check([key]) else None

    def _sealed(self, key: str, value: Any) -> bytes:
        """The pickled value behind a proof that a process of this run wrote it: anyone who reaches a store may write there."""
        data = pickle.dumps(value)
        return self._proof(key, data) + data

    def _opened(self, key: str) -> Any:
        """The value, unpickled only where the proof is right. Raises PeerError."""
        found = self.store.get(key)
        proof, data = found[:_PROOF_BYTES], found[_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(key, data)):
            raise PeerError(f"{key} on the control channel was not written by this run; see docs/security.md.")
        return pickle.loads(data)

    def _proof(self, key: str, data: bytes) -> bytes:
        return hmac.digest(engine_key().encode(), f"{self.session}/{key}\0".encode() + data, "sha256")

    def wait(self, keys: Sequence[str], dead: Sequence[str] = ()) -> None:
        """Until all `keys` are there. Raises PeerError at the deadline, or when a `dead` key says who failed."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self.store.wait(list(keys), timedelta(seconds=min(SLICE_S, self.timeout_s)))
                return
            except DistNetworkError as error:
                raise PeerError(f"the control channel of the weight sync is gone: {error}") from error
            except DistStoreError:  # not within this slice
                for key in dead:
                    if reason := self.peek(key):
                        raise PeerError(str(reason)) from None
                if time.monotonic() > deadline:
                    raise PeerError(f"{', '.join(keys)} did not come within {self.timeout_s} s.") from None

    def arrives(self, key: str, dead: str) -> bool:
        """Wait for `key`; false where it does not come, because `dead` is there or the deadline passed: then it is put there."""
        try:
            self.wait([key], [dead])
        except PeerError as error:
            if self.peek(dead) is None:
                self.put(dead, str(error))
            return False
        return True

    def drop(self, keys: Sequence[str]) -> None:
        """Forget keys that nobody will ask for again."""
        for key in keys:
            self.store.delete_key(key)
