"""The composition root: a Plan -> processes and a wired Trainer. The only place that knows concrete classes."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from models.megatron_fields import OF_LAYOUT
from mrl.algorithms.losses import Loss
from mrl.certify import Certification
from mrl.config import Config, SftConfig
from mrl.data.prompts import PromptStream
from mrl.placement import Phases, ray_cluster
from mrl.plan import ORIGIN, ModelPlan, Plan, claim, origin, prompt_limit
from mrl.rollout.generator import RolloutGenerator
from mrl.rollout.spec import RolloutSpec
from mrl.sft import SupervisedStage
from mrl.tracking import ConsoleSink, CurveSink, JsonlSink, Sink, Startup, Tracker, WandbSink
from mrl.trainer import Schedule, Trainer
from mrl.workers.certificate import Difference
from mrl.workers.group import WorkerGroup
from mrl.workers.policy import ActorPolicy
from mrl.workers.spec import ModelSpec
from parallel.dims import ParallelDims

logger = logging.getLogger(__name__)


def certify(plan: ModelPlan, loss: Loss | None) -> list[Difference]:
    """Every difference between one step under the plan's layout and in one process; without a loss, of a critic."""
    config = plan.config
    claim(Path(config.run.dir).resolve())
    with ray_cluster(config.cluster.address) as options:
        job = Certification(
            settings=config.certify,
            arch=plan.arch,
            packing=plan.packing,
            loss=loss,
            aggregation=config.algorithm.aggregation,
            temperature=config.rollout.temperature,
            folder=str(Path(config.run.dir).resolve()),
            balanced=config.megatron.get("moe_router_load_balancing_type", "none") != "none",
            routing=config.rollout.routing_replay,
            start=partial(_trainers, plan, options=options, critic=loss is None),
        )
        return job.run(plan.dims)


@contextmanager
def _trainers(plan: ModelPlan, dims: ParallelDims, options: dict[str, Any], critic: bool) -> Iterator[WorkerGroup]:
    """Trainer processes of the plan's model under another layout, ended with the context."""
    config = plan.config
    group = WorkerGroup(dims, str(Path(config.run.dir).resolve() / "logs"), config.trainer.timeout_s, options)
    try:
        # Adam's first step divides each gradient by itself: round-off below eps would become whole steps.
        optimizer = replace(plan.optimizer, eps=max(plan.optimizer.eps, 1e-6))
        spec = replace(actor_spec(plan), dims=dims, dtype=config.certify.dtype, optimizer=optimizer)
        if dims.world_size == 1:
            spec = replace(spec, overrides={k: v for k, v in spec.overrides.items() if k not in OF_LAYOUT})
        group.start(spec, config.run.seed, config.cluster.start_timeout_s, critic)
        group.wait_ready(config.cluster.start_timeout_s)
        yield group
    finally:
        group.close()


class Cluster:
    """The processes of a run: trainer ranks and, for RL, a rollout worker with its engines. Started side by side."""

    def __init__(self, plan: ModelPlan, options: dict[str, Any], stack: ExitStack) -> None:
        config, run_dir = plan.config, Path(plan.config.run.dir).resolve()
        claim(run_dir)
        self.plan = plan
        self.group = WorkerGroup(plan.dims, str(run_dir / "logs"), config.trainer.timeout_s, options)
        stack.callback(self.group.close)
        self.generator: RolloutGenerator | None = None
        if isinstance(plan, Plan):
            spec = rollout_spec(plan, str(run_dir))
            self.generator = RolloutGenerator(spec, dict(num_cpus=0), config.rollout.request_timeout_s + 60)
            stack.callback(self.generator.close)
        self.group.start(actor_spec(plan), config.run.seed, config.cluster.start_timeout_s)

    def warm_start(self, sft: SftConfig) -> float:
        """Run the supervised stage in the trainer processes; returns its last loss. Engines start meanwhile."""
        config = self.plan.config
        settings = dict(lr=sft.lr, betas=tuple(sft.betas), weight_decay=sft.weight_decay, clip_grad=sft.clip_grad)
        self.group.call("reset_optimizer", **settings)
        assert sft.train, "a supervised stage has a data set"
        path = str(Path(sft.train).resolve())
        data = self.group.call_first("load_sft", path, str(Path(self.plan.model_path).resolve()), self.plan.context)
        stage = SupervisedStage(
            group=self.group,
            block=data["handle"],
            lengths=data["lengths"],
            response_lengths=data["response_lengths"],
            steps=sft.steps,
            batch_size=sft.batch_size,
            lr=sft.lr,
            warmup_steps=sft.warmup_steps,
            packing=self.plan.packing,
            seed=config.run.seed,
        )
        sinks = [JsonlSink(Path(config.run.dir) / "sft.jsonl"), ConsoleSink(sft.steps, title="supervised")]
        with Tracker(sinks) as tracker:
            loss = stage.run(tracker)
        return loss

    def export(self, output: str) -> None:
        """Write the supervised weights, and what they were made from, as a Hugging Face folder."""
        self.group.call("export_hf", str(Path(output).resolve()), {ORIGIN: json.dumps(origin(self.plan.config))})

    def keep_warm_start(self, output: str) -> None:
        """Export for later runs; a folder that a run beside this one has made meanwhile is as good."""
        try:
            if not Path(output).exists():
                self.export(output)
        except OSError as error:
            if not Path(output).is_dir():
                raise
            logger.warning("the warm start was not kept: %s", error)


