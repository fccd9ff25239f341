"""The driver's side of actor and critic: which rows are trained, at which learning rate, and what is reported of it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms import corrections
from mrl.algorithms.losses import ValueLoss
from mrl.algorithms.objective import Objective
from mrl.core.metrics import Metrics
from mrl.core.types import AdvantageResult, Handle, Rollouts, TrainBatch, UpdateReport
from mrl.workers.dp_partition import Packing, split, step_weights
from mrl.workers.group import WorkerGroup
from parallel.trainer_config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """The optimizer steps on one rollout, as the driver orders them."""

    steps: list[TrainBatch]  # mini-batch after mini-batch
    lrs: list[float]
    aggregation: str
    longest: int
    how: Mapping[str, Any]  # loss and temperature


class Recorder(Protocol):
    """Watches updates, and keeps some of them whole."""

    def watch(self, group: WorkerGroup, update: UpdateRequest, step: int) -> AbstractContextManager[list[UpdateReport]]:
        """The context of one update; its reports are added to the list in it."""
        ...


@dataclass(frozen=True)
class UpdateRunner:
    """How a rollout becomes optimizer steps."""

    optimizer: OptimConfig
    packing: Packing
    aggregation: str
    longest: int  # tokens that a response may have
    mini_batches: int = 1  # optimizer steps on each pass over a rollout
    epochs: int = 1  # passes over it
    recorder: Recorder | None = None

    def run(self, group: WorkerGroup, batch: TrainBatch, step: int, **how: object) -> tuple[list[UpdateReport], float]:
        """Train on the batch; (a report per optimizer step, the last learning rate)."""
        steps = split(batch, self.mini_batches) * self.epochs
        first = step * self.mini_batches * self.epochs
        lrs = [self.optimizer.lr_at(first + number) for number in range(len(steps))]
        average = dict(aggregation=self.aggregation, longest=self.longest)
        update = UpdateRequest(steps=steps, lrs=lrs, aggregation=self.aggregation, longest=self.longest, how=how)
        with self.recorder.watch(group, update, step) if self.recorder else nullcontext([]) as reports:
            reports += group.update(steps, self.packing, **average, lrs=lrs, **how)
        return reports, lrs[-1]


@dataclass(frozen=True)
class ActorTrainer:
    """A WorkerGroup that holds an actor, trained with one objective."""

    group: WorkerGroup
    objective: Objective
    updates: UpdateRunner
    temperature: float  # of sampling
    skip_zero_advantage: bool

    def logprobs(self, rollouts: Rollouts) -> list[Handle]:
        """Log-probabilities [R] under the current weights."""
        return self._compute("logprobs", rollouts)

    def reference_logprobs(self, rollouts: Rollouts) -> list[Handle]:
        """Log-probabilities [R] under the weights that reinforcement started from."""
        return self._compute("reference_logprobs", rollouts)

    def _compute(self, what: str, rollouts: Rollouts) -> list[Handle]:
        return self.group.compute(what, batch_of(rollouts), self.updates.packing, temperature=self.temperature)

    def update(self, rollouts: Rollouts, estimates: AdvantageResult, step: int, kl_coef: float) -> Metrics:
        """Optimizer steps on the whole batch; rows that cannot change the gradient are left out."""
        objective = self.objective.with_kl_coef(kl_coef)
        batch = batch_of(rollouts, estimates, self._trained(estimates))
        reports, lr = self.updates.run(self.group, batch, step, loss=objective, temperature=self.temperature)
        skippable = float(estimates.without_advantage.mean())
        return {**_of_actor(reports), "batch/zero_advantage_fraction": skippable, "optim/lr": lr}

    def token_weights(self, rollouts: Rollouts, estimates: AdvantageResult) -> list[NDArray[np.float64]]:
        """For each optimizer step of `update`: [B] what one token of a response counts for in the loss; 0 if it is left out."""
        batch = batch_of(rollouts, estimates, self._trained(estimates))
        return [
            step_weights(step, self.updates.aggregation, self.updates.longest)
            for step in split(batch, self.updates.mini_batches) * self.updates.epochs
        ]

    def _trained(self, estimates: AdvantageResult) -> NDArray[np.bool_]:
        """[B] which rows are computed at all."""
        trained = ~estimates.rejected
        if self.skip_zero_advantage and self.objective.zero_without_advantage:
            trained &= ~estimates.without_advantage
        if not trained.any():  # one row always, so that the mismatch is measured
            trained[np.argmax(~estimates.rejected)] = True
        return trained


@dataclass(frozen=True)
class CriticTrainer:
    """A WorkerGroup that holds a critic, which learns to predict returns."""

    group: WorkerGroup
    loss: ValueLoss
    updates: UpdateRunner

    def values(self, rollouts: Rollouts) -> list[Handle]:
        """Values [R] before each sampled token."""
        return self.group.compute("values", batch_of(rollouts), self.updates.packing)

    def update(self, rollouts: Rollouts, estimates: AdvantageResult, step: int) -> Metrics:
        """Optimizer steps towards the returns of all rows that are not rejected."""
        reports, lr = self.updates.run(self.group, batch_of(rollouts, estimates), step, loss=self.loss)
        return _of_critic(reports) | {"critic/lr": lr}


@dataclass(frozen=True)
class TeacherScorer:
    """A WorkerGroup that holds a model whose log-probabilities are learnt from."""

    group: WorkerGroup
    packing: Packing
    temperature: float

    def logprobs(self, rollouts: Rollouts) -> list[Handle]:
        """Log-probabilities [R] of the sampled tokens under the teacher."""
        return self.group.compute("logprobs", batch_of(rollouts), self.packing, temperature=self.temperature)


def batch_of(
    rollouts: Rollouts, estimates: AdvantageResult | None = None, trained: NDArray[np.bool_] | None = None
) -> TrainBatch:
    """All rows; or those of `trained` [B], with the denominators of all that `estimates` do not reject."""
    counted = np.ones(len(rollouts.groups), bool) if estimates is None else ~estimates.rejected
    return TrainBatch(
        rollouts.block,
        rollouts.prompt_lengths,
        rollouts.response_lengths,
        rollouts.sampled_lengths,
        rollouts.groups,
        np.flatnonzero(counted if trained is None else trained),
        np.flatnonzero(counted),
        None if estimates is None else estimates.columns,
    )


def _of_actor(reports: list[UpdateReport]) -> Metrics:
    """Numbers of all optimizer steps of a rollout: counts and seconds add up, the rest is averaged or the largest.

    A mini-batch all of whose rows were left out reports no tokens.
    """
    tokens, gap, entropy = (_popped(reports, name) for name in ("tokens", "gap", "entropy"))
    distance = corrections.mismatch_metrics({name: _popped(reports, name) for name in corrections.MISMATCH_SUMS})
    seconds, computed = (sum(r.maxima.pop(name) for r in reports) for name in ("seconds", "batch/computed_tokens"))
    largest_gap = max(r.maxima.pop("gap", float("-inf")) for r in reports)
    losses = [r.sums.pop("loss", 0.0) for r in reports]
    return {
        "loss/policy": float(np.mean(losses)),
        "policy/entropy_mean": entropy / tokens,
        "mismatch/logprob_abs_mean": gap / tokens,
        "mismatch/logprob_abs_max": largest_gap,
        **distance,
        "batch/trained_tokens": tokens,
        "batch/computed_tokens": computed,
        "batch/optimizer_steps": float(len(reports)),
        "spent/megatron_s": seconds,
        **_averages(reports),
    }


def _of_critic(reports: list[UpdateReport]) -> Metrics:
    """Numbers of all optimizer steps of a rollout; the explained variance is 1 - Var[return - value] / Var[return]."""
    names = ("tokens", "values", "returns", "errors", "returns_squared", "errors_squared")
    totals = {name: sum(r.sums.get(name, 0.0) for r in reports) for name in names}
    tokens = max(totals["tokens"], 1.0)
    mean = {name: total / tokens for name, total in totals.items()}
    spread = mean["returns_squared"] - mean["returns"] ** 2
    left = mean["errors_squared"] - mean["errors"] ** 2
    return {
        "critic/loss": float(np.mean([r.sums.get("loss", 0.0) for r in reports])),
        "critic/value_mean": mean["values"],
        "critic/explained_variance": 1 - left / spread if spread > 1e-12 else float("nan"),
        "critic/grad_norm": float(np.mean([r.maxima["critic/grad_norm"] for r in reports])),
        "spent/critic_s": sum(r.maxima["seconds"] for r in reports),
    }


def _popped(reports: list[UpdateReport], name: str) -> float:
    return sum(report.sums.pop(name, 0.0) for report in reports)


def _averages(reports: list[UpdateReport]) -> Metrics:
    """What losses report, over the weight of the tokens it was reported of; and the rest; each averaged over the steps."""
    weights = [report.sums.pop("weight", 0.0) for report in reports]
    rest = [
        {name: total / weight for name, total in report.sums.items() if weight} | report.maxima
        for report, weight in zip(reports, weights, strict=True)
    ]
    names = dict.fromkeys(name for numbers in rest for name in numbers)
    return {name: float(np.mean([numbers[name] for numbers in rest if name in numbers])) for name in names}
