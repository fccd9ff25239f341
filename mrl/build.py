"""The composition root: a checked Config -> a wired Trainer. The only place where strings become objects."""

import difflib
import inspect
import json
import logging
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.utils import get_object, instantiate

from models.conversion.hf_io import check_checkpoint
from models.families import family_of
from models.megatron_fields import DECIDED, transformer_fields
from models.spec import Architecture
from mrl.algorithms.advantages import Advantage
from mrl.algorithms.losses import Loss
from mrl.algorithms.reduce import AGGREGATIONS
from mrl.config import Config, Node, SftConfig
from mrl.data.batching import CostModel
from mrl.data.prompts import PromptDataset, PromptStream
from mrl.data.sft import SftDataset
from mrl.placement import Phases, ray_cluster
from mrl.rewards.base import Reward
from mrl.rollout import recording
from mrl.rollout.generator import RolloutGenerator
from mrl.rollout.server import check_server_args, default_server_args
from mrl.rollout.spec import RolloutSpec
from mrl.sft import SupervisedStage
from mrl.tracking import ConsoleSink, CurveSink, JsonlSink, Sink, Startup, Tracker, WandbSink
from mrl.trainer import Schedule, Trainer
from mrl.workers.group import WorkerGroup
from mrl.workers.plan import Packing
from mrl.workers.policy import ActorPolicy
from mrl.workers.spec import ModelSpec
from parallel.dims import ParallelDims
from parallel.optimizer_settings import AdamW

logger = logging.getLogger(__name__)


def construct(node: Node, key: str) -> Any:
    """Build the object that a `_target_` node names; raises ValueError naming key, class and nearest argument."""
    target = node.get("_target_")
    if not target:
        raise ValueError(f"{key}: _target_ is missing; expected the dotted name of a class, got {node}.")
    try:
        found = get_object(target)
    except Exception as error:  # any failure of a user's module: shown with the key that named it
        raise ValueError(f"{key}._target_={target}: cannot be imported ({error}).") from error
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    _check_arguments(found, arguments, key)
    if not isinstance(found, type):  # a function is called with the data, not now
        return partial(found, **arguments) if arguments else found
    try:
        return instantiate(node)
    except Exception as error:
        raise ValueError(f"{key}: {target} refused its arguments: {error}") from error


def _check_arguments(found: Any, arguments: Node, key: str) -> None:
    parameters = inspect.signature(found).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments.keys() - parameters.keys():
        near = difflib.get_close_matches(name, list(parameters), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'nothing'}."
        raise ValueError(f"{key}.{name}: {found.__module__}.{found.__qualname__} has no argument {name!r}; {hint}")


def plug_in(node: Node, key: str, needs: tuple[str, ...] = ()) -> Any:
    """Build a behaviour; raises ValueError unless it can be called and has the class attributes it `needs`."""
    built = construct(node, key)
    if not callable(built):
        raise ValueError(f"{key}: {node['_target_']} gives {type(built).__name__}, which cannot be called.")
    for name in needs:
        if not hasattr(built, name):
            raise ValueError(
                f"{key}: {node['_target_']} must have the class attribute {name!r} (see mrl/algorithms/losses.py)."
            )
    return built


@dataclass(frozen=True)
class ModelPlan:
    """A model to train and its layout, checked; what supervised training needs."""

    config: Config
    dims: ParallelDims
    optimizer: AdamW
    model_path: str  # where weights come from: model.path, or the warm start made earlier
    context: int  # longest sequence of the model, tokens
    vocab_size: int  # of the model
    packing: Packing


@dataclass(frozen=True)
class Plan(ModelPlan):
    """A config of reinforcement learning whose every part was built or checked, before any process starts."""

    advantage: Advantage
    loss: Loss
    reward: Reward
    server_args: dict[str, Any]
    warm_start: SftConfig | None  # a supervised stage still to run
    num_prompts: int


def plan(config: Config) -> Plan:
    """Check everything a user can get wrong; raises ValueError, starts no process."""
    _check_run_dir(config)
    if config.algorithm.aggregation not in AGGREGATIONS:
        raise ValueError(
            f"algorithm.aggregation={config.algorithm.aggregation!r}; expected one of {', '.join(AGGREGATIONS)}."
        )
    if not config.data.train:
        raise ValueError("data.train must name at least one parquet or jsonl file of prompts (see docs/data.md).")
    parts = dict(
        advantage=plug_in(config.algorithm.advantage, "algorithm.advantage"),
        loss=plug_in(config.algorithm.loss, "algorithm.loss", needs=("zero_without_advantage",)),
        reward=plug_in(config.reward, "reward"),
    )
    check_server_args(config.sglang)
    make_inputs(config)
    sft = config.sft
    done = sft.output if sft.train and sft.output and Path(sft.output).is_dir() else None
    if done:
        _check_origin(config, done)
    base = _model_plan(config, done or config.model.path)
    num_prompts = _check_prompts(config, base)
    warm_start = sft if sft.train and not done else None
    if warm_start:
        _check_supervised(config, base)
    args = _server_args(config, base.context)
    return Plan(**vars(base), **parts, server_args=args, warm_start=warm_start, num_prompts=num_prompts)


def plan_sft(config: Config) -> ModelPlan:
    """Check what supervised training needs; raises ValueError, starts no process."""
    if not config.sft.train:
        raise ValueError("sft.train must name a file of prompt/response rows (see docs/sft.md).")
    if config.sft.output and Path(config.sft.output).exists():
        raise ValueError(f"sft.output={config.sft.output} exists already; name another folder, or remove it.")
    _check_run_dir(config)
    make_inputs(config)
    base = _model_plan(config, config.model.path)
    _check_supervised(config, base)
    return base


