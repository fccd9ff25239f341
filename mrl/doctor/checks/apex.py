"""PyPI's `apex`, which is not NVIDIA's."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, error
from mrl.doctor.seen import Seen

NAME = "apex"


def check(seen: Seen) -> Iterator[Finding]:
    """An `import apex` that finds something else than NVIDIA's."""
    for host in seen.hosts:
        if host.software.apex:
            yield error(
                NAME,
                [host.host],
                f"{host.software.apex} is not NVIDIA's apex: PyPI's package of that name is for web forms",
                "Megatron-Core imports apex where it finds one, and fails or loses its fused kernels",
                "pip uninstall -y apex  (Transformer Engine has what is needed of it)",
            )
