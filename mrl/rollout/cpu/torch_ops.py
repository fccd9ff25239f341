"""RMS norm, rotary embedding, experts and LoRA for SGLang on a CPU.

The norm, the rotary embedding and the experts of this module need fewer passes over memory than SGLang's torch versions.
`register` adds these three functions to SGLang's operator registry, for the platform `CpuPlatform`. The functions compute the
common float32 cases, and call SGLang's torch version (`forward_native`) in all other cases. Their results differ from the
results of `forward_native` by float32 rounding.

SGLang multiplies by FP8 weights only in a Triton kernel. `block_fp8_linear` computes this product in torch. `unpin_lora` lets
SGLang's own LoRA layers run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization import fp8_utils
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.lora import layers
from sglang.srt.lora.backend import torch_backend
from torch import Tensor
from torch.nn.functional import linear, silu

from models.conversion.fp8_blocks import BLOCK, dequantize_blocks

_TABLE_ATTRIBUTE = "_mrl_rotation"
"""Attribute of a RotaryEmbedding in which `_rotation_table` stores (the embedding's cos_sin_cache, the table made from it)."""


def rms_norm(
    self: RMSNorm,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the RMS norm of x, [..., hidden]. With `residual`, return (RMS norm of `x + residual`, `x + residual`)."""
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
    """Return the query and key of T tokens, [T, heads * D], rotated by their positions [T]. D is the head size."""
    plain = query.dtype == torch.float32 and self.is_neox_style and self.rotary_dim == self.head_size
    if not plain or offsets is not None or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = _rotation_table(self).index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin, self.head_size), _rotate(key, cos, sin, self.head_size)


def _rotation_table(rope: RotaryEmbedding) -> Tensor:
    """Return a table [positions, 2 * D]. Each row has D cosines and D sines; the first D / 2 sines are negated."""
    cached = rope.__dict__.get(_TABLE_ATTRIBUTE)
    if cached is None or cached[0] is not rope.cos_sin_cache:  # SGLang replaces cos_sin_cache to add positions
        cos, sin = rope.cos_sin_cache.float().chunk(2, dim=-1)
        cached = rope.__dict__[_TABLE_ATTRIBUTE] = (rope.cos_sin_cache, torch.cat([cos, cos, -sin, sin], dim=-1))
    return cached[1]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    """Return x, [T, heads * D], rotated. cos, sin: [T, 1, D], rows of `_rotation_table`."""
    heads = x.view(x.size(0), -1, head_size)
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos).addcmul_(torch.cat([second, first], dim=-1), sin).view(x.shape)


def experts(
    self: UnquantizedFusedMoEMethod, layer: FusedMoE, dispatch_output: StandardDispatchOutput
) -> StandardCombineInput:
    """Return, for each of T tokens, the sum of its experts' outputs times their router weights, [T, hidden].

    The output of an expert is `(silu(x @ gate.T) * (x @ up.T)) @ down.T`. Experts on other ranks have the index -1. This
    function skips them, but SGLang's torch version cannot do so.
    """
    # weights: router weights; ids: indices of the experts; both [T, topk]
    x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
    if x.dtype != torch.float32 or self.with_bias or not _is_plain(self.moe_runner_config):
        return self.forward_native(layer, dispatch_output)
    flat = ids.flatten().long()
    order = flat.argsort()
    tokens, weights = order // ids.size(1), weights.flatten()[order].unsqueeze(1)
    counts = (flat + 1).bincount(minlength=layer.num_local_experts + 1).tolist()
    parts = zip(x.index_select(0, tokens).split(counts), tokens.split(counts), weights.split(counts), strict=True)
    next(parts)  # skip expert -1
    output = torch.zeros_like(x)
    for expert, (expert_inputs, expert_tokens, expert_weights) in enumerate(parts):
        if len(expert_inputs):
            gate, up = linear(expert_inputs, layer.w13_weight[expert]).chunk(2, dim=-1)
            inner = silu(gate).mul_(up).mul_(expert_weights)
            output.index_add_(0, expert_tokens, linear(inner, layer.w2_weight[expert]))
    return StandardCombineInput(hidden_states=output)


def _is_plain(config: MoeRunnerConfig) -> bool:
    """Return whether the experts are standard gated SiLU MLPs, which `experts` can compute."""
    return (
        config.activation == "silu"
        and config.is_gated
        and config.gemm1_alpha is None
        and config.swiglu_limit is None
        and not config.apply_router_weight_on_input
    )


def block_fp8_linear(
    input: Tensor,
    weight: Tensor,
    block_size: list[int],
    weight_scale: Tensor,
    input_scale: None = None,
    bias: Tensor | None = None,
    act_scale_ue8m0: bool = False,
) -> Tensor:
    """Return `input @ weight.T + bias`, [..., out], in the dtype of `input`, [..., in]. `input` is first rounded to FP8.

    As in SGLang's Triton kernel, 128 consecutive numbers of a row of `input` share a scale. `weight`: [out, in], float8_e4m3fn.
    `weight_scale`: scale of each block of 128 x 128 weights, [ceil(out / 128), ceil(in / 128)]. `input_scale` and
    `act_scale_ue8m0` must have their default values.
    """
    assert block_size == [BLOCK, BLOCK] and input_scale is None and not act_scale_ue8m0, (
        f"only blocks of {BLOCK} x {BLOCK} are supported, without input_scale and act_scale_ue8m0"
    )
    largest = torch.finfo(weight.dtype).max
    groups = input.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
    rounded = (groups / scales).clamp(-largest, largest).to(weight.dtype).float() * scales
    output = linear(rounded.flatten(-2), dequantize_blocks(weight, weight_scale)).to(input.dtype)
    return output if bias is None else output + bias


class UnpinnedTorch:
    """Replacement for the module torch. Its `tensor` and `zeros` ignore the argument `pin_memory`, which needs a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.tensor(*args, **options)

    @staticmethod
    def zeros(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*args, **options)


def unpin_lora() -> None:
    """Let SGLang's LoRA layers and its backend torch_native run without a GPU. SGLang (0.5.23) always pins index tensors."""
    for module in (layers, torch_backend):
        module.torch = UnpinnedTorch()  # type: ignore[bad-assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[bad-assignment]


def register(platform_key: str) -> None:
    """Register the functions of this module for the platform with the dispatch key `platform_key`."""
    fp8_utils.triton_w8a8_block_fp8_linear = block_fp8_linear  # SGLang has no registry for this function
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary, platform_key)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts, platform_key)
    unpin_lora()
