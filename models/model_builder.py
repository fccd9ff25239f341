"""What a critic has where a language model has its output layer."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from models.architecture import Architecture
from models.families import family_of
from models.hf_config import HFConfig
from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from parallel import groups
from parallel.attention import PackedAttention
from parallel.device import capabilities, has_cuda
from parallel.dims import ParallelDims
from parallel.megatron_layers import PackedLatentAttention, PackedRotaryEmbedding, spec_provider
from parallel.moe_router import PackedRouter
from parallel.rope import Rope

# FROM: A Megatron model from a Hugging Face config alone: this rank's stages of it.


class ValueHead(torch.nn.Module):
    """One number per token, value = w . h + b, whole on every rank.

    A new one is normal with standard deviation 1 / sqrt(H + 1) and no bias (Huang, Liu and von Werra 2023, "The N
    Implementation Details of RLHF with PPO"), the same on every rank and under every layout.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        weight = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(0))
        self.weight = torch.nn.Parameter(weight / (hidden_size + 1) ** 0.5)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] float32."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())[:, 0]


logger = logging.getLogger(__name__)
Head = Literal["vocabulary", "value"]


def transformer_config(arch: Architecture, dims: ParallelDims, dtype: torch.dtype, **overrides) -> TransformerConfig:
    """Megatron's config for this model and layout; `overrides` are checked by the caller."""
    found = capabilities()
    is_moe = arch.num_experts > 0
    values = dict(
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not has_cuda(),
        perform_initialization=False,  # weights always come from a checkpoint
        calculate_per_token_loss=True,  # losses are sums that we normalise ourselves, with global denominators
        **_layout_fields(dims),
        # Kernels that only NVIDIA's builds bring; Megatron's plain-torch forms are used without them.
        apply_rope_fusion=False,  # its angles are those of whole sequences; ours are looked up per token
        gradient_accumulation_fusion=found.fused_wgrad,
        bias_activation_fusion=found.transformer_engine,
        bias_dropout_fusion=found.transformer_engine,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        moe_grouped_gemm=found.transformer_engine and is_moe,
    )
    if is_moe:  # no balancing loss unless asked for: it would pull a trained model's routing away from the rewards
        values |= dict(moe_router_dtype="fp32", moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
        values |= dict(moe_router_bias_update_rate=0.0)  # a correction bias stays as it was loaded, for the same reason
    kind = MLATransformerConfig if arch.is_latent else TransformerConfig
    return kind(**(values | arch.transformer | overrides))


def _layout_fields(dims: ParallelDims) -> dict:
    return dict(
        tensor_model_parallel_size=dims.tp,
        sequence_parallel=dims.sequence_parallel,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
        variable_seq_lengths=dims.pp > 1,  # stages tell each other the length of every pack
        moe_token_dispatcher_type="alltoall",  # Megatron demands it with variable lengths, for dense models too
        # Interleaved stages send in both directions at once; batched sends between one pair would be mismatched.
        overlap_p2p_comm=dims.vpp > 1,
        batch_p2p_comm=dims.vpp == 1,
        deallocate_pipeline_outputs=has_cuda(),  # on gloo, freeing what is still being sent corrupts it silently
    )


def _biased(linear: type, has_bias: bool) -> Callable[..., torch.nn.Module]:
    """`linear` with a bias or without, where Megatron's config would decide for all matrices alike."""

    def build(*args, bias: bool, **kwargs) -> torch.nn.Module:
        return linear(*args, bias=has_bias, **kwargs)

    return build


def _latent_attention(provider: BackendSpecProvider, rope: Rope) -> ModuleSpec:
    linear, norm = provider.column_parallel_linear(), provider.layer_norm(rms_norm=True, for_qk=True)
    return ModuleSpec(
        module=PackedLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "rope": rope},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            q_layernorm=norm,
            linear_q_up_proj=linear,
            kv_layernorm=norm,
            linear_kv_up_proj=linear,
            core_attention=PackedAttention,
            linear_proj=provider.row_parallel_linear(),
        ),
    )


