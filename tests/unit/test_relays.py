"""Weights of engines that share GPUs with the trainer: each engine rank gets every byte from the trainer rank on its own GPU."""

import itertools
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
from planned_runs import config_of
from test_transfer_plan import LAYERS, SIZES, architecture, engine_parameters, tensors_of

from models.families.qwen import QWEN3, QWEN3_MOE
from mrl.commands import plan
from mrl.config.process_schema import ClusterConfig, Transport, WeightSyncConfig
from mrl.controller import memory_check, plan_tools
from mrl.controller.plan_models import gpu_transport
from mrl.controller.processes import shared_nccl_variables
from mrl.placement.device_map import planned_device_map
from mrl.placement.resource_pools import SlotDemand, make_pools
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes
from mrl.weight_sync.session import _divide_plan
from mrl.weight_sync.transfer_plan import (
    ProcessLocation,
    choose_transport,
    compile_transfer_plan,
    even_pipeline_stages,
    forwarded_bytes,
    relay_steps,
    sent_bytes,
    trainer_shards,
)
from mrl.weight_sync.transports import NUM_TRANSFER_BUFFERS
from parallel.dims import ParallelDims

DENSE = [dict(dp=8), dict(tp=2, dp=4), dict(tp=2, pp=2, dp=2), dict(tp=4, cp=2)]
MOE = [dict(tp=2, dp=4, ep=2, etp=1), dict(pp=2, dp=4, ep=4)]
ENGINES = [
    (EngineParallelSizes(1), 8),
    (EngineParallelSizes(1), 5),
    (EngineParallelSizes(2), 4),
    (EngineParallelSizes(4), 2),
    (EngineParallelSizes(4, dp=2), 1),
]
MOE_ENGINES = [(EngineParallelSizes(2, 2), 4), (EngineParallelSizes(4, 4), 1), (EngineParallelSizes(4, 2, 2), 2)]
CASES = [(QWEN3, *case) for case in itertools.product(DENSE, ENGINES)] + [
    (QWEN3_MOE, *case) for case in itertools.product(MOE, MOE_ENGINES)
]


def plan_of(family, axes, parallel_sizes, num_engines, bucket_bytes=400):
    arch, dims = architecture(family), ParallelDims(**axes)
    shards = trainer_shards(family.param_mappings(arch), SIZES, dims, even_pipeline_stages(LAYERS, dims))
    layout = EngineLayout.of(family, arch, parallel_sizes)
    return arch, layout, compile_transfer_plan(shards, layout, num_engines, lambda _: ("float32", 4), bucket_bytes)


def locations(num_engine_ranks, nodes, seed):
    """Return (locations of trainer ranks, locations of engine ranks). The engine ranks share GPUs with trainer ranks."""
    trainers = [ProcessLocation(f"node {rank * nodes // 8}", f"gpu {rank}") for rank in range(8)]
    return trainers, random.Random(seed).sample(trainers, num_engine_ranks)


@pytest.mark.extended_except("2")
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_engine_rank_gets_every_byte_once_from_the_trainer_rank_on_its_own_gpu(nodes):
    for seed, (family, axes, (parallel_sizes, num_engines)) in enumerate(CASES):
        arch, layout, transfers = plan_of(family, axes, parallel_sizes, num_engines)
        tensors = tensors_of(family, arch)
        trainers, engines = locations(num_engines * parallel_sizes.tp, nodes, seed)
        assert choose_transport("auto", trainers, engines) is Transport.cuda_ipc
        by_sender, by_receiver = _divide_plan(transfers, trainers, engines, relayed=True)
        for engine_rank, part in enumerate(by_receiver):
            handles = {bucket.sender for bucket, _ in part}  # receiver._connect opens buffers of these trainer ranks
            assert {trainers[rank].gpu for rank in handles} == {engines[engine_rank].gpu}, "no other GPU is visible"
            filled = {
                n: tensors["model.norm.weight"].new_full(s, float("nan"))
                for n, s in layout.param_shapes(engine_rank % parallel_sizes.tp).items()
            }
            for bucket, destinations in part:
                assert bucket.receivers == (engine_rank,)
                assert bucket is by_sender[bucket.sender].buckets[bucket.index], "both use the same buffer and keys"
                for chunk, destination in zip(bucket.chunks, destinations, strict=True):
                    target = filled[destination.param][destination.box.slices]
                    assert target.isnan().all(), "nothing arrives twice"
                    target.copy_(tensors[chunk.name][chunk.box.slices].view(destination.box.sizes))
            for name, expected in engine_parameters(layout, engine_rank % parallel_sizes.tp, tensors).items():
                assert expected.equal(filled[name].nan_to_num(0.0)), name


