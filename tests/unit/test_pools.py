"""Resource pools: roles by pool, their sizes, what is refused, and which slots are neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config.schema import ClusterConfig, RolloutConfig
from mrl.placement.resource_pools import ROLES, Need, arranged, check_room, make_pools, needs_of, with_nodes
from parallel.dims import ParallelDims

PPO = {"actor": Need(8, 2), "critic": Need(4, 2), "engines": Need(6, 1)}
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
    assert pools.size == sum(sizes.values()) and pools.shared == shared
    assert set(pools.roles) == set(PPO), "every role has a home, and none that the run has not"


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
    assert with_nodes(ClusterConfig(**cluster), make_pools({}, PPO)).nodes == nodes, "18 slots"


def test_needs_follow_from_layouts_and_engines():
    dims = dict(actor=ParallelDims(tp=2, dp=3), teacher=ParallelDims(pp=2))
    engines = RolloutConfig(num_engines=3, engine_tp=2)
    assert needs_of(engines, dims) == dict(actor=Need(6, 2), teacher=Need(2, 1), engines=Need(6, 2))


@pytest.mark.parametrize("without", [dict(replay="folder"), dict(engine_urls=["http://there:1"])])
def test_a_run_without_engines_of_its_own_needs_no_slots_for_them(without):
    assert set(needs_of(RolloutConfig(**without), dict(actor=ParallelDims()))) == {"actor"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"a": ["actor", "engines"]},
            r"this run has critic, which no pool names \(there are a\); .*pools.critic=\[critic\]",
        ),
        ({"a": ["actor"]}, "this run has critic and engines, which no pool names"),
        (COLOCATED | {"more": ["actor"]}, "actor is in all and in more"),
        ({"a": ["actor", "actor"]}, "actor is in a and in a"),
        ({"a": ["acter"]}, "placement.pools.a: 'acter' is no role; expected .*did you mean actor"),
        ({"a": ["reference"]}, "'reference' is no role .the reference is in the actor's processes."),
        ({"a": {"role": ["actor"]}}, "placement.pools.a.role: a pool has roles, gpus and strategy; did you mean roles"),
        ({"a": {"gpus": 4}}, r"placement.pools.a=None: expected a list of roles"),
        ({"a": "actor"}, r"placement.pools.a='actor': expected a list of roles .*as in placement.pools.a=\[actor\]"),
        ({"a": {"roles": ["actor"], "strategy": "pack"}}, "strategy='pack': expected .* did you mean PACK"),
        ({"a": {"roles": ["actor"], "gpus": 0}}, "gpus=0: expected a number of GPUs, 1 or more"),
        (
            {"a": {"roles": list(PPO), "gpus": 6}},
            r"pools.a.gpus=6: actor needs 8; leave gpus out, set it to 8, or make actor smaller \(parallel",
        ),
    ],
)
def test_a_mistake_says_what_to_do(section, message):
    with pytest.raises(ValueError, match=message):
        make_pools(section, PPO)


def test_a_cluster_without_room_is_refused_in_words():
    pools = make_pools({}, PPO)
    check_room(pools, [8, 8, 2], "GPU")
    with pytest.raises(
        ValueError, match=r"need 18 GPUs, and the cluster has 16 GPUs on 2 nodes: actor \(8 slots: actor\)"
    ):
        check_room(pools, [8, 8], "GPU")
    with pytest.raises(ValueError, match="the cluster has 0 CPU slots on 0 nodes"):
        check_room(pools, [], "CPU slot")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("STRICT_PACK", "8 GPUs are not on one node.*use PACK"), ("STRICT_SPREAD", "it wants 8 nodes.*use SPREAD")],
)
def test_a_strategy_that_no_cluster_of_this_shape_can_meet_is_refused(strategy, message):
    pools = make_pools({"all": {"roles": list(PPO), "strategy": strategy}}, PPO)
    with pytest.raises(ValueError, match=message):
        check_room(pools, [4, 4, 4], "GPU")
    check_room(pools, [8] * 8, "GPU")


def test_neighbours_are_on_one_node_as_far_as_they_can_be():
    assert arranged("aaabb", 2) == [0, 1, 3, 4, 2], "the odd one comes last"
    assert arranged("aaabbb", 2) == [0, 1, 3, 4, 2, 5], "only the last pair crosses nodes"
    assert arranged("aabb", 4) == [0, 1, 2, 3]


@given(st.lists(st.sampled_from("abcd"), max_size=24).map(sorted), st.integers(1, 8))
def test_an_order_of_slots_has_each_once_and_as_many_whole_runs_as_there_can_be(nodes, together):
    order = arranged(nodes, together)
    assert sorted(order) == list(range(len(nodes)))
    runs = [{nodes[slot] for slot in order[at : at + together]} for at in range(0, len(order) - together + 1, together)]
    possible = sum(nodes.count(node) // together for node in set(nodes))
    assert all(len(run) == 1 for run in runs[:possible])


@pytest.mark.parametrize("name", ["disaggregated", "colocated", "mixed"])
def test_the_placements_of_conf_have_every_role(name):
    from test_config import compose

    pools = compose("experiment=quickstart", f"placement={name}").placement.pools
    everyone = dict.fromkeys(ROLES, Need(2))
    assert len(make_pools(pools, everyone).pools) == dict(disaggregated=4, colocated=1, mixed=2)[name]


def test_pools_of_ones_own_are_written_over_the_default():
    from test_config import compose

    written = compose("experiment=quickstart", "++placement.pools={train: [actor], serve: {roles: [engines], gpus: 2}}")
    pools = make_pools(written.placement.pools, {"actor": Need(1), "engines": Need(1)})
    assert {pool.name: pool.size for pool in pools.pools} == dict(train=1, serve=2)
