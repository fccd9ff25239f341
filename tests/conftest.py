"""Shared by all tests: one thread per process, and a fixture that forks the ranks of multi-process tests from this process."""

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")

import gc
import multiprocessing
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest

from mrl.rollout.engines.leases import PortLease

# `make test` runs the same examples every time; `make test-all` draws new ones with --hypothesis-profile=random.
# Tests run concurrently, so the duration of an example means nothing.
for profile, fixed in (("fixed", True), ("random", False)):
    hypothesis.settings.register_profile(
        profile, deadline=None, derandomize=fixed, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
hypothesis.settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a parametrized test as extended, except those that `extended_except(*ids)` names."""
    for item in items:
        exception = item.get_closest_marker("extended_except")
        if exception and item.callspec.id not in exception.args:
            item.add_marker("extended")


def _rank_main(rank: int, dims, port: int, results, fn: Callable, args: tuple) -> None:
    import torch

    from parallel import collectives, groups

    torch.set_num_threads(1)
    try:
        collectives.init_process_group(rank, dims.world_size, "127.0.0.1", port, timeout_s=60)
        groups.initialize(dims, seed=0)
        results.put((rank, fn(rank, *args), None))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # without the atexit hooks that the fork inherited


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
        context = multiprocessing.get_context("fork")
        results, lease = context.Queue(), PortLease()
        ranks = [
            context.Process(target=_rank_main, args=(rank, dims, lease.port, results, fn, args))
            for rank in range(dims.world_size)
        ]
        for process in ranks:
            process.start()
        returned: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        try:
            while len(returned) < dims.world_size:
                rank, value, error = results.get(timeout=max(0.1, end - time.monotonic()))
                assert error is None, f"rank {rank}:\n{error}"
                returned[rank] = value
        except queue.Empty:
            missing = sorted(set(range(dims.world_size)) - set(returned))
            raise AssertionError(f"ranks {missing} did not return within {timeout_s} s") from None
        finally:
            lease.close()
            for process in ranks:
                process.join(timeout=10 if len(returned) == dims.world_size else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [returned[rank] for rank in range(dims.world_size)]

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
