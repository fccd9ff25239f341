"""Resource pools: their roles, their sizes, error messages, and groups of slots on one node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.process_schema import ClusterConfig
from mrl.config.schema import RolloutConfig
from mrl.placement.resource_pools import (
    ROLES,
    SlotDemand,
    check_capacity,
    make_pools,
    order_by_tp_groups,
    slot_demands,
    with_node_count,
)
from parallel.dims import ParallelDims

PPO = {"actor": SlotDemand(8, 2), "critic": SlotDemand(4, 2), "engines": SlotDemand(6, 1)}
COLOCATED = {"all": ["actor", "critic", "teacher", "engines"]}
MIXED = {"policy": ["actor", "engines"], "value": ["critic", "teacher"]}


@pytest.mark.parametrize(
    ("section", "sizes", "shared"),
    [
        ({}, dict(actor=8, critic=4, engines=6), set()),
        (COLOCATED, dict(all=8), {frozenset(PPO)}),
        (MIXED, dict(policy=8, value=4), {frozenset({"actor", "engines"})}),
        (
            {"a": {"roles": ["actor", "critic"], "gpus": 16}, "b": ["engines"]},
            dict(a=16, b=6),
            {frozenset({"actor", "critic"})},
        ),
    ],
)
def test_a_pool_is_as_large_as_the_largest_of_its_roles(section, sizes, shared):
    pools = make_pools(section, PPO)
    assert {pool.name: pool.size for pool in pools.pools} == sizes
    assert pools.size == sum(sizes.values()) and pools.colocated_roles == shared
    assert set(pools.by_role) == set(PPO), "every role of the run is in a pool, and no other role"


@pytest.mark.parametrize(
    ("cluster", "nodes"),
    [
        (dict(gpus_per_node=8), 3),
        (dict(gpus_per_node=8, nodes=5), 5),
        (dict(gpus_per_node=8, components=[dict(nodes=2, gpus_per_node=4)]), 2),
        (dict(gpus_per_node=8, components=[dict(nodes=9)]), 1),
        (dict(gpus_per_node=0), 1),
    ],
)
def test_a_job_has_the_nodes_that_its_pools_need(cluster, nodes):
    assert with_node_count(ClusterConfig(**cluster), make_pools({}, PPO)).nodes == nodes, "18 slots"


def test_slot_demands_follow_from_layouts_and_engines():
    dims = dict(actor=ParallelDims(tp=2, dp=3), teacher=ParallelDims(pp=2))
    engines = RolloutConfig(num_engines=3, engine_tp=2)
    assert slot_demands(engines, dims) == dict(
        actor=SlotDemand(6, 2), teacher=SlotDemand(2, 1), engines=SlotDemand(6, 2)
    )


@pytest.mark.parametrize("without", [dict(replay="folder"), dict(engine_urls=["http://there:1"])])
def test_external_or_recorded_rollouts_need_no_slots_for_engines(without):
    assert set(slot_demands(RolloutConfig(**without), dict(actor=ParallelDims()))) == {"actor"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"a": ["actor", "engines"]},
            r"this run has critic, which no pool contains \(pools: a\); .*pools.critic=\[critic\]",
        ),
        ({"a": ["actor"]}, "this run has critic and engines, which no pool contains"),
        (COLOCATED | {"more": ["actor"]}, "actor is in pool all and in pool more"),
        ({"a": ["actor", "actor"]}, "actor is in pool a and in pool a"),
        ({"a": ["acter"]}, "placement.pools.a: 'acter' is not a role; expected .*did you mean actor"),
        ({"a": {"role": ["actor"]}}, "a.role: the fields of a pool are roles, gpus and strategy; did you mean roles"),
        ({"a": {"gpus": 4}}, r"placement.pools.a=None: expected a list of roles"),
        ({"a": "actor"}, r"placement.pools.a='actor': expected a list of roles .*as in placement.pools.a=\[actor\]"),
        ({"a": {"roles": ["actor"], "strategy": "pack"}}, "strategy='pack': expected .* did you mean PACK"),
        ({"a": {"roles": ["actor"], "gpus": 0}}, "gpus=0: expected a number of GPUs, 1 or more"),
        (
            {"a": {"roles": list(PPO), "gpus": 6}},
            r"pools.a.gpus=6: the role actor needs 8 GPUs; leave gpus out, set it to 8, or make actor smaller \(parallel",
        ),
    ],
)
def test_an_error_in_the_pools_says_what_to_do(section, message):
    with pytest.raises(ValueError, match=message):
        make_pools(section, PPO)


def test_a_cluster_that_is_too_small_is_an_error():
    pools = make_pools({}, PPO)
    check_capacity(pools, [8, 8, 2], "GPU")
    with pytest.raises(
        ValueError,
        match=r"need 18 GPUs, but the cluster has 16 GPUs on 2 nodes. The pools are actor \(8 slots: actor\)",
    ):
        check_capacity(pools, [8, 8], "GPU")
    with pytest.raises(ValueError, match="the cluster has 0 CPU slots on 0 nodes"):
        check_capacity(pools, [], "CPU slot")
    with pytest.raises(ValueError, match="the cluster has 1 GPU on 1 node"):
        check_capacity(pools, [1], "GPU")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("STRICT_PACK", "8 GPUs do not fit on one node.*use PACK"),
        ("STRICT_SPREAD", "the pool needs 8 nodes.*use SPREAD"),
    ],
)
def test_a_strategy_that_the_nodes_cannot_meet_is_an_error(strategy, message):
    pools = make_pools({"all": {"roles": list(PPO), "strategy": strategy}}, PPO)
    with pytest.raises(ValueError, match=message):
        check_capacity(pools, [4, 4, 4], "GPU")
    check_capacity(pools, [8] * 8, "GPU")


def test_groups_of_slots_are_on_one_node_as_far_as_possible():
    assert order_by_tp_groups("aaabb", 2) == [0, 1, 3, 4, 2], "the single slot comes last"
    assert order_by_tp_groups("aaabbb", 2) == [0, 1, 3, 4, 2, 5], "only the last pair crosses nodes"
    assert order_by_tp_groups("aabb", 4) == [0, 1, 2, 3]


@given(st.lists(st.sampled_from("abcd"), max_size=24).map(sorted), st.integers(1, 8))
def test_an_order_has_each_slot_once_and_as_many_groups_on_one_node_as_possible(nodes, tp_size):
    order = order_by_tp_groups(nodes, tp_size)
    assert sorted(order) == list(range(len(nodes)))
    starts = range(0, len(order) - tp_size + 1, tp_size)
    groups = [{nodes[slot] for slot in order[start : start + tp_size]} for start in starts]
    possible = sum(nodes.count(node) // tp_size for node in set(nodes))
    assert all(len(group) == 1 for group in groups[:possible])


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", ["disaggregated", "colocated", "mixed", "paired"])
def test_the_placements_in_conf_contain_every_role(name):
    from test_config import compose

    pools = compose("experiment=quickstart", f"placement={name}").placement.pools
    all_roles = dict.fromkeys(ROLES, SlotDemand(2))
    assert len(make_pools(pools, all_roles).pools) == dict(disaggregated=6, colocated=1, mixed=2, paired=4)[name]


def test_a_users_pools_replace_the_default():
    from test_config import compose

    config = compose("experiment=quickstart", "++placement.pools={train: [actor], serve: {roles: [engines], gpus: 2}}")
    pools = make_pools(config.placement.pools, {"actor": SlotDemand(1), "engines": SlotDemand(1)})
    assert {pool.name: pool.size for pool in pools.pools} == dict(train=1, serve=2)
