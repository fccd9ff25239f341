"""Rotary position embeddings (RoPE): their parameters from a Hugging Face config, and their frequencies.

RoPE (Su et al., 2021, arXiv:2104.09864) rotates `dim` components of a head in pairs: at position p, pair i is rotated by the
angle `p * inv_freq[i]`. Models with extended context scale the frequencies. Each class below implements one method of scaling,
and its fields have the names of Hugging Face's `rope_parameters`. The operations and their order are the same as in transformers,
so that trainer, engine and pretraining use bit-equal frequencies. A rounding difference would be multiplied by the position.

This module imports torch only when it computes frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver reads configs without importing torch
    import torch
    from torch import Tensor

_NUMBER_TYPES = ("int", "float", "float | None")
_FIELDS_THAT_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Plain RoPE: inv_freq[i] = theta ** (-2i / dim)."""

    rope_theta: float
    dim: int  # the first `dim` components of a head are rotated

    def __post_init__(self) -> None:
        for field in fields(self):
            value = self.__dict__[field.name]
            if field.type not in _NUMBER_TYPES or (value is None and "None" in str(field.type)):
                continue
            least = 0.0 if field.name in _FIELDS_THAT_MAY_BE_ZERO else math.ulp(0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                expected = "a positive number" if least else "0 or a positive number"
                raise ValueError(f"{field.name}={value!r} of the rotary embedding: expected {expected}.")
        if self.dim % 2:
            raise ValueError(
                f"the rotary embedding rotates {self.dim} components of a head in pairs: expected an even number."
            )

    @property
    def amplitude(self) -> float:
        """Factor by which cosines and sines are multiplied, for queries and keys."""
        return 1.0

    def longest_sequence(self, max_position_embeddings: int) -> int:
        """Return the number of tokens of the longest sequence for which the frequencies are right."""
        return max_position_embeddings

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the radians per position [dim / 2], on the CPU. The default dtype is float32."""
        return 1.0 / self._positions_per_radian(dtype)

    def _positions_per_radian(self, dtype: torch.dtype | None) -> Tensor:
        """Return the positions per radian [dim / 2] of plain RoPE."""
        import torch  # imported only where tensors are made

        return self.rope_theta ** (torch.arange(0, self.dim, 2, dtype=dtype or torch.float32, device="cpu") / self.dim)


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """RoPE with all frequencies divided by `factor` (position interpolation, Chen et al., 2023, arXiv:2306.15595)."""

    factor: float

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        return super().inv_freq(dtype) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """RoPE of Llama 3.1. Frequencies of long waves are divided by `factor`, and frequencies of short waves stay unchanged.

    Waves between the two limits have an interpolated frequency.
    """

    factor: float
    low_freq_factor: float  # long waves: longer than original_max_position_embeddings / low_freq_factor
    high_freq_factor: float  # short waves: shorter than original_max_position_embeddings / high_freq_factor
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} of the rotary embedding: expected less than "
                f"high_freq_factor={self.high_freq_factor}."
            )

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch  # imported only where tensors are made

        plain = super().inv_freq(dtype)
        wave, context = 2 * math.pi / plain, self.original_max_position_embeddings
        is_long, is_short = wave > context / self.low_freq_factor, wave < context / self.high_freq_factor
        weight = (context / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        interpolated = (1 - weight) * plain / self.factor + weight * plain
        return torch.where(is_long, plain / self.factor, torch.where(is_short, plain, interpolated))


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """RoPE of YaRN (Peng et al., 2023, arXiv:2309.00071), which also multiplies cosines and sines by an amplitude.

    The frequency of a pair stays unchanged if the pair makes at least `beta_fast` rotations in the original context. The
    frequency is divided by `factor` if the pair makes at most `beta_slow` rotations. For the pairs between these limits, the
    frequency is interpolated linearly (a ramp over the pairs).
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float | None = None  # None: 32
    beta_slow: float | None = None  # None: 1
    attention_factor: float | None = None  # the amplitude; None: see `derived_amplitude`
    # If mscale and mscale_all_dim are set and not 0, derived_amplitude is the quotient of yarn_mscale(factor, mscale) and
    # yarn_mscale(factor, mscale_all_dim).
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the ramp begins and ends at whole pairs

    @property
    def amplitude(self) -> float:
        return self.derived_amplitude if self.attention_factor is None else self.attention_factor

    @property
    def derived_amplitude(self) -> float:
        """The amplitude that is used if `attention_factor` is None."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def _ramp_end(self, rotations: float) -> float:
        """Return the index of the pair that makes `rotations` rotations in the original context. It may be fractional."""
        log_ratio = math.log(self.original_max_position_embeddings / (rotations * 2 * math.pi))
        return self.dim * log_ratio / (2 * math.log(self.rope_theta))

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch  # imported only where tensors are made

        positions_per_radian = self._positions_per_radian(dtype)
        low, high = self._ramp_end(self.beta_fast or 32), self._ramp_end(self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high += 0.001 * (low == high)  # avoids a division by zero
        pairs = torch.arange(self.dim // 2, dtype=positions_per_radian.dtype)
        weight = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * positions_per_radian) * (1 - weight) + 1.0 / positions_per_radian * weight


@dataclass(frozen=True, kw_only=True)
class LongRope(Rope):
    """RoPE of LongRoPE (Ding et al., 2024, arXiv:2402.13753), for sequences of at most original_max_position_embeddings tokens.

    LongRoPE divides each frequency by a factor of its own. There are two lists of factors, and the length of the whole sequence
    selects the list: sequences of at most original_max_position_embeddings tokens use `short_factor`, longer sequences use
    `long_factor`. So all keys of a sequence change when it becomes longer. This class only rotates sequences that use
    `short_factor`.
    """

    short_factor: tuple[float, ...]  # [dim / 2]
    long_factor: tuple[float, ...]  # [dim / 2], not used
    original_max_position_embeddings: int
    factor: float  # max_position_embeddings / original_max_position_embeddings
    attention_factor: float | None = None  # the amplitude; None: see `derived_amplitude`

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            factors = self.__dict__[name]
            is_list = isinstance(factors, list | tuple) and len(factors) == self.dim // 2
            if not is_list or not all(isinstance(f, int | float) and 0 < f < math.inf for f in factors):
                raise ValueError(
                    f"{name}={factors!r} of the rotary embedding: expected a list of {self.dim // 2} positive numbers."
                )
            object.__setattr__(self, name, tuple(map(float, factors)))
        super().__post_init__()

    def longest_sequence(self, max_position_embeddings: int) -> int:
        return min(max_position_embeddings, self.original_max_position_embeddings)

    @property
    def amplitude(self) -> float:
        return self.derived_amplitude if self.attention_factor is None else self.attention_factor

    @property
    def derived_amplitude(self) -> float:
        """The amplitude that is used if `attention_factor` is None."""
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch  # imported only where tensors are made

        positions_per_radian = self._positions_per_radian(dtype)
        return 1.0 / (torch.tensor(self.short_factor, dtype=positions_per_radian.dtype) * positions_per_radian)


@dataclass(frozen=True)
class QueryScaling:
    """Factors of the queries that grow with the position: 1 + beta log(1 + floor(position / period)).

    Llama 4 and Ministral 3 scale the queries in this way, so that attention stays sharp in long sequences. The first `period`
    tokens of a sequence have the factor 1.
    """

    beta: float
    period: int  # tokens

    def factors(self, positions: Tensor) -> Tensor:
        """Return the factor of each position [L], in float32. The operations are those of transformers."""
        import torch  # imported only where tensors are made

        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.period))


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's amplitude for a context that is extended by `factor` (equation 22); `weight` multiplies the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


ROPE_TYPES: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
}


def rope_from_parameters(parameters: Mapping[str, Any], dim: int) -> Rope:
    """Build the rotary embedding. `parameters` has a `rope_type`, and the fields of the class for this type except `dim`.

    Raises:
        ValueError: the type or a field is unknown, a field is missing, or a value is invalid.
    """
    values = dict(parameters)
    kind = values.pop("rope_type")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {', '.join(ROPE_TYPES)}.")
    known = {field.name: field.default is MISSING for field in fields(ROPE_TYPES[kind]) if field.name != "dim"}
    if unknown := values.keys() - known.keys():
        name = min(unknown)
        raise ValueError(
            f"{name}={values[name]!r} is not a field of rope_type={kind!r}; its fields: {', '.join(known)}."
        )
    if missing := {name for name, is_needed in known.items() if is_needed} - values.keys():
        raise ValueError(f"{min(missing)} is missing; rope_type={kind!r} needs it.")
    return ROPE_TYPES[kind](**values, dim=dim)


def rope_axes(section: Sequence[int], num_pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Return for each pair of a head's components the axis (0: time, 1: height, 2: width) whose position rotates the pair.

    With `interleaved` (Qwen3-VL), height has the pairs 1, 4, 7, ... and width the pairs 2, 5, 8, ...; time has the others.
    Without it (Qwen2.5-VL), time has the first pairs, then height, then width. `section` has the number of pairs of each axis.

    Raises ValueError if the sections do not fit the number of pairs.
    """
    if len(section) != 3 or sum(section) != num_pairs or min(section) < 0:
        raise ValueError(f"mrope_section={list(section)}: expected three numbers whose sum is {num_pairs}.")
    if not interleaved:
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    axes = [0] * num_pairs
    for axis in (1, 2):
        if axis + 3 * (section[axis] - 1) >= num_pairs:
            raise ValueError(
                f"mrope_section={list(section)}: interleaved axes need at most {num_pairs // 3} pairs each."
            )
        axes[axis : 3 * section[axis] : 3] = [axis] * section[axis]
    return tuple(axes)
