"""Checks of each host: whether it joined the check, its clock, memory, cores and process limits."""

from collections import Counter
from collections.abc import Iterator
from statistics import median_low

from mrl.doctor.findings import DoctorFinding, error, warning
from mrl.doctor.host_facts import GB, ClusterFacts, HostFacts, most_common, outliers

MAX_CLOCK_SKEW_S = 1.0  # largest difference between a clock and the median clock
MIN_MEMORY_BYTES = 6 * GB  # the quickstart needs this much for four processes with torch, Ray and SGLang
MIN_FREE_BYTES = 2 * GB  # less available memory gives a warning
WEIGHT_COPIES = 2  # copies of the model weights in the memory of a host without GPUs: one for trainers, one for engines
FEW_CORES_RATIO = 4  # a job that may use 1/4 of the host's cores or less is probably misconfigured
MIN_FILES, MIN_FILES_CLUSTER = (
    1024,
    4096,
)  # files that a process must be able to open: on one host without GPUs; on several hosts or with GPUs
MIN_PROCESSES = 4096  # processes and threads of a user; each process of Ray, torch and SGLang has dozens of threads


def check_attendance(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts that did not join, and host names that are used twice."""
    for host in cluster.missing:
        yield error(
            [host],
            "it did not join the check in time",
            "a run would wait for this host forever",
            f"scontrol show node {host}; ssh {host} true; or start without it: #SBATCH --exclude={host}",
        )
    for name, count in Counter(host.host.partition("#")[0] for host in cluster.hosts).items():
        if count > 1:
            what = f"{count} hosts have the name {name}"
            why = "logs and reports cannot distinguish them, and gloo looks up its own address by the name of its host"
            yield warning([name], what, why, "hostnamectl set-hostname NAME; in a container --hostname")


def check_clock(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find clocks that differ from the median by more than a second plus the error of the measurement."""
    if not cluster.multi_host:
        return
    offsets = _clock_offsets(cluster.hosts[0])
    median = median_low([offset for offset, _ in offsets.values()])
    for host, (offset, error_s) in offsets.items():
        skew = offset - median
        if abs(skew) > MAX_CLOCK_SKEW_S + error_s:
            yield warning(
                [host],
                f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} the clocks of the other hosts",
                "logs cannot be ordered, files have dates in the future, and Slurm rejects credentials that seem expired",
                "timedatectl; chronyc makestep (or systemctl restart chronyd)",
            )


def _clock_offsets(first: HostFacts) -> dict[str, tuple[float, float]]:
    """Return host -> (its clock minus the first host's clock, error of this difference) in seconds.

    Both numbers come from the connection that has the shortest round trip to the host.
    """
    offsets = {first.host: (0.0, 0.0)}
    for connection in sorted(first.connections, key=lambda one: -one.seconds):
        if not connection.problem:
            offsets[connection.host] = (connection.clock_ahead_s, connection.seconds / 2)
    return offsets


