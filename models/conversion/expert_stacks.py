"""Handles Hugging Face tensors that stack the matrices or biases of all experts of a layer, as in gpt-oss.

The table of a family has one row for each expert. If a folder stacks the experts, a name in the table contains the index of the
expert: the tensor `X.experts.3.down_proj` of the table is slice 3 of the stored tensor `X.experts.down_proj`. A matrix is
[out, in] in the table and [in, out] in the stack. A bias has the same shape in both.

A stack of matrices may be in MXFP4. Then `X.experts.down_proj_blocks` and `X.experts.down_proj_scales` replace
`X.experts.down_proj`. MXFP4 (Open Compute Project, Microscaling Formats, 2023) has 4 bits for each value, and one scale, a power
of two or NaN, for each block of 32 values. The two tensors contain the matrices as [out, in].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver checks headers without importing torch
    from torch import Tensor

BLOCK = 32  # number of values with a common scale
PACKED_DTYPE = "U8"  # dtype of blocks and scales in the spelling of safetensors
DEQUANTIZED_DTYPE = "BF16"  # dtype of the values that this module returns, in the spelling of safetensors
SCALES_SUFFIX = "_scales"  # ends the name of the tensor with the scales of a stack in MXFP4
NAN_SCALE = 255  # scale that makes all values of its block NaN
QUANT_METHOD = "mxfp4"
"""Value of `quant_method` in the field `quantization_config` of config.json."""

_BLOCK_BYTES = BLOCK // 2  # two values in each byte
_EXPONENT_BIAS = 127  # the stored number e stands for the scale 2 ** (e - 127)
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # index: lower three bits of a number; its highest bit is the sign
_SLICE_NAME = re.compile(r"(.*\.experts)\.(\d+|\{expert\})\.(\w+)")  # groups: module, expert, tensor
_BIAS_SUFFIX = "_bias"


@dataclass(frozen=True)
class ExpertSlice:
    """A tensor of a table that is the slice of one expert in a stored tensor."""

    stack: str  # name of the stored tensor
    index: int  # index of the expert
    is_matrix: bool  # whether the slice is a matrix, which the stack contains transposed; otherwise, it is a bias

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this slice in the stack. `shape`: shape in the table."""
        return shape[::-1] if self.is_matrix else shape

    def oriented(self, tensor: Tensor) -> Tensor:
        """Convert this slice from the form in the stack to the form in the table, or back. The result is a view of `tensor`."""
        return tensor.t() if self.is_matrix else tensor


def is_stacked(name: str) -> bool:
    """Whether the tensor `name` of a table is a slice of a stack. The index of the expert may be the placeholder {expert}."""
    return _SLICE_NAME.fullmatch(name) is not None


def expert_slice_of(name: str) -> ExpertSlice | None:
    """Return which slice of which stack the tensor `name` of a table is. None: the folder stores the tensor itself."""
    found = _SLICE_NAME.fullmatch(name)
    if found is None:
        return None
    return ExpertSlice(f"{found[1]}.{found[3]}", int(found[2]), not found[3].endswith(_BIAS_SUFFIX))


def stored_name(name: str) -> str:
    """Return the name of the stored tensor that contains the tensor `name` of a table."""
    expert_slice = expert_slice_of(name)
    return name if expert_slice is None else expert_slice.stack


def stored_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (dtype, shape) of the stored tensors. `tensors`: name -> (dtype, shape) of all tensors of a table."""
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in tensors.items():
        expert_slice = expert_slice_of(name)
        if expert_slice is None:
            stored[name] = dtype, shape
            continue
        count = max(expert_slice.index + 1, stored[expert_slice.stack][1][0] if expert_slice.stack in stored else 0)
        stored[expert_slice.stack] = dtype, (count, *expert_slice.stored_shape(shape))
    return stored


def mxfp4_names(stack: str) -> tuple[str, str]:
    """Return the names of the blocks and of the scales of a stack of matrices in MXFP4."""
    return f"{stack}_blocks", f"{stack}{SCALES_SUFFIX}"


def mxfp4_shapes(stack: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the blocks and of the scales. `shape`: shape [experts, in, out] of the stack without MXFP4."""
    experts, columns, rows = shape
    blocks, scales = mxfp4_names(stack)
    return {blocks: (experts, rows, columns // BLOCK, _BLOCK_BYTES), scales: (experts, rows, columns // BLOCK)}


def is_mxfp4(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json with these fields says that the experts are in MXFP4."""
    quantization = fields.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == QUANT_METHOD


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values [..., 32 * n] of n MXFP4 blocks in bfloat16. The result is exact, because bfloat16 has enough bits.

    `blocks`: [..., n, 16] uint8; the lower half of a byte is the first of its two values. `scales`: [..., n] uint8; a number e
    stands for the scale 2 ** (e - 127). No scale may be NAN_SCALE, which `check_tensors` refuses.
    """
    import torch  # imported only where tensors are processed

    assert not (scales == NAN_SCALE).any(), f"a scale of the {scales.numel()} MXFP4 blocks is NaN"
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=blocks.device)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1).flatten(-2)
    exponents = scales.int() - _EXPONENT_BIAS
    return torch.ldexp(pairs, exponents.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
