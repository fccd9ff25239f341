"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packs, on Megatron's own.

Queries, keys and values of all heads are projected up from two short vectors of each token; a part of each key, which carries
the position, is one for all heads.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from parallel.modules import PackedRotaryEmbedding
from parallel.packing import PackedSequences
from parallel.rope import Rope


class DownProjection(torch.nn.Linear):
    """A projection that every tensor-parallel rank holds whole and applies to its part of the sequence."""

    def __init__(self, input_size: int, output_size: int, config: MLATransformerConfig) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[missing-attribute]

    def forward(self, input: Tensor) -> tuple[Tensor, None]:
        """Its output, and no bias: what Megatron's layers return."""
        return super().forward(input), None


class AmplifiedRotaryEmbedding(PackedRotaryEmbedding):
    """Angles of a pack and their amplitude, as Megatron takes them from YaRN in latent attention."""

    def __init__(self, rope: Rope) -> None:
        super().__init__(rope)
        self.amplitude = rope.amplitude

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **unused) -> tuple[Tensor, float]:
        """([L, 1, d] angles, what cosines and sines are multiplied by)."""
        return super().forward(max_seq_len, offset, packed_seq), self.amplitude


class PackedLatentAttention(MLASelfAttention):
    """Megatron's, its down-projections held whole.

    Cut over tensor-parallel ranks, as Megatron 0.19 has them without Transformer Engine, each rank would keep the gradient of
    the shared part of the keys that its own heads give, and never learn of the others'. Whole, the sequence-parallel gather
    of that part adds them up; so with tensor parallelism there must be sequence parallelism.
    """

    def __init__(
        self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, *args, rope: Rope, **kwargs
    ) -> None:
        cut = dict(linear_q_down_proj=ColumnParallelLinear, linear_kv_down_proj=ColumnParallelLinear)  # replaced below
        super().__init__(config, replace(submodules, **cut), *args, **kwargs)
        assert config.tensor_model_parallel_size == 1 or config.sequence_parallel, "gradients would be incomplete"
        width = config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(width, config.q_lora_rank, config)
        self.linear_kv_down_proj = DownProjection(width, config.kv_lora_rank + config.qk_pos_emb_head_dim, config)
        self.rotary_pos_emb = AmplifiedRotaryEmbedding(rope)

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, type]:
        """The modules that were asked for; Megatron would add a norm to queries that are not projected down."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states=None, position_ids=None, packed_seq_params=None, **kwargs
    ) -> tuple[Tensor, ...]:
        """[L, n, d] each, the query's and key's last components rotated by each token's own position."""
        assert isinstance(packed_seq_params, PackedSequences), f"a pack is needed, got {type(packed_seq_params)}"
        whole: Any = None  # Megatron would rotate by these sequences, not by each token's position
        packed = replace(packed_seq_params, cu_seqlens_q=whole, cu_seqlens_kv=whole)
        return super().get_query_key_value_tensors(hidden_states, None, None, packed, **kwargs)
