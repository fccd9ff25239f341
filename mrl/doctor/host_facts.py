"""Facts that the preflight check gathers about hosts and about the cluster, and the requirements of a run.

All facts are plain values. Hosts exchange them as JSON, and tests can construct them.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.hang_report.network_interfaces import NetworkInterface

GB = 10**9


@dataclass(frozen=True)
class MachineFacts:
    """Processor cores, host memory and the Slurm job of this process."""

    cores: int
    usable_cores: int  # cores that this process may run on
    memory_bytes: int
    available_bytes: int  # memory that processes can still get without swapping
    memory_limit_bytes: int | None = None  # limit of this process's control group; None: no limit
    overcommit: int = 0  # vm.overcommit_memory; 2: processes may not reserve more memory than exists
    slurm_job: str | None = None  # id of the Slurm job


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions of the code that a run would import on this host."""

    python: str
    packages: dict[str, str | None]  # package -> installed version; None: not installed
    source_checksum: str  # checksum of the code of mrl, models and parallel
    foreign_apex: str | None = None  # folder that `import apex` finds, if it is not NVIDIA's Apex
    apex_extensions: list[str] = field(default_factory=list)  # compiled modules of NVIDIA's Apex that are installed


@dataclass(frozen=True)
class GpuCard:
    """One GPU, as nvidia-smi reports it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int  # memory in use
    driver: str  # version
    mig: bool = False  # whether the card is partitioned (Multi-Instance GPU)
    uncorrected_errors: int = 0  # uncorrected memory errors since the driver was loaded


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of a host."""

    cards: list[GpuCard] = field(default_factory=list)
    error: str = ""  # why nvidia-smi fails; "" if it works or the host has no GPU
    newest_cuda: str = ""  # newest CUDA version that the driver supports
    # pair of GPUs ("0-1") -> link: NV18, PIX, PXB, PHB, NODE or SYS
    links: dict[str, str] = field(default_factory=dict)
    fabric: str = ""  # state of NVSwitch's fabric manager: Completed, In Progress, Not Started, N/A
    hidden: bool = False  # whether CUDA_VISIBLE_DEVICES hides some cards
    allocated: int | None = None  # number of GPUs that Slurm allocated on this host; None: outside of Slurm


