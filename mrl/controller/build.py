"""Builds the objects of `mrl train`, `mrl certify` and `mrl replay` from plans, and starts the processes of these commands."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models.megatron_overrides import LAYOUT_FIELDS
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.parts import POLICY_COLUMNS, Coefficients, build_weighting
from mrl.checkpoint.resume import ResumePoint
from mrl.checkpoint.run_dir import SampleLedger, lock_run_dir, read_run_record
from mrl.checkpoint.saver import CheckpointSaver, CheckpointSchedule, exported_step
from mrl.checkpoint.store import CheckpointStore
from mrl.config.schema import Config
from mrl.config.secrets import config_as_json
from mrl.config.validate import roles_of, teachers_of
from mrl.controller.loop_parts import Phases
from mrl.controller.model_processes import ServedTeacher, model_spec
from mrl.controller.plan_distillation import taught_responses
from mrl.controller.plan_models import ModelPlan
from mrl.controller.plan_step import num_prompts
from mrl.controller.plan_train import TrainPlan, learning_settings
from mrl.controller.processes import REFERENCE_PART, ProcessRecovery, RunProcesses, run_processes
from mrl.controller.trainer import Trainer, TrainingResult, TrainingSchedule, used_prompts
from mrl.core.run_errors import PreemptionHandler, StartError
from mrl.core.sample_file import best_and_worst_text, recent_samples
from mrl.diagnostics.engine_check import EngineCheck, EngineReport
from mrl.diagnostics.layout_comparison import ParityCheck, ReplayResult, StepReplay
from mrl.diagnostics.step_dump import StepDump, StepDumpRecorder, WeightsLocation
from mrl.placement.ray_cluster import ray_cluster
from mrl.rollout.client import EngineClient
from mrl.rollout.engines.forward_recorder import recording_args
from mrl.rollout.engines.server import EngineServer
from mrl.rollout.engines.server_args import DETERMINISTIC, default_server_args
from mrl.tracking.backends import TRACKER_SINKS, TrackedRun, default_run_name
from mrl.tracking.console import ConsoleSink, Startup, show_warning
from mrl.tracking.learning_health import LearningHealth, read_first_steps
from mrl.tracking.tracker import CurveSink, JsonlSink, Sink, Tracker
from mrl.weight_sync.engine_layout import EngineLayout
from mrl.workers.group import StepRecording, WorkerGroup
from mrl.workers.model_trainers import ActorTrainer, ColumnPass, CriticTrainer, RoleScorer, UpdateRunner
from mrl.workers.trace_comparison import ParityDifference
from parallel import spans
from parallel.dims import ParallelDims

SHARED_GPU_FRACTION = 0.4
"""Fraction of a GPU's memory for an engine that `mrl certify engine` compares with a trainer rank on the same GPU."""


def certify(plan: ModelPlan, loss: Loss | ValueLossFunction) -> list[ParityDifference]:
    """Compare one training step under the plan's layout with the same step in one process.

    With certify.critic, the model is a critic and `loss` is its value loss. Otherwise `loss` is the actor's loss.
    """
    config = plan.config
    run_dir = Path(config.run.dir).resolve()
    with lock_run_dir(run_dir, "certify", config_as_json(config)), ray_cluster(config.cluster) as options:
        job = ParityCheck(
            settings=config.certify,
            arch=plan.arch,
            packing=plan.packing,
            loss=loss,
            weighting=replace(build_weighting(config), max_response_tokens=config.certify.response_tokens),
            temperature=config.rollout.temperature,
            folder=str(run_dir),
            has_balancing_loss=config.megatron.get("moe_router_load_balancing_type", "none") != "none",
            routing_replay=config.rollout.routing_replay,
            start_ranks=partial(
                _trainer_ranks, plan, config.certify.dtype, options=options, critic=config.certify.critic
            ),
        )
        return job.run(plan.dims)


def certify_engine(plan: ModelPlan, layout: EngineLayout) -> EngineReport:
    """Compare an engine with the model of one trainer rank, on the same weights. `layout`: how the engine shards the model."""
    config = plan.config
    run_dir = Path(config.run.dir).resolve()
    folder = run_dir / "engine_check"
    with lock_run_dir(run_dir, "certify", config_as_json(config)), ray_cluster(config.cluster) as options:
        job = EngineCheck(
            settings=config.certify,
            arch=plan.arch,
            layout=layout,
            packing=plan.packing,
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            folder=str(folder),
            start_ranks=partial(
                _trainer_ranks, replace(plan, optimizer=None), config.certify.dtype, options=options, critic=False
            ),
            start_engine=partial(_certified_engine, plan, folder),
        )
        return job.run()


