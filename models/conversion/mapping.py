"""Conversion rules between Hugging Face tensors and Megatron parameters, and boxes (slices of tensors).

A rule has two steps. First, each Hugging Face tensor is split into tensor-parallel shards along `axis`. (If `axis` is None, every
rank has the whole tensor.) Then `merge` combines the shards on one rank into a Megatron tensor. The inverse of the first step is
concatenation along `axis`, and the inverse of `merge` is `split`. Therefore one rule works in both directions. This module does
not communicate with other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the driver validates checkpoints with these tables without importing torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """Slice of a tensor, such as a rank's shard. In dim d, it covers the indices `starts[d] <= i < starts[d] + sizes[d]`."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select this box: `tensor[box.slices]`."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def narrow(self, dim: int, start: int, end: int) -> Box:
        """Return the part of this box with tensor indices `start` <= i < `end` in `dim`. The part may be empty."""
        low = min(max(start, self.starts[dim]), self.starts[dim] + self.sizes[dim])
        high = max(low, min(end, self.starts[dim] + self.sizes[dim]))
        return Box(_replace_at(self.starts, dim, low), _replace_at(self.sizes, dim, high - low))

    def intersect(self, other: Box) -> Box:
        """Return the intersection of this box and `other`, which may be empty."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, self._ends, other._ends)
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.starts, self.sizes))

    def within(self, outer: Box) -> Box:
        """Return this box with its indices counted from the start of the box `outer`."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)

    def chunks(self, max_elements: int) -> list[Box]:
        """Split this box along its first dims into boxes of at most `max_elements` elements."""
        if self.numel <= max_elements:
            return [self]
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        step = max(1, max_elements // (self.numel // self.sizes[dim]))
        first, end = self.starts[dim], self.starts[dim] + self.sizes[dim]
        parts = [self.narrow(dim, start, start + step) for start in range(first, end, step)]
        return [chunk for part in parts for chunk in part.chunks(max_elements)]


def _replace_at(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # imported only where tensors are processed

    return torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class ParamMapping:
    """One row of a family's table: a Megatron parameter and the Hugging Face tensors that it combines.

    This base class is for parameters that are equal to a single Hugging Face tensor.
    """

    megatron: str  # parameter name; {layer} and {expert} are indices in the whole model, not indices on a rank
    hf: tuple[str, ...]  # Hugging Face tensor names, in the order in which `merge` needs the tensors
    shapes: tuple[tuple[str, ...], ...]  # shapes of the Hugging Face tensors, as keys of Architecture.sizes
    axis: int | None = None  # dim of the Hugging Face tensors that (expert) tensor parallelism splits; None: not split
    # which models or layers have this parameter; untied models have separate embedding and output weights
    present_in: Literal["all", "untied_models", "dense_layers", "moe_layers"] = "all"
    is_buffer: bool = False  # always float32, and not updated by the optimizer
    part: str | None = None  # optional part such as "qkv_bias"; only models with this part have the parameter
    expert: int | None = None  # index of the expert, set by `for_layer`; None: the parameter belongs to no expert

    def for_layer(self, layer: int, expert: int | None = None) -> ParamMapping:
        """Return this row with the indices of one layer and one expert in its names."""

        def fill(name: str) -> str:
            return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        return replace(self, megatron=fill(self.megatron), hf=tuple(map(fill, self.hf)), expert=expert)

    def hf_shapes(self, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each Hugging Face tensor by name."""
        return {name: tuple(sizes[s] for s in shape) for name, shape in zip(self.hf, self.shapes, strict=True)}

    def split_over_ranks(self, sizes: dict[str, int], tp_size: int) -> dict[str, list[Box]]:
        """Return for each Hugging Face tensor the boxes of the tensor-parallel ranks.

        The list contains only one box if every rank has the whole tensor.
        """
        boxes = {name: Box.whole(shape) for name, shape in self.hf_shapes(sizes).items()}
        if self.axis is None or tp_size == 1:
            return {name: [box] for name, box in boxes.items()}
        return {name: [self._rank_box(box, rank, tp_size) for rank in range(tp_size)] for name, box in boxes.items()}

    def _rank_box(self, box: Box, rank: int, tp_size: int) -> Box:
        assert self.axis is not None, "the caller checks that the tensor is split"
        rows = -(-box.sizes[self.axis] // tp_size)  # the last ranks have padding if the rows do not divide evenly
        return box.narrow(self.axis, rank * rows, (rank + 1) * rows)

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        """Combine the shards of the Hugging Face tensors on one rank into the Megatron tensor of the same rank."""
        (part,) = parts
        return part

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        """Split the Megatron tensor of one rank into shards of the Hugging Face tensors. The inverse of `merge`."""
        return [tensor]

    def to_megatron(self, tensors: Sequence[Tensor], sizes: dict[str, int], tp_rank: int, tp_size: int) -> Tensor:
        """Convert whole Hugging Face tensors to the Megatron tensor of tensor-parallel rank `tp_rank`."""
        if self.axis is None or tp_size == 1:
            return self.merge([self._padded(t, tp_size) for t in tensors], sizes)
        padded = [self._padded(t, tp_size) for t in tensors]
        return self.merge([t.chunk(tp_size, self.axis)[tp_rank] for t in padded], sizes)

    def to_hf(self, shards: Sequence[Tensor], sizes: dict[str, int]) -> dict[str, Tensor]:
        """Convert the Megatron tensors of all tensor-parallel ranks to whole Hugging Face tensors."""
        if self.axis is None:
            shards = shards[:1]
        parts = [self.split(shard, sizes) for shard in shards]
        hf_tensors = [
            _cat(pieces, self.axis or 0) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True)
        ]
        shapes = self.hf_shapes(sizes)
        return {name: self._unpadded(t, shapes[name]) for name, t in zip(self.hf, hf_tensors, strict=True)}

    def _padded(self, tensor: Tensor, tp_size: int) -> Tensor:
        return tensor

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor


@dataclass(frozen=True)
class VocabMapping(ParamMapping):
    """Parameter with one row per token of the vocabulary. Megatron pads the rows to a multiple of the tensor-parallel size."""

    def _padded(self, tensor: Tensor, tp_size: int) -> Tensor:
        missing = -tensor.size(0) % tp_size
        return _cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor[: shape[0]]


@dataclass(frozen=True)
class QKVMapping(ParamMapping):
    """Query, key and value projections `[heads * head_dim, ...]`, which Megatron stores in one tensor.

    The Megatron tensor is ordered by key/value groups. Each group has its query heads, then its key head and its value head.
    """

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        d = sizes["head_dim"]
        groups = parts[1].size(0) // d
        return _cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], 1).reshape(-1, *parts[0].shape[1:])

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        d, per_group = sizes["head_dim"], sizes["q"] // sizes["kv"]
        grouped = tensor.reshape(-1, (per_group + 2) * d, *tensor.shape[1:])
        parts = grouped.split([per_group * d, d, d], dim=1)
        return [p.reshape(-1, *tensor.shape[1:]) for p in parts]


@dataclass(frozen=True)
class GatedMLPMapping(ParamMapping):
    """Gate and up projections, which Megatron stores in one tensor: on each rank the gate shard, then the up shard."""

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        return _cat(list(parts), 0)

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        return list(tensor.chunk(2, 0))
