"""The processes of a run: trainer ranks of every model and a rollout worker with its engines; started, replaced and ended."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.families import resolve_family_path
from mrl.checkpoint.resume import plain
from mrl.checkpoint.run_dir import own_run_dir
from mrl.checkpoint.store import Checkpoint
from mrl.config.schema import SftConfig
from mrl.controller.colocation import ACTOR, ENGINES, MemoryScheduler, State
from mrl.controller.plan_train import ORIGIN, ModelPlan, TrainPlan, chat, origin
from mrl.controller.supervised_stage import SupervisedStage
from mrl.core.errors import ProcessesLostError, StartupLostError
from mrl.placement import device_map_picture
from mrl.placement.placement_groups import PlacementError, Places, layout_of, placed
from mrl.placement.ray_cluster import ray_cluster
from mrl.rollout.client import EngineError
from mrl.rollout.manager import RolloutManager, RolloutWorkerHandle
from mrl.rollout.server_args import memory_saver_args
from mrl.rollout.spec import RolloutSpec
from mrl.tracking.tracker import ConsoleSink, JsonlSink, Startup, Tracker
from mrl.weight_sync.engine_control import EnginePoolMemory
from mrl.workers.group import StartError, WorkerGroup
from mrl.workers.model_spec import ModelSpec

logger = logging.getLogger(__name__)
REFERENCE = "reference"  # in a checkpoint: the weights that KL penalties look back to


class Processes:
    """Trainer ranks and, for RL, a rollout worker with its engines. Started side by side."""

    def __init__(self, plan: ModelPlan, places: Mapping[str, Places], stack: ExitStack) -> None:
        """`places`: of every role of this run (mrl.placement.resource_pools)."""
        config, self.run_dir = plan.config, Path(plan.config.run.dir).resolve()
        self.plan, self.startup = plan, Startup()
        self.group = self._group(plan, "", places["actor"], stack)
        self.generator: RolloutManager | None = None
        self.others: dict[str, WorkerGroup] = {}  # critic, teacher
        self.urls: Sequence[str] = ()  # of the engines
        self.restore: Callable[[Mapping[str, str]], None] = _no_restore  # replaces failed engines; build.py sets it
        self._connected = False  # the trainers to all of them
        if isinstance(plan, TrainPlan):
            for name, other in (("critic", plan.critic), ("teacher", plan.teacher)):
                if other:
                    self.others[name] = self._group(other, name, places[name], stack)
        self.memory = EnginePoolMemory(lambda: self.urls, config.weight_sync.timeout_s, self._hold)
        sharing = plan.shared if isinstance(plan, TrainPlan) else frozenset()
        self.turns = MemoryScheduler({ACTOR: self.group, **self.others}, self.memory, sharing)
        self.start_actor()
        if isinstance(plan, TrainPlan):
            if self._engines_share:  # they take what memory they find
                self._actor_ready()
                self.turns.need(ENGINES)
            spec, engines = rollout_spec(plan, str(self.run_dir)), places.get("engines")
            options: Mapping[str, Any] = dict(num_cpus=0)
            if engines and engines.hosted:
                spec = replace(spec, slots=engines.engine)
            elif engines:
                options = engines.options()[0]  # its children are the engines
            worker = RolloutWorkerHandle(spec, options, config.rollout.request_timeout_s + 60)
            stack.callback(worker.close)
            self.generator = RolloutManager(worker, self)

    def _group(self, plan: ModelPlan, name: str, places: Places, stack: ExitStack) -> WorkerGroup:
        timeout_s, options = plan.config.trainer.timeout_s, places.options
        group = WorkerGroup(plan.dims, str(self.run_dir), timeout_s, options, name, lambda role: self.turns.need(role))
        stack.callback(group.close)
        return group

    def load(self) -> None:
        """Give the engines their GPU memory and weights back before they sample."""
        self.turns.need(ENGINES)

    def _hold(self, held: bool) -> None:
        assert self.generator, "only reinforcement samples"
        self.generator.worker.set_paused(held)

    @property
    def _engines_share(self) -> bool:
        return bool(self.turns.rivals(ENGINES))

    def _actor_ready(self) -> None:
        """Wait until every rank has the actor."""
        if self.turns.state(ACTOR) is State.ABSENT:
            self.group.wait_ready(self.plan.config.cluster.start_timeout_s)
            self.turns.started(ACTOR)
            self.startup.ready(f"trainer ready ({self.plan.dims.world_size} processes)")

    @property
    def trained(self) -> dict[str, WorkerGroup]:
        """The models whose state is in a checkpoint."""
        return {"actor": self.group} | {name: group for name, group in self.others.items() if name == "critic"}

    def start_actor(self) -> None:
        """Begin building the actor on every rank; returns at once. A warm start that was kept meanwhile is not run again."""
        config, spec = self.plan.config, model_spec(self.plan, self.plan.config.rollout.routing_replay)
        warm = self.plan.warm_start.output if isinstance(self.plan, TrainPlan) and self.plan.warm_start else None
        self.cold = not (warm and Path(warm).is_dir())
        if warm and not self.cold:
            spec = replace(spec, model_path=str(Path(warm).resolve()))
        self.group.start(spec, config.run.seed, config.cluster.start_timeout_s)

    def restart_trainers(self) -> None:
        """End the trainer processes of all models and begin to build others in their place."""
        self._connected = False
        for group in (self.group, *self.others.values()):
            group.renew()
        self.turns.forget(ACTOR, *self.others)
        if self.memory.unproven:
            self._renew_rollout()
        self.turns.need(ACTOR)  # room for it
        self.start_actor()

    def bring_up(self, checkpoint: Checkpoint | None) -> None:
        """Wait for the trainers and give them the state of a checkpoint, or the one that a run begins with."""
        plan = self.plan
        assert isinstance(plan, TrainPlan) and plan.optimizer, "a run of reinforcement"
        self._actor_ready()
        if self._engines_share:  # once they sleep, they cannot prove what they were started with
            self.wait_engines()
            self.connect_all()
        if self.cold and plan.warm_start and not checkpoint:
            loss = self.warm_start(plan.warm_start)
            if plan.warm_start.output:
                self.keep_warm_start(plan.warm_start.output)
            self.group.call("reset_optimizer", **vars(plan.optimizer))
            self.startup.ready(f"supervised warm start done (loss {loss:.3f})")
        if "ref_logprobs" in plan.behaviours.needs:
            kept = checkpoint.path / REFERENCE if checkpoint else None
            self.group.call("load_reference", str(kept)) if kept else self.group.call("keep_reference")
        if self.others:
            self.start_others()
            self.startup.ready(" and ".join(self.others) + " ready")
        if checkpoint:
            for name, group in self.trained.items():
                group.call("load", str(checkpoint.path / name))
            self.startup.ready(f"step {checkpoint.step} restored from {checkpoint.path}")

    def warm_start(self, sft: SftConfig) -> float:
        """Run the supervised stage in the trainer processes; returns its last loss. Engines start meanwhile."""
        config = self.plan.config
        settings = dict(lr=sft.lr, betas=tuple(sft.betas), weight_decay=sft.weight_decay, clip_grad=sft.clip_grad)
        self.group.call("reset_optimizer", **settings)
        assert sft.train, "a supervised stage has a data set"
        path = str(Path(sft.train).resolve())
        tokenizer = str(Path(self.plan.model_path).resolve())
        data = self.group.call_first("load_sft", path, tokenizer, self.plan.context, chat(config))
        stage = SupervisedStage(
            group=self.group,
            block=data["handle"],
            lengths=data["lengths"],
            response_lengths=data["response_lengths"],
            sampled_lengths=data["sampled_lengths"],
            steps=sft.steps,
            batch_size=sft.batch_size,
            lr=sft.lr,
            warmup_steps=sft.warmup_steps,
            packing=self.plan.packing,
            seed=config.run.seed,
        )
        sinks = [JsonlSink(self.run_dir / "sft.jsonl"), ConsoleSink(sft.steps, title="supervised")]
        with Tracker(sinks) as tracker:
            loss = stage.run(tracker)
        return loss

    def start_others(self) -> None:
        """Build critic and teacher; a critic without a folder of its own starts from what the actor starts from."""
        plan, config = self.plan, self.plan.config
        assert isinstance(plan, TrainPlan), "only reinforcement has other models"
        specs: dict[str, ModelSpec] = {}
        if plan.critic:
            specs["critic"] = model_spec(plan.critic)
            if plan.warm_start and plan.warm_start.output and not config.critic.path:
                warm = str(Path(plan.warm_start.output).resolve())
                specs["critic"] = replace(specs["critic"], model_path=warm)
        if plan.teacher:
            specs["teacher"] = model_spec(plan.teacher)
        for name, spec in specs.items():
            self.turns.need(name)  # room for it
            self.others[name].start(spec, config.run.seed, config.cluster.start_timeout_s, critic=name == "critic")
            if self.turns.rivals(name):
                self._other_ready(name)  # before the next one takes its place
        for name in specs:
            self._other_ready(name)

    def _other_ready(self, name: str) -> None:
        """Wait until every rank has this model."""
        if self.turns.state(name) is State.ABSENT:
            self.others[name].wait_ready(self.plan.config.cluster.start_timeout_s)
            self.turns.started(name)

    def trainers_alive(self) -> bool:
        """Whether every rank of every model answers."""
        return all(group.alive() for group in (self.group, *self.others.values()))

    def restart_rollout_if_lost(self) -> None:
        """Start a new rollout worker, with new engines, where the old one does not answer; then its engines are there."""
        assert self.generator, "only reinforcement samples"
        self._connected = False
        if not self.generator.worker.alive():
            self._renew_rollout(room=self.trainers_alive())
        self.wait_engines()

    def _renew_rollout(self, room: bool = False) -> None:
        """Start a new rollout worker; `room`: its rivals can be told to sleep."""
        assert self.generator, "only reinforcement samples"
        self.turns.forget(ENGINES)
        self.memory.forget()
        if room:
            self.turns.need(ENGINES)
        self.generator.worker.restart()
        self.urls = ()

    def wait_engines(self) -> None:
        """Wait until every engine answers, if that is not known yet."""
        assert self.generator, "only reinforcement samples"
        if self.turns.state(ENGINES) is not State.ABSENT:
            return
        self.urls = self.generator.worker.wait_ready(self.plan.config.rollout.start_timeout_s)
        self.turns.started(ENGINES)
        self.startup.ready(f"engines ready ({len(self.urls)})")

    def replace_engines(self, urls: Sequence[str]) -> Sequence[str]:
        """Start other engines in place of these; the URLs of all."""
        assert self.generator, "only reinforcement samples"
        self.memory.forget(urls)
        self.urls = self.generator.worker.replace_engines(urls)
        return self.urls

    def connect_all(self) -> None:
        """Open the ways from the trainers to all engines, unless they are open; engines that failed are replaced, a few times."""
        assert self.generator, "only reinforcement samples"
        if self._connected:
            return
        failed: dict[str, str] = {}
        for _ in range(self.plan.config.weight_sync.tries):
            if not (failed := self.connect_engines(self.urls)):
                self._connected = True
                return
            logger.warning("engines failed before they were reached, and are replaced: %s", failed)
            self.replace_engines(list(failed))
        raise StartError(f"engines failed when they had just started: {failed}")

    def connect_engines(self, urls: Sequence[str]) -> dict[str, str]:
        """Open the ways from all trainer ranks to these engines; those that failed meanwhile, and why."""
        folder = str(self.run_dir / "weights")
        return self.group.call("connect_engines", list(urls), self.plan.config.weight_sync, folder)[0]

    def save_reference(self, folder: str) -> None:
        """Write the reference policy's weights."""
        self.group.call("save_reference", folder)

    def export_weights(self, folder: str) -> None:
        """Write the actor's weights as a Hugging Face folder."""
        self.group.call("export_hf", folder)

    def export(self, output: str) -> None:
        """Write the supervised weights, and what they were made from, as a Hugging Face folder."""
        self.group.call("export_hf", str(Path(output).resolve()), {ORIGIN: json.dumps(origin(self.plan.config))})

    def keep_warm_start(self, output: str) -> None:
        """Export for later runs; a folder that a run beside this one has made meanwhile is as good."""
        try:
            if not Path(output).exists():
                self.export(output)
        except (OSError, ValueError) as error:  # it is there by now, or that run is writing it
            if not any(Path(name).is_dir() for name in (output, f"{output}.partial")):
                raise
            logger.warning("the warm start was not kept: %s", error)


