"""Builds this rank's part of a Megatron model from a Hugging Face config."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
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

from models.architecture import Architecture, Block
from models.families import family_of
from models.hf_config import HFConfig
from models.image_model import ImageGPTModel
from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from models.mtp_model import MtpGPTModel
from parallel import groups
from parallel.attention import PackedAttention
from parallel.device import capabilities, has_cuda
from parallel.dims import ParallelDims
from parallel.layer_variants import PostNormLayer, VariantSelfAttention, biased_down_projection
from parallel.megatron_layers import (
    AmplifiedRotaryEmbedding,
    BiasedRouter,
    MultimodalRotaryEmbedding,
    PackedLatentAttention,
    PackedRotaryEmbedding,
    PackedRouter,
    fuse_rope_of_packs,
    spec_provider,
)
from parallel.recurrent_layers import PackedGatedDeltaNet, PackedMamba2, RecurrencePlanCache
from parallel.rope import Rope
from parallel.sparse_attention import SparseAttention

logger = logging.getLogger(__name__)


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by Architecture.activation
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "squared_relu": _squared_relu,
}
HeadKind = Literal["vocabulary", "value", "score"]
"""Output layer of a language model, of a critic, or of a reward model."""


class ValueHead(torch.nn.Module):
    """Output head of a critic or of a reward model: one value `w . h + b` for each token. A reward model has no b.

    Every rank of the last pipeline stage has a copy of the head.

    The initial weights are normal with standard deviation 1 / sqrt(H + 1), where H is the hidden size, and the initial bias is 0
    (Huang, Liu and von Werra 2023, "The N Implementation Details of RLHF with PPO"). They are the same on every rank and in every
    layout.
    """

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        weight = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(0))
        self.weight = torch.nn.Parameter(weight / (hidden_size + 1) ** 0.5)
        self.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)) if bias else None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the hidden states [n, H] of n tokens to values [n] in float32."""
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)[:, 0]


def transformer_config(arch: Architecture, dims: ParallelDims, dtype: torch.dtype, **overrides) -> TransformerConfig:
    """Build Megatron's config for this model and layout. The caller has checked `overrides`."""
    libraries = capabilities()
    is_moe = arch.num_experts > 0
    values = dict(
        activation_func=_ACTIVATIONS[arch.activation],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not has_cuda(),
        perform_initialization=False,  # weights are loaded from a checkpoint; ValueHead initializes its own
        calculate_per_token_loss=True,  # mrl divides each loss itself, so Megatron must only add the losses
        **_layout_fields(dims),
        # Fused kernels need NVIDIA's libraries. Without these libraries, Megatron uses plain torch.
        apply_rope_fusion=False,  # build_model sets this field by can_fuse_rope
        gradient_accumulation_fusion=libraries.fused_wgrad or libraries.transformer_engine,
        bias_activation_fusion=libraries.transformer_engine and arch.activation == "silu",
        bias_dropout_fusion=libraries.transformer_engine,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        moe_grouped_gemm=libraries.transformer_engine and is_moe,
    )
    if is_moe:
        # By default, there is no load-balancing loss, and the correction bias is fixed. A load-balancing loss, or updates of the
        # bias, would change the routing of a trained model for other reasons than the rewards.
        values |= dict(moe_router_dtype="fp32", moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)
        values |= dict(moe_router_bias_update_rate=0.0)
    config_class = MLATransformerConfig if arch.has_latent_attention else TransformerConfig
    return config_class(**(values | arch.transformer | overrides))


