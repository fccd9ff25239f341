"""Adds LoRA adapters to this rank's part of a Megatron model."""

from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from models.conversion.hf_reader import HFWeights
from models.conversion.lora_mapping import RANK, adapted_matrices, adapter_mappings, can_have_adapter, matrix_name
from models.conversion.mapping import ParamMapping
from models.conversion.weight_bridge import ParamBridge, WeightBridge
from parallel import groups
from parallel.lora import (
    GroupedLoraAdapter,
    LinearSplit,
    LoraAdapter,
    LowRankPair,
    attach,
    initial_a,
    require_input_gradients,
)
from parallel.megatron_layers import rms_norm
from parallel.param_names import global_names
from parallel.trainer_config import LoraConfig


def add_adapters(chunks: list[GPTModel], bridge: WeightBridge, lora: LoraConfig, seed: int) -> ParamBridge:
    """Freeze the weights in `chunks`, and add an adapter to each linear layer that `lora` selects.

    `chunks` are this rank's virtual stages, on their device and without a DistributedDataParallel wrapper. Afterwards, `bridge`
    exports merged weights. Returns a bridge between the adapters and tensors with the names of PEFT.
    """
    targets = adapted_matrices(bridge.rows, lora)
    rows = {row.megatron: row for row in bridge.rows if can_have_adapter(row, lora.experts)}
    prefixes = bridge.family.peft_prefixes
    mappings = [mapping for row in rows.values() for mapping in adapter_mappings(row, targets, prefixes)]
    sizes = bridge.sizes | {RANK: lora.rank}
    row_of_param = {param: rows[name] for name, param in bridge.params.items() if name in rows}
    row_of_param = {p: row for p, row in row_of_param.items() if any(matrix_name(name) in targets for name in row.hf)}
    for chunk in chunks:
        chunk.requires_grad_(False)
        if chunk.pre_process:
            require_input_gradients(chunk.embedding)
        for module in list(chunk.modules()):
            # one weight, or the weights of all experts of this rank in a grouped linear layer
            weights = [param for param in module.parameters(recurse=False) if param in row_of_param]
            has_norm = hasattr(module, "layer_norm_weight")
            built = [_build_adapter(chunk.config, has_norm, w, row_of_param[w], sizes, lora, seed) for w in weights]
            if built:
                attach(module, GroupedLoraAdapter(built) if hasattr(module, "weight0") else built[0])
                bridge.adapters.update(zip(weights, built, strict=True))
    names = {mapping.megatron for mapping in mappings}
    params = {name: p for chunk in chunks for name, p in global_names(chunk, bridge.local_experts) if name in names}
    adapters = ParamBridge(mappings, params, sizes, bridge.dims, bridge.num_experts)
    if lora.path:
        adapters.load(HFWeights(lora.path))
    return adapters


def _build_adapter(
    config: TransformerConfig,
    has_norm: bool,
    weight: torch.Tensor,
    row: ParamMapping,
    sizes: dict[str, int],
    lora: LoraConfig,
    seed: int,
) -> LoraAdapter:
    """Return the adapter of the linear layer with this weight: A is random and B is 0, so the model's outputs do not change.

    `has_norm`: whether the module of the layer also computes the norm of the layer's input. `row`: row of the weight in the
    family's table. `sizes`: Architecture.sizes and the rank of the adapters.
    """
    group = groups.tp_group() if row.expert is None else groups.etp_group()
    boxes = row.split_over_ranks(sizes, group.size())
    rows = {}
    for name, boxes_of in boxes.items():
        (box,) = boxes_of[group.rank() if len(boxes_of) > 1 else 0]  # see can_have_adapter: the tensor has one part
        rows[matrix_name(name)] = box.sizes[0]
    split = LinearSplit(
        row.axis, rows, partial(row.merge, sizes=sizes), config.sequence_parallel, row.expert is not None
    )
    pairs, mappings = {}, adapter_mappings(row, adapted_matrices([row], lora))
    for of_a, of_b in zip(mappings, mappings, strict=True):  # each matrix has two mappings, one after the other
        (shape_of_a,), (shape_of_b,) = (mapping.hf_shapes(sizes).values() for mapping in (of_a, of_b))
        rank, width = shape_of_a
        whole = initial_a(of_a.hf[0], rank, width, seed), torch.zeros(shape_of_b)
        a, b = (
            mapping.to_megatron([tensor], sizes, group.rank(), group.size()).to(weight, copy=True).contiguous()
            for mapping, tensor in zip((of_a, of_b), whole, strict=True)
        )
        pairs[of_a.megatron.split(".")[-2]] = LowRankPair(a, b, split)
    norm = partial(rms_norm, eps=config.layernorm_epsilon, zero_centered=config.layernorm_zero_centered_gamma)
    return LoraAdapter(pairs, split, lora.scale, norm if has_norm else None)
