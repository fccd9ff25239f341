"""The processes of ranks are forked from the test process, and do not depend on what earlier tests left in it."""

import gc

import pytest

from parallel.dims import ParallelDims


def collected_objects(rank: int) -> int:
    """Return the number of unreachable objects that a garbage collection finds in this rank."""
    ring = []
    ring.append(ring)
    del ring
    return gc.collect()


@pytest.fixture
def unreachable_group():
    """An unreachable process group with threads in the test process, which garbage collection has not found yet."""
    import torch.distributed as dist

    gc.disable()
    ring = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
    ring.append(ring)
    del ring
    yield
    gc.enable()
    gc.collect()


def test_a_rank_does_not_destroy_process_groups_of_the_test_process(unreachable_group, run_ranks):
    (found,) = run_ranks(ParallelDims(), collected_objects, timeout_s=60)
    assert found >= 1, "the rank collects its own garbage"
