"""`mrl train -m`: runs a sweep as a Hydra multirun with the launcher and the sweepers of mrl.sweep."""

import sys
from pathlib import Path

from rich.console import Console

from mrl.commands import train_process
from mrl.config import hydra_entry
from mrl.config.hydra_entry import format_override, is_override_to, override_key
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

USAGE = """usage: mrl train -m KEY=VALUE,VALUE [KEY=VALUE ...]     start a sweep, or continue the one in run.dir
       mrl train -m --table FOLDER                      print the table of a sweep, also while it runs

Trains all combinations of the values, each in run.dir/NUMBER. All points are checked before any of them starts. The table is
also written to run.dir/sweep.csv, and the command of the best point is printed. The same command with the same run.dir
continues with points that are missing or failed. SIGTERM or USR1 ends the sweep with status 75; start it again to continue.

  mrl train -m optim.lr=1e-4,3e-4 run.seed=0,1
  mrl train -m sweep=lr_kl                              a sweep from conf/sweep
  mrl train -m algorithm=grpo,rloo,dapo hydra.launcher.n_jobs=2
  mrl train -m hydra/sweeper=optuna hydra.sweeper.n_trials=20 'optim.lr=tag(log,interval(1e-5,1e-3))'
  mrl train -m cluster=slurm cluster.nodes=2 hydra.launcher.n_jobs=8 optim.lr=1e-6,3e-6 ...     a job array

  values                  1e-4,3e-4   choice(grpo,rloo)   range(1,5); with Optuna interval(0,1), tag(log,interval(1e-6,1e-3))
  sweep.metric            metric that ranks the points, default reward/mean. Averaged over the last 5 steps;
                          for eval/* the last value
  sweep.direction         maximize or minimize
  hydra.launcher.n_jobs   points that run at one time (1)
  hydra.sweeper.params    swept keys and their values, when conf/sweep/NAME.yaml defines the sweep
  hydra.sweeper.n_trials  with hydra/sweeper=optuna: number of points (20), chosen from the metrics of earlier points

Other launchers and sweepers of Hydra work too: hydra/launcher=NAME, hydra/sweeper=NAME.
"""


def main(argv: list[str]) -> int:
    """Entry point; the exit status is 1 if a point failed, and 75 if the sweep was interrupted and can continue."""
    words = [word for word in argv if word not in ("-m", "--multirun")]
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(USAGE)
        return 0
    with hydra_entry.exit_on_user_error():
        if words[:1] == ["--table"]:
            return print_results(load_sweep(Path(words[1] if len(words) == 2 else ".")))
        if flags := [word for word in words if word.startswith("-")]:
            raise ValueError(f"{flags[0]}: a sweep takes overrides only (KEY=VALUE); mrl train -m --help")
        folder, arguments = _sweep_arguments(words)
    register_plugins()
    try:
        status = hydra_entry.run(["--multirun", *arguments], train_process.train)
    except PointFailedError:  # from a sweeper that stops at the first failure
        status = 1
    # Interrupted, or run by another launcher: only mrl's launcher writes the sweep file.
    if status > 1 or not (folder / SWEEP_FILE).exists():
        return status
    return print_results(load_sweep(folder))


def _sweep_arguments(words: list[str]) -> tuple[Path, list[str]]:
    """Return the sweep's folder, and the arguments for Hydra with that folder. Raises ValueError for a wrong argument."""
    arguments = hydra_entry.prepare_arguments(words)
    for_hydra = [line for line in arguments if override_key(line).startswith("hydra")]
    mrl_overrides = [line for line in arguments if line not in for_hydra]
    given_fixed, _ = split_overrides(mrl_overrides)
    fixed = [line for line in given_fixed if not is_override_to(line, "resume", "never")]
    run_dir = hydra_entry.compose_config(fixed).run.dir
    if len(fixed) < len(given_fixed) and Path(run_dir, SWEEP_FILE).exists():
        raise ValueError(
            f"resume=never: {run_dir} holds a sweep; omit resume=never to continue the sweep, or name another run.dir."
        )
    params = hydra_entry.compose_sweeper_params([*fixed, *for_hydra])
    _, swept = split_overrides([*params_to_overrides(params), *mrl_overrides])
    if not swept:
        raise ValueError(
            "nothing is swept: give a key several values (optim.lr=1e-4,3e-4), or name a sweep (sweep=lr_kl)."
        )
    folder = Path(run_dir).resolve()
    given = [line for line in arguments if override_key(line) != "run.dir"]
    return folder, [*given, format_override("run.dir", folder)]


def print_results(sweep: Sweep) -> int:
    """Print the table and write it as CSV; returns 1 if a point failed."""
    results = sweep.results()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(render_table(sweep, results))
    console.print(summary_text(sweep, results), markup=False, soft_wrap=True)
    console.print(f"the table is in {write_csv(sweep, results)}", soft_wrap=True)
    return 1 if any(result.state == PointState.failed for result in results) else 0
