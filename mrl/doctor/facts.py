"""What one host says about itself: plain values, so that it travels as JSON and a test can write it down."""

from dataclasses import dataclass, field

GB = 10**9


@dataclass(frozen=True)
class Machine:
    """Processor, memory, and the job that this process is part of."""

    cores: int
    usable_cores: int  # those that this process may run on
    memory_bytes: int
    available_bytes: int  # without swapping
    memory_limit_bytes: int | None = None  # of this process's control group
    overcommit: int = 0  # vm.overcommit_memory; 2: no process may reserve more than there is
    slurm_job: str | None = None


@dataclass(frozen=True)
class Software:
    """What would be imported here."""

    python: str
    packages: dict[str, str | None]  # of the tested matrix: distribution -> version; None: not installed
    source: str  # checksum over the code of mrl, models and parallel
    apex: str | None = None  # folder of the apex that would be imported, where it is not NVIDIA's


@dataclass(frozen=True)
class Card:
    """A GPU, as nvidia-smi tells it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    driver: str
    mig: bool = False
    uncorrected_errors: int = 0  # of its memory, since the driver was loaded


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a host."""

    cards: list[Card] = field(default_factory=list)
    error: str = ""  # why nvidia-smi has no answer; "" too where there is none
    cuda: str = ""  # newest CUDA that the driver runs
    links: dict[str, str] = field(default_factory=dict)  # "0-1" -> NV18, PIX, PXB, PHB, NODE or SYS
    fabric: str = ""  # state of NVSwitch's fabric manager: Completed, In Progress, Not Started, N/A
    hidden: bool = False  # CUDA_VISIBLE_DEVICES is set
    given: int | None = None  # by Slurm; None: it does not say


@dataclass(frozen=True)
class Folder:
    """A folder that a run would write to or read from."""

    path: str
    purpose: str
    total_bytes: int = 0
    free_bytes: int = 0
    free_inodes: int | None = None  # None: the file system does not count them
    error: str = ""  # why it cannot be written
    bytes_per_s: float | None = None  # of one written and synchronised file; None: not measured


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address."""

    name: str
    address: str
    up: bool = True
    mb_per_s: int = 0  # speed it tells, megabits per second; 0: it tells none
    problem: str = ""  # why a connection from its address to itself fails


@dataclass(frozen=True)
class InfinibandPort:
    """A port of an InfiniBand or RoCE card."""

    name: str  # mlx5_0/1
    active: bool
    rate: str  # "400 Gb/sec (4X NDR)"
    layer: str  # InfiniBand or Ethernet


@dataclass(frozen=True)
class Network:
    """Names, interfaces and ports."""

    interfaces: list[Interface]
    own_name: list[str]  # addresses of this host's name, as gloo looks them up; empty: none
    localhost: list[str]
    route_address: str = ""  # source address of what leaves the host: the one Ray takes for its node
    ipv6_only: bool = False  # no interface but loopback has an IPv4 address, one has IPv6
    busy_ports: dict[str, str] = field(default_factory=dict)  # fixed ports of Ray's head -> who has them
    outgoing_ports: tuple[int, int] = (32768, 60999)  # the kernel's range for outgoing connections
    infiniband: list[InfinibandPort] = field(default_factory=list)


@dataclass(frozen=True)
class Token:
    """Ray's token; never itself."""

    mode: str = ""  # RAY_AUTH_MODE
    digest: str = ""  # of the token that is set; "": none
    source: str = ""  # the variable or file it is from
    readable: bool = False  # by other users


@dataclass(frozen=True)
class Contact:
    """What came of one connection to another host."""

    host: str
    address: str
    port: str  # which of them: any, ray, engine
    problem: str = ""  # "" where that host answered
    seconds: float = 0.0  # of the shortest round trip
    clock_ahead_s: float = 0.0  # its clock less ours; right to half the round trip


@dataclass(frozen=True)
class HostFacts:
    """All of it."""

    host: str
    rank: int
    machine: Machine
    software: Software
    gpus: Gpus
    limits: dict[str, tuple[int, int]]  # name -> (soft, hard); -1: none
    shm: Folder
    folders: list[Folder]
    network: Network
    environment: dict[str, str]  # variables that steer NCCL, gloo, CUDA, Ray and proxies; no secrets
    token: Token
    model: str | None = None  # checksum over names and sizes of the model folder's files; "": it is not there
    cluster: str = ""  # why cluster.address cannot be connected to from here
    peers: dict[str, list[str]] = field(default_factory=dict)  # other host -> addresses of its name here
    contacts: list[Contact] = field(default_factory=list)  # with the other hosts
