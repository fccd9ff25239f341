"""Block quantization of weights to FP8: values in float8_e4m3fn, and one float32 scale for each block of 128 x 128 weights.

A weight is its value times the scale of its block. SGLang uses this form for checkpoints such as DeepSeek-V3 and Qwen3-FP8. The
scales of the Hugging Face tensor `X.weight` are the tensor `X.weight_scale_inv`. At the edges of a matrix, blocks are smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from models.conversion.mapping import Box, ParamMapping

if TYPE_CHECKING:  # the driver plans a weight sync without importing torch
    from torch import Tensor

BLOCK = 128  # rows and columns of a block
FP8_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"
SCALE_BYTES = 4  # bytes of a scale
SCALE_SUFFIX = "_scale_inv"
"""Suffix that turns the name of a matrix into the name of its scales, in Hugging Face folders and in SGLang."""
QUANTIZATION_CONFIG: dict[str, Any] = dict(
    quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
)
"""Field `quantization_config` of the config.json of a model in this form."""

_MAX_VALUE = 448.0  # largest number in float8_e4m3fn
_MIN_AMAX = 1e-4  # if the largest absolute weight of a block is smaller, the scale is computed from this number instead
_MANTISSA_BITS = 23  # of a float32


def is_quantized(megatron_name: str) -> bool:
    """Whether SGLang quantizes the tensors of this Megatron parameter: the matrices of attention, MLPs and experts.

    Embedding, output layer, norms, routers and biases are not quantized.
    """
    return ".linear_" in megatron_name and megatron_name.endswith(".weight")


def quantized_shapes(rows: Iterable[ParamMapping], sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape for all quantized Hugging Face tensors of these rows. `sizes` is Architecture.sizes."""
    return {name: shape for row in rows if is_quantized(row.megatron) for name, shape in row.hf_shapes(sizes).items()}


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix as SGLang 0.5.23 does (`per_block_cast_to_fp8` in sglang.srt.layers.quantization.fp8_utils).

    The scale of a block is the smallest power of two for which the largest absolute weight of the block, divided by the scale, is
    at most 448, the largest FP8 number. The division by a power of two is exact, so only the cast to FP8 rounds, and CPUs and
    GPUs return the same bits.

    Args:
        weight: [out, in], a floating-point dtype.

    Returns:
        values: [out, in], float8_e4m3fn.
        scales: [ceil(out / 128), ceil(in / 128)], float32.
    """
    import torch  # imported only where tensors are processed
    import torch.nn.functional as F

    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.reshape(padded.size(0) // BLOCK, BLOCK, padded.size(1) // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(min=_MIN_AMAX)
    scales = _next_power_of_two(amax / _MAX_VALUE)
    values = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return values.reshape(padded.shape)[:rows, :columns].contiguous(), scales.reshape(scales.size(0), scales.size(2))


def dequantize_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of a quantized matrix, [out, in], float32. The arguments are the results of `quantize_blocks`."""
    rows, columns = values.shape
    scale_of_weights = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * scale_of_weights


def _next_power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two that is at least x, for positive and normal float32 numbers."""
    import torch

    rounded_up = x.view(torch.int32) + ((1 << _MANTISSA_BITS) - 1)  # increases the exponent unless the mantissa is zero
    return (rounded_up >> _MANTISSA_BITS << _MANTISSA_BITS).view(torch.float32)


def block_box(box: Box, shape: tuple[int, ...]) -> Box:
    """Return the box of the scale tensor that contains the scales of a box of weights. `shape`: shape of the whole matrix.

    Raises ValueError if the box contains only a part of a block.
    """
    for what, start, size, whole in zip(("rows", "columns"), box.starts, box.sizes, shape, strict=True):
        if start % BLOCK or ((start + size) % BLOCK and start + size != whole):
            raise ValueError(
                f"{what} {start} to {start + size} of {whole} contain only a part of a block of {BLOCK} x {BLOCK} weights"
            )
    return Box(tuple(start // BLOCK for start in box.starts), tuple(-(-size // BLOCK) for size in box.sizes))


def _weights_of(scales: Box, shape: tuple[int, ...]) -> Box:
    """Return the box of weights to which a box of scales belongs."""
    starts = tuple(start * BLOCK for start in scales.starts)
    sizes = [min(size * BLOCK, whole - a) for size, a, whole in zip(scales.sizes, starts, shape, strict=True)]
    return Box(starts, tuple(sizes))


def _covering_box(box: Box, shape: tuple[int, ...]) -> Box:
    """Return the smallest box of whole blocks that contains `box`."""
    starts = tuple(start // BLOCK for start in box.starts)
    ends = [-(-(start + size) // BLOCK) for start, size in zip(box.starts, box.sizes, strict=True)]
    return _weights_of(Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True))), shape)


def quantizing_reader(
    read: Callable[[str, Box], Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[str, Box], Tensor]:
    """Return a function that reads boxes of quantized matrices, of their scales, and of all other tensors.

    Before weights are quantized, they are rounded to bfloat16, as in a bfloat16 checkpoint.

    Args:
        read: Function of (name of a Hugging Face tensor, box). It reads unquantized weights of this rank. The part of a
            matrix on this rank consists of whole blocks.
        shapes: Name of each quantized matrix -> its shape [out, in].
    """

    def quantize(name: str, box: Box) -> tuple[Tensor, Tensor]:
        return quantize_blocks(read(name, box).bfloat16())

    def read_quantized(name: str, box: Box) -> Tensor:
        if name in shapes:
            cover = _covering_box(box, shapes[name])
            return quantize(name, cover)[0][box.within(cover).slices]
        matrix = name.removesuffix(SCALE_SUFFIX)
        return quantize(matrix, _weights_of(box, shapes[matrix]))[1] if matrix in shapes else read(name, box)

    return read_quantized
