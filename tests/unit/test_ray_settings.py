"""The key cluster.ray: its names and types are those of Ray, others are refused, and ray.init and `ray start` get them."""

import inspect
import os
import re

import pytest
import ray
from ray._private import parameter, ray_constants
from ray.scripts.scripts import start

from mrl.config.process_schema import ClusterConfig
from mrl.config.ray_settings import (
    DRIVER_SETTINGS,
    MIN_STORE_BYTES,
    RESERVED,
    init_arguments,
    init_parameters,
    start_arguments,
    start_options,
)
from mrl.config.validate import check_cluster
from mrl.launch import slurm_job
from mrl.placement import ray_cluster

SLURM = dict(scheduler="slurm", nodes=2)


def test_the_names_are_those_of_the_installed_ray():
    signature = set(inspect.signature(ray.init).parameters) - {"kwargs"}
    assert signature <= init_parameters().keys()
    assert {"object_spilling_directory", "plasma_directory", "memory"} <= init_parameters().keys(), "from **kwargs"
    assert start_options() <= {parameter.name for parameter in start.params}
    assert RESERVED.keys() | set(DRIVER_SETTINGS) <= init_parameters().keys()
    assert MIN_STORE_BYTES == ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES
    of_nodes = (
        init_parameters().keys() - RESERVED.keys() - set(DRIVER_SETTINGS) - {"logging_config", "tracing_startup_hook"}
    )
    assert of_nodes <= start_options(), "a Slurm job can pass on every setting of nodes"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(ray=dict(object_store_memry=1)), "cluster.ray.object_store_memry is not an argument of ray.init; did you mean "
         "cluster.ray.object_store_memory?"),
        (dict(ray=dict(min_worker_port=1)), "it is an option of `ray start` alone; use MRL_RAY_OPTIONS"),
        (dict(ray=dict(object_store_memory="8GB")), "cluster.ray.object_store_memory='8GB': expected int."),
        (dict(ray=dict(object_store_memory=True)), "expected int."),
        (dict(ray=dict(object_store_memory=1000)), "expected bytes, at least 78643200 (75 MiB)."),
        (dict(ray=dict(object_spilling_directory="spill")), "expected an absolute path"),
        (dict(ray=dict(resources=[1])), "cluster.ray.resources=[1]: expected a mapping."),
        (dict(ray=dict(log_to_driver="yes")), "cluster.ray.log_to_driver='yes': expected bool."),
        (dict(ray=dict(logging_level="LOUD")), "expected the name of a level"),
        (dict(ray=dict(logging_config={})), "a config cannot express the type Optional[LoggingConfig]"),
        (dict(ray=dict(address="auto")), "cluster.ray.address='auto' cannot be set: use cluster.address."),
        (dict(ray=dict(num_cpus=4)), "mrl gives Ray one CPU for each process"),
        (dict(ray=dict(temp_dir="/x")), "use the environment variable RAY_TMPDIR"),
        (dict(ray=dict(include_dashboard=True)), "mrl starts no dashboard of Ray"),
        (dict(address="10.0.0.1:6379", ray=dict(memory=10**9)), "the cluster at cluster.address=10.0.0.1:6379 runs already"),
        (SLURM | dict(ray=dict(object_spilling_directory="/my scratch")), "in a Slurm job, expected a value without spaces"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cluster(ClusterConfig(**keys))


def test_settings_of_the_driver_may_be_set_for_a_cluster_that_runs_already():
    check_cluster(ClusterConfig(address="10.0.0.1:6379", ray=dict(log_to_driver=True, namespace="mine")))
    # The driver of a Slurm job reads the same keys, and the address of the cluster that the job has started.
    check_cluster(ClusterConfig(**SLURM, address="10.0.0.1:6379", ray=dict(object_store_memory=10**9)))


SETTINGS = dict(
    object_store_memory=10**9, object_spilling_directory="/scratch/me", memory=2 * 10**9, resources={"nvme": 1.0},
    labels={"zone": "a", "kind": "b"}, enable_resource_isolation=False, log_to_driver=True, logging_level="INFO",
)  # fmt: skip


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_ray_gets_the_settings_in_place_of_the_defaults(monkeypatch, tmp_path, address):
    given = {}

    def init(**options):
        given.update(options, flags=parameter.RayParams())
        raise ValueError("no cluster in this test")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_restrict_to_loopback", lambda: None)
    monkeypatch.setattr(ray_cluster, "private_ray_folder", lambda: tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    cluster = ClusterConfig(address=address, scheduler="slurm" if address else None, ray=SETTINGS)
    with pytest.raises(ValueError, match="no cluster in this test"), ray_cluster.ray_cluster(cluster):
        pass
    assert (given["log_to_driver"], given["logging_level"]) == (True, "INFO")
    started_here = address is None
    assert bool(given["flags"].no_monitor) == bool(given["flags"].include_log_monitor) == started_here
    assert parameter.RayParams().no_monitor is False
    assert ("object_store_memory" in given, "_memory" in given) == (started_here, started_here)
    if started_here:
        assert given["object_store_memory"] == 10**9 and given["_memory"] == 2 * 10**9
        assert given["object_spilling_directory"] == "/scratch/me" and given["resources"] == {"nvme": 1.0}
        assert given["_temp_dir"] == str(tmp_path)


def test_ray_start_parses_the_options_of_a_job():
    parsed = start.make_context("start", start_arguments(SETTINGS)).params
    assert (parsed["object_store_memory"], parsed["memory"]) == (10**9, 2 * 10**9)
    assert parsed["object_spilling_directory"] == "/scratch/me" and parsed["resources"] == '{"nvme":1.0}'
    assert parsed["labels"] == "zone=a,kind=b" and parsed["enable_resource_isolation"] is False
    assert start_arguments(dict(enable_resource_isolation=True)) == ["--enable-resource-isolation"]
    assert init_arguments(SETTINGS, connect=True) == dict(log_to_driver=True, logging_level="INFO")


def test_a_job_starts_ray_with_the_settings_and_then_with_the_users_own_options(monkeypatch, tmp_path):
    monkeypatch.setenv("MRL_RAY_OPTIONS", "--object-store-memory=5 --verbose")
    job = slurm_job.make_job(ClusterConfig(**SLURM, ray=dict(object_store_memory=10**9)), "mine", tmp_path, [])
    assert job.environment["MRL_RAY_OPTIONS"] == "--object-store-memory=1000000000 --object-store-memory=5 --verbose"
    monkeypatch.delenv("MRL_RAY_OPTIONS")
    assert "MRL_RAY_OPTIONS" not in slurm_job.make_job(ClusterConfig(**SLURM), "mine", tmp_path, []).environment
