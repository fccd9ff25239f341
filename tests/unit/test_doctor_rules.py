"""Checks and parts of `mrl doctor` that need no simulated hosts: facts, parsers, process groups, rendezvous, arguments."""

import json
import os
import shutil
import socket
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from simulated_hosts import matrix

from mrl.commands import doctor
from mrl.core.processes import PortLease
from mrl.doctor import examine
from mrl.doctor.checks.gpu_checks import check_gpus
from mrl.doctor.checks.host_checks import check_disk, check_memory, describe_libraries
from mrl.doctor.checks.network_checks import NO_COMMON_INTERFACE, check_collectives, check_interfaces, fix_interfaces
from mrl.doctor.collective_probe import CollectivePlan, RankResult, combine_results, multi_host_groups, run_ranks
from mrl.doctor.examine import CHECKS, gather_facts
from mrl.doctor.findings import DoctorFinding, Severity, exit_status, format_hosts, merge_findings, to_plain
from mrl.doctor.gather import host_probe
from mrl.doctor.gather.host_probe import (
    CPU_LOCK_FILE,
    GPU_LOCK_FILE,
    TESTED,
    is_visible,
    locked_cuda,
    locked_versions,
    memory_limit,
    parse_links,
    probe_folder,
    read_software,
)
from mrl.doctor.gather.network_probe import busy_ports, is_echo_server, serve_peers
from mrl.doctor.host_facts import (
    ClusterFacts,
    CollectiveResult,
    FolderFacts,
    GpuCard,
    HostFacts,
    HostGpus,
    PeerConnection,
    Requirements,
    hosts_that_differ,
)
from mrl.doctor.rendezvous import Rendezvous, SharedFolderStore, TcpRendezvousStore
from mrl.doctor.requirements import process_groups
from mrl.hang_report.network_interfaces import NetworkInterface
from mrl.sweep.points import Sweep
from parallel.dims import ParallelDims

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def here() -> HostFacts:
    """Return the facts about this machine."""
    return gather_facts(None)


@pytest.mark.parametrize(
    ("parts", "is_foreign"),
    [
        (["apex/__init__.py", "apex/forms.py"], True),  # the package apex of PyPI
        (["apex/__init__.py", "apex/multi_tensor_apply/__init__.py"], False),
        (["amp_C.py"], False),
    ],
)
def test_the_apex_of_pypi_is_told_from_that_of_nvidia(tmp_path, monkeypatch, parts, is_foreign):
    for part in parts:
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).touch()
    monkeypatch.syspath_prepend(tmp_path)
    software = read_software()
    assert software.foreign_apex == (str(tmp_path / "apex") if is_foreign else None)
    assert software.apex_extensions == (["amp_C"] if "amp_C.py" in parts else [])


def test_the_doctor_says_which_libraries_trainers_use_and_what_apex_adds(here):
    def lines(engine: str | None, *apex: str, cards: int = 1) -> list[str]:
        packages = dict(here.software.packages) | {"transformer-engine-torch": engine}
        software = replace(here.software, packages=packages, apex_extensions=list(apex))
        gpus = HostGpus(cards=[GpuCard(0, "H100", 80 * 10**9, 0, "580")] * cards)
        return describe_libraries(
            ClusterFacts([replace(here, host=name, software=software, gpus=gpus) for name in "ab"])
        )

    assert lines("2.20.2", cards=0) == []
    (usual,) = lines("2.20.2")
    assert usual.startswith("a, b: Transformer Engine 2.20.2") and "no Apex, which is not needed" in usual
    assert "Apex (amp_C), which adds nothing" in lines("2.20.2", "amp_C")[0]
    assert "torch's layers, with the kernels of NVIDIA's Apex (amp_C)" in lines(None, "amp_C")[0]
    assert "torch's AdamW" in lines(None)[0]


