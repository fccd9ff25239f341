"""Checks of each host: its hardware, its folders, its software and its settings.

Hardware: whether the host joined the check, its clock, memory, cores and process limits. Folders: free space and speed where a
run writes, /dev/shm, and the model folder on every host. Software and settings: versions, apex, environment variables, Ray's
token and cluster.address.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median_low

from mrl.doctor.findings import DoctorFinding, error, format_hosts, note, warning
from mrl.doctor.gather.host_probe import CPU_LOCK_FILE, GPU_LOCK_FILE, locked_versions
from mrl.doctor.host_facts import GB, ClusterFacts, FolderFacts, HostFacts, hosts_that_differ, most_common

MAX_CLOCK_SKEW_S = 1.0  # largest difference between a clock and the median clock
MIN_MEMORY_BYTES = 6 * GB  # the quickstart needs this much for four processes with torch, Ray and SGLang
MIN_FREE_MEMORY_BYTES = 2 * GB  # less available memory gives a warning
WEIGHT_COPIES = 2  # copies of the model weights in the memory of a host without GPUs: one for trainers, one for engines
FEW_CORES_RATIO = 4  # a job that may use 1/4 of the host's cores or less is probably misconfigured
# number of files that a process must be able to open; the second number is for several hosts, and for hosts with GPUs
MIN_FILES, MIN_FILES_CLUSTER = (1024, 4096)
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
    """Find hosts that have too little memory for any run, and hosts without GPUs that have too little memory for the model."""
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
    elif machine.available_bytes < MIN_FREE_MEMORY_BYTES:
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
    for host, count in hosts_that_differ(counts).items():
        if count * 2 <= most_common(counts):
            what = f"a process may use {count} cores; on the other hosts it may use {most_common(counts)}"
            yield warning(
                [host], what, "all hosts wait for the slowest host", "taskset -p $$; scontrol show job $SLURM_JOB_ID"
            )


def check_limits(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find limits (ulimit) that are too low: on open files and on processes."""
    min_files = MIN_FILES_CLUSTER if cluster.multi_host or cluster.num_gpus else MIN_FILES
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


MIN_FREE_DISK_BYTES = 5 * GB  # less free space gives a warning
MAX_USED_FRACTION = 0.95  # Ray creates no objects on a file system that is fuller than this
MIN_INODES = 10_000  # fewer free inodes give a warning; each new file takes one inode
MIN_BYTES_PER_S = 20e6  # a lower write speed gives a warning
OBJECT_STORE_BYTES = 512 * 2**20  # smallest size of Ray's object store in a run on one machine
SHM_BYTES_PER_GPU = 2**30  # size of the buffers that NCCL and SGLang share between processes of a host
RESIZE_SHM = "mount -o remount,size=16g /dev/shm; in a container --shm-size=16g (or --ipc=host)"


