"""Settings of a trainer that the driver also needs: optimizer, learning rates, LoRA, divergences, offloading, and Megatron.

Megatron's DistributedDataParallel and Megatron's optimizer receive settings from the config. Names and types of these settings
are read from Megatron's source files, because importing Megatron takes more than ten seconds. This module does not import torch.
"""

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache
from importlib.util import find_spec
from math import cos, pi, sqrt
from pathlib import Path
from typing import Any


class OffloadLevel(IntEnum):
    """How much of a model is on its device; a higher level includes the lower ones."""

    FULLY_OFFLOADED = 0  # the model occupies no device memory
    WEIGHTS_LOADED = 1  # parameters and buffers: enough for forward passes and weight sync
    FULLY_LOADED = 2  # also gradients and optimizer state: enough for training


class DivergenceKind(StrEnum):
    """Name of a divergence between the distributions of a teacher and of a student (see Divergence)."""

    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    js = "js"


MIN_REST_PROB = 1e-6
"""Lower bound of the total probability of all tokens outside the top k. Float32 sums of probabilities have about this error."""


@dataclass(frozen=True)
class Divergence:
    """Divergence, in nats, between the distribution t of a teacher and the distribution s of a student.

        forward_kl  KL(t || s) = sum_j t_j log(t_j / s_j)
        reverse_kl  KL(s || t) = sum_j s_j log(s_j / t_j)
        js          beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s, the generalized Jensen-Shannon
                    divergence (GKD, Agarwal et al. 2024, arXiv 2306.13649, eq. 1)

    The gradient of js, divided by beta, tends to the gradient of forward_kl for beta -> 0. The gradient of js, divided by
    1 - beta, tends to the gradient of reverse_kl for beta -> 1.

    Raises ValueError for an unknown kind, and for `js` with a beta that is not between 0 and 1.
    """

    kind: DivergenceKind = DivergenceKind.reverse_kl
    beta: float = 0.5  # weight of the teacher in m; only js uses it

    def __post_init__(self) -> None:
        if self.kind not in list(DivergenceKind):
            raise ValueError(f"divergence={self.kind!r}: expected {', '.join(DivergenceKind)}.")
        if self.kind == DivergenceKind.js and not 0 < self.beta < 1:
            raise ValueError(
                f"beta={self.beta}: must be between 0 and 1. For 0 use divergence=forward_kl, for 1 divergence=reverse_kl."
            )


