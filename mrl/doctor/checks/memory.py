"""Host memory."""

from collections.abc import Iterator

from mrl.doctor.facts import GB, HostFacts
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen

NAME = "memory"
LEAST_BYTES = 6 * GB  # the quickstart's processes import torch four times, Ray and SGLang
FREE_BYTES = 2 * GB
LOADED_TWICE = 2  # weights pass through the host's memory on their way to trainers and to engines


def check(seen: Seen) -> Iterator[Finding]:
    """What there is, what this process may have of it, and what the model needs."""
    for host in seen.hosts:
        yield from _own(host)
        bytes_each = 4 * seen.wanted.parameters if seen.wanted else 0
        has = min(host.machine.memory_bytes, host.machine.memory_limit_bytes or host.machine.memory_bytes)
        if bytes_each * LOADED_TWICE > has and not host.gpus.cards:
            assert seen.wanted
            what = f"{has / GB:.0f} GB of memory for a model of {seen.wanted.parameters / 1e9:.1f}B parameters"
            why = "without a GPU, trainer and engine each hold it in float32 here, with optimizer and cache besides"
            yield error(NAME, [host.host], what, why, "use a smaller model.path, or hosts with GPUs")


def _own(host: HostFacts) -> Iterator[Finding]:
    machine, where = host.machine, [host.host]
    limit, why = (
        machine.memory_limit_bytes,
        "the kernel ends the largest process, a trainer or an engine, without a word",
    )
    if limit is not None and limit < LEAST_BYTES:
        cure = "#SBATCH --mem=0 (all of the host's); in a container --memory"
        yield error(
            NAME,
            where,
            f"this job may use {limit / GB:.1f} GB of the host's {machine.memory_bytes / GB:.0f}",
            why,
            cure,
        )
    elif machine.memory_bytes < LEAST_BYTES:
        what = f"{machine.memory_bytes / GB:.1f} GB of memory; the smallest run needs about {LEAST_BYTES / GB:.0f}"
        yield error(NAME, where, what, why, "use a larger machine")
    elif machine.available_bytes < FREE_BYTES:
        what = f"{machine.available_bytes / GB:.1f} GB of {machine.memory_bytes / GB:.0f} are free"
        yield warning(NAME, where, what, why, "ps aux --sort=-rss | head, and end what is left over")
    if machine.overcommit == 2:
        what = "vm.overcommit_memory=2: no process may reserve more than there is"
        yield error(
            NAME,
            where,
            what,
            "CUDA and Ray reserve address space they never use, and fail",
            "sysctl -w vm.overcommit_memory=0",
        )
