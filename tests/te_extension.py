"""Stand-in for `transformer_engine_torch`, the compiled extension of Transformer Engine: the same functions in plain torch.

Only functions that a bfloat16 or float32 model calls have a stand-in. A call of any other function raises NotImplementedError.
"""
# ruff: noqa: PLR0913  # the signatures are those of the extension

import enum
import importlib.machinery
import types
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NAME = "transformer_engine_torch"
DType = enum.IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0)
_TORCH_DTYPES = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}
_GEMMS = [f"GEMM{index}_{part}" for index in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")]
_GRADIENTS = [f"{part}{index}" for index in (1, 2, 3) for part in ("GRAD_OUTPUT", "GRAD_INPUT")]
FP8FwdTensors = enum.IntEnum("FP8FwdTensors", _GEMMS, start=0)  # type: ignore[invalid-argument]
FP8BwdTensors = enum.IntEnum("FP8BwdTensors", _GRADIENTS, start=0)  # type: ignore[invalid-argument]

_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS)  # type: ignore[invalid-argument]


class _Constants(type):
    """Metaclass of enumerations whose values no stand-in uses: an attribute gets a new number when it is first read."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, len(vars(cls)))
        return vars(cls)[name]


class Extension(types.ModuleType):
    """The module `transformer_engine_torch`. Names that this file does not define also exist, but a call raises an error."""

    def __init__(self) -> None:
        super().__init__(NAME, __doc__)
        self.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
        # Transformer Engine also contains `from transformer_engine_torch import *`, which finds only names in vars(self).
        here = {name: value for name, value in globals().items() if getattr(value, "__module__", None) == __name__}
        vars(self).update(dict.fromkeys(("layernorm_fwd", "layernorm_bwd"), _missing("layernorm")) | here)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Constants(name, (), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


def _missing(name: str):
    def call(*args: Any, **kwargs: Any):
        raise NotImplementedError(f"{NAME}.{name} has no stand-in; write it in plain torch in {__file__}")

    return call


def _torch_dtype(dtype: Any, default: torch.dtype) -> torch.dtype:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype or default
    return _TORCH_DTYPES[DType(int(dtype))]


def _store(result: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    result = result.to(out.dtype).view(out.shape)
    return out.add_(result) if accumulate else out.copy_(result)


def _product(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    """Return op(b) op(a) in float32. The order is that of cuBLAS, which stores matrices column by column."""
    a, b = a.reshape(-1, a.shape[-1]).float(), b.reshape(-1, b.shape[-1]).float()
    return (b.T if transpose_b else b) @ (a.T if transpose_a else a)


def generic_gemm(
    a, transpose_a, b, transpose_b, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad, workspace,
    workspace_size, accumulate, split_accumulator, comm_overlap=None, comm_type=None, extra_output=None,
    bulk_overlap=False, alpha=1.0, beta=None,
):  # fmt: skip
    """Return (product, gradient of the bias, None, None). With `grad`, compute the gradient of the bias instead of adding it."""
    assert quantizer is None and not gelu and comm_overlap is None and alpha == 1.0, "only plain matrix products"
    result, bias_grad = _product(a, transpose_a, b, transpose_b), None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    if not transpose_b:
        result = result.reshape(*b.shape[:-1], result.shape[-1])
    if out is not None:
        return _store(result, out, accumulate), bias_grad, None, None
    return result.to(_torch_dtype(out_dtype, a.dtype)), bias_grad, None, None


def te_general_grouped_gemm(
    a, transpose_a, b, transpose_b, out, out_dtype, m_splits, bias, bias_dtype, single_output, gelu_in, grad, workspaces,
    workspace_size, accumulate, split_accumulator, num_sms,
):  # fmt: skip
    """Write one product per expert into `out`, a list of tensors. With `single_output`, all products are rows of `out[0]`.

    Experts without a bias have an empty one. With `grad`, write the gradients of the biases to `bias` instead of adding them.
    """
    assert not any(tensor.numel() for tensor in gelu_in), "experts have no GELU"
    start = 0
    for index, (left, right, own) in enumerate(zip(a, b, bias, strict=True)):
        target = out[0][start : start + len(right)] if single_output else out[index]
        start += len(right)
        product = _product(left, transpose_a, right, transpose_b)
        if own.numel() and grad:
            own.copy_(right.float().sum(0))
        elif own.numel():
            product = product + own.float()
        if target.numel():
            _store(product, target, accumulate)
    return bias


def rmsnorm_fwd(x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered_gamma):
    """Return (normalized x, None, reciprocal root mean squares)."""
    assert quantizer is None, "only plain tensors"
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    result = (wide * scale * (weight.float() + zero_centered_gamma)).to(_torch_dtype(out_dtype, x.dtype))
    return result if out is None else out.copy_(result), None, scale.reshape(-1)


def rmsnorm_bwd(dy, x, scale, weight, sm_margin, zero_centered_gamma):
    """Return the gradients of x and weight."""
    wide, gradient, scale = x.float().view_as(dy), dy.float(), scale.view(*dy.shape[:-1], 1)
    normed, scaled = wide * scale, gradient * (weight.float() + zero_centered_gamma)
    dx = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dweight = (gradient * normed).reshape(-1, weight.numel()).sum(0)
    return dx.to(x.dtype).view_as(x), dweight.to(weight.dtype)


def multi_tensor_l2norm(chunk_size, overflow, lists, per_tensor=False):
    """Return (norm [1] of all tensors together, norm of each tensor)."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else None


