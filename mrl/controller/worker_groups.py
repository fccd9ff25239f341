"""ModelGroups: the worker groups of a run's models (actor, critic, teacher), from their plans to ranks that hold the models."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from models.families import resolve_family_path
from mrl.controller.colocation import ACTOR, MemoryScheduler, MemoryState
from mrl.controller.plan_models import ModelPlan
from mrl.placement.placement_groups import RolePlacement
from mrl.tracking.console import Startup
from mrl.workers.group import WorkerGroup
from mrl.workers.model_spec import ModelSpec


def model_spec(plan: ModelPlan, routing_replay: bool = False) -> ModelSpec:
    """Return what every trainer rank builds its model from.

    `routing_replay`: the trainer routes each token to the experts that the engine chose.
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
        family=resolve_family_path(config.model.family) if config.model.family else None,
    )


class ModelGroups:
    """Worker groups by role. The constructor asks Ray for the processes; `start` builds a model in them."""

    def __init__(
        self,
        plans: Mapping[str, ModelPlan],
        places: Mapping[str, RolePlacement],
        scheduler: MemoryScheduler,
        startup: Startup,
        stack: ExitStack,
    ) -> None:
        """`plans` and `places` by role, the actor first. Every group is closed with `stack`."""
        self._plans, self._scheduler, self._startup = plans, scheduler, startup
        self.groups: dict[str, WorkerGroup] = {}
        for role, plan in plans.items():
            config, name = plan.config, "" if role == ACTOR else role
            run_dir, timeout_s = str(Path(config.run.dir).resolve()), config.trainer.timeout_s
            group = WorkerGroup(plan.dims, run_dir, timeout_s, places[role].options, name, scheduler.load)
            stack.callback(group.close)
            scheduler.register_model(role, group)
            self.groups[role] = group

    @property
    def actor(self) -> WorkerGroup:
        """The actor's group."""
        return self.groups[ACTOR]

    @property
    def others(self) -> list[str]:
        """Roles other than the actor: critic and teacher, if the run has them."""
        return [role for role in self.groups if role != ACTOR]

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """Groups of the models that a checkpoint contains: actor and critic."""
        return {role: group for role, group in self.groups.items() if self._plans[role].optimizer is not None}

    def start(self, role: str, model_path: str | None = None) -> None:
        """Begin to build the model on every rank, from the weights in `model_path` if given; returns at once."""
        plan = self._plans[role]
        config = plan.config
        spec = model_spec(plan, routing_replay=role == ACTOR and config.rollout.routing_replay)
        if model_path:
            spec = replace(spec, model_path=str(Path(model_path).resolve()))
        self.groups[role].start(spec, config.run.seed, config.cluster.start_timeout_s, critic=role == "critic")

    def wait_started(self, role: str) -> None:
        """Wait until every rank has the model, if that is not known yet."""
        if self._scheduler.state(role) is MemoryState.NOT_STARTED:
            plan = self._plans[role]
            self.groups[role].wait_ready(plan.config.cluster.start_timeout_s)
            self._scheduler.mark_started(role)
            if role == ACTOR:
                self._startup.ready(f"trainer ready ({plan.dims.world_size} processes)")

    def start_others(self, critic_path: str | None) -> None:
        """Build critic and teacher, and wait for them. Models that share devices start one after another."""
        for role in self.others:
            self._scheduler.make_room(role)
            self.start(role, critic_path if role == "critic" else None)
            if self._scheduler.peers(role):
                self.wait_started(role)
        for role in self.others:
            self.wait_started(role)

    def alive(self) -> bool:
        """Whether every rank of every model answers."""
        return all(group.alive() for group in self.groups.values())

    def restart(self) -> None:
        """Kill the ranks of all models and ask Ray for new processes."""
        for group in self.groups.values():
            group.restart()
        self._scheduler.mark_ended(*self.groups)
