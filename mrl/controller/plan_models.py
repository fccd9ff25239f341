"""ModelPlan: one model of a run with its parallel layout, checked before any process starts.

The functions read the config, and the headers of the files in the model's folder. They start no process and need no GPU. Every
function raises ValueError for a mistake in the config. The message names the config key.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from pathlib import Path
from typing import Any

from models.architecture import Architecture, Family
from models.conversion.hf_reader import check_hf_folder
from models.conversion.lora_mapping import check_lora
from models.conversion.peft_folder import check_peft, peft_warnings
from models.families import FAMILIES, family_of
from models.hf_config import HFConfig
from models.megatron_overrides import (
    FIELDS_SET_BY_MRL,
    UNEVEN_STAGE_FIELDS,
    check_load_balancing,
    check_megatron_overrides,
)
from mrl.algorithms.distillation import TEACHER_OUTPUTS
from mrl.checkpoint.resume import model_identity
from mrl.config.instantiate import instantiate_callable
from mrl.config.process_schema import LoraSync, RoleConfig, Transport
from mrl.config.schema import Config
from mrl.config.validate import roles_of, teachers_of, token_budgets
from mrl.controller.plan_engine_dtype import (
    check_engine_device,
    check_engine_dtype,
    check_fp8_engines,
    engine_dtype,
    is_fp8,
)
from mrl.controller.plan_mtp import check_mtp_settings, check_speculation
from mrl.data.batching import CostModel
from mrl.data.tokenizer import ChatTemplate
from mrl.placement.device_map import DeviceMap, locate_ranks, planned_device_map
from mrl.placement.resource_pools import Pools, SlotDemand, gpus_of_nodes, make_pools, slot_demands
from mrl.planner.trainer_state_bytes import layers_of_stages, pipeline_stages
from mrl.rollout.engines.server_args import speculates
from mrl.tracking.console import show_warning
from mrl.weight_sync.engine_layout import EngineLayout, EngineParallelSizes, check_expert_biases, check_heads
from mrl.weight_sync.transfer_plan import ProcessLocation, choose_transport
from mrl.workers.dp_partition import Packing
from parallel.dims import ParallelDims
from parallel.trainer_config import LoraConfig, LrSchedule, OptimConfig


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
    def lora(self) -> LoraConfig | None:
        """Adapters of the actor. With adapters, all other weights of the actor are frozen. None: the model has no adapters."""
        is_trained_actor = self.optimizer is not None and self.head == "vocabulary"
        return self.config.lora if is_trained_actor and self.config.lora.rank else None

    def identity(self) -> dict[str, Any]:
        """Return name -> value of the properties that must be equal in this model and in its checkpoints (`model_identity`)."""
        return model_identity(self.arch, self.lora or LoraConfig(), self.model_path, self.config.model.train_vision)

    @property
    def context(self) -> int:
        """Longest sequence that the model takes, in tokens."""
        return self.arch.max_position_embeddings

    @property
    def pools(self) -> Pools:
        """Resource pools of a run with this model alone."""
        return make_pools(self.config.placement.pools, dict(actor=SlotDemand(self.dims.world_size, self.dims.tp)))


def plan_models(
    config: Config, required_inputs: frozenset[str], *, actor_path: str = "", weights: bool = True
) -> dict[str, ModelPlan]:
    """Return the plans of the models of an RL run, by role.

    `required_inputs` are the columns that the algorithm needs. These columns decide whether the run has a critic, and which
    models of the key `roles` it has. `actor_path` replaces model.path. If `weights` is False, only config.json is read from each
    model's folder.
    """
    models = dict(actor=plan_model(config, actor_path or config.model.path, weights=weights))
    if "values" in required_inputs:
        models["critic"] = _plan_critic(config, models["actor"], weights)
    for name, role in needed_roles(config, required_inputs).items():
        if not role.is_served:
            models[name] = _plan_role(config, name, role, models["actor"], weights)
    return models


def needed_roles(config: Config, required_inputs: frozenset[str]) -> dict[str, RoleConfig]:
    """Return name -> role of the models of `roles` that the run starts. `required_inputs`: columns that the algorithm needs."""
    teachers = teachers_of(config) if required_inputs & TEACHER_OUTPUTS else {}
    roles = roles_of(config).items()
    return {name: role for name, role in roles if role.is_served or role.column in required_inputs or name in teachers}


def drop_lora_path_if_continuing(config: Config, continues: bool) -> Config:
    """If the run continues from a checkpoint, return the config without lora.path: the run does not read those adapters."""
    return replace(config, lora=replace(config.lora, path=None)) if continues else config


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
    if train_mtp := config.model.train_mtp and not section:
        check_mtp_settings(config, head)
    hf = (check_hf_folder if weights else HFConfig.load)(path, config.model.family, train_mtp)
    arch = family_of(hf).read(hf)
    if head == "vocabulary" and arch.is_reward_model:
        raise ValueError(
            f"{section or 'model'}.path={path}: {hf.architecture} is a reward model, which has no output layer; expected a "
            "language model. `mrl sft objective=reward_model` trains a reward model."
        )
    check_layout(config, arch, dims)
    if arch.window and not arch.has_sinks and dims.cp > 1 and not config.trainer.share_prompts:
        raise ValueError(
            f"trainer.share_prompts=false with parallel.cp={dims.cp}: on GPUs, Transformer Engine would compute the attention, "
            "but it has no sliding windows with context parallelism; set trainer.share_prompts=true, or parallel.cp=1."
        )
    if config.lora.rank and not section:
        _check_lora(config, hf, arch, head)
        _check_adapted_stages(config, arch, dims)
    if arch.has_recurrent_layers and (fp8 := config.megatron.get("fp8")):
        raise ValueError(
            f"megatron.fp8={fp8}: trainers compute recurrent layers only in model.dtype; leave the key out."
        )
    check_megatron_overrides(config.megatron, derived=FIELDS_SET_BY_MRL | arch.transformer.keys())
    if not section:
        _check_vision(config, arch)
    _check_experts(config, arch, dims, routing_replay=not section and config.rollout.routing_replay)
    budgets = token_budgets(config, section.removeprefix("roles.") or "actor")
    cost = CostModel(*arch.multiply_adds(None if head == "vocabulary" else 1))  # 1: one value or score per token
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
    is_uneven = bool(UNEVEN_STAGE_FIELDS & config.megatron.keys())
    arch.check_layout(dims, uneven_stages=is_uneven)
    if is_uneven and arch.vision and arch.vision.num_features:
        _check_first_stage(config, arch.vision.num_features, arch.num_layers, dims)
    if is_uneven and not all(arch.indexer_layers):
        _refuse_layout(config, "whether every stage begins with a layer that has an indexer")
        stages = pipeline_stages(arch.num_layers, dims, config.megatron)
        arch.check_first_layers_of_stages(virtual.first for stage in stages for virtual in stage if virtual.layers)


def _check_first_stage(config: Config, num_features: int, num_layers: int, dims: ParallelDims) -> None:
    """Raise ValueError if a stage other than the first has layers that get features of the vision tower."""
    _refuse_layout(config, f"whether the first stage has the {num_features} layers with features of the vision tower")
    count = layers_of_stages(num_layers, dims, config.megatron)[0][0]
    if count < num_features:
        raise ValueError(
            f"megatron: the first of the pipeline stages has {count} layers, but the first {num_features} layers get features of "
            "the vision tower and must be in it; set a larger num_layers_in_first_pipeline_stage, or use fewer stages."
        )


def _refuse_layout(config: Config, unknown: str) -> None:
    """Raise ValueError if pipeline_model_parallel_layout is set. `unknown`: what mrl then cannot know, for the message."""
    if layout := config.megatron.get("pipeline_model_parallel_layout"):
        raise ValueError(
            f"megatron.pipeline_model_parallel_layout={layout!r}: mrl does not read this layout, so it does not know {unknown}; "
            "use megatron.num_layers_in_first_pipeline_stage."
        )


def _check_vision(config: Config, arch: Architecture) -> None:
    """Raise ValueError if the vision tower cannot be trained as the config says."""
    if not config.model.train_vision:
        return
    if arch.vision is None:
        raise ValueError(f"model.train_vision=true: {config.model.path} has no vision tower; leave it false.")
    if config.lora.rank:
        raise ValueError(
            f"model.train_vision=true with lora.rank={config.lora.rank}: only the adapters are trained, and the vision tower has "
            "none; set model.train_vision=false, or lora.rank=0."
        )
    if arch.vision.num_features and config.megatron.get("recompute_granularity") == "full":
        raise ValueError(
            "megatron.recompute_granularity=full: each recomputed layer would run the backward pass of the vision tower again; "
            "leave the key out, use selective, or set model.train_vision=false."
        )


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


_LORA_CONFLICTS = {
    "moe_router_bias_update_rate": "the routers of a model with adapters are frozen",
    "moe_shared_expert_overlap": "the shared experts get gathered tokens, which their adapters do not expect",
    "use_transformer_engine_op_fuser": "fused operations do not call the linear layers, so they would ignore the adapters",
}
"""Fields of Megatron that a run with adapters cannot set -> the reason."""


def _check_lora(config: Config, hf: HFConfig, arch: Architecture, head: str) -> None:
    """Raise ValueError if the actor cannot have the adapters that the section `lora` describes."""
    lora = config.lora
    if head != "vocabulary":
        raise ValueError(
            f"lora.rank={lora.rank}: a reward model has no adapters, because its new head is trained; leave out lora.rank."
        )
    for name, reason in _LORA_CONFLICTS.items():
        if value := config.megatron.get(name):
            raise ValueError(
                f"megatron.{name}={value} with lora.rank={lora.rank}: {reason}; leave it out, or set lora.rank=0."
            )
    offloaded = config.megatron.get("offload_modules") or ()
    if lora.experts and config.megatron.get("fine_grained_activation_offloading") and "expert_fc1" in offloaded:
        raise ValueError(
            "megatron.offload_modules: with lora.experts=true, it cannot contain expert_fc1, because Megatron frees the input of "
            "the experts on the GPU, which their adapters need; leave expert_fc1 out."
        )
    check_lora(lora, family_of(hf), arch)
    if lora.path:
        check_peft(lora, family_of(hf), arch)
        for text in peft_warnings(lora, config.model.dtype):
            show_warning(text)


def _check_adapted_stages(config: Config, arch: Architecture, dims: ParallelDims) -> None:
    """Raise ValueError if a virtual stage has no layers, and so no adapters."""
    if config.megatron.get("pipeline_model_parallel_layout"):
        return  # mrl does not read this layout
    stages = layers_of_stages(arch.num_layers, dims, config.megatron)
    if any(count == 0 for counts in stages for count in counts):
        raise ValueError(
            f"lora.rank={config.lora.rank}: every virtual pipeline stage needs a layer with adapters, but the stages have "
            f"{stages} layers; use a smaller parallel.pp or parallel.vpp, or other keys for the layers of stages in megatron."
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
    """Raise ValueError if the vocabulary or the context of a second model is too small for the actor's sequences."""
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

    `max_response_tokens`: limit of the response; None: rollout.max_response_tokens. `section`: config section with this limit.
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
    layout = EngineLayout.of(family_of(actor.hf), actor.arch, engine_parallel_sizes(config, actor))
    if is_fp8(config):
        layout = layout.with_block_scales()
        check_fp8_engines(config, actor.arch, layout, actor.dims)
    layout = layout.with_draft() if speculates(config.sglang) else layout
    layout.shards(0)  # raises ValueError for a tensor that cannot be sharded
    return layout


