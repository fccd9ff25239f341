"""The composition root: a TrainPlan -> processes and a wired Trainer. The only place that knows concrete classes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from models.megatron_fields import OF_LAYOUT
from mrl.algorithms.kl import KLControl
from mrl.algorithms.losses import Loss, ValueLoss
from mrl.checkpoint.resume import plain, sizes
from mrl.checkpoint.run_dir import own_run_dir
from mrl.checkpoint.sample_ledger import SampleLedger
from mrl.checkpoint.saver import CheckpointSaver, CheckpointSchedule
from mrl.checkpoint.store import CheckpointStore
from mrl.config.schema import Config
from mrl.controller.plan_train import ModelPlan, TrainPlan
from mrl.controller.processes import REFERENCE, Processes, model_spec, started
from mrl.controller.recovery import Recovery
from mrl.controller.trainer import Phases, Trainer, TrainingSchedule
from mrl.core.preemption import PreemptionHandler
from mrl.diagnostics.dump_policy import Recorder
from mrl.diagnostics.parity import Certification
from mrl.diagnostics.replay import Replay, Verdict
from mrl.diagnostics.step_dump import Capsule, Weights
from mrl.placement.ray_cluster import ray_cluster
from mrl.tracking.tracker import ConsoleSink, CurveSink, JsonlSink, Sink, Tracker, WandbSink
from mrl.weight_sync.syncer import WeightSyncer
from mrl.workers.group import StartError, WorkerGroup
from mrl.workers.model_trainers import ActorTrainer, CriticTrainer, TeacherScorer, UpdateRunner
from mrl.workers.trace_comparison import ParityDifference
from parallel.dims import ParallelDims


def certify(plan: ModelPlan, loss: Loss | None) -> list[ParityDifference]:
    """Every difference between one step under the plan's layout and in one process; without a loss, of a critic."""
    config = plan.config
    run_dir = Path(config.run.dir).resolve()
    with own_run_dir(run_dir, "certify", plain(config)), ray_cluster(config.cluster.address) as options:
        job = Certification(
            settings=config.certify,
            arch=plan.arch,
            packing=plan.packing,
            loss=loss,
            aggregation=config.algorithm.aggregation,
            temperature=config.rollout.temperature,
            folder=str(run_dir),
            balanced=config.megatron.get("moe_router_load_balancing_type", "none") != "none",
            routing=config.rollout.routing_replay,
            start=partial(_trainers, plan, config.certify.dtype, options=options, critic=loss is None),
        )
        return job.run(plan.dims)


def replay(plan: ModelPlan, capsule: Capsule, weights: Weights, loss: Loss, against: ParallelDims) -> Verdict:
    """A kept step under the plan's layout and under another."""
    config = plan.config
    (Path(config.run.dir) / "logs").mkdir(parents=True, exist_ok=True)
    with ray_cluster(config.cluster.address) as options:
        job = Replay(
            capsule=capsule,
            checkpoint=str(capsule.folder_of(weights)) if weights.checkpoint else None,
            packing=plan.packing,
            loss=loss,
            dtype=config.model.dtype,
            folder=str(Path(config.run.dir).resolve()),
            balanced=config.megatron.get("moe_router_load_balancing_type", "none") != "none",
            start=partial(_trainers, plan, config.model.dtype, options=options, critic=False),
        )
        return job.run(plan.dims, against)


@contextmanager
def _trainers(
    plan: ModelPlan, dtype: str, dims: ParallelDims, options: dict[str, Any], critic: bool
) -> Iterator[WorkerGroup]:
    """Trainer processes of the plan's model under another layout, ended with the context."""
    config = plan.config
    group = WorkerGroup(
        dims, str(Path(config.run.dir).resolve()), config.trainer.timeout_s, lambda: [options] * dims.world_size
    )
    try:
        # Adam's first step divides each gradient by itself: round-off below eps would become whole steps.
        assert plan.optimizer is not None, "one step is taken"
        optimizer = replace(plan.optimizer, eps=max(plan.optimizer.eps, 1e-6))
        spec = replace(model_spec(plan, config.rollout.routing_replay), dims=dims, dtype=dtype, optimizer=optimizer)
        if dims.world_size == 1:
            spec = replace(spec, overrides={k: v for k, v in spec.overrides.items() if k not in OF_LAYOUT})
        group.start(spec, config.run.seed, config.cluster.start_timeout_s, critic)
        group.wait_ready(config.cluster.start_timeout_s)
        yield group
    finally:
        group.close()


