"""Builds a tiny random model of transformers, and records the inputs and outputs of its modules for one sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from models.derive.tiny_config import build_config

NUM_TOKENS = 24  # more than 16, the original_max_position_embeddings of a tiny config with scaled RoPE


def num_parameters(fields: dict[str, Any]) -> int:
    """Return the number of parameters of the model whose config has these fields. A tied embedding counts once.

    The parameters are not allocated.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(build_config(fields))
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class Call:
    """Input and output of one module in a forward pass, without the batch dimension. T is the number of tokens."""

    x: Tensor  # [T, ...]
    y: Tensor  # [T, ...]


class TinyModel:
    """A random model of transformers, its checkpoint tensors, and a recorded forward pass."""

    def __init__(self, fields: dict[str, Any], seed: int = 0) -> None:
        """Build the model of a tiny config with these fields, in float32. Norm weights and biases are random, too."""
        torch.manual_seed(seed)
        logging.disable_progress_bar()
        self.fields = fields
        self.config: PreTrainedConfig = build_config(fields)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
            self.config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        _randomize(self.model)
        with TemporaryDirectory() as folder:
            self.save(Path(folder))
            self.tensors: dict[str, Tensor] = load_file(Path(folder) / "model.safetensors")

    def save(self, folder: Path) -> None:
        """Write the model to `folder` in Hugging Face format."""
        self.model.save_pretrained(folder, max_shard_size="10GB")

    @cached_property
    def all_fields(self) -> dict[str, Any]:
        """The fields of the config, with the values that transformers computed for absent fields."""
        return self.config.to_dict() | self.fields

    @cached_property
    def tokens(self) -> Tensor:
        """Random tokens [T]."""
        return torch.randint(self.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The first call of each module in a forward pass, by the name of the module."""
        return self._recorded[0]

    @cached_property
    def rotary(self) -> list[tuple[Tensor, Tensor]]:
        """One pair (cosines, sines) per call of a rotary embedding; both have the shape [T, rotated components]."""
        return self._recorded[1]

    @cached_property
    def logits(self) -> Tensor:
        """Logits [T, vocabulary]."""
        with torch.no_grad():
            return self.model(self.tokens[None]).logits[0]

    @cached_property
    def _recorded(self) -> tuple[dict[str, Call], list[tuple[Tensor, Tensor]]]:
        calls: dict[str, Call] = {}
        rotary: list[tuple[Tensor, Tensor]] = []

        def hook(name: str) -> Callable[..., None]:
            def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
                x = next((a for a in (*args, kwargs.get("hidden_states")) if isinstance(a, Tensor)), None)
                is_pair = isinstance(output, tuple) and len(output) == 2 and all(isinstance(o, Tensor) for o in output)
                if "rotary" in name.rpartition(".")[2] and is_pair:
                    rotary.append((_flat(output[0]), _flat(output[1])))
                y = output[0] if isinstance(output, tuple) else output
                if x is not None and isinstance(y, Tensor) and name not in calls:
                    calls[name] = Call(_flat(x).clone(), _flat(y).clone())

            return keep

        handles = [
            module.register_forward_hook(hook(name), with_kwargs=True)
            for name, module in self.model.named_modules()
            if name
        ]
        with torch.no_grad():
            self.model(self.tokens[None])
        for handle in handles:
            handle.remove()
        return calls, rotary

    @cached_property
    def owners(self) -> dict[str, str]:
        """Name of a tensor in the checkpoint -> name of the parameter or buffer of `model` that has its values.

        Some names differ, because transformers renames some tensors, and stacks experts.
        """
        memory = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        found = {
            name: name for name in self.tensors if name in memory and memory[name].shape == self.tensors[name].shape
        }
        for name, tensor in self.tensors.items():
            if name not in found and (owner := _owner(tensor, memory)):
                found[name] = owner
        return found


def _owner(tensor: Tensor, memory: dict[str, Tensor]) -> str | None:
    """Return the name of the tensor in `memory` that equals `tensor`, or that contains `tensor` in a stack of experts.

    In a stack, the function looks only for the first row of `tensor`. So it also finds a `tensor` that is a part of a stacked
    matrix, such as the gate in a matrix of gate and up.
    """
    for name, whole in memory.items():
        if whole.shape == tensor.shape and whole.equal(tensor):
            return name
        if whole.dim() == tensor.dim() + 1 and whole.shape[-1] == tensor.shape[-1]:
            rows = whole.reshape(-1, whole.shape[-1])
            if (rows == tensor.reshape(-1, tensor.shape[-1])[0]).all(-1).any():
                return name
    return None


def _flat(tensor: Tensor) -> Tensor:
    """Return the tensor without a batch dimension of size 1: [1, T, ...] -> [T, ...]. A tensor [T, n] stays unchanged."""
    tensor = tensor.detach()
    return tensor[0] if tensor.dim() > 2 and tensor.shape[0] == 1 else tensor


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Add noise to all vectors (except inv_freq, the frequencies of RoPE), and also to biases that are matrices.

    Vectors are, for example, norm weights, biases, sinks and correction biases. transformers sets most of them to 0 or 1.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name and tensor.dim() == 1 and tensor.is_floating_point():
            tensor.add_(torch.randn_like(tensor) * (0.05 if "correction" in name else 0.2))
        if "bias" in name and tensor.dim() == 2:
            tensor.add_(torch.randn_like(tensor) * 0.2)
