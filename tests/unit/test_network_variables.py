"""Network variables: how they reach the processes of a run, and which values a run sets itself."""

import os
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from mrl.config.process_schema import ClusterConfig
from mrl.controller.processes import shared_nccl_variables
from mrl.hang_report.network_interfaces import INTERFACE_VARIABLES, NETWORK_PREFIXES
from mrl.placement import ray_cluster
from mrl.placement.resource_pools import SlotDemand, make_pools

ADDRESS = "10.0.0.1:6379"
DRIVER = {
    "NCCL_IB_HCA": "mlx5_0",
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "GLOO_LOG_LEVEL": "DEBUG",
    "UCX_TLS": "rc",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Give this process an environment without network variables. The test may change this environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NETWORK_PREFIXES)}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(ray_cluster, "private_ray_folder", lambda: tmp_path)
    constants = ray_cluster.ray_constants
    monkeypatch.setattr(constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER)  # a local cluster changes it
    return kept


@pytest.fixture
def of_worker(monkeypatch):
    """`of_worker(address, node)` -> environment of a worker process of Ray. Ray was started with the variables `node`."""

    def found(address: str | None, node: Mapping[str, str] = {}, variables: Mapping[str, str] = {}) -> dict[str, str]:
        worker: dict[str, str] = {}

        def init(**options) -> None:
            if address is None:
                worker.update(os.environ)  # Ray's processes inherit the environment
            else:
                worker.update({**node, **options["runtime_env"]["env_vars"]})
                with monkeypatch.context() as inside:
                    inside.setattr(os, "environ", worker)
                    options["runtime_env"]["worker_process_setup_hook"]()
            raise ValueError("no cluster in this test")

        monkeypatch.setattr(ray_cluster.ray, "init", init)
        cluster = ray_cluster.ray_cluster(ClusterConfig(address=address), 1, variables)
        with pytest.raises(ValueError, match="no cluster in this test"), cluster:
            pass
        return worker

    return found


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_every_process_of_a_run_gets_the_network_variables_of_the_driver(environment, of_worker, address):
    environment.update(DRIVER)
    worker = of_worker(address, node={"NCCL_DEBUG": "WARN"})
    assert {name: worker.get(name) for name in DRIVER} == DRIVER


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_values_that_the_run_sets_itself_replace_those_of_the_driver(environment, of_worker, address):
    environment.update(NCCL_CUMEM_ENABLE="0")
    worker = of_worker(address, variables={"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "1"})
    assert (worker["NCCL_CUMEM_ENABLE"], worker["NCCL_NVLS_ENABLE"]) == ("1", "1")
    assert environment["NCCL_CUMEM_ENABLE"] == "0" and "NCCL_NVLS_ENABLE" not in environment


def test_a_node_of_an_existing_cluster_keeps_the_interfaces_with_which_ray_was_started(environment, of_worker):
    environment.update(NCCL_SOCKET_IFNAME="eth0", GLOO_SOCKET_IFNAME="eth0")
    worker = of_worker(ADDRESS, node={"GLOO_SOCKET_IFNAME": "bond7"})
    assert (worker["NCCL_SOCKET_IFNAME"], worker["GLOO_SOCKET_IFNAME"]) == ("eth0", "bond7")


def test_only_a_run_that_starts_ray_itself_uses_loopback(environment, of_worker):
    joined, alone = of_worker(ADDRESS), of_worker(None)
    for name in INTERFACE_VARIABLES.values():
        assert name not in joined and alone[name] == "lo"


@pytest.mark.parametrize("name", INTERFACE_VARIABLES.values())
def test_a_users_interface_replaces_loopback(environment, of_worker, name):
    environment[name] = "eth5"
    assert of_worker(None)[name] == "eth5"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"NCCL_CUMEM_ENABLE": "1"}, []),
        ({"NCCL_CUMEM_ENABLE": "0"}, ["NCCL_CUMEM_ENABLE=0 is replaced by 1 in all processes of the run"]),
    ],
    ids=str,
)
def test_a_value_that_the_arguments_of_sglang_replace_gives_a_warning(environment, own_records, given, expected):
    environment.update(given)
    pools = make_pools({}, {"actor": SlotDemand(1), "engines": SlotDemand(1)})
    variables = shared_nccl_variables(SimpleNamespace(sglang=dict(enable_symm_mem=True)), pools)
    assert variables["NCCL_CUMEM_ENABLE"] == variables["NCCL_NVLS_ENABLE"] == "1"
    messages = [record.getMessage() for record in own_records()]
    assert len(messages) == len(expected)
    for message, start in zip(messages, expected, strict=True):
        assert message.startswith(start) and "sglang.enable_symm_mem=true" in message
