"""Rules and parts of `mrl doctor` that need no hosts: facts that cannot be broken here, parsers, groups, the meeting point."""

import ast
import json
import os
import shutil
import socket
import threading
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
from doctor_lab import matrix

from mrl.commands import doctor
from mrl.doctor import lock, probe, reach, reachable
from mrl.doctor.checks import collectives, disk, memory
from mrl.doctor.checks import gpus as gpu_rules
from mrl.doctor.examine import gather, plain
from mrl.doctor.facts import Card, Contact, Folder, Gpus, HostFacts, Interface
from mrl.doctor.finding import Finding, Severity, exit_status, merged
from mrl.doctor.gather.gpus import links, selected
from mrl.doctor.gather.machine import memory_limit
from mrl.doctor.gather.network import answers_as_doctor, busy_ports
from mrl.doctor.gather.storage import folder
from mrl.doctor.groups import groups_of, spread
from mrl.doctor.interfaces import for_gloo, for_nccl, matches
from mrl.doctor.judge import CHECKS
from mrl.doctor.meeting import FolderStore, Meeting, TcpStore
from mrl.doctor.probe import Plan, Told
from mrl.doctor.seen import Collective, Seen, unlike
from mrl.doctor.wanted import Wanted
from mrl.rollout.ports import PortLease
from mrl.sweep.plan import Sweep
from parallel.dims import ParallelDims

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def here() -> HostFacts:
    return gather(None)


def with_memory(facts: HostFacts, **changed) -> Seen:
    return Seen([replace(facts, machine=replace(facts.machine, **changed))])


@pytest.mark.parametrize(
    ("changed", "what", "mend"),
    [
        (dict(memory_limit_bytes=2 * 10**9), r"this job may use 2.0 GB", "--mem=0"),
        (dict(memory_bytes=4 * 10**9, available_bytes=4 * 10**9), "4.0 GB of memory", "larger machine"),
        (dict(available_bytes=10**9), "1.0 GB of", "ps aux"),
        (dict(overcommit=2), "vm.overcommit_memory=2", "sysctl -w vm.overcommit_memory=0"),
    ],
)
def test_memory(here, changed, what, mend):
    plenty = dict(memory_bytes=64 * 10**9, available_bytes=60 * 10**9, memory_limit_bytes=None, overcommit=0)
    assert list(memory.check(with_memory(here, **plenty))) == []
    (finding,) = memory.check(with_memory(here, **(plenty | changed)))
    assert what in finding.what and mend in finding.mend


def test_a_slow_disk_and_one_that_hangs(here, tmp_path):
    slow = Folder("/scratch", "temporary", 10**12, 10**12, None, "", 2e6)
    (finding,) = disk.check(Seen([replace(here, folders=[slow])]))
    assert "takes 2.0 MB/s" in finding.what and finding.severity is Severity.WARNING
    hangs = folder(str(tmp_path), "temporary", deadline_s=0.0)
    (finding,) = disk.check(Seen([replace(here, folders=[hangs])]))
    assert "has not answered for 0 s" in finding.what and finding.severity is Severity.ERROR


def test_a_folder_is_measured_and_left_as_it_was(tmp_path):
    found = folder(str(tmp_path), "run", sample_bytes=2**20)
    assert found.error == "" and found.bytes_per_s and found.bytes_per_s > 0
    usage = shutil.disk_usage(tmp_path)
    assert found.total_bytes == usage.total and list(tmp_path.iterdir()) == []


def test_facts_travel_as_json(here):
    assert msgspec.convert(json.loads(json.dumps(plain(here))), HostFacts) == here


def test_the_smallest_limit_of_the_control_groups_counts(tmp_path):
    group = tmp_path / "root/slurm/job_7"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/slurm/job_7\n")
    assert memory_limit(tmp_path, tmp_path / "root") is None
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("8000000000\n")
    assert memory_limit(tmp_path, tmp_path / "root") == 8 * 10**9


@pytest.mark.parametrize(
    ("rule", "hit", "miss"),
    [("eth", "eth0", "ib0"), ("=eth", "eth", "eth0"), ("^docker,lo", "eth0", "docker0"), ("ib,bond", "bond1", "eth0")],
)
def test_the_grammar_of_nccl_s_variable(rule, hit, miss):
    assert matches(hit, rule) and not matches(miss, rule)


