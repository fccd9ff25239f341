"""What a critic has where a language model has its output layer."""

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """One number per token, value = w . h + b, whole on every rank.

    A new one is normal with standard deviation 1 / sqrt(H + 1) and no bias (Huang, Liu and von Werra 2023, "The N
    Implementation Details of RLHF with PPO"), the same on every rank and under every layout.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        weight = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(0))
        self.weight = torch.nn.Parameter(weight / (hidden_size + 1) ** 0.5)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]
