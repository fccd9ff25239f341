"""Everything that `mrl doctor` finds, broken for real on hosts made of namespaces: each fault with its cure, and nothing else."""

# ruff: noqa: E501 - a fault is a line or two

import json
import re
import resource
from dataclasses import dataclass, field

import pytest
from doctor_lab import BOND, Lab, available, card, distribution, matrix, nvidia_smi

pytestmark = pytest.mark.skipif(not available(), reason="needs iproute2, and leave to make namespaces")

MAY_LOCK = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY
"""Whether hosts with InfiniBand can be given what they need here; where not, they are told so besides."""

EIGHT = [card(i) for i in range(8)]
GPUS = nvidia_smi(EIGHT)
SECOND = "ip link add eth1 type bridge; ip addr add 10.8.0.{}/24 dev eth1; ip link set eth1 up\n"
IB = """
mount -t tmpfs lab /sys/class; d=/sys/class/infiniband
for p in {}; do
  mkdir -p $d/${{p%:*}}/ports/1; echo "4: ${{p#*:}}" >$d/${{p%:*}}/ports/1/state
  echo "400 Gb/sec (4X NDR)" >$d/${{p%:*}}/ports/1/rate; echo InfiniBand >$d/${{p%:*}}/ports/1/link_layer
done
ulimit -l unlimited || true
"""
MODEL = "mkdir -p $LAB/model_$HOSTNAME /run/model; mount --bind $LAB/model_$HOSTNAME /run/model; cd /run/model; echo {} >config.json; cd $LAB/cwd\n"


@dataclass(frozen=True)
class Fault:
    """What is broken where, and what must be said of it."""

    name: str
    check: str
    what: str  # in the finding
    mend: str  # in its cure
    breaks: dict[int, str]
    hosts: int = 1
    where: str = "h0"
    status: int = 2
    wanted: dict = field(default_factory=dict)
    also: frozenset = frozenset()  # (check, host) of what follows from it


WANTS_GPUS = dict(gpus=8, cuda=True, parameters=8 * 10**9)

