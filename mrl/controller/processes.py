"""All processes of an RL run: RunProcesses starts and ends the processes, and ProcessRecovery restarts lost processes."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mrl.checkpoint.run_dir import lock_run_dir, record_run
from mrl.checkpoint.store import Checkpoint, CheckpointStore
from mrl.config.schema import Config
from mrl.config.secrets import config_as_json
from mrl.config.validate import roles_of
from mrl.controller.colocation import ACTOR, ENGINES, MemoryScheduler
from mrl.controller.engine_lifecycle import EngineLifecycle
from mrl.controller.loop_parts import State
from mrl.controller.model_processes import (
    ModelGroups,
    ServedModel,
    served_groups,
    served_roles,
    stored_warm_start,
    with_device_slots,
)
from mrl.controller.plan_adapters import syncs_adapters
from mrl.controller.plan_distillation import teacher_output_layer_folders
from mrl.controller.plan_models import ModelPlan, chat_template, gpu_transport
from mrl.controller.plan_prompts import image_environment
from mrl.controller.plan_train import TrainPlan
from mrl.controller.supervised_stage import store_warm_start, train_supervised
from mrl.core.processes import shutdown_deadline
from mrl.core.run_errors import ProcessesLostError, StartError, StartupLostError
from mrl.data.samplers import largest_size
from mrl.placement.device_map import device_map_text
from mrl.placement.placement_groups import PlacementError, RolePlacement, current_device_map, place_pools
from mrl.placement.ray_cluster import cluster_hosts, ray_cluster
from mrl.placement.resource_pools import Pools
from mrl.rollout.engines.server_args import NCCL_VARIABLES, memory_saver_args, nccl_environment, speculates
from mrl.rollout.manager import RolloutManager, RolloutWorkerHandle
from mrl.rollout.spec import RolloutSpec
from mrl.tracking.console import Startup, show_warning
from mrl.workers.group import WorkerGroup
from mrl.workers.worker import TrainWorker

logger = logging.getLogger(__name__)
REFERENCE_PART = "reference"  # name of a part of a checkpoint: the weights of the reference policy


class RunProcesses:
    """Trainer ranks of every model, and the rollout worker with its engines. The constructor starts them in parallel.

    Engines and served models that share devices with trainers start only after the actor has left these devices.
    """

    def __init__(
        self, plan: TrainPlan, placements: Mapping[str, RolePlacement], stack: ExitStack, startup: Startup
    ) -> None:
        """`placements`: role -> its slots (see mrl.placement.placement_groups). Closing `stack` ends every process."""
        config = plan.config
        self.plan, self.startup, self.run_dir = plan, startup, Path(config.run.dir).resolve()
        self.scheduler = MemoryScheduler(plan.colocated_roles)
        self.models = ModelGroups(plan.models, placements, self.scheduler, self.startup, stack)
        for name in served_roles(config):
            self.scheduler.register_served(name, ServedModel(lambda: self.rollout.worker, name))
        self._start_actor()
        # SGLang sizes its KV cache by the memory that is free when it starts, so the actor first leaves the shared devices.
        if self.scheduler.rollout_shares_devices():
            self.models.wait_started(ACTOR)
            self.scheduler.make_room_for_rollout()
        worker = self._start_rollout_worker(placements)
        stack.callback(worker.close)
        self.engines = EngineLifecycle(
            engine_processes=worker,
            actor=self.models.actor,
            scheduler=self.scheduler,
            settings=config.weight_sync,
            startup_display=self.startup,
            weights_dir=str(self.run_dir / "weights"),
            start_timeout_s=config.cluster.start_timeout_s,
            # With staleness, requests run during a push. An engine that a push has paused must not count as failed.
            marks_pushes_as_pauses=config.rollout.staleness > 0,
        )
        self.rollout = RolloutManager(worker, self.engines)

    def _start_rollout_worker(self, placements: Mapping[str, RolePlacement]) -> RolloutWorkerHandle:
        spec, options = rollout_spec(self.plan, str(self.run_dir)), dict[str, Any](num_cpus=0)
        spec = replace(spec, served=tuple(with_device_slots(group, placements[group.name]) for group in spec.served))
        placement = placements.get(ENGINES)
        if placement and placement.pin_engines_to_nodes:
            spec = replace(spec, slots=placement.engine_slots)
        elif placement:  # the engines are child processes of the rollout worker, and use its slot
            options = dict(placement.options()[0])
        return RolloutWorkerHandle(spec, options, self.plan.config.rollout.request_timeout_s + 60)

    def _start_actor(self) -> None:
        """Start building the actor. If this or another run has stored the warm start by now, the actor loads that warm start."""
        stored = stored_warm_start(self.plan)
        self._needs_warm_start = self.plan.warm_start is not None and stored is None
        self.models.start(ACTOR, stored)

    def bring_up(self, checkpoint: Checkpoint | None) -> None:
        """Wait for all models, and load the checkpoint into them.

        If there is no checkpoint, prepare the initial weights of a new run.
        """
        plan, actor = self.plan, self.models.actor
        self.models.wait_started(ACTOR)
        if self.scheduler.rollout_shares_devices():
            # The engines must be connected before their first offload, see EngineLifecycle.reset_after_trainer_restart.
            self.engines.wait_started()
            self.engines.connect()
        if self._needs_warm_start and not checkpoint:
            self._warm_start(actor)
        if plan.actor_holds_reference:
            if checkpoint:
                actor.call(TrainWorker.load_reference, str(checkpoint.path / REFERENCE_PART))
            else:
                actor.call(TrainWorker.copy_weights_to_reference)
        if self.models.roles_beside_actor:
            self.models.start_others(self._paths_of_others())
            self.startup.ready(" and ".join(self.models.roles_beside_actor) + " ready")
        if folders := self._output_layers_of_teachers():
            actor.call(TrainWorker.load_teacher_weights, folders)
        if checkpoint:
            for role, group in self.models.trained_groups.items():
                group.call(TrainWorker.load, str(checkpoint.path / role))
            self.startup.ready(f"step {checkpoint.step} restored from {checkpoint.path}")

    def _warm_start(self, actor: WorkerGroup) -> None:
        self.startup.wait_for("the supervised warm start")
        plan, sft = self.plan, self.plan.warm_start
        assert sft is not None and plan.optimizer is not None, "a run with a warm start trains the actor"
        loss = train_supervised(actor, plan, sft, self.startup)
        if sft.output:
            store_warm_start(actor, plan.config, sft.output)
        actor.call(TrainWorker.reset_optimizer, **vars(plan.optimizer))
        self.startup.ready(f"supervised warm start done (loss {loss:.3f})")

    def _paths_of_others(self) -> dict[str, str]:
        """Return role -> folder of the warm start, for the models beside the actor that start from the warm start.

        All other models start from the folders in their plans.
        """
        config, warm_start = self.plan.config, self.plan.warm_start
        paths = {"critic": config.critic.path} | {name: role.path for name, role in roles_of(config).items()}
        if not (warm_start and warm_start.output):
            return {}
        return {role: warm_start.output for role in self.plan.models_beside_actor if not paths[role]}

    def _output_layers_of_teachers(self) -> dict[str, str]:
        """Return teacher -> folder from which the actor's ranks read the output layer of this teacher."""
        folders = teacher_output_layer_folders(self.plan.config, self.plan.algorithm, self.plan.models_beside_actor)
        paths = self._paths_of_others()
        return {name: str(Path(paths.get(name, folder)).resolve()) for name, folder in folders.items()}

    def restart_trainers(self) -> None:
        """Kill the trainer ranks of all models, and start building the actor in new trainer ranks."""
        self.models.restart()
        self.engines.reset_after_trainer_restart()
        self.scheduler.make_room(ACTOR)
        self._start_actor()

    def save_reference(self, folder: str) -> None:
        """Write the reference policy's weights."""
        self.models.actor.call(TrainWorker.save_reference, folder)

    def export_weights(self, folder: str) -> None:
        """Write the actor's weights as a Hugging Face folder."""
        self.models.actor.call(TrainWorker.export_hf, folder)


