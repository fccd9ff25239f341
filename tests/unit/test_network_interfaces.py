"""The interfaces that NCCL and gloo choose, and the probe of the interfaces of a host."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.hang_report.network_interfaces import (
    NetworkInterface,
    describe_broken_interfaces,
    gloo_interface,
    matches_nccl_rule,
    nccl_interfaces,
)


@pytest.mark.parametrize(
    ("rule", "hit", "miss"),
    [("eth", "eth0", "ib0"), ("=eth", "eth", "eth0"), ("^docker,lo", "eth0", "docker0"), ("ib,bond", "bond1", "eth0")],
)
def test_the_syntax_of_nccl_socket_ifname(rule, hit, miss):
    assert matches_nccl_rule(hit, rule) and not matches_nccl_rule(miss, rule)


def test_nccl_and_gloo_choose_an_interface_by_their_own_rules():
    names = dict(lo="127.0.0.1", docker0="172.17.0.1", bond0="10.0.0.1", eth1="10.1.0.1")
    interfaces = [NetworkInterface(name, address) for name, address in names.items()]
    infiniband = NetworkInterface("ib0", "10.3.0.1")
    assert [one.name for one in nccl_interfaces(interfaces)] == ["bond0", "eth1"]
    assert [one.name for one in nccl_interfaces([*interfaces, infiniband])] == ["ib0"]
    assert [one.name for one in nccl_interfaces(interfaces[:2])] == ["docker0"]
    assert nccl_interfaces(interfaces, "ib") == []
    chosen = [gloo_interface(interfaces, own).name for own in (["10.1.0.1"], ["127.0.1.1"], ["10.9.9.9"])]
    assert chosen == ["eth1", "lo", "lo"]
    assert gloo_interface(interfaces, ["10.1.0.1"], "bond0").name == "bond0"
    assert gloo_interface(interfaces, [], "ib0") is None


def test_an_interface_that_does_not_reach_itself_is_reported_with_the_fix():
    broken = NetworkInterface("bond0", "10.0.0.1", problem="timed out")
    others = [
        NetworkInterface("lo", "127.0.0.1"),
        NetworkInterface("eth1", "10.1.0.1"),
        NetworkInterface("docker0", "172.17.0.1", problem="timed out"),
        NetworkInterface("eth9", "10.9.0.1", up=False, problem="timed out"),
    ]
    (line,) = describe_broken_interfaces("node3", [broken, *others])
    assert "node3: a connection from bond0 (10.0.0.1)" in line and "NCCL_SOCKET_IFNAME=eth1" in line
    (line,) = describe_broken_interfaces("node3", [broken])
    assert "no other interface" in line


NETWORK = """
ip link set lo up
for card in eth7:10.1.1.1 bond9:10.2.2.1; do
  ip link add ${card%%:*} type bridge; ip addr add ${card#*:}/24 dev ${card%%:*}; ip link set ${card%%:*} up
done
ip rule add pref 1 from 10.2.2.1 blackhole; ip rule add pref 2 lookup local; ip rule del pref 0
exec "$@"
"""
PROGRAM = """
from mrl.hang_report.network_interfaces import describe_broken_interfaces, probe_interfaces
print(*describe_broken_interfaces("node3", probe_interfaces()), sep="\\n", end="")
"""


def test_a_broken_interface_of_a_real_network_namespace_is_found():
    if not (shutil.which("ip") and subprocess.run(["unshare", "-rn", "true"]).returncode == 0):
        pytest.skip("needs iproute2 and user namespaces")
    command = ["unshare", "-rn", "bash", "-ec", NETWORK, "sh", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "bond9 (10.2.2.1)" in line and line.endswith("set NCCL_SOCKET_IFNAME=eth7.")
