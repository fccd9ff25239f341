"""The training loop. Each step samples and scores responses, estimates advantages, trains, and pushes the new weights.

mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.algorithms.losses import Loss
from mrl.algorithms.parts import Coefficients
from mrl.checkpoint.run_dir import SampleLedger
from mrl.checkpoint.saver import CheckpointSaver
from mrl.controller.loop_parts import (
    LostProcessRecovery,
    Phases,
    PolicyUpdater,
    RolloutSource,
    State,
    StepMetrics,
    StepRecord,
    ValueUpdater,
    WeightPusher,
)
from mrl.core.metrics import Metrics
from mrl.core.run_errors import PreemptedError, ProcessesLostError, UnhealthyRunError
from mrl.core.types import AdvantageResult, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.tracking.tracker import Tracker

if TYPE_CHECKING:  # imports Ray, which `mrl plan` does not need
    from mrl.workers.model_trainers import ColumnPass

logger = logging.getLogger(__name__)

WEIGHT_CHANGING = ("update", "weight_sync")
"""Phases in which the trainers may have newer weights than after the last finished step.

After a failure in one of these phases, the weights of the last finished step may be lost.
"""
ABANDONABLE = ("rollout", "score", "advantage", "evaluate")
"""Phases that a preempted run may abandon, because these phases change no weights."""


@dataclass(frozen=True)
class TrainingSchedule:
    """When the run ends, when it evaluates, and from which step on the actor is trained."""

    max_steps: int  # the run ends after this many steps
    max_prompts: float | None = None  # the run ends when its steps have used this many prompts; None: no limit
    stop_reward: float | None = None  # the run ends if the last `stop_window` steps have at least this mean reward
    stop_window: int = 5  # number of last steps whose mean reward is compared with `stop_reward`
    eval_every: int = 0  # number of steps between two evaluations; 0: evaluate only before and after training
    critic_steps: int = 0  # number of steps at the start of the run that train only the critic

    def is_complete(self, step: int, window: Sequence[float], num_prompts: int = 0) -> bool:
        """Return whether a run ends after `step` steps.

        `window`: mean reward of each of the last `stop_window` steps. `num_prompts`: number of prompts that the steps have used.
        """
        full = len(window) == self.stop_window
        reached = self.stop_reward is not None and full and float(np.mean(window)) >= self.stop_reward
        used_all = self.max_prompts is not None and num_prompts >= self.max_prompts
        return reached or used_all or step >= self.max_steps


def used_prompts(state: Mapping[str, Any]) -> int:
    """Return the number of prompts that a run has used.

    A prompt is used when a step has trained on its group, the rollout filter has rejected the group, or over-sampling has dropped
    the group.
    """
    # drawn: number of drawn rows of each source; waiting: requests for drawn prompts that no step has used yet
    return sum(state["prompts"]["drawn"]) - len(state["rollouts"]["waiting"])


@dataclass
class TrainingProgress:
    """Progress of a run. Checkpoints contain all fields except the last two."""

    step: int = 0  # number of finished steps, which is also the weight version of the trainers
    window: list[float] = field(default_factory=list)  # mean reward of each of the last `stop_window` steps
    before: Metrics = field(default_factory=dict)  # metrics eval/* of the initial weights
    after: Metrics = field(default_factory=dict)  # metrics eval/* of the current weights; {} if they were not evaluated
    step_s: float | None = None  # duration of the last step
    state_after_step: State = field(default_factory=dict)  # the run's state after the last finished step


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run."""

    steps: int
    reward: float  # mean reward of the last `stop_window` steps
    before: Metrics = field(default_factory=dict)  # metrics eval/* of the initial weights
    after: Metrics = field(default_factory=dict)  # metrics eval/* of the final weights


def _check_nothing(step: int, metrics: Metrics) -> None:
    """Do nothing. Default of `check_learning`."""


def _no_data_source(row: int) -> str:
    """Return "". Default of `data_source`."""
    return ""


