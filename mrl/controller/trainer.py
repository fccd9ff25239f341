"""THE loop: prompts -> rollouts and rewards -> scores -> advantages -> updates -> weight sync, once per step."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.kl import KLControl
from mrl.checkpoint.sample_ledger import SampleLedger
from mrl.checkpoint.saver import CheckpointSaver
from mrl.core.errors import PreemptedError, ProcessesLostError
from mrl.core.types import AdvantageResult, Handle, Rollouts
from mrl.data.prompts import PromptStream
from mrl.tracking.tracker import Tracker
from mrl.weight_sync.syncer import WeightSyncer

# FROM: The phases of a step: who uses the hardware now, and for how long.

Metrics = dict[str, float]
State = dict[str, Any]  # plain values, as JSON has them


class Generator(Protocol):
    """Samples and scores responses where they stay; tokens never come to the driver."""

    def generate(self, prompts: PromptStream, step: int) -> Rollouts: ...

    def estimate(self, columns: Mapping[str, list[Handle]], kl_coef: float, step: int) -> AdvantageResult: ...

    def evaluate(self, temperature: float) -> Metrics: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...


class Actor(Protocol):
    """The policy: optimizer steps on a batch."""

    def update(self, rollouts: Rollouts, estimates: AdvantageResult, step: int, kl_coef: float) -> Metrics: ...

    def token_weights(self, rollouts: Rollouts, estimates: AdvantageResult) -> Sequence[NDArray[np.float64]]: ...


class Critic(Protocol):
    """The value function: optimizer steps on a batch."""

    def update(self, rollouts: Rollouts, estimates: AdvantageResult, step: int) -> Metrics: ...


class Recovery(Protocol):
    """Brings back processes that were lost."""

    initial: State  # of a run that begins

    def __call__(self, error: ProcessesLostError, boundary: State | None) -> State:
        """Returns the state that the trainers' weights belong to now: `boundary`, if it is given and they live, or the last
        checkpoint's. Raises the error, or another, where the run cannot go on."""
        ...


CHANGING = ("update", "weight_sync")
"""Phases after which, cut short, the trainers may no longer hold the weights that the step began with."""
ABANDONED = ("rollout", "score", "advantage", "evaluate")
"""Phases that a run in a hurry leaves as they are."""


@dataclass(frozen=True)
class TrainingSchedule:
    """When the loop ends, when it looks at held-out problems, and when the actor begins to learn."""

    max_steps: int
    stop_reward: float | None = None  # mean reward over the last `stop_window` steps that ends the run
    stop_window: int = 5
    eval_every: int = 0  # steps; 0: before and after only
    critic_steps: int = 0  # first steps, in which only the critic learns


@dataclass
class TrainingProgress:
    """How far a run has come."""

    step: int = 0  # the trainers hold the weights of so many steps
    window: list[float] = field(default_factory=list)  # mean rewards of the last steps
    before: Metrics = field(default_factory=dict)  # eval/* of the weights the run started from
    after: Metrics = field(default_factory=dict)  # eval/* of the current weights, once they are measured
    step_s: float | None = None  # that the last step took
    boundary: State = field(default_factory=dict)  # the whole run's state after the last whole step


