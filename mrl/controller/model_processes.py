"""Starts the worker groups of a run's models, and describes and controls the models that SGLang serves.

ModelGroups starts the worker groups from the plans of their models. Served models are the roles (key `roles`) that SGLang serves.
`served_groups` describes their servers, which the rollout worker starts. ServedModel and ServedTeacher are the driver's handles
to the served models.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.architecture import ModelSpec
from models.families import resolve_family_path
from mrl.config.process_schema import RoleConfig
from mrl.config.schema import Config
from mrl.config.validate import roles_of
from mrl.controller.colocation import ACTOR, MemoryScheduler, MemoryState
from mrl.controller.plan_models import ModelPlan
from mrl.controller.plan_train import TrainPlan
from mrl.core.types import Rollouts
from mrl.placement.placement_groups import RolePlacement
from mrl.rollout.engines.server_args import default_server_args, memory_saver_args
from mrl.rollout.manager import RolloutWorkerHandle
from mrl.rollout.spec import ServerGroup
from mrl.rollout.worker import RolloutWorker
from mrl.tracking.console import Startup
from mrl.workers.group import ComputedColumns, PendingCall, WorkerGroup


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
        mtp_loss_coef=config.model.mtp_loss_coef if plan.arch.mtp_layers else None,
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
    """Return the folder of the run's warm start if this or another run has stored it since the planning; otherwise None."""
    folder = plan.warm_start.output if plan.warm_start else None
    return folder if folder and Path(folder).is_dir() else None


@dataclass(frozen=True)
class ServedModel:
    """Handle with which the MemoryScheduler offloads and loads a served model. The rollout worker runs the model's servers."""

    worker: Callable[[], RolloutWorkerHandle]  # returns the handle; the worker starts after this object is made
    name: str  # key in the section `roles`

    def offload(self, keep_weights: bool = False) -> int:
        """Release the device memory of the servers. Returns 0, because servers do not report the bytes that stay allocated."""
        self.worker().call(RolloutWorker.offload_served, self.name)
        return 0

    def load_to_device(self) -> None:
        """Allocate the memory of the servers again."""
        self.worker().call(RolloutWorker.load_served, self.name)


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher that SGLang serves. For the position of each sampled token, it computes the `top_k` most probable tokens."""

    worker: RolloutWorkerHandle
    name: str  # key in the section `roles`
    top_k: int
    # returns a mask [B] of the responses for which the teacher computes tokens
    rows: Callable[[Rollouts], NDArray[np.bool_]]
    load: Callable[[str], None]  # loads a role to its devices

    def begin_teacher_outputs(self, rollouts: Rollouts) -> PendingCall[ComputedColumns]:
        """Begin to compute the teacher's outputs, which distillation reads."""
        rows = np.flatnonzero(self.rows(rollouts))
        if not len(rows):
            return PendingCall(lambda: ComputedColumns({}, 0.0))
        self.load(self.name)
        method = RolloutWorker.compute_teacher_outputs
        result = self.worker.begin(method, rollouts.block, rows, self.name, self.top_k)
        return PendingCall(result).then(lambda found: ComputedColumns({}, found[1], {self.name: [found[0]]}))


def with_device_slots(group: ServerGroup, placement: RolePlacement) -> ServerGroup:
    """Return the group with the device slots of its role.

    If the servers of the group are child processes of the rollout worker, returns the group unchanged: they need no slots.
    """
    return replace(group, slots=placement.engine_slots) if placement.pin_engines_to_nodes else group


def served_roles(config: Config) -> dict[str, RoleConfig]:
    """Return the models that SGLang serves to rewards or to distillation, by name."""
    return {name: role for name, role in roles_of(config).items() if role.is_served}


def served_groups(config: Config, run_dir: str, colocated_roles: frozenset[frozenset[str]]) -> tuple[ServerGroup, ...]:
    """Return one ServerGroup for each served model. `with_device_slots` adds the device slots later."""
    shared = {name for roles in colocated_roles for name in roles}
    groups = []
    for name, role in served_roles(config).items():
        assert role.path, "validate.roles_of has checked it"
        device = config.sglang.get("device")
        arguments = default_server_args(config.model.dtype, 0, device=device)
        # SGLang reads the context length from config.json, and the weights of a served model never change.
        for unused in ("context_length", "custom_weight_loader"):
            del arguments[unused]
        # All servers get the same seed, because SGLang (0.5.23) initializes the bias of some classification heads at random.
        arguments |= dict(skip_tokenizer_init=False, served_model_name=name, random_seed=config.run.seed)
        if name in shared:
            saver = memory_saver_args(arguments["device"])
            arguments |= saver | (dict(enable_weights_cpu_backup=True) if saver else {})
        groups.append(
            ServerGroup(
                name=name,
                run_dir=run_dir,
                arguments=arguments | role.sglang,
                model_path=str(Path(role.path).resolve()),
                count=role.num_engines,
                tp_size=role.engine_tp,
                seed=config.run.seed,
                max_replacements=config.fault_tolerance.max_response_attempts,
                timeline=config.tracking.timeline,
            )
        )
    return tuple(groups)
