"""The driver's part in training: selects rows and learning rates of optimizer steps, and turns reports into metrics."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms import corrections
from mrl.algorithms.losses import ValueLossFunction
from mrl.algorithms.objective import Objective, TokenWeighting
from mrl.algorithms.parts import POLICY_COLUMNS
from mrl.core.metrics import Metrics
from mrl.core.types import AdvantageResult, Handle, Rollouts, TrainBatch, UpdateReport
from mrl.workers.dp_partition import Packing, split_mini_batches, step_weights
from mrl.workers.group import WorkerGroup
from parallel.trainer_config import OptimConfig

type Columns = dict[str, list[Handle]]
"""Name of a column [R] -> handles of its parts. Each replica has computed one part."""


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Optimizer steps on one rollout, which the driver requests from a worker group."""

    steps: list[TrainBatch]  # one for each mini-batch, in order
    lrs: list[float]  # learning rate of each optimizer step
    options: Mapping[str, Any]  # further arguments of the model's `update`: loss and temperature


class UpdateObserver(Protocol):
    """Interface of an object that is told of every UpdateRequest. The object may write a step dump."""

    def watch(self, group: WorkerGroup, update: UpdateRequest, step: int) -> AbstractContextManager[list[UpdateReport]]:
        """Return a context in which `update` runs. Its reports are appended to the list that the context yields.

        `step` is the training step.
        """
        ...


@dataclass(frozen=True)
class UpdateRunner:
    """Runs the optimizer steps on a rollout."""

    optimizer: OptimConfig
    packing: Packing
    weighting: TokenWeighting  # computes the weight of each token in the loss
    mini_batches: int = 1  # optimizer steps in each epoch
    epochs: int = 1  # passes over a rollout
    observer: UpdateObserver | None = None

    def split(self, batch: TrainBatch) -> list[TrainBatch]:
        """Return the mini-batches of all optimizer steps, in order."""
        return split_mini_batches(batch, self.mini_batches) * self.epochs

    def run(
        self, group: WorkerGroup, batch: TrainBatch, step: int, **options: object
    ) -> tuple[list[UpdateReport], float]:
        """Train on the batch of training step `step`. Returns the report of each optimizer step, and the last learning rate."""
        steps = self.split(batch)
        first = step * self.mini_batches * self.epochs
        lrs = [self.optimizer.lr_at(first + index) for index in range(len(steps))]
        update = UpdateRequest(steps=steps, lrs=lrs, options=options)
        with self.observer.watch(group, update, step) if self.observer else nullcontext([]) as reports:
            reports += group.update(steps, self.packing, weighting=self.weighting, lrs=lrs, **options)
        return reports, lrs[-1]


@dataclass(frozen=True)
class ActorTrainer:
    """Trains the actor of a worker group with one objective."""

    group: WorkerGroup
    objective: Objective
    updates: UpdateRunner
    temperature: float  # sampling temperature
    skip_zero_advantage: bool  # whether to leave out rows that cannot change the gradient

    def compute_columns(self, rollouts: Rollouts, names: Sequence[str]) -> Columns:
        """Compute columns [R] under the current weights, in one forward pass. `names`: keys of POLICY_COLUMNS."""
        outputs = [POLICY_COLUMNS[name] for name in names]
        found = self.group.compute_columns(train_batch(rollouts), self.updates.packing, self.temperature, outputs)
        return {name: found[output] for name, output in zip(names, outputs, strict=True)}

    def compute_reference_logprobs(self, rollouts: Rollouts) -> Columns:
        """Compute the column `ref_logprobs`: log-probabilities under the reference policy."""
        batch, packing = train_batch(rollouts), self.updates.packing
        return dict(ref_logprobs=self.group.compute_reference_logprobs(batch, packing, self.temperature))

    def update(self, rollouts: Rollouts, advantages: AdvantageResult, step: int, coefs: Mapping[str, float]) -> Metrics:
        """Run the optimizer steps on all rows that are not left out, and return their metrics.

        `coefs`: name of a term of the loss (kl_loss, entropy) -> its coefficient.
        """
        objective = self.objective.with_coefs(coefs)
        batch = train_batch(rollouts, advantages, self._trained_rows(advantages))
        reports, lr = self.updates.run(self.group, batch, step, loss=objective, temperature=self.temperature)
        zero_fraction = float(advantages.zero_advantage.mean())
        return {**_actor_metrics(reports), "batch/zero_advantage_fraction": zero_fraction, "optim/lr": lr}

    def token_weights(self, rollouts: Rollouts, advantages: AdvantageResult) -> list[NDArray[np.float64]]:
        """Return an array [B] for each optimizer step of `update`: for each row, the loss weight of each of its sampled tokens.

        The loss weight is 0 for rows that are left out.
        """
        batch = train_batch(rollouts, advantages, self._trained_rows(advantages))
        return [step_weights(step, self.updates.weighting) for step in self.updates.split(batch)]

    def _trained_rows(self, advantages: AdvantageResult) -> NDArray[np.bool_]:
        """Return for each row whether it is trained: [B]."""
        trained = ~advantages.rejected
        if self.skip_zero_advantage and self.objective.zero_without_advantage:
            trained &= ~advantages.zero_advantage
        if not trained.any():  # compute at least one row, so that the mismatch with the engines is measured
            trained[np.argmax(~advantages.rejected)] = True
        return trained


