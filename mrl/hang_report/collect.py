"""Brings together what is seen on all hosts of a run, and writes the report."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname as here

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mrl.hang_report import interfaces, report
from mrl.hang_report.probe import Seen, probe
from mrl.hang_report.register import Record, records, stacks
from mrl.hang_report.verdict import Verdict, judge

logger = logging.getLogger(__name__)
REMOTE_S = 8.0  # until the findings of all other hosts are here


@dataclass(frozen=True)
class Autopsy:
    """What came out."""

    verdict: Verdict
    report: Path | None  # None where it could not be written

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(seen.title for seen in self.verdict.culprits)


def perform(
    run_dir: Path, what: str, asked: Callable[[Record], bool], *, check_network: bool = False, more: Sequence[str] = ()
) -> Autopsy:
    """Look at every process of the run and write run_dir/autopsy_<n>.txt, if the disk takes it.

    `what`: why, the report's first line. `asked`: which processes were called and have not answered. `check_network`: also
    whether NCCL's interfaces work, for a run that does not come up. `more`: lines for the report.
    """
    everyone, hosts = _everyone(str(stacks(run_dir)), check_network)
    verdict = judge(everyone, lambda seen: asked(seen.record))
    try:
        return Autopsy(verdict, report.write(run_dir, report.text(what, verdict, everyone, hosts, more)))
    except OSError as error:  # a full disk: the verdict is what matters
        logger.warning("no report of an autopsy: %s", error)
        return Autopsy(verdict, None)


def _everyone(folder: str, check_network: bool) -> tuple[list[Seen], list[str]]:
    by_host: dict[str, list[Record]] = {}
    for record in records(folder):
        by_host.setdefault(record.host, []).append(record)
    local = by_host.pop(here(), [])
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]} if by_host else {}
    waiting = {
        host: _ask(nodes[host], folder, there, check_network) for host, there in by_host.items() if host in nodes
    }
    deadline = time.monotonic() + REMOTE_S
    seen, lines = look(folder, local, check_network)
    for host, there in by_host.items():
        try:
            found, said = ray.get(waiting[host], timeout=max(0.0, deadline - time.monotonic()))
        except (KeyError, ray.exceptions.RayError) as error:
            found = [Seen(record, "out of reach") for record in there]
            said = [f"{host} could not be asked: {type(error).__name__}"]
        seen, lines = seen + found, lines + said
    return seen, lines


def _ask(node: str, folder: str, there: list[Record], check_network: bool) -> ray.ObjectRef:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(look).options(num_cpus=0, scheduling_strategy=place).remote(folder, there, check_network)


def look(folder: str, there: list[Record], check_network: bool) -> tuple[list[Seen], list[str]]:
    """What is to be seen on this host: its processes, and what is wrong with its network."""
    lines = []
    if check_network:
        lines = interfaces.advice(here(), interfaces.interfaces(), interfaces.connect_to_itself)
    return probe(folder, there), lines
