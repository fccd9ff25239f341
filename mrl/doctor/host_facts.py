"""Facts that the preflight check gathers about hosts and about the cluster, and the requirements of a run.

All facts are plain values. Hosts exchange them as JSON, and tests can construct them.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.hang_report.network_interfaces import NetworkInterface

GB = 10**9


@dataclass(frozen=True)
class ProcessorAndMemory:
    """Processor cores, host memory and the Slurm job of this process."""

    cores: int
    usable_cores: int  # cores that this process may run on
    memory_bytes: int
    available_bytes: int  # without swapping
    memory_limit_bytes: int | None = None  # limit of this process's control group
    overcommit: int = 0  # vm.overcommit_memory; 2: reservations may not exceed the memory that exists
    slurm_job: str | None = None


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions of the code that a run would import on this host."""

    python: str
    packages: dict[str, str | None]  # distribution of the tested matrix -> version; None: not installed
    source_checksum: str  # over the code of mrl, models and parallel
    foreign_apex: str | None = None  # folder that `import apex` finds, if it is not NVIDIA's apex


@dataclass(frozen=True)
class GpuCard:
    """One GPU, as nvidia-smi reports it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    driver: str
    mig: bool = False
    uncorrected_errors: int = 0  # uncorrected memory errors since the driver was loaded


@dataclass(frozen=True)
class HostGpus:
    """The GPUs of a host."""

    cards: list[GpuCard] = field(default_factory=list)
    error: str = ""  # why nvidia-smi fails; "" also on a host without a GPU
    cuda: str = ""  # newest CUDA version that the driver supports
    links: dict[str, str] = field(default_factory=dict)  # "0-1" -> NV18, PIX, PXB, PHB, NODE or SYS
    fabric: str = ""  # state of NVSwitch's fabric manager: Completed, In Progress, Not Started, N/A
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides some cards
    allocated: int | None = None  # number that Slurm allocated on this host; None: unknown


@dataclass(frozen=True)
class FolderFacts:
    """A folder that a run would write to or read from."""

    path: str
    purpose: str
    total_bytes: int = 0
    free_bytes: int = 0
    free_inodes: int | None = None  # None: the file system does not count inodes
    error: str = ""  # why it cannot be written
    bytes_per_s: float | None = None  # write speed of one synchronized file; None: not measured


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE card."""

    name: str  # mlx5_0/1
    active: bool
    rate: str  # "400 Gb/sec (4X NDR)"
    link_layer: str  # InfiniBand or Ethernet


@dataclass(frozen=True)
class NetworkFacts:
    """Names, interfaces and ports of a host."""

    interfaces: list[NetworkInterface]
    own_addresses: list[str]  # addresses of this host's name, resolved in the same way as by gloo
    localhost: list[str]  # addresses that `localhost` resolves to
    route_address: str = ""  # source address of outgoing packets; Ray uses it as the address of its node
    ipv6_only: bool = False  # apart from loopback there is an IPv6 address but no IPv4 address
    busy_ports: dict[str, str] = field(default_factory=dict)  # fixed ports of Ray's head -> process that listens there
    outgoing_ports: tuple[int, int] = (32768, 60999)  # the kernel's port range for outgoing connections
    infiniband: list[InfinibandPort] = field(default_factory=list)


@dataclass(frozen=True)
class RayToken:
    """How Ray authenticates on this host. The token itself is never stored."""

    mode: str = ""  # RAY_AUTH_MODE
    digest: str = ""  # short checksum of the token; "": no token is set
    source: str = ""  # the variable or file that holds it
    readable: bool = False  # other users can read the file


@dataclass(frozen=True)
class PeerConnection:
    """Result of one TCP connection to another host."""

    host: str
    address: str
    port: str  # kind of port: any, ray or engine
    problem: str = ""  # "" if the host answered
    seconds: float = 0.0  # shortest round trip
    clock_ahead_s: float = 0.0  # the other host's clock minus ours, accurate to half a round trip


@dataclass(frozen=True)
class HostFacts:
    """All facts about one host."""

    host: str
    rank: int
    machine: ProcessorAndMemory
    software: SoftwareFacts
    gpus: HostGpus
    limits: dict[str, tuple[int, int]]  # name -> (soft, hard) limit; -1: unlimited
    shared_memory: FolderFacts
    folders: list[FolderFacts]
    network: NetworkFacts
    environment: dict[str, str]  # variables that configure NCCL, gloo, CUDA, Ray and proxies; no secrets
    token: RayToken
    model_checksum: str | None = None  # over names and sizes of the model folder's files; "": no such folder
    cluster_error: str = ""  # why this host cannot connect to cluster.address
    peer_addresses: dict[str, list[str]] = field(default_factory=dict)  # other host -> addresses of its name here
    connections: list[PeerConnection] = field(default_factory=list)  # to the other hosts


@dataclass(frozen=True)
class Requirements:
    """Requirements of a run for its hosts, derived from its config."""

    gpus: int = 0  # slots of its resource pools
    cuda: bool = False  # it cannot run without GPUs
    layout: str = ""
    groups: dict[str, list[int]] = field(default_factory=dict)  # process group -> trainer ranks
    model: str | None = None  # folder
    parameters: int = 0
    run_dir: str | None = None
    checkpoint_bytes: int = 0  # of checkpoints that are not written yet: the kept ones, and one in progress
    address: str | None = None  # of an existing Ray cluster
    offloads_engines: bool = False  # engines share GPUs with trainers and release their GPU memory
    mistakes: list[str] = field(default_factory=list)  # errors in the config


@dataclass(frozen=True)
class CollectiveResult:
    """Result of one all-reduce."""

    group: str  # world, tp 0, ...
    hosts: list[str]
    backend: str  # gloo or nccl
    seconds: float | None = None  # None: it failed or did not finish
    problem: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """Input of the checks: facts of all hosts in rank order, and results of measurements between hosts."""

    hosts: Sequence[HostFacts]
    requirements: Requirements | None = None
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
    def gpus(self) -> int:
        """Number of GPUs of all hosts."""
        return sum(len(one.gpus.cards) for one in self.hosts)


def most_common[T: Hashable](values: Mapping[str, T]) -> T:
    """Return the value that most hosts have. If several values are equally common, return the first."""
    return Counter(values.values()).most_common(1)[0][0]


def outliers[T: Hashable](values: Mapping[str, T]) -> dict[str, T]:
    """Return the hosts whose value differs from the most common one, with their values."""
    common = most_common(values) if values else None
    return {host: value for host, value in values.items() if value != common}
