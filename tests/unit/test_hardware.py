"""Hardware in conf/cluster, which `mrl plan` uses."""

import pytest

from mrl.config import hydra_entry
from mrl.config.process_schema import HardwareConfig

HARDWARE = ("a100", "h100", "h200", "b200")


def hardware(*overrides: str) -> HardwareConfig:
    return hydra_entry.compose_config(["experiment=quickstart", "run.dir=out", *overrides]).cluster.hardware


def test_hardware_is_unknown_by_default():
    assert hardware() == HardwareConfig()


@pytest.mark.extended_after(1)
@pytest.mark.parametrize("name", HARDWARE)
def test_a_hardware_file_sets_all_numbers(name):
    section = hardware(f"cluster={name}", "cluster.address=auto", "cluster.nodes=4")
    assert section.name == name
    assert all(value > 0 for key, value in vars(section).items() if key != "name")


def test_a_number_of_the_hardware_can_be_overridden():
    assert hardware("cluster=h100", "cluster.hardware.gpu_memory_gb=96").gpu_memory_gb == 96


@pytest.mark.extended
def test_a_negative_size_is_an_error():
    with pytest.raises(ValueError, match=r"cluster\.hardware\.gpu_memory_gb=-1"):
        hardware("cluster.hardware.gpu_memory_gb=-1")


@pytest.mark.extended
def test_a_scheduler_and_hardware_can_be_combined():
    cluster = hydra_entry.compose_config(
        ["experiment=quickstart", "run.dir=out", "cluster=[slurm,h200]", "cluster.nodes=3"]
    ).cluster
    assert cluster.scheduler == "slurm" and cluster.nodes == 3 and cluster.hardware.name == "h200"
