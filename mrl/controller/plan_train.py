"""TrainPlan: everything that `mrl train` builds from the config, checked before any process starts.

Every function raises ValueError for a mistake in the config. The message names the config key.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.families import family_of
from models.hf_config import HFConfig
from mrl.algorithms.distillation import TEACHER_OUTPUTS, reads_rewards
from mrl.algorithms.filters import Filter
from mrl.algorithms.parts import AlgorithmParts, build_algorithm
from mrl.checkpoint.resume import ResumePoint, check_checkpoint_fits, check_pickles, find_resume_point
from mrl.config.instantiate import instantiate, instantiate_callable
from mrl.config.process_schema import RoleConfig
from mrl.config.schema import Config, SftConfig
from mrl.config.validate import REFERENCE_ROLE, roles_of, teachers_of
from mrl.controller.colocation import ENGINES
from mrl.controller.plan_adapters import adapter_server_args, check_adapter_sync, check_shared_devices
from mrl.controller.plan_distillation import check_distillation, check_taught_sources
from mrl.controller.plan_engine_dtype import check_fp8_device, is_fp8
from mrl.controller.plan_models import (
    ModelPlan,
    build_pools,
    chat_template,
    check_served_folders,
    drop_lora_path_if_continuing,
    engine_layout,
    make_input_files,
    plan_models,
)
from mrl.controller.plan_mtp import draft_server_args
from mrl.controller.plan_prompts import (
    check_image_engines,
    check_readers_of_images,
    image_args,
    load_prompt_datasets,
    plan_evaluations,
)
from mrl.controller.plan_step import (
    StepPlan,
    check_epochs,
    check_sampling,
    check_step_sources,
    num_steps,
    plan_offline,
    plan_prompt_drawing,
    plan_sampling,
    plan_step,
    prompt_stream,
    tokenizer_args,
    warn_of_sampling,
)
from mrl.controller.plan_supervised import check_supervised_data, check_warm_start, find_finished_warm_start
from mrl.core.code_locations import plug_in_name
from mrl.core.types import OFFLINE
from mrl.data.offline import OfflineRows
from mrl.data.prompts import PromptDataset, PromptDrawing, PromptStream
from mrl.data.tokenizer import load_tokenizer
from mrl.placement.resource_pools import Pools
from mrl.planner.run_memory import DEFAULT_MEM_FRACTION
from mrl.rewards.remote_models import RewardModel, called_roles
from mrl.rewards.reward_types import CombinedReward, Reward, single_rewards
from mrl.rewards.scorer import check_reward
from mrl.rollout.agents.tool_agent import ToolAgent
from mrl.rollout.client import SamplingParams
from mrl.rollout.engines.server_args import (
    DETERMINISTIC,
    REWARD_MODELS,
    block_fp8_args,
    check_server_args,
    check_synced_args,
    default_server_args,
)
from mrl.rollout.response_metrics import HeldOutEvaluation, rewards_of_sets
from mrl.tracking.backends import check_installed
from mrl.tracking.console import show_warning
from mrl.tracking.learning_health import LearningSettings, find_static_problems
from parallel.trainer_config import LoraConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainPlan(ModelPlan):
    """Plan of an RL run: the fields of the actor's ModelPlan, and all other parts of the run, built or checked."""

    algorithm: AlgorithmParts
    reward: Reward
    agent: ToolAgent | None  # None: every response has one turn
    server_args: dict[str, Any]  # server arguments of SGLang
    warm_start: SftConfig | None  # supervised stage that runs first; None: the config has none, or its output exists
    step: StepPlan  # what runs a training step
    resume: ResumePoint  # checkpoint from which the run continues, if there is one
    train: PromptDataset  # training prompts
    test: PromptDataset | None  # held-out prompts
    evaluations: tuple[HeldOutEvaluation, ...]  # how an evaluation samples and scores the held-out prompts
    sampling: SamplingParams  # how training responses are sampled
    prompt_drawing: PromptDrawing  # which prompts a step draws, and how many responses each of them gets
    offline: OfflineRows | None  # responses from a file, on which steps also train; None: there are none
    models_beside_actor: Mapping[str, ModelPlan]  # by role

    @property
    def lora(self) -> LoraConfig | None:
        """Adapters of the actor. If the run continues from a checkpoint, the checkpoint has them, and lora.path is not read."""
        lora = super().lora
        return replace(lora, path=None) if lora and self.resume.checkpoint else lora

    @property
    def models(self) -> dict[str, ModelPlan]:
        """Plans of the run's models, by role, the actor first."""
        return dict(actor=self, **self.models_beside_actor)

    @property
    def num_steps(self) -> int:
        """Largest number of steps of the run."""
        return num_steps(self.config, len(self.train))

    @property
    def data_fingerprint(self) -> str:
        """Digest of the training prompts and of the rows of data.offline.path."""
        return self.train.fingerprint + (self.offline.fingerprint if self.offline else "")

    def data_source(self, row: int) -> str:
        """Return the data source of a row of the training prompts, or "offline" for a row of data.offline.path."""
        return self.train.data_source(row) if row >= 0 else OFFLINE

    @property
    def prompts(self) -> PromptStream:
        """A new stream of the training prompts. No prompt is drawn from it yet."""
        return prompt_stream(self.config, self.train, self.prompt_drawing)

    @property
    def critic(self) -> ModelPlan | None:
        """Plan of the critic, if the run has one."""
        return self.models_beside_actor.get("critic")

    @property
    def actor_holds_reference(self) -> bool:
        """Whether the actor's processes hold the weights of the reference, too."""
        return actor_holds_reference(self.algorithm.required_inputs, self.models_beside_actor)

    @property
    def pools(self) -> Pools:
        """Resource pools of all models and the engines."""
        return build_pools(self.config, {role: model.dims for role, model in self.models.items()})

    @property
    def colocated_roles(self) -> frozenset[frozenset[str]]:
        """Sets of roles that share devices, one set per pool."""
        return self.pools.colocated_roles


