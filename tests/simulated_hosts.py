"""Simulated hosts for tests of `mrl doctor`: each host consists of namespaces of this machine, and may have injected faults."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 400
NAMESPACES = ["unshare", "-nmpf" if os.getuid() == 0 else "-rnmpf", "--kill-child", "--mount-proc", "bash"]

LAB = """
set -e
mount --make-rprivate /
mount -t tmpfs lab /run; mkdir /run/netns
mount --bind $LAB/hosts /etc/hosts; mount --bind $LAB/resolv.conf /etc/resolv.conf
mount -t tmpfs -o size=16g lab $LAB/tmp; export TMPDIR=$LAB/tmp
mount -t tmpfs -o size=16g lab $LAB/cwd  # so that other work on this machine's disk does not make it slow
mount -t tmpfs -o size=32g lab /dev/shm
sed '/^MemTotal:/h; /^MemAvailable:/{g; s/Total/Available/}' /proc/meminfo >$LAB/meminfo  # all memory is free
mount --bind $LAB/meminfo /proc/meminfo
ip link set lo up; ip link add switch type bridge; ip link set switch up
for i in $(seq 0 $((HOSTS - 1))); do
  ip netns add h$i
  for n in 1 2 3; do ip -n h$i link add gone$n type bridge; ip -n h$i link del gone$n; done  # makes low interface indices free
  ip link add port$i type veth peer name eth0 netns h$i; ip link set port$i master switch up
  ip -n h$i link set lo up; ip -n h$i addr add 10.9.0.$((i + 1))/24 dev eth0; ip -n h$i link set eth0 up
  ip -n h$i route add default dev eth0
done
for i in $STARTED; do
  ip netns exec h$i unshare -u -m bash -c "
    hostname h$i; cd $LAB/cwd; . $LAB/fault_$i || exit 99
    exec $PYTHON $LAB/start.py --rank $i \\"\\$@\\"" sh "$@" >$LAB/out_$i 2>$LAB/err_$i &
  started="$started $i:$!"
done
for one in $started; do wait ${one#*:} && echo 0 >$LAB/rc_${one%%:*} || echo $? >$LAB/rc_${one%%:*}; done
"""

# Runs the real command, except that environment variables can set its clock and its requirements.
START = """
import os, sys, time
import msgspec
from mrl.commands import doctor
from mrl.doctor.host_facts import Requirements

ahead = float(os.environ.get("LAB_CLOCK_AHEAD", "0"))
if "LAB_REQUIREMENTS" in os.environ:
    doctor.read_requirements = lambda keys: msgspec.json.decode(os.environ["LAB_REQUIREMENTS"], type=Requirements)
argv = sys.argv[1:] if "--rendezvous" in sys.argv else [a for a in sys.argv[3:]]
sys.exit(doctor.main(argv, clock=lambda: time.time() + ahead))
"""


def available() -> bool:
    """Return whether this machine allows us to create namespaces."""
    probe = [*NAMESPACES, "-ec", "mount -t tmpfs lab /run; mkdir /run/netns; ip netns add one"]
    tools = all(map(shutil.which, ("ip", "unshare", "mount", "seq")))
    return tools and subprocess.run(probe, capture_output=True).returncode == 0


@dataclass(frozen=True)
class DoctorRun:
    """Result of `mrl doctor` on all hosts that ran the command."""

    report: dict  # the first host's JSON
    statuses: dict[int, int]  # host -> exit status
    errors: str  # stderr of all hosts

    @property
    def findings(self) -> list[dict]:
        """Findings in the first host's report."""
        return self.report["findings"]


@dataclass(frozen=True)
class SimulatedHosts:
    """Simulated hosts for one run of `mrl doctor`, and a folder for its files."""

    folder: Path
    hosts: int = 1
    faults: Mapping[int, str] = field(default_factory=dict)  # host -> shell code that runs there before the command
    requirements: Mapping[str, object] | None = None  # fields of Requirements
    started: Sequence[int] | None = None  # hosts on which the command runs; default: all

    def run(self, *options: str) -> DoctorRun:
        """Run `mrl doctor --json` on the hosts in `started`. `options` can replace the shared folder that is the rendezvous."""
        self._write()
        started = list(self.started if self.started is not None else range(self.hosts))
        meet = ["--hosts", str(self.hosts), "--rendezvous", str(self.folder / "meet")] if self.hosts > 1 else []
        environment = {
            **dict(
                LAB=str(self.folder), HOSTS=str(self.hosts), STARTED=" ".join(map(str, started)), PYTHON=sys.executable
            ),
            **dict(
                PATH="/usr/sbin:/usr/bin:/sbin:/bin", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HOME=str(self.folder)
            ),
        }
        line = [*NAMESPACES, "-c", LAB, "lab", "--json", *meet, *options]
        lab = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            _, problem = lab.communicate(timeout=TIMEOUT_S)
        finally:
            if lab.poll() is None:
                lab.kill()  # also kills all other processes of the namespace
                lab.wait()
        assert lab.returncode == 0, problem
        errors = "".join((self.folder / f"err_{i}").read_text() for i in started)
        statuses = {i: int((self.folder / f"rc_{i}").read_text()) for i in started}
        report = next((text for i in started if (text := (self.folder / f"out_{i}").read_text())), "")
        assert report, errors
        return DoctorRun(json.loads(report), statuses, errors)

    def _write(self) -> None:
        (self.folder / "tmp").mkdir()
        (self.folder / "cwd").mkdir()
        names = "".join(f"10.9.0.{i + 1} h{i}\n" for i in range(self.hosts))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "resolv.conf").write_text("")
        (self.folder / "start.py").write_text(START)
        text = shlex.quote(json.dumps(self.requirements))
        requirements = f"export LAB_REQUIREMENTS={text}\n" if self.requirements else ""
        for i in range(self.hosts):
            script = f"HOSTNAME=h{i}\n{requirements}{self.faults.get(i, '')}\ntrue\n"
            (self.folder / f"fault_{i}").write_text(script)