def with_memory(facts: HostFacts, **changes) -> ClusterFacts:
    return ClusterFacts([replace(facts, machine=replace(facts.machine, **changes))])


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        (dict(memory_limit_bytes=2 * 10**9), r"this job may use 2.0 GB", "--mem=0"),
        (dict(memory_bytes=4 * 10**9, available_bytes=4 * 10**9), "4.0 GB of memory", "larger machine"),
        (dict(available_bytes=10**9), "only 1.0 of 64 GB", "ps aux"),
        (dict(overcommit=2), "vm.overcommit_memory=2", "sysctl -w vm.overcommit_memory=0"),
    ],
)
def test_too_little_memory_is_found(here, changes, what, fix):
    plenty = dict(memory_bytes=64 * 10**9, available_bytes=60 * 10**9, memory_limit_bytes=None, overcommit=0)
    assert list(check_memory(with_memory(here, **plenty))) == []
    (finding,) = check_memory(with_memory(here, **(plenty | changes)))
    assert what in finding.what and fix in finding.fix


def test_a_slow_disk_and_a_disk_that_hangs_are_found(here, tmp_path):
    slow = FolderFacts("/scratch", "temporary", 10**12, 10**12, None, "", 2e6)
    (finding,) = check_disk(ClusterFacts([replace(here, folders=[slow])]))
    assert "writes 2.0 MB/s" in finding.what and finding.severity is Severity.WARNING
    hangs = probe_folder(str(tmp_path), "temporary", timeout_s=0.0)
    (finding,) = check_disk(ClusterFacts([replace(here, folders=[hangs])]))
    assert "did not answer within 0 s" in finding.what and finding.severity is Severity.ERROR


def test_measuring_a_folder_leaves_no_file_in_it(tmp_path):
    facts = probe_folder(str(tmp_path), "run", sample_bytes=2**20)
    assert facts.error == "" and facts.bytes_per_s and facts.bytes_per_s > 0
    usage = shutil.disk_usage(tmp_path)
    assert facts.total_bytes == usage.total and list(tmp_path.iterdir()) == []


def test_facts_survive_a_round_trip_through_json(here):
    assert msgspec.convert(json.loads(json.dumps(to_plain(here))), HostFacts) == here


def test_the_smallest_memory_limit_of_all_control_groups_counts(tmp_path):
    group = tmp_path / "root/slurm/job_7"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/slurm/job_7\n")
    assert memory_limit(tmp_path, tmp_path / "root") is None
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("8000000000\n")
    assert memory_limit(tmp_path, tmp_path / "root") == 8 * 10**9


def test_the_fix_for_interfaces_names_an_interface_that_all_hosts_reach(here):
    def host(name, **interfaces):
        found = [NetworkInterface(n, address) for n, address in interfaces.items()]
        return replace(here, host=name, network=replace(here.network, interfaces=found))

    a, b = host("a", bond0="10.0.0.1", eth1="10.1.0.1"), host("b", bond0="10.0.0.2", eth1="10.1.0.2")
    to_b = [PeerConnection("b", "10.0.0.2", "any", "timed out"), PeerConnection("b", "10.1.0.2", "any")]
    blocked = replace(a, connections=to_b)
    assert fix_interfaces(ClusterFacts([blocked, b])) == "export NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1"
    other = host("b", bond0="10.0.0.2", eth7="10.1.0.2")
    assert fix_interfaces(ClusterFacts([blocked, other])) == (
        "on a: export NCCL_SOCKET_IFNAME=bond0 GLOO_SOCKET_IFNAME=bond0; "
        "on b: export NCCL_SOCKET_IFNAME=eth7 GLOO_SOCKET_IFNAME=eth7"
    )
    failures = [PeerConnection("b", address, "any", "timed out") for address in ("10.0.0.2", "10.1.0.2")]
    isolated = replace(a, connections=failures)
    assert fix_interfaces(ClusterFacts([isolated, b])) == NO_COMMON_INTERFACE


def test_a_broken_interface_is_no_error_for_a_run_that_uses_loopback(here):
    interfaces = [NetworkInterface("lo", "127.0.0.1"), NetworkInterface("eth0", "10.0.0.1", problem="timed out")]
    gpus = HostGpus(cards=[GpuCard(0, "H100", 80 * 10**9, 0, "580")])
    network, machine = replace(here.network, interfaces=interfaces), replace(here.machine, slurm_job=None)
    host = replace(here, gpus=gpus, network=network, machine=machine, environment={})
    assert list(check_interfaces(ClusterFacts([host], Requirements()))) == []
    chosen = replace(host, environment={"NCCL_SOCKET_IFNAME": "eth0"})
    job = replace(host, machine=replace(machine, slurm_job="7"))
    for facts in (ClusterFacts([chosen]), ClusterFacts([job]), ClusterFacts([host], Requirements(address="a:6379"))):
        (finding,) = check_interfaces(facts)
        assert "NCCL would open its connections on eth0 (10.0.0.1)" in finding.what


