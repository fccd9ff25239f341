"""Supervised training of a worker group, for `mrl sft` and for the warm start before reinforcement learning."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.config.schema import Config, SftConfig
from mrl.controller.plan_models import ModelPlan, chat_template
from mrl.controller.plan_supervised import WARM_START_SETTINGS, SupervisedObjective, warm_start_settings
from mrl.core.metrics import Metrics
from mrl.core.types import Handle, SupervisedRows, UpdateReport
from mrl.data.prompts import PromptStream
from mrl.tracking.console import ConsoleSink, Startup
from mrl.tracking.tracker import JsonlSink, Tracker
from mrl.workers.dp_partition import Packing
from mrl.workers.group import WorkerGroup
from mrl.workers.model_trainers import ACTOR_SUMS, mtp_metrics
from mrl.workers.worker import TrainWorker
from parallel.trainer_config import OptimConfig

logger = logging.getLogger(__name__)


def train_supervised(group: WorkerGroup, plan: ModelPlan, sft: SftConfig, startup: Startup | None = None) -> float:
    """Train the model of `group` on the rows of `sft.train`. Returns the loss of the last optimizer step.

    `startup`: the startup display, if it is shown. The display of the training's progress replaces it.
    """
    assert sft.train, "only called for a config with a supervised stage"
    objective = SupervisedObjective.of(plan.config)
    optim = replace(sft.optim, lr_decay_steps=sft.optim.lr_decay_steps or sft.steps)
    group.call(TrainWorker.reset_optimizer, **vars(optim))
    tokenizer, chat = str(Path(plan.model_path).resolve()), chat_template(plan.config)

    def load(path: str) -> SupervisedRows:
        file = str(Path(path).resolve())
        return group.call_rank_0(
            TrainWorker.load_supervised_dataset, objective.form, file, tokenizer, plan.context, chat
        )

    stage = SupervisedStage(
        group=group,
        rows=load(sft.train),
        held_out=load(sft.test) if sft.test else None,
        eval_every=plan.config.trainer.eval_every,
        objective=objective,
        steps=sft.steps,
        batch_size=sft.batch_size,
        optim=optim,
        packing=plan.packing,
        seed=plan.config.run.seed,
    )
    metrics = JsonlSink(Path(plan.config.run.dir).resolve() / "sft.jsonl")
    with Tracker([metrics, ConsoleSink(sft.steps, title="supervised", startup=startup)]) as tracker:
        return stage.run(tracker)


def export_supervised(group: WorkerGroup, config: Config, output: str) -> None:
    """Write the weights as a Hugging Face folder, together with the settings that decide these weights.

    A reward model's folder also has the chat template of the config, because rewards render conversations with it.
    """
    extra_files = {WARM_START_SETTINGS: json.dumps(warm_start_settings(config))}
    if config.data.chat_template and SupervisedObjective.of(config).head == "score":
        extra_files["chat_template.jinja"] = Path(config.data.chat_template).read_text(encoding="utf-8")
    group.call(TrainWorker.export_hf, str(Path(output).resolve()), extra_files)


def store_warm_start(actor: WorkerGroup, config: Config, output: str) -> None:
    """Export the warm start for later runs. Does nothing if another run has exported it or is exporting it."""
    try:
        if not Path(output).exists():
            export_supervised(actor, config, output)
    except (OSError, ValueError) as error:
        if not any(Path(name).is_dir() for name in (output, f"{output}.partial")):
            raise
        logger.warning("the warm start was not stored, because another run stores it: %s", error)


HELD_OUT_METRICS = {"loss": "loss/sft_held_out", "preference/accuracy": "preference/held_out_accuracy"}
"""Name of a sum in the report of an evaluation -> name of the metric."""


@dataclass(frozen=True)
class SupervisedStage:
    """Supervised training: optimizer steps on a data set that is in Ray's object store."""

    group: WorkerGroup
    rows: SupervisedRows  # training rows
    held_out: SupervisedRows | None  # rows that are only evaluated, after the last step and every `eval_every` steps
    eval_every: int  # 0: only after the last step
    objective: SupervisedObjective
    steps: int  # number of optimizer steps
    batch_size: int  # rows of the file per optimizer step
    optim: OptimConfig
    packing: Packing
    seed: int

    def run(self, tracker: Tracker) -> float:
        """Train, and return the loss of the last optimizer step."""
        stream = PromptStream(self.rows.num_rows, self.batch_size, seed=self.seed, shuffle=True)
        drawn = [next(stream) for _ in range(self.steps)]
        rows = self._with_reference(self.rows, np.unique(np.concatenate(drawn)))
        held_out = self.held_out and self._with_reference(self.held_out, np.arange(self.held_out.num_rows))
        loss = float("nan")
        for step, drawn_rows in enumerate(drawn):
            lr = self.optim.lr_at(step)
            objective, metrics = self._loss_of_step(rows, drawn_rows)
            batch = rows.batch(rows.sequences_of(drawn_rows))
            (report,) = self.group.update(
                [batch], self.packing, weighting=self.objective.weighting, lrs=[lr], loss=objective
            )
            loss = report.sums["loss"]  # the token weights sum to 1, so this sum is a mean
            grad_norm = report.maxima["optim/grad_norm"]
            metrics |= {"loss/sft": loss, "optim/grad_norm": grad_norm, "optim/lr": lr}
            is_due = step + 1 == self.steps or (self.eval_every and (step + 1) % self.eval_every == 0)
            if held_out and is_due:
                metrics |= self._evaluate(held_out)
            tracker.log(step + 1, metrics | _loss_metrics(report))
        return loss

    def _with_reference(self, rows: SupervisedRows, used: NDArray[np.int64]) -> SupervisedRows:
        """Add the column ref_logprobs for the rows `used` of the file, computed under the current weights.

        Returns the new data set. If the objective needs no reference, returns `rows` unchanged.
        """
        if not self.objective.needs_reference:
            return rows
        # mismatched: for KTO, the prompt of each row with the response to another prompt; empty for all other losses
        sequences = np.concatenate([rows.sequences_of(used), rows.mismatched_of(used)])
        block = self.group.call_rank_0(
            TrainWorker.add_column, rows.block, "ref_logprobs", *self._logprobs(rows, sequences)
        )
        return replace(rows, block=block)

    def _in_batches(self, rows: SupervisedRows, sequences: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Divide sequences into batches of the size of an optimizer step, so that no call exceeds its deadline."""
        size = self.batch_size * rows.sequences_per_row
        return [sequences[start : start + size] for start in range(0, len(sequences), size)]

    def _logprobs(self, rows: SupervisedRows, sequences: NDArray[np.int64]) -> list[Handle]:
        """Compute log-probabilities under the current weights. Returns handles of ColumnParts."""
        parts: list[Handle] = []
        for batch in self._in_batches(rows, sequences):
            options = dict(temperature=1.0, names=["logprobs"])
            call = self.group.begin_columns(TrainWorker.compute_columns, rows.batch(batch), self.packing, **options)
            parts += call.result().columns["logprobs"]
        return parts

    def _evaluate(self, held_out: SupervisedRows) -> Metrics:
        """Return the loss of the held-out rows, and their accuracy if the objective has one."""
        every = np.arange(held_out.num_rows)
        loss, _ = self._loss_of_step(held_out, every)
        sequences = held_out.sequences_of(every)
        sums: dict[str, float] = {}
        for batch in self._in_batches(held_out, sequences):
            # The loss is normalized over all held-out rows, so the sums of the batches add up to the mean.
            part = replace(held_out.batch(batch), denominator_rows=sequences)
            report = self.group.evaluate(part, self.packing, weighting=self.objective.weighting, loss=loss)
            for name, value in report.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        return {ours: sums[theirs] for theirs, ours in HELD_OUT_METRICS.items() if theirs in sums}

    def _loss_of_step(self, rows: SupervisedRows, drawn: NDArray[np.int64]) -> tuple[Any, Metrics]:
        """Return the loss object for training or evaluation on the rows `drawn` of the file, and metrics.

        A loss with a reference point (KTO, see mrl.algorithms.preference) gets the reference point of this step.
        """
        loss = self.objective.loss
        others = rows.mismatched_of(np.unique(drawn))
        if not len(others):
            return loss, {}
        log_ratio = self.group.call_rank_0(TrainWorker.mean_log_ratio, rows.block, *self._logprobs(rows, others))
        return loss.with_reference_point(log_ratio), {"preference/reference_point": max(0.0, log_ratio)}


def _loss_metrics(report: UpdateReport) -> Metrics:
    """Return the metrics of the loss: averages over tokens, weighted by the token weights of the loss.

    All sums of a report that are not in ACTOR_SUMS come from the loss. The result also has the metrics of trained MTP layers.
    """
    weight = report.sums.get("weight", 0.0)
    metrics = {name: value / weight for name, value in report.sums.items() if weight and name not in ACTOR_SUMS}
    return metrics | mtp_metrics([report])