def can_fuse_rope(arch: Architecture) -> bool:
    """Whether Transformer Engine's fused RoPE can compute the rotations of this model. If not, Megatron uses torch.

    Transformer Engine's kernel cannot multiply cosines and sines by an amplitude (YaRN, LongRoPE). For latent attention, Megatron
    uses its own Triton kernel instead. For a pack, this Triton kernel needs `cu_seqlens` and counts positions from the start of
    each sequence in the pack. mrl cannot use it, because such positions are wrong if responses share a prompt.
    """
    ropes = [rope for rope in (arch.rope, arch.window_rope) if rope is not None]
    has_amplitude = any(rope.amplitude != 1.0 for rope in ropes)
    return bool(ropes) and capabilities().transformer_engine and not arch.has_latent_attention and not has_amplitude


def uses_packed_attention(arch: Architecture, share_prompts: bool) -> bool:
    """Whether grouped-query attention uses PackedAttention instead of Transformer Engine.

    Latent attention always uses PackedAttention, whatever this function returns.
    """
    needs_it = arch.vision is not None or arch.has_sinks
    return share_prompts or needs_it or not capabilities().transformer_engine


def _layout_fields(dims: ParallelDims) -> dict:
    return dict(
        tensor_model_parallel_size=dims.tp,
        sequence_parallel=dims.sequence_parallel,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        context_parallel_size=dims.cp,
        expert_model_parallel_size=dims.ep,
        expert_tensor_parallel_size=dims.expert_tp,
        variable_seq_lengths=dims.pp > 1,  # pipeline stages send each other the length of every pack
        moe_token_dispatcher_type="alltoall",  # Megatron requires it with variable lengths, also for dense models
        # With vpp > 1, two ranks send to each other at the same time, and their batched sends and receives would not match.
        overlap_p2p_comm=dims.vpp > 1,
        batch_p2p_comm=dims.vpp == 1,
        deallocate_pipeline_outputs=has_cuda(),  # with gloo, freeing a tensor during its send corrupts the message
    )


def _with_bias(linear: type, has_bias: bool) -> Callable[..., torch.nn.Module]:
    """Return a constructor that always sets `bias=has_bias`. Megatron's config has only one setting of bias for all matrices."""

    def build(*args, bias: bool, **kwargs) -> torch.nn.Module:
        return linear(*args, bias=has_bias, **kwargs)

    return build


def _latent_attention(provider: BackendSpecProvider, arch: Architecture) -> ModuleSpec:
    linear, norm = provider.column_parallel_linear(), provider.layer_norm(rms_norm=True, for_qk=True)
    assert arch.rope is not None, "latent attention has a rotary embedding"
    rotary, core = AmplifiedRotaryEmbedding(arch.rope), PackedAttention
    if arch.has_sparse_attention:
        core = ModuleSpec(SparseAttention, params={"rotary": rotary, "indexer_layers": arch.indexer_layers})
    return ModuleSpec(
        module=PackedLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, "rotary": rotary},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=linear,
            q_layernorm=norm,
            linear_q_up_proj=linear,
            kv_layernorm=norm,
            linear_kv_up_proj=linear,
            core_attention=core,
            linear_proj=provider.row_parallel_linear(),
        ),
    )