def plan_training(config: Config, *, check_hashes: bool = True) -> TrainPlan:
    """Build or check every part of an RL run. Raises ValueError for a mistake of the user; starts no process.

    If `check_hashes` is False, the check of a checkpoint compares only the sizes of its files, not their hashes.
    """
    check_installed(config.tracking.backends)
    resume = find_resume_point(config, check_hashes=check_hashes)
    step = plan_step(config)
    algorithm = build_algorithm(config, step.required_inputs)
    check_served_folders(config)
    reward = instantiate_callable(config.reward, "reward")
    check_reward(reward)
    _check_advantage_weights(algorithm, reward)
    check_filter_metric(algorithm.rollout_filter, reward)
    if config.rollout.replay and "greedy_rewards" in algorithm.required_inputs:
        raise ValueError("rollout.replay: recorded rollouts have no greedy responses, which algorithm.advantage needs.")
    check_server_args(config.sglang)
    check_synced_args(config.sglang)
    make_input_files(config)
    finished_warm_start = find_finished_warm_start(config)
    read_config = drop_lora_path_if_continuing(config, resume.checkpoint is not None)  # see TrainPlan.lora
    models = plan_models(read_config, algorithm.required_inputs, actor_path=finished_warm_start)
    actor = replace(models["actor"], config=config)
    check_distillation(config, algorithm, models)
    sampling, evaluations = plan_sampling(config), plan_evaluations(config)
    check_sampling(config, sampling, evaluations, actor.arch.vocab_size)
    warn_of_sampling(config, algorithm.objective)
    train, test = load_prompt_datasets(config, actor, reward, evaluations)
    check_readers_of_images(config, models, train, test)
    sources = [train.data_source(row) for row in range(len(train))] + ([OFFLINE] if config.data.offline.path else [])
    check_taught_sources(config, algorithm, sources)
    check_step_sources(step, sources)
    prompt_drawing = plan_prompt_drawing(config, train)
    check_epochs(config, len(train))
    warm_start = config.sft if config.sft.train and not finished_warm_start else None
    if warm_start:
        check_warm_start(config)
        check_supervised_data(config, actor)
    check_adapter_sync(config, actor)
    if not config.rollout.replay:
        engine_layout(config, actor)
    models_beside_actor = {role: model for role, model in models.items() if role != "actor"}
    parts = {"actor", *({"critic"} & models_beside_actor.keys())}  # parts of a checkpoint of this run
    parts |= {"reference"} if actor_holds_reference(algorithm.required_inputs, models_beside_actor) else set()
    check_checkpoint_fits(resume, actor.identity(), parts)
    check_pickles(resume, parts)
    _check_prompt_position(resume, prompt_stream(config, train, prompt_drawing))
    plan = TrainPlan(
        **vars(actor),
        algorithm=algorithm,
        step=step,
        reward=reward,
        agent=_build_agent(config, actor),
        server_args=dict(family_of(actor.hf).engine_args)
        | image_args(actor)
        | draft_server_args(config, actor.model_path)
        | adapter_server_args(config, actor)
        | _server_args(config, actor.context, sampling, evaluations),
        sampling=sampling,
        prompt_drawing=prompt_drawing,
        offline=plan_offline(config, actor, algorithm),
        warm_start=warm_start,
        train=train,
        test=test,
        evaluations=evaluations,
        resume=resume,
        models_beside_actor=models_beside_actor,
    )
    _check_whole_plan(plan)
    logger.info("pools: %s", plan.pools)
    return plan


