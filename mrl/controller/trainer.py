"""The training loop. Each step samples and rewards responses, estimates advantages, trains, and pushes the new weights."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.parts import Coefficients
from mrl.checkpoint.run_dir import SampleLedger
from mrl.checkpoint.saver import CheckpointSaver
from mrl.core.metrics import Metrics
from mrl.core.run_errors import PreemptedError, ProcessesLostError, UnhealthyRunError
from mrl.core.types import AdvantageResult, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.tracking.tracker import Tracker
from parallel.spans import record

State = dict[str, Any]  # plain JSON values


class RolloutSource(Protocol):
    """Samples and scores responses. Their tokens stay in Ray's object store and never reach the driver."""

    def generate(self, prompts: PromptStream, step: int) -> Rollouts:
        """Return the B scored responses that the step trains."""
        ...

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> AdvantageResult:
        """Compute advantages [R] of the responses that the last `generate` returned.

        The advantages depend on the rewards of the responses, and on `columns`: name of a column [R] -> handles of its values.
        """
        ...

    def evaluate(self, temperature: float) -> Metrics:
        """Return the mean reward on each held-out set, by name of the set. The name "" stands for all held-out prompts."""
        ...

    def state_dict(self) -> State:
        """Return the prompts that were drawn and that no step has trained yet."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Restore a state that `state_dict` returned."""
        ...


class PolicyUpdater(Protocol):
    """Optimizer steps of the actor."""

    def update(self, rollouts: Rollouts, advantages: AdvantageResult, step: int, coefs: Mapping[str, float]) -> Metrics:
        """Train on the rollouts. `step` is the number of earlier steps of the run that trained the actor.

        `coefs`: name of a term of the loss (kl_loss, entropy) -> its coefficient.
        """
        ...

    def token_weights(self, rollouts: Rollouts, advantages: AdvantageResult) -> Sequence[NDArray[np.float64]]:
        """Return an array [B] for each optimizer step of `update`: the loss weight of every token of each response."""
        ...


class ValueUpdater(Protocol):
    """Optimizer steps of the critic."""

    def update(self, rollouts: Rollouts, advantages: AdvantageResult, step: int) -> Metrics:
        """Train on the returns of the rollouts."""
        ...


class WeightPusher(Protocol):
    """Weight sync from the actor to all engines."""

    def push(self, version: int) -> Metrics:
        """Push the actor's weights, and return when every engine serves them as `version`."""
        ...


class LostProcessRecovery(Protocol):
    """Restarts lost processes."""

    initial_state: State  # state before the first step, for a run without a checkpoint

    def __call__(self, error: ProcessesLostError, state_after_step: State | None) -> State:
        """Restart the lost processes. Returns the state of the run that matches the trainers' weights.

        `state_after_step` is the state after the last finished step, or None if the weights of that step may be lost. If
        `state_after_step` is not None and the trainers are alive, it is returned. Otherwise the trainers load the last
        checkpoint, and the state in that checkpoint is returned. Raises an error if the run cannot continue.
        """
        ...


WEIGHT_CHANGING = ("update", "weight_sync")
"""Phases in which the trainers may have newer weights than after the last finished step.

After a failure in one of these phases, the weights of the last finished step may be lost.
"""
ABANDONABLE = ("rollout", "score", "advantage", "evaluate")
"""Phases that a preempted run may abandon, because these phases change no weights."""


