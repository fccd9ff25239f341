"""Settings and fixtures of all tests: each process uses one thread, and `run_ranks` forks the ranks of a multi-process test."""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")

import gc
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import absl.logging
import hypothesis
import pytest
from rank_processes import run_in_processes

from mrl.core.code_locations import quick_imports

pytest_plugins = ["device_scheduler"]

# `make test` runs the same Hypothesis examples every time. `make test-all` draws new examples (--hypothesis-profile=random).
# Examples have no deadline: tests run concurrently, so the duration of an example depends on the other tests.
for profile, fixed in (("fixed", True), ("random", False)):
    hypothesis.settings.register_profile(
        profile, deadline=None, derandomize=fixed, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("fixed")


# Megatron imports absl, a dependency of TensorBoard. When Hydra configures logging, absl's log handler closes its stream, unless
# the stream is a standard stream of the process at that moment. By default, the stream is the file into which pytest captures
# output. In a test with capsys, this file is not `sys.stderr`, so absl would close it.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of parametrized tests as extended.

    With the marker `extended_except(*ids)`, all cases except those with these ids; with `extended_after(n)`, all cases after the
    first n.
    """
    num_cases: Counter[tuple[str, str]] = Counter()
    for item in items:
        if exception := item.get_closest_marker("extended_except"):
            is_extended = item.callspec.id not in exception.args
        elif limit := item.get_closest_marker("extended_after"):
            test = item.parent.nodeid, item.originalname
            num_cases[test] += 1
            is_extended = num_cases[test] > limit.args[0]
        else:
            continue
        if is_extended:
            item.add_marker("extended")


_collection = ExitStack()


def pytest_collection() -> None:
    """Import quickly until all tests are collected, because most of the time of the collection is spent on imports."""
    _collection.enter_context(quick_imports())


def pytest_collection_finish() -> None:
    """End the quick imports. Garbage collections then skip the objects that exist by now, so they take less time."""
    gc.collect()
    _collection.close()


@pytest.fixture
def own_records(caplog):
    """`own_records()` -> the log records of this test from `mrl`, `models` and `parallel`, but not from other libraries."""

    def records() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.partition(".")[0] in ("mrl", "models", "parallel")]

    return records


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(dims, fn, *args)` -> [fn(rank, *args) of each rank]. Each rank is a fork of this process."""
    from parallel import device

    device.patch_megatron_for_cpu()
    # Every rank needs these modules when it builds a model. A fork gets them from this process, so no rank imports them itself.
    import megatron.core.models.mimo.optimizer  # noqa: F401

    import mrl.workers.parity_trace  # noqa: F401

    def run(dims, fn: Callable, *args: Any, timeout_s: float = 300) -> list[Any]:
        return run_in_processes(multiprocessing.get_context("fork"), dims, fn, args, timeout_s)

    return run


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory):
    """`tiny_qwen3(vocab_size=..., tied=...)` -> folder with a tiny random Qwen3 in Hugging Face format."""
    from tiny_families import make_family

    folders = {}

    def make(vocab_size: int = 40, tied: bool = False):
        if (vocab_size, tied) not in folders:
            folder = tmp_path_factory.mktemp(f"qwen3_{vocab_size}_{tied}")
            folders[vocab_size, tied] = make_family("qwen3", folder, vocab_size=vocab_size, tie_word_embeddings=tied)
        return folders[vocab_size, tied]

    return make
