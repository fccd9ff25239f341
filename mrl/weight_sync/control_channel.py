"""Control channel of a weight sync: a key-value store on trainer rank 0 that every sender and receiver can reach.

The channel carries small values: the plan, bucket headers, acknowledgements, receipts and failures. The weights themselves travel
through a transport (mrl/weight_sync/transports.py).
"""

from __future__ import annotations

import hmac
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from mrl.config.secrets import engine_key
from mrl.weight_sync.engine_control import PeerError
from parallel.collectives import listen, open_tcp_store

POLL_S = 0.5  # seconds; a rank that waits for another rank checks at this interval whether the other rank has failed
SIGNATURE_BYTES = 32  # length of an HMAC-SHA-256
RECEIVER_TIMEOUT_FACTOR = 3
"""An engine rank waits for a bucket this many times as long as a sender waits for an acknowledgement.

The reason is that the sender may have to wait for another engine before it sends the bucket."""

NO_PUSH = "open"  # replaces the name of the push in a failure_key if the failure belongs to no push
TRANSPORT_KEY = "transport"  # key of the SharedBuffersSetup or ProcessGroupSetup by which receivers connect to senders


class EngineAction(StrEnum):
    """What a message from the coordinator asks every rank of an engine to do (mrl/weight_sync/receiver.py)."""

    REGISTER_DRAFT = "register_draft"  # the only message to the draft model of speculative decoding
    BEGIN_SESSION = "begin_session"
    CHECK_PLAN = "check_plan"
    CONNECT = "connect"
    LOAD = "load"


# Keys of the channel. Engine ranks are numbered over all engines. `push_name` is the name of one push.


def rank_info_key(engine_rank: int) -> str:
    """Return the key of an engine rank's EngineRankInfo."""
    return f"rank_info/{engine_rank}"


def sender_plan_key(trainer_rank: int) -> str:
    """Return the key of the buckets that a trainer rank sends."""
    return f"plan/sender/{trainer_rank}"


def receiver_plan_key(engine_rank: int) -> str:
    """Return the key of the buckets that an engine rank receives."""
    return f"plan/receiver/{engine_rank}"


def plan_checked_key(engine_rank: int) -> str:
    """Return the key that an engine rank sets after it has checked its plan."""
    return f"plan_checked/{engine_rank}"


def connected_key(engine_rank: int) -> str:
    """Return the key that an engine rank sets after it has connected to the senders."""
    return f"connected/{engine_rank}"


def header_key(push_name: str, bucket: str) -> str:
    """Return the key of a bucket's header. `bucket` is Bucket.key."""
    return f"{push_name}/header/{bucket}"


def chain_header_key(push_name: str, bucket: str) -> str:
    """Return the key of the header that the first rank of a relay chain sets for the other ranks. `bucket` is RelayStep.chain."""
    return f"{push_name}/chain/{bucket}"


def ack_key(push_name: str, bucket: str, engine_rank: int) -> str:
    """Return the key that an engine rank sets after it has copied a bucket. This acknowledges the bucket."""
    return f"{push_name}/ack/{bucket}/{engine_rank}"


def receipt_key(push_name: str, engine_rank: int) -> str:
    """Return the key of an engine rank's receipt: a list of the chunks that differ from the sent weights."""
    return f"{push_name}/receipt/{engine_rank}"


def failure_key(push_name: str, engine_rank: int) -> str:
    """Return the key of the reason why an engine rank is excluded from a push."""
    return f"{push_name}/failed/{engine_rank}"


class ControlChannel:
    """Key-value store with one namespace per session. A wait raises PeerError after `timeout_s` seconds.

    `session` is the unique name of a session.
    """

    def __init__(self, store: Store, session: str, timeout_s: float) -> None:
        self.store, self.session = PrefixStore(session, store), session
        self.timeout_s = timeout_s

    @classmethod
    def host(cls, address: str, session: str, timeout_s: float) -> tuple[ControlChannel, int]:
        """Open the store in this process on a free port, and return the channel and the port."""
        store = open_tcp_store(listen(address, 0), timedelta(seconds=timeout_s))
        return cls(store, session, timeout_s), store.port

    @classmethod
    def join(cls, address: str, port: int, session: str, timeout_s: float) -> ControlChannel:
        """Connect to the store that another process hosts."""
        store = TCPStore(address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
        return cls(store, session, timeout_s)

    def put(self, key: str, value: Any) -> None:
        """Set a key. The value is pickled and signed, because any process that reaches the port can write to the store."""
        data = pickle.dumps(value)
        self.store.set(key, self._signature(key, data) + data)  # type: ignore[bad-argument-type]  # takes bytes too

    def get(self, key: str, failure_keys: Sequence[str] = ()) -> Any:
        """Wait for a key and return its value. Raises PeerError early if one of `failure_keys` is set."""
        self.wait([key], failure_keys)
        return self._read(key)

    def get_if_set(self, key: str) -> Any:
        """Return the value of a key, or None if the key is not set."""
        return self._read(key) if self.store.check([key]) else None

    def wait(self, keys: Sequence[str], failure_keys: Sequence[str] = ()) -> None:
        """Wait until all `keys` are set.

        Raises PeerError at the deadline, or with the reason of a failure as soon as one of `failure_keys` is set.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                self.store.wait(list(keys), timedelta(seconds=min(POLL_S, self.timeout_s)))
                return
            except DistNetworkError as error:
                raise PeerError(f"the control channel of the weight sync is lost: {error}") from error
            except DistStoreError:  # not set within POLL_S
                for key in failure_keys:
                    if reason := self.get_if_set(key):
                        raise PeerError(str(reason)) from None
                if time.monotonic() > deadline:
                    raise PeerError(f"{', '.join(keys)} was not set within {self.timeout_s} s.") from None

    def wait_or_mark_failed(self, key: str, failure: str) -> bool:
        """Wait for `key`, and return whether it was set.

        Returns False as soon as the key `failure` is set. Sets `failure` itself if the deadline passes.
        """
        try:
            self.wait([key], [failure])
        except PeerError as error:
            if self.get_if_set(failure) is None:
                self.put(failure, str(error))
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys that no rank will read again."""
        for key in keys:
            self.store.delete_key(key)

    def _read(self, key: str) -> Any:
        """Read and unpickle the value of a key. Raises PeerError if its signature is wrong."""
        value = self.store.get(key)
        signature, data = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, data)):
            raise PeerError(f"{key} on the control channel was not written by this run; see docs/troubleshooting.md.")
        return pickle.loads(data)

    def _signature(self, key: str, data: bytes) -> bytes:
        return hmac.digest(engine_key().encode(), f"{self.session}/{key}\0".encode() + data, "sha256")
