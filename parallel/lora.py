"""LoRA: low-rank adapters for the linear layers of a Megatron model whose own weights are frozen.

A linear layer with an adapter computes y = W x + (alpha / rank) B A x (Hu et al. 2021, arXiv:2106.09685, section 4.1). Only
A [rank, in] and B [out, rank] are trained. Megatron fuses several Hugging Face matrices into one linear layer, such as the
projections of queries, keys and values. Each of these matrices has its own A and B. In shapes, `in` and `out` are the numbers of
inputs and outputs, on this rank, of the linear layer or of one of its matrices. L is the number of tokens of this
context-parallel rank; under sequence parallelism, the input or the output has only L/tp of them.

The adapter is split over tensor-parallel ranks in the same way as its linear layer:

    layer split by output rows    A is replicated, and B has the rows of this rank. Under sequence parallelism, A x is gathered.
    layer split by input columns  A has the columns of this rank, and B is replicated. A x is summed over the ranks.
    layer not split               A and B are replicated.

So the ranks communicate only `rank` elements for each token and each Hugging Face matrix. Under sequence parallelism, the
gradient of a replicated matrix comes from the tokens of this rank only. Therefore the matrix has Megatron's mark
`sequence_parallel`, and Megatron sums its gradient over the tensor-parallel ranks.

A routed expert is split over the expert-tensor-parallel ranks in the same way. Megatron's dispatcher gathers the tokens of the
experts and sums the outputs, so the adapter of an expert communicates nothing in the forward pass. The backward pass sums the
gradients of a replicated matrix over the expert-tensor-parallel ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from parallel import groups
from parallel.megatron_layers import gather_sequence
from parallel.param_names import global_names
from parallel.trainer_config import MAX_MERGED_ELEMENTS

ADAPTER = "lora"  # name of the adapter among the modules of its linear layer


def initial_a(name: str, rank: int, width: int, seed: int) -> Tensor:
    """Return the initial matrix A [rank, width] of the Hugging Face matrix `name`, float32. It is the same in every layout.

    As in PEFT, it is Kaiming-uniform with slope sqrt(5): uniform between -1 / sqrt(width) and 1 / sqrt(width).
    """
    generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return torch.empty(rank, width).uniform_(-(width**-0.5), width**-0.5, generator=generator)


@dataclass(frozen=True)
class LinearSplit:
    """How the linear layer of an adapter is split over tensor-parallel ranks."""

    axis: int | None  # dim of the weight [out, in] that is split; None: every rank has the whole weight
    # Hugging Face matrix -> number of its output rows on this rank; the order of the matrices is the order that `merge` needs
    rows: Mapping[str, int]
    # combines the rows of the matrices into the rows of the linear layer (ParamMapping.merge)
    merge: Callable[[Sequence[Tensor]], Tensor]
    sequence_parallel: bool
    is_expert: bool = False  # whether the layer belongs to a routed expert


class LowRankPair(torch.nn.Module):
    """This rank's shards of the matrices A [rank, in] and B [out, rank] of one Hugging Face matrix."""

    def __init__(self, a: Tensor, b: Tensor, split: LinearSplit) -> None:
        super().__init__()
        self.lora_a, self.lora_b = torch.nn.Parameter(a), torch.nn.Parameter(b)
        for param, axis in ((self.lora_a, 1), (self.lora_b, 0)):
            if split.axis == axis:
                set_tensor_model_parallel_attributes(param, True, axis, 1)
            else:
                param.sequence_parallel = split.sequence_parallel and not split.is_expert  # type: ignore[missing-attribute]
            param.allreduce = not split.is_expert  # type: ignore[missing-attribute]  # selects the data-parallel group