def _record_nothing(step: int) -> None:
    """Do nothing. Default of `begin_step`."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one policy with RL. mrl.controller.build builds it.

    `train_step` does the work of one step. `trainer._target_` may name a subclass that overrides `train_step`, or a function
    that replaces it. The subclass or the function calls the operations `generate`, `score`, `estimate`, `update` and `push` in
    an order of its own. Each operation measures its duration and collects metrics. `step` writes the ledger. `fit` evaluates,
    writes checkpoints, and recovers from lost processes.
    """

    # a subclass names here the columns that `score` must compute for it
    required_inputs: ClassVar[frozenset[str]] = frozenset()

    prompts: PromptStream
    rollout: RolloutSource
    scorers: Sequence[ColumnPass]  # forward passes; each computes columns [R] or outputs of a teacher
    actor: PolicyUpdater
    critic: ValueUpdater | None
    coefs: Coefficients  # coefficients of the KL penalties and of the entropy bonus
    weight_sync: WeightPusher
    phase: Phases
    tracker: Tracker
    ledger: SampleLedger
    saver: CheckpointSaver
    recover: LostProcessRecovery  # restarts lost processes
    preemption_requested: Callable[[], bool]  # whether the run must stop before the next step
    schedule: TrainingSchedule
    step_function: Callable[[Trainer], None] | None = None  # replaces `train_step`
    data_source: Callable[[int], str] = _no_data_source  # returns the data source of a row of the training prompts
    # health check: gets each finished step; may end the run
    check_learning: Callable[[int, Metrics], None] = _check_nothing
    begin_step: Callable[[int], None] = _record_nothing  # tells processes which step begins; the first step is 1
    placement_metrics: Callable[[], Metrics] = dict  # returns the metrics placement/* for the time since the last call
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    record: StepRecord = field(default_factory=StepRecord)

    def train_step(self) -> None:
        """Do the work of one step: sample N * G responses, train on them, and push the new weights."""
        rollouts = self.generate()
        columns = self.score(rollouts)
        estimates = self.estimate(columns)
        self.begin_writing_samples()
        self.update(rollouts, estimates)
        self.push()

    def generate(self) -> Rollouts:
        """Sample responses to the next prompts with the engines, and score the responses. A step calls this once."""
        self.record.check_generate()
        with self.phase("rollout"):
            rollouts = self.rollout.generate(self.prompts, self.record.step)  # B responses
        self.record.rollouts = rollouts
        self.record.metrics |= rollouts.metrics(version=self.record.step)
        return rollouts

    def score(self, rollouts: Rollouts) -> dict[str, list[Handle]]:
        """Compute the columns [R] that the algorithm needs. Returns name of a column -> handles of its parts.

        Several models may compute parts of one column. Distillation also needs outputs of teachers, which stay in Ray's object
        store until `update`.
        """
        with self.phase("score"):
            # Models with devices of their own compute at the same time.
            calls = [begin(rollouts) for begin in self.scorers]
            computed = [call.result() for call in calls]
        self.record.add_seconds("component_time/score_s", sum(each.seconds for each in computed))
        columns: dict[str, list[Handle]] = {}
        for each in computed:
            for name, parts in each.columns.items():
                columns[name] = [*columns.get(name, []), *parts]
            self.record.teachers |= each.teachers
        return columns

    def estimate(
        self,
        columns: Mapping[str, list[Handle]],
        *,
        rows: NDArray[np.bool_] | None = None,
        advantage: Advantage | None = None,
        loss: Loss | None = None,
    ) -> AdvantageResult:
        """Compute advantages [R] in the rollout worker, which holds the tokens.

        Args:
            columns: result of `score`.
            rows: [B] mask of the responses that get advantages; all other responses are excluded (AdvantageResult.excluded).
                Default: all responses.
            advantage: estimator that replaces algorithm.advantage.
            loss: policy loss that replaces algorithm.loss. Here, only its `precomputed_columns` are computed.
        """
        with self.phase("advantage"):
            kl_coef = self.coefs.current().get("kl_reward", 0.0)
            estimates = self.rollout.estimate(
                columns, kl_coef, self.record.step, rows=rows, advantage=advantage, loss=loss
            )
        self.record.metrics |= estimates.metrics
        self.record.wait_for_samples = None  # samples that were written earlier in the step lack the new columns
        return estimates

    def begin_writing_samples(self) -> None:
        """Let the rollout worker write samples of the step to samples.jsonl while the step continues.

        The samples have the columns of all earlier calls of `estimate`. So a step calls this after its last call of `estimate`,
        and before `update`. `push` calls this if the step did not.
        """
        record = self.record
        if record.rollouts is not None and record.wait_for_samples is None:
            record.wait_for_samples = self.rollout.begin_writing_samples(record.step)

    def update(
        self,
        rollouts: Rollouts,
        estimates: AdvantageResult | None,
        *,
        rows: NDArray[np.bool_] | None = None,
        loss: Loss | None = None,
    ) -> None:
        """Train the critic, if there is one, and the actor. The trainer ranks fetch their rows from Ray's object store.

        The critic is trained only if the estimates have returns. The first `schedule.critic_steps` steps train only the critic.

        Args:
            rollouts: result of `generate`.
            estimates: result of `estimate`, or None for a loss that reads no advantages, such as CrossEntropy.
            rows: [B] mask of the responses on which to train. The loss is averaged over these responses. Default: all responses.
            loss: policy loss that replaces algorithm.loss. The correction, the KL penalty and the entropy bonus still apply,
                unless `loss` is a mrl.algorithms.objective.Objective, which has its own.
        """
        record = self.record
        record.check_update()
        if record.teachers:
            rollouts = replace(rollouts, teachers=record.teachers)
        with self.phase("update"):
            critic, actor = None, None  # critic and actor train at the same time, unless they share devices
            if self.critic and estimates and estimates.has_returns:
                critic = self.critic.begin_update(rollouts, estimates, record.step, rows=rows)
            if (actor_step := record.step - self.schedule.critic_steps) >= 0:
                coefs, update_index = self.coefs.current(), len(record.updates)
                actor = self.actor.begin_update(
                    rollouts, estimates, actor_step, coefs, rows=rows, loss=loss, update_index=update_index
                )
            if self.critic and critic:
                record.critic_updates.append(critic.result())
                record.metrics |= self.critic.metrics(record.critic_updates)
            if actor:
                record.updates.append(actor.result())
                record.metrics |= self.actor.metrics(record.updates)

    def push(self) -> None:
        """Send the actor's weights from the trainer ranks to the engines. A step calls this once, after its updates."""
        self.begin_writing_samples()
        with self.phase("weight_sync"):
            self.record.metrics |= self.weight_sync.push(version=self.record.step + 1)
        self.record.pushed = True

    def data_sources(self, rollouts: Rollouts) -> NDArray[np.str_]:
        """Return, for each response, the data source of its prompt: [B]."""
        return np.array([self.data_source(row) for row in rollouts.rows.tolist()])

    def step(self, step: int) -> StepMetrics:
        """Run the step with index `step` (from 0), and record it in the ledger. Pushes the weights if the step did not do so."""
        self.record.begin(step, self.coefs.metrics())
        if self.step_function:
            self.step_function(self)
        else:
            self.train_step()
        if not self.record.pushed:
            self.push()
        return self._record_step()

    def _record_step(self) -> StepMetrics:
        record, rollouts = self.record, self.record.generated()
        self._finish_samples()
        if record.updates:
            self.coefs.adapt(record.metrics, len(rollouts.groups))
        self.ledger.record(record.step + 1, rollouts, self.prompts.drawn, record.token_weights)
        return StepMetrics.of(record.metrics, self.phase.seconds() | self.placement_metrics())

    def _finish_samples(self) -> None:
        """Wait until the rollout worker has written samples of the step, so that a finished step has its samples.

        If the rollout worker is lost, the step has no samples, but the step is complete. So the error is only logged here: if
        it ended the step, the run would return to the last checkpoint. The next call of the rollout worker raises the error
        again, and then the run recovers.
        """
        self.begin_writing_samples()  # writes again if the step called `estimate` after `push`
        assert self.record.wait_for_samples, "the step has generated responses"
        try:
            self.record.wait_for_samples()
        except ProcessesLostError as error:
            logger.warning("step %d has no samples in samples.jsonl: %s", self.record.step + 1, error)

    def fit(self) -> TrainingResult:
        """Train until the schedule ends, and evaluate before and after training. Recovers from lost processes.

        If the run is preempted, or if the health check ends it, writes a checkpoint and then raises PreemptedError or
        UnhealthyRunError.
        """
        self.progress.state_after_step = self.state_dict()
        while True:
            try:
                return self._train()
            except ProcessesLostError as error:
                weights_intact = self.phase.interrupted not in WEIGHT_CHANGING and not self.record.has_trained
                self.record.reset()
                self.load_state_dict(self.recover(error, self.progress.state_after_step if weights_intact else None))
            except (PreemptedError, UnhealthyRunError):
                self.saver.save_now(self.progress.state_after_step)
                raise

    def _train(self) -> TrainingResult:
        progress, metrics = self.progress, {}
        self.begin_step(progress.step + 1)
        self.weight_sync.push(version=progress.step)
        while True:
            if self._evaluation_due() and not progress.after:
                metrics |= self.evaluate()
            progress.state_after_step = self.state_dict()
            with self.phase("checkpoint"):
                self.saver.between_steps(progress.state_after_step, metrics)
            if self._done():
                break
            if self.preemption_requested():
                raise PreemptedError("preempted")
            start = time.perf_counter()
            result = self.step(progress.step)
            metrics = self._log_step(result, time.perf_counter() - start)
        self.saver.finish(progress.state_after_step)
        reward = float(np.mean(progress.window)) if progress.window else float("nan")
        return TrainingResult(progress.step, reward, progress.before, progress.after)

    def _log_step(self, result: StepMetrics, seconds: float) -> Metrics:
        """Record a finished step and log its metrics. Returns the metrics that do not need the step's duration."""
        progress = self.progress
        progress.step += 1
        self.record.reset()
        progress.window = [*progress.window, result.mean_reward][-self.schedule.stop_window :]
        progress.after, progress.step_s = {}, seconds
        progress.state_after_step = self.state_dict()
        self.begin_step(progress.step + 1)
        self.tracker.log(progress.step, result.with_duration(seconds))
        self.check_learning(progress.step, result.values)
        return dict(result.values)

    def evaluate(self) -> Metrics:
        """Evaluate on held-out prompts, and log the metrics eval/*. Returns {} if the run has no held-out set."""
        with self.phase("evaluate"):
            metrics = self.rollout.evaluate(self.progress.step)
        self.tracker.log(self.progress.step, metrics)
        self.progress.after = metrics
        if self.progress.step == 0:
            self.progress.before = metrics
        return metrics

    def should_abandon_step(self, grace_s: float) -> bool:
        """Return whether a preempted run with `grace_s` seconds left abandons the running step.

        Three conditions must hold. First, the current phase is one of ABANDONABLE. Second, the step has not trained yet. Third,
        the last step took longer than `grace_s` seconds, or no step has finished yet.
        """
        step_s = self.progress.step_s
        may_abandon = self.phase.current in ABANDONABLE and not self.record.has_trained
        return may_abandon and (step_s is None or step_s > grace_s)

    def state_dict(self) -> State:
        """Return a copy of all state of the driver as values that JSON can store. The trainer ranks hold the state of the models.

        A subclass with state of its own adds an entry to the result, and restores it in `load_state_dict`.
        """
        progress = {
            name: value for name, value in vars(self.progress).items() if name not in ("state_after_step", "step_s")
        }
        parts = dict(prompts=self.prompts, rollouts=self.rollout, coefficients=self.coefs)
        return dict(progress=progress, **{name: part.state_dict() for name, part in parts.items()})

    def load_state_dict(self, state: State) -> None:
        """Restore a state of this run, or of another run with the same data. Removes all later steps from the logs."""
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.prompts.load_state_dict(state["prompts"])
        self.rollout.load_state_dict(state["rollouts"])
        self.coefs.load_state_dict(state["coefficients"])
        self.progress.state_after_step = dict(state)
        self.tracker.rewind(self.progress.step, evaluated=bool(self.progress.after))
        self.ledger.rewind(self.progress.step)

    def _evaluation_due(self) -> bool:
        step, every = self.progress.step, self.schedule.eval_every
        return step == 0 or self._done() or (bool(every) and step % every == 0)

    def _done(self) -> bool:
        progress, schedule = self.progress, self.schedule
        num_prompts = 0 if schedule.max_prompts is None else used_prompts(progress.state_after_step)
        return schedule.is_complete(progress.step, progress.window, num_prompts)
