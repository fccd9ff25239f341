"""Every process of a run sees exactly its own GPUs, whatever the placement, and plans accept exactly what the run accepts.

The pools are placed on nodes as on a Ray cluster, without Ray. Then the test asks the code of the run for the GPUs of each
process, for its part of the weight sync, and for the variables of NCCL.
"""

import random
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import batched, product
from types import SimpleNamespace

import numpy as np
import pytest
from http_engines import spec_of
from planned_runs import config_of
from test_relays import plan_of

from models.families.qwen import QWEN3, QWEN3_MOE
from mrl.commands import plan, plan_search
from mrl.config.process_schema import ClusterConfig, HardwareConfig, Transport, WeightSyncConfig
from mrl.controller import memory_check, plan_models, processes
from mrl.controller.memory_check import MemoryEstimator
from mrl.controller.model_processes import served_groups
from mrl.controller.plan_models import gpu_transport
from mrl.controller.processes import shared_nccl_variables
from mrl.core.run_errors import StartError
from mrl.core.types import DeviceSlot
from mrl.placement.device_map import DeviceMap, locate_ranks, planned_device_map
from mrl.placement.placement_groups import BundleLocation, PlacedPool, RolePlacement
from mrl.placement.resource_pools import Pools, SlotDemand, make_pools
from mrl.rollout.engines.ray_engine import group_by_node, visible_devices_env
from mrl.weight_sync.engine_layout import EngineParallelSizes
from mrl.weight_sync.session import _divide_plan
from mrl.weight_sync.transfer_plan import ProcessLocation, choose_transport
from parallel.dims import ParallelDims

PLACEMENTS = {
    "colocated": {"all": ["actor", "critic", "teacher", "engines"]},
    "mixed": {"policy": ["actor", "engines"], "value": ["critic", "teacher"]},
    "disaggregated": {},
}
DENSE = [dict(dp=8), dict(tp=2, dp=4), dict(tp=2, pp=2, dp=2), dict(tp=4, cp=2)]
ENGINES = [
    (EngineParallelSizes(1), 8),
    (EngineParallelSizes(1), 3),
    (EngineParallelSizes(2), 3),
    (EngineParallelSizes(4), 2),
    (EngineParallelSizes(4, dp=2), 1),
]
MOE = [dict(tp=2, dp=4, ep=2, etp=1), dict(pp=2, dp=4, ep=4)]
MOE_ENGINES = [(EngineParallelSizes(2, 2), 4), (EngineParallelSizes(4, 4), 1), (EngineParallelSizes(4, 2, 2), 2)]
LAYOUTS = [(QWEN3, *case) for case in product(DENSE, ENGINES)] + [
    (QWEN3_MOE, *case) for case in product(MOE, MOE_ENGINES)
]
CELLS = [(placement, critic, *layout) for placement, critic, layout in product(PLACEMENTS, (0, 8, 16), LAYOUTS)]


@cache
def compiled(number: int):
    """Return (architecture, engine layout, transfer plan) of LAYOUTS[number]."""
    family, axes, (parallel_sizes, engines) = LAYOUTS[number]
    return plan_of(family, axes, parallel_sizes, engines)


@dataclass(frozen=True)
class PoolOnNodes(PlacedPool):
    """A pool whose bundles are on known GPUs."""

    places: dict[int, BundleLocation] = field(default_factory=dict)

    def locations(self) -> dict[int, BundleLocation]:
        return self.places

    def bundle_options(self, bundle: int) -> dict:
        return dict(bundle=bundle)


def pools_of(placement: str, critic: int, axes: dict, parallel_sizes: EngineParallelSizes, engines: int) -> Pools:
    dims = ParallelDims(**axes)
    demands = {
        "actor": SlotDemand(dims.world_size, dims.tp),
        "engines": SlotDemand(engines * parallel_sizes.tp, parallel_sizes.tp),
    }
    return make_pools(PLACEMENTS[placement], demands | ({"critic": SlotDemand(critic, dims.tp)} if critic else {}))


def placed(devices: DeviceMap, seed: int) -> dict[str, RolePlacement]:
    """Return the placement of each role on these nodes. Ray numbers the bundles of a pool in arbitrary order."""
    gpus = defaultdict(list)
    for number, node in enumerate(devices.nodes):
        for gpu, cell in enumerate(node.cells):
            if cell:
                gpus[cell.pool].append(BundleLocation(node.name, f"10.0.0.{number + 1}", str(gpu)))
    placements = {}
    for pool in devices.pools.pools:
        random.Random(seed).shuffle(gpus[pool.name])
        on_nodes = PoolOnNodes(pool, None, True, 1.0, places=dict(enumerate(gpus[pool.name])))
        placements |= {role: RolePlacement.of(on_nodes, role, True) for role in pool.demands}
    return placements