def test_links_between_gpus_are_parsed_from_the_topology_matrix():
    assert parse_links(matrix(3, {(0, 2): "PIX"})) == {"0-1": "NV18", "0-2": "PIX", "1-2": "NV18"}
    assert parse_links("") == {}


def test_a_driver_that_hangs_after_its_first_answer_is_an_error_of_the_host(monkeypatch):
    def answer(*arguments: str, required: bool = True) -> str:
        if arguments[:1] == ("topo",):
            raise host_probe.NvidiaSmiError("nvidia-smi did not answer within 20 s")
        return "0, GPU-00000000-11, NVIDIA H200, 143771, 1, 580.1, Disabled"

    monkeypatch.setattr(host_probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(host_probe, "_run", answer)
    assert host_probe.read_gpus().error == "nvidia-smi did not answer within 20 s"


@pytest.mark.extended
def test_a_host_that_joins_too_late_is_named(here, monkeypatch):
    monkeypatch.setattr(examine, "gather_facts", lambda requirements, rank=0: here)
    answers = {"requirements": {0: None}, "joined": {0: []}}
    late = SimpleNamespace(
        rank=1, size=2, send=lambda topic, value: None, receive=lambda topic, ranks, timeout_s: answers[topic]
    )
    report = examine.examine_hosts(late, lambda: None, examine.ExamineOptions(1.0, False))
    (finding,) = report.findings
    assert finding.hosts == (here.host,) and finding.check == "attendance" and "too late" in finding.what
    assert exit_status(report.findings) == 2


@pytest.mark.parametrize(
    ("variable", "visible"), [(None, True), ("1,0", True), ("GPU-0000", True), ("1", False), ("", False), ("-1", False)]
)
def test_cuda_visible_devices_selects_cards_by_index_or_uuid(variable, visible):
    assert is_visible("0, GPU-00000000-11, NVIDIA H200, 1, 1, 580, Disabled", variable) is visible


@pytest.mark.parametrize(
    "dims", [ParallelDims(tp=2, dp=2, pp=2), ParallelDims(tp=2, cp=2, dp=2, ep=4, etp=1), ParallelDims(dp=4, ep=2)]
)
def test_the_groups_of_an_axis_partition_all_ranks_and_their_members_differ_in_that_axis_only(dims):
    groups = process_groups(dims)
    for axis in {name.split()[0] for name in groups}:
        ranks = Counter(rank for name, members in groups.items() if name.split()[0] == axis for rank in members)
        assert ranks == Counter(range(dims.world_size)), axis
    for name, members in groups.items():
        axis = name.split()[0]
        assert len(members) == getattr(dims, axis)
        if axis == "ep":
            assert {dims.expert_coords(rank)[1] for rank in members} == set(range(dims.ep))
        else:
            rest = {tuple(v for k, v in asdict(dims.coords(rank)).items() if k != axis) for rank in members}
            assert len(rest) == 1


def test_only_process_groups_that_span_hosts_are_tested():
    groups = process_groups(ParallelDims(tp=2, dp=2))
    assert multi_host_groups(groups, ["a", "a", "b", "b"]) == {"dp 0": (0, 2), "dp 1": (1, 3)}
    assert multi_host_groups(groups, ["a"] * 4) == {} and multi_host_groups(groups, ["a", "b"]) == {"tp 0": (0, 1)}


@pytest.mark.extended
def test_an_all_reduce_of_two_processes_succeeds_and_one_without_its_peer_fails():
    lease = PortLease()
    plan = CollectivePlan("127.0.0.1", lease.port, ["vm", "vm"], {"tp 0": [0, 1]}, single_host=True)
    results = combine_results(plan, {one.rank: one for one in run_ranks(plan, [0, 1], 300)}, 300)
    assert [(one.group, one.backend, one.problem) for one in results] == [("world", "gloo", ""), ("tp 0", "gloo", "")]
    lonely = combine_results(plan, {one.rank: one for one in run_ranks(plan, [0], 2)}, 2)
    lease.close()
    assert lonely[0].seconds is None and lonely[0].problem
    (finding,) = check_collectives(ClusterFacts([], collectives=lonely))
    assert "in process group world fails" in finding.what


def test_a_host_whose_rank_did_not_finish_is_named():
    plan = CollectivePlan("a", 1, ["n0", "n1"])
    results = {0: RankResult(0, ["world"], {"world": 0.1}), 1: RankResult(1, ["world"])}
    (late,) = combine_results(plan, results, 60)
    assert late == CollectiveResult("world", ["n0", "n1"], "", None, "it did not finish within 60 s on n1")


def test_an_all_reduce_that_never_began_is_not_called_too_slow():
    """Rank 0 fails in the first group, so the all-reduce of the second group never begins on rank 0."""
    plan = CollectivePlan("a", 1, ["n0", "n1"], {"tp 0": [0, 1], "dp 0": [0]})
    results = {
        0: RankResult(0, ["world", "tp 0"], {"world": 0.1}, {"tp 0": "connection closed"}),
        1: RankResult(1, ["world", "tp 0"], {"world": 0.1}),
    }
    assert [one.problem for one in combine_results(plan, results, 60)] == [
        "",
        "connection closed",
        "it did not begin on n0, because an earlier all-reduce failed or did not finish",
    ]


def test_the_locked_versions_come_from_the_lock_files():
    for gpu, path in ((False, CPU_LOCK_FILE), (True, GPU_LOCK_FILE)):
        text, versions = (ROOT / path).read_text(), locked_versions(gpu)
        assert set(TESTED) <= versions.keys()
        assert all(f"\n{name}=={version} " in text for name, version in versions.items())
    assert locked_cuda()[0] >= 13 and locked_versions(False, Path("/nowhere")) == {}


def test_findings_that_differ_in_their_hosts_are_merged_and_the_most_severe_comes_first():
    findings = [DoctorFinding("a", Severity.WARNING, (host,), "x", "y", "z") for host in "pqrstuvw"]
    severe = DoctorFinding("b", Severity.ERROR, ("p",), "x", "y", "z")
    first, second = merge_findings([*findings, severe])
    assert first == severe and format_hosts(second.hosts) == "p, q, r, s, t, u and 2 more"
    assert [exit_status(some) for some in ([], [second], [second, first])] == [0, 1, 2]
    assert hosts_that_differ(dict(a=1, b=1, c=2)) == dict(c=2) and hosts_that_differ({}) == {}


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["folder", "port"])
def test_processes_exchange_values_and_time_out_for_a_missing_process(kind, tmp_path):
    lease = PortLease()

    def join() -> Rendezvous:
        folder = kind == "folder"
        store = SharedFolderStore(tmp_path / "m") if folder else TcpRendezvousStore("127.0.0.1", lease.port, None, 5)
        return Rendezvous(store, None, 3)

    first, second = join(), join()
    assert (first.rank, second.rank) == (0, 1)
    second.send("facts", {"of": 1})
    first.send("facts", {"of": 0})
    expected = {0: {"of": 0}, 1: {"of": 1}}
    assert first.receive("facts", range(2), 5) == second.receive("facts", range(2), 5) == expected
    assert set(first.receive("facts", range(3), 0.2)) == {0, 1}
    join()
    with pytest.raises(ValueError, match="taken"):
        join()
    leaving = threading.Thread(target=second.leave)
    leaving.start()
    first.leave(timeout_s=1.0)
    leaving.join()
    lease.close()
    assert not (tmp_path / "m").exists()