def _no_restore(failed: Mapping[str, str]) -> None:
    raise EngineError(f"engines failed, and nothing brings weights to new ones: {dict(failed)}")


def model_spec(plan: ModelPlan, replays: bool = False) -> ModelSpec:
    """What every trainer rank is built from; `replays`: it takes the experts that the engine chose."""
    c = plan.config
    path = str(Path(plan.model_path).resolve())
    return ModelSpec(
        path,
        plan.dims,
        c.model.dtype,
        plan.optimizer,
        c.megatron | (dict(moe_enable_routing_replay=True) if replays else {}),
        share_prompts=plan.packing.share_prompts,
        logprob_chunk=c.trainer.logprob_chunk,
        family=resolve_family_path(c.model.family) if c.model.family else None,
    )


def rollout_spec(plan: TrainPlan, run_dir: str) -> RolloutSpec:
    """What the rollout worker is built from."""
    c = plan.config
    return RolloutSpec(
        model_path=str(Path(plan.model_path).resolve()),
        run_dir=run_dir,
        train=plan.train,
        test=plan.test,
        reward=plan.reward,
        advantage_pipeline=plan.behaviours.advantage_pipeline,
        keep=plan.behaviours.keep,
        needs_greedy="greedy_rewards" in plan.behaviours.needs,
        old_from_rollout=c.algorithm.old_logprobs == "rollout",
        prompts_per_step=c.rollout.prompts_per_step,
        scoring=c.scoring,
        responses_per_prompt=c.rollout.responses_per_prompt,
        max_response_tokens=c.rollout.max_response_tokens,
        temperature=c.rollout.temperature,
        num_engines=0 if c.rollout.replay else c.rollout.num_engines,
        engine_urls=() if c.rollout.replay else tuple(c.rollout.engine_urls),
        engine_tp=c.rollout.engine_tp,
        deterministic=c.rollout.deterministic,
        staleness=c.rollout.staleness,
        over_sampling=c.rollout.over_sampling,
        in_order=c.rollout.in_order,
        max_rounds=c.rollout.max_sampling_rounds,
        journal_key=plan.resume.journal_key(c, plan.train.fingerprint),
        faults=c.faults,
        agent=plan.agent,
        chat=chat(c),
        routed_experts=c.rollout.routing_replay,
        seed=c.run.seed,
        eval_rows=c.trainer.eval_rows,
        request_timeout_s=c.rollout.request_timeout_s,
        record=c.rollout.record,
        replay=str(Path(c.rollout.replay).resolve()) if c.rollout.replay else None,
        server_args=plan.server_args | (memory_saver_args() if any(ENGINES in roles for roles in plan.shared) else {}),
    )


@contextmanager
def started(plan: ModelPlan, command: str) -> Iterator[Processes]:
    """The run's processes, started side by side and always ended; the run's folder is its own for so long.

    Raises StartupLostError when one of them is lost before all are there.
    """
    config = plan.config
    with ExitStack() as stack:
        stack.enter_context(own_run_dir(Path(config.run.dir).resolve(), command, plain(config)))
        try:
            stack.enter_context(ray_cluster(config.cluster.address, plan.pools.size))
            processes = Processes(plan, stack.enter_context(_placed(plan)), stack)
        except ProcessesLostError as error:
            raise StartupLostError(str(error)) from error
        yield processes


@contextmanager
def _placed(plan: ModelPlan) -> Iterator[dict[str, Places]]:
    """Where each role of the run is; said in the log. Raises StartError where the cluster has no room."""
    with ExitStack() as stack:
        try:
            places = stack.enter_context(placed(plan.pools, plan.config.cluster.start_timeout_s))
        except (ValueError, PlacementError) as error:
            raise StartError(str(error)) from error
        logger.info("placement:\n%s", device_map_picture.text(layout_of(plan.pools, places)))
        yield places