@dataclass(frozen=True)
class FolderFacts:
    """A folder that a run would write to or read from."""

    path: str
    purpose: str  # "run", "temporary" or "shared memory"
    total_bytes: int = 0
    free_bytes: int = 0
    free_inodes: int | None = None  # None: the file system does not count inodes
    error: str = ""  # why the folder cannot be written; "" if it can
    bytes_per_s: float | None = None  # speed of writing one file and synchronizing it to disk; None: not measured


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE card."""

    name: str  # card and port: mlx5_0/1
    active: bool
    rate: str  # "400 Gb/sec (4X NDR)"
    link_layer: str  # InfiniBand or Ethernet


@dataclass(frozen=True)
class NetworkFacts:
    """Names, interfaces and ports of a host."""

    interfaces: list[NetworkInterface]
    own_addresses: list[str]  # addresses to which this host's name resolves; gloo resolves the name in the same way
    localhost: list[str]  # addresses that `localhost` resolves to
    route_address: str = ""  # source address of outgoing packets; Ray uses it as the address of its node
    ipv6_only: bool = False  # the interfaces other than loopback have IPv6 addresses and no IPv4 address
    busy_ports: dict[str, str] = field(default_factory=dict)  # fixed ports of Ray's head -> process that listens there
    outgoing_ports: tuple[int, int] = (32768, 60999)  # the kernel's port range for outgoing connections
    infiniband: list[InfinibandPort] = field(default_factory=list)


@dataclass(frozen=True)
class RayAuthFacts:
    """How Ray authenticates on this host. The token itself is never stored."""

    mode: str = ""  # RAY_AUTH_MODE
    digest: str = ""  # short checksum of the token; "": no token is set
    # variable or file that has the token. If RAY_AUTH_TOKEN_PATH names the file, `source` is set even if the file has no token
    source: str = ""
    readable: bool = False  # whether other users can read the file of the token


@dataclass(frozen=True)
class PeerConnection:
    """Result of one TCP connection to another host."""

    host: str  # name of the other host
    address: str
    port: str  # kind of port: "any" (a free port), "ray" or "engine"
    problem: str = ""  # why the connection failed; "" if the other host answered
    seconds: float = 0.0  # duration of the shortest round trip
    clock_ahead_s: float = 0.0  # the other host's clock minus this host's clock; the error is at most seconds / 2


@dataclass(frozen=True)
class HostFacts:
    """All facts about one host."""

    host: str  # name
    rank: int  # index of the host among the hosts that are checked together
    machine: MachineFacts
    software: SoftwareFacts
    gpus: HostGpus
    limits: dict[str, tuple[int, int]]  # resource (nofile, nproc, memlock) -> (soft, hard) limit; -1: no limit
    shared_memory: FolderFacts
    folders: list[FolderFacts]
    network: NetworkFacts
    # variables that configure torch, NCCL, gloo, UCX, CUDA, Hugging Face and proxies; no secrets
    environment: dict[str, str]
    token: RayAuthFacts
    # checksum of the model folder; "": the folder or its config.json is missing; None: the config names no model folder
    model_checksum: str | None = None
    cluster_error: str = ""  # why this host cannot connect to cluster.address
    # name of another host -> addresses to which this host resolves it
    peer_addresses: dict[str, list[str]] = field(default_factory=dict)
    connections: list[PeerConnection] = field(default_factory=list)  # connections from this host to the other hosts


@dataclass(frozen=True)
class Requirements:
    """What a run needs from its hosts, derived from the config of the run."""

    gpus: int = 0  # number of GPUs that the run uses if the hosts have GPUs
    cannot_run_on_cpus: bool = False  # whether the run cannot use CPUs: its model is too large, or a setting needs CUDA
    layout: str = ""  # parallel layout of the actor
    process_groups: dict[str, list[int]] = field(default_factory=dict)  # process group -> trainer ranks
    model: str | None = None  # model folder
    parameters: int = 0  # number of parameters of the actor
    run_dir: str | None = None
    checkpoint_bytes: int = 0  # disk space that the run's checkpoints still need
    address: str | None = None  # address of an existing Ray cluster; None: the run starts a cluster
    offloads_engines: bool = False  # whether engines share GPUs with trainers, and therefore release GPU memory
    mistakes: list[str] = field(default_factory=list)  # errors in the config


@dataclass(frozen=True)
class CollectiveResult:
    """Result of one all-reduce."""

    group: str  # process group: world, tp 0, ...
    hosts: list[str]  # names of the hosts that took part
    backend: str  # gloo or nccl; "" if the all-reduces did not begin on any rank of the group
    seconds: float | None = None  # None: the all-reduce failed or did not finish
    problem: str = ""  # why the all-reduce failed; "" if it finished


@dataclass(frozen=True)
class ClusterFacts:
    """Input of the checks: facts about all hosts in rank order, and results of the all-reduces between hosts."""

    hosts: Sequence[HostFacts]
    requirements: Requirements | None = None  # None: the command has no config keys, so no run is described
    missing: list[str] = field(default_factory=list)  # hosts that did not join: names, or ranks if names are unknown
    collectives: list[CollectiveResult] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of all hosts that joined."""
        return [one.host for one in self.hosts]

    @property
    def multi_host(self) -> bool:
        """Whether more than one host joined."""
        return len(self.hosts) > 1

    @property
    def num_gpus(self) -> int:
        """Number of GPUs on all hosts together."""
        return sum(len(one.gpus.cards) for one in self.hosts)


def most_common[T: Hashable](values: Mapping[str, T]) -> T:
    """Return the most common value. If several values are equally common, return the first one. `values`: host -> value."""
    return Counter(values.values()).most_common(1)[0][0]


def hosts_that_differ[T: Hashable](values: Mapping[str, T]) -> dict[str, T]:
    """Return the hosts whose value differs from the most common value: host -> value."""
    common = most_common(values) if values else None
    return {host: value for host, value in values.items() if value != common}
