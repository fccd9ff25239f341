"""Rules that translate a key of another trainer into overrides of mrl. mrl/config/counterparts.py has the tables of rules."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mrl.config.process_schema import TrackingBackend

KL = "mrl.algorithms.kl.KLPenalty"


@dataclass(frozen=True)
class Note:
    """Why a key of another trainer needs no override (`needed=False`), or has no counterpart (`needed=True`)."""

    text: str
    needed: bool = True


type Values = Mapping[str, Any]
"""All keys of the imported config -> their values."""
type Overrides = dict[str, Any]
"""mrl keys -> their values."""
type Rule = str | Note | Callable[[Any, Values], Overrides | Note]


def is_on(value: Any) -> bool:
    """Return whether a value switches something on. In a shell script, a flag without a value has the value True."""
    return str(value).lower() in ("true", "1", "yes", "on")


def files(key: str, value: Any, values: Values) -> Overrides:
    return {key: value if isinstance(value, list) else [value]}


def switch(on: Overrides, off: Overrides | None, value: Any, values: Values) -> Overrides | Note:
    if is_on(value):
        return on
    return off if off is not None else Note("off is the default", needed=False)


def choice(what: str, table: Mapping[str, Overrides | Note], value: Any, values: Values) -> Overrides | Note:
    result = table.get(str(value).lower().replace("-", "_"))
    return Note(f"mrl has no {what} {value!r}") if result is None else result


def step_interval(key: str, value: Any, values: Values) -> Overrides:
    return {key: max(0, int(value))}


def mini_batches(total: str, value: Any, values: Values) -> Overrides | Note:
    """Compute the number of mini-batches from their size. `total`: key with the batch size of a step, or factors joined by *."""
    sizes = [values.get(name) for name in total.split("*")]
    if any(size is None for size in sizes):
        return Note(f"algorithm.mini_batches is {total} divided by this size; {total} is not in this config")
    size = 1
    for each in sizes:
        size *= int(str(each))
    return {"algorithm.mini_batches": max(1, size // int(value))}


def kl_penalty(
    term: str, coef: str, kind: str, kinds: Mapping[str, str], value: Any, values: Values
) -> Overrides | Note:
    if not is_on(value):
        return {f"algorithm.kl_in_{term}": None}
    name = kinds.get(str(values.get(kind, "k3" if term == "loss" else "k1")).lower())
    if name is None:
        return Note(f"mrl has no KL estimator {values[kind]!r}")
    return {f"algorithm.kl_in_{term}": {"_target_": KL, "coef": values.get(coef, 0.001), "kind": name}}


def warmup_steps(optim: str, total: str, value: Any, values: Values) -> Overrides | Note:
    steps = values.get(total)
    if not float(value):
        return Note("0 is the default", needed=False)
    if steps is None:
        return Note(f"{optim}.warmup_steps counts steps: this ratio times the number of steps")
    return {f"{optim}.warmup_steps": round(float(value) * int(steps))}


def same_as_default(defaults: tuple, text: str, value: Any, values: Values) -> Note:
    if str(value) in map(str, defaults):
        return Note("mrl does the same", needed=False)
    return Note(text)


def trackers(value: Any, values: Values) -> Overrides:
    named = value if isinstance(value, list) else str(value)
    return {"tracking.backends": [backend.value for backend in TrackingBackend if backend.value in named]}


ALGORITHMS = {
    "grpo": {"algorithm": "grpo"},
    "gae": {"algorithm": "ppo"},
    "ppo": {"algorithm": "ppo"},
    "rloo": {"algorithm": "rloo"},
    "remax": {"algorithm": "remax"},
    "opo": {"algorithm": "opo"},
    "gspo": {"algorithm": "gspo"},
    "cispo": {"algorithm": "cispo"},
    "gdpo": {"algorithm": "gdpo"},
    "reinforce_plus_plus": {"algorithm": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {"algorithm": "reinforce_pp_baseline"},
    "on_policy_distillation": {"algorithm": "distill"},
}
LOSSES = {
    "vanilla": Note("the loss of the algorithm", needed=False),
    "gspo": {"algorithm": "gspo"},
    "clip_cov": {"algorithm": "clip_cov"},
    "kl_cov": {"algorithm": "kl_cov"},
    "geo_mean": {"algorithm": "gmpo"},
    "cispo": {"algorithm": "cispo"},
    "sapo": {"algorithm": "sapo"},
    "bnpo": {"algorithm.aggregation": "token_mean"},
    "dapo": {"algorithm.aggregation": "token_mean"},
    "grpo": {"algorithm.aggregation": "sequence_mean"},
    "dr_grpo": {"algorithm.aggregation": "fixed_length", "algorithm.advantage.normalize_std": False},
}
AGGREGATIONS = {
    "token_mean": {"algorithm.aggregation": "token_mean"},
    "seq_mean_token_mean": {"algorithm.aggregation": "sequence_mean"},
    "seq_mean_token_sum": {"algorithm.aggregation": "sequence_sum"},
    "seq_mean_token_sum_norm": {"algorithm.aggregation": "fixed_length"},
    "token_sum": {"algorithm.aggregation": "token_sum"},
}
VERL_KL = {"kl": "k1", "k1": "k1", "k1+": "k1+", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k3+"}
SLIME_KL = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
RECOMPUTE = dict(zip(("granularity", "method", "num_layers"), ("full", "uniform", 1), strict=True))
FULL_RECOMPUTE = {f"megatron.recompute_{name}": value for name, value in RECOMPUTE.items()}
OTHER_BACKEND = "mrl trains with Megatron-Core; the memory and layout are set in the sections parallel and megatron"
PACKED = Note("mrl always packs sequences and limits the tokens of a micro-batch", needed=False)
SIZES = Note("set trainer.max_tokens_per_micro_batch, in tokens, in place of a number of sequences")
EPOCHS = Note("mrl counts steps: trainer.max_steps = epochs x rows / rollout.prompts_per_step")
ALL_TOKENS = (
    "mrl samples from the whole distribution, so that the log-probabilities that are trained are those of the samples"
)
TOP_P, TOP_K = partial(same_as_default, (1, 1.0), ALL_TOKENS), partial(same_as_default, (-1, 0), ALL_TOKENS)
AGENT = Note("name the agent in rollout.agent._target_ (docs/tutorials/agent.md)")


def layout_rules(prefix: str, section: str = "parallel", sep: str = "_") -> dict[str, Rule]:
    """Rules for the sizes of a Megatron layout."""
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
            {f"{optim}.warmup_steps": value} if int(value) > 0 else Note("-1: the ratio applies", needed=False)
        ),
        f"{prefix}.lr_warmup_steps_ratio": partial(warmup_steps, optim, "trainer.total_training_steps"),
        f"{prefix}.total_training_steps": Note("trainer.max_steps decides", needed=False),
    }


def gae_argument(name: str, value: Any, values: Values) -> Overrides | Note:
    if str(values.get("algorithm.adv_estimator", "gae")) != "gae":
        return Note("only for PPO's advantages", needed=False)
    return {f"algorithm.advantage.{name}": value}


def num_engines(value: Any, values: Values) -> Overrides | Note:
    per_engine = int(str(values.get("rollout-num-gpus-per-engine", 1)))
    return {"rollout.num_engines": max(1, int(value) // per_engine)}


def slime_reward(value: Any, values: Values) -> Overrides | Note:
    rewards = {"math": "math", "deepscaler": "math", "dapo": "math", "gpqa": "multiple_choice", "f1": None}
    name = rewards.get(str(value))
    return {"reward": name} if name else Note(f"mrl has no reward {value!r}; reward=function calls your own")


def trl_prompts(completions: int, values: Values) -> Overrides:
    """Prompts of a step from trl's number of completions. trl samples 8 completions for a prompt by default."""
    return {"rollout.prompts_per_step": max(1, completions // int(str(values.get("num_generations", 8))))}


def trl_adaptive_entropy(value: Any, values: Values) -> Overrides | Note:
    """Translate trl's adaptive entropy control, with trl's defaults."""
    if not is_on(value):
        return Note("off is the default", needed=False)
    defaults = {
        "target": ("entropy_target", 0.2),
        "step": ("entropy_coef_delta", 0.005),
        "max_coef": ("entropy_coef_max", 1.0),
    }
    return {"algorithm.adaptive_entropy": {name: values.get(key, default) for name, (key, default) in defaults.items()}}