def rollout_spec(plan: TrainPlan, run_dir: str) -> RolloutSpec:
    """Return the spec from which the rollout worker is built."""
    config, rollout = plan.config, plan.config.rollout
    engines_are_colocated = any(ENGINES in roles for roles in plan.colocated_roles)
    saver = memory_saver_args(plan.server_args["device"]) if engines_are_colocated else {}
    if saver and (syncs_adapters(config) or plan.arch.vision):
        saver |= dict(enable_weights_cpu_backup=True)  # no push sends the base model, or the vision tower, again
    if saver and speculates(plan.server_args):
        saver |= dict(enable_draft_weights_cpu_backup=True)  # no push sends the MTP layer again, unless it is trained
    return RolloutSpec(
        model_path=str(Path(plan.model_path).resolve()),
        run_dir=run_dir,
        train=plan.train,
        test=plan.test,
        reward=plan.reward,
        advantage_pipeline=plan.algorithm.advantage_pipeline,
        rollout_filter=plan.algorithm.rollout_filter,
        needs_greedy="greedy_rewards" in plan.algorithm.required_inputs,
        rollout_logprobs_as_old=config.algorithm.old_logprobs == "rollout",
        prompts_per_step=rollout.prompts_per_step,
        scoring=config.scoring,
        responses_per_prompt=rollout.responses_per_prompt,
        sampling=plan.sampling,
        max_group_size=largest_size(plan.prompt_drawing.group_sizes, rollout.responses_per_prompt),
        offline=plan.offline,
        num_engines=0 if rollout.replay else rollout.num_engines,
        engine_urls=() if rollout.replay else tuple(rollout.engine_urls),
        engine_tp=rollout.engine_tp,
        deterministic=rollout.deterministic,
        timeline=config.tracking.timeline,
        samples_per_step=config.tracking.samples_per_step,
        staleness=rollout.staleness,
        over_sample_rate=rollout.over_sample_rate,
        in_order=rollout.in_order,
        max_sampling_rounds=rollout.max_sampling_rounds,
        log_key=plan.resume.rollout_log_key(config, plan.data_fingerprint),
        fault_tolerance=config.fault_tolerance,
        agent=plan.agent,
        chat=chat_template(config),
        routed_experts=rollout.routing_replay,
        seed=config.run.seed,
        evaluations=plan.evaluations,
        request_timeout_s=rollout.request_timeout_s,
        record=rollout.record,
        replay=str(Path(rollout.replay).resolve()) if rollout.replay else None,
        served=served_groups(config, run_dir, plan.colocated_roles),
        server_args=saver | plan.server_args,
        engine_env=image_environment(config),
    )


