"""Checks of the software and its settings: versions, apex, environment variables, Ray's token, cluster.address."""

from collections.abc import Iterator, Mapping

from mrl.doctor.findings import DoctorFinding, error, format_hosts, note, warning
from mrl.doctor.gather.host_probe import CPU_LOCK, GPU_LOCK, locked_versions
from mrl.doctor.host_facts import ClusterFacts, HostFacts, most_common, outliers

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

    `tested_versions`: whether the host has GPUs -> package -> tested version; the default is read from the lock files.
    """
    tested_versions = tested_versions or {gpu: locked_versions(gpu) for gpu in (False, True)}
    for host in cluster.hosts:
        gpu = bool(host.gpus.cards)
        fix = f"make setup LOCK={GPU_LOCK if gpu else CPU_LOCK}"
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
            [host], missing, "without it, trainers use torch's layers, which are slower, and have no FP8", fix
        )
    elif installed is None:
        yield error([host], missing, "a run imports this package", fix)
    elif installed.partition("+")[0] != tested.partition("+")[0]:
        why = "the packages are tested together: sglang pins torch and transformers, Megatron uses torch's internals"
        yield warning([host], f"{name} {installed} is installed; version {tested} is tested", why, fix)


def _compare_versions(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    pythons = {one.host: one.software.python for one in cluster.hosts}
    why = "processes on different hosts exchange pickles: Ray rejects a node with another Python, other libraries fail later"
    for host, version in outliers(pythons).items():
        common = most_common(pythons)
        fix = f"use the same environment on all hosts: install Python {common} here, then make setup"
        yield error([host], f"this host has Python {version}; the other hosts have {common}", why, fix)
    for name in sorted({name for one in cluster.hosts for name in one.software.packages}):
        versions = {one.host: one.software.packages.get(name) for one in cluster.hosts}
        for host, version in outliers(versions).items():
            found = f"has version {version}" if version else "is missing"
            what = f"{name} {found}; the other hosts have {most_common(versions) or 'none'}"
            yield error([host], what, why, "share one environment between all hosts, or run make setup on this one")
    checksums = {one.host: one.software.source_checksum for one in cluster.hosts}
    for host, checksum in outliers(checksums).items():
        yield error(
            [host],
            f"its code ({checksum}) differs from the code of the other hosts ({most_common(checksums)})",
            "ranks that run different code wait for each other forever, or compute different results",
            "use one checkout that all hosts share, or compare git status and git rev-parse HEAD of the copies",
        )


def check_apex(cluster: ClusterFacts) -> Iterator[DoctorFinding]:
    """Find hosts on which `import apex` finds another package than NVIDIA's apex."""
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
        for host, value in outliers(values).items():
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
        for host in outliers({one.host: one.token.digest for one in cluster.hosts}):
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
