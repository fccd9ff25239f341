"""Counterparts of the keys of verl, slime and trl: which mrl keys mean the same, and why some keys have none.

`mrl import` and the hints for unknown keys read these tables. A rule is the name of the mrl key that takes the same value, or a
function that returns overrides. If no override is needed or possible, the rule is a `Note`. A key that ends with `*` stands
for all keys that begin with the text before the `*`.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mrl.config.translation_rules import (
    AGENT,
    AGGREGATIONS,
    ALGORITHMS,
    EPOCHS,
    FULL_RECOMPUTE,
    KL,
    LOSSES,
    OTHER_BACKEND,
    PACKED,
    SIZES,
    SLIME_KL,
    TOP_K,
    TOP_P,
    VERL_KL,
    Note,
    Overrides,
    Rule,
    Values,
    choice,
    files,
    gae_argument,
    is_on,
    kl_penalty,
    layout_rules,
    mini_batches,
    num_engines,
    same_as_default,
    slime_reward,
    step_interval,
    switch,
    trackers,
    trl_adaptive_entropy,
    trl_prompts,
    verl_optim_rules,
    warmup_steps,
)

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
VERL: dict[str, Rule] = {
    "data.train_files": partial(files, "data.train"),
    "data.val_files": partial(files, "data.test"),
    "data.prompt_key": "data.columns.prompt",
    "data.reward_fn_key": "data.columns.data_source",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.filter_overlong_prompts": partial(switch, {"data.overlong": "skip"}, {"data.overlong": "error"}),
    "data.truncation": partial(
        same_as_default, ("error",), "mrl never cuts prompts; data.overlong=skip leaves long prompts out"
    ),
    "data.shuffle": "data.shuffle",
    "data.seed": "run.seed",
    "data.custom_cls.*": Note("name a class with rows in data.dataset._target_ (docs/tutorials/data.md)"),
    "data.apply_chat_template_kwargs.*": "data.template_args.*",
    "data.image_key": Note("mrl has no image models"),
    "data.trust_remote_code": partial(same_as_default, (False,), "mrl runs no code of a model's folder"),
    **dict.fromkeys(
        (
            "data.return_raw_chat",
            "data.return_raw_input_ids",
            "data.return_full_prompt",
            "data.dataloader_num_workers",
            "data.filter_overlong_prompts_workers",
        ),
        Note("mrl reads and tokenizes all rows before the run starts", needed=False),
    ),
    "data.val_batch_size": Note("mrl evaluates all rows at once", needed=False),
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": partial(switch, FULL_RECOMPUTE, None),
    "actor_rollout_ref.model.use_remove_padding": PACKED,
    "actor_rollout_ref.model.lora_rank": partial(same_as_default, (0,), "mrl has no LoRA"),
    f"{_ROLLOUT}name": partial(same_as_default, ("sglang",), "mrl samples with SGLang"),
    f"{_ROLLOUT}mode": Note("mrl's engines are always asynchronous servers", needed=False),
    f"{_ROLLOUT}n": "rollout.responses_per_prompt",
    f"{_ROLLOUT}temperature": "rollout.temperature",
    f"{_ROLLOUT}top_p": TOP_P,
    f"{_ROLLOUT}top_k": TOP_K,
    f"{_ROLLOUT}tensor_model_parallel_size": "rollout.engine_tp",
    f"{_ROLLOUT}gpu_memory_utilization": "sglang.mem_fraction_static",
    f"{_ROLLOUT}max_num_seqs": "sglang.max_running_requests",
    f"{_ROLLOUT}max_num_batched_tokens": "sglang.chunked_prefill_size",
    f"{_ROLLOUT}max_model_len": "sglang.context_length",
    f"{_ROLLOUT}enforce_eager": partial(switch, {"sglang.disable_cuda_graph": True}, None),
    f"{_ROLLOUT}free_cache_engine": Note("colocated engines always release their memory", needed=False),
    f"{_ROLLOUT}engine_kwargs.sglang.*": "sglang.*",
    f"{_ROLLOUT}multi_turn.enable": lambda value, values: AGENT if is_on(value) else Note("off", needed=False),
    f"{_ROLLOUT}multi_turn.*": AGENT,
    f"{_ROLLOUT}val_kwargs.*": Note("mrl evaluates with rollout.temperature; `mrl evaluate` has keys of its own"),
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu": SIZES,
    f"{_ROLLOUT}log_prob_max_token_len_per_gpu": Note("trainer.max_tokens_per_micro_batch applies", needed=False),
    f"{_ROLLOUT}log_prob_use_dynamic_bsz": PACKED,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": SIZES,
    "actor_rollout_ref.ref.*": Note("the reference has the layout of the actor", needed=False),
    "actor_rollout_ref.hybrid_engine": partial(switch, {"placement": "colocated"}, {"placement": "disaggregated"}),
    f"{_ACTOR}strategy": partial(same_as_default, ("megatron",), OTHER_BACKEND),
    **verl_optim_rules(f"{_ACTOR}optim", "optim"),
    f"{_ACTOR}ppo_mini_batch_size": partial(mini_batches, "data.train_batch_size"),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": SIZES,
    f"{_ACTOR}ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    f"{_ACTOR}use_dynamic_bsz": PACKED,
    f"{_ACTOR}ppo_epochs": "algorithm.epochs",
    f"{_ACTOR}grad_clip": "optim.clip_grad",
    f"{_ACTOR}clip_ratio": lambda value, values: {"algorithm.loss.clip_low": value, "algorithm.loss.clip_high": value},
    f"{_ACTOR}clip_ratio_low": "algorithm.loss.clip_low",
    f"{_ACTOR}clip_ratio_high": "algorithm.loss.clip_high",
    f"{_ACTOR}clip_ratio_c": "algorithm.loss.dual_clip",
    f"{_ACTOR}entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}use_kl_loss": partial(kl_penalty, "loss", f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type", VERL_KL),
    f"{_ACTOR}kl_loss_coef": Note("part of algorithm.kl_in_loss", needed=False),
    f"{_ACTOR}kl_loss_type": Note("part of algorithm.kl_in_loss", needed=False),
    f"{_ACTOR}loss_agg_mode": partial(choice, "aggregation", AGGREGATIONS),
    f"{_ACTOR}policy_loss.loss_mode": partial(choice, "loss", LOSSES),
    **layout_rules(f"{_ACTOR}megatron."),
    f"{_ACTOR}megatron.override_transformer_config.*": "megatron.*",
    f"{_ACTOR}megatron.*": Note("placement=colocated offloads the models that are not in use", needed=False),
    f"{_ACTOR}fsdp_config.*": Note(OTHER_BACKEND),
    f"{_ACTOR}ulysses_sequence_parallel_size": "parallel.cp",
    "critic.model.path": "critic.path",
    **verl_optim_rules("critic.optim", "critic.optim"),
    "critic.cliprange_value": "critic.loss.clip",
    "critic.ppo_epochs": "critic.epochs",
    "critic.ppo_micro_batch_size_per_gpu": SIZES,
    **layout_rules("critic.megatron.", "critic.parallel"),
    "algorithm.adv_estimator": partial(choice, "estimator", ALGORITHMS),
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.advantage.normalize_std",
    "algorithm.gamma": lambda value, values: gae_argument("gamma", value, values),
    "algorithm.lam": lambda value, values: gae_argument("lam", value, values),
    "algorithm.use_kl_in_reward": partial(
        kl_penalty, "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", VERL_KL | {"abs": "k1"}
    ),
    "algorithm.kl_penalty": Note("part of algorithm.kl_in_reward", needed=False),
    "algorithm.kl_ctrl.*": Note("part of algorithm.kl_in_reward", needed=False),
    "algorithm.filter_groups.enable": partial(
        switch, {"rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance"}, None
    ),
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_sampling_rounds",
    "algorithm.filter_groups.metric": Note("mrl's filter compares the rewards of a group"),
    "custom_reward_function.path": lambda value, values: {"reward": "function", "reward.path": value},
    "custom_reward_function.name": "reward.name",
    "reward_model.enable": lambda value, values: (
        Note("reward=reward_model with the URL of its server (docs/tutorials/reward.md)")
        if is_on(value)
        else Note("off", needed=False)
    ),
    "reward_model.reward_manager": partial(
        same_as_default, ("naive",), "reward=weighted adds terms such as DAPO's overlong"
    ),
    "trainer.total_epochs": EPOCHS,
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.save_freq": partial(step_interval, "checkpoint.every"),
    "trainer.test_freq": partial(step_interval, "trainer.eval_every"),
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.nnodes": "cluster.nodes",
    "trainer.n_gpus_per_node": "cluster.gpus_per_node",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "tracking.project",
    "trainer.experiment_name": "run.name",
    "trainer.logger": trackers,
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.val_before_train": Note("mrl evaluates before and after training", needed=False),
    "trainer.resume_mode": partial(
        choice,
        "resume mode",
        {
            "auto": {"resume": "auto"},
            "disable": {"resume": "never"},
            "resume_path": Note("see resume_from_path", needed=False),
        },
    ),
    "trainer.resume_from_path": "resume",
    "trainer.balance_batch": Note("mrl always balances the tokens of the replicas", needed=False),
    "trainer.device": Note("mrl finds the devices", needed=False),
    "trainer.log_val_generations": Note("`mrl evaluate` writes the responses to held-out prompts"),
}


SLIME: dict[str, Rule] = {
    "hf-checkpoint": "model.path",
    "ref-load": Note("the reference is the initial model", needed=False),
    "load": Note("run.dir resumes by itself; resume=RUN_DIR starts from another run"),
    "save": "run.dir",
    "save-interval": "checkpoint.every",
    "prompt-data": partial(files, "data.train"),
    "input-key": "data.columns.prompt",
    "label-key": "data.columns.ground_truth",
    "metadata-key": "data.columns.extra_info",
    "apply-chat-template": Note("mrl always applies the chat template", needed=False),
    "rollout-shuffle": lambda value, values: {"data.shuffle": is_on(value)},
    "rollout-seed": "run.seed",
    "seed": "run.seed",
    "rollout-batch-size": "rollout.prompts_per_step",
    "n-samples-per-prompt": "rollout.responses_per_prompt",
    "global-batch-size": partial(mini_batches, "rollout-batch-size*n-samples-per-prompt"),
    "num-steps-per-rollout": "algorithm.mini_batches",
    "num-rollout": "trainer.max_steps",
    "num-epoch": EPOCHS,
    "rollout-max-response-len": "rollout.max_response_tokens",
    "rollout-max-prompt-len": "data.max_prompt_tokens",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": TOP_P,
    "rollout-top-k": TOP_K,
    "rollout-stop": Note("mrl stops at the end-of-sequence tokens of the model"),
    "over-sampling-batch-size": Note("set rollout.over_sample_rate: additional groups / rollout.prompts_per_step"),
    "dynamic-sampling-filter-path": lambda value, values: {
        "rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance"
    },
    "partial-rollout": Note("rollout.mode=async keeps unfinished responses"),
    "rm-type": slime_reward,
    "custom-rm-path": Note("reward=function reward.path=FILE reward.name=FUNCTION"),
    "reward-key": Note("mrl reads the key score of a reward"),
    "eval-prompt-data": lambda value, values: {"data.test": value[1::2] if isinstance(value, list) else [value]},
    "eval-interval": "trainer.eval_every",
    "n-samples-per-eval-prompt": Note("`mrl evaluate` samples several responses to a prompt"),
    "eval-max-response-len": Note("rollout.max_response_tokens applies"),
    "eval-top-p": TOP_P,
    "advantage-estimator": partial(choice, "estimator", ALGORITHMS),
    "use-kl-loss": partial(kl_penalty, "loss", "kl-loss-coef", "kl-loss-type", SLIME_KL),
    "kl-loss-coef": Note("part of algorithm.kl_in_loss", needed=False),
    "kl-loss-type": Note("part of algorithm.kl_in_loss", needed=False),
    "kl-coef": lambda value, values: (
        {"algorithm.kl_in_reward": {"_target_": KL, "coef": value, "kind": "k1"}}
        if float(value)
        else Note("0 is the default", needed=False)
    ),
    "entropy-coef": "algorithm.entropy_coef",
    "eps-clip": lambda value, values: (
        {"algorithm.loss.clip_low": value} | ({} if "eps-clip-high" in values else {"algorithm.loss.clip_high": value})
    ),
    "eps-clip-high": "algorithm.loss.clip_high",
    "eps-clip-c": "algorithm.loss.dual_clip",
    "use-tis": partial(
        switch, {"algorithm.correction._target_": "mrl.algorithms.corrections.ImportanceSampling"}, None
    ),
    "disable-grpo-std-normalization": partial(switch, {"algorithm.advantage.normalize_std": False}, None),
    "lr": "optim.lr",
    "lr-decay-style": partial(
        choice,
        "schedule",
        {n: {"optim.lr_schedule": n} for n in ("constant", "cosine", "linear")} | {"wsd": {"optim.lr_schedule": "wsd"}},
    ),
    "lr-warmup-iters": "optim.warmup_steps",
    "weight-decay": "optim.weight_decay",
    "clip-grad": "optim.clip_grad",
    "adam-beta1": lambda value, values: {"optim.betas": [value, values.get("adam-beta2", 0.95)]},
    "adam-beta2": Note("part of optim.betas", needed=False),
    "optimizer": partial(same_as_default, ("adam",), "mrl trains with AdamW"),
    **layout_rules("", sep="-"),
    "sequence-parallel": lambda value, values: {"parallel.sp": is_on(value)},
    "recompute-granularity": "megatron.recompute_granularity",
    "recompute-method": "megatron.recompute_method",
    "recompute-num-layers": "megatron.recompute_num_layers",
    "attention-dropout": "megatron.attention_dropout",
    "hidden-dropout": "megatron.hidden_dropout",
    "use-dynamic-batch-size": PACKED,
    "micro-batch-size": SIZES,
    "max-tokens-per-gpu": "trainer.max_tokens_per_micro_batch",
    "colocate": partial(switch, {"placement": "colocated"}, None),
    "actor-num-nodes": Note("parallel.world_size = nodes x GPUs of a node"),
    "actor-num-gpus-per-node": lambda value, values: {
        "parallel.world_size": int(value) * int(str(values.get("actor-num-nodes", 1)))
    },
    "rollout-num-gpus": num_engines,
    "rollout-num-gpus-per-engine": "rollout.engine_tp",
    "sglang-*": "sglang.*",
    "update-weight-buffer-size": "weight_sync.bucket_bytes",
    "save-debug-rollout-data": lambda value, values: {"rollout.record": True},
    "load-debug-rollout-data": "rollout.replay",
    "use-wandb": lambda value, values: {"tracking.backends": ["wandb"] if is_on(value) else []},
    "wandb-project": "tracking.project",
    "wandb-group": "tracking.group",
    "wandb-key": Note("set the environment variable WANDB_API_KEY"),
    "use-fault-tolerance": Note("mrl always replaces failed engines", needed=False),
    "overlap-grad-reduce": lambda value, values: {"trainer.overlap_grad_reduce": is_on(value)},
    "accumulate-allreduce-grads-in-fp32": Note("gradients are float32", needed=False),
    "attention-softmax-in-fp32": "megatron.attention_softmax_in_fp32",
    "attention-backend": Note("mrl selects the attention from the packages that it finds", needed=False),
}
TRL: dict[str, Rule] = {
    "model_name_or_path": "model.path",
    "dtype": partial(choice, "precision", {n: {"model.dtype": n} for n in ("bfloat16", "float32")}),
    "bf16": partial(switch, {"model.dtype": "bfloat16"}, None),
    "dataset_name": partial(files, "data.train"),
    "output_dir": "run.dir",
    "run_name": "run.name",
    "seed": "run.seed",
    "learning_rate": "optim.lr",
    "lr_scheduler_type": partial(
        choice, "schedule", {n: {"optim.lr_schedule": n} for n in ("constant", "cosine", "linear")}
    ),
    "warmup_steps": "optim.warmup_steps",
    "warmup_ratio": partial(warmup_steps, "optim", "max_steps"),
    "weight_decay": "optim.weight_decay",
    "adam_beta1": lambda value, values: {"optim.betas": [value, values.get("adam_beta2", 0.999)]},
    "adam_beta2": Note("part of optim.betas", needed=False),
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.clip_grad",
    "max_steps": "trainer.max_steps",
    "num_train_epochs": EPOCHS,
    "num_generations": "rollout.responses_per_prompt",
    "generation_batch_size": lambda value, values: trl_prompts(int(value), values),
    "per_device_train_batch_size": lambda value, values: (
        Note("generation_batch_size decides", needed=False)
        if "generation_batch_size" in values
        else trl_prompts(
            int(value)
            * int(str(values.get("gradient_accumulation_steps", 1)))
            * int(str(values.get("num_processes", 1))),
            values,
        )
    ),
    "gradient_accumulation_steps": Note("trainer.max_tokens_per_micro_batch decides the micro-batches", needed=False),
    "num_processes": "parallel.world_size",
    "num_iterations": "algorithm.epochs",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "top_p": TOP_P,
    "top_k": TOP_K,
    "beta": lambda value, values: (
        {"algorithm.kl_in_loss": {"_target_": KL, "coef": value, "kind": "k3"}}
        if float(value)
        else Note("0 is the default", needed=False)
    ),
    "epsilon": lambda value, values: (
        {"algorithm.loss.clip_low": value} | ({} if values.get("epsilon_high") else {"algorithm.loss.clip_high": value})
    ),
    "epsilon_high": "algorithm.loss.clip_high",
    "delta": Note("set algorithm.loss.dual_clip, the upper bound of the ratio for tokens with negative advantage"),
    "loss_type": partial(choice, "loss", LOSSES),
    "scale_rewards": lambda value, values: (
        Note("mrl does not divide advantages by the standard deviation of a batch")
        if str(value) == "batch"
        else {"algorithm.advantage.normalize_std": str(value).lower() in ("true", "group")}
    ),
    "importance_sampling_level": partial(
        choice, "level", {"token": Note("the default", needed=False), "sequence": {"algorithm": "gspo"}}
    ),
    "mask_truncated_completions": "algorithm.mask_truncated",
    "entropy_coef": "algorithm.entropy_coef",
    "use_adaptive_entropy": trl_adaptive_entropy,
    "entropy_target": Note("part of algorithm.adaptive_entropy", needed=False),
    "entropy_coef_delta": Note("part of algorithm.adaptive_entropy", needed=False),
    "entropy_coef_max": Note("part of algorithm.adaptive_entropy", needed=False),
    "entropy_coef_min": partial(same_as_default, (0, 0.0), "the lower bound of mrl's coefficient is 0"),
    "vllm_importance_sampling_correction": partial(
        switch, {"algorithm.correction._target_": "mrl.algorithms.corrections.ImportanceSampling"}, None
    ),
    "use_vllm": Note("mrl samples with SGLang", needed=False),
    "vllm_mode": partial(
        choice, "mode", {"colocate": {"placement": "colocated"}, "server": {"placement": "disaggregated"}}
    ),
    "vllm_tensor_parallel_size": "rollout.engine_tp",
    "vllm_gpu_memory_utilization": "sglang.mem_fraction_static",
    "gradient_checkpointing": partial(switch, FULL_RECOMPUTE, None),
    "reward_funcs": Note("reward=function reward.path=FILE reward.name=FUNCTION (docs/tutorials/reward.md)"),
    "reward_weights": Note("reward=weighted has parts with weights"),
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "trainer.eval_every",
    "logging_steps": Note("mrl logs every step", needed=False),
    "report_to": trackers,
    "resume_from_checkpoint": Note("run.dir resumes by itself; resume=RUN_DIR starts from another run"),
    "use_peft": partial(same_as_default, (False,), "mrl has no LoRA"),
    "remove_unused_columns": Note("rewards get all columns that data.columns names", needed=False),
}


SOURCES: dict[str, dict[str, Rule]] = {"verl": VERL, "slime": SLIME, "trl": TRL}
_TARGETS = {  # key of another trainer whose rule is a function -> the mrl key that the hint names
    "data.train_files": "data.train",
    "data.val_files": "data.test",
    f"{_ACTOR}ppo_mini_batch_size": "algorithm.mini_batches",
    f"{_ACTOR}clip_ratio": "algorithm.loss.clip_low",
    f"{_ACTOR}use_kl_loss": "algorithm.kl_in_loss",
    f"{_ACTOR}kl_loss_coef": "algorithm.kl_in_loss.coef",
    f"{_ACTOR}loss_agg_mode": "algorithm.aggregation",
    "algorithm.adv_estimator": "algorithm",
    "algorithm.use_kl_in_reward": "algorithm.kl_in_reward",
    "algorithm.filter_groups.enable": "rollout.filter",
    "custom_reward_function.path": "reward.path",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "trainer.eval_every",
    "trainer.logger": "tracking.backends",
    "prompt-data": "data.train",
    "rm-type": "reward",
    "advantage-estimator": "algorithm",
    "kl-coef": "algorithm.kl_in_reward.coef",
    "global-batch-size": "algorithm.mini_batches",
    "colocate": "placement",
    "rollout-num-gpus": "rollout.num_engines",
    "beta": "algorithm.kl_in_loss.coef",
    "use_adaptive_entropy": "algorithm.adaptive_entropy",
    "epsilon": "algorithm.loss.clip_low",
    "per_device_train_batch_size": "rollout.prompts_per_step",
}


@dataclass
class Translation:
    """What an imported config becomes: overrides, notes, and keys that no table contains."""

    overrides: Overrides = field(default_factory=dict)  # mrl key -> value
    translated: list[tuple[str, Overrides]] = field(default_factory=list)  # (foreign KEY=VALUE, its overrides)
    not_needed: list[tuple[str, str]] = field(default_factory=list)  # (foreign KEY=VALUE, reason)
    no_counterpart: list[tuple[str, str]] = field(default_factory=list)  # (foreign KEY=VALUE, reason)
    unknown: list[str] = field(default_factory=list)  # foreign KEY=VALUE


def translate(source: str, values: Values) -> Translation:
    """Translate the keys of a config of `source` ("verl", "slime" or "trl"), in the order in which the config has them."""
    rules, found = SOURCES[source], Translation()
    for key, value in values.items():
        shown = f"{key}={value}"
        result = _apply(rules, key, value, values)
        if result is None:
            found.unknown.append(shown)
        elif isinstance(result, Note):
            (found.no_counterpart if result.needed else found.not_needed).append((shown, result.text))
        else:
            found.overrides |= result
            found.translated.append((shown, result))
    return found


def _name_in(rules: Mapping[str, Rule], key: str) -> str | None:
    """Return the name that covers `key` in a table: the key itself, or else the longest name with `*`."""
    if key in rules:
        return key
    return max((name for name in rules if name.endswith("*") and key.startswith(name[:-1])), key=len, default=None)


def _apply(rules: Mapping[str, Rule], key: str, value: Any, values: Values) -> Overrides | Note | None:
    name = _name_in(rules, key)
    if name is None:
        return None
    rule = rules[name]
    if isinstance(rule, Note):
        return rule
    if value is None or value == "":
        return Note("empty: the default applies", needed=False)
    if not isinstance(rule, str):
        try:
            return rule(value, values)
        except (TypeError, ValueError):  # for example, the value is a variable that the script does not assign
            return Note("the value cannot be read")
    if rule.endswith("*"):
        return {rule[:-1] + key.removeprefix(name[:-1]).replace("-", "_"): value}
    return {rule: value}


def counterpart_of(key: str) -> tuple[str, str] | None:
    """Return (mrl key, other trainer) for a key that has the name of a verl, slime or trl key; None if there is none.

    The key may lack its first parts, as in `rollout.n`, and may begin with dashes, as in `--rm-type`.
    """
    name = key.lstrip("-+").replace("-", "_")
    for source, rules in SOURCES.items():
        for foreign, rule in rules.items():
            known = foreign.replace("-", "_")
            if known == name or known.endswith(f".{name}"):
                target = rule if isinstance(rule, str) else _TARGETS.get(foreign)
                if target:
                    return target, source
    return None


def nearest_key(key: str, source: str) -> str | None:
    """Return the key of `source` whose name is nearest to `key`, or None if none is near."""
    found = difflib.get_close_matches(key, SOURCES[source], n=1, cutoff=0.8)
    return found[0] if found else None
