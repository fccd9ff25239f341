"""Layer modules for machines without Transformer Engine, under Transformer Engine's parameter names.

Same names on every device means one checkpoint layout and one conversion table.
"""

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from parallel.attention import PackedAttention
from parallel.capabilities import capabilities
from parallel.packing import PackedSequences
from parallel.rope import Rope


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked for Megatron's sequence-parallel gradient all-reduce."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel projection; owns `layer_norm_weight` as Transformer Engine's fused layer does."""

    def __init__(self, input_size: int, output_size: int, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, *args, **kwargs):
        normed = F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class PackedRotaryEmbedding(RotaryEmbedding):
    """RoPE angles looked up per token of the pack, so that Megatron applies them in one operation, not per sequence."""

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope.dim, 1.0, use_cpu_initialization=True)  # Megatron moves them when it first uses them
        self.inv_freq = rope.inv_freq()

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, config, packed=None, **unused
    ) -> int:
        assert isinstance(packed, PackedSequences), f"a pack is needed, got {type(packed)}"
        self._packed = packed
        return int(packed.max_position) + 1

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **unused) -> Tensor:
        """Angles [L, 1, d] of the pack that `get_rotary_seq_len` saw."""
        return self.get_emb(max_seq_len, offset)[self._packed.position_ids, 0]


def whole_sequence(hidden: Tensor, sequence_parallel: bool, *, replicated: bool = False) -> Tensor:
    """The hidden states [L, H] of all tokens, for a head; they come as [L/tp, H] under sequence parallelism.

    `replicated`: the head computes the same on every tensor-parallel rank. Otherwise each rank has a part of the vocabulary,
    and so a part of the gradient; the parts are added up.
    """
    if sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=not replicated)
    return hidden if replicated else copy_to_tensor_model_parallel_region(hidden)


class TorchSpecProvider(LocalSpecProvider):
    """Names the modules above where Megatron's Transformer Engine provider names NVIDIA's."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False):
        return RMSNorm

    def core_attention(self) -> type:
        return PackedAttention


def spec_provider() -> BackendSpecProvider:
    """NVIDIA's Transformer Engine modules where they are installed on a GPU machine, plain torch modules elsewhere."""
    if capabilities().transformer_engine:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # heavy

        return TESpecProvider()
    return TorchSpecProvider()
