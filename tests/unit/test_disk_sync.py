"""Weight sync through the disk: which engines it accepts."""

import pytest
from http_engines import HttpEngine

from mrl.weight_sync import disk_sync
from mrl.weight_sync.disk_sync import DiskSync
from mrl.weight_sync.engine_control import WeightSyncError

INFO = dict(device="cuda", dtype="bfloat16", tp_size=1, ep_size=1, enable_dp_attention=False, internal_states=[{}])


def connect(monkeypatch, tmp_path, *infos: dict, dead: bool = False) -> DiskSync:
    """Connect rank 0 to engines with these answers to /server_info. `dead`: whether the last engine has ended."""
    monkeypatch.setattr(disk_sync.dist, "get_rank", lambda: 0)
    engines = [type("Engine", (HttpEngine,), {"server_info": info})() for info in infos]
    try:
        if dead:
            engines[-1].stop()
        return DiskSync([engine.url for engine in engines], tmp_path, None, None, 5.0)  # type: ignore[arg-type]
    finally:
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize("change", [dict(device="cpu"), dict(dtype="float32"), dict(tp_size=2)])
def test_engines_that_differ_are_refused(monkeypatch, tmp_path, change):
    connect(monkeypatch, tmp_path, INFO, INFO).close()
    with pytest.raises(ValueError, match="engines must have the same device, dtype and parallel sizes"):
        connect(monkeypatch, tmp_path, INFO, INFO | change)


def test_each_engine_that_does_not_answer_is_named(monkeypatch, tmp_path):
    with pytest.raises(WeightSyncError, match="engines do not answer") as raised:
        connect(monkeypatch, tmp_path, INFO, INFO, dead=True)
    assert len(raised.value.failed) == 1