def test_each_library_takes_an_interface_by_its_own_rules():
    names = dict(lo="127.0.0.1", docker0="172.17.0.1", bond0="10.0.0.1", eth1="10.1.0.1")
    found = [Interface(name, address) for name, address in names.items()]
    assert [one.name for one in for_nccl(found)] == ["bond0", "eth1"]
    assert [one.name for one in for_nccl([*found, Interface("ib0", "10.3.0.1")])] == ["ib0"]
    assert [one.name for one in for_nccl(found[:2])] == ["docker0"]
    assert for_nccl(found, "ib") == []
    assert [for_gloo(found, own).name for own in (["10.1.0.1"], ["127.0.1.1"], ["10.9.9.9"])] == ["eth1", "lo", "lo"]
    assert for_gloo(found, ["10.1.0.1"], "bond0").name == "bond0" and for_gloo(found, [], "ib0") is None


def test_the_cure_names_an_interface_that_serves_everybody(here):
    def host(name, **interfaces):
        found = [Interface(n, address) for n, address in interfaces.items()]
        return replace(here, host=name, network=replace(here.network, interfaces=found))

    a, b = host("a", bond0="10.0.0.1", eth1="10.1.0.1"), host("b", bond0="10.0.0.2", eth1="10.1.0.2")
    blocked = replace(a, contacts=[Contact("b", "10.0.0.2", "any", "timed out"), Contact("b", "10.1.0.2", "any")])
    assert reachable.cure(Seen([blocked, b])) == "export NCCL_SOCKET_IFNAME=eth1 GLOO_SOCKET_IFNAME=eth1"
    other = host("b", bond0="10.0.0.2", eth7="10.1.0.2")
    assert reachable.cure(Seen([blocked, other])) == (
        "on a: export NCCL_SOCKET_IFNAME=bond0 GLOO_SOCKET_IFNAME=bond0; "
        "on b: export NCCL_SOCKET_IFNAME=eth7 GLOO_SOCKET_IFNAME=eth7"
    )
    nobody = replace(a, contacts=[Contact("b", address, "any", "timed out") for address in ("10.0.0.2", "10.1.0.2")])
    assert reachable.cure(Seen([nobody, b])) == reachable.NOBODY


def test_the_links_of_gpus_are_read_from_their_matrix():
    assert links(matrix(3, {(0, 2): "PIX"})) == {"0-1": "NV18", "0-2": "PIX", "1-2": "NV18"}
    assert links("") == {}


@pytest.mark.parametrize(
    ("variable", "seen"), [(None, True), ("1,0", True), ("GPU-0000", True), ("1", False), ("", False), ("-1", False)]
)
def test_which_cards_a_process_sees(variable, seen):
    assert selected("0, GPU-00000000-11, NVIDIA H200, 1, 1, 580, Disabled", variable) is seen


@pytest.mark.parametrize(
    "dims", [ParallelDims(tp=2, dp=2, pp=2), ParallelDims(tp=2, cp=2, dp=2, ep=4, etp=1), ParallelDims(dp=4, ep=2)]
)
def test_groups_of_an_axis_part_all_ranks_and_a_member_differs_in_it_only(dims):
    groups = groups_of(dims)
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


def test_only_groups_over_several_hosts_are_tried():
    groups = groups_of(ParallelDims(tp=2, dp=2))
    assert spread(groups, [0, 0, 1, 1]) == {"dp 0": (0, 2), "dp 1": (1, 3)}
    assert spread(groups, [0, 0, 0, 0]) == {} and spread(groups, [0, 1]) == {"tp 0": (0, 1)}


def test_an_all_reduce_over_two_processes_and_one_that_never_meets():
    lease = PortLease()
    plan = Plan("127.0.0.1", lease.port, ["vm", "vm"], {"tp 0": [0, 1]}, alone=True)
    told = {one.rank: one for one in probe.run_ranks(plan, [0, 1], 60)}
    found = probe.outcome(plan, told, 60)
    assert [(one.group, one.backend, one.problem) for one in found] == [("world", "gloo", ""), ("tp 0", "gloo", "")]
    lonely = probe.outcome(plan, {one.rank: one for one in probe.run_ranks(plan, [0], 2)}, 2)
    lease.close()
    assert lonely[0].seconds is None and lonely[0].problem
    (finding,) = collectives.check(Seen([], collectives=lonely))
    assert "in group world fails" in finding.what


def test_who_has_not_ended_is_named():
    plan = Plan("a", 1, ["n0", "n1"])
    (late,) = probe.outcome(plan, {0: Told(0, ["world"], {"world": 0.1}), 1: Told(1, ["world"])}, 60)
    assert late == Collective("world", ["n0", "n1"], "", None, "it has not ended after 60 s on n1")


