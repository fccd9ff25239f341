"""Counterparts of the keys of verl, slime and trl: which mrl keys mean the same, and why some keys have no counterpart.

`mrl import` and the hints for unknown keys read these tables. The rule of a key is one of these: the name of the mrl key that
takes the same value; a function that returns overrides or a `Note`; a `Note`, if the key never gives an override. A `Note` is a
text for the user. A key that ends with `*` matches all keys that begin with the text before the `*`.
"""

from functools import partial

from mrl.config.correction_translation import trl_correction, verl_correction
from mrl.config.translation_rules import (
    AGENT,
    ALGORITHMS,
    FULL_RECOMPUTE,
    IN_TEST_SETS,
    KL,
    OTHER_BACKEND,
    PACKED,
    SCALE,
    SIZES,
    SLIME_EVALUATION,
    SLIME_KL,
    TRL_LOSSES,
    TRL_SCALES,
    VERL_ACTOR,
    VERL_CORRECTION_PREFIX,
    VERL_ESTIMATOR,
    VERL_FILTRATION,
    VERL_KL,
    VERL_LOSS_ARGUMENTS,
    VERL_LOSS_MODE,
    VERL_SCALE,
    Note,
    Rule,
    adam_betas,
    choice,
    files,
    gae_argument,
    is_on,
    kl_penalty,
    layout_rules,
    lora_rank,
    lora_targets,
    mini_batches,
    num_engines,
    pf_ppo,
    same_as_default,
    slime_filter,
    slime_held_out,
    slime_nodes,
    slime_reward,
    slime_rollout_seed,
    step_interval,
    stop_texts,
    switch,
    top_k,
    trackers,
    trl_adaptive_entropy,
    trl_kl_kind,
    trl_level,
    trl_lora,
    trl_loss_argument,
    trl_prompts,
    trl_top_entropy,
    verl_aggregation,
    verl_clip,
    verl_estimator,
    verl_filter_metric,
    verl_gdpo_weights,
    verl_held_out,
    verl_loss_argument,
    verl_loss_mode,
    verl_loss_scale,
    verl_optim_rules,
    verl_scale,
    warmup_steps,
)

_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout.", VERL_ACTOR
_ADVANTAGE_SIGNS = ("positive", "negative")  # words for the sign of the advantage, in argument names of SAPO and VESPO