def test_a_rendezvous_whose_first_process_is_gone_returns_nothing_and_raises_nothing(tmp_path):
    first, second = (Rendezvous(SharedFolderStore(tmp_path / "m"), rank, 2) for rank in (0, 1))
    first.leave(timeout_s=0.0)
    second.send("facts", 1)
    assert second.receive("facts", [0, 1], 0.1) == {}
    second.leave()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the folder cannot be created"):
        SharedFolderStore(tmp_path / "file")


def test_requests_of_other_programs_do_not_disturb_the_rendezvous():
    lease = PortLease()
    rendezvous = Rendezvous(TcpRendezvousStore("127.0.0.1", lease.port, 0, 5), 0, 1)
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", lease.port), 5) as client:
            client.sendall(line)
            assert client.recv(100) == b""
    rendezvous.send("facts", 1)
    assert rendezvous.receive("facts", [0], 1) == {0: 1}
    rendezvous.leave()
    lease.close()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model"], "'model' is not of the form KEY=VALUE"),
        (
            ["--point=sweep/1", "parallel.tp=2"],
            "'parallel.tp=2' with --point=sweep/1: the doctor checks the keys of this run of a sweep",
        ),
        (["--rendezvous", "a:1"], "the number of hosts is unknown"),
        (["--rendezvous", "a:1", "--hosts", "2", "--rank", "2"], "one process per host"),
        (["--rendezvous", "192.0.2.9:1", "--hosts", "2", "--rank", "0"], "rank 0 cannot listen there"),
    ],
)
def test_wrong_arguments_are_explained(argv, message, capsys, monkeypatch):
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.main(argv) == 2 and message in capsys.readouterr().err