def _attention(
    config: TransformerConfig, provider: BackendSpecProvider, own_attention: bool, parts: frozenset[str]
) -> ModuleSpec:
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_layer_norm_linear(),
            core_attention=PackedAttention if own_attention else provider.core_attention(),
            linear_proj=_biased(provider.row_parallel_linear(), "proj_bias" in parts),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _layer_spec(
    config: TransformerConfig,
    attention: ModuleSpec,
    provider: BackendSpecProvider,
    parts: frozenset[str],
    moe: bool,
) -> ModuleSpec:
    is_latent = attention.module is PackedLatentAttention  # its norm stands alone: several matrices read it
    if moe:
        linears = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
        experts = MoESubmodules(
            experts=provider.grouped_mlp_modules(config.moe_grouped_gemm),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
            router=PackedRouter,
        )
        mlp = partial(MoELayer, submodules=experts)
        norm = provider.layer_norm(rms_norm=True)
    else:
        linears = MLPSubmodules(
            linear_fc1=_biased(provider.column_parallel_layer_norm_linear(), "mlp_bias" in parts),
            linear_fc2=_biased(provider.row_parallel_linear(), "mlp_bias" in parts),
        )
        mlp, norm = partial(MLP.as_mlp_submodule, submodules=linears), IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=provider.layer_norm(rms_norm=True) if is_latent else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _block_spec(
    config: TransformerConfig, own_attention: bool, arch: Architecture, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's virtual stage."""
    provider = spec_provider()
    if arch.is_latent:
        attention = _latent_attention(provider, arch.rope)
    else:
        attention = _attention(config, provider, own_attention, arch.parts)
    is_moe = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [0] * config.num_layers
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config, attention, provider, arch.parts, bool(is_moe[layer])) for layer in layers],
        layer_norm=provider.layer_norm(rms_norm=True),
    )


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows that Megatron allocates: the next multiple of the tensor-parallel size."""
    return vocab_size + -vocab_size % tp_size


def build_model(
    hf: HFConfig,
    dims: ParallelDims,
    dtype: torch.dtype,
    *,
    head: Head = "vocabulary",
    share_prompts: bool = True,
    **overrides,
) -> list[GPTModel]:
    """This rank's part of the model that `hf` describes, a GPTModel for each virtual stage, weights not yet filled.

    `share_prompts`: packs may have segments with parents, which only our own attention understands. `head="value"` puts a
    ValueHead where the output layer is.

    Raises:
        ValueError: the config has a flag the family does not implement, or the layout does not fit.
    """
    arch = family_of(hf).read(hf)
    arch.check_layout(dims, uneven_stages=bool(UNEVEN_STAGE_FIELDS & overrides.keys()))
    config = transformer_config(arch, dims, dtype, **overrides)
    own_attention = share_prompts or not capabilities().transformer_engine
    stages = range(dims.vpp) if dims.vpp > 1 else [None]
    build = partial(_build_stage, arch, config, head, own_attention)
    chunks = [build(stage).to(dtype) for stage in stages]
    logger.info("%s from %s over %s: %s", hf.architecture, hf.path, dims, arch)
    return chunks


def _build_stage(
    arch: Architecture, config: TransformerConfig, head: Head, own_attention: bool, vp_stage: int | None
) -> GPTModel:
    is_last = groups.is_last_stage(vp_stage)
    model = GPTModel(
        config,
        _block_spec(config, own_attention, arch, vp_stage),
        padded_vocab_size(arch.vocab_size, config.tensor_model_parallel_size),
        arch.max_position_embeddings,
        pre_process=groups.is_first_stage(vp_stage),
        post_process=is_last,
        share_embeddings_and_output_weights=arch.tied_embeddings and head == "vocabulary",
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    if not arch.is_latent:  # latent attention has its own
        _set_rope(model, arch.rope, own_attention)
    if head == "value" and is_last:
        model.output_layer = ValueHead(config.hidden_size)
    for name, param in model.named_parameters():
        if ".experts." in name:  # as where they are spread: the optimizer's state then has one form under every layout
            param.allreduce = False  # type: ignore[missing-attribute]
    return model


def _set_rope(model: GPTModel, rope: Rope, own_attention: bool) -> None:
    """The frequencies and the amplitude of `rope`, in place of those that Megatron computes from its config."""
    if own_attention:
        model.rotary_pos_emb = PackedRotaryEmbedding(rope)
    else:
        model.rotary_pos_emb.inv_freq = rope.inv_freq()
    for module in model.modules():
        if isinstance(module, SelfAttention):  # it has no other way in for a given amplitude, in 0.19
            module._yarn_concentration_factor = rope.amplitude
