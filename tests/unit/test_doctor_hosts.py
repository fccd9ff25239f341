"""`mrl doctor` over several hosts, namespaces of this machine: the healthy cluster, the hang and its cure, who is missing."""

import re

import pytest
from doctor_lab import BOND, Lab, available

pytestmark = pytest.mark.skipif(not available(), reason="needs iproute2, and leave to make namespaces")

ON_THE_BOND = BOND + "sed 's/.* h1$/10.2.2.1 h1/' /etc/hosts >$LAB/h; mount --bind $LAB/h /etc/hosts\n"
SCONTROL = """
mkdir $LAB/bin; printf '#!/bin/bash\\necho h0 h1 h2\\n' >$LAB/bin/scontrol; chmod +x $LAB/bin/scontrol
export PATH=$LAB/bin:$PATH SLURM_JOB_NODELIST=h[0-2]
"""


def test_a_healthy_machine_gives_no_finding(tmp_path):
    outcome = Lab(tmp_path).run()
    assert outcome.findings == [] and outcome.statuses == {0: 0}
    assert outcome.said["hosts"][0]["host"] == "h0"


def test_a_healthy_cluster_of_four_gives_no_finding_and_has_summed_over_the_groups_that_are_spread(tmp_path):
    groups = {"tp 0": [0, 1], "dp 0": [0, 2], "dp 1": [1, 3]}
    outcome = Lab(tmp_path, 4, wanted=dict(groups=groups)).run("--deadline", "150")
    assert outcome.findings == [] and set(outcome.statuses.values()) == {0}, outcome.findings
    tried = {one["group"]: one for one in outcome.said["collectives"]}
    assert set(tried) == {"world", *groups} and all(0 < one["seconds"] < 60 for one in tried.values())
    assert tried["dp 1"]["hosts"] == ["h1", "h3"] and tried["world"]["backend"] == "gloo"


def test_the_hang_of_a_bonded_interface_is_seen_in_a_real_all_reduce_and_its_cure_cures_it(tmp_path):
    (tmp_path / "broken").mkdir()
    broken = Lab(tmp_path / "broken", 2, {1: ON_THE_BOND}).run("--deadline", "20")
    found = {one["check"]: one for one in broken.findings}
    assert set(found) == {"interfaces", "collectives"} and set(broken.statuses.values()) == {2}, broken.findings
    assert "gloo would open its connections on bond9" in found["interfaces"]["what"]
    assert "all-reduce of gloo in group world fails" in found["collectives"]["what"]
    assert found["collectives"]["hosts"] == ["h0", "h1"]
    cure = found["collectives"]["mend"]
    assert cure == found["interfaces"]["mend"] == "export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"
    (tmp_path / "mended").mkdir()
    mended = Lab(tmp_path / "mended", 2, {0: cure, 1: ON_THE_BOND + cure}).run("--deadline", "150")
    assert mended.findings == [] and set(mended.statuses.values()) == {0}, mended.findings


def test_a_host_that_does_not_come_is_named(tmp_path):
    outcome = Lab(tmp_path, 3, {0: SCONTROL}, started=[0, 1]).run("--no-all-reduce", "--deadline", "25")
    (finding,) = outcome.findings
    assert finding["check"] == "attendance" and finding["hosts"] == ["h2"] and "--exclude=h2" in finding["mend"]
    assert outcome.said["absent"] == ["h2"] and outcome.statuses == {0: 2, 1: 2}


def test_without_the_first_host_the_others_say_so_and_end(tmp_path):
    outcome = Lab(tmp_path, 2, started=[1]).run("--no-all-reduce", "--deadline", "3")
    (finding,) = outcome.findings
    assert finding["check"] == "attendance" and outcome.statuses == {1: 2}


def test_hosts_meet_at_a_port_of_the_first_and_it_listens_nowhere_else(tmp_path):
    listening = "(for n in $(seq 1200); do ss -Hltn sport = :29400 >>$LAB/listening; sleep 0.1; done) &"
    lab = Lab(tmp_path, 2, {0: listening})
    outcome = lab.run("--no-all-reduce", "--deadline", "100", "--rendezvous", "10.9.0.1:29400")
    assert outcome.findings == [] and set(outcome.statuses.values()) == {0}
    places = set(re.findall(r"(\S+):29400", (tmp_path / "listening").read_text()))
    assert places == {"10.9.0.1"}
