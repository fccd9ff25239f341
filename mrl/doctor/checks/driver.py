"""The driver: new enough for the CUDA that torch brings along, and the same everywhere."""

from collections.abc import Iterator

from mrl.doctor import lock
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "driver"


def check(seen: Seen, needed: tuple[int, int] | None = None) -> Iterator[Finding]:
    """`needed`: (major, minor) of CUDA; default: the lock's. A driver of the same major version runs every minor one."""
    needed = needed or lock.cuda()
    drivers = {host.host: host.gpus.cards[0].driver for host in seen.hosts if host.gpus.cards}
    for host in seen.hosts:
        if host.gpus.cuda and int(host.gpus.cuda.split(".")[0]) < needed[0]:
            yield error(
                NAME,
                [host.host],
                f"driver {drivers.get(host.host)} runs CUDA up to {host.gpus.cuda}; torch is built for {needed[0]}.{needed[1]}",
                "torch would not find a GPU",
                f"install a driver for CUDA {needed[0]} (NVIDIA's cuda-compat package does on data-centre cards)",
            )
    for host, driver in unlike(drivers).items():
        what = f"driver {driver}; the other hosts have {usual(drivers)}"
        why = "NCCL and CUDA IPC take other ways by driver: hosts that differ are where hangs and slow links are found"
        yield warning(
            NAME,
            [host],
            what,
            why,
            f"install driver {usual(drivers)} here, or leave the host out: #SBATCH --exclude={host}",
        )