@contextmanager
def run_processes(plan: TrainPlan, startup: Startup) -> Iterator[RunProcesses]:
    """Lock the run directory and start the processes of `mrl train`. The processes end when the context exits.

    Raises StartupLostError if a process is lost during the start.
    """
    with _closed_in_time() as stack:
        try:
            startup.wait_for("Ray and the GPUs of the run")
            placements = stack.enter_context(_cluster(plan.config, "train", plan.pools))
            checkpoint = plan.resume.checkpoint
            step = checkpoint.step if checkpoint else 0
            stack.enter_context(record_run(Path(plan.config.run.dir), step, cluster_hosts()))
            startup.wait_for("the trainer ranks and the engines")
            processes = RunProcesses(plan, placements, stack, startup)
        except ProcessesLostError as error:
            raise StartupLostError(str(error)) from error
        yield processes


@contextmanager
def supervised_trainer(plan: ModelPlan) -> Iterator[WorkerGroup]:
    """Lock the run directory, start the trainer ranks of `mrl sft` and wait for them. The ranks end when the context exits.

    Raises StartupLostError if Ray does not start. Raises ProcessesLostError if a rank is lost while it builds the model. Raises
    StartError if the cluster has no room for the ranks, or if the ranks cannot build the model.
    """
    startup = Startup()
    with _closed_in_time() as stack:
        stack.callback(startup.close)
        startup.wait_for("Ray and the trainer ranks")
        try:
            placements = stack.enter_context(_cluster(plan.config, "sft", plan.pools))
            models = ModelGroups({ACTOR: plan}, placements, MemoryScheduler(frozenset()), startup, stack)
            models.start(ACTOR)
        except ProcessesLostError as error:
            raise StartupLostError(str(error)) from error
        models.actor.wait_ready(plan.config.cluster.start_timeout_s)
        startup.close()
        yield models.actor


@contextmanager
def _closed_in_time() -> Iterator[ExitStack]:
    """Yield a stack for the processes of a run. When the context exits, the stack is closed within a deadline."""
    since = time.time()
    with ExitStack() as stack:
        try:
            yield stack
        finally:
            with shutdown_deadline("the processes of the run", since):
                stack.__exit__(*sys.exc_info())  # unlike close(), this tells the contexts which error ends the run


@contextmanager
def _cluster(config: Config, command: str, pools: Pools) -> Iterator[dict[str, RolePlacement]]:
    """Lock the run directory, connect to Ray and reserve devices. Yields the slots of each role.

    Raises StartError if the cluster has too few devices, or if the weights cannot travel between the GPUs of the roles.
    """
    with ExitStack() as stack:
        stack.enter_context(lock_run_dir(Path(config.run.dir).resolve(), command, config_as_json(config)))
        stack.enter_context(ray_cluster(config.cluster, pools.size, shared_nccl_variables(config, pools)))
        try:
            placements = stack.enter_context(place_pools(pools, config.cluster.start_timeout_s))
            devices = current_device_map(pools, placements)
            if devices.unit == "GPU":
                gpu_transport(config, devices)
        except (ValueError, PlacementError) as error:
            raise StartError(str(error)) from error
        logger.info("placement:\n%s", device_map_text(devices))
        yield placements


