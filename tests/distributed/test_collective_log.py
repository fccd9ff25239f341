"""parallel.collective_log: other processes can read the last collective of each rank."""

import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel import groups
from parallel.collective_log import CollectiveLog, read_collective_log
from parallel.dims import ParallelDims


def use_groups(rank: int, folder: str):
    log = CollectiveLog(f"{folder}/{rank}.ops")
    log.watch()
    log.watch()  # a second call does nothing
    group, ones = groups.dp_cp_group(), torch.ones(10)
    for _ in range(3):
        dist.all_reduce(ones, group=group)
    if rank == 0:
        dist.send(ones[:5], 1, group=group)
    else:
        dist.recv(ones[:5], 0, group=group)
        dist.barrier(group=dist.new_group([1]))  # created after `watch`: not logged
    seen = [
        last for last in read_collective_log(f"{folder}/{rank}.ops") if last.purpose == "DATA_PARALLEL_GROUP_WITH_CP"
    ]
    log.close()
    dist.all_reduce(ones, group=group)
    return seen, read_collective_log(f"{folder}/{rank}.ops")


def test_counts_operations_and_peers_are_kept_until_the_log_is_closed(run_ranks, tmp_path):
    (first, after), (second, _) = run_ranks(ParallelDims(dp=2), use_groups, str(tmp_path))
    assert len(first) == len(second) == 1
    sent, received = first[0], second[0]
    assert sent.group == received.group and sent.ranks == received.ranks == (0, 1)
    assert (sent.num_collectives, sent.num_messages, sent.operation, sent.peer, sent.nbytes) == (3, 1, "send", 1, 20)
    assert (received.num_collectives, received.num_messages, received.operation, received.peer) == (3, 1, "recv", 0)
    assert sent in after, "what comes after close() is not counted"


def use_short_lived_groups(rank: int, folder: str):
    log = CollectiveLog(f"{folder}/{rank}.ops")
    lasting, ones, seen, gone = dist.new_group(), torch.ones(10), [], []
    for number in range(5):
        group = dist.new_group(group_desc=f"session {number}")
        gone.append(weakref.ref(group))
        log.watch()
        for _ in range(number + 1):
            dist.all_reduce(ones, group=group)
        dist.all_reduce(ones, group=lasting)
        found = {last.purpose: last.num_collectives for last in read_collective_log(f"{folder}/{rank}.ops")}
        seen.append((found, len(json.loads(Path(f"{folder}/{rank}.ops.json").read_text())["groups"])))
        dist.destroy_process_group(group)
        del group
    log.watch()
    after = [last.purpose for last in read_collective_log(f"{folder}/{rank}.ops")]
    log.close()
    return seen, after, [reference() for reference in gone]


def test_destroyed_groups_free_their_slots(run_ranks, tmp_path):
    """Each weight sync session has its own group, and a run may have thousands of sessions."""
    for seen, after, gone in run_ranks(ParallelDims(dp=2), use_short_lived_groups, str(tmp_path)):
        for number, (found, _) in enumerate(seen):
            assert found[f"session {number}"] == number + 1, "not what was counted for the group before"
            assert not any(f"session {other}" in found for other in range(5) if other != number)
        assert len({slots for _, slots in seen}) == 1
        assert not any(name.startswith("session") for name in after)
        assert gone == [None] * 5, "nothing keeps them"


ENDS = """
import os, sys
import torch, torch.distributed as dist
from parallel.collective_log import CollectiveLog
rank = 0 if os.fork() else 1
store = dist.FileStore(sys.argv[1] + ".store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
CollectiveLog(f"{sys.argv[1]}/{rank}.ops").watch()
dist.broadcast(torch.ones(3), 0)
if rank == 0:
    os.wait()
"""


@pytest.mark.extended
def test_an_interpreter_that_exits_without_closing_its_log_does_not_crash(tmp_path):
    """If hooks remained, torch would crash when it destroys the group."""
    assert subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], timeout=120).returncode == 0
    (last,) = read_collective_log(tmp_path / "0.ops")
    assert (last.num_collectives, last.operation, last.nbytes, last.ranks) == (1, "broadcast", 12, (0, 1))
