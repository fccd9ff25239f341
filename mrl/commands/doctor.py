"""`mrl doctor`: checks whether this machine, or all hosts of a job, can execute a run."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from mrl.doctor.checks.host_checks import describe_libraries
from mrl.doctor.examine import CHECKS, DoctorReport, ExamineOptions, examine_host, examine_hosts
from mrl.doctor.findings import exit_status, print_findings, summarize, to_json
from mrl.doctor.host_facts import Requirements
from mrl.doctor.rendezvous import Rendezvous, SharedFolderStore, TcpRendezvousStore

USAGE = """usage: mrl doctor [--json] [--all-reduce | --no-all-reduce] [--deadline S]
                  [--rendezvous FOLDER|HOST:PORT [--hosts N] [--rank R]] [--point FOLDER]
                  [--config-dir FOLDER] [KEY=VALUE ...]

Finds problems that would make a run fail, hang or become slow. It checks versions of packages, GPUs and their driver, memory,
/dev/shm, limits, disks, clocks, host names, ports and network interfaces. With several GPUs or hosts, it also runs an
all-reduce. It changes nothing.
Each problem is reported as a finding: what is wrong, on which host, why it matters, and which command fixes it.
KEY=VALUE arguments are config keys of mrl train.

  mrl doctor                                            checks this machine
  mrl doctor model.path=Qwen3-8B parallel.tp=4          also checks whether this machine can execute the run
  mrl doctor --all-reduce                               also runs an all-reduce over all GPUs; without GPUs, over two processes

To check the hosts of a job, start one process on each host before Ray starts:
  srun --ntasks-per-node=1 mrl doctor --rendezvous $(scontrol show hostnames | head -1):29400 KEY=VALUE ...
  srun --ntasks-per-node=1 mrl doctor --rendezvous /shared/doctor-$SLURM_JOB_ID

  --rendezvous   where the hosts exchange data: a port of the first host, or a new folder that all hosts share
  --hosts        number of hosts. Default: the number that Slurm reports.
  --rank         rank of this host. Default: the rank that Slurm reports, otherwise the first free rank.
  --deadline     seconds until all hosts must have joined, and the same time again for the all-reduces. Default: 60.
  --point        folder of one run of a sweep. The doctor checks the keys of this run; give no other keys.
  --config-dir   folder with your own config groups, as for mrl train
  --json         prints facts and findings as JSON

The exit status is 0 without findings or with notes only, 1 with warnings, 2 with errors. It is the same on all hosts, except on a
host that joins late or loses the connection. Wrong arguments also give 2. docs/tutorials/slurm.md lists the checks.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mrl doctor", usage=USAGE.splitlines()[0].removeprefix("usage: "), add_help=False, allow_abbrev=False
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all-reduce", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--deadline", type=float, default=60.0)
    parser.add_argument("--rendezvous")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--point", type=Path)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("keys", nargs="*")
    return parser


def read_requirements(keys: Sequence[str]) -> Requirements | None:
    """Return the requirements of a run with these keys, or None if there are no keys.

    An error in the keys is stored in the attribute `mistakes` of the result; it is not raised.
    """
    if not keys:
        return None
    from mrl.config import hydra_entry  # this import takes about a second, and is only needed if there are keys
    from mrl.config.input_names import resolve_inputs
    from mrl.doctor.requirements import requirements_of

    try:
        overrides = hydra_entry.prepare_arguments(keys)
        return requirements_of(resolve_inputs(hydra_entry.compose_config(overrides), weights=False))
    except ValueError as error:
        return Requirements(mistakes=[str(error)])


def _config_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of the command line. With --point, return the keys of this point of a sweep.

    Raises ValueError if the parent folder of --point contains no sweep.
    """
    if not arguments.point:
        return [*(f"--config-dir={folder}" for folder in arguments.config_dir), *arguments.keys]
    from mrl.sweep.points import load_sweep

    return load_sweep(arguments.point.parent).overrides(int(arguments.point.name))


def _integer_from_environment(names: Sequence[str]) -> int | None:
    for name in names:
        with suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


def _join_rendezvous(arguments: argparse.Namespace) -> Rendezvous:
    """Join the other hosts. Raises ValueError if arguments are missing or wrong, or if the rendezvous does not answer."""
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
    """Examine this host, or all hosts of a rendezvous. Return (report, whether this process should print the report).

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
    """Entry point of `mrl doctor`. Returns the exit status. `clock()` returns the time of this host in seconds."""
    begun = time.perf_counter()
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.help:
        sys.stdout.write(USAGE)
        return 0
    wrong = [key for key in arguments.keys if "=" not in key and not key.startswith("~")]
    if wrong:
        sys.stderr.write(f"mrl doctor: {wrong[0]!r} is not of the form KEY=VALUE; see mrl doctor --help\n")
        return 2
    if arguments.point and (given := [*arguments.keys, *arguments.config_dir]):
        sys.stderr.write(
            f"mrl doctor: {given[0]!r} with --point={arguments.point}: the doctor checks the keys of this run of a sweep; leave "
            "out one of the two arguments.\n"
        )
        return 2
    try:
        report, prints_report = examine(arguments, clock)
    except ValueError as error:
        sys.stderr.write(f"mrl doctor: {error}\n")
        return 2
    if prints_report and arguments.json:
        sys.stdout.write(to_json(report.cluster, report.findings) + "\n")
    elif prints_report:
        console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
        summary = summarize(report.cluster, report.findings, len(CHECKS), time.perf_counter() - begun)
        print_findings(console, report.findings, "\n".join([*describe_libraries(report.cluster), summary]))
    return exit_status(report.findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