def test_an_error_in_the_config_is_a_finding(tmp_path):
    assert doctor.read_requirements([]) is None
    for keys, message in (
        (["parallel.tpp=2"], "did you mean 'parallel.tp'"),
        (["experiment=quickstat"], "quickstat"),
        (["experiment=none", f"model.path={tmp_path}", "reward=math"], "config.json"),
    ):
        assert message in doctor.read_requirements(keys).mistakes[0]


@pytest.mark.extended
def test_requirements_are_derived_from_the_config(tmp_path):
    keys = ["experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs", f"run.dir={tmp_path}/run"]
    required = doctor.read_requirements([*keys, "parallel.tp=2", "parallel.dp=2"])
    assert required.mistakes == [] and required.gpus == 5 and not required.cannot_run_on_cpus, (
        "four trainer ranks and an engine"
    )
    assert required.process_groups == {"tp 0": [0, 1], "tp 1": [2, 3], "dp 0": [0, 2], "dp 1": [1, 3]}
    assert 5 * 10**5 < required.parameters < 10**6 and required.checkpoint_bytes == 16 * required.parameters * 3
    assert required.model == f"{tmp_path}/inputs/model" and required.run_dir == f"{tmp_path}/run"
    assert msgspec.convert(json.loads(json.dumps(to_plain(required))), Requirements) == required
    (mistake,) = doctor.read_requirements([*keys, "parallel.tp=3"]).mistakes
    assert "parallel.tp=3 does not divide num_attention_heads" in mistake


@pytest.mark.extended
@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        (["placement=colocated", "rollout.num_engines=2"], "1 of 2 engine ranks share their GPUs"),
        (["rollout.engine_tp=4", "cluster.gpus_per_node=3"], "rollout.engine_tp=4: engine 0 would have"),
        (["placement=colocated", "weight_sync.transport=process_group"], "NCCL cannot join two processes on one GPU"),
        (["weight_sync.transport=cuda_ipc"], "no engine shares a GPU with the actor"),
        (["weight_sync.transport=shared_memory"], "does not fit the device"),
        (["weight_sync.transport=process_group"], ""),
    ],
)
def test_the_preflight_check_refuses_gpus_that_weights_cannot_reach(tmp_path, keys, refusal):
    keys = ["experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs", f"run.dir={tmp_path}/run", *keys]
    assert doctor.read_requirements(keys).mistakes == [], "without known hardware, this machine has only CPUs"
    for known in ("cluster.hardware.name=h100", "cluster.scheduler=slurm"):
        mistakes = doctor.read_requirements([*keys, known]).mistakes
        assert refusal in "".join(mistakes) and len(mistakes) == bool(refusal)


@pytest.mark.extended
def test_existing_checkpoints_reduce_the_space_that_is_needed(tmp_path):
    """A job that Slurm requeued has already written some of its checkpoints."""
    keys = ["experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs", f"run.dir={tmp_path}/run"]
    before = doctor.read_requirements(keys).checkpoint_bytes
    (folder := tmp_path / "run/checkpoints/step_50").mkdir(parents=True)
    (folder / "shard").write_bytes(bytes(10**6))
    assert doctor.read_requirements(keys).checkpoint_bytes == before - 10**6
    (folder / "shard").write_bytes(bytes(2 * before))
    assert doctor.read_requirements(keys).checkpoint_bytes == 0
    at_the_end = doctor.read_requirements([*keys[:2], f"run.dir={tmp_path}/other", "checkpoint.every=0"])
    assert at_the_end.checkpoint_bytes == before // 3, "one checkpoint"