def _check_whole_plan(plan: TrainPlan) -> None:
    """Raise ValueError if parts of the plan do not fit together. Warn of keys that are not used."""
    config, algorithm = plan.config, plan.algorithm
    check_fp8_device(plan.server_args, plan.arch)
    check_profile(config, max(model.dims.world_size for model in plan.models.values()), plan.num_steps)
    check_time_sharing(config, plan.colocated_roles)
    check_shared_devices(config, plan.colocated_roles)
    check_image_engines(config, plan.arch, plan.colocated_roles)
    rewards = {"reward": plan.reward}
    rewards |= {f"data.test_sets.{name}.reward": each for name, each in rewards_of_sets(plan.evaluations).items()}
    teachers = teachers_of(config).keys() if algorithm.required_inputs & TEACHER_OUTPUTS else set()
    check_served_roles(config, rewards, plan.colocated_roles, teachers)
    if plan.server_args["device"] == "cuda":
        check_memory_fractions(config, plan.colocated_roles)
    check_learning(config, algorithm, len(plan.train))
    _warn_of_unused_keys(config, algorithm, plan.models)


def actor_holds_reference(required_inputs: frozenset[str], models_beside_actor: Mapping[str, ModelPlan]) -> bool:
    """Return whether the actor's processes hold the weights of the reference. `models_beside_actor`: by role."""
    return "ref_logprobs" in required_inputs and REFERENCE_ROLE not in models_beside_actor


def algorithm_of(config: Config) -> AlgorithmParts:
    """Build the algorithm of a config, with the required inputs of its training step."""
    return build_algorithm(config, plan_step(config).required_inputs)


