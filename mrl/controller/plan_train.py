"""A checked Config -> a TrainPlan: every mistake a user can make is found here, before any process starts."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from models.conversion.hf_io import check_hf_folder
from models.families import family_of
from models.hf_config import HFConfig
from models.megatron_fields import DECIDED, UNEVEN, check_balance, check_megatron
from models.spec import Architecture
from mrl.algorithms.parts import AlgorithmParts, build_algorithm
from mrl.checkpoint.resume import ResumePoint, check_fits, decide
from mrl.checkpoint.run_dir import check_unused
from mrl.config.instantiate import construct, plug_in
from mrl.config.schema import Config, SftConfig
from mrl.data.batching import CostModel
from mrl.data.prompts import PromptConstraints, PromptDataset
from mrl.data.sources import PromptSource, test_sources, train_sources
from mrl.data.supervised_dataset import SftDataset
from mrl.data.tokenizer import ChatTemplate, load_tokenizer
from mrl.placement.resource_pools import Need, Pools, make_pools, needs_of
from mrl.rewards.reward_types import Reward, Weighted
from mrl.rewards.scorer import check_reward
from mrl.rollout import recording
from mrl.rollout.agent import ToolAgent
from mrl.rollout.server import check_server_args, default_server_args
from mrl.rollout.server_args import DETERMINISTIC
from mrl.weight_sync.engine_layout import EngineLayout, Topology, check_heads
from mrl.weight_sync.transfer_plan import TransferPlan, compile_transfer_plan, even_pipeline_stages, trainer_shards
from mrl.workers.dp_partition import Packing
from parallel.dims import ParallelDims
from parallel.trainer_config import AdamWConfig

logger = logging.getLogger(__name__)


PARTS = {"critic": "values", "reference": "ref_logprobs"}
"""What a checkpoint has besides the actor, by the column that it is there for."""


@dataclass(frozen=True)
class ModelPlan:
    """A model to train and its layout, checked; what supervised training needs."""

    config: Config
    dims: ParallelDims
    optimizer: AdamWConfig | None  # None: it is not trained
    model_path: str  # where weights come from: model.path, or the warm start made earlier
    hf: HFConfig  # of that folder
    arch: Architecture
    packing: Packing

    @property
    def context(self) -> int:
        """Longest sequence of the model, tokens."""
        return self.arch.max_position_embeddings

    @property
    def pools(self) -> Pools:
        """Which processes share devices; raises ValueError where placement.pools does not fit this run."""
        return make_pools(self.config.placement.pools, dict(actor=Need(self.dims.world_size, self.dims.tp)))


@dataclass(frozen=True)
class TrainPlan(ModelPlan):
    """A config of reinforcement learning whose every part was built or checked, before any process starts."""

    behaviours: AlgorithmParts
    reward: Reward
    agent: ToolAgent | None
    server_args: dict[str, Any]
    warm_start: SftConfig | None  # a supervised stage still to run
    resume: ResumePoint
    train: PromptDataset
    test: PromptDataset | None
    critic: ModelPlan | None
    teacher: ModelPlan | None

    @property
    def models(self) -> dict[str, ModelPlan]:
        """By role: actor, and critic and teacher where the run has them."""
        models = dict(actor=self, critic=self.critic, teacher=self.teacher)
        return {role: model for role, model in models.items() if model}

    @property
    def pools(self) -> Pools:
        """As of one model, with critic, teacher and engines."""
        return pools_of(self.config, {role: model.dims for role, model in self.models.items()})

    @property
    def shared(self) -> frozenset[frozenset[str]]:
        """Roles of this run that share devices, by pool: actor, critic, teacher, engines."""
        return self.pools.shared


def pools_of(config: Config, dims: Mapping[str, ParallelDims]) -> Pools:
    """Pools of a run of reinforcement with models of these layouts, by role; raises ValueError."""
    return make_pools(config.placement.pools, needs_of(config.rollout, dims))


def plan_training(config: Config) -> TrainPlan:
    """Check everything a user can get wrong; raises ValueError, starts no process."""
    resume = decide(config)
    behaviours = build_algorithm(config)
    reward = plug_in(config.reward, "reward")
    check_reward(reward)
    _check_parts(behaviours, reward)
    if config.rollout.replay and "greedy_rewards" in behaviours.needs:
        raise ValueError("rollout.replay: recorded rollouts have no greedy responses, which algorithm.advantage needs.")
    check_server_args(config.sglang)
    make_inputs(config)
    sft = config.sft
    done = sft.output if sft.train and sft.output and Path(sft.output).is_dir() else None
    if done:
        _check_origin(config, done)
    base = _model_plan(config, done or config.model.path)
    train, test = _check_prompts(config, base)
    warm_start = sft if sft.train and not done else None
    if warm_start:
        _check_supervised(config, base)
    if not config.rollout.replay:
        engine_layout(config, base)
    needed = {"actor"} | {part for part, column in PARTS.items() if column in behaviours.needs}
    check_fits(resume, base.arch, needed)
    _check_position(config, resume, train)
    plan = TrainPlan(
        **vars(base),
        behaviours=behaviours,
        reward=reward,
        agent=_agent(config, base),
        server_args=_server_args(config, base.context),
        warm_start=warm_start,
        train=train,
        test=test,
        resume=resume,
        critic=_critic(config, base) if "values" in behaviours.needs else None,
        teacher=_teacher(config, base) if "teacher_logprobs" in behaviours.needs else None,
    )
    check_turns(config, plan.shared)
    logger.info("pools: %s", plan.pools)
    return plan


def check_turns(config: Config, shared: frozenset[frozenset[str]]) -> None:
    """Raise ValueError for settings that engines cannot have which give their memory back by turns."""
    sync, saver = config.weight_sync, "enable_memory_saver"
    if not any("engines" in roles for roles in shared):
        return
    why = "engines that share devices lose weights and KV cache when it is another's turn"
    if sync.pause_mode == "in_place":
        raise ValueError(f"weight_sync.pause_mode=in_place keeps the KV cache, but {why}; use retract.")
    if sync.delta:
        raise ValueError(f"weight_sync.delta=true sends what changed, but {why}; leave it false.")
    if config.sglang.get(saver) is False:
        raise ValueError(f"sglang.{saver}=false: {why}, which needs it on a GPU; leave it out.")


def _check_position(config: Config, resume: ResumePoint, train: PromptDataset) -> None:
    """Raise ValueError where the checkpoint's position is one of other prompts."""
    if resume.checkpoint:
        stream = train.stream(config.rollout.prompts_per_step, config.run.seed, config.data.shuffle)
        try:
            stream.load_state_dict(resume.checkpoint.state["prompts"])
        except ValueError as error:
            raise ValueError(f"{resume.checkpoint.path}: {error}") from None


