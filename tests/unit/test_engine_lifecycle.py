"""EngineLifecycle: how it replaces failed engines, and the weight version that the replacements get."""

import pytest
from scripted_lifecycle import scripted_lifecycle

from mrl.controller import engine_lifecycle
from mrl.controller.engine_lifecycle import EngineLifecycle
from mrl.core.types import SyncReport
from mrl.weight_sync.engine_control import WeightSyncError


def lifecycle(calls: list, failures: list[dict[str, str]]) -> EngineLifecycle:
    """Return a lifecycle that records its calls. The first pushes report these failures, and later pushes succeed."""

    def push(version: int, engines_were_offloaded: bool) -> list[SyncReport]:
        calls.append(("push", version))
        failed = failures.pop(0) if failures else {}
        return [SyncReport(1, 1, 1, 1, 0.0, 0.0, failed, False)]

    def connect(urls) -> dict[str, str]:
        calls.append(("connect", *urls))
        return {}

    def replace(urls) -> list[str]:
        calls.append(("replace", *urls))
        return ["new", "other"]

    return scripted_lifecycle(push, connect, replace, urls=["old", "other"], max_attempts=2)


def test_a_new_engine_gets_the_version_that_all_engines_serve():
    calls: list = []
    engines = lifecycle(calls, [])
    engines.push(4)
    engines.restore({"old": "its processes have ended"})
    assert calls == [("push", 4), ("replace", "old"), ("connect", "new", "other"), ("push", 4)]


def test_an_engine_that_fails_during_a_replacement_is_replaced_too_but_not_forever():
    calls: list = []
    engines = lifecycle(calls, [{}, {"other": "gone"}])
    engines.push(4)
    engines.restore({"old": "hangs"})
    assert [call for call in calls if call[0] == "replace"] == [("replace", "old"), ("replace", "other")]
    again = lifecycle(calls, [{}, {"other": "gone"}, {"other": "gone"}])
    again.push(4)
    with pytest.raises(WeightSyncError, match="weight version 4 did not reach every engine in 2 attempts"):
        again.restore({"old": "hangs"})


def test_offloaded_engines_release_all_their_memory_and_allocate_each_part_once(monkeypatch):
    calls: list = []

    class Control:
        def __init__(self, url: str, timeout_s: float) -> None:
            self.pause = lambda mode: calls.append("pause")
            self.resume = lambda: calls.append("resume")
            self.release_memory = lambda tags: calls.append(("release", *tags))
            self.resume_memory = lambda tags: calls.append(("allocate", *tags))

        def __enter__(self) -> "Control":
            return self

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(engine_lifecycle, "EngineControl", Control)
    engines = lifecycle([], [])
    engines._engines.pop("other")
    for act in (engines.offload, engines.offload, engines.load_weights, engines.load_kv_cache, engines.load_kv_cache):
        act()
    assert calls == [
        *("pause", ("release", "kv_cache", "weights", "cuda_graph"), "pause"),
        *(("allocate", "weights"), ("allocate", "cuda_graph", "kv_cache"), "resume", "resume"),
    ]
