"""ModelGroups: starts the worker groups of a run's models (actor, critic, teacher) from their plans.

The actor's worker group also runs supervised training, for `mrl sft` and for the warm start before reinforcement learning.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from models.architecture import ModelSpec
from models.families import resolve_family_path
from mrl.algorithms.losses import CrossEntropy
from mrl.config.schema import Config, SftConfig
from mrl.controller.colocation import ACTOR, MemoryScheduler, MemoryState
from mrl.controller.plan_models import ModelPlan, chat_template
from mrl.controller.plan_train import WARM_START_SETTINGS, TrainPlan, warm_start_settings
from mrl.core.types import Handle, TrainBatch
from mrl.data.prompts import PromptStream
from mrl.placement.placement_groups import RolePlacement
from mrl.tracking.console import ConsoleSink, Startup
from mrl.tracking.tracker import JsonlSink, Tracker
from mrl.workers.dp_partition import Packing
from mrl.workers.group import WorkerGroup
from mrl.workers.worker import TrainWorker
from parallel.trainer_config import OptimConfig


def model_spec(plan: ModelPlan, routing_replay: bool = False) -> ModelSpec:
    """Return the spec from which every trainer rank builds its model.

    If `routing_replay` is True, the trainer routes each token to the experts that the engine chose.
    """
    config = plan.config
    return ModelSpec(
        str(Path(plan.model_path).resolve()),
        plan.dims,
        config.model.dtype,
        plan.optimizer,
        config.megatron | (dict(moe_enable_routing_replay=True) if routing_replay else {}),
        share_prompts=plan.packing.share_prompts,
        logprob_chunk=config.trainer.logprob_chunk,
        overlap_grad_reduce=config.trainer.overlap_grad_reduce,
        family=resolve_family_path(config.model.family) if config.model.family else None,
    )


class ModelGroups:
    """Worker groups by role. The constructor asks Ray for the processes; `start` builds a model in them."""

    def __init__(
        self,
        plans: Mapping[str, ModelPlan],
        placements: Mapping[str, RolePlacement],
        scheduler: MemoryScheduler,
        startup: Startup,
        stack: ExitStack,
    ) -> None:
        """`plans` and `placements`: one entry for each role, the actor first. Closing `stack` closes every group."""
        self._plans, self._scheduler, self._startup = plans, scheduler, startup
        self.groups: dict[str, WorkerGroup] = {}
        for role, plan in plans.items():
            config, name = plan.config, "" if role == ACTOR else role
            run_dir, timeout_s = str(Path(config.run.dir).resolve()), config.trainer.timeout_s
            group = WorkerGroup(plan.dims, run_dir, timeout_s, placements[role].options, name, scheduler.load)
            stack.callback(group.close)
            scheduler.register_model(role, group)
            self.groups[role] = group

    @property
    def actor(self) -> WorkerGroup:
        """The actor's group."""
        return self.groups[ACTOR]

    @property
    def roles_beside_actor(self) -> list[str]:
        """Roles other than the actor: the critic and the teacher, if the run has them."""
        return [role for role in self.groups if role != ACTOR]

    @property
    def trained_groups(self) -> dict[str, WorkerGroup]:
        """Groups of the models that a checkpoint contains: actor and critic."""
        return {role: group for role, group in self.groups.items() if self._plans[role].optimizer is not None}

    def start(self, role: str, model_path: str | None = None) -> None:
        """Start building the model on every rank, and return at once. `model_path` replaces the folder in the model's plan."""
        plan = self._plans[role]
        config = plan.config
        spec = model_spec(plan, routing_replay=role == ACTOR and config.rollout.routing_replay)
        if model_path:
            spec = replace(spec, model_path=str(Path(model_path).resolve()))
        self.groups[role].start(spec, config.run.seed, config.cluster.start_timeout_s, critic=role == "critic")

    def wait_started(self, role: str) -> None:
        """Wait until every rank has built the model. Does nothing if the model has started already."""
        if self._scheduler.state(role) is MemoryState.NOT_STARTED:
            plan = self._plans[role]
            self.groups[role].wait_ready(plan.config.cluster.start_timeout_s)
            self._scheduler.mark_started(role)
            if role == ACTOR:
                self._startup.ready(f"trainer ready ({plan.dims.world_size} processes)")

    def start_critic_and_teacher(self, critic_path: str | None) -> None:
        """Build the critic and the teacher, and wait for them. Models that share devices are built one after another."""
        for role in self.roles_beside_actor:
            self._scheduler.make_room(role)
            self.start(role, critic_path if role == "critic" else None)
            if self._scheduler.peers(role):
                self.wait_started(role)
        for role in self.roles_beside_actor:
            self.wait_started(role)

    def alive(self) -> bool:
        """Return whether every rank of every model answers."""
        return all(group.alive() for group in self.groups.values())

    def restart(self) -> None:
        """Kill the ranks of all models and ask Ray for new processes."""
        for group in self.groups.values():
            group.restart()
        self._scheduler.mark_ended(*self.groups)