@contextmanager
def _certified_engine(plan: ModelPlan, folder: Path) -> Iterator[EngineClient]:
    """Start an engine that records forward passes into `folder`, and yield a client. Raises StartError if it does not start."""
    config = plan.config
    arguments = default_server_args(config.certify.dtype, plan.context, device=config.sglang.get("device"))
    if arguments["device"] == "cuda":
        arguments["mem_fraction_static"] = SHARED_GPU_FRACTION  # the trainer rank may be on the same GPU
    arguments |= config.sglang | recording_args(folder) | {DETERMINISTIC: config.rollout.deterministic}
    arguments |= dict(
        model_path=str(Path(plan.model_path).resolve()), tp_size=config.rollout.engine_tp, random_seed=config.run.seed
    )
    log = Path(config.run.dir).resolve() / "logs" / "engine_0.log"
    with EngineServer(arguments, log) as server:
        try:
            server.wait_ready(config.cluster.start_timeout_s)
        except (RuntimeError, TimeoutError) as error:
            raise StartError(str(error)) from error
        with EngineClient(server.url, config.rollout.request_timeout_s) as client:
            yield client


def replay(
    plan: ModelPlan, dump: StepDump, weights: WeightsLocation, loss: Loss, reference_dims: ParallelDims
) -> ReplayResult:
    """Repeat a dumped step under the plan's layout and under the layout `reference_dims`, and compare the results."""
    config = plan.config
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    with ray_cluster(config.cluster) as options:
        job = StepReplay(
            dump=dump,
            checkpoint=str(dump.weights_folder(weights)) if weights.checkpoint else None,
            packing=plan.packing,
            loss=loss,
            weighting=build_weighting(config),
            dtype=config.model.dtype,
            folder=str(Path(config.run.dir).resolve()),
            has_balancing_loss=config.megatron.get("moe_router_load_balancing_type", "none") != "none",
            start_ranks=partial(_trainer_ranks, plan, config.model.dtype, options=options, critic=False),
        )
        return job.run(plan.dims, reference_dims)


@contextmanager
def _trainer_ranks(
    plan: ModelPlan, dtype: str, dims: ParallelDims, options: dict[str, Any], critic: bool
) -> Iterator[WorkerGroup]:
    """Start trainer ranks for the plan's model under the layout `dims`. The ranks end when the context exits.

    `options`: Ray options of each rank. `critic`: whether the model gets the output head of a critic.
    """
    config = plan.config
    group = WorkerGroup(
        dims, str(Path(config.run.dir).resolve()), config.trainer.timeout_s, lambda: [options] * dims.world_size
    )
    try:
        # In the first optimizer step, Adam divides each gradient by that gradient's absolute value. So a gradient that is only
        # round-off would change its weight by a full learning rate. A large eps prevents this.
        optimizer = plan.optimizer and replace(plan.optimizer, eps=max(plan.optimizer.eps, 1e-6))
        spec = replace(model_spec(plan, config.rollout.routing_replay), dims=dims, dtype=dtype, optimizer=optimizer)
        if dims.world_size == 1:
            spec = replace(spec, overrides={k: v for k, v in spec.overrides.items() if k not in LAYOUT_FIELDS})
        group.start(spec, config.run.seed, config.cluster.start_timeout_s, "value" if critic else "vocabulary")
        group.wait_ready(config.cluster.start_timeout_s)
        yield group
    finally:
        group.close()


