"""Cores that this job may use."""

from collections.abc import Iterator

from mrl.doctor.finding import Finding, warning
from mrl.doctor.seen import Seen, unlike, usual

NAME = "cores"
FEW = 4  # a share of the host's cores below one in so many is a mistake more often than a wish


def check(seen: Seen) -> Iterator[Finding]:
    """One core of many, as `srun` gives where nobody asks for more; fewer than other hosts."""
    for host in seen.hosts:
        usable, cores, processes = host.machine.usable_cores, host.machine.cores, max(2, len(host.gpus.cards))
        if host.machine.slurm_job and usable < processes and usable * FEW <= cores:
            yield warning(
                NAME,
                [host.host],
                f"this job may use {usable} of {cores} cores",
                "trainers, engines, rewards and Ray share them: each step waits",
                "#SBATCH --ntasks-per-node=1 --cpus-per-task=N, and srun --cpus-per-task=$SLURM_CPUS_PER_TASK",
            )
    counts = {host.host: host.machine.usable_cores for host in seen.hosts}
    for host, count in unlike(counts).items():
        if count * 2 <= usual(counts):
            what = f"{count} usable cores; the other hosts have {usual(counts)}"
            yield warning(
                NAME, [host], what, "all wait for the slowest host", "taskset -p $$; scontrol show job $SLURM_JOB_ID"
            )
