"""Preflight check of one or several hosts: it gathers facts, applies all checks to the facts, and returns findings."""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from mrl.core.processes import PortLease
from mrl.doctor.checks import gpu_checks, host_checks, network_checks
from mrl.doctor.collective_probe import (
    START_TIMEOUT_S,
    CollectivePlan,
    RankResult,
    combine_results,
    multi_host_groups,
    run_ranks,
)
from mrl.doctor.findings import DoctorFinding, error, merge_findings, to_plain
from mrl.doctor.gather import host_probe, network_probe
from mrl.doctor.gather.host_probe import read_gpus
from mrl.doctor.host_facts import ClusterFacts, CollectiveResult, FolderFacts, HostFacts, Requirements
from mrl.doctor.rendezvous import Rendezvous

CONNECT_TIMEOUT_S = 3.0  # longest wait for a connection to cluster.address, and for scontrol
CONFIG_TIMEOUT_S = 60.0  # time for the first host to read the config from a slow disk
NUM_CPU_RANKS = 2  # number of ranks in an all-reduce on one host without GPUs

Check = Callable[[ClusterFacts], Iterator[DoctorFinding]]
CHECKS: dict[str, Check] = {
    "attendance": host_checks.check_attendance,
    "versions": host_checks.check_versions,
    "apex": host_checks.check_apex,
    "driver": gpu_checks.check_driver,
    "gpus": gpu_checks.check_gpus,
    "topology": gpu_checks.check_topology,
    "infiniband": network_checks.check_infiniband,
    "memory": host_checks.check_memory,
    "cores": host_checks.check_cores,
    "shared_memory": host_checks.check_shared_memory,
    "limits": host_checks.check_limits,
    "disk": host_checks.check_disk,
    "names": network_checks.check_names,
    "network": network_checks.check_network,
    "interfaces": network_checks.check_interfaces,
    "ports": network_checks.check_ports,
    "clock": host_checks.check_clock,
    "collectives": network_checks.check_collectives,
    "environment": host_checks.check_environment,
    "token": host_checks.check_token,
    "address": host_checks.check_address,
    "model": host_checks.check_model,
}
"""All checks by name. Findings of one severity are shown in this order."""


@dataclass(frozen=True)
class ExamineOptions:
    """Options of a preflight check."""

    deadline_s: float = 60.0  # time within which all hosts must join; the same time again for all all-reduces together
    all_reduce: bool | None = None  # whether to run all-reduces; None: only with several GPUs or several hosts
    clock: Callable[[], float] = time.time  # returns this host's time in seconds


@dataclass(frozen=True)
class DoctorReport:
    """Result of a preflight check.

    The findings are the same on all hosts, except on a host that joined too late or lost the connection to the first host.
    """

    cluster: ClusterFacts
    findings: list[DoctorFinding]


def run_checks(cluster: ClusterFacts) -> list[DoctorFinding]:
    """Apply all checks and return their findings, the most severe first."""
    return merge_findings(replace(finding, check=name) for name, check in CHECKS.items() for finding in check(cluster))


def gather_facts(requirements: Requirements | None, rank: int = 0) -> HostFacts:
    """Gather the facts about this host. `rank`: index of the host among the hosts that are checked together."""
    return HostFacts(
        host=socket.gethostname(),
        rank=rank,
        machine=host_probe.read_machine(),
        software=host_probe.read_software(),
        gpus=read_gpus(),
        limits=host_probe.read_limits(),
        shared_memory=host_probe.probe_shared_memory(),
        folders=_probe_folders(requirements),
        network=network_probe.read_network(),
        environment=host_probe.read_environment(),
        token=host_probe.read_token(),
        model_checksum=host_probe.model_checksum(requirements.model if requirements else None),
        cluster_error=_connect_to_cluster(requirements.address if requirements else None),
    )


def _probe_folders(requirements: Requirements | None) -> list[FolderFacts]:
    folders = {"temporary": host_probe.ray_temporary_folder()}
    if requirements and requirements.run_dir:
        folders["run"] = host_probe.nearest_existing_folder(requirements.run_dir)
    return [host_probe.probe_folder(path, purpose) for purpose, path in folders.items()]


def _connect_to_cluster(address: str | None) -> str:
    """Try a connection to HOST:PORT, the address of a Ray cluster. Returns the error, or "" if the connection works.

    Returns "" without a connection if `address` is None or does not have this form.
    """
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as failure:
        return f"a connection to {host} port {port} fails ({failure.strerror or failure})"
    return ""