class _Parts(NamedTuple):
    """What of a Trainer is made before it."""

    tracker: Tracker
    ledger: SampleLedger
    saver: CheckpointSaver
    recovery: Recovery
    leaving: PreemptionHandler


@contextmanager
def trainer(plan: TrainPlan, leaving: PreemptionHandler) -> Iterator[Trainer]:
    """A Trainer whose processes are up, in the state that the run goes on from; everything ends with the context."""
    config = plan.config
    leaving.abandons = lambda: True  # nothing is lost yet
    with started(plan, "train") as processes:
        held_out = f"; held out: {plan.test.report}" if plan.test else ""
        processes.startup.ready(f"prompts read ({plan.train.report}{held_out}), Ray is up")
        saver = _saver(plan, processes)
        newest, planned = saver.store.latest(), None if plan.resume.of_another_run else plan.resume.checkpoint
        if newest and (planned is None or newest.step != planned.step):
            raise StartError(f"{newest.path} was written while this run was planned; start the command again.")
        recovery = Recovery(processes, saver.store, plan.resume.checkpoint, config.faults.max_restarts, saver.resumed)
        recovery.begin()
        last_step = plan.resume.checkpoint.step if plan.resume.checkpoint else 0
        with ExitStack() as stack:
            tracker = stack.enter_context(Tracker(_sinks(config, last_step)))
            ledger = SampleLedger(Path(config.run.dir) / "ledger.jsonl", last_step)
            stack.callback(ledger.close)
            wired = _wire(plan, processes, _Parts(tracker, ledger, saver, recovery, leaving))
            recovery.initial = wired.state_dict()
            if plan.resume.checkpoint:
                if not plan.resume.of_another_run:
                    saver.resumed(plan.resume.checkpoint)
                wired.load_state_dict(dict(plan.resume.checkpoint.state))
            leaving.abandons = partial(wired.abandons, config.faults.grace_s)
            yield wired


def _sinks(config: Config, last_step: int) -> list[Sink]:
    """Where numbers go; files that are there keep what was logged up to `last_step`."""
    folder, run = Path(config.run.dir), config.run
    metrics = JsonlSink(folder / "metrics.jsonl", last_step=last_step)
    evaluations = JsonlSink(folder / "eval.jsonl", evaluations=True, last_step=last_step or -1)  # 0 is evaluated anew
    curve = CurveSink(folder / "curve.png", title=run.name)
    curve.read([folder / "metrics.jsonl", folder / "eval.jsonl"])
    sinks: list[Sink] = [metrics, evaluations, ConsoleSink(config.trainer.max_steps, title=run.name), curve]
    if config.tracking.wandb:
        named = dict(project=config.tracking.project, group=config.tracking.group, name=run.name)
        sinks.append(WandbSink(folder, **named, config=plain(config)))
    return sinks


