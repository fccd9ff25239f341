"""Runs a test's function on the ranks of a small trainer, each in its own process."""

import gc
import os
import queue
import time
import traceback
from collections.abc import Callable
from multiprocessing.context import ForkContext, SpawnContext
from typing import Any

from mrl.core.processes import PortLease


def prepare_fork() -> None:
    """Collect the garbage of this process, and exclude all remaining objects from garbage collection in forks.

    An earlier test may have left an unreachable process group. If a fork collected it, its destructor would wait forever for
    threads that exist only in this process. A collection would also copy the memory pages that forks share with this process.
    """
    gc.collect()
    gc.freeze()


def run_in_processes(
    context: ForkContext | SpawnContext, dims, fn: Callable, args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    """Return [fn(rank, *args) of each rank of `dims`].

    Raises AssertionError if a rank fails, with its traceback, or if a rank does not return within `timeout_s`. With a spawn
    context, each rank uses a GPU of its own. With a fork context, ranks cannot use GPUs, because CUDA does not work after a fork.
    """
    results, lease = context.Queue(), PortLease()
    main = _rank_main if isinstance(context, ForkContext) else _rank_main_on_gpu
    ranks = [
        context.Process(target=main, args=(rank, dims, lease.port, results, fn, args))
        for rank in range(dims.world_size)
    ]
    prepare_fork()
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


def _rank_main_on_gpu(rank: int, *arguments: Any) -> None:
    """Run a rank in this new process, which sees only one of the visible GPUs: the GPU whose position is `rank`."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
    _rank_main(rank, *arguments)


def _rank_main(rank: int, dims, port: int, results, fn: Callable, args: tuple) -> None:
    import torch

    from parallel import collectives, groups

    torch.set_num_threads(1)
    try:
        collectives.init_process_group(rank, dims.world_size, "127.0.0.1", port, timeout_s=60)
        groups.initialize(dims, seed=0)
        results.put((rank, fn(rank, *args), None))
        torch.distributed.barrier(group=collectives.object_group())  # the function may have suspended the other groups
        torch.distributed.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # a fork must not run the atexit hooks that it has inherited