def check_memory(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts that have too little memory for a run, or too little for the model if they have no GPU."""
    for host in cluster.hosts:
        yield from _check_host_memory(host)
        parameters = cluster.requirements.parameters if cluster.requirements else 0
        memory = min(host.machine.memory_bytes, host.machine.memory_limit_bytes or host.machine.memory_bytes)
        if 4 * parameters * WEIGHT_COPIES > memory and not host.gpus.cards:
            yield error(
                [host.host],
                f"this host has {memory / GB:.0f} GB of memory for a model of {parameters / 1e9:.1f}B parameters",
                "without a GPU, host memory has two float32 copies of the model (trainer, engine), optimizer state and KV cache",
                "use a smaller model.path, or hosts with GPUs",
            )


def _check_host_memory(host: HostFacts) -> Iterator[DoctorFinding]:
    machine, where, limit = host.machine, [host.host], host.machine.memory_limit_bytes
    why = "the kernel kills the largest process, a trainer or an engine, without an error message"
    if limit is not None and limit < MIN_MEMORY_BYTES:
        what = f"this job may use {limit / GB:.1f} GB of the host's {machine.memory_bytes / GB:.0f} GB"
        yield error(where, what, why, "#SBATCH --mem=0 (all memory of the host); in a container --memory")
    elif machine.memory_bytes < MIN_MEMORY_BYTES:
        minimum = f"the smallest run needs about {MIN_MEMORY_BYTES / GB:.0f} GB"
        what = f"this host has {machine.memory_bytes / GB:.1f} GB of memory; {minimum}"
        yield error(where, what, why, "use a larger machine")
    elif machine.available_bytes < MIN_FREE_BYTES:
        what = f"only {machine.available_bytes / GB:.1f} of {machine.memory_bytes / GB:.0f} GB of memory are free"
        yield warning(where, what, why, "ps aux --sort=-rss | head, then end processes that are left over")
    if machine.overcommit == 2:
        yield error(
            where,
            "vm.overcommit_memory=2: processes may not reserve more memory than exists",
            "CUDA and Ray reserve address space that they never use, so they fail",
            "sysctl -w vm.overcommit_memory=0",
        )


def check_cores(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find jobs that may use too few cores (srun's default is one), and hosts with at most half the cores of the others."""
    for host in cluster.hosts:
        usable, cores, processes = host.machine.usable_cores, host.machine.cores, max(2, len(host.gpus.cards))
        if host.machine.slurm_job and usable < processes and usable * FEW_CORES_RATIO <= cores:
            yield warning(
                [host.host],
                f"this job may use {usable} of {cores} cores",
                "trainers, engines, rewards and Ray share these cores, so each step is slow",
                "#SBATCH --ntasks-per-node=1 --cpus-per-task=N, and srun --cpus-per-task=$SLURM_CPUS_PER_TASK",
            )
    counts = {host.host: host.machine.usable_cores for host in cluster.hosts}
    for host, count in outliers(counts).items():
        if count * 2 <= most_common(counts):
            what = f"a process may use {count} cores; on the other hosts it may use {most_common(counts)}"
            yield warning(
                [host], what, "all hosts wait for the slowest host", "taskset -p $$; scontrol show job $SLURM_JOB_ID"
            )


def check_limits(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find limits (ulimit) on open files and processes that are too low."""
    min_files = MIN_FILES_CLUSTER if cluster.multi_host or cluster.gpus else MIN_FILES
    for host in cluster.hosts:
        yield from _check_open_files(host, min_files)
        soft, hard = host.limits.get("nproc", (-1, -1))
        if 0 <= soft < MIN_PROCESSES:
            may_raise = hard < 0 or hard >= MIN_PROCESSES
            yield warning(
                [host.host],
                f"a user may have {soft} processes and threads; {MIN_PROCESSES} are needed",
                "libraries cannot start their threads: 'Resource temporarily unavailable'",
                f"ulimit -u {MIN_PROCESSES * 4}" if may_raise else "nproc in /etc/security/limits.conf",
            )


def _check_open_files(host: HostFacts, min_files: int) -> Iterator[DoctorFinding]:
    soft, hard = host.limits.get("nofile", (-1, -1))
    why = "each connection, object and log needs an open file; at the limit, a run fails: 'Too many open files'"
    if 0 <= hard < min_files:
        what = f"a process may open {hard} files and cannot raise this limit; {min_files} are needed"
        fix = f"LimitNOFILE={min_files * 16} in slurmd's unit; in a container --ulimit nofile=65536"
        yield error([host.host], what, why, fix)
    elif 0 <= soft < min_files:
        maximum = "any number" if hard < 0 else hard
        what = f"a process may open {soft} files, but {min_files} are needed; the limit can be raised to {maximum}"
        yield warning([host.host], what, why, f"ulimit -n {65536 if hard < 0 else min(hard, 65536)}")