class LrSchedule(StrEnum):
    """Decay of the learning rate after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"  # warmup-stable-decay: constant, then a decay in the last fifth of the decay steps
    linear_to_tenth = "linear_to_tenth"  # linear decay to lr / 10 that begins at the first step; lr_min is not used


def config_field(default: Any, description: str, unit: str = "", **bounds: float) -> Any:
    """Return a dataclass field whose metadata contains a description, a unit and bounds, for checks and documentation.

    `default` may be a function that returns the default. In `bounds`, `above` and `below` are exclusive, and `least` and `most`
    are inclusive.
    """
    metadata = dict(description=description, unit=unit, **bounds)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), gradient clipping and a learning-rate schedule.

    This is the config section `optim` of the actor, of the critic and of supervised fine-tuning.
    """

    lr: float = config_field(1e-6, "Learning rate after the warm-up.", above=0)
    lr_schedule: LrSchedule = config_field(
        LrSchedule.constant, "Decay of the learning rate after the warm-up; linear_to_tenth decays from the first step."
    )
    lr_decay_steps: int = config_field(
        0,
        "Number of optimizer steps, including the warm-up, after which the learning rate is lr_min, or lr / 10 with "
        "linear_to_tenth. lr_schedule=constant ignores the key; every other schedule needs it. In sft.optim, linear_to_tenth "
        "uses sft.steps if the key is 0. If your own training step calls update() several times, these calls count as one.",
        "optimizer steps",
        least=0,
    )
    lr_min: float = config_field(0.0, "Learning rate at the end of the decay.", least=0)
    warmup_steps: int = config_field(
        0, "Number of optimizer steps in which the learning rate rises linearly from 0.", "optimizer steps", least=0
    )
    betas: tuple[float, float] = config_field((0.9, 0.95), "Decay rates of AdamW's two moments.", least=0, below=1)
    eps: float = config_field(1e-8, "Term in AdamW's denominator that prevents a division by zero.", least=0)
    weight_decay: float = config_field(0.0, "Decoupled weight decay of AdamW. Biases and norms have none.", least=0)
    clip_grad: float = config_field(
        1.0,
        "Largest global norm of the gradient. A larger gradient is scaled down to this norm. 0 disables clipping.",
        least=0,
    )
    megatron: dict[str, Any] = config_field(
        dict,
        "More settings of Megatron's optimizer: fields of OptimizerConfig, such as {decoupled_weight_decay: false}.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # OmegaConf passes a list
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"optim.lr={self.lr}: a learning rate must be positive.")
        for name in ("eps", "weight_decay", "clip_grad", "warmup_steps", "lr_decay_steps", "lr_min"):
            if getattr(self, name) < 0:
                raise ValueError(f"optim.{name}={getattr(self, name)}: must be 0 or more.")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optim.betas={self.betas}: each must be in [0, 1).")
        if self.lr_schedule not in list(LrSchedule):
            raise ValueError(f"optim.lr_schedule={self.lr_schedule!r}; expected one of {', '.join(LrSchedule)}.")
        decays = self.lr_schedule not in (LrSchedule.constant, LrSchedule.linear_to_tenth)
        if decays and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optim.lr_decay_steps={self.lr_decay_steps}: lr_schedule={self.lr_schedule} needs more steps than "
                f"warmup_steps={self.warmup_steps}; set it to the number of optimizer steps of the run."
            )
        if self.lr_min > self.lr:
            raise ValueError(f"optim.lr_min={self.lr_min} is above lr={self.lr}.")

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`. Steps are counted from 0."""
        if self.lr_schedule == LrSchedule.linear_to_tenth:
            warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
            return self.lr * warm * (1.0 - 0.9 * min(1.0, step / max(1, self.lr_decay_steps)))
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / (self.lr_decay_steps - self.warmup_steps))
        return self.lr_min + (self.lr - self.lr_min) * _decay_factor(self.lr_schedule, progress)


MAX_MERGED_ELEMENTS = 1 << 22
"""Largest number of elements of W + (alpha / rank) B A that are computed at a time, in float32."""
MAX_INDEX_PRODUCTS = 1 << 26
"""Largest number of query-key products, over all heads of an indexer, that are in memory at a time, in float32."""


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685): the weights of the actor are frozen, and low-rank adapters are trained."""

    rank: int = config_field(0, "Rank of the adapters. 0: no adapters, all weights are trained.", least=0)
    alpha: float = config_field(32.0, "Scale of the adapters: their output is multiplied by alpha / rank.", above=0)
    targets: list[str] = config_field(
        list,
        "Matrices with adapters, by their Hugging Face names, such as [q_proj, v_proj]. Default: all linear layers except the "
        "router, the output layer and, without lora.experts, the routed experts.",
    )
    experts: bool = config_field(
        False, "Whether the routed experts have adapters, too: one for each matrix of each expert."
    )
    path: str | None = config_field(
        None,
        "Folder in the format of PEFT with the initial adapters. Default: random adapters that do not change the outputs of the "
        "model.",
    )

    @property
    def scale(self) -> float:
        """Factor by which the output of an adapter is multiplied."""
        return self.alpha / self.rank


def _decay_factor(schedule: str, progress: float) -> float:
    """Return the fraction of `lr - lr_min` that remains after the fraction `progress` of the decay steps."""
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":  # one cycle of SGDR (Loshchilov and Hutter 2017, equation 5)
        return 0.5 * (1.0 + cos(pi * progress))
    decay = 0.2  # warmup-stable-decay: constant, then 1 - sqrt(x) in the last fifth (Haegele et al. 2024, section 4)
    return 1.0 if progress <= 1 - decay else 1.0 - sqrt((progress - (1 - decay)) / decay)


_FSDP = "it belongs to Megatron's FSDP, which mrl does not use; remove it"
_WEIGHTS = "checkpoints, offloading and the push of weights to engines need weights in model.dtype; remove it"
_STATE = "mrl's checkpoints, offloading and `mrl plan memory` expect float32 state on the trainer's device; remove it"
_ADAM = "mrl trains with AdamW, and this is a setting of another optimizer; remove it"
_SCALE = "mrl uses no loss scale, because bfloat16 needs none; remove it"

DDP_RESERVED: dict[str, str] = {
    "overlap_grad_reduce": "use trainer.overlap_grad_reduce",
    "overlap_param_gather": "the weights must be complete before the next pass, because the head of the actor reads the output "
    "weight without calling its layer; remove it",
    "align_param_gather": "it acts only with overlap_param_gather, which mrl does not use; remove it",
    "use_distributed_optimizer": "mrl always distributes the optimizer state over the replicas; remove it",
    "num_distributed_optimizer_instances": "it needs process groups that mrl does not create; remove it",
    "average_in_collective": "gradients are summed over replicas, because losses are divided by the tokens of the whole "
    "mini-batch; remove it",
    "check_for_nan_in_grad": "mrl checks the norm of all gradients before each optimizer step; remove it",
    "check_for_large_grads": "mrl checks the norm of all gradients before each optimizer step; remove it",
    "num_buckets": "this version of Megatron-Core does not read it; use bucket_size",
    "param_name_patterns_for_fp32_local_accumulation": "its float32 gradients would stay on the GPU of an offloaded model; use "
    "grad_reduce_in_fp32=true, the default",
    "fp8_param_gather": _WEIGHTS,
    "fp4_param_gather": _WEIGHTS,
    "reuse_grad_buf_for_mxfp8_param_ag": _WEIGHTS,
    "delay_wgrad_compute": "gradients must be complete when the backward pass of their layer ends, so that their reduction can "
    "start; remove it",
    "nccl_ub": "NCCL would keep the gradient buffers, which an offloaded model releases; remove it",
    "disable_symmetric_registration": "it acts only with nccl_ub, which mrl does not use; remove it",
    "data_parallel_sharding_strategy": _FSDP,
    "outer_dp_sharding_strategy": _FSDP,
    "gradient_reduce_div_fusion": _FSDP,
    "suggested_communication_unit_size": _FSDP,
    "keep_fp8_transpose_cache": _FSDP,
}
"""Field of DistributedDataParallelConfig that a user cannot set -> the reason, or what a user must do instead."""

OPTIMIZER_RESERVED: dict[str, str] = {
    "lr": "use {section}.lr",
    "min_lr": "use {section}.lr_min",
    "decoupled_lr": "all parameters have the learning rate {section}.lr; remove it",
    "decoupled_min_lr": "all parameters have the learning rate {section}.lr; remove it",
    "weight_decay": "use {section}.weight_decay",
    "adam_beta1": "use {section}.betas",
    "adam_beta2": "use {section}.betas",
    "adam_eps": "use {section}.eps",
    "clip_grad": "use {section}.clip_grad",
    "grad_norm_skip_threshold": "mrl takes every optimizer step whose gradient is finite; use {section}.clip_grad",
    "optimizer": "mrl trains with AdamW; remove it",
    "fp8_recipe": "use megatron.fp8_recipe",
    "fp16": "use model.dtype",
    "bf16": "use model.dtype",
    "params_dtype": "use model.dtype",
    "reuse_grad_buf_for_mxfp8_param_ag": _WEIGHTS,
    **dict.fromkeys(("use_precision_aware_optimizer", "store_param_remainders"), _STATE),
    **dict.fromkeys(("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), _STATE),
    **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload_fraction", "pin_cpu_grads", "pin_cpu_params"), _STATE),
    **dict.fromkeys(("use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"), _STATE),
    **dict.fromkeys(("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _SCALE),
    "use_distributed_optimizer": "mrl always distributes the optimizer state over the replicas; remove it",
    "use_layer_wise_distributed_optimizer": _ADAM,
    "overlap_param_gather": "the weights must be complete before the next pass; remove it",
    "overlap_param_gather_with_optimizer_step": "the weights must be complete before the next pass; remove it",
    "log_num_zeros_in_grad": "mrl has no metric for it; remove it",
    "barrier_with_L1_time": "mrl has timers of its own (tracking.timeline); remove it",
    "timers": "mrl has timers of its own (tracking.timeline); remove it",
    "optimizer_cuda_graph": "each optimizer step gets its learning rate from outside the graph; remove it",
}
"""Field of OptimizerConfig that a user cannot set -> the reason, or what a user must do instead."""
_RESERVED_PREFIXES = {
    "sgd_": _ADAM, "muon_": _ADAM, "lion_": _ADAM, "soap_": _ADAM, "adaptive_muon_": _ADAM,
    "fsdp_": _FSDP, "megatron_fsdp_": _FSDP, "use_megatron_fsdp": _FSDP, "use_custom_fsdp": _FSDP,
}  # fmt: skip
"""Prefix of field names -> why a user cannot set fields with this prefix."""

# _DDP and _OPTIMIZER: arguments of `annotations_of`. _TYPES: type annotation of a field -> types that the value may have.
_DDP = ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig")
_OPTIMIZER = ("optimizer/optimizer_config.py", "OptimizerConfig")
_TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


@cache
def annotations_of(file: str, class_name: str) -> dict[str, str]:
    """Return field name -> type annotation for a dataclass of Megatron-Core. `file`: path in the package megatron.core."""
    spec = find_spec("megatron")
    found: dict[str, str] = {}
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / "core" / file
        for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
                found |= {field.target.id: ast.unparse(field.annotation) for field in fields}  # type: ignore[missing-attribute]
    assert found, f"parallel/trainer_config.py does not find {class_name} in Megatron's source"
    return found


def settings_key_of(name: str) -> str | None:
    """Return the key under which the field `name` of Megatron can be set, such as trainer.ddp.NAME; None if there is none."""
    for key, source in (("trainer.ddp", _DDP), ("optim.megatron", _OPTIMIZER)):
        if name in annotations_of(*source):
            return f"{key}.{name}"
    return None


def check_ddp_settings(settings: Mapping[str, Any], key: str, overlap: bool | None) -> None:
    """Raise ValueError if `settings` has a field or value that DistributedDataParallelConfig or mrl does not allow.

    `key`: config key of `settings`. `overlap`: value of trainer.overlap_grad_reduce (None: the default for the device).
    """
    for name, value in settings.items():
        _check(name, value, key, _DDP, DDP_RESERVED)
    if settings.get("bucket_size") and overlap is False:
        raise ValueError(
            f"{key}.bucket_size={settings['bucket_size']}: there is only one bucket without overlap; remove it, or "
            "set trainer.overlap_grad_reduce=true."
        )
    if settings.get("reduce_scatter_with_fp32_accumulation") and settings.get("grad_reduce_in_fp32", True):
        raise ValueError(
            f"{key}.reduce_scatter_with_fp32_accumulation=true: gradients are reduced in float32 already; remove it, or set "
            f"{key}.grad_reduce_in_fp32=false."
        )


def check_optimizer_settings(settings: Mapping[str, Any], section: str) -> None:
    """Raise ValueError if `settings` has a field or value that Megatron's OptimizerConfig or mrl does not allow.

    `section`: config section of the optimizer, such as critic.optim. `settings` is the value of its key `megatron`.
    """
    reserved = {name: reason.format(section=section) for name, reason in OPTIMIZER_RESERVED.items()}
    for name, value in settings.items():
        _check(name, value, f"{section}.megatron", _OPTIMIZER, reserved)


def _check(name: str, value: Any, key: str, source: tuple[str, str], reserved: Mapping[str, str]) -> None:
    fields = annotations_of(*source)
    if name not in fields:
        near, other = difflib.get_close_matches(name, fields, n=1), settings_key_of(name)
        hint = f"; use {other}" if other else f"; did you mean {key}.{near[0]}?" if near else ""
        raise ValueError(f"{key}.{name} is not a field of Megatron's {source[1]}{hint}")
    by_prefix = (reason for prefix, reason in _RESERVED_PREFIXES.items() if name.startswith(prefix))
    if reason := reserved.get(name) or next(by_prefix, None):
        raise ValueError(f"{key}.{name}={value!r} cannot be set: {reason}.")
    annotation = fields[name]
    inner = annotation.removeprefix("Optional[").removesuffix("]")
    if inner not in _TYPES:
        raise ValueError(
            f"{key}.{name}={value!r} cannot be set: a config cannot express the type {annotation}; remove it."
        )
    if value is None and inner != annotation:
        return
    if not isinstance(value, _TYPES[inner]) or (isinstance(value, bool) and inner != "bool"):
        raise ValueError(f"{key}.{name}={value!r}: expected {inner}{' or null' * (inner != annotation)}.")
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
        raise ValueError(f"{key}.{name}={value!r}: expected a number greater than 0.")
