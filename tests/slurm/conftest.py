"""Fixtures: a Slurm cluster on this machine, and training runs that are submitted to it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_requirement
from submitted_runs import SubmittedRun, submitter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from e2e.conftest import inputs, make_once, quickstart, start_mrl, warm  # noqa: F401


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Four nodes with two GPUs each. They share only the tests' folder and the checkout."""
    if why := missing_requirement():
        pytest.skip(f"no Slurm cluster can be made here: {why}")
    made = SlurmCluster(4, 2, [tmp_path_factory.getbasetemp(), Path(__file__).resolve().parents[2]])
    yield made
    made.close()


@pytest.fixture
def submit(cluster, quickstart, tmp_path) -> Callable[..., SubmittedRun]:  # noqa: F811
    """`submit("key=value", ..., VARIABLE=...)`: run `mrl train cluster=slurm` on the login node and return the job."""
    return submitter(cluster, quickstart, tmp_path)
