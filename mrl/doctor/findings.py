"""Findings of the preflight check, and their output for people and for programs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from mrl.doctor.host_facts import ClusterFacts


class Severity(IntEnum):
    """How severe a finding is. The most severe finding determines the exit status."""

    NOTE = 0  # a fact that is worth knowing
    WARNING = 1  # a run would start, but would be slow or could fail later
    ERROR = 2  # a run would fail, hang, or compute a wrong result


@dataclass(frozen=True)
class DoctorFinding:
    """One problem that a check found, and its fix."""

    check: str  # name of the check in mrl.doctor.examine.CHECKS; `run_checks` sets this field
    severity: Severity
    hosts: tuple[str, ...]  # affected hosts; empty if the problem does not belong to a host
    what: str  # the value that was found, and the expected value
    why: str  # the consequence for a run
    fix: str  # what to do: a command, a setting, or the person to ask


SEVERITY_COLORS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = "         "  # before the lines `why` and `fix` of a finding
MAX_SHOWN_HOSTS = 6  # a list of more than MAX_SHOWN_HOSTS + 1 hosts shows MAX_SHOWN_HOSTS names, and how many follow


def error(hosts: Sequence[str], what: str, why: str, fix: str) -> DoctorFinding:
    """Return an error: because of this problem a run would fail, hang, or compute a wrong result."""
    return DoctorFinding("", Severity.ERROR, tuple(hosts), what, why, fix)


def warning(hosts: Sequence[str], what: str, why: str, fix: str) -> DoctorFinding:
    """Return a warning: despite this problem a run would start, but it would be slow or could fail later."""
    return DoctorFinding("", Severity.WARNING, tuple(hosts), what, why, fix)


def note(hosts: Sequence[str], what: str, why: str, fix: str) -> DoctorFinding:
    """Return a note: a fact that is worth knowing."""
    return DoctorFinding("", Severity.NOTE, tuple(hosts), what, why, fix)


def format_hosts(hosts: Sequence[str]) -> str:
    """Join host names. A list that is too long shows only the first MAX_SHOWN_HOSTS names, and how many hosts follow."""
    rest = len(hosts) - MAX_SHOWN_HOSTS
    return ", ".join(hosts) if rest < 2 else f"{', '.join(hosts[:MAX_SHOWN_HOSTS])} and {rest} more"


def merge_findings(findings: Iterable[DoctorFinding]) -> list[DoctorFinding]:
    """Merge findings that differ only in their hosts. The most severe come first. Findings of one severity keep their order."""
    merged: dict[tuple[str, ...], DoctorFinding] = {}
    for one in findings:
        key = (one.check, one.severity.name, one.what, one.why, one.fix)
        before = merged[key].hosts if key in merged else ()
        hosts = before + tuple(host for host in one.hosts if host not in before)
        merged[key] = DoctorFinding(one.check, one.severity, hosts, one.what, one.why, one.fix)
    return sorted(merged.values(), key=lambda finding: -finding.severity)


def exit_status(findings: Iterable[DoctorFinding]) -> int:
    """Return the exit status: 2 if there is an error, 1 if there is a warning, otherwise 0."""
    return int(max((finding.severity for finding in findings), default=Severity.NOTE))


def to_plain(value: Any) -> Any:
    """Convert a dataclass, or a list of dataclasses, to types that JSON has. None stays None."""
    return msgspec.to_builtins(value, str_keys=True)


def print_findings(console: Console, findings: Sequence[DoctorFinding], summary: str) -> None:
    """Print each finding, then the summary."""
    for finding in findings:
        title = Text(f"{finding.severity.name:<8} ", SEVERITY_COLORS[finding.severity])
        where = f"{format_hosts(finding.hosts)}: " if finding.hosts else ""
        console.print(title.append(f"{where}{finding.what}  [{finding.check}]", "default"), soft_wrap=True)
        console.print(Text(f"{INDENT}why: {finding.why}"), soft_wrap=True)
        console.print(Text(f"{INDENT}fix: {finding.fix}\n"), soft_wrap=True)
    console.print(Text(summary), soft_wrap=True)


def summarize(cluster: ClusterFacts, findings: Sequence[DoctorFinding], num_checks: int, seconds: float) -> str:
    """Return one line with the numbers of hosts, GPUs and findings, the all-reduces that finished, and the time."""
    hosts = len(cluster.hosts)
    counts = [_count(findings, severity) for severity in sorted(Severity, reverse=True)]
    total = ", ".join(filter(None, counts)) or "no finding"
    finished = [one for one in cluster.collectives if one.seconds is not None]
    collectives = f", all-reduce over {', '.join(one.group for one in finished)}" if finished else ""
    where = f"{hosts} host{'s' if hosts != 1 else ''}, {cluster.num_gpus} GPUs"
    return f"{where}: {total} in {num_checks} checks{collectives}, {seconds:.1f} s"


def _count(findings: Sequence[DoctorFinding], severity: Severity) -> str:
    number = sum(finding.severity is severity for finding in findings)
    return f"{number} {severity.name.lower()}{'s' if number > 1 else ''}" if number else ""


def to_json(cluster: ClusterFacts, findings: Sequence[DoctorFinding]) -> str:
    """Return the exit status, the findings and the facts as JSON."""
    content = dict(
        exit_status=exit_status(findings),
        findings=[to_plain(finding) | {"severity": finding.severity.name.lower()} for finding in findings],
        missing=cluster.missing,
        requirements=to_plain(cluster.requirements),
        collectives=to_plain(cluster.collectives),
        hosts=to_plain(list(cluster.hosts)),
    )
    return json.dumps(content, indent=1)
