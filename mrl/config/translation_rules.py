"""Rules that translate a key of another trainer into overrides of mrl. mrl/config/counterparts.py has the tables of rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from mrl.config.process_schema import TrackingBackend

KL = "mrl.algorithms.kl.KLPenalty"
VERL_ACTOR, VERL_CORRECTION_PREFIX = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
VERL_LOSS_MODE = f"{VERL_ACTOR}policy_loss.loss_mode"
VERL_ESTIMATOR, VERL_SCALE = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
SCALE, LOSS, AGGREGATION = "algorithm.advantage.scale_rewards", "algorithm.loss._target_", "algorithm.aggregation"


@dataclass(frozen=True)
class Note:
    """A text for the user about a key of another trainer. A rule returns it in place of overrides.

    `user_must_act`: if it is true and the user does nothing, the setting is lost.
    """

    text: str
    user_must_act: bool = True


type Values = Mapping[str, Any]
"""All keys of the imported config -> their values."""
type Overrides = dict[str, Any]
"""mrl keys -> their values."""
type Rule = str | Note | Callable[[Any, Values], Overrides | Note]
"""The mrl key with the same meaning, a note, or a function (value of the key, all values) -> overrides or a note."""


def is_on(value: Any) -> bool:
    """Return whether a value switches something on. In a shell script, a flag without a value has the value True."""
    return str(value).lower() in ("true", "1", "yes", "on")


def files(key: str, value: Any, values: Values) -> Overrides:
    return {key: value if isinstance(value, list) else [value]}


def held_out_sets(keys: Mapping[str, str], test_files: Mapping[str, list], values: Values) -> Overrides:
    """Return the override for held-out sets: data.test_sets if the config has sampling settings for them, else data.test.

    `keys`: sampling key of the other trainer -> key of a set in data.test_sets. `test_files`: name of a set -> its files.
    """
    sampling = {key: values[name] for name, key in keys.items() if values.get(name) is not None}
    if not is_on(sampling.pop("do_sample", True)):
        sampling = {"temperature": 0.0}
    if not sampling:
        return {"data.test": [file for found in test_files.values() for file in found]}
    return {"data.test_sets": {name: {"files": found} | sampling for name, found in test_files.items()}}


VERL_VALIDATION = {
    f"actor_rollout_ref.rollout.val_kwargs.{name}": name for name in ("n", "temperature", "top_p", "top_k", "do_sample")
}
SLIME_EVALUATION = {
    "n-samples-per-eval-prompt": "n",
    "eval-temperature": "temperature",
    "eval-top-p": "top_p",
    "eval-top-k": "top_k",
    "eval-max-response-len": "max_response_tokens",
}
IN_TEST_SETS = Note("used for data.test_sets", user_must_act=False)


def slime_held_out(value: Any, values: Values) -> Overrides:
    """Translate slime's held-out sets. slime lists them as pairs: the name of a set, and its file."""
    pairs = zip(value[::2], value[1::2], strict=True) if isinstance(value, list) else [("held_out", value)]
    return held_out_sets(SLIME_EVALUATION, {name: [file] for name, file in pairs}, values)


def verl_held_out(value: Any, values: Values) -> Overrides:
    return held_out_sets(VERL_VALIDATION, {"validation": value if isinstance(value, list) else [value]}, values)


def switch(on: Overrides, off: Overrides | None, value: Any, values: Values) -> Overrides | Note:
    """Return `on` if the value turns the key on, else `off`. If `off` is None, return a note instead."""
    if is_on(value):
        return on
    return off if off is not None else Note("off is the default", user_must_act=False)


def choice(what: str, table: Mapping[str, Overrides | Note], value: Any, values: Values) -> Overrides | Note:
    """Return the entry of `table` for a value, or a note if there is none. `what`: kind of the value, for the note."""
    result = table.get(str(value).lower().replace("-", "_"))
    return Note(f"mrl has no {what} {value!r}") if result is None else result


