"""From one host, or all that meet, to findings."""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mrl.doctor import probe, reach, reachable
from mrl.doctor.facts import Folder, HostFacts
from mrl.doctor.finding import Finding, error
from mrl.doctor.gather import gpus, machine, network, software, storage
from mrl.doctor.groups import spread
from mrl.doctor.judge import judge
from mrl.doctor.meeting import Meeting
from mrl.doctor.probe import Plan, Told
from mrl.doctor.seen import Collective, Seen
from mrl.doctor.wanted import Wanted
from mrl.rollout.ports import PortLease

CONNECT_S = 3.0
CONFIG_S = 60.0  # to read a configuration, on a slow disk
CPU_RANKS = 2  # of an all-reduce on one machine without GPUs


@dataclass(frozen=True)
class Options:
    """How hosts are examined."""

    deadline_s: float = 60.0  # for the hosts to come, and again for the all-reduces
    all_reduce: bool | None = None  # None: where several processes would take part
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class Verdict:
    """What all hosts of a meeting know in the end."""

    seen: Seen
    findings: list[Finding]


def gather(wanted: Wanted | None, rank: int = 0) -> HostFacts:
    """What this host says about itself."""
    return HostFacts(
        host=socket.gethostname(),
        rank=rank,
        machine=machine.machine(),
        software=software.software(),
        gpus=gpus.gpus(),
        limits=machine.limits(),
        shm=storage.shared_memory(),
        folders=_folders(wanted),
        network=network.network(),
        environment=machine.environment(),
        token=machine.token(),
        model=storage.fingerprint(wanted.model if wanted else None),
        cluster=_cluster(wanted.address if wanted else None),
    )


def _folders(wanted: Wanted | None) -> list[Folder]:
    places = {"temporary": storage.temporary()}
    if wanted and wanted.run_dir:
        places["run"] = storage.nearest(wanted.run_dir)
    return [storage.folder(path, purpose) for purpose, path in places.items()]


def _cluster(address: str | None) -> str:
    """Why the cluster's address cannot be connected to; "" where it can, or where it is not HOST:PORT."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as failure:
        return f"a connection to {host} port {port} fails ({failure.strerror or failure})"
    return ""


def examine_one(wanted: Wanted | None, options: Options) -> Verdict:
    """This host alone."""
    facts = gather(wanted)
    ranks = len(facts.gpus.cards) or CPU_RANKS
    collectives: list[Collective] = []
    if options.all_reduce or (options.all_reduce is None and len(facts.gpus.cards) > 1):
        plan = Plan("127.0.0.1", _free_port(), [facts.host] * ranks, {}, alone=True)
        told = probe.run_ranks(plan, range(ranks), options.deadline_s)
        collectives = probe.outcome(plan, {one.rank: one for one in told}, options.deadline_s)
    seen = Seen([facts], wanted, [], collectives)
    return Verdict(seen, judge(seen))


def examine_together(meeting: Meeting, ask: Callable[[], Wanted | None], options: Options) -> Verdict:
    """This host among those that meet; `ask`: reads the configuration, on the first host only."""
    if meeting.rank == 0:
        wanted = ask()
        meeting.say("wanted", plain(wanted))
    else:
        said = meeting.hear("wanted", [0], options.deadline_s + CONFIG_S)
        if 0 not in said:
            return _without_first(meeting)
        wanted = msgspec.convert(said[0], Wanted | None)
    facts, nonce = gather(wanted, meeting.rank), uuid.uuid4().hex
    with reach.listening(nonce, options.clock) as ports:
        meeting.say("facts", dict(facts=plain(facts), ports=ports, nonce=nonce))
        roster = _roster(meeting, options.deadline_s)
        if roster is None:
            return _without_first(meeting)
        peers = [msgspec.convert(said, reach.Peer) for said in roster]
        own = next(peer for peer in peers if peer.facts.rank == meeting.rank)
        others = [peer for peer in peers if peer is not own]
        contacts = reach.contacts(others, options.clock)
        names = {
            peer.facts.host: network.addresses_of(peer.facts.host.partition("#")[0])
            for peer in others
            if "#" not in peer.facts.host
        }
        meeting.say("contacts", plain(replace(own.facts, contacts=contacts, peers=names)))
        ranks = [peer.facts.rank for peer in peers]
        heard = meeting.hear("contacts", ranks, options.deadline_s)  # nobody stops listening before all have tried
    seen = Seen([msgspec.convert(heard[rank], HostFacts) for rank in ranks if rank in heard], wanted)
    collectives = _collectives(meeting, seen, own.facts.host, options) if options.all_reduce is not False else []
    return _agree(meeting, replace(seen, absent=_absent(meeting, seen), collectives=collectives), options.deadline_s)


def plain(value: Any) -> Any:
    """A dataclass as JSON's own types."""
    return msgspec.to_builtins(value, str_keys=True)


