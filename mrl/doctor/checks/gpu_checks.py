"""Checks of the GPUs: count, model, health, driver, and the links between them."""

from collections.abc import Iterator, Mapping, Sequence

from mrl.doctor.findings import DoctorFinding, error, warning
from mrl.doctor.gather.host_probe import locked_cuda
from mrl.doctor.host_facts import GB, ClusterFacts, HostFacts, hosts_that_differ, most_common

BUSY_BYTES = GB  # a GPU counts as busy if more than this much of its memory is in use


def check_driver(cluster: ClusterFacts, required: tuple[int, int] | None = None) -> Iterator[DoctorFinding]:
    """Find GPU drivers that are too old for torch's CUDA version, and drivers that differ between hosts.

    `required`: CUDA version (major, minor); the default is the version in the lock file. Only the major CUDA version is compared:
    a driver for CUDA 12.x also runs CUDA 12.y (minor-version compatibility).
    """
    required = required or locked_cuda()
    drivers = {host.host: host.gpus.cards[0].driver for host in cluster.hosts if host.gpus.cards}
    for host in cluster.hosts:
        newest = host.gpus.newest_cuda
        if newest and int(newest.split(".")[0]) < required[0]:
            driver = f"driver {drivers.get(host.host)} supports CUDA up to {newest}"
            yield error(
                [host.host],
                f"{driver}; torch is built for {required[0]}.{required[1]}",
                "torch would not find a GPU",
                f"install a driver for CUDA {required[0]} (on data-center cards NVIDIA's cuda-compat package suffices)",
            )
    common = most_common(drivers) if drivers else ""
    for host, driver in hosts_that_differ(drivers).items():
        yield warning(
            [host],
            f"the GPU driver is {driver}; the other hosts have {common}",
            "the driver decides which transports NCCL and CUDA IPC use; with different drivers a run may hang or be slow",
            f"install driver {common} here, or exclude the host: #SBATCH --exclude={host}",
        )


