"""Supervised fine-tuning in the actor's trainer ranks: the stage of `mrl sft`, and the warm start before RL."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mrl.algorithms.losses import CrossEntropy
from mrl.config.schema import Config, SftConfig
from mrl.controller.plan_models import ModelPlan, chat_template
from mrl.controller.plan_train import WARM_START_SETTINGS, TrainPlan, warm_start_settings
from mrl.core.types import Handle, TrainBatch
from mrl.data.prompts import PromptStream
from mrl.tracking.console import ConsoleSink
from mrl.tracking.tracker import JsonlSink, Tracker
from mrl.workers.dp_partition import Packing
from mrl.workers.group import WorkerGroup
from mrl.workers.worker import TrainWorker
from parallel.trainer_config import OptimConfig

logger = logging.getLogger(__name__)


def stored_warm_start(plan: TrainPlan) -> str | None:
    """Return the folder of the run's warm start if it exists, perhaps stored by another run since this one was planned."""
    folder = plan.warm_start.output if plan.warm_start else None
    return folder if folder and Path(folder).is_dir() else None


def train_supervised(actor: WorkerGroup, plan: ModelPlan, sft: SftConfig) -> float:
    """Train the actor on the rows of `sft.train`; returns the loss of the last step, in nats per response token."""
    assert sft.train, "only called for a config with a supervised stage"
    optim = replace(sft.optim, lr_decay_steps=sft.optim.lr_decay_steps or sft.steps)
    actor.call(TrainWorker.reset_optimizer, **vars(optim))
    rows, tokenizer = str(Path(sft.train).resolve()), str(Path(plan.model_path).resolve())
    data = actor.call_rank_0(
        TrainWorker.load_supervised_dataset, rows, tokenizer, plan.context, chat_template(plan.config)
    )
    stage = SupervisedStage(
        group=actor,
        block=data["handle"],
        lengths=data["lengths"],
        response_lengths=data["response_lengths"],
        sampled_lengths=data["sampled_lengths"],
        steps=sft.steps,
        batch_size=sft.batch_size,
        optim=optim,
        packing=plan.packing,
        seed=plan.config.run.seed,
    )
    metrics = JsonlSink(Path(plan.config.run.dir).resolve() / "sft.jsonl")
    with Tracker([metrics, ConsoleSink(sft.steps, title="supervised")]) as tracker:
        return stage.run(tracker)


def export_supervised(actor: WorkerGroup, config: Config, output: str) -> None:
    """Write the actor's weights as a Hugging Face folder, together with the settings that decided them."""
    settings = {WARM_START_SETTINGS: json.dumps(warm_start_settings(config))}
    actor.call(TrainWorker.export_hf, str(Path(output).resolve()), settings)


def store_warm_start(actor: WorkerGroup, config: Config, output: str) -> None:
    """Export the warm start for later runs, unless another run has exported the same one or is about to."""
    try:
        if not Path(output).exists():
            export_supervised(actor, config, output)
    except (OSError, ValueError) as error:
        if not any(Path(name).is_dir() for name in (output, f"{output}.partial")):
            raise
        logger.warning("the warm start was not stored, another run has done it: %s", error)


@dataclass(frozen=True)
class SupervisedStage:
    """Optimizer steps on a data set that is in Ray's object store."""

    group: WorkerGroup
    block: Handle  # TokenBlock of the data set
    lengths: np.ndarray  # [rows] tokens
    response_lengths: np.ndarray  # [rows] tokens
    sampled_lengths: np.ndarray  # [rows] tokens in the loss: responses without their tool results
    steps: int
    batch_size: int  # rows per step
    optim: OptimConfig
    packing: Packing
    seed: int

    def run(self, tracker: Tracker) -> float:
        """Train; returns the loss of the last step, in nats per response token."""
        stream = PromptStream(len(self.lengths), self.batch_size, seed=self.seed, shuffle=True)
        prompt_lengths = self.lengths - self.response_lengths
        loss = float("nan")
        for step in range(self.steps):
            rows = next(stream)
            lr = self.optim.lr_at(step)
            lengths = (prompt_lengths, self.response_lengths, self.sampled_lengths)
            batch = TrainBatch(self.block, *lengths, None, rows, rows)
            (report,) = self.group.update(
                [batch], self.packing, aggregation="token_mean", lrs=[lr], loss=CrossEntropy(), temperature=1.0
            )
            loss = report.sums["loss"]
            grad_norm = report.maxima["optim/grad_norm"]
            tracker.log(step + 1, {"loss/sft": loss, "optim/grad_norm": grad_norm, "optim/lr": lr})
        return loss
