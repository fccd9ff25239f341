"""All that the rules judge: what every host said, and what they found out together."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.doctor.facts import HostFacts
from mrl.doctor.wanted import Wanted


@dataclass(frozen=True)
class Collective:
    """What came of one all-reduce."""

    group: str  # world, tp 0, ...
    hosts: list[str]
    backend: str  # gloo or nccl
    seconds: float | None = None  # None: it has not ended
    problem: str = ""


@dataclass(frozen=True)
class Seen:
    """Facts of the hosts that came, in the order of their ranks, and the rest."""

    hosts: Sequence[HostFacts]
    wanted: Wanted | None = None
    absent: list[str] = field(default_factory=list)  # hosts, or ranks without a name, that did not come
    collectives: list[Collective] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of all hosts that came."""
        return [one.host for one in self.hosts]

    @property
    def several(self) -> bool:
        """Whether there is anybody to talk to."""
        return len(self.hosts) > 1

    @property
    def gpus(self) -> int:
        """GPUs of all hosts together."""
        return sum(len(one.gpus.cards) for one in self.hosts)


def usual[T: Hashable](values: Mapping[str, T]) -> T:
    """What most hosts have; of several such values the one that comes first."""
    return Counter(values.values()).most_common(1)[0][0]


def unlike[T: Hashable](values: Mapping[str, T]) -> dict[str, T]:
    """The hosts that have something else than most, with what they have."""
    common = usual(values) if values else None
    return {host: value for host, value in values.items() if value != common}
