"""ModelGroups: starts the worker groups of a run's models from their plans."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from models.architecture import ModelSpec
from models.families import resolve_family_path
from mrl.controller.colocation import ACTOR, MemoryScheduler, MemoryState
from mrl.controller.plan_models import ModelPlan
from mrl.controller.plan_train import TrainPlan
from mrl.placement.placement_groups import RolePlacement
from mrl.tracking.console import Startup
from mrl.workers.group import WorkerGroup


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
        ddp=plan.ddp,
        family=resolve_family_path(config.model.family) if config.model.family else None,
        lora=plan.lora and replace(plan.lora, path=plan.lora.path and str(Path(plan.lora.path).resolve())),
        seed=config.run.seed,
        train_vision=config.model.train_vision,
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
        """Roles other than the actor."""
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
        self.groups[role].start(spec, config.run.seed, config.cluster.start_timeout_s, plan.head)

    def wait_started(self, role: str) -> None:
        """Wait until every rank has built the model. Does nothing if the model has started already."""
        if self._scheduler.state(role) is MemoryState.NOT_STARTED:
            plan = self._plans[role]
            self.groups[role].wait_ready(plan.config.cluster.start_timeout_s)
            self._scheduler.mark_started(role)
            if role == ACTOR:
                self._startup.ready(f"trainer ready ({plan.dims.world_size} processes)")

    def start_others(self, paths: Mapping[str, str]) -> None:
        """Build the models beside the actor, and wait for them. Models that share devices are built one after another.

        `paths`: role -> folder that replaces the folder in the model's plan.
        """
        for role in self.roles_beside_actor:
            self._scheduler.make_room(role)
            self.start(role, paths.get(role))
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


def stored_warm_start(plan: TrainPlan) -> str | None:
    """Return the folder of the run's warm start if another run has stored it since this run was planned; otherwise None."""
    folder = plan.warm_start.output if plan.warm_start else None
    return folder if folder and Path(folder).is_dir() else None
