"""`mrl doctor`: is this machine, or are these hosts, fit for a run?"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from mrl.doctor import report
from mrl.doctor.examine import Options, Verdict, examine_one, examine_together
from mrl.doctor.finding import exit_status
from mrl.doctor.meeting import FolderStore, Meeting, TcpStore
from mrl.doctor.wanted import Wanted

USAGE = """usage: mrl doctor [--json] [--all-reduce | --no-all-reduce] [--deadline S]
                  [--rendezvous FOLDER|HOST:PORT [--hosts N] [--rank R]] [KEY=VALUE ...]

Looks for what makes a run fail, hang or crawl, before it starts: versions, GPUs and driver, memory, /dev/shm, limits, disks,
clocks, names, ports, interfaces, a real all-reduce. Says of each finding what it is, where, why it matters, and the command that
mends it. Changes nothing; a machine that is fit gives no finding.

  mrl doctor                                            this machine
  mrl doctor model.path=Qwen3-8B parallel.tp=4          and whether it can run that: the same keys as mrl train
  mrl doctor --all-reduce                               also one over all GPUs of this machine (two processes without any)

In a job, before Ray starts, one process on each host:
  srun --ntasks-per-node=1 mrl doctor --rendezvous $(scontrol show hostnames | head -1):29400 KEY=VALUE ...
  srun --ntasks-per-node=1 mrl doctor --rendezvous /shared/doctor-$SLURM_JOB_ID

  --rendezvous   where the hosts meet: a port of the first host, or a new folder that all see
  --hosts        how many there are; default: as Slurm says
  --rank         of this one; default: as Slurm says, else whatever is free
  --deadline     seconds for the hosts to come, and again for the all-reduces; 60 unless given
  --point        a folder of a sweep's point, in place of its keys
  --json         facts and findings for programs

Exit status, the same on all hosts: 0 nothing or notes, 1 warnings, 2 errors (or a mistake in these arguments).
docs/doctor.md lists the checks.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("mrl doctor", usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all-reduce", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--rendezvous")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--point", type=Path)
    parser.add_argument("keys", nargs="*")
    return parser


def wanted(keys: Sequence[str]) -> Wanted | None:
    """What the configuration of these keys needs; None without any. A mistake in them is kept, not raised."""
    if not keys:
        return None
    from mrl.commands import hydra_app  # a second, for those who give keys
    from mrl.doctor.asking import wanted_by

    try:
        overrides = hydra_app.checked(hydra_app.with_default_experiment(list(keys)))
        sys.path.append(os.getcwd())  # a user's own rewards and losses, as in mrl train
        return wanted_by(hydra_app.composed(overrides))
    except ValueError as error:
        return Wanted(mistakes=[str(error)])


def _keys(arguments: argparse.Namespace) -> list[str]:
    """Of the command line, or of a point: FOLDER/NUMBER. Raises ValueError where there is no such point."""
    if not arguments.point:
        return arguments.keys
    from mrl.sweep.plan import load

    return load(arguments.point.parent).overrides(int(arguments.point.name))


def _from_environment(names: Sequence[str]) -> int | None:
    for name in names:
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def _meeting(arguments: argparse.Namespace) -> Meeting:
    """Join; raises ValueError where the arguments do not say enough, or nobody is there."""
    where, rank = arguments.rendezvous, arguments.rank
    size = arguments.hosts or _from_environment(["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])
    if not size:
        raise ValueError("--rendezvous: how many hosts are there? Add --hosts N.")
    rank = _from_environment(["SLURM_PROCID"]) if rank is None else rank
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"--rank {rank} of {size} hosts: start one process per host (srun --ntasks-per-node=1).")
    host, _, port = where.rpartition(":")
    if host and port.isdigit():
        return Meeting(TcpStore(host, int(port), rank, arguments.deadline), rank, size)
    return Meeting(FolderStore(Path(where).absolute()), rank, size)


def examine(arguments: argparse.Namespace, clock: Callable[[], float] = time.time) -> tuple[Verdict, bool]:
    """(what came of it, whether this process is the one that tells); raises ValueError."""
    options = Options(arguments.deadline, arguments.all_reduce, clock)
    if not arguments.rendezvous:
        return examine_one(wanted(_keys(arguments)), options), True
    meeting = _meeting(arguments)
    verdict = examine_together(meeting, lambda: wanted(_keys(arguments)), options)
    meeting.leave()
    return verdict, meeting.rank == 0 or not verdict.seen.hosts


def main(argv: list[str], clock: Callable[[], float] = time.time) -> int:
    """Entry point of `mrl doctor`; `clock`: of this host."""
    begun = time.perf_counter()
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.help:
        sys.stdout.write(USAGE)
        return 0
    wrong = [key for key in arguments.keys if "=" not in key and not key.startswith("~")]
    if wrong:
        sys.stderr.write(f"mrl doctor: {wrong[0]!r} is no KEY=VALUE; mrl doctor --help says what there is\n")
        return 2
    try:
        verdict, tells = examine(arguments, clock)
    except ValueError as error:
        sys.stderr.write(f"mrl doctor: {error}\n")
        return 2
    if tells and arguments.json:
        sys.stdout.write(report.as_json(verdict) + "\n")
    elif tells:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        report.show(console, verdict, time.perf_counter() - begun)
    return exit_status(verdict.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
