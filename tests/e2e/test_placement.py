"""Processes run where the pools place them: on CPU slots of one machine, and engines on the nodes of a cluster."""

import math
import os
from dataclasses import replace
from functools import partial

import psutil
import pytest
import ray
import torch
from hydra import compose, initialize_config_dir
from live_engines import max_logprob_difference
from mrl_runs import descendants, is_alive, select_processes, wait_until
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import Qwen3ForCausalLM

from mrl.config import hydra_entry
from mrl.config.process_schema import ClusterConfig
from mrl.config.validate import from_hydra
from mrl.controller import build
from mrl.controller.plan_train import plan_training
from mrl.core.run_errors import PreemptionHandler
from mrl.placement.placement_groups import PlacementError, place_pools
from mrl.placement.ray_cluster import ray_cluster
from mrl.placement.resource_pools import SlotDemand, make_pools
from mrl.rollout.client import EngineClient, SamplingParams
from mrl.rollout.engines.ray_engine import RayEngine
from mrl.rollout.engines.server_args import default_server_args

pytestmark = pytest.mark.extended


def bundles(*actors) -> list[tuple[str, set[str]]]:
    """Return for each actor its placement group and the indices of its bundles in this group. Each actor asks Ray for them."""

    def bundle(_: object) -> tuple[str, set[str]]:
        held = ray._private.worker.global_worker.core_worker.resource_ids()  # the public call omits bundles
        group = ray.get_runtime_context().get_placement_group_id()
        parts = [name.removesuffix(f"_{group}").partition("_group")[2] for name in held if name.endswith(group)]
        return group, {part.strip("_") for part in parts if part}

    return ray.get([actor.__ray_call__.remote(bundle) for actor in actors], timeout=60)


def test_each_process_of_a_run_with_two_pools_has_its_own_slot(quickstart, tmp_path):
    pools = "placement.pools={train: [actor], serve: [engines]}"
    steps = ["trainer.max_steps=2", "trainer.save=false", "parallel.dp=2", f"run.dir={tmp_path}"]
    hydra_entry.register_schema()
    with initialize_config_dir(str(hydra_entry.CONF), version_base="1.3"):
        config = from_hydra(compose("config", hydra_entry.check_overrides([*quickstart, *steps, pools])))
    plan = plan_training(config)
    assert [(pool.name, pool.size) for pool in plan.pools.pools] == [("train", 2), ("serve", 1)]
    assert plan.colocated_roles == frozenset()
    with build.trainer(plan, PreemptionHandler()) as trainer:
        result = trainer.fit()
        ranks = bundles(*trainer.actor.group.workers)
        ((serve, slot),) = bundles(trainer.rollout.worker.actor)
        assert ray.cluster_resources()["CPU"] == 3, "as many slots as the pools need, whatever the number of cores"
    assert result.steps == 2 and math.isfinite(result.reward)
    (train,) = {group for group, _ in ranks}
    assert train != serve and [held for _, held in ranks] == [{"0"}, {"1"}] and slot == {"0"}


OF_NODES = dict(NCCL_SOCKET_IFNAME="bond7", NCCL_IB_HCA="mlx5_0")  # environment of the nodes in the fixture `nodes`
OF_DRIVER = dict(NCCL_SOCKET_IFNAME="eth0", NCCL_IB_HCA="mlx5_1", NCCL_ALGO="Ring")