def multi_tensor_scale(chunk_size, overflow, lists, scale):
    """Write each tensor of the first list, times `scale`, into the second list."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(chunk_size, overflow, lists, scale):
    """Do the same as multi_tensor_scale, with a tensor of one element as `scale`."""
    multi_tensor_scale(chunk_size, overflow, lists, scale)


def multi_tensor_adam(
    chunk_size, overflow, lists, lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay
):
    """Update weights and moments in place. `lists`: gradients, weights, first and second moments."""
    correction1, correction2 = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    for grad, param, first, second in zip(*lists, strict=True):
        grad, weight = grad.float(), param.float()
        if not decoupled:
            grad = grad + weight_decay * weight
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        if decoupled:
            update = update + weight_decay * weight
        param.copy_(weight - lr * update)


def get_fused_attn_backend(parameters) -> tuple[int, str]:
    """Answer that no fused kernel supports these parameters. Transformer Engine then computes attention in torch."""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "no kernels on a CPU"


def fused_rope_forward(tokens, angles, start_positions, layout, interleaved, cu_seqlens, cp_size, cp_rank):
    """Rotate the first components of tokens [T, n, d] by the angles [positions, 1, 1, r] of their positions.

    Without cu_seqlens, rotate tokens [T, 1, n, d] by the angles [T, 1, 1, r].
    """
    return _rotate(tokens, angles, cu_seqlens, 1.0)


def fused_rope_backward(gradient, angles, start_positions, layout, interleaved, cu_seqlens, cp_size, cp_rank):
    """Rotate the gradient in the opposite direction."""
    return _rotate(gradient, angles, cu_seqlens, -1.0)


def _rotate(tokens: Tensor, angles: Tensor, cu_seqlens: Tensor, direction: float) -> Tensor:
    assert angles.dim() == 4 and angles.dtype == torch.float32
    if cu_seqlens is None:
        assert tokens.dim() == 4 and tokens.shape[:2] == angles.shape[:2], "one row of angles for each token"
        angle = angles
    else:
        assert tokens.dim() == 3 and tokens.shape[0] == int(cu_seqlens[-1]), "only whole packs on one rank"
        positions = torch.cat([torch.arange(end - start) for start, end in pairwise(cu_seqlens.tolist())])
        angle = angles[positions, 0]
    size = angles.shape[-1]
    rotated, rest = tokens[..., :size], tokens[..., size:]
    first, second = rotated.float().chunk(2, -1)
    result = rotated * angle.cos() + direction * torch.cat([-second, first], -1) * angle.sin()
    return torch.cat([result.to(tokens.dtype), rest], -1)


def convert_thd_to_bshd(tokens, cu_seqlens, batch_size, max_length):
    """Return the tokens [T, n, d] of all sequences as [sequences, max_length, n, d], padded with zeros."""
    padded = tokens.new_zeros(batch_size, max_length, *tokens.shape[1:])
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        padded[row, : end - start] = tokens[start:end]
    return padded


def convert_bshd_to_thd(padded, cu_seqlens, num_tokens):
    """Return the tokens [T, n, d] of [sequences, max_length, n, d]. Tokens after the last sequence are zeros."""
    tokens = padded.new_zeros(num_tokens, *padded.shape[2:])
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        tokens[start:end] = padded[row, : end - start]
    return tokens


def get_num_cublas_streams() -> int:
    """Return the number of CUDA streams for a grouped matrix product."""
    return 1


def get_cudnn_version() -> int:
    """Return the oldest version that Transformer Engine accepts."""
    return 91200
