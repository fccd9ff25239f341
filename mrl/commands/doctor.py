"""`mrl doctor`: checks whether this machine, or the hosts of a job, can run a config."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from mrl.doctor.examine import CHECKS, DoctorReport, ExamineOptions, examine_host, examine_hosts
from mrl.doctor.findings import exit_status, print_findings, summarize, to_json
from mrl.doctor.host_facts import Requirements
from mrl.doctor.rendezvous import Rendezvous, SharedFolderStore, TcpRendezvousStore

USAGE = """usage: mrl doctor [--json] [--all-reduce | --no-all-reduce] [--deadline S]
                  [--rendezvous FOLDER|HOST:PORT [--hosts N] [--rank R]] [KEY=VALUE ...]

Finds problems that would make a run fail, hang or run slowly, before it starts: versions, GPUs and driver, memory, /dev/shm,
limits, disks, clocks, names, ports, network interfaces, and a real all-reduce. Each finding says what is wrong, on which host,
why it matters, and which command fixes it. Changes nothing. A healthy machine gives no finding.

  mrl doctor                                            checks this machine
  mrl doctor model.path=Qwen3-8B parallel.tp=4          also checks whether it can run this config; the keys of mrl train
  mrl doctor --all-reduce                               also runs an all-reduce over all its GPUs (without GPUs: two processes)

In a job, before Ray starts, run one process on each host:
  srun --ntasks-per-node=1 mrl doctor --rendezvous $(scontrol show hostnames | head -1):29400 KEY=VALUE ...
  srun --ntasks-per-node=1 mrl doctor --rendezvous /shared/doctor-$SLURM_JOB_ID

  --rendezvous   how the hosts exchange data: a port of the first host, or a new folder that all hosts share
  --hosts        number of hosts; default: from Slurm
  --rank         rank of this host; default: from Slurm, else the first free one
  --deadline     seconds for all hosts to join, and again for the all-reduces; default: 60
  --point        folder of a sweep's point, instead of its keys
  --json         print facts and findings as JSON

Exit status, the same on all hosts: 0 no findings or only notes, 1 warnings, 2 errors (or wrong arguments).
docs/tutorials/slurm.md lists the checks.
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


def read_requirements(keys: Sequence[str]) -> Requirements | None:
    """Return the requirements of the config with these keys; None without keys.

    An error in the keys becomes one of the requirements' `mistakes`.
    """
    if not keys:
        return None
    from mrl.config import hydra_entry  # takes about a second, and only a check of a config needs it
    from mrl.doctor.requirements import requirements_of

    try:
        overrides = hydra_entry.check_overrides(hydra_entry.add_default_experiment(list(keys)))
        sys.path.append(os.getcwd())  # finds a user's own rewards and losses, as mrl train does
        return requirements_of(hydra_entry.compose_config(overrides))
    except ValueError as error:
        return Requirements(mistakes=[str(error)])


def _config_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of the command line, or of the sweep's point FOLDER/NUMBER; raises ValueError if it does not exist."""
    if not arguments.point:
        return arguments.keys
    from mrl.sweep.points import load_sweep

    return load_sweep(arguments.point.parent).overrides(int(arguments.point.name))


def _integer_from_environment(names: Sequence[str]) -> int | None:
    for name in names:
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def _join_rendezvous(arguments: argparse.Namespace) -> Rendezvous:
    """Join the other hosts; raises ValueError if arguments are missing or wrong, or the rendezvous does not answer."""
    where, rank = arguments.rendezvous, arguments.rank
    size = arguments.hosts or _integer_from_environment(["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])
    if not size:
        raise ValueError("--rendezvous: the number of hosts is unknown; add --hosts N.")
    rank = _integer_from_environment(["SLURM_PROCID"]) if rank is None else rank
    if rank is not None and not 0 <= rank < size:
        raise ValueError(f"--rank {rank} of {size} hosts: start one process per host (srun --ntasks-per-node=1).")
    host, _, port = where.rpartition(":")
    if host and port.isdigit():
        return Rendezvous(TcpRendezvousStore(host, int(port), rank, arguments.deadline), rank, size)
    return Rendezvous(SharedFolderStore(Path(where).absolute()), rank, size)


def examine(arguments: argparse.Namespace, clock: Callable[[], float] = time.time) -> tuple[DoctorReport, bool]:
    """Examine this host, or all hosts of a rendezvous; returns (report, whether this process prints the report).

    Raises ValueError for wrong arguments.
    """
    options = ExamineOptions(arguments.deadline, arguments.all_reduce, clock)
    if not arguments.rendezvous:
        return examine_host(read_requirements(_config_keys(arguments)), options), True
    rendezvous = _join_rendezvous(arguments)
    report = examine_hosts(rendezvous, lambda: read_requirements(_config_keys(arguments)), options)
    rendezvous.leave()
    return report, rendezvous.rank == 0 or not report.cluster.hosts


def main(argv: list[str], clock: Callable[[], float] = time.time) -> int:
    """Entry point of `mrl doctor`; returns the exit status. `clock`: this host's clock, seconds."""
    begun = time.perf_counter()
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.help:
        sys.stdout.write(USAGE)
        return 0
    wrong = [key for key in arguments.keys if "=" not in key and not key.startswith("~")]
    if wrong:
        sys.stderr.write(f"mrl doctor: {wrong[0]!r} is not KEY=VALUE; see mrl doctor --help\n")
        return 2
    try:
        report, is_printer = examine(arguments, clock)
    except ValueError as error:
        sys.stderr.write(f"mrl doctor: {error}\n")
        return 2
    if is_printer and arguments.json:
        sys.stdout.write(to_json(report.cluster, report.findings) + "\n")
    elif is_printer:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        summary = summarize(report.cluster, report.findings, len(CHECKS), time.perf_counter() - begun)
        print_findings(console, report.findings, summary)
    return exit_status(report.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