def _check_parts(behaviours: AlgorithmParts, reward: Reward) -> None:
    """Raise ValueError where the advantage weighs a part that a combined reward does not have."""
    weights = getattr(behaviours.advantage_pipeline.advantage, "weights", None)
    if isinstance(reward, Weighted) and weights and (unknown := set(weights) - set(reward.parts)):
        raise ValueError(
            f"algorithm.advantage.weights: the reward has no part {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(reward.parts))}."
        )


def _critic(config: Config, base: ModelPlan, weights: bool = True) -> ModelPlan:
    critic = config.critic
    optimizer = AdamWConfig(
        lr=critic.lr,
        betas=tuple(critic.betas),
        eps=critic.eps,
        weight_decay=critic.weight_decay,
        clip_grad=critic.clip_grad,
    )
    if config.sft.train and not (config.sft.output or critic.path):
        raise ValueError(
            "a critic starts where the actor does: name sft.output, where the warm start is kept, or critic.path."
        )
    plan = _model_plan(config, critic.path or base.model_path, "critic", optimizer, weights)
    _check_reads(config, plan, base, f"critic.path={critic.path}")
    return plan


def _check_reads(config: Config, plan: ModelPlan, base: ModelPlan, key: str) -> None:
    """Raise ValueError unless a second model can read whatever the actor reads and writes."""
    longest = prompt_limit(config, base.context) + config.rollout.max_response_tokens
    for what, found, wanted in (
        ("vocabulary", plan.arch.vocab_size, base.arch.vocab_size),
        ("context", plan.context, longest),
    ):
        if found < wanted:
            raise ValueError(f"{key}: its {what} is {found} tokens, the actor's needs {wanted}.")