@dataclass(frozen=True)
class CriticTrainer:
    """Trains the critic of a worker group to predict returns."""

    group: WorkerGroup
    loss: ValueLossFunction
    updates: UpdateRunner

    def compute_values(self, rollouts: Rollouts) -> Columns:
        """Compute the column `values`: the value before each sampled token."""
        return dict(values=self.group.compute_values(train_batch(rollouts), self.updates.packing))

    def update(self, rollouts: Rollouts, advantages: AdvantageResult, step: int) -> Metrics:
        """Run the optimizer steps on all rows that are not rejected. The targets are the returns."""
        reports, lr = self.updates.run(self.group, train_batch(rollouts, advantages), step, loss=self.loss)
        return _critic_metrics(reports) | {"critic/lr": lr}


@dataclass(frozen=True)
class TeacherScorer:
    """Computes log-probabilities under a teacher model, which is not trained."""

    group: WorkerGroup
    packing: Packing
    temperature: float

    def compute_logprobs(self, rollouts: Rollouts) -> Columns:
        """Compute the column `teacher_logprobs`: log-probabilities of the sampled tokens under the teacher."""
        found = self.group.compute_columns(train_batch(rollouts), self.packing, self.temperature, ["logprobs"])
        return dict(teacher_logprobs=found["logprobs"])


def train_batch(
    rollouts: Rollouts, advantages: AdvantageResult | None = None, trained: NDArray[np.bool_] | None = None
) -> TrainBatch:
    """Return a batch of the rows for which `trained` [B] is true. The default is all rows that are not rejected.

    The loss is normalised over all rows that `advantages` does not reject, whether they are trained or not. A row that counts
    n times is n times in `denominator_rows`.
    """
    in_denominator = np.ones(len(rollouts.groups), bool) if advantages is None else ~advantages.rejected
    counted = np.flatnonzero(in_denominator)
    if advantages is not None and advantages.counts is not None:
        counted = np.repeat(counted, advantages.counts[counted])
    return TrainBatch(
        block=rollouts.block,
        prompt_lengths=rollouts.prompt_lengths,
        response_lengths=rollouts.response_lengths,
        sampled_lengths=rollouts.sampled_lengths,
        groups=rollouts.groups,
        rows=np.flatnonzero(in_denominator if trained is None else trained),
        denominator_rows=counted,
        columns=None if advantages is None else advantages.columns,
    )


ACTOR_SUMS = ("loss", "mismatch_abs", "entropy", "tokens", *corrections.MISMATCH_SUMS, "weight", "nonfinite")
"""Names of the sums in the report of every optimizer step of the actor. All other sums come from the loss."""
ACTOR_MAXIMA = ("mismatch_abs", "seconds", "batch/computed_tokens")
"""Names of the maxima that have their own metric. All other maxima are averaged over the optimizer steps."""


def _actor_metrics(reports: list[UpdateReport]) -> Metrics:
    """Return the metrics of all optimizer steps on a rollout. Counts and seconds are sums over the steps.

    A mini-batch whose rows are all left out reports no tokens.
    """
    tokens, mismatch_abs, entropy = (_total(reports, name) for name in ("tokens", "mismatch_abs", "entropy"))
    sums = {name: _total(reports, name) for name in corrections.MISMATCH_SUMS}
    known = sums["mismatch/count"] > 0  # whether the engine reported a log-probability of any token
    largest = max(r.maxima.get("mismatch_abs", float("-inf")) for r in reports)
    seconds, computed = (sum(r.maxima[name] for r in reports) for name in ("seconds", "batch/computed_tokens"))
    return {
        "loss/policy": float(np.mean([r.sums.get("loss", 0.0) for r in reports])),
        "policy/entropy_mean": entropy / tokens,
        "mismatch/logprob_abs_mean": mismatch_abs / sums["mismatch/count"] if known else float("nan"),
        "mismatch/logprob_abs_max": largest if known else float("nan"),
        **corrections.mismatch_metrics(sums),
        "batch/trained_tokens": tokens,
        "batch/computed_tokens": computed,
        "batch/optimizer_steps": float(len(reports)),
        "spent/megatron_s": seconds,
        **_step_averages(reports),
    }


def _step_averages(reports: list[UpdateReport]) -> Metrics:
    """Average the statistics that are not in ACTOR_SUMS or ACTOR_MAXIMA over the optimizer steps.

    Each sum is first divided by the sum of the loss weights in its optimizer step.
    """
    by_step: list[Metrics] = []
    for report in reports:
        total_weight = report.sums.get("weight", 0.0)
        sums = {
            name: value / total_weight for name, value in report.sums.items() if total_weight and name not in ACTOR_SUMS
        }
        by_step.append(sums | {name: value for name, value in report.maxima.items() if name not in ACTOR_MAXIMA})
    names = dict.fromkeys(name for metrics in by_step for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in by_step if name in metrics])) for name in names}


def _critic_metrics(reports: list[UpdateReport]) -> Metrics:
    """Return the metrics of all optimizer steps. The explained variance is 1 - Var[return - value] / Var[return]."""
    names = ("tokens", "values", "returns", "errors", "returns_squared", "errors_squared")
    totals = {name: _total(reports, name) for name in names}
    tokens = max(totals["tokens"], 1.0)
    mean = {name: total / tokens for name, total in totals.items()}
    variance = mean["returns_squared"] - mean["returns"] ** 2
    residual_variance = mean["errors_squared"] - mean["errors"] ** 2
    return {
        "critic/loss": float(np.mean([r.sums.get("loss", 0.0) for r in reports])),
        "critic/value_mean": mean["values"],
        "critic/explained_variance": 1 - residual_variance / variance if variance > 1e-12 else float("nan"),
        "critic/grad_norm": float(np.mean([r.maxima["critic/grad_norm"] for r in reports])),
        "spent/critic_s": sum(r.maxima["seconds"] for r in reports),
    }


def _total(reports: list[UpdateReport], name: str) -> float:
    return sum(report.sums.get(name, 0.0) for report in reports)
