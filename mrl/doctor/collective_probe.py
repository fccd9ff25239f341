"""Tests all-reduces between hosts, or between the GPUs of one host. Each rank is a child process. Late processes are killed.

`python -m mrl.doctor.collective_probe SPEC` runs one rank; SPEC is a RankSpec as JSON. The rank prints a line of JSON when an
all-reduce begins, finishes or fails.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mrl.core.code_locations import python_path
from mrl.doctor.host_facts import CollectiveResult
from mrl.hang_report.network_interfaces import INTERFACE_VARIABLES, LOOPBACK

START_TIMEOUT_S = 60.0  # time for a child process to import torch from a slow disk
POLL_S = 0.05  # time between two tests of whether the child processes have ended
MESSAGE_BYTES = 16 * 2**20  # size of the tensor that each all-reduce sums


@dataclass(frozen=True)
class CollectivePlan:
    """The all-reduces that all hosts run together."""

    address: str  # network address of rank 0
    port: int
    host_of_rank: list[str]  # name of each rank's host, in rank order
    # process group -> its ranks; the group `world`, which contains all ranks, is also tested
    process_groups: dict[str, list[int]] = field(default_factory=dict)
    single_host: bool = False  # all ranks are on this host, so NCCL and gloo use the loopback interface


@dataclass(frozen=True)
class RankResult:
    """Results of the all-reduces in which one rank took part."""

    rank: int
    # `world` when its set-up began; then each process group whose all-reduce began on this rank
    began: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # process group -> duration of its all-reduce
    problems: dict[str, str] = field(default_factory=dict)  # process group -> error
    backend: str = ""  # gloo or nccl; "" if the set-up of `world` did not begin


@dataclass(frozen=True)
class RankSpec:
    """Arguments of one rank's process."""

    rank: int
    world_size: int
    address: str  # network address of rank 0
    port: int
    device: int  # index of the GPU on this host
    timeout_s: float  # timeout of torch.distributed, both for its initialization and for each all-reduce
    # process group -> its ranks; an all-reduce over all ranks (`world`) runs first, then one in each of these groups, in order
    process_groups: dict[str, list[int]]