def _teacher(config: Config, base: ModelPlan, weights: bool = True) -> ModelPlan:
    if not config.teacher.path:
        raise ValueError("teacher.path must name a Hugging Face folder: algorithm.advantage learns from a teacher.")
    plan = _model_plan(config, config.teacher.path, "teacher", None, weights)
    _check_reads(config, plan, base, f"teacher.path={config.teacher.path}")
    return plan


def plan_supervised(config: Config) -> ModelPlan:
    """Check what supervised training needs; raises ValueError, starts no process."""
    if not config.sft.train:
        raise ValueError("sft.train must name a file of prompt/response rows (see docs/sft.md).")
    if config.sft.output and Path(config.sft.output).exists():
        raise ValueError(f"sft.output={config.sft.output} exists already; name another folder, or remove it.")
    check_unused(Path(config.run.dir))
    make_inputs(config)
    base = _model_plan(config, config.model.path)
    _check_supervised(config, base)
    logger.info("pools: %s", base.pools)
    return base


def plan_certificate(config: Config) -> ModelPlan:
    """Check what `mrl certify` needs; raises ValueError, starts no process."""
    if config.certify.response_tokens < 2:
        raise ValueError(
            f"certify.response_tokens={config.certify.response_tokens}: lengths are drawn from 1 to it; use 2."
        )
    check_unused(Path(config.run.dir))
    make_inputs(config)
    return _model_plan(config, config.model.path)


def plan_replay(config: Config, model: str, dims: ParallelDims, against: ParallelDims) -> ModelPlan:
    """Check what `mrl replay` needs: whether both layouts can hold `model`; raises ValueError, starts no process."""
    base = _model_plan(config, model)
    for layout in (dims, against):
        base.arch.check_layout(layout, uneven_stages=bool(UNEVEN & config.megatron.keys()))
    return replace(base, dims=dims)


def plan_sync(config: Config) -> tuple[ModelPlan, TransferPlan]:
    """The transfer plan of the weight sync that this config would run; raises ValueError, starts no process.

    Pipeline stages are taken to have equally many layers.
    """
    make_inputs(config)
    base = _model_plan(config, config.model.path)
    layout, dims = engine_layout(config, base), base.dims
    if UNEVEN & config.megatron.keys():
        raise ValueError("mrl plan sync takes pipeline stages of equal size; leave out megatron's fields for others.")
    owned = trainer_shards(layout.rows, layout.sizes, dims, even_pipeline_stages(base.arch.num_layers, dims))
    dtype = (config.model.dtype, config.model.itemsize)
    found = compile_transfer_plan(owned, layout, config.rollout.num_engines, lambda _: dtype, config.weight_sync.bucket_bytes)
    return base, found


def plan_placement(config: Config, weights: bool = True) -> Pools:
    """The pools of the run that this config describes; raises ValueError, starts no process. `weights`: see plan_models."""
    _, models = plan_models(config, weights)
    return pools_of(config, {role: model.dims for role, model in models.items()})


def plan_models(config: Config, weights: bool = False) -> tuple[AlgorithmParts, dict[str, ModelPlan]]:
    """The algorithm, and the run's models by role (actor, critic, teacher); raises ValueError, starts no process.

    Without `weights` a model's folder needs its config.json alone.
    """
    behaviours = build_algorithm(config)
    make_inputs(config)
    models = dict(actor=_model_plan(config, config.model.path, weights=weights))
    if "values" in behaviours.needs:
        models["critic"] = _critic(config, models["actor"], weights)
    if "teacher_logprobs" in behaviours.needs:
        models["teacher"] = _teacher(config, models["actor"], weights)
    return behaviours, models


