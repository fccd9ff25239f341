"""Hydra sweepers of `mrl train -m`. A sweeper chooses the points: all combinations of values, or the points that Optuna proposes.

A point is one run of a sweep, given by the overrides of the swept keys.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

from mrl.config.search_path import search_path_override
from mrl.sweep.launcher import PointLauncher, validate_point
from mrl.sweep.points import SWEEP_FILE, PointOverrides, grid_points, load_sweep, params_to_overrides, split_overrides

MAX_REJECTED = 20  # the sweep ends after this number of consecutive proposals that cannot run


def register_plugins() -> None:
    """Register the launcher and the sweepers in Hydra. The files in conf/hydra name them.

    Hydra only instantiates plug-ins of the namespace package `hydra_plugins`, so this function adds a module to that package.
    """
    try:
        namespace = importlib.import_module("hydra_plugins")
    except ImportError:  # no other plug-in is installed
        namespace = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
    module = sys.modules["hydra_plugins.mrl"] = ModuleType("hydra_plugins.mrl")
    vars(namespace)["mrl"] = module
    for plugin in (PointLauncher, GridSweeper, OptunaSweeper):
        vars(module)[plugin.__name__] = plugin
        Plugins.instance().register(plugin)


class GridSweeper(Sweeper):
    """Hydra sweeper with the name `grid` (conf/hydra/sweeper/grid.yaml): launches all combinations of the values together."""

    __module__ = "hydra_plugins.mrl"  # see register_plugins

    def __init__(self, params: DictConfig | None = None) -> None:
        """`params`: swept key -> its values. Overrides on the command line take precedence over `params`."""
        self.params = params or {}

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Make the launcher. Hydra calls this; `config` does not contain the values of the swept keys."""
        self._composed = config
        self._search_path = search_path_override(config.hydra.searchpath)
        self._launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep that these overrides define. A failed point does not end the sweep."""
        shared_overrides, swept = split_overrides([*params_to_overrides(self.params, self._search_path), *arguments])
        self._launcher.launch([[*shared_overrides, *point] for point in grid_points(swept)], initial_job_idx=0)


class OptunaSweeper(GridSweeper):
    """Hydra sweeper with the name `optuna` (conf/hydra/sweeper/optuna.yaml): Optuna chooses values based on earlier metrics."""

    __module__ = "hydra_plugins.mrl"

    def __init__(self, n_trials: int, n_jobs: int, params: DictConfig | None = None) -> None:
        """`n_trials`: number of points. `n_jobs`: number of points that are chosen and run together."""
        super().__init__(params)
        self.n_trials, self.n_jobs = n_trials, n_jobs

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep that these overrides define. If the folder has an interrupted sweep, its unfinished points run first."""
        shared_overrides, swept = split_overrides([*params_to_overrides(self.params, self._search_path), *arguments])
        folder = Path(self._composed.hydra.sweep.dir).resolve()
        maximize = self._composed.sweep.direction.name == "maximize"

        def check(point: PointOverrides) -> None:
            own = [each for each in shared_overrides if not each.startswith("run.dir=")]
            validate_point(folder, [*self._search_path, *own, *point])

        proposer = PointProposer(swept, folder, maximize, self._composed.run.seed, check)
        stored = load_sweep(folder).points if (folder / SWEEP_FILE).exists() else ()
        self._launch(proposer, shared_overrides, stored, 0)
        count = len(stored)
        while count < self.n_trials:
            batch = [proposer.propose(count + n) for n in range(min(self.n_jobs, self.n_trials - count))]
            self._launch(proposer, shared_overrides, batch, count)
            count += len(batch)

    def _launch(
        self, proposer: "PointProposer", shared_overrides: PointOverrides, points: Sequence[PointOverrides], first: int
    ) -> None:
        if not points:
            return
        returned = self._launcher.launch([[*shared_overrides, *point] for point in points], initial_job_idx=first)
        for index, result in enumerate(returned, first):
            proposer.report(index, result.return_value if result.status == JobStatus.COMPLETED else None)


class PointProposer:
    """Proposes points with Optuna (tree-structured Parzen estimator).

    Optuna stores its trials (the proposed points) in the sweep's folder, so that a continued sweep knows the metrics of
    earlier points.
    """

    def __init__(
        self,
        swept: Sequence[Override],
        folder: Path,
        maximize: bool,
        seed: int,
        check: Callable[[PointOverrides], object],
    ) -> None:
        """Open the study in `folder`. Raises ValueError if Optuna is not installed.

        `check(point)` must raise ValueError if the point cannot run.
        """
        try:
            import optuna
        except ImportError:
            raise ValueError(
                "hydra/sweeper=optuna needs Optuna: pip install 'mrl[optuna]', or pip install optuna."
            ) from None
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self.swept, self.check = swept, check
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
            study_name="sweep",
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )
        num_trials = len(self._study.get_trials(deepcopy=False))
        # The seed depends on the number of trials, so that a continued study does not repeat its proposals.
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + num_trials)
        # Failed points get the state PRUNED, because Optuna ranks such trials below all trials with a value. Optuna would ignore
        # trials in the state FAIL.
        self._failed = optuna.trial.TrialState.PRUNED

    def propose(self, index: int) -> PointOverrides:
        """Propose the point with this index. Raises ValueError after MAX_REJECTED consecutive proposals that cannot run."""
        refusal = None
        for _ in range(MAX_REJECTED):
            trial = self._study.ask()
            point = tuple(_suggest(override, trial) for override in self.swept)
            try:
                self.check(point)
            except ValueError as error:
                self._study.tell(trial, state=self._failed)
                refusal = error
                continue
            trial.set_user_attr("point", index)
            return point
        raise ValueError(f"{MAX_REJECTED} proposals in a row cannot run; the last one: {refusal}")

    def report(self, index: int, value: float | None) -> None:
        """Report the metric of a point to Optuna, or None if the point failed. Only the first report of a point counts."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.user_attrs.get("point") == index and not trial.state.is_finished():
                self._study.tell(trial.number, value, state=self._failed if value is None else None)


def _suggest(override: Override, trial: Any) -> str:
    """Return the override `key=value` with a value that Optuna suggests."""
    assert override.input_line is not None, "the override was parsed from a text"
    key, sweep = override.input_line.split("=")[0], override.value()
    if isinstance(sweep, IntervalSweep):
        start, end = float(sweep.start or 0), float(sweep.end or 0)
        return f"{key}={trial.suggest_float(key, start, end, log='log' in sweep.tags)!r}"
    if isinstance(sweep, RangeSweep) and all(isinstance(part, int) for part in (sweep.start, sweep.stop, sweep.step)):
        values = range(int(sweep.start or 0), int(sweep.stop or 0), int(sweep.step))
        return f"{key}={trial.suggest_int(key, values[0], values[-1], step=values.step)}"
    return f"{key}={trial.suggest_categorical(key, list(override.sweep_string_iterator()))}"
