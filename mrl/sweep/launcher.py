"""Hydra launcher for sweeps of `mrl train`. A point is one run of a sweep: one combination of values.

Points run as processes on this machine, or as tasks of a Slurm job array. A sweeper launches all points together (grid), or one
batch of points after another (optuna). All points of a launch are checked before any of them starts. When the same command with
the same run.dir is started again, it runs the points that failed or have not run yet.
"""

import json
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig
from rich.console import Console
from rich.live import Live
from rich.progress import track

from mrl.config import hydra_entry
from mrl.config.hydra_entry import is_override_to, override_key
from mrl.config.input_names import resolve_inputs
from mrl.config.schema import Config
from mrl.config.search_path import search_path_override
from mrl.controller.memory_check import plan_fitting_run
from mrl.core.run_errors import REQUEUE_STATUS
from mrl.launch import slurm_job
from mrl.launch.supervisor import term_with_parent
from mrl.placement.resource_pools import with_node_count
from mrl.sweep.points import (
    SWEEP_FILE,
    PointOverrides,
    PointResult,
    PointState,
    Sweep,
    differences,
    load_sweep,
    params_to_overrides,
    render_table,
    split_overrides,
    write_status,
)

JOBS_FILE = "jobs.json"  # file in the sweep's folder with the ids of all job arrays that were submitted for the sweep
# A point counts as failed if this number of consecutive polls finds neither a Slurm task nor a status file of the point. One
# poll is not enough, because a shared file system may show a new status file late.
MISSED_POLLS = 3
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # after such a signal, a runner starts no more points
ShowResults = Callable[[Sequence[PointResult]], None]  # shows the states of all points of a sweep to the user


class PointFailedError(RuntimeError):
    """A point of the sweep failed. The message names the point and the reason."""


class PointLauncher(Launcher):
    """Hydra launcher with the name `mrl` (conf/hydra/launcher/mrl.yaml)."""

    __module__ = "hydra_plugins.mrl"  # see register_plugins in mrl/sweep/sweepers.py

    def __init__(self, n_jobs: int = 1) -> None:
        """`n_jobs`: number of points that run at the same time."""
        if n_jobs < 1:
            raise ValueError(f"hydra.launcher.n_jobs={n_jobs}: must be 1 or more.")
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Read the settings of the sweep. Hydra calls this; `config` does not contain the values of the swept keys."""
        self.folder = Path(config.hydra.sweep.dir).resolve()
        params = config.hydra.sweeper.get("params") or {}
        self.search_path = search_path_override(config.hydra.searchpath)
        _, swept = split_overrides([*params_to_overrides(params, self.search_path), *config.hydra.overrides.task])
        self.swept_keys = {override_key(override.input_line or "") for override in swept}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run the points that are not done yet, and return the metric of each point. Raises ValueError if a point cannot run.

        Raises SystemExit after a dry run, and if a signal arrives before all points have ended.

        Args:
            job_overrides: all overrides of each point.
            initial_job_idx: index of the first point.
        """
        shared_overrides, points = self._split_jobs(job_overrides)
        indices = range(initial_job_idx, initial_job_idx + len(points))
        sweep, nodes = check_sweep(self.folder, shared_overrides, points, initial_job_idx)
        config = hydra_entry.compose_config([*shared_overrides, *points[0]])
        config = replace(config, cluster=replace(config.cluster, nodes=nodes))
        if config.cluster.scheduler and config.cluster.dry_run:
            commands = [f"# point {index}: {sweep.command(index)}" for index in indices]
            sys.stdout.write("\n".join([_array(config, sweep, indices, self.n_jobs).script, *commands, ""]))
            raise SystemExit(0)  # no point has run, so a sweeper has nothing to continue with
        sweep.write()
        runner = self._runner(sweep, config, indices)
        run_and_show(runner)
        if runner.signals and not all(result.state.ended for result in runner.results()):
            sys.stdout.write(f"{runner.interruption_message()}\n")
            raise SystemExit(REQUEUE_STATUS)
        return [_job_return(result) for result in runner.results()]

    def _split_jobs(self, job_overrides: Sequence[Sequence[str]]) -> tuple[PointOverrides, tuple[PointOverrides, ...]]:
        """Return (the overrides that all points share, the overrides of each point).

        Drops `run.dir`, because each point has its own run directory. Also drops `resume=never`, because a point must be able to
        resume. With `resume=never`, the command has already checked that the folder contains no sweep.
        """
        jobs = [
            [
                each
                for each in hydra_entry.check_overrides([*self.search_path, *job])
                if not is_override_to(each, "resume", "never")
            ]
            for job in job_overrides
        ]
        shared_overrides = tuple(each for each in jobs[0] if override_key(each) not in {*self.swept_keys, "run.dir"})
        points = tuple(tuple(each for each in job if override_key(each) in self.swept_keys) for job in jobs)
        return shared_overrides, points

    def _runner(self, sweep: Sweep, config: Config, indices: range) -> "Runner":
        if not config.cluster.scheduler:
            return LocalRunner(sweep, indices, self.n_jobs, start_point)

        def submit(tasks: Sequence[int]) -> str:
            return slurm_job.submit(_array(config, sweep, tasks, self.n_jobs))

        return SlurmRunner(sweep, indices, submit, slurm_job.queued_tasks)