def step_interval(key: str, value: Any, values: Values) -> Overrides:
    return {key: max(0, int(value))}


def mini_batches(total: str, value: Any, values: Values) -> Overrides | Note:
    """Compute the number of mini-batches from their size. `total`: key with the batch size of a step.

    If `total` is several keys joined by *, the batch size is the product of their values.
    """
    if None in (sizes := [values.get(name) for name in total.split("*")]):
        return Note(f"algorithm.mini_batches is {total} divided by this size; {total} is not in this config")
    size = prod(int(str(each)) for each in sizes)
    return {"algorithm.mini_batches": max(1, size // int(value))}


def kl_penalty(
    term: str, coef: str, kind: str, kinds: Mapping[str, str], value: Any, values: Values
) -> Overrides | Note:
    """Return the override for algorithm.kl_in_loss or algorithm.kl_in_reward. `term`: "loss" or "reward".

    `coef`, `kind`: keys with the coefficient and the KL estimator. `kinds`: name of an estimator -> its name in mrl.
    """
    if not is_on(value):
        return {f"algorithm.kl_in_{term}": None}
    name = kinds.get(str(values.get(kind, "k3" if term == "loss" else "k1")).lower())
    if name is None:
        return Note(f"mrl has no KL estimator {values[kind]!r}")
    penalty = {"_target_": KL, "coef": values.get(coef, 0.001), "kind": name}
    control = coef.removesuffix("kl_coef")
    if term == "reward" and values.get(f"{control}type") == "adaptive":
        penalty["target"] = values.get(f"{control}target_kl", 0.1)
        penalty["horizon"] = values.get(f"{control}horizon", 10_000)
    return {f"algorithm.kl_in_{term}": penalty}


def warmup_steps(optim: str, total: str, value: Any, values: Values) -> Overrides | Note:
    """Compute the warm-up steps from a fraction of all steps. `optim`: section of mrl. `total`: key with the number of steps."""
    if not float(value):
        return Note("0 is the default", user_must_act=False)
    if (steps := values.get(total)) is None:
        return Note(f"{optim}.warmup_steps counts steps: set it to this ratio times the number of steps")
    return {f"{optim}.warmup_steps": round(float(value) * int(steps))}


def same_as_default(defaults: tuple, text: str, value: Any, values: Values) -> Note:
    """If the value is one of `defaults`, return a note that nothing has to be set. Otherwise return a note with `text`."""
    if str(value) in map(str, defaults):
        return Note("mrl does the same", user_must_act=False)
    return Note(text)


def lora_rank(alpha: str, default_alpha: int, value: Any, values: Values) -> Overrides:
    """Set the rank of the adapters, and lora.alpha if the config does not set it. `alpha`: the other trainer's key for alpha."""
    has_default = int(value) and values.get(alpha) is None
    return {"lora.rank": int(value)} | ({"lora.alpha": default_alpha} if has_default else {})


def lora_targets(value: Any, values: Values) -> Overrides | Note:
    if isinstance(value, list) and value != ["all-linear"]:
        return {"lora.targets": value}
    text = "by default, all linear layers outside routed experts have adapters; lora.targets lists others"
    return Note(text, user_must_act=not isinstance(value, list) and value != "all-linear")


def trackers(value: Any, values: Values) -> Overrides:
    named = value if isinstance(value, list) else str(value)
    return {"tracking.backends": [backend.value for backend in TrackingBackend if backend.value in named]}


ALGORITHMS = {  # advantage estimator of verl or slime -> overrides
    "grpo": {"algorithm": "grpo"},
    "gae": {"algorithm": "ppo"},
    "ppo": {"algorithm": "ppo"},
    "rloo": {"algorithm": "rloo"},
    "remax": {"algorithm": "remax"},
    "opo": {"algorithm": "opo"},
    "gspo": {"algorithm": "gspo"},
    "cispo": {"algorithm": "cispo"},
    "gdpo": {"algorithm": "gdpo"},
    "gpg": {"algorithm": "gpg"},
    "grpo_passk": {
        "algorithm": "grpo",
        "algorithm.advantage._target_": "mrl.algorithms.advantages.PassAtK",
        "algorithm.advantage.normalize_std": True,
    },
    "optimal_token_baseline": {"algorithm": "otb"},
    "tir_optimal_token_baseline": {"algorithm": "otb"},
    "grpo_vectorized": {"algorithm": "grpo"},
    "rloo_vectorized": {"algorithm": "rloo"},
    "reinforce_plus_plus": {"algorithm": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {"algorithm": "reinforce_pp_baseline"},
    "on_policy_distillation": {"algorithm": "distill"},
}
_GROUP_SCALES = ({SCALE: "group"}, {SCALE: "none"})
VERL_SCALES: dict[str, tuple[Overrides, Overrides]] = {  # estimator -> overrides with and without division by the std
    "grpo": _GROUP_SCALES,
    "grpo_vectorized": _GROUP_SCALES,
    "grpo_passk": ({"algorithm.advantage.normalize_std": True}, {"algorithm.advantage.normalize_std": False}),
}
WITHOUT_CLIP = ("rloo", "remax", "opo", "gpg")
"""Configs of mrl whose loss is the plain policy gradient, although verl uses PPO's clip with the same estimator."""
_TOKEN_LOSSES, _SEQUENCE_LOSSES = "mrl.algorithms.losses.", "mrl.algorithms.sequence_losses."
_SEQUENCE_MEAN = {AGGREGATION: "sequence_mean"}
VERL_LOSSES: dict[str, Overrides] = {  # loss_mode -> loss, its variant, and verl's fixed aggregation if any
    "vanilla": {LOSS: f"{_TOKEN_LOSSES}PPOClip"},
    "gspo": {LOSS: f"{_SEQUENCE_LOSSES}GSPO", **_SEQUENCE_MEAN},
    "geo_mean": {LOSS: f"{_SEQUENCE_LOSSES}GMPO", **_SEQUENCE_MEAN},
    "sapo": {LOSS: f"{_TOKEN_LOSSES}SAPO", **_SEQUENCE_MEAN},
    "cispo": {LOSS: f"{_TOKEN_LOSSES}CISPO"},
    "gpg": {LOSS: f"{_TOKEN_LOSSES}PolicyGradient"},
    "clip_cov": {LOSS: f"{_TOKEN_LOSSES}ClipCov"},
    "kl_cov": {LOSS: f"{_TOKEN_LOSSES}KLCov", "algorithm.loss.kl": "abs"},
    "dppo_tv": {LOSS: f"{_TOKEN_LOSSES}DPPO", "algorithm.loss.divergence": "tv"},
    "dppo_kl": {LOSS: f"{_TOKEN_LOSSES}DPPO", "algorithm.loss.divergence": "kl"},
    "dro": {LOSS: f"{_TOKEN_LOSSES}DRO"},
}
_CLIPPED, _DPPO = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov"), ("dppo_tv", "dppo_kl")
VERL_LOSS_ARGUMENTS: dict[str, dict[str, str]] = {  # key of verl's actor -> loss_mode -> argument of the loss in mrl
    "clip_ratio_low": dict.fromkeys(_CLIPPED, "clip_low") | dict.fromkeys(_DPPO, "delta_low"),
    "clip_ratio_high": dict.fromkeys(_CLIPPED, "clip_high") | dict.fromkeys(_DPPO, "delta_high"),
    "clip_ratio_c": {"vanilla": "dual_clip"} | dict.fromkeys(_DPPO, "max_ratio"),
    "tau_pos": {"sapo": "tau_positive"},
    "tau_neg": {"sapo": "tau_negative"},
    "policy_loss.clip_cov_ratio": {"clip_cov": "fraction"},
    "policy_loss.clip_cov_lb": {"clip_cov": "low"},
    "policy_loss.clip_cov_ub": {"clip_cov": "high"},
    "policy_loss.kl_cov_ratio": {"kl_cov": "fraction"},
    "policy_loss.ppo_kl_coef": {"kl_cov": "coef"},
    "policy_loss.dro_beta": {"dro": "beta"},
}
_CLIP_BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
VERL_LOSS_DEFAULTS: dict[str, dict[str, float]] = {  # loss_mode -> verl's defaults that differ from mrl's defaults
    **dict.fromkeys(("gspo", "geo_mean", "cispo", "clip_cov"), _CLIP_BOUNDS),
    **{mode: {"clip_ratio_c": 3.0} for mode in _DPPO},
    "kl_cov": {"policy_loss.ppo_kl_coef": 0.1},
}
TRL_LOSSES = {  # loss_type -> overrides
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "sapo"},
    "vespo": {"algorithm": "vespo"},
    "luspo": {"algorithm": "luspo"},
    "bnpo": {AGGREGATION: "token_mean"},
    "dapo": {AGGREGATION: "token_mean"},
    "grpo": {AGGREGATION: "sequence_mean"},
    "dr_grpo": {AGGREGATION: "fixed_length"},
}
_TRL_LOSS_CLASSES = {  # loss_type -> loss in mrl, if the loss has a class of its own
    "cispo": f"{_TOKEN_LOSSES}CISPO",
    "sapo": f"{_TOKEN_LOSSES}SAPO",
    "vespo": f"{_SEQUENCE_LOSSES}VESPO",
}
VERL_AGGREGATIONS = {  # loss_agg_mode -> override
    "token_mean": {AGGREGATION: "token_mean"},
    "seq_mean_token_mean": {AGGREGATION: "sequence_mean"},
    "seq_mean_token_sum": {AGGREGATION: "sequence_sum"},
    "seq_mean_token_sum_norm": {AGGREGATION: "fixed_length"},
    "token_sum": {AGGREGATION: "token_sum"},
}
TRL_SCALES = {n: {SCALE: n} for n in ("group", "batch", "none")} | {"true": {SCALE: "group"}, "false": {SCALE: "none"}}
VERL_KL = {  # name of a KL estimator in verl -> its name in mrl
    **{"kl": "k1", "k1": "k1", "kl+": "k1+", "k1+": "k1+", "abs": "abs", "abs+": "abs+", "mse": "k2", "k2": "k2"},
    **{"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+"},
}
SLIME_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
VERL_FILTRATION = {
    "algorithm.resampling._target_": "mrl.algorithms.filters.PolicyFiltration",
    "algorithm.resampling.per_group": False,
}
RECOMPUTE = dict(zip(("granularity", "method", "num_layers"), ("full", "uniform", 1), strict=True))
FULL_RECOMPUTE = {f"megatron.recompute_{name}": value for name, value in RECOMPUTE.items()}
OTHER_BACKEND = "mrl trains with Megatron-Core; the memory and layout are set in the sections parallel and megatron"
PACKED = Note("mrl always packs sequences and limits the tokens of a micro-batch", user_must_act=False)
SIZES = Note("set trainer.max_tokens_per_micro_batch, in tokens, in place of a number of sequences")
AGENT = Note("name the agent in rollout.agent._target_ (docs/tutorials/agent.md)")


def layout_rules(prefix: str, section: str = "parallel", sep: str = "_") -> dict[str, Rule]:
    """Return the rules for the sizes of a Megatron layout. `sep`: character between the words of the other trainer's keys."""
    names = {
        "tensor_model_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vpp",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
    }
    return {prefix + name.replace("_", sep): f"{section}.{axis}" for name, axis in names.items()}


def verl_optim_rules(prefix: str, optim: str) -> dict[str, Rule]:
    return {
        f"{prefix}.lr": f"{optim}.lr",
        f"{prefix}.weight_decay": f"{optim}.weight_decay",
        f"{prefix}.betas": f"{optim}.betas",
        f"{prefix}.clip_grad": f"{optim}.clip_grad",
        f"{prefix}.lr_warmup_steps": lambda value, values: (
            {f"{optim}.warmup_steps": value} if int(value) > 0 else Note("lr_warmup_steps_ratio decides", False)
        ),
        f"{prefix}.lr_warmup_steps_ratio": partial(warmup_steps, optim, "trainer.total_training_steps"),
        f"{prefix}.total_training_steps": Note("trainer.max_steps decides", user_must_act=False),
    }


def top_k(value: Any, values: Values) -> Overrides:
    """Return the override for top_k. In some trainers, 0 means all tokens."""
    return {"rollout.top_k": int(value) or -1}


def stop_texts(value: Any, values: Values) -> Overrides:
    """Return the override for the texts that end a response."""
    return {"rollout.stop": value if isinstance(value, list) else [value]}


def gae_argument(name: str, value: Any, values: Values) -> Overrides | Note:
    """Set gamma or lam of the advantages. REINFORCE++ uses only gamma."""
    estimator = str(values.get(VERL_ESTIMATOR, "gae")).lower()
    if estimator == "gae" or (estimator == "reinforce_plus_plus" and name == "gamma"):
        return {f"algorithm.advantage.{name}": value}
    return Note("the estimator does not use it", user_must_act=False)


def adam_betas(first: str, second: str, value: Any, values: Values) -> Overrides:
    """Set optim.betas. `first`, `second`: keys of the betas. A key that the config lacks has the default of Megatron and trl."""
    defaults = {first: 0.9, second: 0.999}
    return {"optim.betas": [default if values.get(key) is None else values[key] for key, default in defaults.items()]}


def pf_ppo(name: str, value: Any, values: Values) -> Overrides | Note:
    """Set an argument of the policy filtration, if use_pf_ppo is on."""
    if not is_on(values.get("algorithm.use_pf_ppo", False)):
        return Note("algorithm.use_pf_ppo is off", user_must_act=False)
    return {f"algorithm.resampling.{name}": value}


def num_engines(value: Any, values: Values) -> Overrides | Note:
    per_engine = int(str(values.get("rollout-num-gpus-per-engine", 1)))
    return {"rollout.num_engines": max(1, int(value) // per_engine)}


def slime_nodes(value: Any, values: Values) -> Overrides | Note:
    """Compute the number of trainer ranks from the number of nodes. By default, slime uses 8 GPUs of each node."""
    if "actor-num-gpus-per-node" in values:
        return Note("used for parallel.world_size", user_must_act=False)
    return {"parallel.world_size": int(value) * 8}


def slime_rollout_seed(value: Any, values: Values) -> Overrides | Note:
    if str(values.get("seed", value)) != str(value):
        return Note("run.seed is the seed of training and of sampling; it gets the value of --seed")
    return {"run.seed": value}


def slime_filter(value: Any, values: Values) -> Overrides | Note:
    """Translate the filter that slime provides. A filter that a user wrote reads slime's samples, so it has no counterpart."""
    if str(value).rpartition(".")[2] == "check_reward_nonzero_std":
        return {"rollout.filter._target_": "mrl.algorithms.filters.NonzeroVariance"}
    return Note("write a filter that reads the rewards of a group, and name it in rollout.filter._target_")


def slime_reward(value: Any, values: Values) -> Overrides | Note:
    rewards = {"math": "math", "deepscaler": "math", "dapo": "math", "gpqa": "multiple_choice", "f1": None}
    name = rewards.get(str(value))
    return {"reward": name} if name else Note(f"mrl has no reward {value!r}; reward=function calls your own")


def trl_prompts(completions: int, values: Values) -> Overrides:
    """Compute the prompts per step from trl's number of completions. trl samples 8 completions for a prompt by default."""
    return {"rollout.prompts_per_step": max(1, completions // int(str(values.get("num_generations", 8))))}


def verl_estimator(value: Any, values: Values) -> Overrides | Note:
    """Select mrl's config for an advantage estimator. For a config in WITHOUT_CLIP, also select verl's loss."""
    found = choice("estimator", ALGORITHMS, value, values)
    if isinstance(found, Note):
        return found
    if VERL_LOSS_MODE not in values and found["algorithm"] in WITHOUT_CLIP:
        found = found | VERL_LOSSES[verl_mode(values)]
    scale = verl_scale(values[VERL_SCALE], values) if VERL_SCALE in values else {}
    return found if isinstance(scale, Note) else found | scale


def verl_scale(value: Any, values: Values) -> Overrides | Note:
    """Set whether advantages are divided by the standard deviation of the group."""
    scales = VERL_SCALES.get(str(values.get(VERL_ESTIMATOR, "gae")).lower())
    if scales is None:
        return Note("the estimator does not use it", user_must_act=False)
    return scales[0] if is_on(value) else scales[1]


def verl_mode(values: Values) -> str:
    """Return the name of verl's loss. With rollout_correction.bypass_mode, policy_loss.loss_mode has no effect."""
    if is_on(values.get(f"{VERL_CORRECTION_PREFIX}bypass_mode", False)):
        return "gpg" if values.get(f"{VERL_CORRECTION_PREFIX}loss_type") == "reinforce" else "vanilla"
    return str(values.get(VERL_LOSS_MODE, "vanilla")).lower().replace("-", "_")


def verl_loss_mode(value: Any, values: Values) -> Overrides | Note:
    """Select the loss, with verl's defaults for the arguments that the config does not set."""
    mode = verl_mode(values)
    found = choice("loss", VERL_LOSSES, mode, values)
    if isinstance(found, Note):
        return found
    given = {key for key in VERL_LOSS_ARGUMENTS if values.get(VERL_ACTOR + key) is not None}
    given |= _CLIP_BOUNDS.keys() if values.get(f"{VERL_ACTOR}clip_ratio") is not None else set()
    defaults = {key: default for key, default in VERL_LOSS_DEFAULTS.get(mode, {}).items() if key not in given}
    return found | {f"algorithm.loss.{VERL_LOSS_ARGUMENTS[key][mode]}": default for key, default in defaults.items()}


def verl_aggregation(value: Any, values: Values) -> Overrides | Note:
    """Select the aggregation. Some of verl's losses allow only one aggregation."""
    mode = verl_mode(values)
    if AGGREGATION in VERL_LOSSES.get(mode, {}):
        return Note(f"the loss {mode} always has algorithm.aggregation=sequence_mean", user_must_act=False)
    return choice("aggregation", VERL_AGGREGATIONS, value, values)


def verl_loss_argument(key: str, value: Any, values: Values) -> Overrides | Note:
    """Set an argument of the loss. `key`: key of VERL_LOSS_ARGUMENTS."""
    name = VERL_LOSS_ARGUMENTS[key].get(mode := verl_mode(values))
    return {f"algorithm.loss.{name}": value} if name else Note(f"the loss {mode} does not use it", user_must_act=False)


def verl_clip(value: Any, values: Values) -> Overrides | Note:
    """Use clip_ratio for each bound of the clip that clip_ratio_low or clip_ratio_high does not set."""
    found: Overrides = {}
    for key in _CLIP_BOUNDS:
        bound = verl_loss_argument(key, value, values)
        if isinstance(bound, Note):
            return bound
        found |= bound if values.get(VERL_ACTOR + key) is None else {}
    return found or Note("clip_ratio_low and clip_ratio_high decide", user_must_act=False)


def verl_filter_metric(value: Any, values: Values) -> Overrides | Note:
    """Select the part of the reward that the rollout filter compares."""
    if not is_on(values.get("algorithm.filter_groups.enable", False)):
        return Note("algorithm.filter_groups.enable is off", user_must_act=False)
    if value in ("reward", "score", "seq_reward", "seq_final_reward"):
        return Note("the filter compares total rewards", user_must_act=False)
    return {"rollout.filter.metric": "correctness" if value == "acc" else value}


def verl_loss_scale(value: Any, values: Values) -> Note:
    """Return a note about the length by which the aggregation fixed_length divides."""
    same = str(value) == str(values.get("data.max_response_length"))
    return Note("algorithm.aggregation=fixed_length divides by rollout.max_response_tokens", user_must_act=not same)


def verl_gdpo_weights(value: Any, values: Values) -> Overrides:
    """Set the weights of the parts of the reward. `value`: names of the parts."""
    weights = values.get("algorithm.gdpo_reward_weights") or [1.0] * len(value)
    return {"algorithm.advantage.weights": dict(zip(value, weights, strict=True))}


def trl_loss_argument(name: str, value: Any, values: Values) -> Overrides:
    """Set an argument of the loss. With top_entropy_quantile < 1, this loss is itself an argument of the loss TopEntropy."""
    quantile = values.get("top_entropy_quantile")
    inner = ".loss" if quantile is not None and float(quantile) < 1 else ""
    return {f"algorithm.loss{inner}.{name}": value}


def trl_lora(value: Any, values: Values) -> Overrides | Note:
    """Translate trl's LoRA keys, with trl's defaults. The default targets are PEFT's for most model families."""
    if not is_on(value):
        return Note("off is the default", user_must_act=False)
    targets = lora_targets(values.get("lora_target_modules") or ["q_proj", "v_proj"], values)
    sizes = {"lora.rank": values.get("lora_r", 16), "lora.alpha": values.get("lora_alpha", 32)}
    return sizes | (targets if isinstance(targets, dict) else {})


def trl_top_entropy(value: Any, values: Values) -> Overrides | Note:
    """Select the loss TopEntropy. It applies the loss that the other keys select, but only to the tokens of largest entropy."""
    if float(value) >= 1:
        return Note("1.0 trains all tokens, which is the default", user_must_act=False)
    ratio_of_response = values.get("importance_sampling_level") == "sequence"
    default = f"{_SEQUENCE_LOSSES}GSPO" if ratio_of_response else f"{_TOKEN_LOSSES}PPOClip"
    loss = _TRL_LOSS_CLASSES.get(str(values.get("loss_type")), default)
    arguments = {"_target_": f"{_TOKEN_LOSSES}TopEntropy", "fraction": value, "loss._target_": loss}
    return {f"algorithm.loss.{name}": argument for name, argument in arguments.items()}


def trl_level(value: Any, values: Values) -> Overrides | Note:
    """For importance_sampling_level=sequence, select GSPO (ratio of the whole response). Some losses have a fixed level."""
    if value == "token":
        return Note("the default", user_must_act=False)
    loss = str(values.get("loss_type"))
    if loss in _TRL_LOSS_CLASSES:
        return Note(f"mrl's loss {loss} cannot use the ratio {value!r}")
    if "algorithm" in TRL_LOSSES.get(loss, {}):
        return Note(f"the loss {loss} has this ratio", user_must_act=False)
    return {"algorithm": "gspo"} | ({} if "loss_type" in values else {AGGREGATION: "token_mean"})


def trl_kl_kind(values: Values) -> str:
    """Return the `kind` of trl's KL: unbiased (k3 times the ratio pi / pi_old), or k3 if use_bias_correction_kl is off."""
    return "unbiased" if is_on(values.get("use_bias_correction_kl", True)) else "k3"


def trl_adaptive_entropy(value: Any, values: Values) -> Overrides | Note:
    """Translate trl's adaptive entropy control, with trl's defaults."""
    if not is_on(value):
        return Note("off is the default", user_must_act=False)
    defaults = dict(
        target=("entropy_target", 0.2), step=("entropy_coef_delta", 0.005), max_coef=("entropy_coef_max", 1.0)
    )
    return {"algorithm.adaptive_entropy": {name: values.get(key, default) for name, (key, default) in defaults.items()}}
