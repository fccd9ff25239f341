"""How the angles of rotary position embeddings grow with the position: pure data, read from a config once.

RoPE (Su et al., 2021, arXiv:2104.09864) turns the pair i of a head's `dim` rotated components at position p by the angle
p * inv_freq[i]. Models stretched to longer contexts scale the frequencies; each class here is one way, its fields named
as Hugging Face's `rope_parameters` names them. The operations are those of transformers, in their order: trainer, engine
and pretraining then agree to the last bit, where a rounding would be multiplied by the position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the driver reads configs, and needs no torch for it
    import torch
    from torch import Tensor

_NUMBERS = ("int", "float", "float | None")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "attention_factor")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Plain RoPE: inv_freq[i] = theta ** (-2i / dim)."""

    rope_theta: float
    dim: int  # components of a head that are rotated, its first ones

    def __post_init__(self) -> None:
        for field in fields(self):
            value = self.__dict__[field.name]
            if field.type not in _NUMBERS or (value is None and "None" in str(field.type)):
                continue
            least = 0.0 if field.name in _MAY_BE_ZERO else math.ulp(0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{field.name}={value!r} of the rotary embedding: a positive number is expected.")
        if self.dim % 2:
            raise ValueError(
                f"the rotary embedding turns {self.dim} components of a head in pairs: expected an even number."
            )

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by, for queries and keys alike."""
        return 1.0

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        """Radians per position [dim / 2], on the CPU; float32 unless asked otherwise."""
        return 1.0 / self._wavelengths(dtype)

    def _wavelengths(self, dtype: torch.dtype | None) -> Tensor:
        """Positions per radian of the unscaled embedding [dim / 2]."""
        import torch  # only where there are tensors

        return self.rope_theta ** (torch.arange(0, self.dim, 2, dtype=dtype or torch.float32, device="cpu") / self.dim)


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor` (Chen et al., 2023, arXiv:2306.15595)."""

    factor: float

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        return super().inv_freq(dtype) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between them."""

    factor: float
    low_freq_factor: float  # waves longer than original_max_position_embeddings / this are divided
    high_freq_factor: float  # waves shorter than original_max_position_embeddings / this are kept
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} of the rotary embedding: less than "
                f"high_freq_factor={self.high_freq_factor} is expected."
            )

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch  # only where there are tensors

        plain = super().inv_freq(dtype)
        wave, context = 2 * math.pi / plain, self.original_max_position_embeddings
        is_long, is_short = wave > context / self.low_freq_factor, wave < context / self.high_freq_factor
        kept = (context / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - kept) * plain / self.factor + kept * plain
        return torch.where(is_long, plain / self.factor, torch.where(is_short, plain, between))


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al., 2023, arXiv:2309.00071): a ramp over the components, and an amplitude."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float | None = None  # turns within the original context from which on a component is kept; default 32
    beta_slow: float | None = None  # turns up to which its frequency is divided by `factor`; default 1
    attention_factor: float | None = None  # the amplitude itself
    mscale: float | None = None  # weights in its formula; both or none
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ramp's ends are whole components

    @property
    def amplitude(self) -> float:
        return self.derived_amplitude if self.attention_factor is None else self.attention_factor

    @property
    def derived_amplitude(self) -> float:
        """What the amplitude is where `attention_factor` is not given."""
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor)

    def _ramp_end(self, turns: float) -> float:
        """The component (not whole) that turns so often within the original context."""
        turned = math.log(self.original_max_position_embeddings / (turns * 2 * math.pi))
        return self.dim * turned / (2 * math.log(self.rope_theta))

    def inv_freq(self, dtype: torch.dtype | None = None) -> Tensor:
        import torch  # only where there are tensors

        wavelengths = self._wavelengths(dtype)
        low, high = self._ramp_end(self.beta_fast or 32), self._ramp_end(self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        high += 0.001 * (low == high)  # a step in place of the ramp
        components = torch.arange(self.dim // 2, dtype=wavelengths.dtype)
        kept = 1 - torch.clamp((components - low) / (high - low), 0, 1)
        return 1.0 / (self.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's amplitude for a context stretched `factor` times (its equation 22), its logarithm weighted."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


KINDS: dict[str, type[Rope]] = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}


def rope_of(parameters: Mapping[str, Any], dim: int) -> Rope:
    """The embedding that `parameters` describe: `rope_type`, and the fields of its class other than `dim`.

    Raises:
        ValueError: the type or a field is not known, a field is missing, or a value cannot be.
    """
    values = dict(parameters)
    kind = values.pop("rope_type")
    if kind not in KINDS:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: {', '.join(KINDS)}.")
    known = {field.name: field.default is MISSING for field in fields(KINDS[kind]) if field.name != "dim"}
    if unknown := values.keys() - known.keys():
        name = min(unknown)
        raise ValueError(f"{name}={values[name]!r} is not known to rope_type={kind!r}; it has {', '.join(known)}.")
    if missing := {name for name, is_needed in known.items() if is_needed} - values.keys():
        raise ValueError(f"{min(missing)} is missing; rope_type={kind!r} needs it.")
    return KINDS[kind](**values, dim=dim)
