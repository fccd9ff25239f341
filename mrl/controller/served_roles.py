"""Served models (models of the key `roles` that SGLang serves): their servers, and the driver's handles to them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.config.process_schema import RoleConfig
from mrl.config.schema import Config
from mrl.config.validate import roles_of
from mrl.core.types import Rollouts
from mrl.placement.placement_groups import RolePlacement
from mrl.rollout.engines.server_args import default_server_args, memory_saver_args
from mrl.rollout.manager import RolloutWorkerHandle
from mrl.rollout.spec import ServerGroup
from mrl.rollout.worker import RolloutWorker
from mrl.workers.group import ComputedColumns, PendingCall


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
    """A teacher that SGLang serves. It computes its `top_k` most probable tokens at each sampled token."""

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


def on_slots(group: ServerGroup, placement: RolePlacement) -> ServerGroup:
    """Return the group with the slots of its role, unless its servers run as child processes of the rollout worker."""
    return replace(group, slots=placement.engine_slots) if placement.pin_engines_to_nodes else group


def served_roles(config: Config) -> dict[str, RoleConfig]:
    """Return the models that SGLang serves to rewards or to distillation, by name."""
    return {name: role for name, role in roles_of(config).items() if role.is_served}


def served_groups(config: Config, run_dir: str, colocated_roles: frozenset[frozenset[str]]) -> tuple[ServerGroup, ...]:
    """Return the servers of all served models, without their slots."""
    shared = {name for roles in colocated_roles for name in roles}
    groups = []
    for name, role in served_roles(config).items():
        assert role.path, "validate.roles_of has checked it"
        device = config.sglang.get("device")
        arguments = default_server_args(config.model.dtype, 0, device=device)
        for unused in ("context_length", "custom_weight_loader"):  # SGLang reads the context; the weights never change
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