def test_the_tested_matrix_is_the_locks():
    for gpu, path in ((False, lock.CPU_LOCK), (True, lock.GPU_LOCK)):
        text, matrix_ = (ROOT / path).read_text(), lock.tested(gpu)
        assert set(lock.TESTED) <= matrix_.keys()
        assert all(f"\n{name}=={version} " in text for name, version in matrix_.items())
    assert lock.cuda()[0] >= 13 and lock.tested(False, Path("/nowhere")) == {}


def test_findings_that_differ_in_their_host_are_one_and_the_worst_is_first():
    found = [Finding("a", Severity.WARNING, (host,), "x", "y", "z") for host in "pqrstuvw"]
    bad = Finding("b", Severity.ERROR, ("p",), "x", "y", "z")
    first, second = merged([*found, bad])
    assert first == bad and second.where == "p, q, r, s, t, u and 2 more"
    assert [exit_status(some) for some in ([], [second], [second, first])] == [0, 1, 2]
    assert unlike(dict(a=1, b=1, c=2)) == dict(c=2) and unlike({}) == {}


@pytest.mark.parametrize("kind", ["folder", "port"])
def test_processes_meet_exchange_and_miss_who_is_not_there(kind, tmp_path):
    lease = PortLease()

    def join() -> Meeting:
        store = FolderStore(tmp_path / "m") if kind == "folder" else TcpStore("127.0.0.1", lease.port, None, 5)
        return Meeting(store, None, 3)

    first, second = join(), join()
    assert (first.rank, second.rank) == (0, 1)
    second.say("facts", {"of": 1})
    first.say("facts", {"of": 0})
    assert first.hear("facts", range(2), 5) == second.hear("facts", range(2), 5) == {0: {"of": 0}, 1: {"of": 1}}
    assert set(first.hear("facts", range(3), 0.2)) == {0, 1}
    join()
    with pytest.raises(ValueError, match="taken"):
        join()
    leaving = threading.Thread(target=second.leave)
    leaving.start()
    first.leave(deadline_s=1.0)
    leaving.join()
    lease.close()
    assert not (tmp_path / "m").exists()


def test_a_meeting_whose_first_process_is_gone_is_silent_not_broken(tmp_path):
    first, second = (Meeting(FolderStore(tmp_path / "m"), rank, 2) for rank in (0, 1))
    first.leave(deadline_s=0.0)
    second.say("facts", 1)
    assert second.hear("facts", [0, 1], 0.1) == {}
    second.leave()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="it cannot be made"):
        FolderStore(tmp_path / "file")


def test_a_stranger_s_line_does_not_disturb_the_meeting():
    import socket

    lease = PortLease()
    meeting = Meeting(TcpStore("127.0.0.1", lease.port, 0, 5), 0, 1)
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"\xff\n"):
        with socket.create_connection(("127.0.0.1", lease.port), 5) as stranger:
            stranger.sendall(line)
            assert stranger.recv(100) == b""
    meeting.say("facts", 1)
    assert meeting.hear("facts", [0], 1) == {0: 1}
    meeting.leave()
    lease.close()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model"], "'model' is no KEY=VALUE"),
        (["--rendezvous", "a:1"], "how many hosts are there"),
        (["--rendezvous", "a:1", "--hosts", "2", "--rank", "2"], "one process per host"),
        (["--rendezvous", "192.0.2.9:1", "--hosts", "2", "--rank", "0"], "rank 0 cannot listen there"),
    ],
)
def test_a_mistake_in_the_arguments_says_what_to_do(argv, message, capsys, monkeypatch):
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.main(argv) == 2 and message in capsys.readouterr().err


def test_a_mistake_in_the_configuration_is_a_finding(tmp_path):
    assert doctor.wanted([]) is None
    for keys, message in (
        (["parallel.tpp=2"], "did you mean 'parallel.tp'"),
        (["experiment=quickstat"], "quickstat"),
        (["experiment=none", f"model.path={tmp_path}", "reward=math"], "config.json"),
    ):
        assert message in doctor.wanted(keys).mistakes[0]


def test_what_a_configuration_wants(tmp_path):
    keys = ["experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs", f"run.dir={tmp_path}/run"]
    wanted = doctor.wanted([*keys, "parallel.tp=2", "parallel.dp=2"])
    assert wanted.mistakes == [] and wanted.gpus == 5 and not wanted.cuda, "four ranks and an engine"
    assert wanted.groups == {"tp 0": [0, 1], "tp 1": [2, 3], "dp 0": [0, 2], "dp 1": [1, 3]}
    assert 5 * 10**5 < wanted.parameters < 10**6 and wanted.checkpoint_bytes == 16 * wanted.parameters * 3
    assert wanted.model == f"{tmp_path}/inputs/model" and wanted.run_dir == f"{tmp_path}/run"
    assert msgspec.convert(json.loads(json.dumps(plain(wanted))), Wanted) == wanted
    (mistake,) = doctor.wanted([*keys, "parallel.tp=3"]).mistakes
    assert "parallel.tp=3 does not divide num_attention_heads" in mistake