def engine_parallel_sizes(config: Config, actor: ModelPlan) -> EngineParallelSizes:
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
    if config.model.train_vision and config.weight_sync.transport != Transport.disk:
        raise ValueError(
            "model.train_vision=true: the weights of the vision tower reach the engines only by disk, not by "
            f"weight_sync.transport={config.weight_sync.transport}; set weight_sync.transport=disk."
        )
    parallel_sizes = EngineParallelSizes(config.rollout.engine_tp, sglang.get("ep_size", 1), sglang.get("dp_size", 1))
    if parallel_sizes.ep > 1 and (not actor.arch.num_experts or actor.arch.num_experts % parallel_sizes.ep):
        raise ValueError(
            f"sglang.ep_size={parallel_sizes.ep} does not divide the {actor.arch.num_experts} experts of this model."
        )
    family = family_of(actor.hf)
    family.check_engine(actor.hf, actor.arch)
    if not config.rollout.engine_urls:
        advice = "use GPUs, or train the model with mrl sft, or from recorded rollouts (rollout.replay)"
        check_engine_device(config, family, advice=advice)
        check_engine_dtype(config, actor.hf, engine_dtype(config), config.rollout.deterministic)
    check_speculation(config, actor.hf)
    check_heads(actor.arch, parallel_sizes)
    _check_key_norms(family, actor.arch, parallel_sizes)
    if config.weight_sync.transport != Transport.disk:
        check_expert_biases(actor.arch, parallel_sizes)
    return parallel_sizes