@contextmanager
def trainer(plan: TrainPlan, preemption: PreemptionHandler, startup: Startup | None = None) -> Iterator[Trainer]:
    """Start the processes of a run, restore the run's state, and yield the run's Trainer.

    All processes end when the context exits. `startup` shows on the terminal what the start waits for.
    """
    startup = startup or Startup()
    config, checkpoint = plan.config, plan.resume.checkpoint
    preemption.may_abandon = lambda: True  # no step is running yet, so no work is lost
    with run_processes(plan, startup) as processes:
        held_out = f"; held out: {plan.test.report}" if plan.test else ""
        processes.startup.ready(f"prompts read ({plan.train.report}{held_out}), Ray is up")
        saver = _saver(plan, processes)
        _check_no_newer_checkpoint(plan.resume, saver.store)
        recovery = ProcessRecovery(
            processes, saver.store, checkpoint, config.fault_tolerance.max_restarts, saver.restart_from
        )
        recovery.begin()
        startup.wait_for("the evaluation of the initial weights and the first step")
        last_step = checkpoint.step if checkpoint else 0
        with ExitStack() as stack:
            health = _learning_health(plan, last_step)
            stack.callback(health.report_totals)  # after the tracker has closed its progress display
            tracker = stack.enter_context(Tracker([startup, *_sinks(config, plan.num_steps, last_step, startup)]))
            ledger = SampleLedger(Path(config.run.dir) / "ledger.jsonl", last_step)
            stack.callback(ledger.close)
            models = _build_models(plan, processes, saver.store)
            built = plan.step.build(
                prompts=plan.prompts,
                rollout=processes.rollout,
                scorers=models.scorers,
                actor=models.actor,
                critic=models.critic,
                coefs=Coefficients(plan.algorithm.terms),
                weight_sync=processes.engines,
                phase=Phases(),
                tracker=tracker,
                ledger=ledger,
                saver=saver,
                recover=recovery,
                preemption_requested=preemption,
                check_learning=health.check,
                begin_step=_step_recorder(config, processes, stack),
                placement_metrics=processes.scheduler.metrics,
                schedule=_schedule(config, len(plan.train), critic=plan.critic is not None),
                data_source=plan.data_source,
            )
            recovery.initial_state = built.state_dict()
            if checkpoint:
                if not plan.resume.of_another_run:
                    saver.restart_from(checkpoint)
                built.load_state_dict(dict(checkpoint.state))
            preemption.may_abandon = partial(built.should_abandon_step, config.fault_tolerance.preemption_grace_s)
            yield built


def _step_recorder(config: Config, processes: RunProcesses, stack: ExitStack) -> Callable[[int], None]:
    """Return a function that tells processes which step begins, so that they record spans and profiles of the step.

    These processes are the driver, the trainer ranks and, if the run records spans, the rollout worker. If the run records
    neither spans nor profiles, the function does nothing. Closing `stack` ends the driver's part of the timeline.
    """
    profile = config.profile
    recording = StepRecording(config.tracking.timeline, profile.steps, profile.ranks, profile.memory)
    if recording.timeline:
        spans.start(processes.run_dir / spans.FOLDER, "driver", 0, "driver")
        stack.callback(spans.stop)

    def begin_step(step: int) -> None:
        spans.begin_step(step)
        if recording.timeline:
            processes.rollout.worker.begin_step(step)
        for group in processes.models.groups.values():
            group.begin_step(step, recording)

    return begin_step if recording.timeline or recording.profile_steps else lambda step: None


def _check_no_newer_checkpoint(resume: ResumePoint, store: CheckpointStore) -> None:
    """Raise StartError if another checkpoint was written to the run directory after the plan was made."""
    newest, planned = store.latest(), None if resume.of_another_run else resume.checkpoint
    if newest and (planned is None or newest.step != planned.step):
        raise StartError(f"{newest.path} was written while this run was planned; start the command again.")


def _schedule(config: Config, num_rows: int, critic: bool) -> TrainingSchedule:
    """Return the run's TrainingSchedule. `num_rows`: number of training prompts. `critic`: whether the run has a critic."""
    trainer = config.trainer
    return TrainingSchedule(
        max_steps=trainer.max_steps,
        max_prompts=None if trainer.epochs is None else num_prompts(trainer.epochs, num_rows),
        stop_reward=trainer.stop_reward,
        eval_every=trainer.eval_every,
        critic_steps=config.critic.warmup_steps if critic else 0,
    )