def _warn_of_unused_keys(config: Config, algorithm: AlgorithmParts, roles: Collection[str]) -> None:
    """Warn of keys that are set but that the run does not read. `roles`: the models of the run."""
    teachers = teachers_of(config) if algorithm.required_inputs & TEACHER_OUTPUTS else {}
    for name, role in roles_of(config).items():
        if not role.is_served and role.column not in algorithm.required_inputs and name not in teachers:
            show_warning(
                f"roles.{name}: is not started, because no part of the algorithm reads the column {role.column}."
            )
    critic, checkpoint = config.critic, config.checkpoint
    unused: dict[str, dict[str, Any]] = {}
    if "critic" not in roles:
        unused["the run has no critic"] = {
            "critic.max_tokens_per_micro_batch": critic.max_tokens_per_micro_batch,
            "critic.max_tokens_per_forward_micro_batch": critic.max_tokens_per_forward_micro_batch,
            "checkpoint.keep_last_critic": checkpoint.keep_last_critic,
        }
    if not checkpoint.export_every:
        unused["checkpoint.export_every=0"] = {"checkpoint.keep_last_exports": checkpoint.keep_last_exports}
    if config.rollout.replay:
        unused["rollout.replay sets the prompts of each step"] = {
            "data.sampler": config.data.sampler,
            "rollout.group_sizes": config.rollout.group_sizes,
        }
    for reason, values in unused.items():
        if keys := [key for key, value in values.items() if value]:
            show_warning(f"{', '.join(keys)}: not used, because {reason}.")


def check_profile(config: Config, num_ranks: int, last: int | None = None) -> None:
    """Raise ValueError if the section `profile` names a step or a trainer rank that the run does not have.

    Also raise ValueError if the section names steps but no rank. `last`: last step of the run; None: trainer.max_steps.
    """
    profile, max_steps = config.profile, config.trainer.max_steps
    last = max_steps if last is None else last
    limit = "trainer.max_steps" if last == max_steps else "trainer.epochs"
    if late := [step for step in profile.steps if step > last]:
        raise ValueError(
            f"profile.steps={profile.steps}: the run ends after step {last} ({limit}), so step {late[0]} cannot be profiled; "
            f"expected steps from 1 to {last}."
        )
    if missing := [rank for rank in profile.ranks if rank >= num_ranks]:
        raise ValueError(
            f"profile.ranks={profile.ranks}: the run has {num_ranks} trainer ranks, so there is no rank {missing[0]}; expected "
            f"ranks from 0 to {num_ranks - 1}."
        )
    if profile.steps and not profile.ranks:
        raise ValueError(
            "profile.ranks=[]: profile.steps names steps, but no rank is profiled; name a rank, such as [0]."
        )


def learning_settings(config: Config, algorithm: AlgorithmParts) -> LearningSettings:
    """Return the values that the health check of learning reads."""
    advantage = algorithm.advantage_pipeline.advantage
    return LearningSettings(
        responses_per_prompt=config.rollout.responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        lr=config.optim.lr,
        advantage=plug_in_name(advantage),
        group_relative=getattr(advantage, "group_relative", False),
        reads_rewards=reads_rewards(advantage, algorithm.required_inputs),
        mask_truncated=config.algorithm.mask_truncated,
    )


def check_learning(config: Config, algorithm: AlgorithmParts, num_rows: int) -> None:
    """Warn of settings with which the run cannot learn well. With trainer.on_unhealthy=stop, raise ValueError instead."""
    problems = find_static_problems(
        learning_settings(config, algorithm),
        num_rows=num_rows,
        prompts_per_step=config.rollout.prompts_per_step,
        max_steps=num_steps(config, num_rows),
    )
    for problem in problems:
        if config.trainer.on_unhealthy == "stop":
            raise ValueError(f"{problem} trainer.on_unhealthy=warn starts the run nevertheless.")
        show_warning(problem)


def check_time_sharing(config: Config, colocated_roles: frozenset[frozenset[str]]) -> None:
    """Raise ValueError if engines share devices and a setting needs the engines' memory to stay on the devices.

    Engines that share devices lose their memory when they are offloaded.
    """
    sync, saver = config.weight_sync, "enable_memory_saver"
    if not any("engines" in roles for roles in colocated_roles):
        return
    why = "colocated engines lose weights and KV cache when they are offloaded"
    if sync.pause_mode == "in_place":
        raise ValueError(f"weight_sync.pause_mode=in_place keeps the KV cache, but {why}; use retract.")
    if sync.delta:
        raise ValueError(
            f"weight_sync.delta=true needs the previous weights in the engines, but {why}; leave it false."
        )
    if config.sglang.get(saver) is False:
        raise ValueError(
            f"sglang.{saver}=false: {why}, and offloading needs the memory saver on a GPU; leave {saver} out."
        )


