"""The groups of conf/cluster: machines that `mrl plan` counts with."""

import pytest

from mrl.commands import hydra_app
from mrl.config.schema import HardwareConfig

MACHINES = ("a100", "h100", "h200", "b200")


def hardware(*overrides: str) -> HardwareConfig:
    return hydra_app.composed(["experiment=quickstart", "run.dir=out", *overrides]).cluster.hardware


def test_no_machine_is_assumed():
    assert hardware() == HardwareConfig()


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_states_all_that_is_known_of_it(name):
    found = hardware(f"cluster={name}", "cluster.address=auto", "cluster.nodes=4")
    assert found.name == name
    assert all(value > 0 for key, value in vars(found).items() if key != "name")


def test_a_machine_of_your_own_is_written_over_one_of_ours():
    assert hardware("cluster=h100", "cluster.hardware.gpu_memory_gb=96").gpu_memory_gb == 96


def test_a_size_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"cluster\.hardware\.gpu_memory_gb=-1"):
        hardware("cluster.hardware.gpu_memory_gb=-1")


def test_a_job_on_machines_takes_both_files():
    found = hydra_app.composed(
        ["experiment=quickstart", "run.dir=out", "cluster=[slurm,h200]", "cluster.nodes=3"]
    ).cluster
    assert found.scheduler == "slurm" and found.nodes == 3 and found.hardware.name == "h200"
