"""Adds LoRA adapters to this rank's part of a Megatron model."""

from collections.abc import Iterator
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from models.conversion.hf_reader import HFWeights
from models.conversion.lora_mapping import RANK, adapted_matrices, adapter_mappings, can_have_adapter, matrix_name
from models.conversion.mapping import ParamMapping
from models.conversion.weight_bridge import ParamBridge, WeightBridge, global_names
from parallel import groups
from parallel.lora import LinearSplit, LoraAdapter, LowRankPair, attach, initial_a, require_input_gradients
from parallel.trainer_config import LoraConfig


def add_adapters(chunks: list[GPTModel], bridge: WeightBridge, lora: LoraConfig, seed: int) -> ParamBridge:
    """Freeze the weights in `chunks`, and add an adapter to each linear layer that `lora` selects.

    `chunks` are this rank's virtual stages, on their device and without a DistributedDataParallel wrapper. `bridge` exports
    merged weights afterwards. Returns a bridge between the adapters and tensors with the
    names of PEFT.
    """
    targets = adapted_matrices(bridge.rows, lora)
    rows = {row.megatron: row for row in bridge.rows if can_have_adapter(row)}
    mappings = [mapping for row in rows.values() for mapping in adapter_mappings(row, targets)]
    sizes = bridge.sizes | {RANK: lora.rank}
    row_of_param = {param: rows[name] for name, param in bridge.params.items() if name in rows}
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            require_input_gradients(chunk.embedding)
        for module, row in list(_linear_layers(chunk, row_of_param)):
            if any(matrix_name(name) in targets for name in row.hf):
                adapter = _build_adapter(chunk.config, module, row, sizes, lora, seed)
                attach(module, adapter)
                bridge.adapters[module.get_parameter("weight")] = adapter
    names = {mapping.megatron for mapping in mappings}
    params = {name: p for chunk in chunks for name, p in global_names(chunk, bridge.local_experts) if name in names}
    adapters = ParamBridge(mappings, params, sizes, bridge.dims)
    if lora.path:
        adapters.load(HFWeights(lora.path))
    return adapters


def _linear_layers(
    chunk: GPTModel, row_of_param: dict[torch.Tensor, ParamMapping]
) -> Iterator[tuple[torch.nn.Module, ParamMapping]]:
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight in row_of_param:
            yield module, row_of_param[weight]


def _build_adapter(
    config: TransformerConfig,
    linear: torch.nn.Module,
    row: ParamMapping,
    sizes: dict[str, int],
    lora: LoraConfig,
    seed: int,
) -> LoraAdapter:
    """Return the adapter of a linear layer: A is random and B is 0, so that the outputs of the model do not change."""
    weight, group = linear.get_parameter("weight"), groups.tp_group()
    boxes = row.split_over_ranks(sizes, group.size())
    rows = {matrix_name(name): own[group.rank() if len(own) > 1 else 0].sizes[0] for name, own in boxes.items()}
    split = LinearSplit(row.axis, rows, partial(row.merge, sizes=sizes), config.sequence_parallel)
    pairs, mappings = {}, adapter_mappings(row, adapted_matrices([row], lora))
    for of_a, of_b in zip(mappings, mappings, strict=True):  # each matrix has two mappings, one after the other
        (shape_of_a,), (shape_of_b,) = (mapping.hf_shapes(sizes).values() for mapping in (of_a, of_b))
        whole = initial_a(of_a.hf[0], *shape_of_a, seed), torch.zeros(shape_of_b)
        a, b = (
            mapping.to_megatron([tensor], sizes, group.rank(), group.size()).to(weight, copy=True).contiguous()
            for mapping, tensor in zip((of_a, of_b), whole, strict=True)
        )
        pairs[of_a.megatron.split(".")[-2]] = LowRankPair(a, b, split)
    norm_eps = config.layernorm_epsilon if hasattr(linear, "layer_norm_weight") else None
    return LoraAdapter(pairs, split, lora.scale, norm_eps)
