"""What was found, for people and for programs."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from mrl.doctor.examine import Verdict, plain
from mrl.doctor.finding import Finding, Severity, exit_status
from mrl.doctor.judge import CHECKS

COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}
INDENT = "         "


def show(console: Console, verdict: Verdict, seconds: float) -> None:
    """Each finding in four lines, then a line of totals."""
    for finding in verdict.findings:
        title = Text(f"{finding.severity.name:<8} ", COLOURS[finding.severity])
        where = f"{finding.where}: " if finding.hosts else ""
        console.print(title.append(f"{where}{finding.what}  [{finding.check}]", "default"), soft_wrap=True)
        console.print(Text(f"{INDENT}why:  {finding.why}"), soft_wrap=True)
        console.print(Text(f"{INDENT}mend: {finding.mend}\n"), soft_wrap=True)
    console.print(Text(summary(verdict, seconds)), soft_wrap=True)


def summary(verdict: Verdict, seconds: float) -> str:
    """One line: who was looked at, and what came of it."""
    hosts = len(verdict.seen.hosts)
    counts = [_count(verdict.findings, severity) for severity in sorted(Severity, reverse=True)]
    found = ", ".join(filter(None, counts)) or "no finding"
    tried = [one for one in verdict.seen.collectives if one.seconds is not None]
    together = f", all-reduce over {', '.join(one.group for one in tried)}" if tried else ""
    where = f"{hosts} host{'s' if hosts != 1 else ''}, {verdict.seen.gpus} GPUs"
    return f"{where}: {found} in {len(CHECKS)} checks{together}, {seconds:.1f} s"


def _count(findings: Sequence[Finding], severity: Severity) -> str:
    number = sum(finding.severity is severity for finding in findings)
    return f"{number} {severity.name.lower()}{'s' if number > 1 else ''}" if number else ""


def as_json(verdict: Verdict) -> str:
    """All of it: exit_status, findings, and the facts that they are made from."""
    findings = [plain(finding) | {"severity": finding.severity.name.lower()} for finding in verdict.findings]
    said = dict(
        exit_status=exit_status(verdict.findings),
        findings=findings,
        absent=verdict.seen.absent,
        wanted=plain(verdict.seen.wanted),
        collectives=plain(verdict.seen.collectives),
        hosts=plain(list(verdict.seen.hosts)),
    )
    return json.dumps(said, indent=1)
