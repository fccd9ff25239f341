"""Engines that failed at their work get successors with the weights of all, before anything is asked of them."""

import pytest

from mrl.core.types import SyncReport
from mrl.weight_sync.driver import WeightSync
from mrl.weight_sync.errors import SyncError


def driver(done: list, failures: list[dict[str, str]]) -> WeightSync:
    """Notes what is done; pushes fail as listed, then succeed."""

    def push(version: int) -> list[SyncReport]:
        done.append(("push", version))
        failed = failures.pop(0) if failures else {}
        return [SyncReport(1, 1, 1, 1, 0.0, 0.0, failed, False)]

    def connect(urls) -> dict[str, str]:
        done.append(("connect", *urls))
        return {}

    def replace(urls) -> list[str]:
        done.append(("replace", *urls))
        return ["new", "other"]

    return WeightSync(push, connect, replace, tries=2)


def test_a_successor_gets_the_version_that_all_serve():
    done: list = []
    sync = driver(done, [])
    sync.push(4)
    sync.restore({"old": "its processes have ended"})
    assert done == [("push", 4), ("replace", "old"), ("connect", "new", "other"), ("push", 4)]


def test_one_that_fails_meanwhile_is_replaced_too_but_not_for_ever():
    done: list = []
    sync = driver(done, [{}, {"other": "gone"}])
    sync.push(4)
    sync.restore({"old": "hangs"})
    assert [what for what in done if what[0] == "replace"] == [("replace", "old"), ("replace", "other")]
    again = driver(done, [{}, {"other": "gone"}, {"other": "gone"}])
    again.push(4)
    with pytest.raises(SyncError, match="version 4 did not reach every engine in 2 attempts"):
        again.restore({"old": "hangs"})