def _roster(meeting: Meeting, deadline_s: float) -> list[Any] | None:
    """What those that came said, as the first host has heard it; None where the first is gone."""
    if meeting.rank == 0:
        came = meeting.hear("facts", range(meeting.size), deadline_s)
        names = Counter(said["facts"]["host"] for said in came.values())
        for rank, said in came.items():
            if names[said["facts"]["host"]] > 1:
                said["facts"]["host"] += f"#{rank}"
        meeting.say("roster", list(came.values()))
    return meeting.hear("roster", [0], 2 * deadline_s).get(0)


def _without_first(meeting: Meeting) -> Verdict:
    name = (_node_names(meeting.size) or ["the first host"])[0]
    what, why = "it did not answer at the meeting point in time", "nothing could be compared"
    mend = "look at what the first host's process says; allow more time: --deadline 300"
    return Verdict(Seen([]), [error("attendance", [name], what, why, mend)])


def _absent(meeting: Meeting, seen: Seen) -> list[str]:
    names = _node_names(meeting.size) or [f"rank {rank}" for rank in range(meeting.size)]
    return [names[rank] for rank in range(meeting.size) if rank not in {host.rank for host in seen.hosts}]


def _node_names(size: int) -> list[str]:
    """Names of the job's hosts in the order of their ranks, as Slurm says; empty where it does not, or of other than `size`."""
    nodes = (
        os.environ.get("SLURM_STEP_NODELIST")
        or os.environ.get("SLURM_JOB_NODELIST")
        or os.environ.get("SLURM_NODELIST")
    )
    if not nodes or not shutil.which("scontrol"):
        return []
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=CONNECT_S
        )
    except subprocess.TimeoutExpired:
        return []
    names = done.stdout.split()
    return names if len(names) == size else []


def _collectives(meeting: Meeting, seen: Seen, own: str, options: Options) -> list[Collective]:
    """All-reduces over the hosts that came; none where nothing leads to all of them, which is a finding of its own."""
    if meeting.rank == 0:
        meeting.say("plan", plain(_plan(seen)))
    said = meeting.hear("plan", [0], 2 * options.deadline_s).get(0)
    if said is None:
        return []
    plan = msgspec.convert(said, Plan)
    ranks = [rank for rank, name in enumerate(plan.hosts) if name == own]
    meeting.say("told", plain(probe.run_ranks(plan, ranks, options.deadline_s)))
    heard = meeting.hear("told", [host.rank for host in seen.hosts], options.deadline_s + probe.START_S)
    told = {one.rank: one for each in heard.values() for one in msgspec.convert(each, list[Told])}
    return probe.outcome(plan, told, options.deadline_s)


def _plan(seen: Seen) -> Plan | None:
    first = seen.hosts[0]
    serving = reachable.serving(seen, first)
    if not serving or not seen.several:
        return None
    places = [
        (number, host.host) for number, host in enumerate(seen.hosts) for _ in range(max(1, len(host.gpus.cards)))
    ]
    groups = {name: tuple(ranks) for name, ranks in (seen.wanted.groups if seen.wanted else {}).items()}
    over = spread(groups, [number for number, _ in places])
    return Plan(serving[0].address, _free_port(), [name for _, name in places], {n: list(r) for n, r in over.items()})


def _free_port() -> int:
    lease = PortLease()
    lease.close()
    return lease.port


def _agree(meeting: Meeting, seen: Seen, deadline_s: float) -> Verdict:
    """The first host judges; the others take its word."""
    if meeting.rank == 0:
        findings = judge(seen)
        meeting.say("verdict", plain(findings))
        return Verdict(seen, findings)
    said = meeting.hear("verdict", [0], 2 * deadline_s + probe.START_S).get(0)
    return Verdict(seen, msgspec.convert(said, list[Finding])) if said is not None else _without_first(meeting)
