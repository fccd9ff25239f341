"""Settings of a trainer that the driver also needs: optimizer, learning rates, LoRA, offload level and divergence.

This module does not import torch.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import cos, pi, sqrt
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
        "Number of optimizer steps, including the warm-up, at the end of which the learning rate is lr_min, or lr / 10 with "
        "linear_to_tenth. lr_schedule=constant ignores the key; every other schedule needs it.",
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


MERGED_ELEMENTS = 1 << 22
"""Largest number of elements of W + (alpha / rank) B A that are computed at a time, in float32."""


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
        "Folder of PEFT with the initial adapters. Default: random adapters that do not change the model's outputs.",
    )

    @property
    def scale(self) -> float:
        """Factor of the output of an adapter."""
        return self.alpha / self.rank


def _decay_factor(schedule: str, progress: float) -> float:
    """Return the fraction of `lr - lr_min` that remains after the fraction `progress` of the decay steps."""
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":  # one cycle of SGDR (Loshchilov and Hutter 2017, equation 5)
        return 0.5 * (1.0 + cos(pi * progress))
    decay = 0.2  # warmup-stable-decay: constant, then 1 - sqrt(x) in the last fifth (Haegele et al. 2024, section 4)
    return 1.0 if progress <= 1 - decay else 1.0 - sqrt((progress - (1 - decay)) / decay)