def _check_key_norms(family: Family, arch: Architecture, parallel_sizes: EngineParallelSizes) -> None:
    """Raise ValueError if SGLang normalizes the keys of all heads together, and several engine ranks would hold the same head."""
    heads = arch.transformer["num_query_groups"]
    has_norm = any(row.replicated_in_engine and row.shapes == (("kv",),) for row in family.rows(arch))
    if has_norm and parallel_sizes.tp // parallel_sizes.dp > heads:
        raise ValueError(
            f"rollout.engine_tp={parallel_sizes.tp}: SGLang normalizes the keys of all ranks together. With more ranks "
            f"than the {heads} key/value heads of {family.architecture}, it would count a head twice; use at most {heads}."
        )


def check_served_folders(config: Config) -> None:
    """Raise ValueError if a model that SGLang should serve has no Hugging Face folder, or needs GPUs but would be on CPUs."""
    for name, role in roles_of(config).items():
        if not role.is_served:
            continue
        key = f"roles.{name}.path={role.path}"
        if not Path(str(role.path), "config.json").is_file():
            raise ValueError(
                f"{key}: there is no config.json in this folder; expected a Hugging Face folder of the model that SGLang serves."
            )
        for architecture in HFConfig.load(str(role.path)).fields.get("architectures") or ():
            if family := FAMILIES.get(architecture):  # SGLang also serves models of other families
                check_engine_device(config, family, key)


def gpu_transport(config: Config, devices: DeviceMap) -> tuple[Transport, list[ProcessLocation], list[ProcessLocation]]:
    """Return the transport of the weights between GPUs, and the locations of all trainer ranks and of all engine ranks.

    The trainer ranks are those of the actor. If the weight sync sends only adapters, the transport is disk. Raises ValueError
    if the weights cannot travel between these GPUs, or if an engine would have different numbers of GPUs on its nodes. When the
    run starts, it applies the same rules to the actual GPUs (mrl/weight_sync/session.py, mrl/rollout/engines/ray_engine.py).
    """
    senders, receivers = (
        [ProcessLocation(*place) for place in locate_ranks(devices, role)] for role in ("actor", "engines")
    )
    if receivers:
        _check_nodes_of_engines(receivers, devices.pools.by_role["engines"].demands["engines"].tp_size)
    requested, only_adapters = config.weight_sync.transport, config.weight_sync.lora == LoraSync.adapter
    if requested == Transport.disk or only_adapters or not receivers:
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

    On unknown hardware, weight_sync.transport=shared_memory shows that the run uses CPUs: this transport works only on CPUs.
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