def _array(config: Config, sweep: Sweep, tasks: Sequence[int], n_jobs: int) -> slurm_job.Job:
    """Return the job array that runs points of a sweep, `n_jobs` at the same time."""
    return slurm_job.make_array(config.cluster, config.run.name, sweep.folder, tasks, n_jobs)


def check_sweep(
    folder: Path, shared_overrides: PointOverrides, points: tuple[PointOverrides, ...], first: int
) -> tuple[Sweep, int]:
    """Check all points, and return (the sweep with these points, the largest number of nodes of a point).

    Raises ValueError if a point cannot run; the message lists the mistakes of all points. Also raises ValueError if `folder`
    contains another sweep.

    Args:
        folder: folder of the sweep.
        shared_overrides: overrides that all points share.
        points: overrides of each point.
        first: index, in the sweep, of points[0]. The sweep keeps its points with smaller indices.
    """
    mistakes, nodes = [], [1]
    for point in track(points, "checking", transient=True, disable=not sys.stdout.isatty()):
        try:
            nodes.append(validate_point(folder, [*shared_overrides, *point]))
        except ValueError as error:
            mistakes.append(f"  {' '.join(point)}: {error}")
    if mistakes:
        raise ValueError(
            "\n".join([f"{len(mistakes)} of {len(points)} points cannot run, so no point was started", *mistakes])
        )
    config = hydra_entry.compose_config([*shared_overrides, *points[0]])
    return extend_sweep(folder, config, shared_overrides, points, first), max(nodes)


def validate_point(folder: Path, overrides: Sequence[str]) -> int:
    """Check one point as `mrl train` would, and return the number of nodes of its job.

    Raises ValueError if the point cannot run.
    """
    config = resolve_inputs(hydra_entry.compose_config(overrides), weights=False)
    plan = plan_fitting_run(replace(config, run=replace(config.run, dir=str(folder / "check"))))
    return with_node_count(config.cluster, plan.pools).nodes or 1


def extend_sweep(
    folder: Path, config: Config, shared_overrides: PointOverrides, points: tuple[PointOverrides, ...], first: int
) -> Sweep:
    """Return the sweep in `folder`, with `points` as its points from index `first` on.

    If the stored sweep has more points, the result is the stored sweep. Raises ValueError if `folder` contains another sweep.
    """
    stored = load_sweep(folder) if (folder / SWEEP_FILE).exists() else None
    earlier = stored.points[:first] if stored else ()
    maximize = config.sweep.direction == "maximize"
    wanted = Sweep(
        folder, f"{config.run.name}-{folder.name}", config.sweep.metric, maximize, shared_overrides, (*earlier, *points)
    )
    if stored is None:
        return wanted
    if different := differences(stored, wanted):
        raise ValueError(f"run.dir={folder}: contains another sweep ({'; '.join(different)}); name another folder.")
    return max(wanted, stored, key=lambda sweep: len(sweep.points))


