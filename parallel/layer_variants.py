"""Variants of three modules of Megatron: self-attention, transformer layer, and experts.

The variants have norms over the queries or keys of all heads together, norms after the attention and after the MLP, another
rotary embedding, scaled queries, or experts with biases. In the shapes of this module, L is the number of tokens on this rank,
n and g are the numbers of query heads and of key/value heads on this rank, and d is the number of channels per head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from parallel import groups
from parallel.attention import sharded_along_dim_0
from parallel.packing import PackedSequences
from parallel.rope import QueryScaling


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over the queries, or the keys, of all heads together. Each tensor-parallel rank has some heads and their weights.

    The mean of squares is over all heads, so an all-reduce adds up the sums of squares of the ranks.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, group: ProcessGroup) -> None:
        super().__init__()
        self.width, self.group, self.eps = num_heads * config.kv_channels, group, config.layernorm_epsilon
        self.weight = torch.nn.Parameter(torch.ones(self.width // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize queries [L, 1, n, d] or keys [L, 1, g, d]."""
        rows = heads.flatten(-2)
        return _NormOverRanks.apply(rows, self.weight, self.eps, self.width, self.group).view(heads.shape)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Return the weight as Megatron's checkpoints need it: sharded along dim 0."""
        return sharded_along_dim_0(self, self.group, prefix, sharded_offsets, metadata)


class _NormOverRanks(torch.autograd.Function):
    """RMSNorm of rows whose columns are distributed over the ranks of a group, computed in float32 or in a wider dtype.

    The forward pass saves its inputs and one number per row.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, eps: float, width: int, group: ProcessGroup) -> Tensor:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        inverse = torch.rsqrt(_sum_over_ranks(wide.square().sum(-1, keepdim=True), group) / width + eps)
        ctx.save_for_backward(rows, weight, inverse)
        ctx.width, ctx.group = width, group
        return (wide * inverse * weight).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weight, inverse = ctx.saved_tensors
        normed, grad = rows.to(inverse.dtype) * inverse, grad.to(inverse.dtype)
        weight_grad = (grad * normed).flatten(0, -2).sum(0)
        normed_grad = grad * weight
        mean = _sum_over_ranks((normed_grad * normed).sum(-1, keepdim=True), ctx.group) / ctx.width
        rows_grad = (normed_grad - normed * mean) * inverse
        return rows_grad.to(rows.dtype), weight_grad.to(weight.dtype), None, None, None


def _sum_over_ranks(partial_sums: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(partial_sums, group=group)
    return partial_sums


class VariantSelfAttention(SelfAttention):
    """Megatron's self-attention with further options: ProjectionNorm, another rotary embedding, and scaled queries.

    `num_interleaved_components`: among the first c components of a head, where c is this number, the rotary embedding rotates
    the pairs (2i, 2i + 1). Megatron rotates the pairs (i, i + c / 2), so the components are reordered in queries and keys. The
    products of queries and keys do not depend on the order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args,
        projection_norms: bool = False,  # whether queries and keys have a ProjectionNorm
        rotary: RotaryEmbedding | None = None,  # None: the rotary embedding of the model; layers share the object
        num_interleaved_components: int = 0,
        query_scaling: QueryScaling | None = None,  # None: queries are not scaled
        **kwargs,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.rotary, self.query_scaling = rotary, query_scaling
        self.num_interleaved_components = num_interleaved_components
        if projection_norms:
            group = self.pg_collection.tp
            self.q_projection_norm = ProjectionNorm(config, config.num_attention_heads, group)
            self.k_projection_norm = ProjectionNorm(config, config.num_query_groups, group)
        self.has_projection_norms = projection_norms

    def get_query_key_value_tensors(self, *args, **kwargs):
        """Return query [L, 1, n, d], key and value [L, 1, g, d], with the norms, order and scaling of this variant."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        if self.has_projection_norms:
            query, key = self.q_projection_norm(query), self.k_projection_norm(key)
        if self.num_interleaved_components:
            query, key = (_even_components_first(states, self.num_interleaved_components) for states in (query, key))
        if self.query_scaling is not None:
            query = query * self.query_scaling.factors(self._positions).to(query.dtype)[:, None, None, None]
        return query, key, value

    def forward(
        self,
        hidden_states: Tensor,
        *args,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (attention output, bias), as Megatron's self-attention does."""
        if self.rotary is not None:
            length = self.rotary.get_rotary_seq_len(None, None, hidden_states, self.config, packed_seq_params)
            rotary_pos_emb = self.rotary(length, packed_seq=True)
        if self.query_scaling is not None:
            assert isinstance(packed_seq_params, PackedSequences), (
                f"expected PackedSequences, got {type(packed_seq_params)}"
            )
            self._positions = packed_seq_params.position_ids
        return super().forward(
            hidden_states, *args, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, **kwargs
        )


def _even_components_first(heads: Tensor, count: int) -> Tensor:
    """Reorder the first `count` components of heads [..., d]: first those with even indices, then those with odd indices."""
    return torch.cat([heads[..., 0:count:2], heads[..., 1:count:2], heads[..., count:]], -1)


class PostNormLayer(TransformerLayer):
    """Megatron's layer with a norm after the attention and a norm after the MLP, each before the residual is added."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, *args, post_norm: Any, **kwargs
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        build = partial(post_norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = build(), build()
        self.self_attn_bda = partial(_add_normed, self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda = partial(_add_normed, self.post_mlp_layernorm, self.mlp_bda)


def _add_normed(norm: torch.nn.Module, bias_dropout_add: Any, training: bool, fused: bool) -> Any:
    """Return a function that adds the bias to the output of a block, normalizes the sum, and then adds the residual."""
    add = bias_dropout_add(training, fused)

    def add_normed(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return add((norm(output if bias is None else output + bias), None), residual, dropout)

    return add_normed


def biased_down_projection(linear: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return a constructor for down projections of experts: of the ranks that share an expert, only one adds the bias.

    If expert tensor parallelism splits an expert, every rank of the group has the whole bias, and Megatron sums the outputs of
    the ranks. So only the first rank may add the bias. `linear`: class of a row-parallel matrix of one expert or of several.
    """

    def build(*args: Any, bias: bool, **kwargs: Any) -> torch.nn.Module:
        module = linear(*args, bias=True, **kwargs)
        # With this flag, Megatron's layer leaves out its own communication. Without the flag, on a rank that has the whole
        # matrix, the output is a view from an autograd function, and torch forbids to add a bias to it in place.
        module.explicit_expert_comm = True  # type: ignore[bad-assignment]
        for name, parameter in module.named_parameters():
            if name.startswith("bias"):
                # Megatron 0.19 sums the gradient of a parameter over the tensor-parallel ranks if this attribute is true. For a
                # bias, it would add the gradients of different experts.
                parameter.sequence_parallel = False  # type: ignore[missing-attribute]
        if groups.etp_group().rank() > 0:
            module.register_forward_hook(_without_bias)
        return module

    return build


def _without_bias(module: torch.nn.Module, args: Any, output_and_bias: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Replace the bias of a matrix, or the biases of several matrices, with zeros."""
    output, bias = output_and_bias
    return output, [_Zeros.apply(one) for one in bias] if isinstance(bias, list | tuple) else _Zeros.apply(bias)


class _Zeros(torch.autograd.Function):
    """Zeros in place of a bias that another rank adds. The bias still gets its gradient, so that all ranks keep equal biases."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