def gpu_of(slot: DeviceSlot) -> ProcessLocation:
    return ProcessLocation(slot.node, f"GPU {slot.device} of {slot.node}")


def trainer_gpus(placements: dict[str, RolePlacement]) -> list[ProcessLocation]:
    """Return the GPU that Ray shows to each trainer rank: the GPU of the bundle in its options."""
    placement = placements["actor"]
    bundles = [placement.placed.locations()[options["bundle"]] for options in placement.options()]
    return [ProcessLocation(node, f"GPU {device} of {node}") for node, _, device in bundles]


def engine_gpus(placements: dict[str, RolePlacement]) -> list[tuple[ProcessLocation, set[str]]]:
    """Return (own GPU, all visible GPUs) of each engine rank. On a node, SGLang gives rank i the i-th visible GPU."""
    placement, ranks = placements["engines"], []
    for engine in range(len(placement.bundles) // placement.tp_size):
        for slots in group_by_node(placement.engine_slots(engine)):
            shown = [
                f"GPU {n} of {slots[0].node}" for n in visible_devices_env(slots)["CUDA_VISIBLE_DEVICES"].split(",")
            ]
            ranks += [(ProcessLocation(slots[0].node, gpu), set(shown)) for gpu in shown]
    return ranks


@pytest.mark.extended_except("2")
@pytest.mark.parametrize("gpus_per_node", [8, 4, 2])
def test_each_process_sees_its_own_slots_and_the_plan_names_the_same(gpus_per_node):
    for seed, (placement, critic, _, axes, (parallel_sizes, engines)) in enumerate(CELLS):
        devices = planned_device_map(pools_of(placement, critic, axes, parallel_sizes, engines), gpus_per_node)
        placements = placed(devices, seed)
        assert trainer_gpus(placements) == [ProcessLocation(*place) for place in locate_ranks(devices, "actor")]
        planned = [ProcessLocation(*place) for place in locate_ranks(devices, "engines")]
        assert [gpu for gpu, _ in engine_gpus(placements)] == planned
        slots = [set(map(gpu_of, placements["engines"].engine_slots(number))) for number in range(engines)]
        for number, ranks in enumerate(batched(engine_gpus(placements), parallel_sizes.tp)):
            assert {gpu for gpu, _ in ranks} == slots[number]
            for own, shown in ranks:
                assert shown == {gpu for host, gpu in slots[number] if host == own.host}
        assert (
            len(set(planned)) == len(planned) and len(set(trainer_gpus(placements))) == ParallelDims(**axes).world_size
        )
        shares = Counter()
        for role_placement in placements.values():
            for options in role_placement.options():
                shares[role_placement.placed.pool.name, options["bundle"]] += options["num_gpus"]
        assert max(shares.values()) < 1, "Ray has a share of the GPU left for the task that reads its id"


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("placement", ["disaggregated", "paired"])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_servers_of_a_role_run_on_the_gpus_of_its_pool(monkeypatch, tmp_path, placement, pinned):
    """Servers that are not pinned are child processes of the rollout worker, and get no GPUs of their own."""
    served = ["roles.reward_model.path=x", "roles.reward_model.num_engines=2", "roles.reward_model.engine_tp=2"]
    config = config_of("Qwen3-0.6B", tmp_path, f"placement={placement}", "rollout.num_engines=3", *served)
    pools = plan_models.build_pools(config, {"actor": ParallelDims(dp=3), "critic": ParallelDims(dp=4)})
    devices = planned_device_map(pools, 4)
    placements = {name: replace(each, pin_engines_to_nodes=pinned) for name, each in placed(devices, 1).items()}
    groups, started = served_groups(config, str(tmp_path), pools.colocated_roles), []
    monkeypatch.setattr(processes, "rollout_spec", lambda plan, run_dir: spec_of(run_dir, served=groups))
    monkeypatch.setattr(processes, "RolloutWorkerHandle", lambda spec, options, timeout_s: started.append(spec))
    run = SimpleNamespace(plan=SimpleNamespace(config=config), run_dir=tmp_path)
    processes.RunProcesses._start_rollout_worker(run, placements)
    (group,) = started[0].served
    if not pinned:
        assert group.slots is None
        return
    found = [[gpu_of(slot) for slot in group.slots(server)] for server in range(group.count)]
    planned = [ProcessLocation(*place) for place in locate_ranks(devices, "reward_model")]
    assert found == [planned[:2], planned[2:]] and len(set(planned)) == 4


@pytest.mark.extended
@pytest.mark.parametrize("gpus_per_node", [8, 4])
def test_each_engine_rank_gets_each_byte_once_and_opens_only_memory_of_its_own_gpu(gpus_per_node):
    for seed, ((placement, critic), number) in enumerate(product(product(PLACEMENTS, (0, 16)), range(len(LAYOUTS)))):
        _, axes, (parallel_sizes, engines) = LAYOUTS[number]
        pools = pools_of(placement, critic, axes, parallel_sizes, engines)
        placements = placed(planned_device_map(pools, gpus_per_node), seed)
        senders, receivers = trainer_gpus(placements), engine_gpus(placements)
        transport = choose_transport("auto", senders, [gpu for gpu, _ in receivers])
        shared = placement != "disaggregated"
        assert transport is (Transport.cuda_ipc if shared else Transport.process_group)
        variables = shared_nccl_variables(SimpleNamespace(sglang={}), pools)
        assert bool(variables) == (transport is Transport.process_group), "both sides of one NCCL group have the same"
        if not shared:
            assert not set(senders) & {gpu for gpu, _ in receivers}, "NCCL cannot join two processes on one GPU"
        _, layout, transfers = compiled(number)
        by_sender, by_receiver = _divide_plan(transfers, senders, [gpu for gpu, _ in receivers], relayed=shared)
        for rank, part in enumerate(by_receiver):
            own, shown = receivers[rank]
            times = {
                name: np.zeros(shape, int) for name, shape in layout.param_shapes(rank % parallel_sizes.tp).items()
            }
            for bucket, destinations in part:
                if shared:
                    assert senders[bucket.sender] == own and own.gpu in shown, "CUDA_VISIBLE_DEVICES hides other GPUs"
                assert bucket in by_sender[bucket.sender].buckets and rank in bucket.receivers
                for destination in destinations:
                    times[destination.param][destination.box.slices] += 1
            for shard in layout.shards(rank % parallel_sizes.tp):
                box = shard.box_in_param(shard.box).slices
                assert (times[shard.param][box] == 1).all(), shard
                times[shard.param][box] = 0
            assert not any(count.any() for count in times.values()), "nothing else arrives"


def accepts(call, *arguments) -> bool:
    try:
        call(*arguments)
    except ValueError:
        return False
    return True


def run_transport(requested: str, placements: dict[str, RolePlacement]) -> Transport | None:
    """Do what a run does: start the engines, which fails on uneven nodes, then choose the transport between actual GPUs."""
    receivers = [gpu for gpu, _ in engine_gpus(placements)]
    return choose_transport(requested, trainer_gpus(placements), receivers) if requested != "disk" else None


SIZES = [  # (actor ranks, tp of the actor, critic ranks, engine_tp, engines, GPUs of a node)
    (8, 2, 0, 2, 4, 8),
    (8, 2, 16, 4, 2, 4),
    (8, 2, 0, 1, 12, 8),
    (4, 1, 12, 8, 1, 8),
    (16, 4, 0, 8, 2, 4),
    (6, 1, 0, 3, 2, 4),
    (8, 1, 12, 3, 2, 4),
    (4, 4, 6, 2, 2, 3),
]


@pytest.mark.parametrize("requested", Transport)
def test_all_plans_accept_exactly_what_the_run_accepts(monkeypatch, requested):
    """The plans are `mrl plan placement`, `mrl plan memory`, the checks of `mrl train` and the checks of a Slurm job."""
    monkeypatch.setattr(memory_check, "check_memory", lambda plan: None)
    monkeypatch.setattr(memory_check, "run_memory", lambda *sizes: None)
    monkeypatch.setattr(memory_check, "has_cuda", lambda: True)
    found = set()
    for placement, (actor, tp, critic, engine_tp, engines, gpus_per_node) in product(PLACEMENTS, SIZES):
        demands = {"actor": SlotDemand(actor, tp), "engines": SlotDemand(engines * engine_tp, engine_tp)}
        pools = make_pools(PLACEMENTS[placement], demands | ({"critic": SlotDemand(critic)} if critic else {}))
        for gpus in (gpus_per_node, pools.size):
            cluster = ClusterConfig(gpus_per_node=gpus, hardware=HardwareConfig(name="h100"))
            config = SimpleNamespace(cluster=cluster, weight_sync=WeightSyncConfig(transport=requested), sglang={})
            job = SimpleNamespace(**vars(config) | dict(cluster=ClusterConfig(scheduler="slurm", gpus_per_node=gpus)))
            monkeypatch.setattr(
                memory_check, "plan_training", lambda config, check_hashes, pools=pools: SimpleNamespace(pools=pools)
            )
            monkeypatch.setattr(memory_check, "build_pools", lambda config, dims, pools=pools: pools)
            monkeypatch.setattr(plan, "plan_placement", lambda config, weights, pools=pools: pools)
            expected = accepts(run_transport, requested, placed(planned_device_map(pools, gpus), 1))
            said = {
                "the run before it starts a process": accepts(gpu_transport, config, planned_device_map(pools, gpus)),
                "mrl plan placement": accepts(plan._device_map, config),
                "mrl plan memory": accepts(MemoryEstimator(config, {}, False, None).estimate, config),
                "a Slurm job": accepts(memory_check.plan_fitting_run, job),
            }
            if gpus == pools.size:
                said["mrl train on one machine"] = accepts(memory_check.plan_fitting_run, config)
            assert said == dict.fromkeys(said, expected), (placement, demands, gpus)
            found.add(expected)
    assert found == ({False} if requested is Transport.shared_memory else {True, False})


def test_an_engine_with_different_numbers_of_gpus_on_its_nodes_is_refused_before_it_starts():
    pools = make_pools({}, {"actor": SlotDemand(1), "engines": SlotDemand(6, 3)})
    config = SimpleNamespace(weight_sync=WeightSyncConfig(), cluster=ClusterConfig(gpus_per_node=4))
    with pytest.raises(
        ValueError, match=r"rollout\.engine_tp=3: engine 1 would have 1 on node 1, 2 on node 0, and SGLang"
    ):
        plan_models.check_planned_transport(config, pools)


@pytest.mark.extended
def test_without_known_hardware_a_plan_with_shared_memory_is_a_plan_for_cpus(tmp_path):
    words = ["placement=colocated", "parallel.dp=1", "rollout.num_engines=2", "weight_sync.transport=shared_memory"]
    config = config_of("Qwen3-0.6B", tmp_path, *words)
    plans = (partial(plan._device_map, weights=False), MemoryEstimator.of(config).estimate)
    assert all(each(config) for each in plans), "CPUs of one machine have no such rule"
    for known in (dict(hardware=HardwareConfig(name="h100")), dict(scheduler="slurm")):
        on_gpus = replace(config, cluster=replace(config.cluster, **known))
        for each in plans:
            with pytest.raises(ValueError, match="1 of 2 engine ranks share their GPUs"):
                each(on_gpus)


@pytest.mark.parametrize(
    ("transport", "fixed", "placements", "refusal"),
    [
        ("auto", {}, {}, ""),
        ("disk", {}, {}, ""),
        ("cuda_ipc", {}, {"placement": "colocated"}, ""),
        ("process_group", {"placement": "disaggregated"}, {"placement": "disaggregated"}, ""),
        ("process_group", {"placement": "colocated"}, {}, "process_group: needs placement=disaggregated, and plan.fix"),
        ("shared_memory", {}, {}, "shared_memory: works only on CPUs"),
    ],
)
def test_the_search_finds_only_placements_that_fit_the_transport(transport, fixed, placements, refusal):
    config = SimpleNamespace(weight_sync=WeightSyncConfig(transport=Transport(transport)))
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            plan_search.required_placement(config, fixed)
    else:
        assert plan_search.required_placement(config, fixed) == placements


@pytest.fixture
def reserve(monkeypatch, tmp_path):
    """`reserve(pools)` reserves the GPUs of a run on nodes with eight GPUs, and returns the variables of its processes."""

    def reserve(pools: Pools) -> dict[str, str]:
        variables: dict[str, str] = {}
        config = SimpleNamespace(
            run=SimpleNamespace(dir=str(tmp_path)), cluster=ClusterConfig(), weight_sync=WeightSyncConfig(), sglang={}
        )
        monkeypatch.setattr(processes, "lock_run_dir", lambda *_: nullcontext())
        monkeypatch.setattr(processes, "config_as_json", lambda _: {})
        monkeypatch.setattr(
            processes, "ray_cluster", lambda cluster, slots, given=(): nullcontext(variables.update(given))
        )
        monkeypatch.setattr(processes, "place_pools", lambda *_: nullcontext({}))
        monkeypatch.setattr(processes, "current_device_map", lambda pools, _: planned_device_map(pools, 8))
        with processes._cluster(config, "train", pools):
            return variables

    return reserve


def test_a_run_on_an_existing_cluster_refuses_gpus_that_weights_cannot_reach_before_it_starts_a_process(reserve):
    """Only when the run reserves its GPUs does it know how many GPUs the nodes of an existing cluster have."""
    pools = make_pools(PLACEMENTS["colocated"], {"actor": SlotDemand(4), "engines": SlotDemand(8)})
    with pytest.raises(StartError, match="4 of 8 engine ranks share their GPUs"):
        reserve(pools)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_passes_the_variables_of_a_common_nccl_group_to_its_processes(reserve, placement):
    pools = make_pools(PLACEMENTS[placement], {"actor": SlotDemand(4), "engines": SlotDemand(4)})
    shared = {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    names = shared if placement == "disaggregated" else set()
    assert reserve(pools).keys() == names