def steps_of(case, nodes, seed):
    family, axes, (parallel_sizes, num_engines) = case
    _, _, transfers = plan_of(family, axes, parallel_sizes, num_engines)
    trainers, engines = locations(num_engines * parallel_sizes.tp, nodes, seed)
    relays = {rank: trainers.index(location) for rank, location in enumerate(engines)}
    hosts = [location.host for location in trainers]
    return transfers, relays, hosts, relay_steps(transfers, relays, hosts)


@pytest.mark.parametrize("number", range(0, len(CASES), 7))
def test_a_chain_begins_with_the_sender_and_enters_each_host_at_most_once(number):
    transfers, relays, hosts, steps = steps_of(CASES[number], nodes=4, seed=1)
    chains = defaultdict(list)
    for rank, each in enumerate(steps):
        for step in each:
            chains[step.chain].append((rank, step))
    between_hosts = 0
    for bucket in transfers.buckets:
        members = dict(chains[bucket.key])
        rank, visited = bucket.sender, [bucket.sender]
        assert members[rank].previous is None
        while (following := members[rank].next) is not None:
            assert members[following].previous == rank
            rank = following
            visited.append(rank)
        assert len(visited) == len(set(visited)) and set(visited) == {relays[r] for r in bucket.receivers} | {
            bucket.sender
        }
        entered = [host for host, _ in itertools.groupby(hosts[rank] for rank in visited)]
        assert len(entered) == len(set(entered)), "the bytes go over the network once for each host"
        between_hosts += bucket.nbytes * (len(entered) - 1)
    inside, between = forwarded_bytes(steps, hosts)
    copies = sum(b.nbytes * len({relays[r] for r in b.receivers} - {b.sender}) for b in transfers.buckets)
    assert inside + between == copies and between == between_hosts > 0


@pytest.mark.parametrize("number", range(0, len(CASES), 5))
@pytest.mark.parametrize("dead", [(), (0,)], ids=["all alive", "one engine rank dead"])
def test_relays_cannot_wait_for_each_other_in_a_circle(number, dead):
    """In the strictest case, each send blocks until the next rank receives. Dead engine ranks acknowledge nothing."""
    _, _, _, steps = steps_of(CASES[number], nodes=2, seed=2)
    position = [0] * len(steps)  # number of steps that each rank has finished
    holding = [False] * len(steps)  # whether the rank has the bytes of its current step
    acknowledged = [set() for _ in steps]
    moved = True
    while moved:
        moved = False
        for rank, each in enumerate(steps):
            if position[rank] == len(each):
                continue
            step = each[position[rank]]
            earlier = (
                each[max(0, position[rank] - NUM_TRANSFER_BUFFERS)].bucket
                if position[rank] >= NUM_TRANSFER_BUFFERS
                else None
            )
            if earlier and set(earlier.receivers) - set(dead) and earlier.index not in acknowledged[rank]:
                continue
            if step.previous is None:
                holding[rank] = True
            if not holding[rank]:
                continue
            if step.next is not None:
                other = steps[step.next]
                behind = position[step.next]
                if behind == len(other) or other[behind].chain != step.chain:
                    continue
                holding[step.next] = True
            acknowledged[rank].add(step.bucket.index)
            position[rank], holding[rank], moved = position[rank] + 1, False, True
    assert position == [len(each) for each in steps]


SHARED = {"all": ["actor", "critic", "engines"]}
APART = {"train": ["actor", "critic"], "serve": ["engines"]}