# AGENT, IN_TEST_SETS, PACKED and SIZES are Notes, and OTHER_BACKEND is the text of a Note. FULL_RECOMPUTE and VERL_FILTRATION are
# overrides. KL is the value of _target_ for a KL penalty, and SCALE is the name of an mrl key. VERL_ESTIMATOR, VERL_SCALE and
# VERL_LOSS_MODE are keys of verl. `switch` takes the overrides for a key that is true, and for one that is false. In place of the
# latter, None says that false is mrl's default.
VERL: dict[str, Rule] = {
    "data.train_files": partial(files, "data.train"),
    "data.val_files": verl_held_out,
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
    "data.sampler.*": Note("name a function in data.sampler._target_ (docs/tutorials/data.md)"),
    "data.custom_cls.*": Note("name a class with rows in data.dataset._target_ (docs/tutorials/data.md)"),
    "data.apply_chat_template_kwargs.*": "data.template_args.*",
    "data.image_key": "data.columns.images",
    "data.video_key": "data.columns.videos",
    "data.trust_remote_code": partial(same_as_default, (False,), "mrl runs no code of a model's folder"),
    **dict.fromkeys(
        (
            "data.return_raw_chat",
            "data.return_raw_input_ids",
            "data.return_full_prompt",
            "data.dataloader_num_workers",
            "data.filter_overlong_prompts_workers",
        ),
        Note("mrl reads and tokenizes all rows before the run starts", user_must_act=False),
    ),
    "data.val_batch_size": Note("mrl evaluates all rows at once", user_must_act=False),
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": partial(switch, FULL_RECOMPUTE, None),
    "actor_rollout_ref.model.use_remove_padding": PACKED,
    "actor_rollout_ref.model.lora_rank": partial(lora_rank, "actor_rollout_ref.model.lora_alpha", 16),
    "actor_rollout_ref.model.lora_alpha": "lora.alpha",
    "actor_rollout_ref.model.lora_adapter_path": "lora.path",
    "actor_rollout_ref.model.target_modules": lora_targets,
    "actor_rollout_ref.model.lora.rank": partial(lora_rank, "actor_rollout_ref.model.lora.alpha", 32),
    "actor_rollout_ref.model.lora.alpha": "lora.alpha",
    "actor_rollout_ref.model.lora.adapter_path": "lora.path",
    f"{_ROLLOUT}name": partial(same_as_default, ("sglang",), "mrl samples with SGLang"),
    f"{_ROLLOUT}mode": Note("mrl's engines are always asynchronous servers", user_must_act=False),
    f"{_ROLLOUT}n": "rollout.responses_per_prompt",
    f"{_ROLLOUT}temperature": "rollout.temperature",
    f"{_ROLLOUT}top_p": "rollout.top_p",
    f"{_ROLLOUT}top_k": top_k,
    f"{_ROLLOUT}tensor_model_parallel_size": "rollout.engine_tp",
    f"{_ROLLOUT}gpu_memory_utilization": "sglang.mem_fraction_static",
    f"{_ROLLOUT}max_num_seqs": "sglang.max_running_requests",
    f"{_ROLLOUT}max_num_batched_tokens": "sglang.chunked_prefill_size",
    f"{_ROLLOUT}max_model_len": "sglang.context_length",
    f"{_ROLLOUT}enforce_eager": partial(switch, {"sglang.disable_cuda_graph": True}, None),
    f"{_ROLLOUT}free_cache_engine": Note("colocated engines always release their memory", user_must_act=False),
    f"{_ROLLOUT}engine_kwargs.sglang.*": "sglang.*",
    f"{_ROLLOUT}multi_turn.enable": lambda value, values: AGENT if is_on(value) else Note("off", user_must_act=False),
    f"{_ROLLOUT}multi_turn.*": AGENT,
    f"{_ROLLOUT}val_kwargs.*": IN_TEST_SETS,
    f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu": SIZES,
    f"{_ROLLOUT}log_prob_max_token_len_per_gpu": "trainer.max_tokens_per_forward_micro_batch",
    f"{_ROLLOUT}log_prob_use_dynamic_bsz": PACKED,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": SIZES,
    "actor_rollout_ref.ref.*": Note("the reference has the layout of the actor", user_must_act=False),
    "actor_rollout_ref.hybrid_engine": partial(switch, {"placement": "colocated"}, {"placement": "disaggregated"}),
    f"{_ACTOR}strategy": partial(same_as_default, ("megatron",), OTHER_BACKEND),
    **verl_optim_rules(f"{_ACTOR}optim", "optim"),
    f"{_ACTOR}ppo_mini_batch_size": partial(mini_batches, "data.train_batch_size"),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": SIZES,
    f"{_ACTOR}ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    f"{_ACTOR}use_dynamic_bsz": PACKED,
    f"{_ACTOR}ppo_epochs": "algorithm.epochs",
    f"{_ACTOR}grad_clip": "optim.clip_grad",
    f"{_ACTOR}clip_ratio": verl_clip,
    **{f"{_ACTOR}{key}": partial(verl_loss_argument, key) for key in VERL_LOSS_ARGUMENTS},
    f"{_ACTOR}entropy_coeff": "algorithm.entropy_coef",
    f"{_ACTOR}use_kl_loss": partial(kl_penalty, "loss", f"{_ACTOR}kl_loss_coef", f"{_ACTOR}kl_loss_type", VERL_KL),
    f"{_ACTOR}kl_loss_coef": Note("part of algorithm.kl_in_loss", user_must_act=False),
    f"{_ACTOR}kl_loss_type": Note("part of algorithm.kl_in_loss", user_must_act=False),
    f"{_ACTOR}loss_agg_mode": verl_aggregation,
    f"{_ACTOR}loss_scale_factor": verl_loss_scale,
    VERL_LOSS_MODE: verl_loss_mode,
    f"{_ACTOR}calculate_sum_pi_squared": Note("computed if an advantage estimator needs it", user_must_act=False),
    **layout_rules(f"{_ACTOR}megatron."),
    f"{_ACTOR}megatron.override_transformer_config.*": "megatron.*",
    f"{_ACTOR}megatron.override_ddp_config.overlap_grad_reduce": "trainer.overlap_grad_reduce",
    f"{_ACTOR}megatron.override_ddp_config.*": "trainer.ddp.*",
    f"{_ACTOR}optim.override_optimizer_config.*": "optim.megatron.*",
    f"{_ACTOR}megatron.*": Note("placement=colocated offloads the models that are not in use", user_must_act=False),
    f"{_ACTOR}fsdp_config.*": Note(OTHER_BACKEND),
    f"{_ACTOR}ulysses_sequence_parallel_size": "parallel.cp",
    "critic.model.path": "critic.path",
    **verl_optim_rules("critic.optim", "critic.optim"),
    "critic.cliprange_value": "critic.loss.clip",
    "critic.ppo_epochs": "critic.epochs",
    "critic.ppo_micro_batch_size_per_gpu": SIZES,
    "critic.ppo_max_token_len_per_gpu": "critic.max_tokens_per_micro_batch",
    "critic.forward_max_token_len_per_gpu": "critic.max_tokens_per_forward_micro_batch",
    "critic.megatron.override_ddp_config.*": "critic.ddp.*",
    "critic.optim.override_optimizer_config.*": "critic.optim.megatron.*",
    **layout_rules("critic.megatron.", "critic.parallel"),
    VERL_ESTIMATOR: verl_estimator,
    VERL_SCALE: verl_scale,
    "algorithm.gdpo_reward_keys": verl_gdpo_weights,
    "algorithm.gdpo_reward_weights": Note("part of algorithm.advantage.weights", user_must_act=False),
    "algorithm.gamma": lambda value, values: gae_argument("gamma", value, values),
    "algorithm.lam": lambda value, values: gae_argument("lam", value, values),
    "algorithm.use_kl_in_reward": partial(
        kl_penalty, "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", VERL_KL
    ),
    "algorithm.kl_penalty": Note("part of algorithm.kl_in_reward", user_must_act=False),
    "algorithm.kl_ctrl.*": Note("part of algorithm.kl_in_reward", user_must_act=False),
    "algorithm.use_pf_ppo": partial(switch, VERL_FILTRATION, None),
    "algorithm.pf_ppo.reweight_method": partial(pf_ppo, "method"),
    "algorithm.pf_ppo.weight_pow": partial(pf_ppo, "power"),
    "algorithm.filter_groups.enable": partial(
        switch, {"rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance"}, None
    ),
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_sampling_rounds",
    "algorithm.filter_groups.metric": verl_filter_metric,
    f"{VERL_CORRECTION_PREFIX}rollout_is": verl_correction,
    f"{VERL_CORRECTION_PREFIX}rollout_rs": verl_correction,
    f"{VERL_CORRECTION_PREFIX}bypass_mode": verl_correction,
    f"{VERL_CORRECTION_PREFIX}*": Note("part of algorithm.correction", user_must_act=False),
    "custom_reward_function.path": lambda value, values: {"reward": "function", "reward.path": value},
    "custom_reward_function.name": "reward.name",
    "reward_model.enable": lambda value, values: (
        Note("reward=reward_model with the URL of its server (docs/tutorials/reward.md)")
        if is_on(value)
        else Note("off", user_must_act=False)
    ),
    "reward_model.reward_manager": partial(
        same_as_default, ("naive",), "reward=weighted adds terms such as DAPO's overlong"
    ),
    "trainer.total_epochs": "trainer.epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.save_freq": partial(step_interval, "checkpoint.every"),
    "trainer.test_freq": partial(step_interval, "trainer.eval_every"),
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.max_critic_ckpt_to_keep": "checkpoint.keep_last_critic",
    "ray_kwargs.ray_init.num_cpus": Note("mrl gives Ray one CPU for each process of the run", user_must_act=False),
    "ray_kwargs.ray_init.*": "cluster.ray.*",
    "trainer.nnodes": "cluster.nodes",
    "trainer.n_gpus_per_node": "cluster.gpus_per_node",
    "trainer.default_local_dir": "run.dir",
    "trainer.project_name": "tracking.project",
    "trainer.experiment_name": "run.name",
    "trainer.logger": trackers,
    "trainer.critic_warmup": "critic.warmup_steps",
    "trainer.val_before_train": Note("mrl evaluates before and after training", user_must_act=False),
    "trainer.resume_mode": partial(
        choice,
        "resume mode",
        {
            "auto": {"resume": "auto"},
            "disable": {"resume": "never"},
            "resume_path": Note("see resume_from_path", user_must_act=False),
        },
    ),
    "trainer.resume_from_path": "resume",
    "trainer.balance_batch": Note("mrl always balances the tokens of the replicas", user_must_act=False),
    "trainer.device": Note("mrl finds the devices", user_must_act=False),
    "trainer.log_val_generations": partial(
        same_as_default,
        (0,),
        "rollout.record=true writes the responses of each evaluation to run.dir/rollouts/evaluation_*.jsonl",
    ),
}