def test_checkpoints_that_are_there_need_no_more_room(tmp_path):
    """A job that is queued again has written some of what it was asked to have room for."""
    keys = ["experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs", f"run.dir={tmp_path}/run"]
    before = doctor.wanted(keys).checkpoint_bytes
    (folder := tmp_path / "run/checkpoints/step_50").mkdir(parents=True)
    (folder / "shard").write_bytes(bytes(10**6))
    assert doctor.wanted(keys).checkpoint_bytes == before - 10**6
    (folder / "shard").write_bytes(bytes(2 * before))
    assert doctor.wanted(keys).checkpoint_bytes == 0
    at_the_end = doctor.wanted([*keys[:2], f"run.dir={tmp_path}/other", "checkpoint.every=0"])
    assert at_the_end.checkpoint_bytes == before // 3, "one"


def test_a_point_of_a_sweep_is_asked_for_by_its_folder(tmp_path, capsys):
    fixed = ("experiment=quickstart", f"data.inputs.folder={tmp_path}/inputs")
    Sweep(tmp_path / "a=b", "g", "reward/mean", True, fixed, (("parallel.tp=3",), ("parallel.tp=2",))).write()
    options = doctor._parser().parse_args([f"--point={tmp_path}/a=b/1"])
    wanted = doctor.wanted(doctor._keys(options))
    assert wanted.mistakes == [] and wanted.gpus == 3 and wanted.run_dir == f"{tmp_path}/a=b/1"
    assert doctor.main([f"--point={tmp_path}/nowhere/0"]) == 2 and "holds no sweep" in capsys.readouterr().err


def with_cards(facts: HostFacts, name: str, cards: int, given: int | None, error: str = "") -> HostFacts:
    gpu = Card(0, "H100", 80 * 10**9, 0, "570")
    return replace(facts, host=name, gpus=Gpus([replace(gpu, index=i) for i in range(cards)], error, given=given))


def test_the_parts_of_a_heterogeneous_job_may_have_other_numbers_of_gpus(here):
    hosts = [with_cards(here, f"a{i}", 8, 8) for i in range(2)] + [with_cards(here, f"b{i}", 4, 4) for i in range(4)]
    assert list(gpu_rules.check(Seen(hosts))) == []
    lost = [*hosts[:5], with_cards(here, "b3", 3, 4)]
    (finding,) = gpu_rules.check(Seen(lost))
    assert finding.hosts == ("b3",) and "3 GPUs; the other hosts have 4" in finding.what
    unsaid = [replace(host, gpus=replace(host.gpus, given=None)) for host in hosts]
    assert {finding.hosts for finding in gpu_rules.check(Seen(unsaid))} == {("a0",), ("a1",)}


def test_a_job_without_gpus_does_not_mind_a_driver_without(here):
    broken = with_cards(here, "h", 0, 0, "NVIDIA-SMI has failed because it couldn't communicate with the driver")
    assert list(gpu_rules.check(Seen([broken], Wanted(cuda=False)))) == []
    for given, wanted in ((0, None), (None, Wanted(cuda=False)), (1, Wanted(cuda=False))):
        (finding,) = gpu_rules.check(Seen([replace(broken, gpus=replace(broken.gpus, given=given))], wanted))
        assert "no GPU can be used" in finding.what


def test_a_doctor_of_another_job_on_the_host_takes_no_port():
    with reach.listening("nonce") as ports:
        assert busy_ports((ports["any"],)) == {}
    with socket.create_server(("", 0)) as server:
        (owner,) = busy_ports((port := server.getsockname()[1],)).values()
        assert f"process {os.getpid()}" in owner and not answers_as_doctor(port)


def test_every_rule_is_registered_and_says_its_file_s_name():
    files = {path.stem for path in (ROOT / "mrl/doctor/checks").glob("*.py")} - {"__init__"}
    assert {check.__module__.rpartition(".")[2] for check in CHECKS} == files
    for name in files:
        tree = ast.parse((ROOT / f"mrl/doctor/checks/{name}.py").read_text())
        (named,) = [
            n.value.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "NAME"
        ]
        assert named == name


def test_the_page_lists_every_check():
    page = (ROOT / "docs/doctor.md").read_text()
    assert [name for check in CHECKS if f"`{(name := check.__module__.rpartition('.')[2])}`" not in page] == []
