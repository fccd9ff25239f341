"""The driver's part in training: selects the rows and learning rates of optimizer steps, and computes metrics from reports.

mrl.core.types explains the letters of array dimensions, such as B and R.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms import corrections
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.objective import Objective, TokenWeighting
from mrl.algorithms.parts import POLICY_COLUMNS
from mrl.core.code_locations import plug_in_name
from mrl.core.metrics import Metrics
from mrl.core.types import AdvantageResult, Rollouts, TrainBatch, UpdateReport
from mrl.workers.dp_partition import Packing, split_mini_batches, step_weights
from mrl.workers.group import ComputedColumns, PendingCall, WorkerGroup
from mrl.workers.worker import TrainWorker
from parallel.trainer_config import OptimConfig

type ColumnPass = Callable[[Rollouts], PendingCall[ComputedColumns]]
"""Function that begins a forward pass over the responses of a step. The pass computes one or several columns."""


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """Optimizer steps on one rollout, which the driver requests from a worker group."""

    mini_batches: list[TrainBatch]  # one for each optimizer step, in order
    lrs: list[float]  # learning rate of each optimizer step
    options: Mapping[str, Any]  # further arguments of the model's `update`: loss and temperature
    update_index: int = 0  # number of earlier updates of the model in the same training step


class UpdateObserver(Protocol):
    """Interface of an object that observes every UpdateRequest, for example to write step dumps."""

    def watch(self, group: WorkerGroup, update: UpdateRequest, step: int) -> AbstractContextManager[list[UpdateReport]]:
        """Return a context that is open while `update` runs. The caller appends the reports to the list that the context yields.

        `step` is the number of earlier training steps that trained this model.
        """
        ...


@dataclass(frozen=True)
class UpdateRunner:
    """Runs the optimizer steps on a rollout."""

    optimizer: OptimConfig
    packing: Packing
    weighting: TokenWeighting  # computes the token weights
    mini_batches: int = 1  # optimizer steps in each epoch
    epochs: int = 1  # passes over a rollout
    observer: UpdateObserver | None = None

    def split(self, batch: TrainBatch) -> list[TrainBatch]:
        """Return the mini-batches of all optimizer steps, in order."""
        return split_mini_batches(batch, self.mini_batches) * self.epochs

    def begin(
        self, group: WorkerGroup, batch: TrainBatch, step: int, *, update_index: int = 0, **options: object
    ) -> PendingCall[tuple[list[UpdateReport], float]]:
        """Begin to train on the batch of a training step.

        `step`: number of earlier steps that trained this model. `update_index`: number of earlier updates of the model in this
        step. The learning-rate schedule advances by `mini_batches * epochs` optimizer steps in each training step, however many
        updates the training step has. So all updates of a training step have the same learning rates. The result is the report
        of each optimizer step, and the last learning rate.
        """
        mini_batches = self.split(batch)
        first = step * self.mini_batches * self.epochs
        lrs = [self.optimizer.lr_at(first + n) for n in range(len(mini_batches))]
        update = UpdateRequest(mini_batches=mini_batches, lrs=lrs, options=options, update_index=update_index)
        with ExitStack() as stack:
            reports = stack.enter_context(self.observer.watch(group, update, step)) if self.observer else []
            call = group.begin_update(mini_batches, self.packing, weighting=self.weighting, lrs=lrs, **options)
            running = stack.pop_all()

        def observed() -> tuple[list[UpdateReport], float]:
            with running:
                reports.extend(call.result())
            return reports, lrs[-1]

        return PendingCall(observed)


@dataclass(frozen=True)
class ActorUpdate:
    """Result of one update of the actor, as the driver gets it."""

    reports: Sequence[UpdateReport]  # one for each optimizer step
    lr: float  # learning rate of the last optimizer step
    token_weights: Sequence[NDArray[np.float64]]  # for each optimizer step: [B] weight of each sampled token of the row
    zero_advantage: NDArray[np.bool_]  # [selected rows] whether the advantage of every token of the row is 0


class CriticUpdate(NamedTuple):
    """Result of one update of the critic, as the driver gets it."""

    reports: Sequence[UpdateReport]  # one for each optimizer step
    lr: float  # learning rate of the last optimizer step


@dataclass(frozen=True)
class ActorTrainer:
    """Trains the actor, whose ranks are `group`, with one objective."""

    group: WorkerGroup
    objective: Objective
    updates: UpdateRunner
    temperature: float  # sampling temperature
    skip_zero_advantage: bool  # whether an update skips rows that cannot change the gradient

    def begin_columns(self, rollouts: Rollouts, names: Sequence[str]) -> PendingCall[ComputedColumns]:
        """Begin to compute columns [R] under the current weights, in one forward pass. `names`: keys of POLICY_COLUMNS."""
        outputs = {POLICY_COLUMNS[name]: name for name in names}
        batch, options = train_batch(rollouts), dict(temperature=self.temperature, names=list(outputs))
        call = self.group.begin_columns(TrainWorker.compute_columns, batch, self.updates.packing, **options)
        return call.then(lambda found: found.renamed(outputs))

    def begin_reference_logprobs(self, rollouts: Rollouts) -> PendingCall[ComputedColumns]:
        """Begin to compute the column `ref_logprobs`: log-probabilities under the reference policy."""
        batch, packing, temperature = train_batch(rollouts), self.updates.packing, self.temperature
        return self.group.begin_columns(TrainWorker.compute_reference_logprobs, batch, packing, temperature=temperature)

    def begin_update(
        self,
        rollouts: Rollouts,
        advantages: AdvantageResult | None,
        step: int,
        coefs: Mapping[str, float],
        *,
        rows: NDArray[np.bool_] | None = None,
        loss: Loss | None = None,
        update_index: int = 0,
    ) -> PendingCall[ActorUpdate]:
        """Begin the optimizer steps on all rows that are neither excluded (AdvantageResult.excluded) nor skipped.

        Args:
            rollouts: responses of the step.
            advantages: None for a loss that reads no advantages.
            step: number of earlier steps of the run that trained the actor.
            coefs: name of a term of the loss (kl_loss, entropy) -> its coefficient.
            rows: [B] whether each row counts in the loss. Default: all rows count.
            loss: an Objective, which replaces `self.objective`, or a policy loss, which replaces `self.objective.policy`.
            update_index: number of earlier updates of the actor in this step.

        Raises ValueError if `advantages` is None and the loss reads advantages.
        """
        objective = self.objective if loss is None else self.objective.with_loss(loss)
        if advantages is None and getattr(objective.policy, "zero_at_zero_advantage", False):
            raise ValueError(
                f"trainer._target_: update() got no advantages, but the loss {plug_in_name(objective.policy)} is 0 without "
                "them; pass the result of estimate(), or a loss such as CrossEntropy()."
            )
        advantages = _selected(advantages, rows, rollouts)
        batch = train_batch(rollouts, advantages, self._trained_rows(advantages, objective))
        objective = objective.with_coefs(coefs)
        updates = self.updates
        call = updates.begin(
            self.group, batch, step, update_index=update_index, loss=objective, temperature=self.temperature
        )
        weights = [step_weights(each, updates.weighting) for each in updates.split(batch)]
        zero = advantages.zero_advantage if rows is None else advantages.zero_advantage[rows]
        return call.then(lambda result: ActorUpdate(*result, weights, zero))

    def metrics(self, updates: Sequence[ActorUpdate]) -> Metrics:
        """Return the metrics of all updates of a training step."""
        zero = np.concatenate([update.zero_advantage for update in updates])
        return {
            **_actor_metrics([report for update in updates for report in update.reports]),
            "batch/zero_advantage_fraction": float(zero.mean()) if len(zero) else 0.0,
            "optim/lr": updates[-1].lr,
        }

    def _trained_rows(self, advantages: AdvantageResult, objective: Objective) -> NDArray[np.bool_]:
        """Return [B]: whether the update trains on each row."""
        trained = ~advantages.excluded
        if self.skip_zero_advantage and objective.zero_at_zero_advantage:
            trained &= ~advantages.zero_advantage
        if not trained.any():  # compute at least one row, so that the mismatch with the engines is measured
            trained[np.argmax(~advantages.excluded)] = True
        return trained


def _selected(
    advantages: AdvantageResult | None, rows: NDArray[np.bool_] | None, rollouts: Rollouts
) -> AdvantageResult:
    """Return the advantages of the B responses. In the result, responses outside `rows` [B] are excluded, too.

    If `advantages` is None and the rollout filter rejected all sampled groups, only responses from a file (data.offline) remain.
    """
    if advantages is None:
        size = len(rollouts.groups)
        excluded = (np.arange(size) < rollouts.num_sampled) & rollouts.all_filtered
        advantages = AdvantageResult(None, np.zeros(size, bool), excluded, {})
    return advantages if rows is None else replace(advantages, excluded=advantages.excluded | ~rows)


@dataclass(frozen=True)
class CriticTrainer:
    """Trains the critic, whose ranks are `group`, to predict returns."""

    group: WorkerGroup
    loss: ValueLossFunction
    updates: UpdateRunner

    def begin_values(self, rollouts: Rollouts) -> PendingCall[ComputedColumns]:
        """Begin to compute the column `values`: the value before each sampled token."""
        return self.group.begin_columns(TrainWorker.compute_values, train_batch(rollouts), self.updates.packing)

    def begin_update(
        self, rollouts: Rollouts, advantages: AdvantageResult, step: int, *, rows: NDArray[np.bool_] | None = None
    ) -> PendingCall[CriticUpdate]:
        """Begin the optimizer steps on the rows that the mask `rows` [B] selects and that are not excluded.

        The targets are the returns. `rows` is None for all rows. `step`: number of earlier steps of the run.
        """
        batch = train_batch(rollouts, _selected(advantages, rows, rollouts))
        call = self.updates.begin(self.group, batch, step, loss=self.loss)
        return call.then(lambda result: CriticUpdate(*result))

    def metrics(self, updates: Sequence[CriticUpdate]) -> Metrics:
        """Return the metrics of all updates of a training step."""
        return {
            **_critic_metrics([report for update in updates for report in update.reports]),
            "critic/lr": updates[-1].lr,
        }


def _every_row(rollouts: Rollouts) -> NDArray[np.bool_]:
    return np.ones(len(rollouts.groups), bool)


@dataclass(frozen=True)
class RoleScorer:
    """Computes log-probabilities, or the outputs that distillation reads, with a frozen model such as a teacher."""

    group: WorkerGroup
    packing: Packing
    temperature: float

    column: str  # name of the column that the model computes
    rows: Callable[[Rollouts], NDArray[np.bool_]] = _every_row  # mask [B] of the responses for which the model computes

    def begin_logprobs(self, rollouts: Rollouts) -> PendingCall[ComputedColumns]:
        """Begin to compute the log-probabilities of the sampled tokens under this model."""
        call = self._begin(rollouts, TrainWorker.compute_columns, temperature=self.temperature, names=["logprobs"])
        return call.then(lambda found: found.renamed({"logprobs": self.column} if found.columns else {}))

    def begin_teacher_outputs(
        self, rollouts: Rollouts, teacher: str, temperature: float | None, top_k: int | None
    ) -> PendingCall[ComputedColumns]:
        """Begin to compute the outputs of this model that distillation reads.

        `teacher`: role of this model. `temperature` replaces the sampling temperature. `top_k`: number of most probable tokens;
        None: hidden states.
        """
        options = dict(temperature=temperature or self.temperature, top_k=top_k)
        call = self._begin(rollouts, TrainWorker.compute_teacher_outputs, **options)
        return call.then(lambda found: replace(found, teachers={teacher: found.teachers.get("", ())}))

    def _begin(self, rollouts: Rollouts, method: Callable, **options: Any) -> PendingCall[ComputedColumns]:
        rows = self.rows(rollouts)
        if not rows.any():
            return PendingCall(lambda: ComputedColumns({}, seconds=0.0))
        return self.group.begin_columns(method, train_batch(rollouts, trained=rows), self.packing, **options)


def train_batch(
    rollouts: Rollouts, advantages: AdvantageResult | None = None, trained: NDArray[np.bool_] | None = None
) -> TrainBatch:
    """Return a batch of the rows for which `trained` [B] is true. The default is all rows that are not excluded.

    The loss is normalized over all rows that `advantages` does not exclude, including those that `trained` leaves out. A row
    that counts n times occurs n times in `denominator_rows`.
    """
    in_denominator = np.ones(len(rollouts.groups), bool) if advantages is None else ~advantages.excluded
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
        teachers=rollouts.teachers,
    )


MTP_SUMS = ("mtp_nll", "mtp_tokens")
"""Names of the sums in the report of every optimizer step that trains MTP layers.

