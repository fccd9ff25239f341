"""ModelPlan: one model of a run with its parallel layout, checked before any process starts.

The functions read the config, and the headers of the files in the model's folder. They start no process and need no GPU. Every
function raises ValueError for a mistake in the config. The message names the config key.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

from models.architecture import Architecture
from models.conversion.hf_reader import check_hf_folder
from models.families import family_of
from models.hf_config import HFConfig
from models.megatron_overrides import (
    FIELDS_SET_BY_MRL,
    UNEVEN_STAGE_FIELDS,
    check_load_balancing,
    check_megatron_overrides,
)
from mrl.algorithms.distillation import TEACHER_OUTPUTS
from mrl.config.instantiate import instantiate_callable
from mrl.config.process_schema import RoleConfig, Transport
from mrl.config.schema import Config
from mrl.config.validate import roles_of, teachers_of, token_budgets
from mrl.data.batching import CostModel
from mrl.data.tokenizer import ChatTemplate
from mrl.placement.device_map import DeviceMap, locate_ranks, planned_device_map
from mrl.placement.resource_pools import Pools, SlotDemand, gpus_of_nodes, make_pools, slot_demands
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, check_heads
from mrl.weight_sync.transfer_plan import ProcessLocation, choose_transport
from mrl.workers.dp_partition import Packing
from parallel.dims import ParallelDims
from parallel.trainer_config import LrSchedule, OptimConfig


@dataclass(frozen=True)
class ModelPlan:
    """A model, its parallel layout and its optimizer. Supervised training needs only this plan."""

    config: Config
    dims: ParallelDims
    optimizer: OptimConfig | None  # None: the model is not trained
    model_path: str  # Hugging Face folder with the initial weights: model.path, or the output of an earlier warm start
    hf: HFConfig  # config.json of the folder `model_path`
    arch: Architecture  # sizes and parts of the model
    packing: Packing  # how rows are packed into micro-batches
    # output head: vocabulary, value (critic) or score (reward model)
    head: str = field(default="vocabulary", kw_only=True)
    ddp: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # settings of Megatron's data parallelism

    @property
    def context(self) -> int:
        """Longest sequence that the model takes, in tokens."""
        return self.arch.max_position_embeddings

    @property
    def pools(self) -> Pools:
        """Resource pools of a run with this model alone."""
        return make_pools(self.config.placement.pools, dict(actor=SlotDemand(self.dims.world_size, self.dims.tp)))


def plan_models(
    config: Config, needs: frozenset[str], *, actor_path: str = "", weights: bool = True
) -> dict[str, ModelPlan]:
    """Return the plans of the models of an RL run, by role.

    `needs` are the columns that the algorithm needs. These columns decide whether the run has a critic, and which models of the
    key `roles` it has. `actor_path` replaces model.path. If `weights` is False, only config.json is read from each model's
    folder.
    """
    models = dict(actor=plan_model(config, actor_path or config.model.path, weights=weights))
    if "values" in needs:
        models["critic"] = _plan_critic(config, models["actor"], weights)
    teachers = teachers_of(config) if needs & TEACHER_OUTPUTS else {}
    for name, role in roles_of(config).items():
        if not role.is_served and (role.column in needs or name in teachers):
            models[name] = _plan_role(config, name, role, models["actor"], weights)
    return models


def plan_model(
    config: Config,
    path: str,
    section: str = "",
    optimizer: OptimConfig | None = None,
    weights: bool = True,
    head: str = "vocabulary",
) -> ModelPlan:
    """Plan the model in the folder `path`.

    `section` is "" for the actor, and "critic" or "roles.NAME" for a second model. A second model has the actor's layout, except
    for the keys that its config section sets. `optimizer` is the optimizer of a second model; the actor has config.optim. If
    `weights` is False, only config.json is read. `head`: see ModelPlan.
    """
    dims = parallel_layout(config, section)
    hf = (check_hf_folder if weights else HFConfig.load)(path, config.model.family)
    arch = family_of(hf).read(hf)
    if head == "vocabulary" and arch.is_reward_model:
        raise ValueError(
            f"{section or 'model'}.path={path}: {hf.architecture} is a reward model, which has no output layer; expected a "
            "language model. `mrl sft objective=reward_model` trains a reward model."
        )
    check_layout(config, arch, dims)
    check_megatron_overrides(config.megatron, derived=FIELDS_SET_BY_MRL | arch.transformer.keys())
    _check_experts(config, arch, dims, routing_replay=not section and config.rollout.routing_replay)
    budgets = token_budgets(config, section.removeprefix("roles.") or "actor")
    cost = CostModel(*arch.multiply_adds(None if head == "vocabulary" else 1))
    packing = Packing(budgets.train, config.trainer.share_prompts, cost, budgets.forward)
    optim = optimizer if section else _actor_optimizer(config)
    ddp = config.trainer.ddp | (config.critic.ddp if section == "critic" else {})
    return ModelPlan(config, dims, optim, path, hf, arch, packing, head=head, ddp=ddp)


def parallel_layout(config: Config, section: str = "") -> ParallelDims:
    """Return the layout of the actor (`section` is "") or of the second model that has this config section.

    Raises ValueError if the sizes do not multiply to the world size.
    """
    layout = vars(config.parallel)
    if section:
        name = section.removeprefix("roles.")
        overrides = (config.critic if section == "critic" else roles_of(config)[name]).parallel
        layout = layout | {name: value for name, value in overrides.items() if value is not None}
    return ParallelDims.from_world_size(**layout)


def section_of(role: str) -> str:
    """Return the config section of a model: "" for the actor."""
    return {"actor": "", "critic": "critic"}.get(role, f"roles.{role}")


def check_layout(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Raise ValueError if the layout cannot shard this model."""
    arch.check_layout(dims, uneven_stages=bool(UNEVEN_STAGE_FIELDS & config.megatron.keys()))