@pytest.mark.parametrize(
    ("pools", "actor", "critic", "engines", "engine_tp", "transport"),
    [
        (SHARED, 16, 0, 16, 1, Transport.cuda_ipc),
        (SHARED, 16, 0, 8, 4, Transport.cuda_ipc),
        (SHARED, 16, 32, 16, 16, Transport.cuda_ipc),
        (APART, 16, 0, 16, 2, Transport.process_group),
        (SHARED, 8, 0, 16, 1, None),
        (SHARED, 8, 16, 16, 8, None),
    ],
)
def test_plans_and_runs_refuse_engines_of_which_only_a_part_shares_gpus_with_the_actor(
    monkeypatch, pools, actor, critic, engines, engine_tp, transport
):
    demands = {"actor": SlotDemand(actor, 2), "engines": SlotDemand(engines, engine_tp)}
    made = make_pools(pools, demands | ({"critic": SlotDemand(critic)} if critic else {}))
    run = SimpleNamespace(pools=made)
    monkeypatch.setattr(memory_check, "plan_training", lambda config, check_hashes: run)
    monkeypatch.setattr(memory_check, "check_memory", lambda plan: None)
    local = SimpleNamespace(cluster=ClusterConfig(), weight_sync=WeightSyncConfig(), sglang={})
    job = SimpleNamespace(cluster=ClusterConfig(scheduler="slurm"), weight_sync=WeightSyncConfig(), sglang={})
    monkeypatch.setattr(memory_check, "has_cuda", lambda: False)
    assert memory_check.plan_fitting_run(local) is run, "CPUs have no such rule"
    monkeypatch.setattr(memory_check, "has_cuda", lambda: True)
    monkeypatch.setattr(plan, "plan_placement", lambda config, weights: made)
    for call in (memory_check.plan_fitting_run, plan._device_map):
        for config in (local, job):
            if transport:
                call(config)
                continue
            with pytest.raises(
                ValueError, match=f"{actor} of {engines} engine ranks share .* at most {actor} engine ranks"
            ):
                call(config)
    if transport:
        assert gpu_transport(local, planned_device_map(made, 8))[0] is transport
        names = {"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
        expected = names if transport is Transport.process_group else set()
        assert set(shared_nccl_variables(local, made)) == expected, "only common NCCL groups need variables"


def test_a_plan_of_a_run_with_shared_memory_is_one_of_cpus(monkeypatch):
    """Without other settings, a plan assumes GPUs. With GPUs, shared memory cannot be the transport."""
    made = make_pools(SHARED, {"actor": SlotDemand(1), "engines": SlotDemand(2)})
    monkeypatch.setattr(plan, "plan_placement", lambda config, weights: made)
    weight_sync = WeightSyncConfig(transport=Transport.shared_memory)
    devices = plan._device_map(SimpleNamespace(cluster=ClusterConfig(), weight_sync=weight_sync))
    assert [cell.processes for cell in devices.nodes[0].cells if cell] == [
        {"actor": "actor 0", "engines": "engine 0"},
        {"engines": "engine 1"},
    ]


@pytest.mark.extended
def test_plan_sync_shows_the_bytes_of_both_hops(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    layout = ["parallel.dp=2", "parallel.tp=2", "rollout.num_engines=4", "cluster.gpus_per_node=2"]
    config = config_of(None, tmp_path, *layout, "placement=colocated", experiment="quickstart")
    sync = plan_tools.plan_sync(config)
    inside, between = forwarded_bytes(sync.steps, sync.hosts)
    assert between == inside / 2 == sync.transfers.sent_bytes / 4, (
        "3 of 4 copies are passed on, one of them between nodes"
    )
    plan.explain_sync(config)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{inside:,} bytes inside nodes, {between:,} bytes between nodes" in printed
    assert "from the trainer rank on its own GPU" in printed


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("gpus_per_node", [8, 2])
def test_plan_sync_shows_the_bytes_inside_and_between_nodes_without_relays(
    tmp_path, monkeypatch, capsys, gpus_per_node
):
    monkeypatch.chdir(tmp_path)
    layout = ["parallel.dp=2", "rollout.num_engines=2", f"cluster.gpus_per_node={gpus_per_node}"]
    config = config_of(None, tmp_path, *layout, experiment="quickstart")
    sync = plan_tools.plan_sync(config)
    total = sync.transfers.sent_bytes
    plan.explain_sync(config)
    printed = " ".join(capsys.readouterr().out.split())
    inside, between = (total, 0) if gpus_per_node == 8 else (0, total)
    assert f"each engine rank ({inside:,} bytes inside nodes, {between:,} bytes between nodes)" in printed
    assert sent_bytes(sync.transfers, ["node 0"] * 2, ["node 0", "node 1"]) == (total / 2, total / 2)


@pytest.mark.extended
def test_without_a_group_of_gpus_plan_sync_shows_no_bytes_between_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, make = [], plan_tools.make_input_files
    monkeypatch.setattr(plan_tools, "make_input_files", lambda config: made.append(make(config)))
    for transport in (Transport.disk, Transport.shared_memory):
        config = config_of(None, tmp_path, f"weight_sync.transport={transport}", experiment="quickstart")
        assert plan_tools.plan_sync(config).engine_hosts is None
    assert len(made) == 2, "each plan makes the input files once"
