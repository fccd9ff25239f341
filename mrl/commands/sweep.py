"""`mrl train -m`: runs a sweep as a Hydra multirun with the launcher and the sweepers of mrl.sweep."""

import sys
from pathlib import Path

from rich.console import Console

from mrl.commands import train_process
from mrl.config import hydra_entry
from mrl.config.hydra_entry import format_override, is_override_to, override_key
from mrl.config.search_path import SEARCH_PATH, with_absolute_search_path
from mrl.sweep.launcher import PointFailedError
from mrl.sweep.points import (
    SWEEP_FILE,
    PointState,
    Sweep,
    load_sweep,
    params_to_overrides,
    render_table,
    split_overrides,
    summary_text,
    write_csv,
)
from mrl.sweep.sweepers import register_plugins

USAGE = """usage: mrl train -m KEY=VALUE,VALUE [KEY=VALUE ...]     start a sweep, or continue the sweep in run.dir
       mrl train -m --table FOLDER                      print the result table of a sweep, even while the sweep runs, and write
                                                        it to FOLDER/sweep.csv

A sweep trains all combinations of the given values. Each combination is called a point and has its own folder run.dir/INDEX.
All points are checked before any of them starts; with Optuna, this holds for each batch of points. At the end, mrl prints a
result table and a command that trains the best point again. It also writes the table to run.dir/sweep.csv.

To continue an interrupted sweep, run the same command with the same run.dir. It runs the points that failed or have not ended.
SIGTERM or SIGUSR1 interrupts a sweep: the command ends with status 75, and jobs in Slurm continue.

  mrl train -m optim.lr=1e-4,3e-4 run.seed=0,1
  mrl train -m sweep=lr_kl                              the sweep in conf/sweep/lr_kl.yaml
  mrl train -m algorithm=grpo,rloo,dapo hydra.launcher.n_jobs=2
  mrl train -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'optim.lr=tag(log,interval(1e-5,1e-3))'
  mrl train -m cluster=slurm cluster.nodes=2 hydra.launcher.n_jobs=8 optim.lr=1e-6,3e-6 ...     a job array; with --dry-run
                                                        it only prints the script of the job array

  VALUE,VALUE             several values of a key, such as 1e-4,3e-4 or choice(grpo,rloo) or range(1,5). With Optuna also
                          interval(0,1) or tag(log,interval(1e-6,1e-3)).
  sweep.metric            metric that ranks the points. Default: reward/mean. The metric is averaged over the last 5 steps; for
                          eval/*, only the last evaluation counts.
  sweep.direction         maximize or minimize
  hydra.launcher.n_jobs   number of points that run at the same time. Default: 1.
  hydra.sweeper.params    swept keys and their values, for a sweep that a file conf/sweep/NAME.yaml defines
  hydra.sweeper.n_trials  number of points with hydra/sweeper=optuna. Default: 20. Optuna uses the metrics of earlier points to
                          choose the values of later points.

Other launchers and sweepers for Hydra also work: hydra/launcher=NAME, hydra/sweeper=NAME.
"""


def main(argv: list[str]) -> int:
    """Entry point. Returns the exit status: 1 if a point failed, 75 if the sweep was interrupted and can continue."""
    words = [word for word in argv if word not in ("-m", "--multirun")]
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(USAGE)
        return 0
    with hydra_entry.exit_on_user_error():
        if words[:1] == ["--table"]:
            return print_results(load_sweep(Path(words[1] if len(words) == 2 else ".")))
        words = with_absolute_search_path(words)
        if flags := [word for word in words if word.startswith("-")]:
            raise ValueError(f"{flags[0]}: a sweep only takes arguments of the form KEY=VALUE; see mrl train -m --help")
        folder, arguments = _sweep_arguments(words)
    register_plugins()
    try:
        status = hydra_entry.run(["--multirun", *arguments], train_process.train)
    except PointFailedError:  # raised by a sweeper that stops at the first failure
        status = 1
    # An interrupted sweep gets no table. A sweep of another launcher gets none either: only mrl's launcher writes SWEEP_FILE.
    if status > 1 or not (folder / SWEEP_FILE).exists():
        return status
    return print_results(load_sweep(folder))


def _sweep_arguments(words: list[str]) -> tuple[Path, list[str]]:
    """Return (the sweep's folder, the arguments for Hydra). Raises ValueError for a wrong argument."""
    arguments = hydra_entry.prepare_arguments(words)
    for_hydra = [each for each in arguments if override_key(each).startswith("hydra")]
    mrl_overrides = [each for each in arguments if each not in for_hydra]
    given_shared_overrides, _ = split_overrides(mrl_overrides)
    shared_overrides = [each for each in given_shared_overrides if not is_override_to(each, "resume", "never")]
    search_path = [each for each in for_hydra if override_key(each) == SEARCH_PATH]
    run_dir = hydra_entry.compose_config([*search_path, *shared_overrides]).run.dir
    if len(shared_overrides) < len(given_shared_overrides) and Path(run_dir, SWEEP_FILE).exists():
        raise ValueError(
            f"resume=never: {run_dir} contains a sweep; omit resume=never to continue the sweep, or name another run.dir."
        )
    params = hydra_entry.compose_sweeper_params([*shared_overrides, *for_hydra])
    _, swept = split_overrides([*params_to_overrides(params, search_path), *mrl_overrides])
    if not swept:
        raise ValueError(
            "no key has several values; give several values (optim.lr=1e-4,3e-4), or name a sweep in conf/sweep (sweep=lr_kl)."
        )
    folder = Path(run_dir).resolve()
    given = [each for each in arguments if override_key(each) != "run.dir"]
    return folder, [*given, format_override("run.dir", folder)]


def print_results(sweep: Sweep) -> int:
    """Print the result table and write it to a CSV file. Return the exit status, which is 1 if a point failed."""
    results = sweep.results()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(render_table(sweep, results))
    console.print(summary_text(sweep, results), markup=False, soft_wrap=True)
    console.print(f"the table is in {write_csv(sweep, results)}", soft_wrap=True)
    return 1 if any(result.state == PointState.failed for result in results) else 0