def _check_experts(config: Config, arch: Architecture, dims: ParallelDims, routing_replay: bool) -> None:
    """Raise ValueError if settings for experts do not fit the model or its layout."""
    if routing_replay and not arch.num_experts:
        raise ValueError(f"rollout.routing_replay=true: {config.model.path} has no experts; leave it false.")
    check_load_balancing(config.megatron.get("moe_router_load_balancing_type", "none"), dims)
    if config.megatron.get("moe_token_dispatcher_type") == "allgather" and (
        dims.pp > 1 or dims.equal_micro_batch_counts
    ):
        raise ValueError(
            "megatron.moe_token_dispatcher_type=allgather: exchanges packs of equal length only, so parallel.pp must be 1 "
            f"and ep x etp at most tp x cp; got pp={dims.pp}, ep={dims.ep}, etp={dims.expert_tp}, tp={dims.tp}, "
            f"cp={dims.cp}. Use alltoall, the default."
        )


def _actor_optimizer(config: Config) -> OptimConfig:
    optim = config.optim
    if optim.lr_schedule == LrSchedule.linear_to_tenth and not optim.lr_decay_steps:
        raise ValueError(
            "optim.lr_decay_steps=0: lr_schedule=linear_to_tenth needs the number of optimizer steps of the run."
        )
    return optim


def _plan_critic(config: Config, actor: ModelPlan, weights: bool) -> ModelPlan:
    critic = config.critic
    if config.sft.train and not (config.sft.output or critic.path):
        raise ValueError(
            "the critic starts from the warm start, as the actor does: set sft.output to store the warm start, or set "
            "critic.path."
        )
    plan = plan_model(config, critic.path or actor.model_path, "critic", critic.optim, weights, "value")
    _check_reads_actor_sequences(config, plan, actor, f"critic.path={critic.path}")
    return plan


def _plan_role(config: Config, name: str, role: RoleConfig, actor: ModelPlan, weights: bool) -> ModelPlan:
    key = f"roles.{name}.path"
    if not role.path and config.sft.train and not config.sft.output:
        raise ValueError(
            f"{key} is not set, so {name} starts from the warm start, as the actor does: set sft.output to store the warm "
            f"start, or set {key}."
        )
    plan = plan_model(config, role.path or actor.model_path, f"roles.{name}", None, weights)
    _check_reads_actor_sequences(config, plan, actor, f"{key}={role.path}")
    return plan


def _check_reads_actor_sequences(config: Config, model: ModelPlan, actor: ModelPlan, key: str) -> None:
    """Raise ValueError if a second model has too small a vocabulary or too short a context for the actor's sequences."""
    longest = max_prompt_length(config, actor.context) + config.rollout.max_response_tokens
    for what, size, needed in (
        ("vocabulary", model.arch.vocab_size, actor.arch.vocab_size),
        ("context", model.context, longest),
    ):
        if size < needed:
            raise ValueError(f"{key}: its {what} is {size} tokens, but the actor's sequences need {needed}.")


def max_prompt_length(
    config: Config, context: int, max_response_tokens: int | None = None, section: str = "rollout"
) -> int:
    """Return the largest allowed number of prompt tokens. A prompt and its response must fit into `context` tokens.

    `max_response_tokens`: limit of the response; None: rollout.max_response_tokens. `section`: config key that has this limit.
    """
    response_tokens = config.rollout.max_response_tokens if max_response_tokens is None else max_response_tokens
    room = context - response_tokens
    if room < 1:
        raise ValueError(
            f"{section}.max_response_tokens={response_tokens}: the model's context of {context} tokens leaves no room for a "
            f"prompt; use at most {context - 1}."
        )
    return min(room, config.data.max_prompt_tokens or room)


def build_pools(config: Config, dims: Mapping[str, ParallelDims]) -> Pools:
    """Build the resource pools of an RL run. `dims` is the layout of each model, by role."""
    served = {name: role for name, role in roles_of(config).items() if role.is_served}
    return make_pools(config.placement.pools, slot_demands(config.rollout, dims, served))


