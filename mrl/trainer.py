"""THE loop: prompts -> rollouts -> rewards -> advantages -> update -> weight sync, once per step."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.advantages import Advantage
from mrl.data.prompts import PromptStream
from mrl.placement import Phases
from mrl.tracking import Tracker
from mrl.types import Rollouts

Metrics = dict[str, float]


class Generator(Protocol):
    """Samples responses and scores them where they are; tokens never come back to the driver."""

    def generate(self, rows: NDArray[np.int64], step: int) -> Rollouts: ...

    def score(self, rollouts: Rollouts) -> tuple[NDArray[np.float64], float]: ...

    def evaluate(self, temperature: float) -> float: ...


class Policy(Protocol):
    """The actor: one optimizer step on a batch, and its weights on their way to the engines."""

    def update(self, rollouts: Rollouts, advantages: NDArray[np.float32], step: int) -> Metrics: ...

    def push_weights(self, version: int) -> Metrics: ...

    def save(self, folder: str) -> None: ...


@dataclass(frozen=True)
class Schedule:
    """When the loop ends and when it looks at held-out problems."""

    max_steps: int
    stop_reward: float | None = None  # mean reward over the last `stop_window` steps that ends the run
    stop_window: int = 5
    eval_every: int = 0  # steps; 0: before and after only


@dataclass(frozen=True)
class Result:
    """What a run achieved."""

    steps: int
    reward: float  # mean over the last window
    before: Metrics = field(default_factory=dict)  # eval/* of the weights the run started from
    after: Metrics = field(default_factory=dict)


class Trainer:
    """Trains one policy by reinforcement; built by mrl.build."""

    def __init__(
        self,
        *,
        prompts: PromptStream,
        generator: Generator,
        advantage: Advantage,
        actor: Policy,
        phase: Phases,
        tracker: Tracker,
        schedule: Schedule,
    ) -> None:
        self.prompts = prompts
        self.generator = generator
        self.advantage = advantage
        self.actor = actor
        self.phase = phase
        self.tracker = tracker
        self.schedule = schedule

    def fit(self) -> Result:
        """Run steps until one of the schedule's ends; evaluate before and after."""
        window: deque[float] = deque(maxlen=self.schedule.stop_window)
        self.actor.push_weights(version=0)
        before = after = self.evaluate(step=0)
        step = 0
        while step < self.schedule.max_steps and not self._reached(window):
            start = time.perf_counter()
            metrics = self.step(step)
            window.append(metrics["reward/mean"])
            step += 1
            self.tracker.log(step, metrics | self._throughput(metrics, time.perf_counter() - start))
            after = {}
            if self.schedule.eval_every and step % self.schedule.eval_every == 0:
                after = self.evaluate(step)
        after = after or self.evaluate(step)
        return Result(step, float(np.mean(window)) if window else float("nan"), before, after)

    def step(self, step: int) -> Metrics:
        """Train on fresh samples of the current weights: N prompts x G responses -> one weight version."""
        rows = next(self.prompts)  # N prompts, by row number

        with self.phase("rollout"):  # SGLang engines sample; tokens stay where they are
            rollouts = self.generator.generate(rows, step)  # B = N * G responses

        with self.phase("reward"):
            rewards, reward_s = self.generator.score(rollouts)  # [B]

        with self.phase("advantage"):
            advantages = self.advantage(rewards, rollouts.groups)  # [B]

        with self.phase("update"):  # Megatron workers fetch their rows and train
            metrics = self.actor.update(rollouts, advantages, step)

        with self.phase("weight_sync"):  # Megatron shards -> Hugging Face names -> SGLang
            metrics |= self.actor.push_weights(version=step + 1)

        metrics |= {"reward/mean": float(rewards.mean()), "spent/reward_s": reward_s}
        return metrics | rollouts.metrics() | self.phase.seconds()

    def evaluate(self, step: int) -> Metrics:
        """Log the accuracy on held-out problems, sampled at temperature 1 and greedy; empty without a test set."""
        names = {"eval/accuracy_sampled": 1.0, "eval/accuracy_greedy": 0.0}
        scores = {name: self.generator.evaluate(temperature) for name, temperature in names.items()}
        accuracy = {name: score for name, score in scores.items() if not np.isnan(score)}
        self.tracker.log(step, accuracy)
        return accuracy

    def _reached(self, window: deque[float]) -> bool:
        goal = self.schedule.stop_reward
        return goal is not None and len(window) == window.maxlen and float(np.mean(window)) >= goal

    @staticmethod
    def _throughput(metrics: Metrics, seconds: float) -> Metrics:
        work = ("spent/engine_s", "spent/sync_engine_s", "spent/megatron_s", "spent/reward_s")
        return {
            "time/step_s": seconds,
            "spent/controller_s": seconds - sum(metrics[name] for name in work),  # all that is our own
            "throughput/tokens_per_s": metrics["rollout/tokens"] / seconds,
            "throughput/samples_per_s": metrics["rollout/samples"] / seconds,
        }
