"""GPUs: those that a run needs, healthy, free, and alike on all hosts."""

from collections.abc import Iterator, Sequence

from mrl.doctor.facts import GB, HostFacts
from mrl.doctor.finding import Finding, error, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "gpus"
BUSY_BYTES = GB


def check(seen: Seen) -> Iterator[Finding]:
    """Number, kind and health of the cards."""
    for host in seen.hosts:
        if not (_without(host) and seen.wanted and not seen.wanted.cuda):
            yield from _own(host)
    if any(host.gpus.cards for host in seen.hosts):
        yield from _alike(seen)
    yield from _enough(seen)


def _without(host: HostFacts) -> bool:
    """Whether Slurm gave this host's processes no GPU."""
    return host.gpus.given == 0


def _own(host: HostFacts) -> Iterator[Finding]:
    where = [host.host]
    if host.gpus.error:
        yield error(
            NAME,
            where,
            f"no GPU can be used: {host.gpus.error}",
            "every process that asks for a GPU here fails",
            "nvidia-smi; after an update of the driver: reboot, or drain the host (scontrol update nodename=HOST state=drain)",
        )
    for card in host.gpus.cards:
        if card.uncorrected_errors:
            what = (
                f"GPU {card.index} has {card.uncorrected_errors} uncorrected memory errors since its driver was loaded"
            )
            why = "processes on it are ended, or compute with wrong numbers"
            yield error(
                NAME, where, what, why, f"nvidia-smi -q -i {card.index} -d ECC,ROW_REMAPPER; reset or replace the card"
            )
        if card.used_bytes > BUSY_BYTES:
            what = f"GPU {card.index} has {card.used_bytes / GB:.1f} GB in use already"
            why = "engines take a share of all memory, and fail where it is not free"
            yield warning(NAME, where, what, why, f"nvidia-smi -i {card.index}, then end the process that has it")
        if card.mig:
            why = "a run takes whole GPUs; NCCL does not work between slices of one"
            yield warning(
                NAME, where, f"GPU {card.index} is cut into slices (MIG)", why, f"nvidia-smi -i {card.index} -mig 0"
            )


def _alike(seen: Seen) -> Iterator[Finding]:
    for given in {host.gpus.given for host in seen.hosts}:  # the parts of a heterogeneous job differ
        yield from _as_many([host for host in seen.hosts if host.gpus.given == given and not host.gpus.error])
    kinds = {host.host: _kinds(host) for host in seen.hosts if host.gpus.cards}
    why = "all wait for the slowest, and the smallest memory bounds the batch of all"
    for name, kind in unlike(kinds).items():
        cure = "ask for one kind: #SBATCH --constraint=..., or --gres=gpu:KIND:N"
        yield warning(NAME, [name], f"{kind}; the other hosts have {usual(kinds)}", why, cure)
    for host in seen.hosts:
        if len({(card.name, card.memory_bytes) for card in host.gpus.cards}) > 1:
            cure = "export CUDA_VISIBLE_DEVICES=... with the cards of one kind"
            yield warning(NAME, [host.host], f"different GPUs in one host: {_kinds(host)}", why, cure)


def _as_many(hosts: Sequence[HostFacts]) -> Iterator[Finding]:
    counts = {host.host: len(host.gpus.cards) for host in hosts}
    for name, count in unlike(counts).items():
        hidden = next(host.gpus.hidden for host in hosts if host.host == name)
        cure = (
            "unset CUDA_VISIBLE_DEVICES"
            if hidden
            else "nvidia-smi -L; then drain the host, or ask Slurm for what it has"
        )
        why = "a layout counts on the same number everywhere: groups then lie across hosts that should be inside one"
        yield error(NAME, [name], f"{count} GPUs; the other hosts have {usual(counts)}", why, cure)


def _kinds(host: HostFacts) -> str:
    kinds = sorted({f"{card.name} {card.memory_bytes / GB:.0f} GB" for card in host.gpus.cards})
    return " and ".join(kinds)


def _enough(seen: Seen) -> Iterator[Finding]:
    if not seen.wanted or not seen.wanted.gpus:
        return
    if seen.gpus and seen.wanted.gpus > seen.gpus:
        what = f"the configuration needs {seen.wanted.gpus} GPUs, there are {seen.gpus}"
        mend = (
            "placement=colocated, a smaller layout (parallel.*, rollout.num_engines), or more hosts; mrl plan placement"
        )
        yield error(NAME, seen.names, what, "the run would be refused when its pools are placed", mend)
    if seen.wanted.cuda and not seen.gpus:
        what = f"the configuration needs {seen.wanted.gpus} GPUs, there is none ({seen.wanted.parameters / 1e9:.1f}B parameters)"
        yield error(
            NAME,
            seen.names,
            what,
            "on a CPU it would take for ever, or fail",
            "run it on hosts with GPUs: #SBATCH --gpus-per-node=8",
        )