SLIME: dict[str, Rule] = {
    "hf-checkpoint": "model.path",
    "ref-load": Note("the reference is the initial model", user_must_act=False),
    "load": Note("run.dir resumes by itself; resume=RUN_DIR starts from another run"),
    "save": "run.dir",
    "save-interval": "checkpoint.every",
    "prompt-data": partial(files, "data.train"),
    "input-key": "data.columns.prompt",
    "label-key": "data.columns.ground_truth",
    "metadata-key": "data.columns.extra_info",
    "apply-chat-template": Note("mrl always applies the chat template", user_must_act=False),
    "rollout-shuffle": lambda value, values: {"data.shuffle": is_on(value)},
    "rollout-seed": slime_rollout_seed,
    "seed": "run.seed",
    "rollout-batch-size": "rollout.prompts_per_step",
    "n-samples-per-prompt": "rollout.responses_per_prompt",
    "global-batch-size": partial(mini_batches, "rollout-batch-size*n-samples-per-prompt"),
    "num-steps-per-rollout": "algorithm.mini_batches",
    "num-rollout": "trainer.max_steps",
    "num-epoch": "trainer.epochs",
    "rollout-max-response-len": "rollout.max_response_tokens",
    "rollout-max-prompt-len": "data.max_prompt_tokens",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": "rollout.top_p",
    "rollout-top-k": top_k,
    "rollout-stop": stop_texts,
    "rollout-stop-token-ids": "rollout.stop_token_ids",
    "over-sampling-batch-size": Note("set rollout.over_sample_rate: additional groups / rollout.prompts_per_step"),
    "dynamic-sampling-filter-path": slime_filter,
    "partial-rollout": Note("rollout.mode=async keeps unfinished responses"),
    "rm-type": slime_reward,
    "custom-rm-path": Note("reward=function reward.path=FILE reward.name=FUNCTION"),
    "reward-key": Note("mrl reads the key score of a reward"),
    "eval-prompt-data": slime_held_out,
    "eval-interval": "trainer.eval_every",
    **dict.fromkeys(SLIME_EVALUATION, IN_TEST_SETS),
    "advantage-estimator": partial(choice, "estimator", ALGORITHMS),
    "use-kl-loss": partial(kl_penalty, "loss", "kl-loss-coef", "kl-loss-type", SLIME_KL),
    "kl-loss-coef": Note("part of algorithm.kl_in_loss", user_must_act=False),
    "kl-loss-type": Note("part of algorithm.kl_in_loss", user_must_act=False),
    "kl-coef": lambda value, values: (
        {"algorithm.kl_in_reward": {"_target_": KL, "coef": value, "kind": "k1"}}
        if float(value)
        else Note("0 is the default", user_must_act=False)
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
    "disable-grpo-std-normalization": partial(switch, {SCALE: "none"}, None),
    "lr": "optim.lr",
    "lr-decay-style": partial(
        choice,
        "schedule",
        {n: {"optim.lr_schedule": n} for n in ("constant", "cosine", "linear")} | {"wsd": {"optim.lr_schedule": "wsd"}},
    ),
    "lr-warmup-iters": "optim.warmup_steps",
    "weight-decay": "optim.weight_decay",
    "clip-grad": "optim.clip_grad",
    **dict.fromkeys(("adam-beta1", "adam-beta2"), partial(adam_betas, "adam-beta1", "adam-beta2")),
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
    "log-probs-max-tokens-per-gpu": "trainer.max_tokens_per_forward_micro_batch",
    "ddp-bucket-size": "trainer.ddp.bucket_size",
    "colocate": partial(switch, {"placement": "colocated"}, None),
    "actor-num-nodes": slime_nodes,
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
    "use-fault-tolerance": Note("mrl always replaces failed engines", user_must_act=False),
    "overlap-grad-reduce": lambda value, values: {"trainer.overlap_grad_reduce": is_on(value)},
    "accumulate-allreduce-grads-in-fp32": Note("gradients are float32", user_must_act=False),
    "attention-softmax-in-fp32": "megatron.attention_softmax_in_fp32",
    "attention-backend": Note("mrl selects the attention from the packages that it finds", user_must_act=False),
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
    **dict.fromkeys(("adam_beta1", "adam_beta2"), partial(adam_betas, "adam_beta1", "adam_beta2")),
    "adam_epsilon": "optim.eps",
    "max_grad_norm": "optim.clip_grad",
    "max_steps": "trainer.max_steps",
    "num_train_epochs": "trainer.epochs",
    "num_generations": "rollout.responses_per_prompt",
    "generation_batch_size": lambda value, values: trl_prompts(int(value), values),
    "per_device_train_batch_size": lambda value, values: (
        Note("generation_batch_size decides", user_must_act=False)
        if "generation_batch_size" in values
        else trl_prompts(
            int(value)
            * int(str(values.get("gradient_accumulation_steps", 1)))
            * int(str(values.get("num_processes", 1))),
            values,
        )
    ),
    "gradient_accumulation_steps": Note(
        "trainer.max_tokens_per_micro_batch decides the micro-batches", user_must_act=False
    ),
    "num_processes": "parallel.world_size",
    "num_iterations": "algorithm.epochs",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": top_k,
    "min_p": "rollout.min_p",
    "repetition_penalty": "rollout.repetition_penalty",
    "beta": lambda value, values: (
        {"algorithm.kl_in_loss": {"_target_": KL, "coef": value, "kind": trl_kl_kind(values)}}
        if float(value)
        else Note("0 is the default", user_must_act=False)
    ),
    "use_bias_correction_kl": Note("part of algorithm.kl_in_loss", user_must_act=False),
    "epsilon": lambda value, values: (
        trl_loss_argument("clip_low", value, values)
        | ({} if values.get("epsilon_high") else trl_loss_argument("clip_high", value, values))
    ),
    "epsilon_high": partial(trl_loss_argument, "clip_high"),
    "delta": partial(trl_loss_argument, "dual_clip"),
    "top_entropy_quantile": trl_top_entropy,
    **{f"sapo_temperature_{sign[:3]}": partial(trl_loss_argument, f"tau_{sign}") for sign in _ADVANTAGE_SIGNS},
    **{
        f"vespo_{name}_{sign[:3]}": partial(trl_loss_argument, f"{name}_{sign}")
        for name in ("k", "lambda")
        for sign in _ADVANTAGE_SIGNS
    },
    "loss_type": partial(choice, "loss", TRL_LOSSES),
    "scale_rewards": partial(choice, "scale", TRL_SCALES),
    "importance_sampling_level": trl_level,
    "entropy_coef": "algorithm.entropy_coef",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "use_adaptive_entropy": trl_adaptive_entropy,
    "entropy_target": Note("part of algorithm.adaptive_entropy", user_must_act=False),
    "entropy_coef_delta": Note("part of algorithm.adaptive_entropy", user_must_act=False),
    "entropy_coef_max": Note("part of algorithm.adaptive_entropy", user_must_act=False),
    "entropy_coef_min": partial(same_as_default, (0, 0.0), "the lower bound of mrl's coefficient is 0"),
    "vllm_importance_sampling_correction": trl_correction,
    "vllm_importance_sampling_*": Note("part of algorithm.correction", user_must_act=False),
    "off_policy_mask_threshold": trl_correction,
    "use_vllm": trl_correction,
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
    "logging_steps": Note("mrl logs every step", user_must_act=False),
    "report_to": trackers,
    "resume_from_checkpoint": Note("run.dir resumes by itself; resume=RUN_DIR starts from another run"),
    "use_peft": trl_lora,
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_target_modules"), Note("part of use_peft", user_must_act=False)),
    "lora_dropout": partial(same_as_default, (0, 0.0), "mrl's adapters have no dropout"),
    **{name: partial(same_as_default, (False,), "mrl has only plain LoRA") for name in ("use_rslora", "use_dora")},
    "remove_unused_columns": Note("rewards get all columns that data.columns names", user_must_act=False),
}


SOURCES: dict[str, dict[str, Rule]] = {"verl": VERL, "slime": SLIME, "trl": TRL}
_HINT_KEYS = {  # for keys whose rule is a function or a Note: key of another trainer -> the mrl key that the hint names
    "data.train_files": "data.train",
    "data.val_files": "data.test",
    f"{_ACTOR}ppo_mini_batch_size": "algorithm.mini_batches",
    f"{_ACTOR}clip_ratio": "algorithm.loss.clip_low",
    f"{_ACTOR}use_kl_loss": "algorithm.kl_in_loss",
    f"{_ACTOR}kl_loss_coef": "algorithm.kl_in_loss.coef",
    f"{_ACTOR}loss_agg_mode": "algorithm.aggregation",
    VERL_ESTIMATOR: "algorithm",
    "algorithm.use_kl_in_reward": "algorithm.kl_in_reward",
    "algorithm.filter_groups.enable": "rollout.filter",
    "custom_reward_function.path": "reward.path",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "trainer.eval_every",
    "trainer.logger": "tracking.backends",
    "prompt-data": "data.train",
    "rollout-seed": "run.seed",
    "rm-type": "reward",
    "advantage-estimator": "algorithm",
    "kl-coef": "algorithm.kl_in_reward.coef",
    "global-batch-size": "algorithm.mini_batches",
    "colocate": "placement",
    "rollout-num-gpus": "rollout.num_engines",
    "beta": "algorithm.kl_in_loss.coef",
    "use_adaptive_entropy": "algorithm.adaptive_entropy",
    "epsilon": "algorithm.loss.clip_low",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "per_device_train_batch_size": "rollout.prompts_per_step",
}


def counterpart_of(key: str) -> tuple[str, str] | None:
    """Return (mrl key, other trainer) if `key` is a verl, slime or trl key with an mrl key in these tables, else None.

    The key may lack its first parts, as in `rollout.n`, and may begin with dashes, as in `--rm-type`.
    """
    name = key.lstrip("-+").replace("-", "_")
    for source, rules in SOURCES.items():
        for foreign, rule in rules.items():
            known = foreign.replace("-", "_")
            if known == name or known.endswith(f".{name}"):
                target = rule if isinstance(rule, str) else _HINT_KEYS.get(foreign)
                if target:
                    return target, source
    return None
