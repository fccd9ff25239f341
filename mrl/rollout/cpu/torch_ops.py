"""RMS norm, rotary embedding and experts for SGLang on a CPU, with fewer passes over memory than SGLang's torch versions.

They are registered in SGLang's operator registry for mrl's platform. They handle the plain float32 cases and leave all others
to `forward_native`. Results differ by float32 rounding.
"""

from __future__ import annotations

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor
from torch.nn.functional import linear, silu

_TABLE_ATTRIBUTE = "_mrl_rotation"
"""Attribute of a RotaryEmbedding that caches (its cos_sin_cache, the table that `_rotation_table` computed from it)."""


def rms_norm(
    self: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise x [..., hidden] after adding `residual`. With a residual, also returns the new residual."""
    plain = x.dtype == torch.float32 and self.variance_size_override is None and post_residual_addition is None
    if not plain or self.override_orig_dtype is not None or x.size(-1) != self.hidden_size:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    hidden = x if residual is None else x + residual
    scale = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
    scale = scale.square_().mul_(1 / self.hidden_size).add_(self.variance_epsilon).rsqrt_()
    normed = hidden.mul(scale).mul_(self.weight)
    return normed if residual is None else (normed, hidden)


def rotary(
    self: RotaryEmbedding,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[Tensor, Tensor]:
    """Rotate query and key [T, heads * D] by their positions [T]."""
    plain = query.dtype == torch.float32 and self.is_neox_style and self.rotary_dim == self.head_size
    if not plain or offsets is not None or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = _rotation_table(self).index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin, self.head_size), _rotate(key, cos, sin, self.head_size)


def _rotation_table(rope: RotaryEmbedding) -> Tensor:
    """Return [positions, 2 * D]: the cosines of both halves, then the sines; those of the first half are negated."""
    cached = rope.__dict__.get(_TABLE_ATTRIBUTE)
    if cached is None or cached[0] is not rope.cos_sin_cache:  # SGLang replaces the cache when it grows
        cos, sin = rope.cos_sin_cache.float().chunk(2, dim=-1)
        cached = rope.__dict__[_TABLE_ATTRIBUTE] = (rope.cos_sin_cache, torch.cat([cos, cos, -sin, sin], dim=-1))
    return cached[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    heads = x.view(x.size(0), -1, head_size)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos).addcmul_(torch.cat([second, first], dim=-1), sin).view(x.shape)


def experts(
    self: UnquantizedFusedMoEMethod, layer: FusedMoE, dispatch_output: StandardDispatchOutput
) -> StandardCombineInput:
    """Return the weighted sum of each token's experts: silu(x gate^T) * (x up^T), then down. x: [T, hidden].

    Experts on other ranks have the number -1 and are skipped. SGLang's torch version cannot skip them.
    """
    x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
    if x.dtype != torch.float32 or self.with_bias or not _is_plain(self.moe_runner_config):
        return self.forward_native(layer, dispatch_output)
    flat = ids.flatten().long()
    order = flat.argsort()
    tokens, weights = order // ids.size(1), weights.flatten()[order].unsqueeze(1)
    counts = (flat + 1).bincount(minlength=layer.num_local_experts + 1).tolist()
    parts = zip(x.index_select(0, tokens).split(counts), tokens.split(counts), weights.split(counts), strict=True)
    next(parts)  # tokens of experts on other ranks
    output = torch.zeros_like(x)
    for expert, (rows, tokens_of, weights_of) in enumerate(parts):
        if len(rows):
            gate, up = linear(rows, layer.w13_weight[expert]).chunk(2, dim=-1)
            inner = silu(gate).mul_(up).mul_(weights_of)
            output.index_add_(0, tokens_of, linear(inner, layer.w2_weight[expert]))
    return StandardCombineInput(hidden_states=output)


def _is_plain(config: MoeRunnerConfig) -> bool:
    """Return whether these experts are plain gated SiLU MLPs."""
    return (
        config.activation == "silu"
        and config.is_gated
        and config.gemm1_alpha is None
        and config.swiglu_limit is None
        and not config.apply_router_weight_on_input
    )


def register(platform_key: str) -> None:
    """Register these operators for the platform with dispatch key `platform_key`."""
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary, platform_key)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts, platform_key)
