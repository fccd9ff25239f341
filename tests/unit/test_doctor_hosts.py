"""`mrl doctor` on several simulated hosts: a healthy cluster, a hang and its fix, missing hosts."""

import re

import pytest
from simulated_hosts import BOND, SimulatedHosts, available

pytestmark = pytest.mark.skipif(not available(), reason="needs iproute2 and the permission to create namespaces")

NAME_ON_BOND = BOND + "sed 's/.* h1$/10.2.2.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts\n"
SCONTROL = """
mkdir $LAB/bin; printf '#!/bin/bash\\necho h0 h1 h2\\n' >$LAB/bin/scontrol; chmod +x $LAB/bin/scontrol
export PATH=$LAB/bin:$PATH SLURM_JOB_NODELIST=h[0-2]
"""


@pytest.mark.extended
def test_a_healthy_machine_gives_no_finding(tmp_path):
    run = SimulatedHosts(tmp_path).run()
    assert run.findings == [] and run.statuses == {0: 0}
    assert run.report["hosts"][0]["host"] == "h0"


@pytest.mark.extended
def test_a_healthy_cluster_gives_no_finding_and_tests_the_process_groups_that_span_hosts(tmp_path):
    groups = {"tp 0": [0, 1], "dp 0": [0, 2], "dp 1": [1, 3]}
    run = SimulatedHosts(tmp_path, 4, requirements=dict(process_groups=groups)).run("--deadline", "150")
    assert run.findings == [] and set(run.statuses.values()) == {0}, run.findings
    results = {one["group"]: one for one in run.report["collectives"]}
    assert set(results) == {"world", *groups} and all(0 < one["seconds"] < 60 for one in results.values())
    assert results["dp 1"]["hosts"] == ["h1", "h3"] and results["world"]["backend"] == "gloo"


@pytest.mark.extended
def test_the_hang_of_a_bonded_interface_is_found_by_a_real_all_reduce_and_its_fix_works(tmp_path):
    (tmp_path / "broken").mkdir()
    broken = SimulatedHosts(tmp_path / "broken", 2, {1: NAME_ON_BOND}).run("--deadline", "20")
    findings = {one["check"]: one for one in broken.findings}
    assert set(findings) == {"interfaces", "collectives"} and set(broken.statuses.values()) == {2}, broken.findings
    assert "gloo would open its connections on bond9" in findings["interfaces"]["what"]
    assert "all-reduce with gloo in process group world fails" in findings["collectives"]["what"]
    assert findings["collectives"]["hosts"] == ["h0", "h1"]
    fix = findings["collectives"]["fix"]
    assert fix == findings["interfaces"]["fix"] == "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"
    (tmp_path / "fixed").mkdir()
    fixed = SimulatedHosts(tmp_path / "fixed", 2, {0: fix, 1: NAME_ON_BOND + fix}).run("--deadline", "150")
    assert fixed.findings == [] and set(fixed.statuses.values()) == {0}, fixed.findings


@pytest.mark.extended
def test_a_host_that_does_not_join_is_named(tmp_path):
    run = SimulatedHosts(tmp_path, 3, {0: SCONTROL}, started=[0, 1]).run("--no-all-reduce", "--deadline", "25")
    (finding,) = run.findings
    assert finding["check"] == "attendance" and finding["hosts"] == ["h2"] and "--exclude=h2" in finding["fix"]
    assert run.report["missing"] == ["h2"] and run.statuses == {0: 2, 1: 2}


@pytest.mark.extended
def test_the_other_hosts_report_a_missing_first_host_and_end(tmp_path):
    run = SimulatedHosts(tmp_path, 2, started=[1]).run("--no-all-reduce", "--deadline", "3")
    (finding,) = run.findings
    assert finding["check"] == "attendance" and run.statuses == {1: 2}


@pytest.mark.extended
def test_a_rendezvous_at_a_port_listens_on_the_named_address_only(tmp_path):
    record_listeners = "(for n in $(seq 1200); do ss -Hltn sport = :29400 >>$LAB/listening; sleep 0.1; done) &"
    lab = SimulatedHosts(tmp_path, 2, {0: record_listeners})
    run = lab.run("--no-all-reduce", "--deadline", "100", "--rendezvous", "10.9.0.1:29400")
    assert run.findings == [] and set(run.statuses.values()) == {0}
    addresses = set(re.findall(r"(\S+):29400", (tmp_path / "listening").read_text()))
    assert addresses == {"10.9.0.1"}