def finished_result(config: Config) -> TrainingResult | None:
    """Return the result of the run in run.dir if that run is finished: no step, evaluation or export is left to do.

    Returns None if the run is not finished, if there is no run, or if resume=never. Reads only small files, so this takes less
    than a second.
    """
    folder = Path(config.run.dir).resolve()
    try:
        record = read_run_record(folder)
    except ValueError:  # run.json is damaged; find_resume_point reports this later
        return None
    if config.resume == "never" or record is None or record["command"] != "train":
        return None
    if not (checkpoint := CheckpointStore(folder / "checkpoints").latest()):
        return None
    progress = checkpoint.state["progress"]  # fields of TrainingProgress
    evaluated = bool(progress["after"]) or not (config.data.test or config.data.test_sets)
    if exported_step(folder) != progress["step"]:  # hf/ is missing, or was exported before the run was continued
        return None
    num_rows, num_prompts = 0, 0
    if config.trainer.epochs is not None:
        # rows: number of rows of each source of training prompts
        num_rows, num_prompts = sum(checkpoint.state["prompts"]["rows"]), used_prompts(checkpoint.state)
    schedule = _schedule(config, num_rows, critic=False)
    if not (evaluated and schedule.is_complete(progress["step"], progress["window"], num_prompts)):
        return None
    reward = float(np.mean(progress["window"])) if progress["window"] else float("nan")
    return TrainingResult(progress["step"], reward, progress["before"], progress["after"])


def _learning_health(plan: TrainPlan, last_step: int) -> LearningHealth:
    first = read_first_steps(Path(plan.config.run.dir) / "metrics.jsonl") if last_step else []
    stop = plan.config.trainer.on_unhealthy == "stop"
    return LearningHealth(learning_settings(plan.config, plan.algorithm), show_warning, stop, first)


def _sinks(config: Config, num_steps: int, last_step: int, startup: Startup) -> list[Sink]:
    """Build the sinks that receive the metrics of at most `num_steps` steps.

    Files that exist already keep their lines up to step `last_step`.
    """
    folder, run = Path(config.run.dir), config.run
    metrics = JsonlSink(folder / "metrics.jsonl", last_step=last_step)
    # A run that starts at step 0 evaluates the initial weights again, so the line of step 0 is removed.
    evaluations = JsonlSink(folder / "eval.jsonl", evaluations=True, last_step=last_step or -1)
    curve = CurveSink(folder / "curve.png", title=run.name)
    curve.read_logs([folder / "metrics.jsonl", folder / "eval.jsonl"])
    console = ConsoleSink(
        num_steps,
        title=run.name,
        samples_every=config.tracking.samples_every,
        read_samples=partial(best_and_worst_text, folder),
        startup=startup,
    )
    sinks: list[Sink] = [metrics, evaluations, console, curve]
    tracked = _tracked_run(config, last_step)
    return sinks + [TRACKER_SINKS[name](tracked) for name in dict.fromkeys(config.tracking.backends)]


def _tracked_run(config: Config, last_step: int) -> TrackedRun:
    tracking, folder = config.tracking, Path(config.run.dir)
    return TrackedRun(
        folder=folder,
        project=tracking.project,
        name=tracking.name or default_run_name(config.run.name, folder),
        group=tracking.group,
        entity=tracking.entity,
        tags=tracking.tags,
        notes=tracking.notes,
        config=config_as_json(config),
        last_step=last_step,
        samples_every=tracking.samples_every,
        read_samples=partial(recent_samples, folder),
    )


class _Models(NamedTuple):
    """Objects with which the driver trains and calls the models of a run."""

    actor: ActorTrainer
    critic: CriticTrainer | None
    scorers: list[ColumnPass]  # forward passes that compute columns or outputs of teachers


def _build_models(plan: TrainPlan, processes: RunProcesses, store: CheckpointStore) -> _Models:
    assert plan.optimizer is not None, "the actor is trained"
    config, algorithm, groups = plan.config, plan.config.algorithm, processes.models.groups
    updates = UpdateRunner(
        plan.optimizer,
        plan.packing,
        plan.algorithm.weighting,
        algorithm.mini_batches,
        algorithm.epochs,
    )
    actor = ActorTrainer(
        processes.models.actor,
        plan.algorithm.objective,
        replace(updates, observer=_step_dump_recorder(plan, store)),
        config.rollout.temperature,
        algorithm.skip_zero_advantage,
    )
    required_inputs, critic = plan.algorithm.required_inputs, None
    scorers: list[ColumnPass] = []
    if names := [name for name in POLICY_COLUMNS if name in required_inputs]:
        scorers.append(partial(actor.begin_columns, names=names))
    if plan.actor_holds_reference:
        scorers.append(actor.begin_reference_logprobs)
    if plan.critic:
        critic = _build_critic(plan.critic, groups["critic"], plan.algorithm.value_loss, updates)
        scorers.append(critic.begin_values)
    return _Models(actor, critic, _served_teachers(plan, processes) + scorers + _role_scorers(plan, groups))


