"""A real Slurm cluster on one machine: each node is a set of namespaces with its own network, processes and /tmp.

When this process ends, for whatever reason, the kernel kills the first process of each namespace, and with it the namespace. So
no process is left on the machine. Several clusters on one machine do not see each other.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from mrl_runs import is_alive, leftovers, select_processes

PROGRAMS = dict(munged="munge", slurmctld="slurmctld", slurmd="slurmd", sbatch="slurm-client", ip="iproute2")
NET = "10.77.0"
CONF = """\
ClusterName=cluster
SlurmctldHost={host}({net}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=20
KillWait=60
AccountingStorageType=accounting_storage/none
NodeName=n[1-{nodes}] NodeAddr={net}.[1-{nodes}] CPUs=4 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
BOOT = """
hostname "$NODE"; mount --bind "$LAB/hosts" /etc/hosts
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
for folder in $SHARED; do mkdir -p "$LAB/$NODE/tmp/${folder#/tmp}"; mount --bind "$folder" "$LAB/$NODE/tmp/${folder#/tmp}"; done
mount --rbind "$LAB/$NODE/tmp" /tmp
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip address add "$ADDRESS/24" dev eth0; ip link set eth0 up; ip link set lo up
slurmd -D -N "$NODE" & daemon=$!
while kill -0 $daemon 2>/dev/null; do wait $daemon || true; done # as the first process it reaps all orphans
"""


def missing_requirement() -> str:
    """Return why no cluster can be made on this machine, or "" if it can. Installs missing Debian packages."""
    if os.geteuid():
        return "making namespaces and devices needs root"
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "true"]).returncode:
        return "this machine does not allow namespaces"
    missing = [package for program, package in PROGRAMS.items() if not _which(program)]
    if missing and shutil.which("apt-get"):
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-yqq", "--no-install-recommends", *missing]):
            subprocess.run(["apt-get", *words], env=env, capture_output=True, timeout=600)
    missing = [package for program, package in PROGRAMS.items() if not _which(program)]
    return f"the packages {' '.join(missing)} are missing and could not be installed" if missing else ""


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class SlurmCluster:
    """A cluster with `nodes` nodes (n1, n2, ...) of `gpus` GPUs each. Jobs of the partition `high` preempt those of `main`.

    `shared`: folders under /tmp that all nodes see. The rest of /tmp is separate on each node.
    """

    def __init__(self, nodes: int, gpus: int, shared: Sequence[Path]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mrl-slurm-", dir="/tmp"))  # a short path for its sockets
        self.env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.env["PATH"] += ":/usr/sbin:/sbin"
        places = [self.folder, *(path.resolve() for path in shared)]
        self._shared = [path for path in places if path.is_relative_to("/tmp")]
        self._processes: list[subprocess.Popen] = []
        self.nodes: dict[str, psutil.Process] = {}  # node -> its first process
        try:
            self._write(nodes, gpus)
            self._network = self._start("holder", ["unshare", "--net", "--fork", "--kill-child", "sleep", "infinity"])
            self._inside = ["nsenter", "--net", f"--target={_child(self._network).pid}"]
            self._connect()
            self._start_controller()
            for number in range(1, nodes + 1):
                self.boot(f"n{number}")
            self.wait(lambda: self.slurm("sinfo", "-h", "-N", "-p", "main", "-t", "idle").count("\n") == nodes, 60)
        except BaseException:
            self.close()
            raise

    def _write(self, nodes: int, gpus: int) -> None:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", f"{NET}.254 {host}", *(f"{NET}.{n[1:]} {n}" for n in _names(nodes))]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        fields = dict(host=host, net=NET, folder=folder, nodes=nodes, gpus=gpus)
        (folder / "slurm.conf").write_text(CONF.format(**fields))
        for gpu in range(gpus):  # copies of the device /dev/null: Slurm drains a node whose GPUs are not devices
            os.mknod(folder / f"gpu{gpu}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)

    def _start(self, name: str, line: list[str], **more: str) -> subprocess.Popen:
        with (self.folder / f"{name}.out").open("a") as log:
            pipes = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            process = subprocess.Popen(line, env=self.env | more, preexec_fn=_die_with_parent, **pipes)
        self._processes.append(process)
        return process

    def _connect(self) -> None:
        self.run("ip", "link", "add", "cluster", "type", "bridge")
        self.run("ip", "address", "add", f"{NET}.254/24", "dev", "cluster")
        for name in ("cluster", "lo"):
            self.run("ip", "link", "set", name, "up")

    def _start_controller(self) -> None:
        files = [f"--{name}-file={self.folder / file}" for name, file in (("key", "munge.key"), ("pid", "munge.pid"))]
        files += [f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("seed", "log")]
        self._start("munged", ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock", *files])
        self.wait((self.folder / "munge.sock").exists, 30)
        self._start("slurmctld", [*self._inside, "slurmctld", "-D", "-c"])

    def boot(self, node: str) -> None:
        """Start or restart a node, with an empty /tmp."""
        shutil.rmtree(tmp := self.folder / node / "tmp", ignore_errors=True)
        tmp.mkdir(parents=True)
        line = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        more = dict(
            NODE=node, LAB=str(self.folder), ADDRESS=f"{NET}.{node[1:]}", SHARED=" ".join(map(str, self._shared))
        )
        first = _child(self._start(node, [*line, "bash", "-c", BOOT], **more))
        link = f"to_{node}"
        self.run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(first.pid))
        self.run("ip", "link", "set", link, "master", "cluster", "up")
        self.nodes[node] = first

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once, like a power cut."""
        self.nodes.pop(node).kill()

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the processes on a node, except Slurm's own."""
        own = ("slurmd", "slurmstepd", "sleep")
        below = self.nodes[node].children(recursive=True)
        return select_processes(below, lambda process: is_alive(process) and process.name() not in own)

    def run(self, *line: str, timeout_s: float = 600, status: int = 0, **more: str) -> str:
        """Run a command on the login node and return its stdout. Fails if the exit status is not `status`."""
        done = subprocess.run(
            [*self._inside, *line], env=self.env | more, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == status, f"{line}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def slurm(self, *line: str) -> str:
        """Return the stdout of a Slurm command; "" if the controller does not answer."""
        try:
            return self.run(*line, timeout_s=30)
        except (AssertionError, subprocess.TimeoutExpired):
            return ""

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job from `scontrol show job`."""
        words = self.slurm("scontrol", "show", "job", "--oneliner", job_id).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait(self, condition, within_s: float) -> None:
        """Wait until the condition is true. After `within_s` seconds, fail with the daemons' logs."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"the condition did not become true within {within_s} s:\n{self.logs()}"
            time.sleep(0.2)

    def finish(self, job_id: str, within_s: float) -> dict[str, str]:
        """Wait until a job has ended, and return its fields."""
        final_states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait(lambda: self.job(job_id).get("JobState") in final_states, within_s)
        return self.job(job_id)

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """Kill the daemons and the nodes with all their processes, and remove the folder."""
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait(30)
        _wait_unused(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def _names(nodes: int) -> list[str]:
    return [f"n{number}" for number in range(1, nodes + 1)]


def _child(process: subprocess.Popen) -> psutil.Process:
    """Return the first process inside the namespaces that an `unshare` process has made."""
    end = time.monotonic() + 30
    while not (found := psutil.Process(process.pid).children()):
        assert time.monotonic() < end, "unshare made no namespace"
        time.sleep(0.02)
    return found[0]


def _wait_unused(folder: Path) -> None:
    """Wait until no process uses the cluster. `unshare --kill-child` kills a node's first process, and with it all others."""
    leftovers(str(folder / "slurm.conf"), 30, "SLURM_CONF")
