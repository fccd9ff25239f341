"""What a critic has where a language model has its output layer."""

import torch
from torch import Tensor


class ValueHead(torch.nn.Module):
    """One number per token, value = w . h + b, whole on every rank; starts at zero, so that a new critic predicts 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]