def start_point(sweep: Sweep, index: int) -> subprocess.Popen[bytes]:
    """Start the process of a point in its own process group. So Ctrl-C in a terminal reaches only the runner."""
    command = [sys.executable, "-P", "-m", "mrl.sweep.points", str(sweep.folder), str(index)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=term_with_parent)


def _job_return(result: PointResult) -> JobReturn:
    """Return the result of a point as the type that Hydra's sweepers expect."""
    returned = JobReturn(overrides=result.point, working_dir=str(result.folder))
    failed = result.state == PointState.failed
    returned.status = JobStatus.FAILED if failed else JobStatus.COMPLETED
    returned.return_value = (
        PointFailedError(f"point {result.index} failed, {result.reason}") if failed else result.value
    )
    return returned


class Runner(ABC):
    """Starts the given points that have not succeeded yet, and polls them until `advance` returns False."""

    poll_s: float  # seconds between two polls

    def __init__(self, sweep: Sweep, indices: Sequence[int]) -> None:
        self.sweep, self.indices = sweep, indices
        self.signals: list[int] = []  # signals that this process has received

    def run(self, show: ShowResults) -> None:
        """Run the points. After each poll, `show` is called with the states of all points of the sweep."""
        former = {signum: signal.signal(signum, self._handle_signal) for signum in SIGNALS}
        try:
            self.begin()
            while self.advance():
                time.sleep(self.poll_s)
                self.poll()
                show(self.sweep.results())
        finally:
            self.close()
            for signum, handler in former.items():
                signal.signal(signum, handler)

    def results(self) -> list[PointResult]:
        """Return the states of the points that this runner runs."""
        return [self.sweep.result(index) for index in self.indices]

    @abstractmethod
    def interruption_message(self) -> str:
        """Return a message for the user: what happens to unfinished points after a signal."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare or submit the points."""

    @abstractmethod
    def advance(self) -> bool:
        """Start waiting points if the runner has room for them. Return whether the runner must poll again."""

    @abstractmethod
    def poll(self) -> None:
        """Find out which points have ended, and write the status files that are missing."""

    @abstractmethod
    def forward_signal(self, signum: int) -> None:
        """Forward a signal to the points."""

    @abstractmethod
    def close(self) -> None:
        """End processes that must not outlive this process."""

    def _handle_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signum)
        self.forward_signal(signum)


class LocalRunner(Runner):
    """Runs `n_jobs` points at the same time as processes on this machine.

    The runner forwards signals to these processes. When the runner ends, it terminates the processes that still run.
    """

    poll_s = 0.5

    def __init__(
        self,
        sweep: Sweep,
        indices: Sequence[int],
        n_jobs: int,
        start: Callable[[Sweep, int], subprocess.Popen[bytes]],
    ) -> None:
        """`start(sweep, index)` starts the process of a point."""
        super().__init__(sweep, indices)
        self.n_jobs, self.start = n_jobs, start
        self._queue: list[int] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        self._queue = [result.index for result in self.results() if result.state != PointState.done]

    def advance(self) -> bool:
        while len(self._running) < self.n_jobs and not self.signals and self._queue:
            index = self._queue.pop(0)
            self._running[index] = self.start(self.sweep, index)
        return bool(self._running)

    def poll(self) -> None:
        for index in [index for index, process in self._running.items() if process.poll() is not None]:
            status = self._running.pop(index).returncode
            if status != REQUEUE_STATUS and not self.sweep.result(index).state.ended:
                # The process was killed before it could write its status.
                write_status(self.sweep.point_folder(index), status if status >= 0 else 128 - status, 0.0)

    def forward_signal(self, signum: int) -> None:
        for process in self._running.values():
            process.send_signal(signum)

    def interruption_message(self) -> str:
        begun = any(result.steps and not result.state.ended for result in self.results())
        saved = "points that had begun training have saved checkpoints; " if begun else ""
        return f"{saved}the same command continues the sweep"

    def close(self) -> None:
        for process in self._running.values():
            process.terminate()


