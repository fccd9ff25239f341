"""Device maps: processes on planned and actual nodes, warnings, and pictures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.placement.device_map import (
    actual_device_map,
    device_map_text,
    draw_device_map,
    idle_gpus_of_job,
    planned_device_map,
    summarize,
)
from mrl.placement.resource_pools import STRATEGIES, SlotDemand, make_pools

PPO = {"actor": SlotDemand(8, 2), "critic": SlotDemand(4, 2), "engines": SlotDemand(6, 2)}
MIXED = {"policy": ["actor", "engines"], "value": ["critic", "teacher"]}


def processes(devices) -> list[list[str]]:
    """Return, for each node, the names of the processes on each of its devices."""
    return [["+".join(c.processes.values()) if c else "-" for c in node.cells] for node in devices.nodes]


def test_processes_fill_one_node_after_another():
    devices = planned_device_map(make_pools({}, {"actor": SlotDemand(3), "engines": SlotDemand(4, 2)}), 4)
    assert processes(devices) == [
        ["engine 0.0", "engine 0.1", "engine 1.0", "engine 1.1"],
        ["actor 0", "actor 1", "actor 2", "-"],
    ] or processes(devices) == [
        ["actor 0", "actor 1", "actor 2", "-"],
        ["engine 0.0", "engine 0.1", "engine 1.0", "engine 1.1"],
    ]


def test_roles_of_a_pool_are_on_the_same_devices():
    devices = planned_device_map(make_pools(MIXED, PPO), 8)
    shared = [f"actor {n}+engine {n // 2}.{n % 2}" for n in range(6)]
    assert processes(devices) == [[*shared, "actor 6", "actor 7"], [f"critic {n}" for n in range(4)] + ["-"] * 4]
    assert any(
        "engines use only 6 of the pool's 8 GPUs" in w and "rollout.num_engines=4 would use all" in w
        for w in devices.warnings
    )


def test_idle_gpus_are_a_warning_unless_roles_share_them():
    warning, unused = planned_device_map(make_pools({}, PPO), 8).warnings
    assert unused.startswith("6 of the job's 24 GPUs stay idle in the whole run")
    assert "of the 18 GPUs are idle: 10 while actor works, 14 while critic works, 12 while engines work" in warning
    assert "placement=colocated needs only 8 GPUs" in warning
    (one,) = planned_device_map(make_pools({}, {"actor": SlotDemand(1), "engines": SlotDemand(1)}), 2).warnings
    assert one.endswith("placement=colocated needs only 1 GPU.")
    everything = {"all": list(PPO)}
    same = dict.fromkeys(PPO, SlotDemand(8))
    assert planned_device_map(make_pools(everything, same), 8).warnings == ()


def test_the_gpus_of_a_job_that_no_role_uses_are_named():
    pools = make_pools({}, {"actor": SlotDemand(4), "engines": SlotDemand(2)})
    (warning,) = idle_gpus_of_job(pools, [8, 8])
    assert warning.startswith("10 of the job's 16 GPUs stay idle in the whole run")
    assert "node 0 GPU 6-7; node 1 GPU 0-7" in warning and "parallel.dp, rollout.num_engines" in warning
    assert any("node 1 GPU 0-7" in warning for warning in planned_device_map(pools, 8, 2).warnings)
    assert idle_gpus_of_job(pools, [4, 3]) == [
        "1 of the job's 7 GPUs stays idle in the whole run, because no role uses them."
    ]
    assert idle_gpus_of_job(pools, [6]) == idle_gpus_of_job(pools, [2, 4]) == idle_gpus_of_job(pools, [0]) == []


def test_a_tensor_parallel_group_on_several_nodes_is_a_warning():
    devices = planned_device_map(make_pools({}, {"actor": SlotDemand(8, 8), "engines": SlotDemand(4, 2)}), 4)
    assert any("1 of 1 tensor-parallel groups of the actor is on more than one node" in w for w in devices.warnings)
    assert not any("engines are on more than one" in w for w in devices.warnings)


def test_a_strategy_decides_how_slots_are_distributed_over_nodes():
    def nodes(strategy: str, size: int, gpus_per_node: int) -> list[int]:
        pools = make_pools({"a": {"roles": ["actor"], "strategy": strategy}}, {"actor": SlotDemand(size)})
        devices = planned_device_map(pools, gpus_per_node)
        return [sum(cell is not None for cell in node.cells) for node in devices.nodes]

    assert nodes("PACK", 6, 4) == [4, 2] and nodes("SPREAD", 6, 4) == [3, 3]
    assert nodes("STRICT_PACK", 4, 4) == [4] and nodes("STRICT_SPREAD", 3, 4) == [1, 1, 1]
    with pytest.raises(
        ValueError, match=r"STRICT_PACK: the pool has 6 slots, and a node has fewer \(cluster.gpus_per_node=4\)"
    ):
        nodes("STRICT_PACK", 6, 4)


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(STRATEGIES)), min_size=4, max_size=4))
def test_every_process_is_on_one_device(sizes):
    roles = ("actor", "critic", "teacher", "engines")
    section = {role: dict(roles=[role], strategy=strategy) for role, (_, strategy) in zip(roles, sizes, strict=True)}
    needs = {role: SlotDemand(size) for role, (size, _) in zip(roles, sizes, strict=True)}
    devices = planned_device_map(make_pools(section, needs), 8)
    names = [process for node in devices.nodes for cell in node.cells if cell for process in cell.processes.values()]
    assert len(names) == len(set(names)) == sum(size for size, _ in sizes)
    assert all(len(node.cells) == 8 for node in devices.nodes)


def test_a_map_of_a_cluster_has_one_column_per_device():
    pools = make_pools({}, {"actor": SlotDemand(2), "engines": SlotDemand(2)})
    devices = actual_device_map(pools, dict(actor=[("a", "2"), ("a", "3")], engines=[("a", "0"), ("b", "5")]), "GPU")
    assert processes(devices) == [["engine 0", "-", "actor 0", "actor 1"], ["-"] * 5 + ["engine 1"]]
    cpu = actual_device_map(pools, dict(actor=[("a", "")] * 2, engines=[("a", "")] * 2), "CPU slot")
    assert processes(cpu) == [["actor 0", "actor 1", "engine 0", "engine 1"]]


def test_the_text_names_every_process_pool_and_total():
    text = device_map_text(planned_device_map(make_pools(MIXED, PPO), 8))
    for word in (
        "node 1",
        "actor 7",
        "engine 2.1",
        "critic 3",
        "policy",
        "engines work",
        "12 of 16 GPUs on 2 nodes",
        "! ",
    ):
        assert word in text, text


def test_one_device_and_one_node_are_named_in_the_singular():
    one = planned_device_map(
        make_pools({"all": ["actor", "engines"]}, dict.fromkeys(["actor", "engines"], SlotDemand(1))), 1
    )
    assert summarize(one) == "1 GPU on 1 node"


def test_other_models_work_before_the_critic():
    text = device_map_text(planned_device_map(make_pools({}, PPO | {"judge": SlotDemand(2)}), 8))
    order = [text.index(f"{role} works") for role in ("judge", "critic", "actor")]
    assert order == sorted(order), text


def test_many_equal_nodes_share_one_row():
    text = device_map_text(
        planned_device_map(make_pools({}, {"actor": SlotDemand(512, 8), "engines": SlotDemand(64, 8)}), 8)
    )
    assert "node 0 … node 63 (64)" in text and "actor 511" not in text and "576 GPUs on 72 nodes" in text
    assert len(text.splitlines()) < 20


@pytest.mark.extended
def test_the_picture_is_drawn(tmp_path):
    path = tmp_path / "gpus.png"
    draw_device_map(path, planned_device_map(make_pools(MIXED, PPO), 8), title="a run")
    assert path.read_bytes().startswith(b"\x89PNG") and list(tmp_path.iterdir()) == [path]