mtp_nll: -log P of the targets of the MTP layers, summed over the mtp_tokens targets.
"""
ACTOR_SUMS = ("loss", "mismatch_abs", "entropy", "tokens", *corrections.MISMATCH_SUMS, "weight", "nonfinite", *MTP_SUMS)
"""Names of the sums in the report of an optimizer step of the actor. All other sums come from the loss.

A report has MTP_SUMS only if the step trains MTP layers.
"""
ACTOR_MAXIMA = ("mismatch_abs", "seconds", "batch/computed_tokens")
"""Names of the maxima that have their own metric. All other maxima are averaged over the optimizer steps."""


def _actor_metrics(reports: list[UpdateReport]) -> Metrics:
    """Return the metrics of all optimizer steps on a rollout. Counts and seconds are sums over the optimizer steps.

    A mini-batch without trained rows reports no tokens, so the number of tokens may be 0. The means are then NaN.
    """
    tokens, mismatch_abs, entropy = (_total(reports, name) for name in ("tokens", "mismatch_abs", "entropy"))
    sums = {name: _total(reports, name) for name in corrections.MISMATCH_SUMS}
    known = sums["mismatch/count"] > 0  # whether the engine reported a log-probability of any token
    largest = max(r.maxima.get("mismatch_abs", float("-inf")) for r in reports)
    seconds, computed = (sum(r.maxima[name] for r in reports) for name in ("seconds", "batch/computed_tokens"))
    return {
        "loss/policy": float(np.mean([r.sums.get("loss", 0.0) for r in reports])),
        "policy/entropy_mean": entropy / tokens if tokens else float("nan"),
        "mismatch/logprob_abs_mean": mismatch_abs / sums["mismatch/count"] if known else float("nan"),
        "mismatch/logprob_abs_max": largest if known else float("nan"),
        **corrections.mismatch_metrics(sums),
        "batch/trained_tokens": tokens,
        "batch/computed_tokens": computed,
        "batch/optimizer_steps": float(len(reports)),
        "component_time/megatron_s": seconds,
        **mtp_metrics(reports),
        **_step_averages(reports),
    }


def mtp_metrics(reports: list[UpdateReport]) -> Metrics:
    """Return the loss of the MTP layers, if they are trained."""
    tokens = _total(reports, "mtp_tokens")
    return {"loss/mtp": _total(reports, "mtp_nll") / tokens} if tokens else {}


def _step_averages(reports: list[UpdateReport]) -> Metrics:
    """Average the statistics that are not in ACTOR_SUMS or ACTOR_MAXIMA over the optimizer steps.

    Each sum is first divided by the sum of the token weights in its optimizer step.
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
        "component_time/critic_s": sum(r.maxima["seconds"] for r in reports),
    }


def _total(reports: list[UpdateReport], name: str) -> float:
    return sum(report.sums.get(name, 0.0) for report in reports)
