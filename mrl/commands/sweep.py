"""`mrl train -m`: many runs with other values of some keys, checked together, run side by side, compared in a table."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import track

from mrl.commands import hydra_app, training
from mrl.commands.supervised import as_ours
from mrl.config.overrides import sets
from mrl.config.schema import Config
from mrl.core.preemption import REQUEUE
from mrl.launch import slurm_job
from mrl.placement.resource_pools import with_nodes
from mrl.sweep import plan as sweeps
from mrl.sweep import table
from mrl.sweep.array import Array
from mrl.sweep.here import Here
from mrl.sweep.outcome import FAILED, Outcome
from mrl.sweep.plan import Sweep
from mrl.sweep.points import Point, Space, lines_of, split
from mrl.sweep.runner import Runner, unfinished
from mrl.sweep.trials import Trials

USAGE = """usage: mrl train -m KEY=VALUE,VALUE [KEY=VALUE ...]     begin a sweep, or go on with the one in run.dir
       mrl train -m --table FOLDER                      the table of a sweep, also while it runs

Trains every combination of the values, each in run.dir/NUMBER. All are checked before any is started. The table of points
is in run.dir/sweep.csv too; the best one's command is printed. The same line with the same run.dir goes on with
what is missing or has failed; a SIGTERM or USR1 ends it with status 75, to be started again.

  mrl train -m algorithm.lr=1e-4,3e-4 run.seed=0,1
  mrl train -m sweep=lr_kl                              a sweep from conf/sweep
  mrl train -m algorithm=grpo,rloo,dapo sweep.at_once=2
  mrl train -m 'algorithm.lr=tag(log,interval(1e-5,1e-3))' sweep.trials=20
  mrl train -m cluster=slurm cluster.nodes=2 sweep.at_once=8 algorithm.lr=1e-6,3e-6 ...     an array job (docs/slurm.md)

  values           1e-4,3e-4   choice(grpo,rloo)   range(1,5)   interval(0,1) and tag(log,interval(1e-6,1e-3)) with sweep.trials
  sweep.params     key -> values, of a sweep in a file
  sweep.metric     reward/mean unless set: the mean over the last steps. eval/accuracy_sampled: of the last evaluation
  sweep.maximize   true; false: the smallest is the best
  sweep.at_once    points that run at one time; 1 unless set
  sweep.trials     so many points, chosen by what earlier ones achieved (needs Optuna)
