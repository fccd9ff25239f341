"""Fixture that starts the process in which the functions of verl and trl run."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from peer_functions import install, missing_packages


@pytest.fixture(scope="session")
def peer() -> Callable:
    """Return a function that calls a function in the process of the peers, and returns its result."""
    if missing := missing_packages():
        pytest.skip(missing)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=install) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()