def engine_layout(config: Config, base: ModelPlan) -> EngineLayout:
    """How the config's engines hold the model; raises ValueError where SGLang could not, or takes no live weights."""
    layout = EngineLayout.of(family_of(base.hf), base.arch, engine_topology(config, base))
    layout.rank(0)  # refuses what cannot be cut
    return layout


def engine_topology(config: Config, base: ModelPlan) -> Topology:
    """The ranks of the config's engines; raises ValueError as `engine_layout` does."""
    if config.rollout.engine_urls and config.weight_sync.transport != "disk":
        raise ValueError(
            f"rollout.engine_urls={config.rollout.engine_urls}: engines that this run does not start take weights from disk, not "
            f"by weight_sync.transport={config.weight_sync.transport}; set it to disk."
        )
    sglang, attention = config.sglang, config.sglang.get("enable_dp_attention", False)
    for name in ("pp_size",) if attention else ("pp_size", "dp_size"):
        if sglang.get(name, 1) != 1:
            raise ValueError(
                f"sglang.{name}={sglang[name]}: weights cannot be brought to such engines; use more of them "
                "(rollout.num_engines), or data-parallel attention (sglang.enable_dp_attention)."
            )
    if sglang.get("enable_dp_lm_head"):
        raise ValueError("sglang.enable_dp_lm_head=true: where such an engine has its output layer is not known here.")
    topology = Topology(config.rollout.engine_tp, sglang.get("ep_size", 1), sglang.get("dp_size", 1))
    if topology.ep > 1 and (not base.arch.num_experts or base.arch.num_experts % topology.ep):
        raise ValueError(
            f"sglang.ep_size={topology.ep} does not divide the {base.arch.num_experts} experts of this model."
        )
    family_of(base.hf).check_engine(base.hf, base.arch)
    check_heads(base.arch, topology)
    return topology


def _agent(config: Config, base: ModelPlan) -> ToolAgent | None:
    """The agent, once it is known that the model's chat template and vocabulary can carry its tool calls."""
    if not config.rollout.agent:
        return None
    agent = construct(config.rollout.agent, "rollout.agent")
    if not isinstance(agent, ToolAgent):
        raise ValueError(
            f"rollout.agent._target_={config.rollout.agent['_target_']}: expected mrl.rollout.agent.ToolAgent or a subclass."
        )
    agent.prepare(load_tokenizer(base.model_path, chat(config)), config.data.template_args)
    return agent


def _check_prompts(config: Config, base: ModelPlan) -> tuple[PromptDataset, PromptDataset | None]:
    """Read all prompts, and check recorded rollouts to be replayed; the training set and the held-out one."""
    train = _load_prompts(config, base, train_sources(config.data), "train")
    held_out = test_sources(config.data)
    test = _load_prompts(config, base, held_out, "test") if held_out else None
    if config.rollout.replay:
        routing = config.rollout.routing_replay
        recording.check(config.rollout.replay, config.trainer.max_steps, routing=routing)
    return train, test


def _load_prompts(config: Config, base: ModelPlan, sources: list[PromptSource], name: str) -> PromptDataset:
    rules = PromptConstraints(prompt_limit(config, base.context), base.arch.vocab_size, chat(config))
    data = PromptDataset.load(sources, base.model_path, rules)
    rows = Path(config.run.dir) / f"bad_rows_{name}.jsonl"
    data.enforce_row_policies(rows, bad_rows=config.data.bad_rows, overlong=config.data.overlong)
    logger.info("%s prompts: %s", name, data.report)
    return data


def chat(config: Config) -> ChatTemplate:
    """How messages become text, for prompts and for supervised rows."""
    template = config.data.chat_template
    return ChatTemplate(str(Path(template).resolve()) if template else None, config.data.template_args)


def _check_supervised(config: Config, base: ModelPlan) -> None:
    assert config.sft.train, "callers look first"
    SftDataset.load(config.sft.train, base.model_path, base.context, chat(config)).check_vocabulary(
        base.arch.vocab_size
    )


ORIGIN = "mrl_sft.json"  # in a warm start's folder: what it was made from


