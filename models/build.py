"""A Megatron model from a Hugging Face config alone."""

import logging

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from models.families import family_of
from models.spec import Architecture, HFConfig
from parallel.device import has_cuda
from parallel.dims import ParallelDims
from parallel.modules import PackedRotaryEmbedding, spec_provider

logger = logging.getLogger(__name__)
# Kernels that only NVIDIA's builds bring; Megatron's plain-torch forms are used without them.
_FUSIONS_OFF = dict(
    apply_rope_fusion=False,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,
    persist_layer_norm=False,
)


def transformer_config(arch: Architecture, dims: ParallelDims, dtype: torch.dtype, **overrides) -> TransformerConfig:
    """Megatron's config for this model and layout; `overrides` are checked by the caller."""
    values = dict(
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=dims.tp,
        use_cpu_initialization=not has_cuda(),
        perform_initialization=False,  # weights always come from a checkpoint
        calculate_per_token_loss=True,  # losses are sums that we normalise ourselves, with global denominators
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron demands it with variable lengths, for dense models too
        deallocate_pipeline_outputs=has_cuda(),
    )
    if not HAVE_TE:
        values |= _FUSIONS_OFF
    return TransformerConfig(**(values | arch.transformer | overrides))


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    provider = spec_provider()
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=provider.column_parallel_layer_norm_linear(),
        core_attention=provider.core_attention(),
        linear_proj=provider.row_parallel_linear(),
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=provider.column_parallel_layer_norm_linear(),
        linear_fc2=provider.row_parallel_linear(),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            mlp=ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows that Megatron allocates: the next multiple of the tensor-parallel size."""
    return vocab_size + -vocab_size % tp_size


def build_model(hf: HFConfig, dims: ParallelDims, dtype: torch.dtype, **overrides) -> GPTModel:
    """This rank's part of the model that `hf` describes, weights not yet filled.

    Raises:
        ValueError: the config has a flag the family does not implement, or the layout does not fit.
    """
    arch = family_of(hf).read(hf)
    arch.check_layout(dims)
    config = transformer_config(arch, dims, dtype, **overrides)
    spec = TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config)] * config.num_layers,
        layer_norm=spec_provider().layer_norm(rms_norm=True),
    )
    model = GPTModel(
        config,
        spec,
        padded_vocab_size(arch.vocab_size, dims.tp),
        arch.max_position_embeddings,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=int(arch.rotary_base),
    )
    if not config.apply_rope_fusion:
        model.rotary_pos_emb = PackedRotaryEmbedding(
            config.kv_channels, 1.0, rotary_base=arch.rotary_base, use_cpu_initialization=not has_cuda()
        )
    logger.info("%s from %s: %s", hf.architecture, hf.path, arch)
    return model.to(dtype)