class SlurmRunner(Runner):
    """Submits points as a job array. Points that already wait or run in an earlier array of the sweep are not submitted again.

    The jobs continue after this process ends. The state of a point is read from its folder, because Slurm does not know why a
    task ended.
    """

    poll_s = 5.0

    def __init__(
        self,
        sweep: Sweep,
        indices: Sequence[int],
        submit: Callable[[Sequence[int]], str],
        queued_tasks: Callable[[str], set[int] | None],
    ) -> None:
        """Make a runner for some points of a sweep.

        Args:
            sweep: the sweep.
            indices: indices of the points to run.
            submit: submits the points with the given indices as a job array, and returns the id of the array.
            queued_tasks: returns the indices of the waiting and running points of a job array, or None if Slurm does not
                answer.
        """
        super().__init__(sweep, indices)
        self.submit, self.queued_tasks = submit, queued_tasks
        self._jobs: list[str] = []
        # index of a point -> number of consecutive polls in which Slurm had no task for the point
        self._missed_polls: dict[int, int] = {}

    def interruption_message(self) -> str:
        jobs = " ".join(self._jobs)
        return (
            f"the jobs continue; mrl train -m --table {self.sweep.folder} shows their state, scancel {jobs} ends them"
        )

    def begin(self) -> None:
        path = self.sweep.folder / JOBS_FILE
        self._jobs = json.loads(path.read_text()) if path.exists() else []
        queued = self._queued()
        if queued is None:
            raise ValueError(
                f"squeue does not answer, so it is unknown whether jobs {self._jobs} of this sweep still run; try again later."
            )
        wanted = [one.index for one in self.results() if one.state != PointState.done and one.index not in queued]
        for index in wanted:
            self.sweep.clear_status(index)
        if wanted:
            self._jobs.append(self.submit(wanted))
            path.write_text(json.dumps(self._jobs))

    def advance(self) -> bool:
        return not self.signals and not all(result.state.ended for result in self.results())

    def poll(self) -> None:
        queued = self._queued()
        if queued is None:
            return
        for result in self.results():
            missed = not result.state.ended and result.index not in queued
            self._missed_polls[result.index] = self._missed_polls.get(result.index, 0) + 1 if missed else 0
            if self._missed_polls[result.index] == MISSED_POLLS:
                result.folder.mkdir(exist_ok=True)
                logs = f"{result.folder}/logs and {self.sweep.folder}/logs"
                with (result.folder / "terminal.log").open("a") as log:
                    log.write(f"mrl: the job of this point ended without an exit status; see {logs}\n")
                write_status(result.folder, 1, 0.0)

    def forward_signal(self, signum: int) -> None:
        """Do nothing: the jobs continue."""

    def close(self) -> None:
        """Do nothing: the jobs continue after this process ends."""

    def _queued(self) -> set[int] | None:
        tasks = [self.queued_tasks(job) for job in self._jobs]
        return None if None in tasks else {index for queued in tasks for index in queued or ()}


def run_and_show(runner: Runner) -> None:
    """Run the points and show their states. A terminal shows a live table; other output gets one line for each change."""
    console, shown = Console(highlight=False), set()
    with Live(console=console, refresh_per_second=2, transient=True) as live:

        def show(results: Sequence[PointResult]) -> None:
            if console.is_terminal:
                live.update(render_table(runner.sweep, results))
                return
            for result in results:
                if (result.index, result.state) not in shown:
                    shown.add((result.index, result.state))
                    console.print(f"point {result.index} ({' '.join(result.point)}): {result.state}", soft_wrap=True)

        runner.run(show)