def examine_host(requirements: Requirements | None, options: ExamineOptions) -> DoctorReport:
    """Examine this host alone."""
    facts = gather_facts(requirements)
    num_ranks = len(facts.gpus.cards) or NUM_CPU_RANKS
    collectives: list[CollectiveResult] = []
    if options.all_reduce or (options.all_reduce is None and len(facts.gpus.cards) > 1):
        hosts = [facts.host] * num_ranks
        plan = CollectivePlan(address="127.0.0.1", port=_free_port(), host_of_rank=hosts, single_host=True)
        results = run_ranks(plan, range(num_ranks), options.deadline_s)
        collectives = combine_results(plan, {one.rank: one for one in results}, options.deadline_s)
    cluster = ClusterFacts([facts], requirements, [], collectives)
    return DoctorReport(cluster, run_checks(cluster))


def examine_hosts(
    rendezvous: Rendezvous, read_requirements: Callable[[], Requirements | None], options: ExamineOptions
) -> DoctorReport:
    """Examine this host together with the other hosts. `read_requirements` reads the config; only the first host calls it."""
    if rendezvous.rank == 0:
        requirements = read_requirements()
        rendezvous.send("requirements", to_plain(requirements))
    else:
        received = rendezvous.receive("requirements", [0], options.deadline_s + CONFIG_TIMEOUT_S)
        if 0 not in received:
            return _first_host_missing(rendezvous)
        requirements = msgspec.convert(received[0], Requirements | None)
    exchanged = _exchange_facts(rendezvous, requirements, options)
    if isinstance(exchanged, DoctorReport):
        return exchanged
    own_name, facts = exchanged
    cluster = ClusterFacts(facts, requirements)
    run_all_reduces = options.all_reduce is not False
    collectives = _run_collectives(rendezvous, cluster, own_name, options) if run_all_reduces else []
    cluster = replace(cluster, missing=_missing_hosts(rendezvous, cluster), collectives=collectives)
    return _share_report(rendezvous, cluster, options.deadline_s)


def _exchange_facts(
    rendezvous: Rendezvous, requirements: Requirements | None, options: ExamineOptions
) -> tuple[str, list[HostFacts]] | DoctorReport:
    """Exchange facts with the other hosts, and test the connections to them.

    Returns (name of this host, facts of all hosts that joined). The name has a suffix if several hosts have the same name.
    Returns a report if the first host is gone, or if this host joined too late.
    """
    facts, nonce = gather_facts(requirements, rendezvous.rank), uuid.uuid4().hex
    with network_probe.serve_peers(nonce, options.clock) as ports:
        rendezvous.send("facts", dict(facts=to_plain(facts), ports=ports, nonce=nonce))
        joined = _list_joined_hosts(rendezvous, options.deadline_s)
        if joined is None:
            return _first_host_missing(rendezvous)
        hosts = [msgspec.convert(entry, network_probe.PeerHost) for entry in joined]
        this_host = next((host for host in hosts if host.facts.rank == rendezvous.rank), None)
        if this_host is None:
            return _attendance_report(facts.host, "it joined the other hosts too late", "it was not checked")
        peers = [host for host in hosts if host is not this_host]
        connections = network_probe.connect_to_peers(peers, options.clock)
        names = [peer.facts.host for peer in peers if "#" not in peer.facts.host]
        addresses = {name: network_probe.resolve(name) for name in names}
        own_facts = replace(this_host.facts, connections=connections, peer_addresses=addresses)
        rendezvous.send("connections", to_plain(own_facts))
        ranks = [host.facts.rank for host in hosts]
        # The servers of this host run until all hosts have tried to connect, or until the deadline.
        received = rendezvous.receive("connections", ranks, options.deadline_s)
    return this_host.facts.host, [msgspec.convert(received[rank], HostFacts) for rank in ranks if rank in received]


def _list_joined_hosts(rendezvous: Rendezvous, deadline_s: float) -> list[Any] | None:
    """Return the `facts` messages of all hosts that joined in time, or None if the first host is gone.

    All hosts get the same list. If several hosts have the same name, their names get the suffix #RANK.
    """
    if rendezvous.rank == 0:
        joined = rendezvous.receive("facts", range(rendezvous.size), deadline_s)
        names = Counter(entry["facts"]["host"] for entry in joined.values())
        for rank, entry in joined.items():
            if names[entry["facts"]["host"]] > 1:
                entry["facts"]["host"] += f"#{rank}"
        rendezvous.send("joined", list(joined.values()))
    return rendezvous.receive("joined", [0], 2 * deadline_s).get(0)


