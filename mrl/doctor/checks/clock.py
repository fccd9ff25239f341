"""Clocks that differ."""

from collections.abc import Iterator
from statistics import median_low

from mrl.doctor.facts import HostFacts
from mrl.doctor.finding import Finding, warning
from mrl.doctor.seen import Seen

NAME = "clock"
SKEW_S = 1.0


def check(seen: Seen) -> Iterator[Finding]:
    """Hosts whose clock is off the middle of all by more than a second, and more than the measurement can err."""
    if not seen.several:
        return
    ahead = _ahead_of_first(seen.hosts[0])
    middle = median_low([offset for offset, _ in ahead.values()])
    for host, (offset, error_s) in ahead.items():
        skew = offset - middle
        if abs(skew) > SKEW_S + error_s:
            yield warning(
                NAME,
                [host],
                f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the others'",
                "logs of hosts cannot be put in order, files seem to be from the future, and Slurm refuses keys that are too old",
                "timedatectl; chronyc makestep (or systemctl restart chronyd)",
            )


def _ahead_of_first(first: HostFacts) -> dict[str, tuple[float, float]]:
    """Host -> (its clock less the first host's, how far that can be off), seconds; by the quickest contact with each."""
    found = {first.host: (0.0, 0.0)}
    for contact in sorted(first.contacts, key=lambda one: -one.seconds):
        if not contact.problem:
            found[contact.host] = (contact.clock_ahead_s, contact.seconds / 2)
    return found