def multi_host_groups(groups: Mapping[str, Sequence[int]], host_of_rank: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the process groups that have ranks on several hosts. Of several groups with the same ranks, keep the first.

    Groups with a rank that no host has are left out. `groups`: name -> ranks. `host_of_rank` [ranks]: name of each rank's host.
    """
    name_by_ranks: dict[tuple[int, ...], str] = {}
    for name, ranks in groups.items():
        if max(ranks) < len(host_of_rank) and len({host_of_rank[rank] for rank in ranks}) > 1:
            name_by_ranks.setdefault(tuple(ranks), name)
    return {name: ranks for ranks, name in name_by_ranks.items()}


def run_ranks(plan: CollectivePlan, ranks: Sequence[int], timeout_s: float) -> list[RankResult]:
    """Run the processes of these ranks on this host. Processes that do not end in time are killed.

    `timeout_s`: time for all all-reduces together, in addition to START_TIMEOUT_S for the start of the processes.
    """
    environment = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    if plan.single_host:
        environment = dict.fromkeys(INTERFACE_VARIABLES.values(), LOOPBACK) | environment
    with tempfile.TemporaryDirectory(prefix="mrl-doctor-") as folder, contextlib.ExitStack() as stack:
        children = {}
        for device, rank in enumerate(ranks):
            spec = RankSpec(
                rank=rank,
                world_size=len(plan.host_of_rank),
                address=plan.address,
                port=plan.port,
                device=device,
                timeout_s=timeout_s,
                process_groups=plan.process_groups,
            )
            children[rank] = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.doctor.collective_probe", json.dumps(asdict(spec))],
                stdout=stack.enter_context(Path(folder, f"{rank}.out").open("wb")),
                stderr=stack.enter_context(Path(folder, f"{rank}.err").open("wb")),
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            stack.callback(_kill, children[rank])
        deadline = time.monotonic() + START_TIMEOUT_S + timeout_s
        while any(child.poll() is None for child in children.values()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        statuses = {rank: child.poll() for rank, child in children.items()}
        return [_read_result(rank, Path(folder), statuses[rank]) for rank in ranks]


def _kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read_result(rank: int, folder: Path, status: int | None) -> RankResult:
    result, backend = RankResult(rank), ""
    for line in (folder / f"{rank}.out").read_text().splitlines():
        event = json.loads(line)
        if "began" in event:
            result.began.append(event["began"])
            backend = event["backend"]
        elif "done" in event:
            result.seconds[event["done"]] = event["seconds"]
        else:
            result.problems[event["failed"]] = event["problem"]
    if status:  # the process crashed, so it could not report the failure itself
        last = (folder / f"{rank}.err").read_text().strip().splitlines()[-1:]
        problem = f"the process of rank {rank} ended with status {status}" + (f": {last[0][:300]}" if last else "")
        result.problems.setdefault(result.began[-1] if result.began else "world", problem)
    return RankResult(rank, result.began, result.seconds, result.problems, backend)


def combine_results(
    plan: CollectivePlan, results: Mapping[int, RankResult], timeout_s: float
) -> list[CollectiveResult]:
    """Combine the results of the ranks into one result for each process group.

    `results`: rank -> its result. A rank without a result counts as not finished.
    """
    combined = []
    for group, ranks in {"world": list(range(len(plan.host_of_rank))), **plan.process_groups}.items():
        rank_results = [results[rank] for rank in ranks if rank in results]
        hosts = list(dict.fromkeys(plan.host_of_rank[rank] for rank in ranks))
        backend = next((one.backend for one in rank_results if one.backend), "")
        problem = next((one.problems[group] for one in rank_results if group in one.problems), "")
        late = [plan.host_of_rank[rank] for rank in ranks if rank not in results or group not in results[rank].seconds]
        if late and not problem:
            late_hosts = ", ".join(dict.fromkeys(late))
            problem = f"it did not finish within {timeout_s:.0f} s on {late_hosts}"
            if group != "world" and rank_results and not any(group in one.began for one in rank_results):
                problem = f"it did not begin on {late_hosts}, because an earlier all-reduce failed or did not finish"
        seconds = None if late or problem else max(one.seconds[group] for one in rank_results)
        combined.append(CollectiveResult(group, hosts, backend, seconds, problem))
    return combined


def run_rank(spec: RankSpec) -> None:
    """Run the all-reduce of each process group that contains this rank, one after another. Stops after the first failure."""
    import torch  # the import takes seconds, and only this child process needs torch
    import torch.distributed as dist

    from parallel import collectives, device

    group = "world"
    try:
        if device.has_cuda():
            torch.cuda.set_device(spec.device)
        _print_event(began=group, backend=device.backend())
        collectives.init_process_group(spec.rank, spec.world_size, spec.address, spec.port, spec.timeout_s)
        torch_groups = {name: dist.new_group(ranks) for name, ranks in spec.process_groups.items()}
        values = torch.ones(MESSAGE_BYTES // 4, device=device.device())
        for group, ranks in {"world": list(range(spec.world_size)), **spec.process_groups}.items():
            if spec.rank in ranks:
                _print_event(began=group, backend=device.backend())
                _print_event(done=group, seconds=_time_all_reduce(values, torch_groups.get(group), len(ranks)))
    except (RuntimeError, ValueError, OSError) as error:  # torch.distributed raises RuntimeErrors
        _print_event(failed=group, problem=str(error).strip().splitlines()[0][:300])


def _print_event(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _time_all_reduce(values, group, size: int) -> float:
    """Run two all-reduces and return the seconds of the second one. Raises ValueError if the sum is wrong."""
    import torch
    import torch.distributed as dist

    for _ in range(2):
        values.fill_(1)
        begun = time.perf_counter()
        dist.all_reduce(values, group=group)
        if values.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    if not bool((values == size).all()):
        found = f"{values.min().item()} to {values.max().item()}"
        raise ValueError(
            f"the all-reduce over {size} ranks returned a wrong sum: expected {size}, got values from {found}"
        )
    return seconds


if __name__ == "__main__":
    run_rank(RankSpec(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # a communicator that hangs would prevent a normal exit