def origin(config: Config) -> dict[str, Any]:
    """What decides the weights of a warm start."""
    decided = dict(
        model=config.model.path, seed=config.run.seed if config.data.inputs is None else None, sft=asdict(config.sft)
    )
    own_chat = {name: value for name, value in asdict(chat(config)).items() if value}
    return decided | (dict(chat=own_chat) if own_chat else {})


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


def make_inputs(config: Config) -> None:
    """Run `data.inputs`, which makes the files that the rest of the config names where they are missing."""
    if config.data.inputs:
        plug_in(config.data.inputs, "data.inputs")()


def _model_plan(
    config: Config, path: str, own: str = "", optimizer: AdamWConfig | None = None, weights: bool = True
) -> ModelPlan:
    """`own`: the section of a second model, whose layout differs from the actor's in what is set there."""
    dims = layout_of(config, own)
    hf = (check_hf_folder if weights else HFConfig.load)(path, config.model.family)
    arch = family_of(hf).read(hf)
    check_layout(config, arch, dims)
    check_megatron(config.megatron, decided=DECIDED | arch.transformer.keys())
    _check_experts(config, arch, dims, replays=not own and config.rollout.routing_replay)
    packing = Packing(config.trainer.max_tokens_per_micro_batch, config.trainer.share_prompts, CostModel(*arch.flops()))
    return ModelPlan(config, dims, optimizer if own else _optimizer(config), path, hf, arch, packing)


def layout_of(config: Config, own: str = "") -> ParallelDims:
    """The layout of the actor, or of the model that has the section `own`; raises ValueError where it does not factor."""
    layout = vars(config.parallel)
    if own:
        layout = layout | {name: value for name, value in vars(vars(config)[own].parallel).items() if value is not None}
    return ParallelDims.of_world(**layout)


def check_layout(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Raise ValueError where the layout cannot cut this model."""
    arch.check_layout(dims, uneven_stages=bool(UNEVEN & config.megatron.keys()))


def _check_experts(config: Config, arch: Architecture, dims: ParallelDims, replays: bool) -> None:
    """Rules of models with experts; raises ValueError."""
    if replays and not arch.num_experts:
        raise ValueError(f"rollout.routing_replay=true: {config.model.path} has no experts; leave it false.")
    check_balance(config.megatron.get("moe_router_load_balancing_type", "none"), dims)
    if config.megatron.get("moe_token_dispatcher_type") == "allgather" and (dims.pp > 1 or dims.lockstep):
        raise ValueError(
            "megatron.moe_token_dispatcher_type=allgather: it exchanges packs of equal length only, so parallel.pp must be 1 "
            f"and ep x etp at most tp x cp; got pp={dims.pp}, ep={dims.ep}, etp={dims.expert_tp}, tp={dims.tp}, "
            f"cp={dims.cp}. Use alltoall, the default."
        )


def _optimizer(config: Config) -> AdamWConfig:
    return AdamWConfig(**{f.name: getattr(config.algorithm, f.name) for f in fields(AdamW)})


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
    device = config.sglang.get("device")  # where engines run; this process may be on a node without a GPU
    ours = default_server_args(dtype=config.model.dtype, context_length=context, device=device)
    loaders = [*ours["custom_weight_loader"], *config.sglang.get("custom_weight_loader", [])]
    if config.rollout.deterministic:
        if config.sglang.get(DETERMINISTIC) is False:
            raise ValueError(
                f"sglang.{DETERMINISTIC}=false is what rollout.deterministic=true rules out; leave it out."
            )
        ours[DETERMINISTIC] = True
    if config.rollout.agent:
        ours["disable_radix_cache"] = False  # each turn's request repeats all before it
    if config.weight_sync.pause_mode == "in_place":  # it keeps the KV cache, which new requests would share by prefix
        if config.sglang.get("disable_radix_cache") is False:
            raise ValueError(
                "sglang.disable_radix_cache=false with weight_sync.pause_mode=in_place: new requests would continue prefixes "
                "computed by older weights; leave one of them out."
            )
        ours["disable_radix_cache"] = True
    return ours | config.sglang | dict(custom_weight_loader=loaders)
