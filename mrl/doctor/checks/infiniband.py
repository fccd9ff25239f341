"""InfiniBand and RoCE ports."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "infiniband"


def check(seen: Seen) -> Iterator[Finding]:
    """Ports that are down beside ones that are up, hosts with fewer of them, and settings that leave them unused."""
    active = {host.host: tuple(sorted(f"{p.rate}" for p in host.network.infiniband if p.active)) for host in seen.hosts}
    for host in seen.hosts:
        down = [port.name for port in host.network.infiniband if not port.active]
        if down and active[host.host]:
            why = "NCCL spreads its traffic over the ports that are up: fewer are slower"
            yield warning(
                NAME,
                [host.host],
                f"ports that are not up: {', '.join(down)}",
                why,
                "ibstat; check cable and switch port",
            )
        if active[host.host] and host.environment.get("NCCL_IB_DISABLE") == "1":
            what = f"NCCL_IB_DISABLE=1, and {len(active[host.host])} ports are up"
            yield warning(NAME, [host.host], what, "NCCL exchanges over TCP instead", "unset NCCL_IB_DISABLE")
        soft, _ = host.limits.get("memlock", (-1, -1))
        if active[host.host] and soft != -1:
            what = f"a process may lock {soft / 2**20:.0f} MiB of memory (ulimit -l); InfiniBand needs it unlimited"
            why = "NCCL cannot register its buffers: 'ibv_reg_mr failed' or 'Cannot allocate memory'"
            cure = "LimitMEMLOCK=infinity in slurmd's unit; in a container --ulimit memlock=-1"
            yield warning(NAME, [host.host], what, why, cure)
    if seen.several and any(active.values()):
        for name, ports in unlike(active).items():
            what = (
                f"{len(ports)} ports are up ({', '.join(sorted(set(ports)))}); on the other hosts {len(usual(active))}"
            )
            yield warning(
                NAME, [name], what, "all wait for the slowest link, or NCCL falls back to TCP", "ibstat; ibdev2netdev"
            )
