"""What a user chooses about the optimizer: pure, so that the driver needs no Megatron."""

from dataclasses import dataclass
from math import cos, pi, sqrt

SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019), gradient clipping and a learning-rate schedule."""

    lr: float = 1e-6  # learning rate after warm-up
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest global gradient norm; 0 turns clipping off
    warmup_steps: int = 0  # optimizer steps of linear warm-up from 0
    lr_schedule: str = "constant"  # after the warm-up
    lr_decay_steps: int = 0  # optimizer steps, warm-up included, after which the learning rate is lr_min
    lr_min: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"optimizer.lr={self.lr}: a learning rate must be positive.")
        for name in ("eps", "weight_decay", "clip_grad", "warmup_steps", "lr_decay_steps", "lr_min"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name}={getattr(self, name)}: must be 0 or more.")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optimizer.betas={self.betas}: each must be in [0, 1).")
        if self.lr_schedule not in SCHEDULES:
            raise ValueError(f"lr_schedule={self.lr_schedule!r}; expected one of {', '.join(SCHEDULES)}.")
        if self.lr_schedule != "constant" and self.lr_decay_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_decay_steps={self.lr_decay_steps}: lr_schedule={self.lr_schedule} needs more steps than "
                f"warmup_steps={self.warmup_steps}; name the run's number of optimizer steps."
            )
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min={self.lr_min} is above lr={self.lr}.")

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0-based)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup_steps) / (self.lr_decay_steps - self.warmup_steps))
        return self.lr_min + (self.lr - self.lr_min) * _left(self.lr_schedule, done)


def _left(schedule: str, done: float) -> float:
    """The share of the way from lr_min to lr that is left when `done` of the decay is over."""
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":  # SGDR, Loshchilov and Hutter 2017, eq. 5, one cycle
        return 0.5 * (1.0 + cos(pi * done))
    drop = 0.2  # warmup-stable-decay: constant, then 1 - sqrt over the last fifth (Haegele et al. 2024, section 4)
    return 1.0 if done <= 1 - drop else 1.0 - sqrt((done - (1 - drop)) / drop)
