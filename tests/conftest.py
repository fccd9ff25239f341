"""Shared by all tests: one thread per process, and a fixture that forks the ranks of multi-process tests from this process."""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")

import gc
import logging
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import absl.logging
import hypothesis
import pytest
from rank_processes import run_in_processes

pytest_plugins = ["device_scheduler"]

# `make test` runs the same examples every time; `make test-all` draws new ones with --hypothesis-profile=random.
# Tests run concurrently, so the duration of an example means nothing.
for profile, fixed in (("fixed", True), ("random", False)):
    hypothesis.settings.register_profile(
        profile, deadline=None, derandomize=fixed, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("fixed")


# Megatron imports absl, which TensorBoard needs. The log handler of absl closes its stream when Hydra configures logging, except
# if the stream is `sys.stderr` at that moment. In a test with capsys, the handler would close pytest's file of captured output.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test as extended, except those that `extended_except(*ids)` names."""
    for item in items:
        exception = item.get_closest_marker("extended_except")
        if exception and item.callspec.id not in exception.args:
            item.add_marker("extended")


def pytest_collection_finish() -> None:
    """Exclude what the imports have created from later garbage collections, which would pause a test for a noticeable time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def own_records(caplog):
    """`own_records()` -> the log records of this test from our own packages. Other libraries log at any time."""

    def records() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.partition(".")[0] in ("mrl", "models", "parallel")]

    return records


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(dims, fn, *args)` -> [fn(rank, *args) of each rank]. Each rank is a fork of this process."""
    from parallel import device

    device.patch_megatron_for_cpu()
    # Import once, before the forks, what Megatron otherwise imports when a model is built.
    import megatron.core.models.mimo.optimizer  # noqa: F401

    import mrl.workers.parity_trace  # noqa: F401

    gc.freeze()  # a garbage collection in a rank would copy the memory pages that it shares with this process

    def run(dims, fn: Callable, *args: Any, timeout_s: float = 120) -> list[Any]:
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