@dataclass(frozen=True)
class TrainingSchedule:
    """When the run ends, when it evaluates, and when the actor begins to learn."""

    max_steps: int  # the run ends after this many steps
    stop_reward: float | None = None  # the run ends if the last `stop_window` steps have at least this mean reward
    stop_window: int = 5  # number of steps
    eval_every: int = 0  # steps; 0: evaluate only before and after training
    critic_steps: int = 0  # number of steps at the start of the run that train only the critic

    def is_complete(self, step: int, window: Sequence[float]) -> bool:
        """Return whether a run ends after `step` steps. `window`: mean reward of each of the last `stop_window` steps."""
        full = len(window) == self.stop_window
        reached = self.stop_reward is not None and full and float(np.mean(window)) >= self.stop_reward
        return reached or step >= self.max_steps


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


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step."""

    values: Metrics  # all metrics by name, except those that need the duration of the step
    mean_reward: float
    num_tokens: float  # tokens that the policy sampled
    num_samples: float  # responses
    worker_s: float  # seconds spent in engines, Megatron and rewards; the rest of the step is spent in the controller

    @classmethod
    def of(cls, values: Metrics) -> Self:
        """Return the StepMetrics with these `values`. The other fields are taken from `values`."""
        spent = ("engine", "sync_engine", "megatron", "critic", "reward")
        worker_s = values["time/score_s"] + sum(values.get(f"spent/{name}_s", 0.0) for name in spent)
        return cls(values, values["reward/mean"], values["rollout/tokens"], values["rollout/samples"], worker_s)

    def with_duration(self, seconds: float) -> Metrics:
        """Return all metrics, including those that need the duration of the whole step."""
        return self.values | {
            "time/step_s": seconds,
            "spent/controller_s": seconds - self.worker_s,
            "throughput/tokens_per_s": self.num_tokens / seconds,
            "throughput/samples_per_s": self.num_samples / seconds,
        }


def _check_nothing(step: int, metrics: Metrics) -> None:
    """Stand-in for a health check in a run without one."""


def _record_nothing(step: int) -> None:
    """Stand-in for `begin_step` in a run that records neither a timeline nor profiles."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one policy with RL. mrl.controller.build builds it."""

    prompts: PromptStream
    rollout: RolloutSource
    # Forward passes. Each computes one or several columns: name of a column [R] -> handles of its parts.
    scorers: Sequence[Callable[[Rollouts], Mapping[str, list[Handle]]]]
    actor: PolicyUpdater
    critic: ValueUpdater | None
    coefs: Coefficients  # coefficients of the KL penalties and of the entropy bonus
    weight_sync: WeightPusher
    phase: "Phases"
    tracker: Tracker
    ledger: SampleLedger
    saver: CheckpointSaver
    recover: LostProcessRecovery  # restarts lost processes
    preemption_requested: Callable[[], bool]  # whether the run must stop before the next step
    schedule: TrainingSchedule
    check_learning: Callable[[int, Metrics], None] = (
        _check_nothing  # health check: gets each finished step; may end the run
    )
    begin_step: Callable[[int], None] = _record_nothing  # tells all processes which step begins; the first step is 1
    placement_metrics: Callable[[], Metrics] = dict  # returns the metrics placement/* for the time since the last call
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def step(self, step: int) -> StepMetrics:
        """Run the step with index `step`, from 0: sample N * G responses, train on them, and push the new weights."""
        with self.phase("rollout"):  # engines sample responses and rewards score them
            rollouts = self.rollout.generate(self.prompts, step)  # B = N * G responses
        metrics = rollouts.metrics(version=step)

        with self.phase("score"):  # trainer ranks compute the log-probabilities and values [R] that the algorithm needs
            columns = {name: parts for compute in self.scorers for name, parts in compute(rollouts).items()}

        with self.phase("advantage"):  # the rollout worker, which holds the tokens, computes advantages [R]
            coefs = self.coefs.current()
            estimates = self.rollout.estimate(columns, coefs.get("kl_reward", 0.0), step)
        metrics |= {**estimates.metrics, **self.coefs.metrics()}

        token_weights: Sequence[NDArray[np.float64]] = ()
        with self.phase("update"):  # trainer ranks fetch their rows and train
            if self.critic:
                metrics |= self.critic.update(rollouts, estimates, step)
            if (actor_step := step - self.schedule.critic_steps) >= 0:
                metrics |= self.actor.update(rollouts, estimates, actor_step, coefs)
                token_weights = self.actor.token_weights(rollouts, estimates)
                self.coefs.adapt(metrics, len(rollouts.groups))

        with self.phase("weight_sync"):  # trainer ranks send the shards of their weights to the engines
            metrics |= self.weight_sync.push(version=step + 1)

        self.ledger.record(step + 1, rollouts, self.prompts.drawn, token_weights)
        return StepMetrics.of(metrics | self.phase.seconds() | self.placement_metrics())

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
                weights_intact = self.phase.interrupted not in WEIGHT_CHANGING
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
            metrics = self._finish_step(result, time.perf_counter() - start)
        self.saver.finish(progress.state_after_step)
        reward = float(np.mean(progress.window)) if progress.window else float("nan")
        return TrainingResult(progress.step, reward, progress.before, progress.after)

    def _finish_step(self, result: StepMetrics, seconds: float) -> Metrics:
        """Record a finished step and log its metrics. Returns the metrics that do not need the step's duration."""
        progress = self.progress
        progress.step += 1
        progress.window = [*progress.window, result.mean_reward][-self.schedule.stop_window :]
        progress.after, progress.step_s = {}, seconds
        progress.state_after_step = self.state_dict()
        self.begin_step(progress.step + 1)
        self.tracker.log(progress.step, result.with_duration(seconds))
        self.check_learning(progress.step, result.values)
        return dict(result.values)

    def evaluate(self) -> Metrics:
        """Measure and log the mean reward on held-out prompts, at temperature 1 and with greedy decoding.

        Returns {} if the run has no held-out set.
        """
        rewards: Metrics = {}
        with self.phase("evaluate"):
            for name, temperature in {"eval/reward_sampled": 1.0, "eval/reward_greedy": 0.0}.items():
                scores = self.rollout.evaluate(temperature)
                rewards |= {f"{name}_{test_set}" if test_set else name: score for test_set, score in scores.items()}
        self.tracker.log(self.progress.step, rewards)
        self.progress.after = rewards
        if self.progress.step == 0:
            self.progress.before = rewards
        return rewards

    def should_abandon_step(self, grace_s: float) -> bool:
        """Return whether a preempted run with `grace_s` seconds left abandons the running step.

        Two conditions must hold. First, the current phase is one of ABANDONABLE. Second, the last step took longer than
        `grace_s` seconds, or no step has finished yet.
        """
        step_s = self.progress.step_s
        return self.phase.current in ABANDONABLE and (step_s is None or step_s > grace_s)

    def state_dict(self) -> State:
        """Return all state of the driver as plain values. The trainer ranks hold the state of the models."""
        progress = {
            name: value for name, value in vars(self.progress).items() if name not in ("state_after_step", "step_s")
        }
        parts = dict(prompts=self.prompts, rollouts=self.rollout, coefficients=self.coefs)
        return dict(progress=progress, **{name: part.state_dict() for name, part in parts.items()})

    def load_state_dict(self, state: State) -> None:
        """Restore a state of this run, or of another run with the same data. The logs lose all steps after this state."""
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
        return self.schedule.is_complete(self.progress.step, self.progress.window)


class Phases:
    """Measures the duration of each phase of a step, and records which phase is running or was interrupted."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.interrupted: str | None = None  # the phase that is running, or that an exception has ended
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, since = time.time(), time.perf_counter()
        self.current = self.interrupted = name
        try:
            yield
            self.interrupted = None
        finally:
            self.current = None
            seconds = time.perf_counter() - since
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            record(name, "phase", start, seconds)  # the timeline has the same number as the metric

    def seconds(self) -> Metrics:
        """Return the metrics time/<phase>_s for the time since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