def _wire(plan: TrainPlan, processes: Processes, parts: _Parts) -> Trainer:
    config, behaviours = plan.config, plan.behaviours
    assert processes.generator is not None, "a trainer samples"
    assert plan.optimizer is not None, "an actor is trained"
    algorithm, critic = config.algorithm, None
    updates = UpdateRunner(
        plan.optimizer,
        plan.packing,
        algorithm.aggregation,
        config.rollout.max_response_tokens,
        algorithm.mini_batches,
        algorithm.epochs,
    )
    actor = ActorTrainer(
        processes.group,
        behaviours.objective,
        replace(updates, recorder=_recorder(plan, parts.saver.store)),
        config.rollout.temperature,
        algorithm.skip_zero_advantage,
    )
    scorers: dict[str, Any] = dict(old_logprobs=actor.logprobs, ref_logprobs=actor.reference_logprobs)
    if plan.critic:
        assert plan.critic.optimizer is not None, "a critic is trained"
        own = replace(
            updates,
            optimizer=plan.critic.optimizer,
            packing=plan.critic.packing,
            mini_batches=config.critic.mini_batches or updates.mini_batches,
            epochs=config.critic.epochs or updates.epochs,
        )
        critic = CriticTrainer(processes.others["critic"], ValueLoss(config.critic.value_clip), own)
        scorers["values"] = critic.values
    if plan.teacher:
        teacher = TeacherScorer(processes.others["teacher"], plan.teacher.packing, config.rollout.temperature)
        scorers["teacher_logprobs"] = teacher.logprobs
    if algorithm.old_logprobs == "rollout":
        del scorers["old_logprobs"]
    turns = processes.turns
    weight_sync = WeightSyncer(
        push_weights=lambda version: turns.push(partial(processes.group.call, "push_weights", version)),
        connect=processes.connect_engines,
        replace_engines=processes.replace_engines,
        tries=config.weight_sync.tries,
        held=processes.generator.worker.paused if config.rollout.staleness else nullcontext,
    )
    processes.restore = weight_sync.restore
    turns.bring = weight_sync.again
    return Trainer(
        prompts=plan.train.stream(config.rollout.prompts_per_step, config.run.seed, config.data.shuffle),
        generator=processes.generator,
        scorers={name: compute for name, compute in scorers.items() if name in behaviours.needs},
        actor=actor,
        critic=critic,
        kl=KLControl(behaviours.penalties),
        weight_sync=weight_sync,
        phase=Phases(),
        tracker=parts.tracker,
        ledger=parts.ledger,
        saver=parts.saver,
        recover=parts.recovery,
        leaving=parts.leaving,
        sharing=turns.metrics,
        schedule=TrainingSchedule(
            config.trainer.max_steps,
            config.trainer.stop_reward,
            config.trainer.stop_window,
            config.trainer.eval_every,
            config.critic.warmup_steps if plan.critic else 0,
        ),
    )


def _saver(plan: TrainPlan, processes: Processes) -> CheckpointSaver:
    c, run_dir = plan.config.checkpoint, processes.run_dir
    assert processes.generator is not None, "a trainer samples"
    return CheckpointSaver(
        store=CheckpointStore(run_dir / "checkpoints", c.keep_last, c.keep_best, c.copy_to),
        models=processes.trained,
        constant={REFERENCE: processes.save_reference} if "ref_logprobs" in plan.behaviours.needs else {},
        cadence=CheckpointSchedule(
            c.every, c.export_every, c.asynchronous, c.timeout_s, plan.config.trainer.save, c.best_metric
        ),
        notes=dict(model=sizes(plan.arch), layout=vars(plan.dims), config=plain(plan.config)),
        forget=processes.generator.discard_log,
        export=processes.export_weights,
        run_dir=run_dir,
    )


def _recorder(plan: TrainPlan, store: CheckpointStore) -> Recorder:
    config = plan.config
    warm = plan.warm_start.output if plan.warm_start else plan.model_path  # None: a warm start that nobody kept
    start = Weights(str(Path(warm).resolve()), 0) if warm else None

    def latest() -> Weights | None:
        found = store.latest()
        return Weights(str(found.path / "actor"), found.step, checkpoint=True, like=plan.model_path) if found else start

    return Recorder(
        folder=Path(config.run.dir).resolve() / "capsules",
        settings=config.capsule,
        layout=asdict(plan.dims),
        config=plain(config),
        latest=latest,
        first_step=config.critic.warmup_steps if plan.critic else 0,
    )