def check_gpus(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find unhealthy or busy GPUs, hosts with different GPUs, and clusters with fewer GPUs than the config needs."""
    for host in cluster.hosts:
        without_gpus = host.gpus.allocated == 0  # Slurm gave this job no GPU of the host
        if not (without_gpus and cluster.requirements and not cluster.requirements.cannot_run_on_cpus):
            yield from _check_cards(host)
    if any(host.gpus.cards for host in cluster.hosts):
        yield from _compare_hosts(cluster)
    yield from _check_gpu_count(cluster)


def _check_cards(host: HostFacts) -> Iterator[DoctorFinding]:
    where = [host.host]
    if host.gpus.error:
        yield error(
            where,
            f"no GPU can be used: {host.gpus.error}",
            "every process that needs a GPU fails here",
            "run nvidia-smi; after a driver update reboot the host, or drain it (scontrol update nodename=HOST state=drain)",
        )
    for card in host.gpus.cards:
        if card.uncorrected_errors:
            yield error(
                where,
                f"GPU {card.index} has {card.uncorrected_errors} uncorrected memory errors since its driver was loaded",
                "processes that use this GPU are killed, or compute wrong numbers",
                f"nvidia-smi -q -i {card.index} -d ECC,ROW_REMAPPER; reset or replace the card",
            )
        if card.used_bytes > BUSY_BYTES:
            yield warning(
                where,
                f"{card.used_bytes / GB:.1f} GB of GPU {card.index} are already in use",
                "engines allocate a fraction of the whole GPU memory, and fail if that memory is not free",
                f"nvidia-smi -i {card.index}, then end the process that uses it",
            )
        if card.mig:
            yield warning(
                where,
                f"GPU {card.index} is partitioned (MIG)",
                "a run uses whole GPUs; NCCL does not work between partitions of one GPU",
                f"nvidia-smi -i {card.index} -mig 0",
            )


def _compare_hosts(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    # In a heterogeneous job, Slurm allocates different numbers of GPUs on different hosts. So the numbers of GPUs are compared
    # only between hosts with equal allocations.
    for allocated in {host.gpus.allocated for host in cluster.hosts}:
        comparable = [host for host in cluster.hosts if host.gpus.allocated == allocated and not host.gpus.error]
        yield from _compare_gpu_counts(comparable)
    models = {host.host: _models(host) for host in cluster.hosts if host.gpus.cards}
    why = "all ranks wait for the slowest GPU, and the GPU with the least memory limits the batch on all GPUs"
    for name, model in hosts_that_differ(models).items():
        fix = "request one GPU model: #SBATCH --constraint=..., or --gres=gpu:MODEL:N"
        yield warning([name], f"the GPUs are {model}; the other hosts have {most_common(models)}", why, fix)
    for host in cluster.hosts:
        if len({(card.name, card.memory_bytes) for card in host.gpus.cards}) > 1:
            fix = "export CUDA_VISIBLE_DEVICES=... with the cards of one model"
            yield warning([host.host], f"the GPUs of this host differ: {_models(host)}", why, fix)


def _compare_gpu_counts(hosts: Sequence[HostFacts]) -> Iterator[DoctorFinding]:
    counts = {host.host: len(host.gpus.cards) for host in hosts}
    for name, count in hosts_that_differ(counts).items():
        hidden = next(host.gpus.hidden for host in hosts if host.host == name)
        fix = "nvidia-smi -L; then drain the host, or request from Slurm the number of GPUs that this host has"
        yield error(
            [name],
            f"this host has {count} GPUs; the other hosts have {most_common(counts)}",
            "a layout assumes the same number of GPUs on every host; process groups that fit one host would now span two",
            "unset CUDA_VISIBLE_DEVICES" if hidden else fix,
        )


def _models(host: HostFacts) -> str:
    models = sorted({f"{card.name} {card.memory_bytes / GB:.0f} GB" for card in host.gpus.cards})
    return " and ".join(models)


def _check_gpu_count(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    requirements = cluster.requirements
    if not requirements or not requirements.gpus:
        return
    if cluster.num_gpus and requirements.gpus > cluster.num_gpus:
        yield error(
            cluster.names,
            f"the config needs {requirements.gpus} GPUs, the hosts have {cluster.num_gpus}",
            "the placement of the run's resource pools would fail",
            "set placement=colocated, use a smaller layout (parallel.*, rollout.num_engines), or add hosts; `mrl plan placement "
            "KEY=VALUE ...` shows how many GPUs each resource pool needs",
        )
    if requirements.cannot_run_on_cpus and not cluster.num_gpus:
        yield error(
            cluster.names,
            f"the config needs {requirements.gpus} GPUs for a model of {requirements.parameters / 1e9:.1f}B parameters, and the "
            "hosts have none",
            "on a CPU the run would be far too slow, or fail",
            "run it on hosts with GPUs: #SBATCH --gpus-per-node=8",
        )


def check_topology(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts where only some pairs of GPUs have NVLink, links that differ between hosts, and unready NVSwitch fabrics.

    A host without NVLink is reported only if its kinds of links differ from those of the other hosts.
    """
    for host in cluster.hosts:
        yield from _check_links(host)
    kinds = {host.host: _link_kinds(host.gpus.links) for host in cluster.hosts if host.gpus.links}
    for host, kind in hosts_that_differ(kinds).items():
        yield warning(
            [host],
            f"its GPUs are linked by {kind}; the GPUs of the other hosts are linked by {most_common(kinds)}",
            "all ranks wait for the slowest link; a host with fewer links than the others usually has a broken link",
            "nvidia-smi nvlink --status; nvidia-smi topo -m",
        )


def _check_links(host: HostFacts) -> Iterator[DoctorFinding]:
    if host.gpus.fabric in ("In Progress", "Not Started"):
        yield error(
            [host.host],
            f"the NVSwitch fabric is not ready: {host.gpus.fabric}",
            "CUDA fails here with 'system not yet initialized'",
            "systemctl restart nvidia-fabricmanager",
        )
    slow = {pair: link for pair, link in host.gpus.links.items() if not link.startswith("NV")}
    if slow and len(slow) < len(host.gpus.links):
        pair, link = next(iter(slow.items()))
        yield warning(
            [host.host],
            f"{len(slow)} of {len(host.gpus.links)} pairs of GPUs have no NVLink (GPUs {pair}: {link})",
            "tensor parallelism over such a pair communicates over PCIe in every layer",
            "keep parallel.tp within linked GPUs (nvidia-smi topo -m); if a link is missing: nvidia-smi nvlink --status",
        )


def _link_kinds(links: Mapping[str, str]) -> str:
    return ", ".join(sorted(set(links.values())))