def _attention(
    config: TransformerConfig,
    provider: BackendSpecProvider,
    packed_attention: bool,
    arch: Architecture,
    rotary: RotaryEmbedding | None = None,
) -> ModuleSpec:
    """Return the spec of grouped-query attention. `rotary`: rotary embedding of these layers (None: that of the model).

    If the model needs at least one of the `options`, the module is VariantSelfAttention, which explains them; otherwise, it is
    SelfAttention.
    """
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    parts = arch.parts
    options: dict[str, Any] = dict(projection_norms="projection_norms" in parts, rotary=rotary)
    options |= dict(
        num_interleaved_components=arch.rotary_dim * arch.interleaved_rope, query_scaling=arch.query_scaling
    )
    variant = {name: value for name, value in options.items() if value}
    return ModuleSpec(
        module=VariantSelfAttention if variant else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal} | variant,
        submodules=SelfAttentionSubmodules(
            linear_qkv=_first_linear(provider, parts),
            core_attention=PackedAttention if packed_attention else provider.core_attention(),
            linear_proj=_with_bias(provider.row_parallel_linear(), "proj_bias" in parts),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _recurrence(config: TransformerConfig, provider: BackendSpecProvider, arch: Architecture) -> ModuleSpec:
    """Return the spec of a recurrent layer's first block, Mamba-2 or gated delta net. Layers share one RecurrencePlanCache."""
    return ModuleSpec(
        module=PackedMamba2 if arch.has_mamba else PackedGatedDeltaNet,
        params={
            "input_linear": provider.column_parallel_layer_norm_linear(),
            "output_linear": provider.row_parallel_linear(),
            "plans": RecurrencePlanCache(config.linear_conv_kernel_dim),
            "conv_bias": "conv_bias" in arch.parts,
        },
    )


def _first_linear(provider: BackendSpecProvider, parts: frozenset[str]) -> type:
    """Return the class of the first matrix of a block. If there is a norm before the block, the class contains the norm."""
    has_norm = "no_pre_norms" not in parts
    return provider.column_parallel_layer_norm_linear() if has_norm else provider.column_parallel_linear()


def _experts(config: TransformerConfig, provider: BackendSpecProvider, has_biases: bool) -> partial:
    """Return the constructor of the routed experts of a layer."""
    experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
    assert isinstance(experts, partial), "both providers return a class with its submodules"
    if not has_biases:
        return experts
    matrices = experts.keywords["submodules"]
    first, second = _with_bias(matrices.linear_fc1, True), biased_down_projection(matrices.linear_fc2)
    return partial(experts, submodules=replace(matrices, linear_fc1=first, linear_fc2=second))


def _mlp(
    config: TransformerConfig, provider: BackendSpecProvider, parts: frozenset[str], moe: bool
) -> tuple[partial, type]:
    """Return (constructor of the MLP or of experts, class of the separate norm before it; IdentityOp if there is none)."""
    if moe:
        linears = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
        has_biases = "moe_bias" in parts
        experts = MoESubmodules(
            experts=_experts(config, provider, has_biases),
            shared_experts=partial(SharedExpertMLP, submodules=linears),
            router=BiasedRouter if has_biases else PackedRouter,
        )
        return partial(MoELayer, submodules=experts), provider.layer_norm(rms_norm=True)
    linears = MLPSubmodules(
        linear_fc1=_with_bias(_first_linear(provider, parts), "mlp_bias" in parts),
        linear_fc2=_with_bias(provider.row_parallel_linear(), "mlp_bias" in parts),
    )
    return partial(MLP.as_mlp_submodule, submodules=linears), IdentityOp


def _layer_spec(
    config: TransformerConfig,
    attention: ModuleSpec,
    provider: BackendSpecProvider,
    parts: frozenset[str],
    blocks: tuple[Block, ...],
) -> ModuleSpec:
    """Return the spec of a layer with these blocks. `attention`: spec of attention, or of the recurrence in its place."""
    # Before latent attention there is a separate norm module, because several matrices read the output of this norm.
    has_latent_attention = attention.module is PackedLatentAttention
    has_attention, has_mlp = blocks[0] in ("attention", "recurrent"), blocks[-1] in ("dense", "moe")
    mlp, norm = _mlp(config, provider, parts, "moe" in blocks) if has_mlp else (IdentityOp, IdentityOp)
    has_post_norms = "post_norms" in parts
    return ModuleSpec(
        module=PostNormLayer if has_post_norms else TransformerLayer,
        params={"post_norm": provider.layer_norm(rms_norm=True)} if has_post_norms else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=provider.layer_norm(rms_norm=True) if has_latent_attention else IdentityOp,
            self_attention=attention if has_attention else IdentityOp,
            self_attn_bda=get_bias_dropout_add if has_attention else IdentityFuncOp,
            pre_mlp_layernorm=norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add if has_mlp else IdentityFuncOp,
        ),
    )