def check_disk(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check permission, free space, inodes and write speed of the folders that a run writes to."""
    for host in cluster.hosts:
        for folder in host.folders:
            yield from _check_folder(host, folder, cluster)


def _check_folder(host: HostFacts, folder: FolderFacts, cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    name, where = f"{folder.path} ({folder.purpose})", [host.host]
    if folder.error:
        yield error(
            where,
            f"{name} cannot be written: {folder.error}",
            "a run would fail, or hang, at its first write",
            f"df {folder.path}; mount | grep {folder.path}; choose another folder: {_choose_folder(folder)}",
        )
        return
    yield from _check_free_space(host, folder, cluster.requirements.checkpoint_bytes if cluster.requirements else 0)
    if folder.free_inodes is not None and folder.free_inodes < MIN_INODES:
        yield warning(
            where,
            f"{name} can hold {folder.free_inodes} more files",
            "a run fails with 'No space left on device' although there is free space",
            f"df -i {folder.path}; remove old files, or {_choose_folder(folder)}",
        )
    if folder.bytes_per_s is not None and folder.bytes_per_s < MIN_BYTES_PER_S:
        yield warning(
            where,
            f"{name} writes {folder.bytes_per_s / 1e6:.1f} MB/s",
            "writing checkpoints and logs takes long",
            f"use local or parallel storage: {_choose_folder(folder)}",
        )


def _check_free_space(host: HostFacts, folder: FolderFacts, checkpoint_bytes: int) -> Iterator[DoctorFinding]:
    where, name = [host.host], f"{folder.path} ({folder.purpose})"
    free, used = folder.free_bytes, 1 - folder.free_bytes / max(1, folder.total_bytes)
    if folder.purpose == "run" and checkpoint_bytes > free:
        needed = f"the checkpoints that the run will write need about {checkpoint_bytes / GB:.1f} GB"
        what = f"{name} has {free / GB:.1f} GB free; {needed}"
        fix = f"{_choose_folder(folder)}, or keep fewer checkpoints: checkpoint.keep_last=1"
        yield error(where, what, "the run would fail when it writes a checkpoint", fix)
    elif folder.purpose == "temporary" and used > MAX_USED_FRACTION:
        why = f"Ray creates no objects on a file system that is more than {MAX_USED_FRACTION:.0%} full"
        fix = f"remove old sessions (ls -d /tmp/mrl-ray-*), or {_choose_folder(folder)}"
        yield error(where, f"{name} is {used:.0%} full", why, fix)
    elif free < MIN_FREE_DISK_BYTES:
        why = "logs and checkpoints of a run would fill the file system"
        yield warning(
            where, f"{name} has {free / GB:.1f} GB free", why, f"remove old files, or {_choose_folder(folder)}"
        )


def _choose_folder(folder: FolderFacts) -> str:
    return "run.dir=FOLDER" if folder.purpose == "run" else "export TMPDIR=FOLDER RAY_TMPDIR=FOLDER"


def check_shared_memory(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Check the space in /dev/shm for Ray's objects and for the buffers of NCCL and SGLang."""
    for host in cluster.hosts:
        shm, where = host.shared_memory, [host.host]
        needed = OBJECT_STORE_BYTES + SHM_BYTES_PER_GPU * len(host.gpus.cards)
        if shm.error:
            why = "processes of one host exchange tensors there, so no run would start"
            fix = "mount -t tmpfs -o size=16g tmpfs /dev/shm"
            yield error(where, f"/dev/shm cannot be used: {shm.error}", why, fix)
        elif shm.total_bytes < needed:
            what = f"/dev/shm has {shm.total_bytes / GB:.2f} GB; {needed / GB:.1f} GB are needed"
            severity = error if shm.total_bytes < OBJECT_STORE_BYTES else warning
            yield severity(
                where, what, "a process that writes to a full /dev/shm is killed by SIGBUS (bus error)", RESIZE_SHM
            )
        elif shm.free_bytes < needed:
            free = f"{shm.free_bytes / GB:.2f} of {shm.total_bytes / GB:.1f} GB free"
            yield warning(
                where,
                f"/dev/shm has {free}; {needed / GB:.1f} GB are needed",
                "killed processes leave files there; a process that writes to a full /dev/shm is killed by SIGBUS",
                "ls -la /dev/shm; remove files that no process has open (lsof +D /dev/shm)",
            )


def check_model(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Report errors in the config, and find hosts on which the model folder is missing or different."""
    if not cluster.requirements:  # the command has no config keys, so there is no model folder to check
        return
    folder = cluster.requirements.model
    for mistake in cluster.requirements.mistakes:
        fix = "change the key that the message names; `mrl plan placement` then shows the resulting layout"
        yield error([], mistake, "`mrl train` rejects this config", fix)
    # None: the config names no model folder. "": the host does not have the folder, or the folder has no config.json.
    checksums = {host.host: host.model_checksum for host in cluster.hosts if host.model_checksum is not None}
    for host, checksum in checksums.items():
        if not checksum and any(checksums.values()):
            fix = "put the folder on storage that all hosts share, or copy it: rsync -a HOST:FOLDER/ FOLDER/"
            yield error(
                [host], f"the model folder {folder} is missing", "ranks and engines load the model from it", fix
            )
    existing = {host: checksum for host, checksum in checksums.items() if checksum}
    for host, checksum in hosts_that_differ(existing).items():  # the hosts whose checksum is not the most common one
        what = f"the files of the model folder {folder} differ from those of the other hosts (checksum {checksum})"
        fix = "rsync -a --checksum HOST:FOLDER/ FOLDER/"
        yield error([host], what, "ranks would start from different model weights", fix)


# environment variable that makes a run slow if its value is 1 -> the reason
SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "GPUs of a host communicate through host memory instead of NVLink",
    "NCCL_SHM_DISABLE": "processes of a host communicate over the network",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous kernel",
}
MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "no_proxy")  # variables that may have different values on different hosts
DEBUG_COLLECTIVES = "TORCH_DISTRIBUTED_DEBUG"  # environment variable of torch
# fix of a finding about Ray's token
MAKE_TOKEN = (
    "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32), the same on all hosts and where mrl is called"
)


def check_versions(
    cluster: ClusterFacts, tested_versions: Mapping[bool, Mapping[str, str]] | None = None
) -> Iterator[DoctorFinding]:
    """Find packages that are missing or differ from the lock file, and versions or code that differ between hosts.

    `tested_versions`: True (for hosts with GPUs) or False (without) -> package -> tested version. Default: from the lock files.
    """
    tested_versions = tested_versions or {gpu: locked_versions(gpu) for gpu in (False, True)}
    for host in cluster.hosts:
        gpu = bool(host.gpus.cards)
        fix = f"make setup LOCK={GPU_LOCK_FILE if gpu else CPU_LOCK_FILE}"
        for name, tested in tested_versions[gpu].items():
            yield from _check_version(host.host, name, host.software.packages.get(name), tested, fix)
        torch = host.software.packages.get("torch") or ""
        if gpu and "+cpu" in torch:
            yield error([host.host], f"torch {torch} is built without CUDA", "torch would not use the GPUs", fix)
    yield from _compare_versions(cluster)


def _check_version(host: str, name: str, installed: str | None, tested: str, fix: str) -> Iterator[DoctorFinding]:
    missing = f"{name} is not installed; version {tested} is tested"
    if installed is None and name.startswith("transformer-engine"):
        yield warning(
            [host], missing, "without it, trainers use torch's layers, which are slower and do not support FP8", fix
        )
    elif installed is None:
        yield error([host], missing, "a run imports this package", fix)
    elif installed.partition("+")[0] != tested.partition("+")[0]:
        why = "the packages are tested together: sglang pins torch and transformers, Megatron uses torch's internals"
        yield warning([host], f"{name} {installed} is installed; version {tested} is tested", why, fix)


def _compare_versions(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    pythons = {one.host: one.software.python for one in cluster.hosts}
    why = "processes on different hosts exchange pickles: Ray rejects a node with another Python, other libraries fail later"
    for host, version in hosts_that_differ(pythons).items():
        common = most_common(pythons)
        fix = f"use the same environment on all hosts: install Python {common} here, then make setup"
        yield error([host], f"this host has Python {version}; the other hosts have {common}", why, fix)
    for name in sorted({name for one in cluster.hosts for name in one.software.packages}):
        versions = {one.host: one.software.packages.get(name) for one in cluster.hosts}
        for host, version in hosts_that_differ(versions).items():
            found = f"has version {version}" if version else "is missing"
            what = f"{name} {found}; the other hosts have {most_common(versions) or 'none'}"
            yield error([host], what, why, "share one environment between all hosts, or run make setup on this one")
    checksums = {one.host: one.software.source_checksum for one in cluster.hosts}
    for host, checksum in hosts_that_differ(checksums).items():
        yield error(
            [host],
            f"its code ({checksum}) differs from the code of the other hosts ({most_common(checksums)})",
            "ranks that run different code wait for each other forever, or compute different results",
            "use one checkout that all hosts share, or compare git status and git rev-parse HEAD of the copies",
        )


def check_apex(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts on which `import apex` finds another package than NVIDIA's Apex."""
    for host in cluster.hosts:
        if host.software.foreign_apex:
            yield error(
                [host.host],
                f"{host.software.foreign_apex} is not NVIDIA's Apex: the package apex of PyPI is for web forms",
                "Megatron-Core imports any package of that name, and then fails or runs without fused kernels",
                "pip uninstall -y apex  (Transformer Engine has the same kernels; NVIDIA's Apex is optional, see the Dockerfile)",
            )


def describe_libraries(cluster: ClusterFacts) -> list[str]:
    """Return lines that say which NVIDIA libraries the trainers on hosts with GPUs use, and for what (see docs/adr/0017)."""
    hosts_of: dict[str, list[str]] = {}
    for host in cluster.hosts:
        if host.gpus.cards:
            hosts_of.setdefault(_used_libraries(host), []).append(host.host)
    return [f"{format_hosts(hosts)}: {libraries}" for libraries, hosts in hosts_of.items()]


def _used_libraries(host: HostFacts) -> str:
    version, apex = host.software.packages.get("transformer-engine-torch"), ", ".join(host.software.apex_extensions)
    if version:
        own = f"Transformer Engine {version} (layers, attention, fused Adam, fused weight gradients)"
        if apex:
            return f"{own}; NVIDIA's Apex ({apex}), which adds nothing: Megatron takes Transformer Engine's kernels"
        return f"{own}; no Apex, which is not needed: Transformer Engine has the same kernels"
    if apex:
        return f"no Transformer Engine: torch's layers, with the kernels of NVIDIA's Apex ({apex})"
    return "no Transformer Engine and no Apex: torch's layers and torch's AdamW"


def check_environment(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find debug settings, proxies that receive local requests, and variables that differ between hosts."""
    for host in cluster.hosts:
        yield from _check_variables(host)
        yield from _check_allocator(host, cluster)
    names = {name for host in cluster.hosts for name in host.environment if name not in MAY_DIFFER}
    for name in sorted(names):
        if name.endswith("_SOCKET_IFNAME"):
            continue  # interfaces may have different names on different hosts; connection tests show whether they work
        values = {host.host: host.environment.get(name, "not set") for host in cluster.hosts}
        for host, value in hosts_that_differ(values).items():
            common = most_common(values)
            fix = f"unset {name} on all hosts" if common == "not set" else f"export {name}={common} on all hosts"
            what = f"{name} is {value}; on the other hosts it is {common}"
            yield warning([host], what, "ranks that choose different transports wait for each other forever", fix)


def _check_variables(host: HostFacts) -> Iterator[DoctorFinding]:
    variables, where = host.environment, [host.host]
    for name, why in SLOW_SETTINGS.items():
        if variables.get(name) == "1":
            yield warning(where, f"{name}=1", why, f"unset {name}")
    if variables.get(DEBUG_COLLECTIVES) == "DETAIL":
        why = "torch compares each collective on all ranks before it runs, so collectives are many times slower"
        yield note(where, f"{DEBUG_COLLECTIVES}=DETAIL", why, f"unset {DEBUG_COLLECTIVES}")
    proxies = [name for name in ("http_proxy", "all_proxy") if name in variables]
    exempt = variables.get("no_proxy", "").replace(" ", "").split(",")
    if proxies and not {"127.0.0.1", "*"} & set(exempt):
        yield warning(
            where,
            f"a proxy is set ({' and '.join(proxies)}), and no_proxy does not name 127.0.0.1",
            "requests to engines on this machine would go to the proxy, which cannot reach them",
            "export no_proxy=localhost,127.0.0.1,$no_proxy NO_PROXY=localhost,127.0.0.1,$NO_PROXY",
        )


def _check_allocator(host: HostFacts, cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    settings = host.environment.get("PYTORCH_CUDA_ALLOC_CONF", "") + host.environment.get("PYTORCH_ALLOC_CONF", "")
    offloads = cluster.requirements and cluster.requirements.offloads_engines
    if offloads and "expandable_segments:true" in settings.lower():
        yield warning(
            [host.host],
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, and colocated engines release their GPU memory",
            "SGLang's memory saver replaces torch's allocator and does not support this setting",
            "unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF, or placement=disaggregated",
        )


def check_token(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts on which Ray's token is missing, differs from the other hosts' token, or is readable by other users."""
    needs_token = cluster.multi_host or bool(cluster.requirements and cluster.requirements.address)
    for host in cluster.hosts:
        token, where = host.token, [host.host]
        if token.mode == "token" and not token.digest and needs_token:
            source = f" in {token.source}" if token.source else ""
            what = f"RAY_AUTH_MODE=token, but there is no token{source}"
            yield error(where, what, "Ray does not start, or rejects connections", MAKE_TOKEN)
        if token.readable and needs_token:
            what = f"other users can read Ray's token in {token.source}"
            why = "every user of this host can read the token and run code in your cluster"
            yield warning(where, what, why, f"chmod 600 {token.source}")
    if cluster.multi_host:
        for host in hosts_that_differ({one.host: one.token.digest for one in cluster.hosts}):
            what = "Ray's token differs from the token of the other hosts"
            yield error([host], what, "the head node rejects this host's Ray: 'AuthenticationError'", MAKE_TOKEN)


def check_address(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Report a cluster.address at which no Ray cluster answers."""
    for host in cluster.hosts:
        if host.cluster_error:
            assert cluster.requirements, "the error comes from an address in the requirements"
            what = f"cluster.address={cluster.requirements.address}: {host.cluster_error}"
            fix = "ray start --head --port=6379 on the head, then cluster.address=HEAD:6379; or remove the key"
            yield error([host.host], what, "the run would not find its cluster", fix)