FAULTS = [
    # versions
    Fault("another version than tested", "versions", r"transformers 4\.9\.9 is installed; 5\.", "make setup LOCK=requirements.txt",
          {0: distribution("transformers", "4.9.9")}, status=1),
    Fault("Transformer Engine missing on a GPU host", "versions", "transformer-engine is not installed", "requirements-gpu.txt",
          {0: GPUS + "rm -r $LAB/site_h0/transformer*"}),
    Fault("torch without CUDA on a GPU host", "versions", r"torch 2\.14\.1\+cpu is built without CUDA", "make setup LOCK=requirements-gpu",
          {0: GPUS + distribution("torch", "2.14.1+cpu")}),
    Fault("hosts with different Ray", "versions", r"ray 2\.59\.0; the other hosts have 2\.60", "one environment",
          {1: distribution("ray", "2.59.0")}, hosts=2, where="h1",
          also=frozenset({("versions", "h1")})),
    Fault("hosts with different code", "versions", "the code here is another", "one checkout",
          {1: "echo '# changed' >$LAB/other.py; mount --bind $LAB/other.py $PYTHONPATH/mrl/tracking/tracker.py"}, hosts=2, where="h1"),
    Fault("PyPI's apex", "apex", "is not NVIDIA's apex", "pip uninstall -y apex",
          {0: "mkdir -p $LAB/site/apex; touch $LAB/site/apex/__init__.py; export PYTHONPATH=$LAB/site:$PYTHONPATH"}),
    # GPUs
    Fault("driver and library do not match", "gpus", "no GPU can be used: Failed to initialize NVML", "nvidia-smi",
          {0: nvidia_smi([], fails="Failed to initialize NVML: Driver/library version mismatch")}),
    Fault("driver too old for the CUDA of torch", "driver", r"driver 550\.54 runs CUDA up to 12\.4; torch is built for 13\.", "CUDA 13",
          {0: nvidia_smi([card(0, driver="550.54")], cuda="12.4")}),
    Fault("hosts with different drivers", "driver", r"driver 570\.1; the other hosts have 580", r"install driver 580\.95\.05",
          {0: GPUS, 1: nvidia_smi([card(i, driver="570.1") for i in range(8)])}, hosts=2, where="h1", status=1),
    Fault("a GPU fell off one host", "gpus", "7 GPUs; the other hosts have 8", "nvidia-smi -L",
          {0: GPUS, 1: nvidia_smi(EIGHT[:7])}, hosts=2, where="h1"),
    Fault("GPUs hidden on one host", "gpus", "3 GPUs; the other hosts have 8", "unset CUDA_VISIBLE_DEVICES",
          {0: GPUS, 1: GPUS + "export CUDA_VISIBLE_DEVICES=0,1,2"}, hosts=2, where="h1"),
    Fault("hosts with different cards", "gpus", "NVIDIA A100-SXM4-80GB 86 GB; the other hosts have NVIDIA H200", "constraint",
          {0: GPUS, 1: nvidia_smi([card(i, "NVIDIA A100-SXM4-80GB", 81920) for i in range(8)])}, hosts=2, where="h1", status=1),
    Fault("memory of a GPU in use", "gpus", r"GPU 1 has 64\.\d GB in use already", "end the process",
          {0: nvidia_smi([card(0), card(1, used=61035)])}, status=1),
    Fault("a GPU with broken memory", "gpus", "GPU 0 has 3 uncorrected memory errors", "reset or replace",
          {0: nvidia_smi([card(0)], errors="3")}),
    Fault("a GPU cut into slices", "gpus", "cut into slices", "nvidia-smi -i 0 -mig 0",
          {0: nvidia_smi([card(0).replace("Disabled", "Enabled")])}, status=1),
    Fault("a pair of GPUs without NVLink", "topology", r"1 of 28 pairs of GPUs have no NVLink \(GPUs 2-5: SYS\)", r"parallel\.tp",
          {0: nvidia_smi(EIGHT, topology=matrix(8, {(2, 5): "SYS"}))}, status=1),
    Fault("NVSwitch's fabric is not up", "topology", "fabric of NVSwitch is not up: In Progress", "nvidia-fabricmanager",
          {0: nvidia_smi(EIGHT, fabric="In Progress")}),
    Fault("no GPU where the configuration needs some", "gpus", r"needs 8 GPUs, there is none \(8\.0B", "gpus-per-node",
          {}, wanted=WANTS_GPUS, also=frozenset({("memory", "h0")})),
    Fault("fewer GPUs than the configuration needs", "gpus", "needs 16 GPUs, there are 8", "placement=colocated",
          {0: GPUS}, wanted=dict(gpus=16)),
    # InfiniBand
    Fault("an InfiniBand port is down", "infiniband", "not up: mlx5_1/1", "ibstat",
          {0: IB.format("mlx5_0:ACTIVE mlx5_1:INIT")}, status=1),
    Fault("a host with fewer InfiniBand ports", "infiniband", r"1 ports are up .* on the other hosts 2", "ibstat",
          {0: IB.format("mlx5_0:ACTIVE mlx5_1:ACTIVE"), 1: IB.format("mlx5_0:ACTIVE")}, hosts=2, where="h1", status=1),
    Fault("memory cannot be locked for InfiniBand", "infiniband", "may lock 1 MiB", "LimitMEMLOCK=infinity",
          {0: IB.format("mlx5_0:ACTIVE") + "ulimit -l 1024"}, status=1),
    Fault("InfiniBand switched off", "infiniband", "NCCL_IB_DISABLE=1, and 1 ports are up", "unset NCCL_IB_DISABLE",
          {0: IB.format("mlx5_0:ACTIVE") + "export NCCL_IB_DISABLE=1"}, status=1),
    # the machine
    Fault("/dev/shm as small as Docker's", "shared_memory", r"/dev/shm has 0\.07 GB, 0\.5 GB are needed", "shm-size",
          {0: "mount -t tmpfs -o size=64m lab /dev/shm"}),
    Fault("/dev/shm full of what was left", "shared_memory", r"/dev/shm has 0\.\d\d of 0\.6 GB free", "ls -la /dev/shm",
          {0: "mount -t tmpfs -o size=560m lab /dev/shm; head -c 90m /dev/zero >/dev/shm/left"}, status=1),
    Fault("no more than 512 open files", "limits", "may open 512 files and cannot raise that", "LimitNOFILE",
          {0: "ulimit -n 512"}),
    Fault("512 open files, which may be raised", "limits", "may open 512 files", r"ulimit -n \d+", {0: "ulimit -Sn 512"}, status=1),
    Fault("few processes", "limits", "may have 400 processes", "limits.conf", {0: "ulimit -u 400"}, status=1),
    Fault("one core of a job", "cores", "this job may use 1 of", "cpus-per-task",
          {0: "export SLURM_JOB_ID=7; taskset -p 1 $$ >/dev/null; echo 0-15 >$LAB/online; mount --bind $LAB/online /sys/devices/system/cpu/online"}, status=1),
    # folders
    Fault("the temporary folder is full", "disk", r"\(temporary\) is 9\d% full", "TMPDIR",
          {0: "mkdir $LAB/small; mount -t tmpfs -o size=40m lab $LAB/small; head -c 39m /dev/zero >$LAB/small/old; export RAY_TMPDIR=$LAB/small"}),
    Fault("little room", "disk", r"\(temporary\) has 1\.1 GB free", "remove what is old",
          {0: "mkdir $LAB/small; mount -t tmpfs -o size=1g lab $LAB/small; export RAY_TMPDIR=$LAB/small"}, status=1),
    Fault("a folder that cannot be written", "disk", "cannot be written: Read-only file system", "TMPDIR",
          {0: "mkdir $LAB/ro; mount -t tmpfs -o ro lab $LAB/ro; export RAY_TMPDIR=$LAB/ro"}),
    Fault("no more inodes", "disk", r"has room for 4\d more files", "df -i",
          {0: "mkdir $LAB/few; mount -t tmpfs -o size=8g,nr_inodes=50 lab $LAB/few; export RAY_TMPDIR=$LAB/few"}, status=1),
    Fault("no room for checkpoints", "disk", r"\(run\) has .* the checkpoints that are kept need about 900\.0 GB", "checkpoint.keep_last=1",
          {}, wanted=dict(run_dir="run/here", checkpoint_bytes=9 * 10**11)),
    # names
    Fault("localhost is IPv6 only", "names", "localhost is ::1 here", "127.0.0.1 localhost",
          {0: "sed 's/127.0.0.1 localhost/::1 localhost/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}),
    Fault("no IPv4 address", "names", "this host has IPv6 addresses only", "IPv4 addresses of the compute nodes",
          {0: "ip addr flush dev eth0 scope global; ip -6 addr add fd00::5/64 dev eth0 nodad"}),
    Fault("its own name has no address", "names", "its own name, h0, has no address", "DNS",
          {0: "sed '/h0$/d' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, status=1),
    Fault("its own name is loopback, as Debian has it", "interfaces", r"gloo would open its connections on lo \(127\.0\.0\.1\), as",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {1: "sed 's/.* h1$/127.0.1.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, where="h1"),
    Fault("a peer's name is somebody else's address", "names", r"the name h1 is 10\.9\.0\.77 here", "mend /etc/hosts on h0",
          {0: "sed 's/.* h1$/10.9.0.77 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, status=1),
    Fault("two hosts of one name", "attendance", "2 hosts call themselves h0", "set-hostname", {1: "hostname h0"}, hosts=2,
          also=frozenset({("interfaces", "h0#1")})),
    # the network
    Fault("a bonded interface that leads nowhere", "interfaces", r"NCCL would open its connections on bond9 \(10\.2\.2\.1\): a connection from it",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {0: GPUS, 1: GPUS + BOND}, hosts=2, where="h1"),
    Fault("gloo's name on the bonded interface", "interfaces", "gloo would open its connections on bond9",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {1: BOND + "sed 's/.* h1$/10.2.2.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, where="h1"),
    Fault("a variable names an interface that is not there", "interfaces", "NCCL_SOCKET_IFNAME=ib0: there is no such interface",
          "^export NCCL_SOCKET_IFNAME=eth0", {0: GPUS + "export NCCL_SOCKET_IFNAME=ib0"}),
    Fault("a host that nobody reaches", "network", "h0 reaches it by none of its addresses", "ip route",
          {1: "ip route add blackhole 10.9.0.1/32"}, hosts=2, where="h1", also=frozenset({("network", "h0"), ("interfaces", "h0"), ("interfaces", "h1")})),
    Fault("a firewall before Ray's port", "network", r"port 6379 \(Ray's head\) is closed to h0 \(timed out\)", "open all TCP ports",
          {1: "ip rule add pref 1 sport 6379 ipproto tcp blackhole"}, hosts=2, where="h1"),
    Fault("Ray would take an address that others cannot reach", "network", r"Ray takes 10\.2\.2\.1 for this node",
          r"ray start --node-ip-address=10\.9\.0\.2 ... on h1",
          {0: "ip route del default dev eth0", 1: "ip link add bond9 type bridge; ip addr add 10.2.2.1/24 dev bond9; ip link set bond9 up\n"
              "ip route replace default dev bond9 src 10.2.2.1"}, hosts=2, where="h1"),
    Fault("Ray's port is taken", "ports", r"port 6379 is taken by python\S* \(process \d+", "ray stop",
          {0: "export SLURM_JOB_ID=7; $PYTHON -m http.server 6379 >/dev/null 2>&1 &\n"
              "for n in $(seq 600); do ss -Hltn sport = :6379 | grep -q . && break; sleep 0.1; done"}, status=1),
    Fault("outgoing connections among the engines' ports", "ports", "gives outgoing connections ports from 20000 on", "sysctl",
          {0: "echo 20000 60999 >/proc/sys/net/ipv4/ip_local_port_range"}, status=1),
    Fault("few ports", "ports", "1001 ports for outgoing", "sysctl", {0: "echo 40000 41000 >/proc/sys/net/ipv4/ip_local_port_range"}, status=1),
    Fault("a clock that is ahead", "clock", r"its clock is 90\.\d s ahead of the others'", "chronyc makestep",
          {1: "export LAB_CLOCK_AHEAD=90"}, hosts=2, where="h1", status=1),
    # variables, token, configuration
    Fault("GPUs that may not talk to each other", "environment", "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE",
          {0: "export NCCL_P2P_DISABLE=1"}, status=1),
    Fault("hosts with different settings of NCCL", "environment", "NCCL_ALGO is Ring; on the other hosts it is not set", "unset NCCL_ALGO",
          {1: "export NCCL_ALGO=Ring"}, hosts=2, where="h1", status=1),
    Fault("a proxy before loopback", "environment", r"http_proxy set, and no_proxy does not name 127\.0\.0\.1", "export no_proxy=",
          {0: "export http_proxy=http://user:secret@proxy:3128"}, status=1),
    Fault("an allocator that engines on turns refuse", "environment", "expandable_segments:True", "unset PYTORCH_CUDA_ALLOC_CONF",
          {0: "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}, status=1, wanted=dict(engines_take_turns=True)),
    Fault("different tokens of Ray", "token", "another than on the other hosts", "RAY_AUTH_TOKEN",
          {0: "export RAY_AUTH_TOKEN=aaaa", 1: "export RAY_AUTH_TOKEN=bbbb"}, hosts=2, where="h1"),
    Fault("a mode without a token", "token", "there is no token", "openssl rand", {0: "export RAY_AUTH_MODE=token"},
          wanted=dict(address="auto")),
    Fault("nobody at cluster.address", "address", r"cluster\.address=127\.0\.0\.1:6400: .*refused", "ray start --head",
          {}, wanted=dict(address="127.0.0.1:6400")),
    Fault("the model folder is missing on one host", "model", "the model folder /run/model is not here", "rsync",
          {0: MODEL}, hosts=2, where="h1", wanted=dict(model="/run/model")),
    Fault("another model folder on one host", "model", "has other files here", "rsync -a --checksum",
          {0: MODEL, 1: MODEL + "echo more >/run/model/model.safetensors"}, hosts=2, where="h1", wanted=dict(model="/run/model")),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_with_its_cure_and_nothing_else_is(fault, tmp_path):
    outcome = Lab(tmp_path, fault.hosts, fault.breaks, fault.wanted or None).run("--no-all-reduce", "--deadline", "120")
    found = [one for one in outcome.findings if one["check"] == fault.check and re.search(fault.what, one["what"])]
    assert found, json.dumps(outcome.findings, indent=1) + outcome.errors
    assert fault.where in found[0]["hosts"] and re.search(fault.mend, found[0]["mend"]) and found[0]["why"]
    rest = [one for one in outcome.findings if one not in found and (MAY_LOCK or "ulimit -l" not in one["what"])]
    others = {(one["check"], host) for one in rest for host in one["hosts"]}
    assert others == fault.also, json.dumps(outcome.findings, indent=1)
    assert set(outcome.statuses.values()) == {fault.status}, "every host ends with the same status"
    assert "secret" not in json.dumps(outcome.said) and "aaaa" not in json.dumps(outcome.said)


def test_there_are_enough_of_them():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