def _check_prompts(config: Config, base: ModelPlan) -> int:
    """Check all prompt files, and recorded rollouts to be replayed; returns the number of training prompts."""
    limit = prompt_limit(config, base.context)
    data = PromptDataset.load(config.data.train, base.model_path, limit)
    data.check_vocabulary(base.vocab_size)
    if config.data.test:
        PromptDataset.load(config.data.test, base.model_path, limit).check_vocabulary(base.vocab_size)
    if config.rollout.replay:
        recording.check(config.rollout.replay, config.trainer.max_steps)
    return len(data)


def _check_supervised(config: Config, base: ModelPlan) -> None:
    assert config.sft.train, "callers look first"
    SftDataset.load(config.sft.train, base.model_path, base.context).check_vocabulary(base.vocab_size)


ORIGIN = "mrl_sft.json"  # in a warm start's folder: what it was made from


def origin(config: Config) -> dict[str, Any]:
    """What decides the weights of a warm start."""
    return dict(
        model=config.model.path, seed=config.run.seed if config.data.inputs is None else None, sft=asdict(config.sft)
    )


def _check_origin(config: Config, folder: str) -> None:
    """Raise ValueError where an existing warm start was made from another model or with other settings."""
    path = Path(folder) / ORIGIN
    made = json.loads(path.read_text()) if path.is_file() else None
    wanted = json.loads(json.dumps(origin(config)))
    if made != wanted:
        raise ValueError(
            f"sft.output={folder}: was made from other settings ({made}), now wanted: {wanted}; remove the folder to make it "
            "again, name another sft.output, or set sft.train=null to train model.path as it is."
        )


CLAIM = "started"  # in a run's folder: a run has begun to write there


def claim(run_dir: Path) -> None:
    """Take a run's folder for this run alone; raises FileExistsError where another run was faster."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    (run_dir / CLAIM).open("x").close()


def _check_run_dir(config: Config) -> None:
    """Raise ValueError where the run's folder holds the results of another run."""
    for name in (CLAIM, "metrics.jsonl", "sft.jsonl", "checkpoint", "hf"):
        if (Path(config.run.dir) / name).exists():
            raise ValueError(f"run.dir={config.run.dir}: holds {name} of another run; name another folder.")


def make_inputs(config: Config) -> None:
    """Run `data.inputs`, which makes the files that the rest of the config names where they are missing."""
    if config.data.inputs:
        plug_in(config.data.inputs, "data.inputs")()


def _model_plan(config: Config, path: str) -> ModelPlan:
    dims = ParallelDims.of_world(**vars(config.parallel))
    hf = check_checkpoint(path)
    arch = family_of(hf).read(hf)
    arch.check_layout(dims)
    check_megatron(config.megatron, decided=DECIDED | arch.transformer.keys())
    _check_experts(config, arch, dims)
    packing = Packing(config.trainer.max_tokens_per_micro_batch, config.trainer.share_prompts, CostModel(*arch.flops()))
    return ModelPlan(config, dims, _optimizer(config), path, arch.max_position_embeddings, arch.vocab_size, packing)


def _check_experts(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Rules of models with experts; raises ValueError."""
    if config.rollout.routing_replay and not arch.num_experts:
        raise ValueError(f"rollout.routing_replay=true: {config.model.path} has no experts; leave it false.")
    if config.megatron.get("moe_token_dispatcher_type") == "allgather" and (dims.pp > 1 or dims.lockstep):
        raise ValueError(
            "megatron.moe_token_dispatcher_type=allgather: it exchanges packs of equal length only, so parallel.pp must be 1 "
            f"and ep x etp at most tp x cp; got pp={dims.pp}, ep={dims.ep}, etp={dims.expert_tp}, tp={dims.tp}, "
            f"cp={dims.cp}. Use alltoall, the default."
        )


def check_megatron(overrides: Node, decided: AbstractSet[str] = frozenset()) -> None:
    """Raise ValueError at a name that is no field of Megatron's TransformerConfig, or one `decided` elsewhere."""
    known = transformer_fields()
    for name in overrides:
        if name in decided:
            raise ValueError(
                f"megatron.{name} is decided by the model, model.dtype or the parallel section; set it there."
            )
        if name.startswith("fp8") and overrides[name] and find_spec("transformer_engine") is None:
            raise ValueError(
                f"megatron.{name}={overrides[name]}: FP8 needs Transformer Engine, which is not installed."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean megatron.{near[0]}?" if near else ""
            raise ValueError(f"megatron.{name} is not a field of Megatron's TransformerConfig{hint}")


def _optimizer(config: Config) -> AdamW:
    return AdamW(**{f.name: getattr(config.algorithm, f.name) for f in fields(AdamW)})


def prompt_limit(config: Config, context: int) -> int:
    """Longest prompt in tokens that leaves room for the response."""
    room = context - config.rollout.max_response_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max_response_tokens={config.rollout.max_response_tokens}: the model's context of {context} "
            f"tokens leaves no room for a prompt; use at most {context - 1}."
        )
    return min(room, config.data.max_prompt_tokens or room)


def _server_args(config: Config, context: int) -> dict[str, Any]:
    return default_server_args(dtype=config.model.dtype, context_length=context) | config.sglang


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
