"""Names of parameters in the whole model, which do not depend on the layout."""

import re
from collections.abc import Iterator
from itertools import chain

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from parallel import groups

# Megatron has two naming schemes for experts. Sequential experts are separate modules:
# `experts.local_experts.3.linear_fc1.weight`. Grouped experts are parameters of one module: `experts.linear_fc1.weight3`. The
# LoRA adapters of grouped experts are a list: `experts.linear_fc1.lora.3.gate_proj.lora_a`.
_SEQUENTIAL = re.compile(r"experts\.local_experts\.(?P<expert>\d+)\.(?P<matrix>linear_fc\d)\.(?P<rest>.*)$")
_GROUPED = re.compile(r"experts\.(?P<matrix>linear_fc\d)\.(?P<rest>weight|bias|lora\.)(?P<expert>\d+)(?P<end>$|\..*)")


def global_names(chunk: GPTModel, local_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the whole model, tensor) for the tensors of a virtual stage.

    The names contain the indices of layers and experts in the whole model. The names of sequential experts and of grouped experts
    have the same form. The tensors are all parameters, and the buffers with the correction biases of the routers. (A Hugging
    Face checkpoint has no other buffers.) `local_experts`: number of experts of a layer on this rank.
    """
    first_expert = groups.ep_group().rank() * local_experts
    layer_of = {str(local): layer.layer_number - 1 for local, layer in enumerate(chunk.decoder.layers)}
    biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
    for name, param in chain(chunk.named_parameters(), biases):
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"decoder.layers.{layer_of[local]}.{rest}"
        yield _global_expert_name(name, first_expert), param


def _global_expert_name(name: str, first_expert: int) -> str:
    """Return `name` in the form `experts.3.linear_fc1.weight` if it belongs to an expert, otherwise unchanged."""
    if found := _SEQUENTIAL.search(name):
        rest = found["rest"]
    elif found := _GROUPED.search(name):
        rest = found["rest"] + found["end"].removeprefix(".")
    else:
        return name
    return f"{name[: found.start()]}experts.{first_expert + int(found['expert'])}.{found['matrix']}.{rest}"
