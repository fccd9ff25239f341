"""Engines on slots of their own: which GPUs they see, how they are cut over nodes, and when they are used."""

import pytest
from http_engines import spec_of

from mrl.core.device_slot import Slot
from mrl.rollout import engines
from mrl.rollout.engines import Engines
from mrl.rollout.host import by_node, visible
from mrl.rollout.server import EngineServer
from mrl.rollout.server_args import check_server_args


def slots(*places: str) -> list[Slot]:
    """Slots such as "a2": GPU 2 of node a."""
    return [Slot(place[0], f"host of {place[0]}", place[1:], {}) for place in places]


def test_a_server_sees_its_own_gpus_in_the_order_of_its_ranks():
    assert visible(slots("a6", "a7", "a4")) == {"CUDA_VISIBLE_DEVICES": "6,7,4"}
    assert visible(slots("a", "a")) == {}, "a CPU has no number"


def test_an_engine_has_equally_many_ranks_on_each_of_its_nodes():
    assert by_node(slots("a0", "a1", "b4", "b5")) == [slots("a0", "a1"), slots("b4", "b5")]
    with pytest.raises(
        ValueError, match="engine_tp=4: an engine would have 3 on host of a, 1 on host of b, and SGLang"
    ):
        by_node(slots("a0", "a1", "a2", "b0"))


def test_ranks_of_several_nodes_do_not_meet_in_a_file(tmp_path):
    def environment(**more) -> dict[str, str]:
        server = EngineServer(dict(model_path="m", **more), tmp_path / "log")
        try:
            return server._environment(tmp_path)
        finally:
            server.stop()

    where = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    assert environment()[where] == f"file://{tmp_path}/rendezvous"
    assert where not in environment(nnodes=2, node_rank=1, dist_init_addr="10.0.0.1:20000")


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "dist_init_addr"])
def test_how_an_engine_lies_on_nodes_is_not_set_by_hand(name):
    with pytest.raises(ValueError, match=rf"sglang.{name}=2 is set by mrl; use "):
        check_server_args({name: 2})


def test_engines_are_where_their_slots_are_also_those_in_place_of_others(monkeypatch, tmp_path):
    started = []

    class Hosted:
        def __init__(self, slots, arguments, log_path, env):
            self.slots, self.url, self.log_path = slots, log_path.stem, log_path
            started.append((slots(), arguments["random_seed"], log_path.name, env["MRL_STACKS_NAME"]))

        def start(self) -> None: ...

        def wait_ready(self, timeout_s: float) -> None: ...

        def stop(self, timeout_s: float = 20.0) -> None: ...

        def alive(self) -> bool:
            return True

    monkeypatch.setattr(engines, "HostedEngine", Hosted)
    made = Engines(spec_of(tmp_path, num_engines=2, server_args={}, slots=lambda number: f"slots of {number}", seed=7))
    assert made.wait_ready(1) == ["engine_0", "engine_1"]
    assert made.replace(["engine_1"], 1) == ["engine_0", "engine_2"]
    made.close()
    assert started == [
        ("slots of 0", 7, "engine_0.log", "engine_0"),
        ("slots of 1", 8, "engine_1.log", "engine_1"),
        ("slots of 1", 9, "engine_2.log", "engine_2"),
    ]