"""


def main(argv: list[str]) -> int:
    """Entry point of `mrl train -m`; the exit status is 1 when a point failed, 75 when the sweep was asked to leave."""
    words = [word for word in argv if word not in ("-m", "--multirun")]
    if any(word in ("-h", "--help") for word in words):
        sys.stdout.write(USAGE)
        return 0
    with hydra_app.as_user_error():
        if words[:1] == ["--table"]:
            sweep = sweeps.load(Path(words[1] if len(words) == 2 else "."))
            return _close(sweep, sweep.outcomes())
        if flags := [word for word in words if word.startswith("-")]:
            raise ValueError(f"{flags[0]}: a sweep takes overrides only (KEY=VALUE); mrl train -m --help")
        config, space = _read(words)
        check = _checker(space)
        trials = None
        folder = Path(config.run.dir).resolve()
        if config.sweep.trials:
            trials = Trials(space, folder, config.sweep.maximize, config.run.seed, check)
        sweep = _sweep(config, space, folder)
        nodes = _check_all(sweep, check)
        sweep.write()
        runner = _runner(sweep, replace(config, cluster=replace(config.cluster, nodes=nodes)), trials)
    return _run(runner)


def _read(words: list[str]) -> tuple[Config, Space]:
    """The config as it is without what is swept, and the space."""
    words = hydra_app.checked(hydra_app.with_default_experiment(words))
    for word in words:
        if word.lstrip("+").startswith(("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper")):
            raise ValueError(
                f"{word}: mrl runs sweeps itself; set sweep.at_once, sweep.trials or cluster (mrl train -m --help)."
            )
    given = split(words)
    space = replace(given, fixed=tuple(line for line in given.fixed if not sets(line, "resume", "never")))
    base = hydra_app.composed(space.fixed)
    if space != given and (Path(base.run.dir) / sweeps.NAME).exists():  # heeded here: points may go on
        raise ValueError(
            f"resume=never: {base.run.dir} holds a sweep; leave it out to go on with it, or name another run.dir."
        )
    space = space.and_also(hydra_app.checked(lines_of(base.sweep.params)))
    if not space.swept:
        raise ValueError(
            "nothing is swept: give a key several values (algorithm.lr=1e-4,3e-4), or name a sweep (sweep=lr_kl)."
        )
    return base, space


def _checker(space: Space) -> Callable[[Point], int]:
    def check(point: Point) -> int:
        """How many nodes a job of it has; raises ValueError for what `mrl train` would refuse."""
        config = hydra_app.composed([*space.fixed, *point])
        plan = training.planned(replace(config, run=replace(config.run, dir=str(Path(config.run.dir, "check")))))
        return with_nodes(config.cluster, plan.pools).nodes or 1

    return check


def _sweep(config: Config, space: Space, folder: Path) -> Sweep:
    """What is to be run, or went on before; raises ValueError where the folder holds another sweep."""
    chosen = config.sweep
    points = () if chosen.trials else tuple(space.points())
    wanted = Sweep(folder, f"{config.run.name}-{folder.name}", chosen.metric, chosen.maximize, space.fixed, points)
    if not (folder / sweeps.NAME).exists():
        return wanted
    kept = sweeps.load(folder)
    if other := sweeps.differences(kept, replace(wanted, points=kept.points) if chosen.trials else wanted):
        raise ValueError(f"run.dir={folder}: holds another sweep ({'; '.join(other)}); name another folder.")
    return kept


def _check_all(sweep: Sweep, check: Callable[[Point], int]) -> int:
    """Nodes of the largest point; raises ValueError with everything that is wrong with any of them."""
    wrong, nodes = [], [1]
    for point in track(sweep.points, "checking", transient=True, disable=not sys.stdout.isatty()):
        try:
            nodes.append(check(point))
        except ValueError as error:
            wrong.append(f"  {' '.join(point)}: {error}")
    if wrong:
        raise ValueError(
            "\n".join([f"{len(wrong)} of {len(sweep.points)} points cannot run; none was started", *wrong])
        )
    return max(nodes)


def point_process(sweep: Sweep, index: int) -> subprocess.Popen[bytes]:
    """A point as a process; a terminal's Ctrl-C comes to this process alone, and is passed on once."""
    line = [sys.executable, "-m", "mrl.commands.sweep_point", str(sweep.folder), str(index)]
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=as_ours)


def _runner(sweep: Sweep, config: Config, trials: Trials | None) -> Runner:
    """What runs the points: this machine, or a job of Slurm. Raises ValueError."""
    if not config.cluster.scheduler:
        return Here(sweep, config.sweep.at_once, point_process, trials, config.sweep.trials or 0)
    if trials:
        raise ValueError(
            "sweep.trials: chooses points one by one, and an array is submitted whole; leave out cluster=slurm."
        )

    def submit(indices: Sequence[int]) -> str:
        job = slurm_job.make_array(config.cluster, config.run.name, sweep.folder, indices, config.sweep.at_once)
        return slurm_job.submit(job)

    return Array(sweep, submit, slurm_job.queued)


def _run(runner: Runner) -> int:
    console, said = Console(highlight=False), set()
    with Live(console=console, refresh_per_second=2, transient=True) as live:

        def show(outcomes: Sequence[Outcome]) -> None:
            if console.is_terminal:
                live.update(table.rendered(runner.sweep, outcomes))
            for one in outcomes:
                if not console.is_terminal and (one.index, one.state) not in said:
                    said.add((one.index, one.state))
                    console.print(f"point {one.index} ({' '.join(one.point)}): {one.state}", soft_wrap=True)

        with hydra_app.as_user_error():
            runner.run(show)
    outcomes = runner.outcomes()
    status = _close(runner.sweep, outcomes)
    if runner.asked and unfinished(outcomes):
        sys.stdout.write(f"{runner.left()}\n")
        return REQUEUE
    return status


def _close(sweep: Sweep, outcomes: Sequence[Outcome]) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(table.rendered(sweep, outcomes))
    console.print(table.closing(sweep, outcomes), markup=False, soft_wrap=True)
    console.print(f"the table is in {table.write_csv(sweep, outcomes)}", soft_wrap=True)
    return 1 if any(one.state == FAILED for one in outcomes) else 0