class LoraAdapter(torch.nn.Module):
    """Adapter of one linear layer. It has a LowRankPair for each adapted Hugging Face matrix of the layer."""

    def __init__(
        self,
        pairs: Mapping[str, LowRankPair],
        split: LinearSplit,
        scale: float,
        norm: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """`pairs`: Hugging Face matrix -> its pair. `scale`: alpha / rank.

        `norm`: function of the input and the weight of the RMSNorm that the linear layer contains. None: the layer has no norm.
        """
        super().__init__()
        self.split, self.scale, self.norm = split, scale, norm
        for name, pair in pairs.items():
            self.add_module(name, pair)
        self._pairs = dict(pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Return the change [L, 1, out] of the linear layer's output for the input `x` [L, 1, in], which is already normalized.

        In a routed expert, the shapes are [tokens of the expert, out] and [tokens of the expert, in].
        """
        a, b = self._fused()
        if self.split.is_expert:
            a, b = (_summed_gradient(a), b) if self.split.axis == 0 else (a, _summed_gradient(b))
            return F.linear(self.scale * F.linear(x, a), b)
        low = self.scale * F.linear(x, a)
        if self.split.axis == 0:
            low = gather_sequence(low, self.split.sequence_parallel)
        elif self.split.axis == 1 and self.split.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self.split.axis == 1:
            low = reduce_from_tensor_model_parallel_region(low)
        return F.linear(low, b)

    def _fused(self) -> tuple[Tensor, Tensor]:
        """Return A [n * rank, in] and B [out, n * rank] for all n adapted matrices of the linear layer. `rank`: rank of LoRA.

        Each matrix has `rank` columns of B. A row of B belongs to one matrix, and is 0 outside the columns of this matrix.
        """
        a = torch.cat([pair.lora_a for pair in self._pairs.values()])
        columns, start, parts = a.size(0), 0, []
        for name, rows in self.split.rows.items():
            if name in self._pairs:
                b = self._pairs[name].lora_b
                parts.append(F.pad(b, (start, columns - start - b.size(1))))
                start += b.size(1)
            else:
                parts.append(a.new_zeros(rows, columns))
        return a, self.split.merge(parts)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return W + (alpha / rank) B A in the dtype of W, for this rank's shard W of the linear layer.

        The sum is computed in float32, for some columns of W at a time, so that the float32 tensors need little memory.
        """
        merged = torch.empty_like(weight)
        width = max(1, MAX_MERGED_ELEMENTS // weight.size(0))
        for start in range(0, weight.size(1), width):
            columns = slice(start, start + width)
            merged[:, columns] = weight[:, columns].float() + self._product(columns)
        return merged

    def _product(self, columns: slice) -> Tensor:
        """Return these columns of (alpha / rank) B A for the whole linear layer, float32. Matrices without an adapter give 0."""
        parts = []
        for name, rows in self.split.rows.items():
            if name in self._pairs:
                pair = self._pairs[name]
                parts.append(self.scale * (pair.lora_b.float() @ pair.lora_a[:, columns].float()))
            else:
                a = next(iter(self._pairs.values())).lora_a[:, columns]
                parts.append(torch.zeros(rows, a.size(1), device=a.device))
        return self.split.merge(parts)


def _summed_gradient(matrix: Tensor) -> Tensor:
    """Return `matrix`. The backward pass sums its gradient over the expert-tensor-parallel ranks."""
    return copy_to_tensor_model_parallel_region(matrix, group=groups.etp_group())


class GroupedLoraAdapter(torch.nn.ModuleList):
    """Adapters of a grouped linear layer, which has one matrix for each expert of this rank: one adapter for each expert."""

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Map the inputs [tokens of all experts, in] to the changes of the outputs. The tokens are ordered by expert."""
        parts = x.split([int(count) for count in tokens_per_expert])
        return torch.cat([adapter(part) for adapter, part in zip(self, parts, strict=True)])


def attach(linear: torch.nn.Module, adapter: LoraAdapter | GroupedLoraAdapter) -> None:
    """Add the output of `adapter` to the output of `linear`, a linear layer of Megatron or of Transformer Engine."""
    linear.add_module(ADAPTER, adapter)
    linear.register_forward_hook(_add_adapter_output)


def _add_adapter_output(linear: torch.nn.Module, args: tuple[Tensor, ...], output: tuple) -> tuple:
    (x, *tokens_per_expert), adapter = args, linear.get_submodule(ADAPTER)
    if isinstance(adapter, LoraAdapter) and adapter.norm is not None:
        # The layer does not return its normed input, so the norm is computed again.
        x = adapter.norm(x, linear.get_parameter("layer_norm_weight"))
    return output[0] + adapter(x, *tokens_per_expert), *output[1:]


def require_input_gradients(embedding: torch.nn.Module) -> None:
    """Let the output of a frozen embedding require a gradient.

    Otherwise, no input of the first recomputed layers would require a gradient, and Megatron's activation recomputation would
    compute no gradients of their adapters.
    """

    def hook(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() else output

    embedding.register_forward_hook(hook)


def sharded_adapters(model: GPTModel) -> dict[str, ShardedTensor]:
    """Return a description of each adapter matrix for a distributed checkpoint. The keys of the dict are names in `model`.

    In the checkpoint, the key of a matrix is its name in the whole model, so any layout can load it.
    """
    local_experts = (model.config.num_moe_experts or 0) // groups.ep_group().size()
    name_of = {param: name for name, param in model.named_parameters()}
    adapters = [(key, param) for key, param in global_names(model, local_experts) if is_adapter(key)]
    return {name_of[param]: _sharded_adapter(key, param) for key, param in adapters}


def _sharded_adapter(key: str, param: Tensor) -> ShardedTensor:
    is_expert = not param.allreduce  # type: ignore[missing-attribute]  # set by LowRankPair
    tp, dp = (groups.etp_group(), groups.expert_dp_group()) if is_expert else (groups.tp_group(), groups.dp_cp_group())
    is_sharded = getattr(param, "tensor_model_parallel", False)
    offsets = [(param.partition_dim, tp.rank(), tp.size())] if is_sharded else []  # type: ignore[missing-attribute]
    replica = (0, 0 if is_sharded else tp.rank(), dp.rank())
    return ShardedTensor.from_rank_offsets(key, param, *offsets, replica_id=replica)


def is_adapter(name: str) -> bool:
    """Whether the parameter with this name in a Megatron model belongs to an adapter."""
    return f".{ADAPTER}." in name


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether `model` has adapters. Its own weights are then frozen."""
    return any(isinstance(module, LoraAdapter) for module in model.modules())