def distribution(name: str, version: str) -> str:
    """Return shell code that installs another version of a package in front of the real one."""
    return (
        f"mkdir -p $LAB/site_$HOSTNAME/{name.replace('-', '_')}-{version}.dist-info\n"
        f"printf 'Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n' "
        f">$LAB/site_$HOSTNAME/{name.replace('-', '_')}-{version}.dist-info/METADATA\n"
        "export PYTHONPATH=$LAB/site_$HOSTNAME:$PYTHONPATH\n"
    )


def card(index: int, name: str = "NVIDIA H200", memory: int = 143771, used: int = 4, driver: str = "580.95.05") -> str:
    """Return one GPU's line of nvidia-smi's output."""
    return f"{index}, GPU-{index:08x}-1111-2222-3333-444444444444, {name}, {memory}, {used}, {driver}, Disabled"


def matrix(size: int, links: Mapping[tuple[int, int], str] | None = None) -> str:
    """Return the output of `nvidia-smi topo -m` for `size` GPUs: NVLink between all pairs except those in `links`."""
    rows = ["\t".join(["", *(f"GPU{i}" for i in range(size)), "CPU Affinity", "NUMA Affinity"])]
    for i in range(size):
        cells = ["X" if i == j else (links or {}).get((min(i, j), max(i, j)), "NV18") for j in range(size)]
        rows.append("\t".join([f"GPU{i}", *cells, "0-47", "0"]))
    return "\n".join(["\x1b[4m" + rows[0] + "\x1b[0m", *rows[1:], "", "Legend:", "", "  X    = Self"])


def nvidia_smi(
    cards: Sequence[str],
    cuda: str = "13.0",
    topology: str = "",
    errors: str = "0",
    fabric: str = "Completed",
    fails: str = "",
) -> str:
    """Return shell code that installs an nvidia-smi with these answers, and the locked versions of the GPU packages."""
    body = f"""#!/bin/bash
{f"echo '{fails}'; exit 9" if fails else ""}
case "$*" in
  *index,uuid*) cat <<'END'
{chr(10).join(cards)}
END
  ;;
  *uncorrected*) for i in $(seq {len(cards)}); do echo '{errors}'; done;;
  *fabric.state*) for i in $(seq {len(cards)}); do echo '{fabric}'; done;;
  *topo*) cat <<'END'
{topology or matrix(len(cards))}
END
  ;;
  "") echo '| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05      CUDA Version: {cuda}     |';;
  *) exit 2;;
esac
"""
    write = f"mkdir -p $LAB/bin_$HOSTNAME; cat >$LAB/bin_$HOSTNAME/nvidia-smi <<'SMI'\n{body}SMI\n"
    return write + "chmod +x $LAB/bin_$HOSTNAME/nvidia-smi; export PATH=$LAB/bin_$HOSTNAME:$PATH\n" + GPU_PACKAGES


GPU_PACKAGES = distribution("transformer-engine", "2.20.2") + distribution("transformer-engine-torch", "2.20.2")

BOND = """
ip link add bond9 index 3 type bridge; ip addr add 10.2.2.1/24 dev bond9; ip link set bond9 up
ip rule add pref 1 from 10.2.2.1 blackhole; ip rule add pref 2 lookup local; ip rule del pref 0
"""
"""Shell code that adds an interface. NCCL tries this interface first, but not even the host itself can reach its address."""
