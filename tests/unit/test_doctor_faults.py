"""`mrl doctor` reports each fault that is injected into simulated hosts with its fix, and reports nothing else."""

# ruff: noqa: E501 - one or two lines per fault

import json
import re
import resource
from dataclasses import dataclass, field

import pytest
from simulated_hosts import BOND, SimulatedHosts, available, card, distribution, matrix, nvidia_smi

pytestmark = pytest.mark.skipif(not available(), reason="needs iproute2 and the permission to create namespaces")

MAY_LOCK = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY
"""Whether this machine allows unlimited locked memory. If not, hosts with InfiniBand get one more finding, which is ignored."""

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
    """A fault, and the finding that `mrl doctor` must report for it."""

    name: str
    check: str
    what: str  # pattern for the finding's `what`
    fix: str  # pattern for its `fix`
    shell: dict[int, str]  # host -> shell code that injects the fault
    hosts: int = 1
    where: str = "h0"
    status: int = 2
    requirements: dict = field(default_factory=dict)
    also: frozenset = frozenset()  # (check, host) of the further findings that the fault causes


NEEDS_GPUS = dict(gpus=8, cannot_run_on_cpus=True, parameters=8 * 10**9)

FAULTS = [
    # versions
    Fault("another version than tested", "versions", r"transformers 4\.9\.9 is installed; version 5\.", "make setup LOCK=requirements.txt",
          {0: distribution("transformers", "4.9.9")}, status=1),
    Fault("Transformer Engine missing on a GPU host", "versions", r"transformer-engine(-torch)? is not installed", "requirements-gpu.txt",
          {0: GPUS + "rm -r $LAB/site_h0/transformer*"}, status=1),
    Fault("torch without CUDA on a GPU host", "versions", r"torch 2\.14\.1\+cpu is built without CUDA", "make setup LOCK=requirements-gpu",
          {0: GPUS + distribution("torch", "2.14.1+cpu")}),
    Fault("hosts with different versions of Ray", "versions", r"ray has version 2\.59\.0; the other hosts have 2\.60", "one environment",
          {1: distribution("ray", "2.59.0")}, hosts=2, where="h1",
          also=frozenset({("versions", "h1")})),
    Fault("hosts with different code", "versions", "its code .* differs from the code of the other hosts", "one checkout",
          {1: "echo '# changed' >$LAB/other.py; mount --bind $LAB/other.py $PYTHONPATH/mrl/tracking/tracker.py"}, hosts=2, where="h1"),
    Fault("PyPI's apex", "apex", "is not NVIDIA's Apex", "pip uninstall -y apex",
          {0: "mkdir -p $LAB/site/apex; touch $LAB/site/apex/__init__.py; export PYTHONPATH=$LAB/site:$PYTHONPATH"}),
    # GPUs
    Fault("driver and library do not match", "gpus", "no GPU can be used: Failed to initialize NVML", "nvidia-smi",
          {0: nvidia_smi([], fails="Failed to initialize NVML: Driver/library version mismatch")}),
    Fault("driver too old for the CUDA of torch", "driver", r"driver 550\.54 supports CUDA up to 12\.4; torch is built for 13\.", "CUDA 13",
          {0: nvidia_smi([card(0, driver="550.54")], cuda="12.4")}),
    Fault("hosts with different drivers", "driver", r"the GPU driver is 570\.1; the other hosts have 580", r"install driver 580\.95\.05",
          {0: GPUS, 1: nvidia_smi([card(i, driver="570.1") for i in range(8)])}, hosts=2, where="h1", status=1),
    Fault("a GPU fell off one host", "gpus", "7 GPUs; the other hosts have 8", "nvidia-smi -L",
          {0: GPUS, 1: nvidia_smi(EIGHT[:7])}, hosts=2, where="h1"),
    Fault("GPUs hidden on one host", "gpus", "3 GPUs; the other hosts have 8", "unset CUDA_VISIBLE_DEVICES",
          {0: GPUS, 1: GPUS + "export CUDA_VISIBLE_DEVICES=0,1,2"}, hosts=2, where="h1"),
    Fault("hosts with different cards", "gpus", "NVIDIA A100-SXM4-80GB 86 GB; the other hosts have NVIDIA H200", "constraint",
          {0: GPUS, 1: nvidia_smi([card(i, "NVIDIA A100-SXM4-80GB", 81920) for i in range(8)])}, hosts=2, where="h1", status=1),
    Fault("GPU memory already in use", "gpus", r"64\.\d GB of GPU 1 are already in use", "end the process",
          {0: nvidia_smi([card(0), card(1, used=61035)])}, status=1),
    Fault("a GPU with memory errors", "gpus", "GPU 0 has 3 uncorrected memory errors", "reset or replace",
          {0: nvidia_smi([card(0)], errors="3")}),
    Fault("a partitioned GPU", "gpus", r"GPU 0 is partitioned \(MIG\)", "nvidia-smi -i 0 -mig 0",
          {0: nvidia_smi([card(0).replace("Disabled", "Enabled")])}, status=1),
    Fault("a pair of GPUs without NVLink", "topology", r"1 of 28 pairs of GPUs have no NVLink \(GPUs 2-5: SYS\)", r"parallel\.tp",
          {0: nvidia_smi(EIGHT, topology=matrix(8, {(2, 5): "SYS"}))}, status=1),
    Fault("an NVSwitch fabric that is not ready", "topology", "NVSwitch fabric is not ready: In Progress", "nvidia-fabricmanager",
          {0: nvidia_smi(EIGHT, fabric="In Progress")}),
    Fault("no GPU although the config needs some", "gpus", r"needs 8 GPUs for a model of 8\.0B", "gpus-per-node",
          {}, requirements=NEEDS_GPUS, also=frozenset({("memory", "h0")})),
    Fault("fewer GPUs than the config needs", "gpus", "needs 16 GPUs, the hosts have 8", "placement=colocated",
          {0: GPUS}, requirements=dict(gpus=16)),
    # InfiniBand
    Fault("an InfiniBand port is down", "infiniband", "not up: mlx5_1/1", "ibstat",
          {0: IB.format("mlx5_0:ACTIVE mlx5_1:INIT")}, status=1),
    Fault("a host with fewer InfiniBand ports", "infiniband", r"1 InfiniBand ports are up .* on the other hosts 2 are up", "ibstat",
          {0: IB.format("mlx5_0:ACTIVE mlx5_1:ACTIVE"), 1: IB.format("mlx5_0:ACTIVE")}, hosts=2, where="h1", status=1),
    Fault("memory cannot be locked for InfiniBand", "infiniband", "may lock 1 MiB", "LimitMEMLOCK=infinity",
          {0: IB.format("mlx5_0:ACTIVE") + "ulimit -l 1024"}, status=1),
    Fault("InfiniBand disabled", "infiniband", "NCCL_IB_DISABLE=1 is set although 1 InfiniBand ports are up", "unset NCCL_IB_DISABLE",
          {0: IB.format("mlx5_0:ACTIVE") + "export NCCL_IB_DISABLE=1"}, status=1),
    # the machine
    Fault("/dev/shm of Docker's default size", "shared_memory", r"/dev/shm has 0\.07 GB; 0\.5 GB are needed", "shm-size",
          {0: "mount -t tmpfs -o size=64m lab /dev/shm"}),
    Fault("/dev/shm full of old files", "shared_memory", r"/dev/shm has 0\.\d\d of 0\.6 GB free", "ls -la /dev/shm",
          {0: "mount -t tmpfs -o size=560m lab /dev/shm; head -c 90m /dev/zero >/dev/shm/left"}, status=1),
    Fault("no more than 512 open files", "limits", "may open 512 files and cannot raise this limit", "LimitNOFILE",
          {0: "ulimit -n 512"}),
    Fault("512 open files, a limit that can be raised", "limits", "may open 512 files", r"ulimit -n \d+", {0: "ulimit -Sn 512"}, status=1),
    Fault("few processes", "limits", "may have 400 processes", "limits.conf", {0: "ulimit -u 400"}, status=1),
    Fault("a job with one core", "cores", "this job may use 1 of", "cpus-per-task",
          {0: "export SLURM_JOB_ID=7; taskset -p 1 $$ >/dev/null; echo 0-15 >$LAB/online; mount --bind $LAB/online /sys/devices/system/cpu/online"}, status=1),
    # folders
    Fault("the temporary folder is full", "disk", r"\(temporary\) is 9\d% full", "TMPDIR",
          {0: "mkdir $LAB/small; mount -t tmpfs -o size=40m lab $LAB/small; head -c 39m /dev/zero >$LAB/small/old; export RAY_TMPDIR=$LAB/small"}),
    Fault("little free space", "disk", r"\(temporary\) has 1\.1 GB free", "remove old files",
          {0: "mkdir $LAB/small; mount -t tmpfs -o size=1g lab $LAB/small; export RAY_TMPDIR=$LAB/small"}, status=1),
    Fault("a folder that cannot be written", "disk", "cannot be written: Read-only file system", "TMPDIR",
          {0: "mkdir $LAB/ro; mount -t tmpfs -o ro lab $LAB/ro; export RAY_TMPDIR=$LAB/ro"}),
    Fault("no more inodes", "disk", r"can hold 4\d more files", "df -i",
          {0: "mkdir $LAB/few; mount -t tmpfs -o size=8g,nr_inodes=50 lab $LAB/few; export RAY_TMPDIR=$LAB/few"}, status=1),
    Fault("no space for checkpoints", "disk", r"\(run\) has .* the checkpoints that the run will write need about 900\.0 GB", "checkpoint.keep_last=1",
          {}, requirements=dict(run_dir="run/here", checkpoint_bytes=9 * 10**11)),
    # names
    Fault("localhost is IPv6 only", "names", "localhost resolves to ::1", "127.0.0.1 localhost",
          {0: "sed 's/127.0.0.1 localhost/::1 localhost/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}),
    Fault("no IPv4 address", "names", "this host has only IPv6 addresses", "IPv4 addresses of the compute nodes",
          {0: "ip addr flush dev eth0 scope global; ip -6 addr add fd00::5/64 dev eth0 nodad"}),
    Fault("a host name that does not resolve", "names", "its own name, h0, does not resolve", "DNS",
          {0: "sed '/h0$/d' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, status=1),
    Fault("a host name that resolves to loopback, as on Debian", "interfaces", r"gloo would open its connections on lo \(127\.0\.0\.1\), because this host's name resolves to 127\.0\.1\.1",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {1: "sed 's/.* h1$/127.0.1.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, where="h1"),
    Fault("a peer's name that resolves to another address", "names", r"the name h1 resolves to 10\.9\.0\.77 here", "repair /etc/hosts on h0",
          {0: "sed 's/.* h1$/10.9.0.77 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, status=1),
    Fault("two hosts with the same name", "attendance", "2 hosts have the name h0", "set-hostname", {1: "hostname h0"}, hosts=2,
          also=frozenset({("interfaces", "h0#1")})),
    # the network
    Fault("a bonded interface that leads nowhere", "interfaces", r"NCCL would open its connections on bond9 \(10\.2\.2\.1\): a connection from it",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {0: GPUS, 1: GPUS + BOND}, hosts=2, where="h1"),
    Fault("a host name that resolves to the bonded interface", "interfaces", "gloo would open its connections on bond9",
          "^export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0$",
          {1: BOND + "sed 's/.* h1$/10.2.2.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts"}, hosts=2, where="h1"),
    Fault("a variable that names a missing interface", "interfaces", "NCCL_SOCKET_IFNAME=ib0: no such interface is up",
          "^export NCCL_SOCKET_IFNAME=eth0", {0: GPUS + "export NCCL_SOCKET_IFNAME=ib0"}),
    Fault("a host that others cannot reach", "network", "h0 cannot reach any address of this host", "ip route",
          {1: "ip route add blackhole 10.9.0.1/32"}, hosts=2, where="h1", also=frozenset({("network", "h0"), ("interfaces", "h0"), ("interfaces", "h1")})),
    Fault("a firewall that blocks Ray's port", "network", r"port 6379 \(Ray's head\) is closed to h0 \(timed out\)", "open all TCP ports",
          {1: "ip rule add pref 1 sport 6379 ipproto tcp blackhole"}, hosts=2, where="h1"),
    Fault("a node address of Ray that others cannot reach", "network", r"Ray uses the address 10\.2\.2\.1 for this node, and h0 cannot reach",
          r"ray start --node-ip-address=10\.9\.0\.2 ... on h1",
          {0: "ip route del default dev eth0", 1: "ip link add bond9 type bridge; ip addr add 10.2.2.1/24 dev bond9; ip link set bond9 up\n"
              "ip route replace default dev bond9 src 10.2.2.1"}, hosts=2, where="h1"),
    Fault("Ray's port in use", "ports", r"port 6379 is used by python\S* \(process \d+", "ray stop",
          {0: "export SLURM_JOB_ID=7; $PYTHON -m http.server 6379 >/dev/null 2>&1 &\n"
              "for n in $(seq 600); do ss -Hltn sport = :6379 | grep -q . && break; sleep 0.1; done"}, status=1),
    Fault("outgoing connections among the engines' ports", "ports", "outgoing connections use ports from 20000 on", "sysctl",
          {0: "echo 20000 60999 >/proc/sys/net/ipv4/ip_local_port_range"}, status=1),
    Fault("few ports", "ports", "1001 ports for outgoing", "sysctl", {0: "echo 40000 41000 >/proc/sys/net/ipv4/ip_local_port_range"}, status=1),
    Fault("a clock that is ahead", "clock", r"its clock is 90\.\d s ahead of the clocks of the other hosts", "chronyc makestep",
          {1: "export LAB_CLOCK_AHEAD=90"}, hosts=2, where="h1", status=1),
    # variables, token, config
    Fault("GPU peer-to-peer transfers disabled", "environment", "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE",
          {0: "export NCCL_P2P_DISABLE=1"}, status=1),
    Fault("hosts with different NCCL settings", "environment", "NCCL_ALGO is Ring; on the other hosts it is not set", "unset NCCL_ALGO",
          {1: "export NCCL_ALGO=Ring"}, hosts=2, where="h1", status=1),
    Fault("a proxy that catches local requests", "environment", r"a proxy is set \(http_proxy\), and no_proxy does not name 127\.0\.0\.1", "export no_proxy=",
          {0: "export http_proxy=http://user:secret@proxy:3128"}, status=1),
    Fault("an allocator setting that offloaded engines do not support", "environment", "expandable_segments:True", "unset PYTORCH_CUDA_ALLOC_CONF",
          {0: "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}, status=1, requirements=dict(offloads_engines=True)),
    Fault("different Ray tokens", "token", "differs from the token of the other hosts", "RAY_AUTH_TOKEN",
          {0: "export RAY_AUTH_TOKEN=aaaa", 1: "export RAY_AUTH_TOKEN=bbbb"}, hosts=2, where="h1"),
    Fault("token mode without a token", "token", "there is no token", "openssl rand", {0: "export RAY_AUTH_MODE=token"},
          requirements=dict(address="auto")),
    Fault("no cluster at cluster.address", "address", r"cluster\.address=127\.0\.0\.1:6400: .*refused", "ray start --head",
          {}, requirements=dict(address="127.0.0.1:6400")),
    Fault("the model folder is missing on one host", "model", "the model folder /run/model is missing", "rsync",
          {0: MODEL}, hosts=2, where="h1", requirements=dict(model="/run/model")),
    Fault("a different model folder on one host", "model", "the files of the model folder /run/model differ", "rsync -a --checksum",
          {0: MODEL, 1: MODEL + "echo more >/run/model/model.safetensors"}, hosts=2, where="h1", requirements=dict(model="/run/model")),
]  # fmt: skip
CORE_FAULTS = ("fewer GPUs than the config needs", "the model folder is missing on one host")


@pytest.mark.extended_except(*CORE_FAULTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_reported_with_its_fix_and_nothing_else(fault, tmp_path):
    run = SimulatedHosts(tmp_path, fault.hosts, fault.shell, fault.requirements or None).run(
        "--no-all-reduce", "--deadline", "120"
    )
    expected = [one for one in run.findings if one["check"] == fault.check and re.search(fault.what, one["what"])]
    assert expected, json.dumps(run.findings, indent=1) + run.errors
    assert fault.where in expected[0]["hosts"] and re.search(fault.fix, expected[0]["fix"]) and expected[0]["why"]
    rest = [one for one in run.findings if one not in expected and (MAY_LOCK or "ulimit -l" not in one["what"])]
    others = {(one["check"], host) for one in rest for host in one["hosts"]}
    assert others == fault.also, json.dumps(run.findings, indent=1)
    assert set(run.statuses.values()) == {fault.status}, "all hosts end with the same status"
    assert "secret" not in json.dumps(run.report) and "aaaa" not in json.dumps(run.report)


def test_the_list_has_at_least_25_distinct_faults():
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 25 and names >= set(CORE_FAULTS)