def _role_scorers(plan: TrainPlan, groups: Mapping[str, WorkerGroup]) -> list[ColumnPass]:
    """Return the forward passes of those models of the key `roles` that run in Megatron."""
    config, distillation = plan.config, plan.algorithm.objective.distillation
    teachers = teachers_of(config) if distillation else {}
    scorers: list[ColumnPass] = []
    for name, role in roles_of(config).items():
        if name not in plan.models_beside_actor:
            continue
        rows = taught_responses(config, name, plan.data_source)
        packing, temperature = plan.models_beside_actor[name].packing, config.rollout.temperature
        scorer = RoleScorer(groups[name], packing, temperature, role.column, rows)
        if role.column in plan.algorithm.required_inputs:
            scorers.append(scorer.begin_logprobs)
        if distillation and name in teachers:
            options = dict(teacher=name, temperature=distillation.temperature, top_k=distillation.top_k)
            scorers.append(partial(scorer.begin_teacher_outputs, **options))
    return scorers


def _served_teachers(plan: TrainPlan, processes: RunProcesses) -> list[ColumnPass]:
    """Return the forward passes of the teachers that SGLang serves.

    `Trainer.score` begins these passes first, because the servers are still on their devices after sampling.
    """
    config, distillation = plan.config, plan.algorithm.objective.distillation
    if distillation is None or distillation.top_k is None:
        return []
    return [
        ServedTeacher(
            processes.rollout.worker,
            name,
            distillation.top_k,
            taught_responses(config, name, plan.data_source),
            processes.scheduler.load,
        ).begin_teacher_outputs
        for name, role in teachers_of(config).items()
        if role.is_served
    ]


def _build_critic(
    plan: ModelPlan, group: WorkerGroup, loss: ValueLossFunction, actor_updates: UpdateRunner
) -> CriticTrainer:
    assert plan.optimizer is not None, "a critic is trained"
    critic = plan.config.critic
    updates = replace(
        actor_updates,
        optimizer=plan.optimizer,
        packing=plan.packing,
        mini_batches=critic.mini_batches or actor_updates.mini_batches,
        epochs=critic.epochs or actor_updates.epochs,
    )
    return CriticTrainer(group, loss, updates)


def _saver(plan: TrainPlan, processes: RunProcesses) -> CheckpointSaver:
    config, run_dir = plan.config.checkpoint, processes.run_dir
    return CheckpointSaver(
        store=CheckpointStore(
            run_dir / "checkpoints",
            config.keep_last,
            dict(critic=config.keep_last_critic or config.keep_last),
            keep_best=config.keep_best,
            copy_to=config.copy_to,
            damaged=set(plan.resume.damaged),
        ),
        models=processes.models.trained_groups,
        constant_parts={REFERENCE_PART: processes.save_reference} if plan.actor_holds_reference else {},
        schedule=CheckpointSchedule(
            config.every,
            config.export_every,
            config.asynchronous,
            plan.config.trainer.timeout_s,
            plan.config.trainer.save,
            config.best_metric,
            config.keep_last_exports,
        ),
        run_description=dict(
            model=plan.identity(),
            layout=vars(plan.dims),
            config=config_as_json(plan.config),
        ),
        discard_rollout_log=processes.rollout.discard_log,
        export=processes.export_weights,
        run_dir=run_dir,
    )


def _step_dump_recorder(plan: TrainPlan, store: CheckpointStore) -> StepDumpRecorder:
    config = plan.config
    # Hugging Face folder with the weights before step 1. None: the run does not store its warm start.
    initial_weights = plan.warm_start.output if plan.warm_start else plan.model_path

    def latest_weights() -> WeightsLocation | None:
        """Return the location of the newest weights on disk, or None if the run has no weights on disk."""
        if checkpoint := store.latest():
            folder = str(checkpoint.path / "actor")
            return WeightsLocation(folder, checkpoint.step, checkpoint=True, hf_folder=plan.model_path)
        return WeightsLocation(str(Path(initial_weights).resolve()), 0) if initial_weights else None

    return StepDumpRecorder(
        folder=Path(config.run.dir).resolve() / "step_dumps",
        settings=config.step_dump,
        layout=asdict(plan.dims),
        config=config_as_json(config),
        latest_weights=latest_weights,
        num_critic_steps=config.critic.warmup_steps if plan.critic else 0,
    )