def _first_host_missing(rendezvous: Rendezvous) -> DoctorReport:
    name = (_slurm_node_names(rendezvous.size) or ["the first host"])[0]
    what, why = "it did not answer at the rendezvous in time", "the hosts could not be compared with each other"
    return _attendance_report(name, what, why)


def _attendance_report(host: str, what: str, why: str) -> DoctorReport:
    fix = "read the output of the process on the first host, or allow more time: --deadline 300"
    return DoctorReport(ClusterFacts([]), [replace(error([host], what, why, fix), check="attendance")])


def _missing_hosts(rendezvous: Rendezvous, cluster: ClusterFacts) -> list[str]:
    names = _slurm_node_names(rendezvous.size) or [f"rank {rank}" for rank in range(rendezvous.size)]
    joined = {host.rank for host in cluster.hosts}
    return [names[rank] for rank in range(rendezvous.size) if rank not in joined]


def _slurm_node_names(size: int) -> list[str]:
    """Return the names of the Slurm job's hosts in rank order; [] outside of Slurm or if the job does not have `size` hosts."""
    nodes = (
        os.environ.get("SLURM_STEP_NODELIST")
        or os.environ.get("SLURM_JOB_NODELIST")
        or os.environ.get("SLURM_NODELIST")
    )
    if not nodes or not shutil.which("scontrol"):
        return []
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return []
    names = done.stdout.split()
    return names if len(names) == size else []


def _run_collectives(
    rendezvous: Rendezvous, cluster: ClusterFacts, own_name: str, options: ExamineOptions
) -> list[CollectiveResult]:
    """Run all-reduces between the hosts. Returns [] if none can run; other checks report the reason.

    A rank of the plan is a process that takes part in the all-reduces. A rank of `rendezvous` is a host.
    """
    if rendezvous.rank == 0:
        rendezvous.send("plan", to_plain(_plan_collectives(cluster)))
    received = rendezvous.receive("plan", [0], 2 * options.deadline_s).get(0)
    if received is None:
        return []
    plan = msgspec.convert(received, CollectivePlan)
    ranks = [rank for rank, name in enumerate(plan.host_of_rank) if name == own_name]
    rendezvous.send("collectives", to_plain(run_ranks(plan, ranks, options.deadline_s)))
    all_ranks, timeout_s = [host.rank for host in cluster.hosts], options.deadline_s + START_TIMEOUT_S
    answers = rendezvous.receive("collectives", all_ranks, timeout_s).values()
    results = {one.rank: one for answer in answers for one in msgspec.convert(answer, list[RankResult])}
    return combine_results(plan, results, options.deadline_s)


def _plan_collectives(cluster: ClusterFacts) -> CollectivePlan | None:
    """Plan the all-reduces. In the plan, a host has one rank for each of its GPUs, or one rank if it has no GPU.

    Returns None if there is only one host, or if no interface of the first host can be reached from all other hosts.
    """
    first = cluster.hosts[0]
    interfaces = network_checks.reachable_interfaces(cluster, first)
    if not interfaces or not cluster.multi_host:
        return None
    host_of_rank = [host.host for host in cluster.hosts for _ in range(max(1, len(host.gpus.cards)))]
    groups = multi_host_groups(cluster.requirements.process_groups if cluster.requirements else {}, host_of_rank)
    return CollectivePlan(
        interfaces[0].address, _free_port(), host_of_rank, {name: list(r) for name, r in groups.items()}
    )


def _free_port() -> int:
    lease = PortLease()
    lease.close()
    return lease.port


def _share_report(rendezvous: Rendezvous, cluster: ClusterFacts, deadline_s: float) -> DoctorReport:
    """Return the report. The first host applies the checks and sends the findings to the other hosts."""
    if rendezvous.rank == 0:
        findings = run_checks(cluster)
        rendezvous.send("findings", to_plain(findings))
        return DoctorReport(cluster, findings)
    received = rendezvous.receive("findings", [0], 2 * deadline_s + START_TIMEOUT_S).get(0)
    if received is None:
        return _first_host_missing(rendezvous)
    return DoctorReport(cluster, msgspec.convert(received, list[DoctorFinding]))
