"""The picture before the run: what is where on imagined nodes, and the warnings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.placement import device_map_picture
from mrl.placement.device_map import found, imagined
from mrl.placement.resource_pools import STRATEGIES, Need, make_pools

PPO = {"actor": Need(8, 2), "critic": Need(4, 2), "engines": Need(6, 2)}
MIXED = {"policy": ["actor", "engines"], "value": ["critic", "teacher"]}


def words(layout) -> list[list[str]]:
    """Who is on each device, by node."""
    return [["+".join(c.tenants.values()) if c else "-" for c in node.cells] for node in layout.nodes]


def test_processes_fill_one_node_after_another():
    layout = imagined(make_pools({}, {"actor": Need(3), "engines": Need(4, 2)}), 4)
    assert words(layout) == [
        ["engine 0.0", "engine 0.1", "engine 1.0", "engine 1.1"],
        ["actor 0", "actor 1", "actor 2", "-"],
    ] or words(layout) == [
        ["actor 0", "actor 1", "actor 2", "-"],
        ["engine 0.0", "engine 0.1", "engine 1.0", "engine 1.1"],
    ]


def test_roles_of_a_pool_are_on_the_same_devices():
    layout = imagined(make_pools(MIXED, PPO), 8)
    shared = [f"actor {n}+engine {n // 2}.{n % 2}" for n in range(6)]
    assert words(layout) == [[*shared, "actor 6", "actor 7"], [f"critic {n}" for n in range(4)] + ["-"] * 4]
    assert any(
        "engines on 6 of its 8 GPUs" in w and "rollout.num_engines=4 would use all" in w for w in layout.warnings
    )


def test_what_waits_is_told_and_what_shares_does_not_wait():
    (warning,) = imagined(make_pools({}, PPO), 8).warnings
    assert "of 18, 10 while actor works, 14 while critic works, 12 while engines work" in warning
    assert "placement=colocated needs 8" in warning
    everything = {"all": list(PPO)}
    same = dict.fromkeys(PPO, Need(8))
    assert imagined(make_pools(everything, same), 8).warnings == ()


def test_neighbours_on_several_nodes_are_told():
    layout = imagined(make_pools({}, {"actor": Need(8, 8), "engines": Need(4, 2)}), 4)
    assert any("1 of 1 tensor-parallel groups of the actor are on more than one node" in w for w in layout.warnings)
    assert not any("engines are on more than one" in w for w in layout.warnings)


def test_strategies_decide_about_nodes():
    def nodes(strategy: str, size: int, gpus_per_node: int) -> list[int]:
        pools = make_pools({"a": {"roles": ["actor"], "strategy": strategy}}, {"actor": Need(size)})
        layout = imagined(pools, gpus_per_node)
        return [sum(cell is not None for cell in node.cells) for node in layout.nodes]

    assert nodes("PACK", 6, 4) == [4, 2] and nodes("SPREAD", 6, 4) == [3, 3]
    assert nodes("STRICT_PACK", 4, 4) == [4] and nodes("STRICT_SPREAD", 3, 4) == [1, 1, 1]
    with pytest.raises(
        ValueError, match=r"STRICT_PACK: its 6 slots are more than a node has \(cluster.gpus_per_node=4\)"
    ):
        nodes("STRICT_PACK", 6, 4)


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(STRATEGIES)), min_size=4, max_size=4))
def test_every_process_has_one_device_and_no_device_two_pools(asked):
    roles = ("actor", "critic", "teacher", "engines")
    section = {role: dict(roles=[role], strategy=strategy) for role, (_, strategy) in zip(roles, asked, strict=True)}
    needs = {role: Need(size) for role, (size, _) in zip(roles, asked, strict=True)}
    layout = imagined(make_pools(section, needs), 8)
    processes = [process for node in layout.nodes for cell in node.cells if cell for process in cell.tenants.values()]
    assert len(processes) == len(set(processes)) == sum(size for size, _ in asked)
    assert all(len(node.cells) == 8 for node in layout.nodes)


def test_a_picture_of_a_cluster_has_devices_in_their_own_columns():
    pools = make_pools({}, {"actor": Need(2), "engines": Need(2)})
    layout = found(pools, dict(actor=[("a", "2"), ("a", "3")], engines=[("a", "0"), ("b", "5")]), "GPU")
    assert words(layout) == [["engine 0", "-", "actor 0", "actor 1"], ["-"] * 5 + ["engine 1"]]
    cpu = found(pools, dict(actor=[("a", "")] * 2, engines=[("a", "")] * 2), "CPU slot")
    assert words(cpu) == [["actor 0", "actor 1", "engine 0", "engine 1"]]


def test_the_text_names_every_process_pool_and_total():
    said = device_map_picture.text(imagined(make_pools(MIXED, PPO), 8))
    for word in (
        "node 1",
        "actor 7",
        "engine 2.1",
        "critic 3",
        "policy",
        "engines' turn",
        "12 of 16 GPUs on 2 nodes",
        "! ",
    ):
        assert word in said, said


def test_many_like_nodes_are_one_row():
    said = device_map_picture.text(imagined(make_pools({}, {"actor": Need(512, 8), "engines": Need(64, 8)}), 8))
    assert "node 0 … node 63 (64)" in said and "actor 511" not in said and "576 GPUs on 72 nodes" in said
    assert len(said.splitlines()) < 20


def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "gpus.png"
    device_map_picture.draw(path, imagined(make_pools(MIXED, PPO), 8), title="a run")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