def check_served_roles(
    config: Config,
    rewards: Mapping[str, Reward],
    colocated_roles: frozenset[frozenset[str]],
    teachers: Collection[str] = (),
) -> None:
    """Check the roles that SGLang serves. Warns of a served role that nothing calls. Raises ValueError in each of these cases:

    - A reward calls a role that SGLang does not serve, or cannot serve.
    - A server argument of a role does not exist, or mrl sets it itself.
    - A served model shares devices with trainers, but its settings forbid offloading.
    - A served model shares devices with trainers, but responses may be scored while the trainers work and the model is
      offloaded.

    `rewards`: config key -> reward, for the reward of the run and the rewards of held-out sets. `teachers`: roles from which the
    loss learns.
    """
    served = {name: role for name, role in roles_of(config).items() if role.is_served}
    called = {name: key for key, reward in rewards.items() for name in called_roles(reward)}
    if missing := sorted(called.keys() - served.keys()):
        raise ValueError(
            f"{called[missing[0]]}: calls roles.{missing[0]}, which SGLang does not serve; set roles.{missing[0]}.path and "
            f"roles.{missing[0]}.num_engines."
        )
    _check_reward_models(rewards.values(), served)
    for name, role in served.items():
        check_server_args(role.sglang, f"roles.{name}.sglang")
        if name not in called and name not in teachers:
            show_warning(f"roles.{name}: no reward calls this model; name it in the argument `role` of a reward.")
        shared = {other for roles in colocated_roles if name in roles for other in roles} - {name, ENGINES, *served}
        off = [each for each in ("enable_memory_saver", "enable_weights_cpu_backup") if role.sglang.get(each) is False]
        if shared and off:
            raise ValueError(
                f"roles.{name}.sglang.{off[0]}=false: {name} shares devices with {', '.join(sorted(shared))}, so its weights "
                f"leave the GPUs while they work; leave {off[0]} out."
            )
        if shared and (config.rollout.staleness or config.rollout.over_sample_rate):
            raise ValueError(
                f"placement.pools: {name} shares devices with {', '.join(sorted(shared))}, but responses are scored while the "
                f"trainers work; use rollout.mode=sync without rollout.over_sample_rate, or give {name} a pool of its own."
            )


def check_memory_fractions(config: Config, colocated_roles: frozenset[frozenset[str]]) -> None:
    """Raise ValueError if the memory fractions of servers that share GPUs add up to 1 or more."""
    sglang = {f"roles.{name}.sglang": (name, role.sglang) for name, role in roles_of(config).items() if role.is_served}
    for roles in colocated_roles:
        fractions = {
            f"{section}.mem_fraction_static": settings.get("mem_fraction_static") or DEFAULT_MEM_FRACTION
            for section, (role, settings) in ({"sglang": (ENGINES, config.sglang)} | sglang).items()
            if role in roles
        }
        if len(fractions) > 1 and sum(fractions.values()) >= 1:
            raise ValueError(
                f"{', '.join(f'{key}={value:g}' for key, value in fractions.items())}: these servers share GPUs "
                "(placement.pools) and use their memory at the same time; set fractions whose sum is below 1."
            )


def _check_reward_models(rewards: Collection[Reward], served: Mapping[str, RoleConfig]) -> None:
    """Raise ValueError if a RewardModel calls a served model that is not in REWARD_MODELS, or that has several outputs."""
    singles = [each for reward in rewards for each in single_rewards(reward)]
    for name in sorted({each.role for each in singles if isinstance(each, RewardModel)} & served.keys()):
        hf = HFConfig.load(served[name].path or "")
        if hf.architecture not in REWARD_MODELS:
            raise ValueError(
                f"roles.{name}.path={served[name].path}: a run cannot serve {hf.architecture} as a reward model; expected one of "
                f"{', '.join(REWARD_MODELS)}. Another one needs a server of your own, which reward=reward_model calls."
            )
        if hf.is_reward_model:  # the other REWARD_MODELS always have one output in SGLang
            hf.check_one_output()


