"""What a check has to say: what is wrong, where, why it matters, and the command that mends it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad it is; of the worst one the exit status is made."""

    NOTE = 0  # good to know
    WARNING = 1  # a run would work, but slower, or not for ever
    ERROR = 2  # a run would fail, hang, or compute something else


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    check: str  # name of the rule's file
    severity: Severity
    hosts: tuple[str, ...]  # where; () where it is not about hosts
    what: str  # the value found, and what was expected
    why: str  # what a run would suffer from it
    mend: str  # a command, or who must do what

    @property
    def where(self) -> str:
        """The hosts, for people."""
        return shortened(self.hosts)


MOST_NAMES = 6


def shortened(hosts: Sequence[str]) -> str:
    """Names of hosts, the first few of many."""
    rest = len(hosts) - MOST_NAMES
    return ", ".join(hosts) if rest < 2 else f"{', '.join(hosts[:MOST_NAMES])} and {rest} more"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in their hosts only become one; the worst first, then in the order of the checks."""
    together: dict[tuple[str, ...], Finding] = {}
    for one in findings:
        key = (one.check, one.severity.name, one.what, one.why, one.mend)
        before = together[key].hosts if key in together else ()
        hosts = before + tuple(host for host in one.hosts if host not in before)
        together[key] = Finding(one.check, one.severity, hosts, one.what, one.why, one.mend)
    return sorted(together.values(), key=lambda finding: -finding.severity)


def exit_status(findings: Iterable[Finding]) -> int:
    """0: nothing, or notes; 1: warnings; 2: errors."""
    return int(max((finding.severity for finding in findings), default=Severity.NOTE))


def error(check: str, hosts: Sequence[str], what: str, why: str, mend: str) -> Finding:
    """A run would fail, hang, or compute something else."""
    return Finding(check, Severity.ERROR, tuple(hosts), what, why, mend)


def warning(check: str, hosts: Sequence[str], what: str, why: str, mend: str) -> Finding:
    """A run would work, but slower, or not for ever."""
    return Finding(check, Severity.WARNING, tuple(hosts), what, why, mend)


def note(check: str, hosts: Sequence[str], what: str, why: str, mend: str) -> Finding:
    """Good to know."""
    return Finding(check, Severity.NOTE, tuple(hosts), what, why, mend)