def shared_nccl_variables(config: Config, pools: Pools) -> dict[str, str]:
    """Return the NCCL variables that must be equal in trainer ranks and engines, because both may join a common NCCL group.

    If the run has no engines, or if the actor and the engines share a pool, there is no such group. The result is then {}, so
    NCCL keeps its defaults in the trainer ranks. A warning names each variable that has another value in this process.
    """
    engines, actor = pools.by_role.get("engines"), pools.by_role["actor"]
    if engines in (None, actor):
        return {}
    variables = nccl_environment(config.sglang, os.environ)
    for name, value in variables.items():
        if (given := os.environ.get(name, value)) != value:
            chosen = next(f"sglang.{key}=true" for key in NCCL_VARIABLES[name] if config.sglang.get(key))
            show_warning(
                f"{name}={given} is replaced by {value} in all processes of the run: with {chosen}, SGLang sets it to {value}, "
                "and trainer ranks and engines must have the same value."
            )
    return variables


MAX_PAUSE_S = 60.0  # longest time that the driver waits before it restarts lost processes


class NoIntactCheckpointError(ValueError):
    """Every checkpoint from which lost trainers could restart is damaged."""


@dataclass
class ProcessRecovery:
    """Restarts lost processes at most `max_restarts` times between two checkpoints, with pauses that grow."""

    processes: RunProcesses
    store: CheckpointStore
    initial_checkpoint: Checkpoint | None  # checkpoint that the run began with; used until the run has written its own
    max_restarts: int
    on_restart: Callable[[Checkpoint | None], None]  # gets the checkpoint that was loaded into new trainers
    initial_state: State = field(default_factory=dict)  # state before the first step, for a run without a checkpoint
    restarts: int = 0  # number of restarts since the newest checkpoint was written
    newest_step: int | None = None  # step of the newest checkpoint at the last restart; None: there was no checkpoint

    def begin(self) -> None:
        """Bring up all processes for the first time."""
        try:
            self.processes.bring_up(self.initial_checkpoint)
            self.processes.startup.wait_for("the engines")
            self.processes.engines.wait_started()
            self.processes.engines.connect()
        except ProcessesLostError as error:
            self(error, None)

    def __call__(self, error: ProcessesLostError, state_after_step: State | None) -> State:
        """Restart the lost processes. Returns the state that matches the trainers' weights (see LostProcessRecovery).

        Raises the latest error if all restarts are used up. Raises NoIntactCheckpointError if all checkpoints are damaged.
        """
        while True:
            checkpoint = self.store.latest() or self.initial_checkpoint
            step = checkpoint.step if checkpoint else None
            self.restarts, self.newest_step = self.restarts + 1 if step == self.newest_step else 1, step
            if self.restarts > self.max_restarts:
                logger.error("all restarts are used up (fault_tolerance.max_restarts=%d)", self.max_restarts)
                raise error
            time.sleep(min(MAX_PAUSE_S, 2.0 ** (self.restarts - 1) - 1))
            self.processes.startup.ready(f"restart {self.restarts} of at most {self.max_restarts} begun ({error})")
            try:
                return self._restart(error, state_after_step)
            except ProcessesLostError as another:
                error, state_after_step = another, None
            except NoIntactCheckpointError:
                raise  # another restart would find the same files
            except (RuntimeError, ValueError) as failure:  # e.g. a port is taken, or memory is not free yet
                error, state_after_step = ProcessesLostError(f"{type(failure).__name__}: {failure}"), None

    def _restart(self, error: ProcessesLostError, state_after_step: State | None) -> State:
        processes = self.processes
        processes.engines.restart_if_lost(processes.models.alive)
        if state_after_step is None or error.role != "rollout" or not processes.models.alive():
            checkpoint = self._intact_checkpoint()
            processes.restart_trainers()
            processes.bring_up(checkpoint)
            self.on_restart(checkpoint)
            state_after_step = dict(checkpoint.state) if checkpoint else self.initial_state
        processes.engines.connect()
        return state_after_step

    def _intact_checkpoint(self) -> Checkpoint | None:
        """Return the newest checkpoint that is not damaged. If there is none, return the checkpoint that the run began with.

        Returns None if the run has no checkpoint at all. Raises NoIntactCheckpointError if all checkpoints are damaged.
        """
        if checkpoint := self.store.latest_intact():
            return checkpoint
        if self.initial_checkpoint:
            try:
                self.initial_checkpoint.check_hashes()
            except ValueError as error:
                raise NoIntactCheckpointError(str(error)) from error
        elif self.store.damaged:
            raise NoIntactCheckpointError(
                f"{self.store.folder}: the checkpoints of steps {sorted(self.store.damaged)} are damaged and there is no other, "
                "so the trainers cannot be restarted; restore a checkpoint from a copy, and start the same command again."
            )
        return self.initial_checkpoint
