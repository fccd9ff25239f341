"""All-reduces with a deadline: each rank a child process, which is always ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.doctor.all_reduce import Spec, written
from mrl.doctor.lock import CHECKOUT
from mrl.doctor.seen import Collective

START_S = 60.0  # to import torch, on a slow disk
LOOK_S = 0.05


@dataclass(frozen=True)
class Plan:
    """What all hosts try together."""

    address: str
    port: int
    hosts: list[str]  # of every rank
    groups: dict[str, list[int]] = field(default_factory=dict)
    alone: bool = False  # one host: gloo over loopback, as a run on one machine has it


@dataclass(frozen=True)
class Told:
    """What one rank said."""

    rank: int
    began: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    backend: str = ""


def run_ranks(plan: Plan, ranks: Sequence[int], timeout_s: float) -> list[Told]:
    """Run these ranks here; they are gone when it returns."""
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    if plan.alone:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="mrl-doctor-") as folder, contextlib.ExitStack() as stack:
        children = {}
        for number, rank in enumerate(ranks):
            spec = Spec(rank, len(plan.hosts), plan.address, plan.port, number, timeout_s, plan.groups)
            out = stack.enter_context(Path(folder, f"{rank}.out").open("wb"))
            err = stack.enter_context(Path(folder, f"{rank}.err").open("wb"))
            command = [sys.executable, "-m", "mrl.doctor.all_reduce", written(spec)]
            children[rank] = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=CHECKOUT,
                start_new_session=True,
            )
            stack.callback(_end, children[rank])
        end = time.monotonic() + START_S + timeout_s
        while any(child.poll() is None for child in children.values()) and time.monotonic() < end:
            time.sleep(LOOK_S)
        statuses = {rank: child.poll() for rank, child in children.items()}
        return [_told(rank, Path(folder), statuses[rank]) for rank in ranks]


def _end(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _told(rank: int, folder: Path, status: int | None) -> Told:
    told = Told(rank)
    backend = ""
    for line in (folder / f"{rank}.out").read_text().splitlines():
        said = json.loads(line)
        if "began" in said:
            told.began.append(said["began"])
            backend = said["backend"]
        elif "done" in said:
            told.seconds[said["done"]] = said["seconds"]
        else:
            told.problems[said["failed"]] = said["problem"]
    if status:  # it said nothing itself
        last = (folder / f"{rank}.err").read_text().strip().splitlines()[-1:]
        why = f"its process ended with status {status}" + (f": {last[0][:300]}" if last else "")
        told.problems.setdefault(told.began[-1] if told.began else "world", why)
    return Told(rank, told.began, told.seconds, told.problems, backend)


def outcome(plan: Plan, told: Mapping[int, Told], timeout_s: float) -> list[Collective]:
    """What came of every group, by what its ranks said."""
    found = []
    for group, ranks in {"world": list(range(len(plan.hosts))), **plan.groups}.items():
        said = [told[rank] for rank in ranks if rank in told]
        hosts = list(dict.fromkeys(plan.hosts[rank] for rank in ranks))
        backend = next((one.backend for one in said if one.backend), "")
        problem = next((one.problems[group] for one in said if group in one.problems), "")
        late = [plan.hosts[rank] for rank in ranks if rank not in told or group not in told[rank].seconds]
        if late and not problem:
            problem = f"it has not ended after {timeout_s:.0f} s on {', '.join(dict.fromkeys(late))}"
        seconds = None if late or problem else max(one.seconds[group] for one in said)
        found.append(Collective(group, hosts, backend, seconds, problem))
    return found