def engine_layout(config: Config, actor: ModelPlan) -> EngineLayout:
    """Return how the engines shard the model. Raises ValueError if SGLang or weight sync does not support this layout."""
    layout = EngineLayout.of(family_of(actor.hf), actor.arch, engine_topology(config, actor))
    layout.shards(0)  # raises ValueError for a tensor that cannot be sharded
    return layout


def engine_topology(config: Config, actor: ModelPlan) -> EngineParallelSizes:
    """Return the parallel sizes of one engine. Raises ValueError if SGLang or weight sync does not support them."""
    if config.rollout.engine_urls and config.weight_sync.transport != "disk":
        raise ValueError(
            f"rollout.engine_urls={config.rollout.engine_urls}: engines that this run does not start load weights from disk, not "
            f"by weight_sync.transport={config.weight_sync.transport}; set it to disk."
        )
    sglang, attention = config.sglang, config.sglang.get("enable_dp_attention", False)
    for name in ("pp_size",) if attention else ("pp_size", "dp_size"):
        if sglang.get(name, 1) != 1:
            raise ValueError(
                f"sglang.{name}={sglang[name]}: weight sync supports only {name}=1; use more engines "
                "(rollout.num_engines), or data-parallel attention (sglang.enable_dp_attention)."
            )
    if sglang.get("enable_dp_lm_head"):
        raise ValueError(
            "sglang.enable_dp_lm_head=true: weight sync does not support engines with a data-parallel output layer."
        )
    topology = EngineParallelSizes(config.rollout.engine_tp, sglang.get("ep_size", 1), sglang.get("dp_size", 1))
    if topology.ep > 1 and (not actor.arch.num_experts or actor.arch.num_experts % topology.ep):
        raise ValueError(
            f"sglang.ep_size={topology.ep} does not divide the {actor.arch.num_experts} experts of this model."
        )
    family_of(actor.hf).check_engine(actor.hf, actor.arch)
    check_heads(actor.arch, topology)
    return topology


def gpu_transport(config: Config, devices: DeviceMap) -> tuple[Transport, list[ProcessLocation], list[ProcessLocation]]:
    """Return the transport of the weights between GPUs, and the locations of all trainer ranks and of all engine ranks.

    The trainer ranks are those of the actor. Raises ValueError if the weights cannot travel between these GPUs, or if an engine
    would have different numbers of GPUs on its nodes. When the run starts, it applies the same rules to the actual GPUs
    (mrl/weight_sync/session.py, mrl/rollout/engines/ray_engine.py).
    """
    senders, receivers = (
        [ProcessLocation(*place) for place in locate_ranks(devices, role)] for role in ("actor", "engines")
    )
    if receivers:
        _check_nodes_of_engines(receivers, devices.pools.by_role["engines"].demands["engines"].tp_size)
    requested = config.weight_sync.transport
    if requested == Transport.disk or not receivers:
        return Transport.disk, senders, receivers
    return choose_transport(requested, senders, receivers), senders, receivers


def _check_nodes_of_engines(receivers: Sequence[ProcessLocation], engine_tp: int) -> None:
    for number, ranks in enumerate(batched(receivers, engine_tp)):
        ranks_on = Counter(location.host for location in ranks)
        if len(set(ranks_on.values())) > 1:
            parts = ", ".join(f"{count} on {host}" for host, count in ranks_on.items())
            raise ValueError(
                f"rollout.engine_tp={engine_tp}: engine {number} would have {parts}, and SGLang needs the same number of GPUs on "
                "each node; use an engine_tp that divides the number of GPUs per node or is a multiple of it, or the strategy "
                "STRICT_PACK for the engines' pool."
            )


def planned_gpus(config: Config, pools: Pools) -> DeviceMap | None:
    """Return the GPUs on which these pools would be placed, or None if the run would use CPUs.

    A run on unknown hardware would use CPUs if weight_sync.transport=shared_memory, because this transport works only on CPUs.
    """
    cluster, gpus_per_node = config.cluster, max(gpus_of_nodes(config.cluster))
    known = bool(cluster.scheduler or cluster.hardware.name)
    if not gpus_per_node or (config.weight_sync.transport == Transport.shared_memory and not known):
        return None
    return planned_device_map(pools, gpus_per_node, cluster.nodes or 0)


def check_planned_transport(config: Config, pools: Pools) -> None:
    """Raise ValueError if the weights cannot travel between the GPUs on which these pools would be placed."""
    if devices := planned_gpus(config, pools):
        gpu_transport(config, devices)


def make_input_files(config: Config) -> None:
    """Call `data.inputs`, if it is set, to create the input files that do not exist yet."""
    if config.data.inputs:
        instantiate_callable(config.data.inputs, "data.inputs")()


def chat_template(config: Config) -> ChatTemplate:
    """Return the chat template that turns messages into text, for prompts and for supervised rows."""
    template = config.data.chat_template
    return ChatTemplate(str(Path(template).resolve()) if template else None, config.data.template_args)