logger = logging.getLogger(__name__)


def stored_warm_start(plan: TrainPlan) -> str | None:
    """Return the folder of the run's warm start, or None. Another run may have stored it after this run was planned."""
    folder = plan.warm_start.output if plan.warm_start else None
    return folder if folder and Path(folder).is_dir() else None


def train_supervised(actor: WorkerGroup, plan: ModelPlan, sft: SftConfig, startup: Startup | None = None) -> float:
    """Train the actor on the rows of `sft.train`. Returns the loss of the last optimizer step, in nats per response token.

    `startup`: the startup display, if it is shown. The progress of the training replaces it.
    """
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
    with Tracker([metrics, ConsoleSink(sft.steps, title="supervised", startup=startup)]) as tracker:
        return stage.run(tracker)


def export_supervised(actor: WorkerGroup, config: Config, output: str) -> None:
    """Write the actor's weights as a Hugging Face folder, together with the settings that decide these weights."""
    settings = {WARM_START_SETTINGS: json.dumps(warm_start_settings(config))}
    actor.call(TrainWorker.export_hf, str(Path(output).resolve()), settings)


def store_warm_start(actor: WorkerGroup, config: Config, output: str) -> None:
    """Export the warm start for later runs. Does nothing if another run has exported it or is exporting it."""
    try:
        if not Path(output).exists():
            export_supervised(actor, config, output)
    except (OSError, ValueError) as error:
        if not any(Path(name).is_dir() for name in (output, f"{output}.partial")):
            raise
        logger.warning("the warm start was not stored, because another run stores it: %s", error)


@dataclass(frozen=True)
class SupervisedStage:
    """Supervised training: optimizer steps on a data set that is in Ray's object store."""

    group: WorkerGroup
    block: Handle  # handle of a TokenBlock with all rows of the data set
    lengths: np.ndarray  # [rows] tokens
    response_lengths: np.ndarray  # [rows] tokens
    sampled_lengths: np.ndarray  # [rows] response tokens in the loss; tool results are not in the loss
    steps: int  # number of optimizer steps
    batch_size: int  # rows per optimizer step
    optim: OptimConfig
    packing: Packing
    seed: int

    def run(self, tracker: Tracker) -> float:
        """Train, and return the loss of the last optimizer step, in nats per response token."""
        stream = PromptStream(len(self.lengths), self.batch_size, seed=self.seed, shuffle=True)
        prompt_lengths = self.lengths - self.response_lengths
        loss = float("nan")
        for step in range(self.steps):
            rows = next(stream)
            lr = self.optim.lr_at(step)
            lengths = (prompt_lengths, self.response_lengths, self.sampled_lengths)
            batch = TrainBatch(self.block, *lengths, None, rows, rows)
            (report,) = self.group.update([batch], self.packing, lrs=[lr], loss=CrossEntropy(), temperature=1.0)
            loss = report.sums["loss"]  # with token_mean, the weights of all tokens sum to 1
            grad_norm = report.maxima["optim/grad_norm"]
            tracker.log(step + 1, {"loss/sft": loss, "optim/grad_norm": grad_norm, "optim/lr": lr})
        return loss
