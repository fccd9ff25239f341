"""What a user chooses about the optimizer: pure, so that the driver needs no Megatron."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019) and gradient clipping."""

    lr: float = 1e-6  # learning rate after warm-up
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # largest global gradient norm; 0 turns clipping off
    warmup_steps: int = 0  # optimizer steps of linear warm-up from 0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr={self.lr}: a learning rate must be positive.")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"optimizer.betas={self.betas}: each must be in [0, 1).")

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0-based)."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))
