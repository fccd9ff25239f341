"""Points that are chosen by what earlier ones achieved (Optuna's tree-structured Parzen estimator), `sweep.trials` of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from mrl.sweep.outcome import Outcome
from mrl.sweep.points import Point, Space

REFUSED = 20  # proposals in a row that cannot run: then the sweep ends


class Trials:
    """A study of Optuna in the sweep's folder, so that a sweep that goes on remembers."""

    def __init__(self, space: Space, folder: Path, maximize: bool, seed: int, check: Callable[[Point], object]) -> None:
        """`check` raises ValueError for a point that cannot run; Optuna hears of it. Raises ValueError without Optuna."""
        try:
            import optuna
        except ImportError:
            raise ValueError("sweep.trials needs Optuna: pip install 'mrl[optuna]', or pip install optuna.") from None
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        folder.mkdir(parents=True, exist_ok=True)
        self.space, self.check = space, check
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
            study_name="sweep",
            direction="maximize" if maximize else "minimize",
            sampler=optuna.samplers.TPESampler(seed=seed),
            load_if_exists=True,
        )
        self._failed = optuna.trial.TrialState.PRUNED  # worse than any that has a value; FAIL it would forget

    def ask(self, index: int) -> Point:
        """The point with this number; raises ValueError when none that can run is found."""
        refusal = None
        for _ in range(REFUSED):
            trial = self._study.ask()
            point = tuple(_line(override, trial) for override in self.space.swept)
            try:
                self.check(point)
            except ValueError as error:
                self._study.tell(trial, state=self._failed)
                refusal = error
                continue
            trial.set_user_attr("point", index)
            return point
        raise ValueError(f"{REFUSED} proposals in a row cannot run; the last one: {refusal}")

    def tell(self, outcome: Outcome) -> None:
        """What a point achieved; heard once for each start of it."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.user_attrs.get("point") == outcome.index and not trial.state.is_finished():
                state = self._failed if outcome.value is None else None
                self._study.tell(trial.number, outcome.value, state=state)


def _line(override: Override, trial: Any) -> str:
    """`key=value`, with a value that Optuna chose."""
    assert override.input_line is not None, "it was parsed from one"
    key, sweep = override.input_line.split("=")[0], override.value()
    if isinstance(sweep, IntervalSweep):
        return f"{key}={trial.suggest_float(key, float(sweep.start or 0), float(sweep.end or 0), log='log' in sweep.tags)!r}"
    if isinstance(sweep, RangeSweep) and all(isinstance(part, int) for part in (sweep.start, sweep.stop, sweep.step)):
        whole = range(int(sweep.start or 0), int(sweep.stop or 0), int(sweep.step))
        return f"{key}={trial.suggest_int(key, whole[0], whole[-1], step=whole.step)}"
    return f"{key}={trial.suggest_categorical(key, list(override.sweep_string_iterator()))}"