def _full_attention(config: TransformerConfig, packed_attention: bool, arch: Architecture) -> ModuleSpec:
    """Return the spec of attention without a sliding window: grouped-query, latent or sparse attention."""
    provider = spec_provider()
    if arch.has_latent_attention:
        return _latent_attention(provider, arch)
    return _attention(config, provider, packed_attention, arch)


def _mtp_layer_specs(config: TransformerConfig, packed_attention: bool, arch: Architecture) -> list[ModuleSpec]:
    """Return the spec of the decoder layer in each MTP layer: attention, and experts if the model has experts, else an MLP."""
    attention = _full_attention(config, packed_attention, arch)
    blocks: tuple[Block, ...] = ("attention", "moe" if arch.num_experts else "dense")
    return [_layer_spec(config, attention, spec_provider(), arch.parts, blocks)] * arch.mtp_layers


def _block_spec(
    config: TransformerConfig, packed_attention: bool, arch: Architecture, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers in one virtual stage of this rank.

    Raises ValueError if the stage would begin with a layer of sparse attention without an indexer: such a layer attends to the
    keys that the indexer of an earlier layer has chosen, and stages do not send each other these keys.
    """
    provider = spec_provider()
    attention = window_attention = _full_attention(config, packed_attention, arch)
    if arch.window_rope is not None:
        rotary = _rotary_embedding(arch.window_rope, packed_attention)
        window_attention = _attention(config, provider, packed_attention, arch, rotary)
    attention_of = [window_attention if arch.has_window(layer) else attention for layer in range(config.num_layers)]
    if arch.has_recurrent_layers:
        recurrent = _recurrence(config, provider, arch)
        attention_of = [recurrent if arch.is_recurrent(n) else spec for n, spec in enumerate(attention_of)]
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    arch.check_first_layers_of_stages(layers[:1])
    return TransformerBlockSubmodules(
        layer_specs=[
            _layer_spec(config, attention_of[layer], provider, arch.parts, arch.blocks(layer)) for layer in layers
        ],
        layer_norm=provider.layer_norm(rms_norm=True),
    )


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the number of vocabulary rows that Megatron allocates: the next multiple of the tensor-parallel size."""
    return vocab_size + -vocab_size % tp_size


def build_model(
    hf: HFConfig,
    dims: ParallelDims,
    dtype: torch.dtype,
    *,
    head: HeadKind = "vocabulary",
    share_prompts: bool = True,
    **overrides,
) -> list[GPTModel]:
    """Build this rank's part of the model that `hf` describes: one GPTModel for each virtual stage.

    The caller must load the weights, except those of a ValueHead.

    With `share_prompts`, the model uses PackedAttention, and responses in a pack may share a prompt (parallel.packing.Segment).
    `head="value"` and `head="score"` replace the output layer with a ValueHead. `overrides` are fields of Megatron's
    TransformerConfig.

    Raises:
        ValueError: the family does not support a field of the config, or the layout does not fit the model.
    """
    arch = family_of(hf).read(hf)
    arch.check_layout(dims, uneven_stages=bool(UNEVEN_STAGE_FIELDS & overrides.keys()))
    config = transformer_config(arch, dims, dtype, **overrides)
    packed_attention = uses_packed_attention(arch, share_prompts)
    assert not arch.window or dims.cp == 1 or packed_attention, "Transformer Engine has no sliding windows with cp > 1"
    config.apply_rope_fusion = can_fuse_rope(arch)
    stages = range(dims.vpp) if dims.vpp > 1 else [None]
    build = partial(_build_stage, arch, config, head, packed_attention)
    with _without_megatron_wgrad_fusion(config):
        chunks = [build(stage).to(dtype) for stage in stages]
    logger.info("%s from %s over %s: %s", hf.architecture, hf.path, dims, arch)
    return chunks


@contextmanager
def _without_megatron_wgrad_fusion(config: TransformerConfig) -> Iterator[None]:
    """Context that turns `gradient_accumulation_fusion` off while the model is constructed, if Apex's extension is missing.

    Megatron's own linear layers then never fuse the accumulation of weight gradients.

    The constructor of Megatron's output layer raises an error if fusion is on but the extension is missing. The output layer does
    not need fusion, because mrl itself computes the gradient of its weight. `parallel.optimizer.wrap_ddp` turns fusion on in
    Transformer Engine's matrices, which do not need the extension.
    """
    fused, libraries = config.gradient_accumulation_fusion, capabilities()
    if libraries.transformer_engine and not libraries.fused_wgrad:
        config.gradient_accumulation_fusion = False
    try:
        yield
    finally:
        config.gradient_accumulation_fusion = fused


def _build_stage(
    arch: Architecture, config: TransformerConfig, head: HeadKind, packed_attention: bool, vp_stage: int | None
) -> GPTModel:
    is_last = groups.is_last_stage(vp_stage)
    model_class = partial(ImageGPTModel, vision=arch.vision) if arch.vision else GPTModel
    if arch.mtp_layers:
        model_class = partial(MtpGPTModel, mtp_layer_specs=_mtp_layer_specs(config, packed_attention, arch))
    model = model_class(
        config,
        _block_spec(config, packed_attention, arch, vp_stage),
        padded_vocab_size(arch.vocab_size, config.tensor_model_parallel_size),
        arch.max_position_embeddings,
        pre_process=groups.is_first_stage(vp_stage),
        post_process=is_last,
        share_embeddings_and_output_weights=arch.tied_embeddings and head == "vocabulary",
        position_embedding_type="none" if arch.rope is None else "rope",
        vp_stage=vp_stage,
    )
    if arch.rope is not None and not arch.has_latent_attention:  # latent attention has its own rotary embedding
        _set_rope(model, arch, arch.rope, packed_attention)
    if head != "vocabulary" and is_last:
        model.output_layer = ValueHead(config.hidden_size, bias=head == "value")
    if arch.embedding_scale != 1.0 and model.pre_process:
        scale = torch.tensor(arch.embedding_scale, dtype=config.params_dtype).item()
        model.embedding.register_forward_hook(lambda module, args, embeddings: embeddings * scale)
    for name, param in model.named_parameters():
        # Megatron sets this attribute only if ep > 1. If it is always set, the optimizer state is the same in all layouts.
        if ".experts." in name:
            param.allreduce = False  # type: ignore[missing-attribute]
    return model


def _set_rope(model: GPTModel, arch: Architecture, rope: Rope, packed_attention: bool) -> None:
    """Replace Megatron's rotary embedding and its amplitude with those of the model."""
    if arch.vision:
        model.rotary_pos_emb = MultimodalRotaryEmbedding(rope, arch.vision.rope_axes)
    elif packed_attention:
        model.rotary_pos_emb = PackedRotaryEmbedding(rope)
    else:
        model.rotary_pos_emb.inv_freq = rope.inv_freq()
    if packed_attention and model.config.apply_rope_fusion:
        fuse_rope_of_packs()
    for module in model.modules():
        if isinstance(module, SelfAttention):  # Megatron 0.19 has no public parameter for the amplitude
            has_window_rope = isinstance(module, VariantSelfAttention) and module.rotary is not None
            own = arch.window_rope if has_window_rope and arch.window_rope is not None else rope
            module._yarn_concentration_factor = own.amplitude


def _rotary_embedding(rope: Rope, packed_attention: bool) -> RotaryEmbedding:
    """Return the rotary embedding for packs. Without `packed_attention`, its positions begin at the start of each sequence."""
    if packed_attention:
        return PackedRotaryEmbedding(rope)
    rotary = RotaryEmbedding(rope.dim, 1.0, use_cpu_initialization=True)
    rotary.inv_freq = rope.inv_freq()
    return rotary
