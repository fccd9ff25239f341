"""An engine that ends before it is ready: tried again where its kind has run before, or where somebody killed it."""

from dataclasses import dataclass

import pytest
from http_engines import spec_of

from mrl.config.schema import FaultsConfig
from mrl.rollout import engines
from mrl.rollout.engines import Engines
from mrl.rollout.server import EngineServer

KILLED, FAILED, READY = "killed", "failed", "ready"


@dataclass
class World:
    """How servers begin, in the order of their starts; those after the last are ready."""

    fates: list[str]
    started: int = 0
    stopped: int = 0


@pytest.fixture
def start(monkeypatch, tmp_path):
    """`start(fates, **settings)` -> Engines on servers without processes, and their world."""

    def start(fates: list[str], **settings) -> tuple[Engines, World]:
        world = World(fates)

        class Server(EngineServer):
            def start(self) -> None:
                self.fate = world.fates[world.started] if world.started < len(world.fates) else READY
                world.started += 1

            def wait_ready(self, timeout_s: float) -> None:
                if self.fate != READY:
                    raise RuntimeError(f"the SGLang server at {self.url} ended before it was ready")

            @property
            def was_killed(self) -> bool:
                return self.fate == KILLED

            def stop(self, timeout_s: float = 20.0) -> None:
                super().stop(timeout_s)
                world.stopped += 1

        monkeypatch.setattr(engines, "EngineServer", Server)
        own = dict(num_engines=2, server_args={}, deterministic=False, faults=FaultsConfig(engine_tries=3))
        return Engines(spec_of(tmp_path, **own | settings)), world

    return start


def test_engines_in_place_of_others_may_end_before_they_are_ready(start):
    """However they ended: engines of this kind have run."""
    made, world = start([READY, READY, FAILED, KILLED, FAILED])
    before = made.wait_ready(10)
    after = made.replace([before[1]], 10)
    assert after[0] == before[0] and after[1] not in before
    assert (world.started, world.stopped) == (6, 4), "those that ended leave nothing behind"
    made.close()


def test_engines_that_end_again_and_again_end_the_run(start):
    made, world = start([READY, READY, *[FAILED] * 10])
    before = made.wait_ready(10)
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        made.replace([before[0]], 10)
    assert world.started == 2 + 1 + 3, "its successor, and faults.engine_tries after that"
    made.close()


def test_a_mistake_in_the_arguments_is_told_at_the_first_start(start):
    made, world = start([FAILED])
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        made.wait_ready(10)
    assert world.started == 2
    made.close()


def test_an_engine_that_was_killed_at_the_first_start_is_tried_once_more(start):
    made, world = start([KILLED])
    made.wait_ready(10)
    assert world.started == 3
    made.close()
    made, world = start([KILLED, READY, KILLED])
    with pytest.raises(RuntimeError, match="ended before it was ready"):
        made.wait_ready(10)
    made.close()
