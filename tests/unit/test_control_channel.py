"""The control channel: its store listens on one address, and only values with the signature of the run are unpickled."""

import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from mrl.weight_sync.control_channel import ControlChannel
from mrl.weight_sync.engine_control import PeerError
from parallel.collectives import listen, open_tcp_store


def reaches(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def test_a_store_listens_on_its_own_address_only():
    store = open_tcp_store(listen("127.0.0.1", 0), timedelta(seconds=5))
    assert reaches("127.0.0.1", store.port) and not reaches("127.0.0.2", store.port)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def channels():
    hosted, port = ControlChannel.host("127.0.0.1", "session", 5.0)
    return hosted, ControlChannel.join("127.0.0.1", port, "session", 5.0)


def test_no_other_process_can_take_the_port_of_a_listener_before_its_store_opens():
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(OSError, match="Address already in use"):
        listen("127.0.0.1", port)
    # a client may connect before the store serves requests
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(TCPStore, "127.0.0.1", port, None, False, timedelta(seconds=20))
        time.sleep(0.5)
        store = open_tcp_store(listener, timedelta(seconds=5))
        assert store.port == port
        store.set("key", "value")
        assert joined.result().get("key") == b"value"


def test_a_value_put_at_one_end_is_read_at_the_other(channels):
    channels[0].put("plan/0", {"buckets": [1, 2]})
    assert channels[1].get("plan/0") == {"buckets": [1, 2]} and channels[1].get_if_set("plan/1") is None


def test_a_value_without_the_runs_signature_is_not_unpickled(channels, tmp_path):
    hosted, joined = channels
    hosted.store.set("transport", pickle.dumps(Malicious(tmp_path / "harm")))
    with pytest.raises(PeerError, match="transport on the control channel was not written by this run"):
        joined.get("transport")
    assert not (tmp_path / "harm").exists()


def test_a_signed_value_is_refused_under_another_key(channels):
    hosted, joined = channels
    hosted.put("open", "yes")
    hosted.store.set("dead", hosted.store.get("open"))
    with pytest.raises(PeerError, match="dead on the control channel"):
        joined.get("dead")
