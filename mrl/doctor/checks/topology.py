"""How GPUs of a host are linked, and whether NVSwitch is ready."""

from collections.abc import Iterator, Mapping

from mrl.doctor.facts import HostFacts
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "topology"


def check(seen: Seen) -> Iterator[Finding]:
    """NVLink in part of a host, other links than on other hosts, a fabric that is not up."""
    for host in seen.hosts:
        yield from _own(host)
    shapes = {host.host: _shape(host.gpus.links) for host in seen.hosts if host.gpus.links}
    for host, shape in unlike(shapes).items():
        yield warning(
            NAME,
            [host],
            f"its GPUs are linked by {shape}; the other hosts' by {usual(shapes)}",
            "all wait for the slowest exchange; a host with fewer links than its neighbours mostly has a broken one",
            "nvidia-smi nvlink --status; nvidia-smi topo -m",
        )


def _own(host: HostFacts) -> Iterator[Finding]:
    if host.gpus.fabric in ("In Progress", "Not Started"):
        yield error(
            NAME,
            [host.host],
            f"the fabric of NVSwitch is not up: {host.gpus.fabric}",
            "CUDA fails here with 'system not yet initialized'",
            "systemctl restart nvidia-fabricmanager",
        )
    slow = {pair: link for pair, link in host.gpus.links.items() if not link.startswith("NV")}
    if slow and len(slow) < len(host.gpus.links):
        pair, link = next(iter(slow.items()))
        yield warning(
            NAME,
            [host.host],
            f"{len(slow)} of {len(host.gpus.links)} pairs of GPUs have no NVLink (GPUs {pair}: {link})",
            "tensor parallelism over such a pair exchanges each layer over PCIe",
            "keep parallel.tp within linked GPUs (nvidia-smi topo -m); a link that should be there: nvidia-smi nvlink --status",
        )


def _shape(links: Mapping[str, str]) -> str:
    return ", ".join(sorted(set(links.values())))