@pytest.mark.extended
def test_a_point_of_a_sweep_is_checked_by_its_folder(tmp_path, capsys):
    shared = ("experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs")
    Sweep(tmp_path / "a=b", "g", "reward/mean", True, shared, (("parallel.tp=3",), ("parallel.tp=2",))).write()
    options = doctor._parser().parse_args([f"--point={tmp_path}/a=b/1"])
    required = doctor.read_requirements(doctor._config_keys(options))
    assert required.mistakes == [] and required.gpus == 3 and required.run_dir == f"{tmp_path}/a=b/1"
    assert doctor.main([f"--point={tmp_path}/nowhere/0"]) == 2 and "contains no sweep" in capsys.readouterr().err


def with_cards(facts: HostFacts, name: str, cards: int, allocated: int | None, error: str = "") -> HostFacts:
    gpu = GpuCard(0, "H100", 80 * 10**9, 0, "570")
    gpus = HostGpus([replace(gpu, index=i) for i in range(cards)], error, allocated=allocated)
    return replace(facts, host=name, gpus=gpus)


def test_the_parts_of_a_heterogeneous_job_may_have_different_numbers_of_gpus(here):
    hosts = [with_cards(here, f"a{i}", 8, 8) for i in range(2)] + [with_cards(here, f"b{i}", 4, 4) for i in range(4)]
    assert list(check_gpus(ClusterFacts(hosts))) == []
    lost = [*hosts[:5], with_cards(here, "b3", 3, 4)]
    (finding,) = check_gpus(ClusterFacts(lost))
    assert finding.hosts == ("b3",) and "3 GPUs; the other hosts have 4" in finding.what
    unknown = [replace(host, gpus=replace(host.gpus, allocated=None)) for host in hosts]
    assert {finding.hosts for finding in check_gpus(ClusterFacts(unknown))} == {("a0",), ("a1",)}


def test_a_broken_driver_does_not_matter_to_a_job_without_gpus(here):
    broken = with_cards(here, "h", 0, 0, "NVIDIA-SMI has failed because it couldn't communicate with the driver")
    assert list(check_gpus(ClusterFacts([broken], Requirements(cannot_run_on_cpus=False)))) == []
    for allocated, required in (
        (0, None),
        (None, Requirements(cannot_run_on_cpus=False)),
        (1, Requirements(cannot_run_on_cpus=False)),
    ):
        host = replace(broken, gpus=replace(broken.gpus, allocated=allocated))
        (finding,) = check_gpus(ClusterFacts([host], required))
        assert "no GPU can be used" in finding.what


@pytest.mark.extended
def test_a_preflight_check_of_another_job_does_not_count_as_a_busy_port():
    with serve_peers("nonce") as ports:
        assert busy_ports((ports["any"],)) == {}
    with socket.create_server(("", 0)) as server:
        (owner,) = busy_ports((port := server.getsockname()[1],)).values()
        assert f"process {os.getpid()}" in owner and not is_echo_server(port)


def test_every_check_of_the_check_modules_is_registered_under_its_own_name():
    modules = {check.__module__ for check in CHECKS.values()}
    assert {module.rpartition(".")[2] for module in modules} == {
        path.stem for path in (ROOT / "mrl/doctor/checks").glob("*_checks.py")
    }
    assert all(check.__name__ == f"check_{name}" for name, check in CHECKS.items())
    defined = Counter(
        line.partition("(")[0].removeprefix("def ")
        for path in (ROOT / "mrl/doctor/checks").glob("*_checks.py")
        for line in path.read_text().splitlines()
        if line.startswith("def check_")
    )
    assert defined == Counter(check.__name__ for check in CHECKS.values())


def test_the_documentation_lists_every_check():
    page = (ROOT / "docs/tutorials/slurm.md").read_text()
    assert [name for name in CHECKS if f"`{name}`" not in page] == []