def actor_spec(plan: ModelPlan) -> ModelSpec:
    """What every trainer rank is built from."""
    c = plan.config
    path = str(Path(plan.model_path).resolve())
    return ModelSpec(
        path,
        plan.dims,
        c.model.dtype,
        plan.optimizer,
        c.megatron | (dict(moe_enable_routing_replay=True) if c.rollout.routing_replay else {}),
        share_prompts=plan.packing.share_prompts,
        logprob_chunk=c.trainer.logprob_chunk,
    )


def rollout_spec(plan: Plan, run_dir: str) -> RolloutSpec:
    """What the rollout worker is built from."""
    c = plan.config
    return RolloutSpec(
        model_path=str(Path(plan.model_path).resolve()),
        run_dir=run_dir,
        train=tuple(str(Path(p).resolve()) for p in c.data.train),
        test=tuple(str(Path(p).resolve()) for p in c.data.test),
        reward=plan.reward,
        responses_per_prompt=c.rollout.responses_per_prompt,
        max_response_tokens=c.rollout.max_response_tokens,
        max_prompt_tokens=prompt_limit(c, plan.context),
        temperature=c.rollout.temperature,
        num_engines=0 if c.rollout.replay else c.rollout.num_engines,
        engine_tp=c.rollout.engine_tp,
        routed_experts=c.rollout.routing_replay,
        seed=c.run.seed,
        eval_rows=c.trainer.eval_rows,
        request_timeout_s=c.rollout.request_timeout_s,
        record=c.rollout.record,
        replay=str(Path(c.rollout.replay).resolve()) if c.rollout.replay else None,
        server_args=plan.server_args,
    )


@contextmanager
def cluster(plan: ModelPlan) -> Iterator[Cluster]:
    """The run's processes, started side by side and always ended."""
    with ExitStack() as stack:
        options = stack.enter_context(ray_cluster(plan.config.cluster.address))
        yield Cluster(plan, options, stack)


@contextmanager
def trainer(plan: Plan) -> Iterator[Trainer]:
    """A Trainer whose processes are up, warm-started where the plan says so; everything ends with the context."""
    config = plan.config
    startup = Startup()
    with cluster(plan) as processes:
        assert processes.generator is not None, "a trainer samples"
        startup.ready("Ray is up")
        processes.group.wait_ready(config.cluster.start_timeout_s)
        startup.ready(f"trainer ready ({plan.dims.world_size} processes)")
        if plan.warm_start:
            loss = processes.warm_start(plan.warm_start)
            if plan.warm_start.output:
                processes.keep_warm_start(plan.warm_start.output)
            processes.group.call("reset_optimizer", **vars(plan.optimizer))
            startup.ready(f"supervised warm start done (loss {loss:.3f})")
        urls = processes.generator.wait_ready(config.rollout.start_timeout_s)
        startup.ready(f"engines ready ({len(urls)})")
        processes.group.call("connect_engines", urls, **vars(config.weight_sync))
        with Tracker(_sinks(config)) as tracker:
            yield _wire(plan, processes, tracker)


def _sinks(config: Config) -> list[Sink]:
    folder, run = Path(config.run.dir), config.run
    sinks: list[Sink] = [
        JsonlSink(folder / "metrics.jsonl", select=lambda name: not name.startswith("eval/")),
        JsonlSink(folder / "eval.jsonl", select=lambda name: name.startswith("eval/")),
        ConsoleSink(config.trainer.max_steps, title=run.name),
        CurveSink(folder / "curve.png", title=run.name),
    ]
    if config.tracking.wandb:
        sinks.append(WandbSink(folder, project=config.tracking.project, name=run.name, config=asdict(config)))
    return sinks


def _wire(plan: Plan, processes: Cluster, tracker: Tracker) -> Trainer:
    config = plan.config
    assert processes.generator is not None, "a trainer samples"
    return Trainer(
        prompts=PromptStream(
            plan.num_prompts, config.rollout.prompts_per_step, seed=config.run.seed, shuffle=config.data.shuffle
        ),
        generator=processes.generator,
        advantage=plan.advantage,
        actor=ActorPolicy(
            processes.group,
            plan.loss,
            plan.optimizer,
            config.algorithm.aggregation,
            plan.packing,
            config.rollout.temperature,
            config.algorithm.skip_zero_advantage,
            config.algorithm.mini_batches,
        ),
        phase=Phases(),
        tracker=tracker,
        schedule=Schedule(
            config.trainer.max_steps, config.trainer.stop_reward, config.trainer.stop_window, config.trainer.eval_every
        ),
    )
