"""A Slurm cluster, and runs that are jobs on it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_lab import Lab, lacks
from submitted_runs import Submitted, submitter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from e2e.conftest import inputs, make_once, quickstart, start_mrl, warm  # noqa: F401


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Four nodes with two GPUs each. Only the tests' folder and the checkout are on all of them."""
    if why := lacks():
        pytest.skip(f"a Slurm cluster on this machine: it {why}")
    made = Lab(4, 2, [tmp_path_factory.getbasetemp(), Path(__file__).resolve().parents[2]])
    yield made
    made.close()


@pytest.fixture
def submit(lab, quickstart, tmp_path) -> Callable[..., Submitted]:  # noqa: F811
    """`submit(key=value, ..., name=...)`: what `mrl train cluster=slurm` on the login node makes a job of."""
    return submitter(lab, quickstart, tmp_path)