@dataclass(frozen=True)
class TrainingResult:
    """What a run achieved."""

    steps: int
    reward: float  # mean over the last window
    before: Metrics = field(default_factory=dict)  # eval/* of the weights the run started from
    after: Metrics = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains one policy by reinforcement; built by mrl.controller.build."""

    prompts: PromptStream
    generator: Generator
    scorers: Mapping[str, Callable[[Rollouts], list[Handle]]]  # column [R] -> who computes it: what the algorithm needs
    actor: Actor
    critic: Critic | None
    kl: KLControl
    weight_sync: WeightSyncer
    phase: Phases
    tracker: Tracker
    ledger: SampleLedger
    saver: CheckpointSaver
    recover: Recovery
    leaving: Callable[[], bool]  # whether the run was asked to end after this step
    schedule: TrainingSchedule
    sharing: Callable[[], Metrics] = dict  # numbers of taking turns on shared devices, since the last call
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def fit(self) -> TrainingResult:
        """Go on until one of the schedule's ends; evaluate before and after.

        Raises PreemptedError when the run was asked to leave; it is saved then.
        """
        self.progress.boundary = self.state_dict()
        while True:
            try:
                return self._run()
            except ProcessesLostError as error:
                intact = self.phase.interrupted not in CHANGING
                self.load_state_dict(self.recover(error, self.progress.boundary if intact else None))
            except PreemptedError:
                self.saver.now(self.progress.boundary)
                raise

    def _run(self) -> TrainingResult:
        progress, metrics = self.progress, {}
        self.weight_sync.push(version=progress.step)
        while True:
            if self._evaluation_due() and not progress.after:
                metrics |= self.evaluate()
            progress.boundary = self.state_dict()
            with self.phase("checkpoint"):
                self.saver.between_steps(progress.boundary, metrics)
            if self._done():
                break
            if self.leaving():
                raise PreemptedError("asked to leave")
            metrics = self._advance()
        self.saver.finish(progress.boundary)
        reward = float(np.mean(progress.window)) if progress.window else float("nan")
        return TrainingResult(progress.step, reward, progress.before, progress.after)

    def _advance(self) -> Metrics:
        """One step, logged; returns its metrics."""
        progress, start = self.progress, time.perf_counter()
        metrics = self.step(progress.step)
        progress.step += 1
        progress.window = [*progress.window, metrics["reward/mean"]][-self.schedule.stop_window :]
        progress.after, progress.step_s = {}, time.perf_counter() - start
        progress.boundary = self.state_dict()
        self.tracker.log(progress.step, metrics | self._throughput(metrics, progress.step_s))
        return metrics

    def step(self, step: int) -> Metrics:
        """Train on fresh samples of the current weights: N prompts x G responses -> one weight version."""
        with self.phase("rollout"):  # SGLang engines sample, rewards are given; tokens stay where they are
            rollouts = self.generator.generate(self.prompts, step)  # B = N * G responses
        metrics = rollouts.metrics(version=step)

        with self.phase("score"):  # Megatron workers: log-probabilities and values [R], as the algorithm needs them
            columns = {name: compute(rollouts) for name, compute in self.scorers.items()}

        with self.phase("advantage"):  # beside the tokens: [R]
            estimates = self.generator.estimate(columns, self.kl.coef("reward"), step)

        metrics |= {**estimates.numbers, **self.kl.metrics()}
        weights: Sequence[NDArray[np.float64]] = ()
        with self.phase("update"):  # Megatron workers fetch their rows and train
            if self.critic:
                metrics |= self.critic.update(rollouts, estimates, step)
            if step >= self.schedule.critic_steps:
                number = step - self.schedule.critic_steps
                metrics |= self.actor.update(rollouts, estimates, number, self.kl.coef("loss"))
                weights = self.actor.token_weights(rollouts, estimates)
                self.kl.adapt(metrics, len(rollouts.groups))

        with self.phase("weight_sync"):  # Megatron shards -> Hugging Face names -> SGLang
            metrics |= self.weight_sync.push(version=step + 1)

        self.ledger.record(step + 1, rollouts, self.prompts.drawn, weights)
        return metrics | self.phase.seconds() | self.sharing()

    def evaluate(self) -> Metrics:
        """Log the accuracy on held-out problems, sampled at temperature 1 and greedy; empty without a test set."""
        accuracy: Metrics = {}
        with self.phase("evaluate"):
            for name, temperature in {"eval/accuracy_sampled": 1.0, "eval/accuracy_greedy": 0.0}.items():
                found = self.generator.evaluate(temperature)
                accuracy |= {f"{name}_{held_out}" if held_out else name: score for held_out, score in found.items()}
        self.tracker.log(self.progress.step, accuracy)
        self.progress.after = accuracy
        if self.progress.step == 0:
            self.progress.before = accuracy
        return accuracy

    def abandons(self, grace_s: float) -> bool:
        """Whether the step under way can be given up, and had better be if the run must end within `grace_s`."""
        return self.phase.current in ABANDONED and (self.progress.step_s is None or self.progress.step_s > grace_s)

    def state_dict(self) -> State:
        """Where everything is that the driver holds, as plain values; the models' own state is with the trainers."""
        progress = {name: value for name, value in vars(self.progress).items() if name not in ("boundary", "step_s")}
        parts = dict(prompts=self.prompts, rollouts=self.generator, kl=self.kl)
        return dict(progress=progress, **{name: part.state_dict() for name, part in parts.items()})

    def load_state_dict(self, state: State) -> None:
        """Go on from another state of this run, or of another one with the same data; a later one's traces are taken back."""
        for name, value in state["progress"].items():
            setattr(self.progress, name, value)
        self.prompts.load_state_dict(state["prompts"])
        self.generator.load_state_dict(state["rollouts"])
        self.kl.load_state_dict(state["kl"])
        self.progress.boundary = dict(state)
        self.tracker.rewind(self.progress.step, evaluated=bool(self.progress.after))
        self.ledger.rewind(self.progress.step)

    def _evaluation_due(self) -> bool:
        step, every = self.progress.step, self.schedule.eval_every
        return step == 0 or self._done() or (bool(every) and step % every == 0)

    def _done(self) -> bool:
        progress, goal = self.progress, self.schedule.stop_reward
        full = len(progress.window) == self.schedule.stop_window
        reached = goal is not None and full and float(np.mean(progress.window)) >= goal
        return reached or progress.step >= self.schedule.max_steps

    @staticmethod
    def _throughput(metrics: Metrics, seconds: float) -> Metrics:
        names = ("engine", "sync_engine", "megatron", "critic", "reward")
        work = metrics["time/score_s"] + sum(metrics.get(f"spent/{name}_s", 0.0) for name in names)
        return {
            "time/step_s": seconds,
            "spent/controller_s": seconds - work,  # all that is our own
            "throughput/tokens_per_s": metrics["rollout/tokens"] / seconds,
            "throughput/samples_per_s": metrics["rollout/samples"] / seconds,
        }


class Phases:
    """Names and times the phases of a step. Colocated engines and trainers share their device by phase."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.interrupted: str | None = None  # the last phase, if it was cut short
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self.current = self.interrupted = name
        try:
            yield
            self.interrupted = None
        finally:
            self.current = None
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        """`time/<phase>_s` of the phases since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{name}_s": value for name, value in seconds.items()}