def _check_prompt_position(resume: ResumePoint, stream: PromptStream) -> None:
    """Raise ValueError if the checkpoint's position in the prompts belongs to other prompts, or to another sampler."""
    if resume.checkpoint:
        try:
            stream.load_state_dict(resume.checkpoint.state["prompts"])
        except ValueError as error:
            raise ValueError(f"{resume.checkpoint.path}: {error}") from None


def _check_advantage_weights(algorithm: AlgorithmParts, reward: Reward) -> None:
    """Raise ValueError if algorithm.advantage.weights names a part that the combined reward does not have."""
    weights = getattr(algorithm.advantage_pipeline.advantage, "weights", None)
    if isinstance(reward, CombinedReward) and weights and (unknown := set(weights) - reward.gdpo_part_names):
        raise ValueError(
            f"algorithm.advantage.weights: the reward has no part {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(reward.gdpo_part_names))}."
        )


def check_filter_metric(rollout_filter: Filter | None, reward: Reward) -> None:
    """Raise ValueError if rollout.filter.metric names a part that a combined reward cannot have.

    The parts of other rewards are known only after the first responses are scored.
    """
    metric = getattr(rollout_filter, "metric", None)
    if metric in (None, "correctness") or not isinstance(reward, CombinedReward):
        return
    if reason := reward.missing_part_reason(metric):
        raise ValueError(f"rollout.filter.metric={metric}: the reward has no part with this name; {reason}.")


def _build_agent(config: Config, actor: ModelPlan) -> ToolAgent | None:
    """Build the agent, and check that the model's chat template and vocabulary can express its tool calls."""
    if not config.rollout.agent:
        return None
    agent = instantiate(config.rollout.agent, "rollout.agent")
    if not isinstance(agent, ToolAgent):
        raise ValueError(
            f"rollout.agent._target_={config.rollout.agent['_target_']}: "
            "expected mrl.rollout.agents.tool_agent.ToolAgent or a subclass."
        )
    agent.prepare(load_tokenizer(actor.model_path, chat_template(config)), config.data.template_args)
    return agent


def _server_args(
    config: Config, context: int, sampling: SamplingParams, evaluations: Sequence[HeldOutEvaluation]
) -> dict[str, Any]:
    """Merge the config section `sglang` into mrl's default server arguments. Raises ValueError if config keys conflict."""
    # The config may set the device, because this process may run on a node without a GPU.
    defaults = default_server_args(config.model.dtype, context, device=config.sglang.get("device"))
    loaders = [*defaults["custom_weight_loader"], *config.sglang.get("custom_weight_loader", [])]
    if config.rollout.deterministic:
        if config.sglang.get(DETERMINISTIC) is False:
            raise ValueError(f"sglang.{DETERMINISTIC}=false contradicts rollout.deterministic=true; leave it out.")
        defaults[DETERMINISTIC] = True
    defaults |= tokenizer_args(config, sampling, evaluations)
    defaults |= block_fp8_args() if is_fp8(config) else {}
    if config.rollout.agent:
        defaults["disable_radix_cache"] = False  # the request of each turn repeats all earlier turns
    # pause_mode=in_place keeps the KV cache that older weights computed. New requests must not reuse it.
    if config.weight_sync.pause_mode == "in_place":
        if config.sglang.get("disable_radix_cache") is False:
            raise ValueError(
                "sglang.disable_radix_cache=false with weight_sync.pause_mode=in_place: new requests would continue prefixes "
                "that older weights computed; leave one of the two keys out."
            )
        defaults["disable_radix_cache"] = True
    return defaults | config.sglang | dict(custom_weight_loader=loaders)