@pytest.fixture
def nodes(monkeypatch):
    """A Ray cluster with a head without GPUs and two nodes that claim one GPU each. This process is the driver.

    The environment of the nodes names another network interface and other NCCL settings than the environment of the driver.
    """
    from ray.cluster_utils import Cluster

    for name, value in OF_NODES.items():
        monkeypatch.setenv(name, value)
    made = Cluster(initialize_head=True, head_node_args=dict(num_cpus=2, num_gpus=0, include_dashboard=False))
    found = [made.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
    for name, value in OF_DRIVER.items():
        monkeypatch.setenv(name, value)
    try:
        with ray_cluster(ClusterConfig(address=made.address)):
            yield made, {node.node_id: node for node in found}
    finally:
        made.shutdown()


def hosted(placements, number: int, folder, model) -> RayEngine:
    arguments = default_server_args("float32", 512) | dict(model_path=str(model), tp_size=placements.tp_size)
    return RayEngine(partial(placements.engine_slots, number), arguments, folder / "engine_0.log", {})


def greedy(url: str) -> list[int]:
    with EngineClient(url, timeout_s=240) as client:
        (answer,) = client.generate([[3, 4, 5]], [SamplingParams(6, 0.0, ignore_eos=True)])
    return answer.token_ids


def serving(node) -> list[psutil.Process]:
    """Return the engine processes that a node's raylet started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    name = "mrl.rollout.engines.launch_sglang"
    return select_processes(descendants(raylet), lambda process: name in " ".join(process.cmdline()))


@pytest.mark.extended
def test_an_engine_whose_node_is_lost_is_started_on_another_node(nodes, qwen3_folder, tmp_path):
    made, by_id = nodes
    initial = Qwen3ForCausalLM.from_pretrained(qwen3_folder, dtype=torch.float32).eval()
    pools = make_pools({"serve": ["engines"]}, {"engines": SlotDemand(1)})
    with place_pools(pools, timeout_s=120) as placements:
        assert placements["engines"].pin_engines_to_nodes
        (slot,) = placements["engines"].slots()
        assert slot.device == "0" and slot.options["num_gpus"] == 0.99
        server = hosted(placements["engines"], 0, tmp_path, qwen3_folder)
        server.start()
        server.wait_ready(480)
        with EngineClient(server.url, timeout_s=240) as client:
            assert max_logprob_difference(client, initial) < 1e-4
        expected = greedy(server.url)
        assert server.alive() and server.cpu_seconds() > 0
        (main, *_) = processes = serving(by_id[slot.node])
        assert main.environ()["CUDA_VISIBLE_DEVICES"] == "0"
        assert {name: main.environ().get(name) for name in OF_DRIVER} == OF_DRIVER | {"NCCL_SOCKET_IFNAME": "bond7"}
        made.remove_node(by_id[slot.node], allow_graceful=False)
        wait_until(lambda: not server.alive(), 60)
        wait_until(lambda: not select_processes(processes, is_alive), 60)
        assert server.was_killed
        server.stop()
        wait_until(lambda: placements["engines"].slots()[0].node != slot.node, 60)
        replacement = hosted(placements["engines"], 0, tmp_path, qwen3_folder)
        replacement.start()
        replacement.wait_ready(480)
        assert greedy(replacement.url) == expected and len(expected) == 6
        left = serving(by_id[placements["engines"].slots()[0].node])
        replacement.stop()
        assert left, "the raylet of the other node has started the replacement"
        assert not select_processes(left, is_alive) and not replacement.alive()


def test_processes_of_an_existing_cluster_get_the_drivers_settings_of_nccl_and_the_interface_of_their_node(nodes):
    read = ray.remote(lambda: {name: os.environ.get(name) for name in OF_DRIVER})
    for node in nodes[1]:
        on_node = read.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        assert ray.get(on_node.remote(), timeout=120) == OF_DRIVER | {"NCCL_SOCKET_IFNAME": "bond7"}


def test_pools_that_do_not_fit_raise_an_error_at_once_or_at_the_deadline(nodes):
    made, by_id = nodes
    actor, engines = make_pools({}, {"actor": SlotDemand(2)}), make_pools({}, {"engines": SlotDemand(1)})
    both, no_place = (
        make_pools({}, {"actor": SlotDemand(2), "engines": SlotDemand(1)}),
        "Ray did not place pool engines",
    )
    with (
        pytest.raises(ValueError, match="the pools need 3 GPUs, but the cluster has 2 GPUs on 2 nodes"),
        place_pools(both, 600),
    ):
        pass
    with place_pools(actor, timeout_s=120) as placements:
        with pytest.raises(PlacementError, match=f"{no_place}.*cluster.start_timeout_s=1 s"), place_pools(engines, 1):
            pass
        made.remove_node(next(iter(by_id.values())), allow_graceful=False)
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, 60)
        with_deadline = replace(placements["actor"], placed=replace(placements["actor"].placed, timeout_s=1))
        with pytest.raises(PlacementError, match="restart lost nodes"):
            with_deadline.slots()
