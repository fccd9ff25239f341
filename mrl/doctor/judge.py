"""All rules, in the order in which their findings are shown."""

from collections.abc import Callable, Iterator

from mrl.doctor.checks import (
    address,
    apex,
    attendance,
    clock,
    collectives,
    cores,
    disk,
    driver,
    environment,
    gpus,
    infiniband,
    interfaces,
    limits,
    memory,
    model,
    names,
    network,
    ports,
    shared_memory,
    token,
    topology,
    versions,
)
from mrl.doctor.finding import Finding, merged
from mrl.doctor.seen import Seen

CHECKS: tuple[Callable[[Seen], Iterator[Finding]], ...] = (
    *(attendance.check, versions.check, apex.check, driver.check, gpus.check, topology.check, infiniband.check),
    *(memory.check, cores.check, shared_memory.check, limits.check, disk.check),
    *(names.check, network.check, interfaces.check, ports.check, clock.check, collectives.check),
    *(environment.check, token.check, address.check, model.check),
)


def judge(seen: Seen) -> list[Finding]:
    """What all rules find; the worst first."""
    return merged(finding for check in CHECKS for finding in check(seen))
