"""Layout rules between Hugging Face tensors and one Megatron parameter: pure functions of tensors.

Every rule is two steps. A Hugging Face tensor is cut into tensor-parallel shards along `axis` (None: all ranks hold
it whole); then `merge` lays the shards of one rank out as Megatron wants them. `split` undoes `merge`, and concatenation
along `axis` undoes the cut, so each rule is declared once and works both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import TYPE_CHECKING, Literal

# FROM: Boxes: the part of a tensor that a rank holds, as a range along every dim. Pure arithmetic on index ranges.

if TYPE_CHECKING:  # the driver reads the tables to check a checkpoint, and needs no torch for it
    from torch import Tensor


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # only where there are tensors

    return torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class ParamMapping:
    """One Megatron parameter and the Hugging Face tensor it holds, same layout."""

    megatron: str  # parameter name; {layer}, {expert} for their numbers in the whole model
    hf: tuple[str, ...]  # tensor names, in the order `merge` takes them
    shapes: tuple[tuple[str, ...], ...]  # Hugging Face shapes in symbols of Architecture.sizes
    axis: int | None = None  # the dim of the Hugging Face tensors that (expert) tensor parallelism cuts
    where: Literal["always", "untied", "dense", "moe"] = "always"  # which models or layers have the row
    is_buffer: bool = False  # float32 in a model of any dtype, and no optimizer changes it
    part: str | None = None  # only models that have this part have the row, see Architecture.parts
    expert: int | None = None  # which expert's, once written out; expert tensor parallelism cuts it then

    def at(self, layer: int, expert: int | None = None) -> ParamMapping:
        """This row with the numbers filled in."""

        def fill(name: str) -> str:
            return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        return replace(self, megatron=fill(self.megatron), hf=tuple(map(fill, self.hf)), expert=expert)

    def hf_shapes(self, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(sizes[s] for s in shape) for name, shape in zip(self.hf, self.shapes, strict=True)}

    def cut(self, sizes: dict[str, int], tp_size: int) -> dict[str, list[Box]]:
        """What each tensor-parallel rank holds of every Hugging Face tensor; one box where all hold it whole."""
        boxes = {name: Box.whole(shape) for name, shape in self.hf_shapes(sizes).items()}
        if self.axis is None or tp_size == 1:
            return {name: [box] for name, box in boxes.items()}
        return {name: [self._share(box, rank, tp_size) for rank in range(tp_size)] for name, box in boxes.items()}

    def _share(self, box: Box, rank: int, tp_size: int) -> Box:
        assert self.axis is not None, "callers look first"
        rows = -(-box.sizes[self.axis] // tp_size)  # where they do not divide, the last ranks' are padding
        return box.narrow(self.axis, rank * rows, (rank + 1) * rows)

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        """One rank's Hugging Face shards -> that rank's Megatron tensor."""
        (part,) = parts
        return part

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        """The inverse of `merge`."""
        return [tensor]

    def to_megatron(self, tensors: Sequence[Tensor], sizes: dict[str, int], tp_rank: int, tp_size: int) -> Tensor:
        """Whole Hugging Face tensors -> the Megatron tensor of tensor-parallel rank `tp_rank`."""
        if self.axis is None or tp_size == 1:
            return self.merge([self._padded(t, tp_size) for t in tensors], sizes)
        padded = [self._padded(t, tp_size) for t in tensors]
        return self.merge([t.chunk(tp_size, self.axis)[tp_rank] for t in padded], sizes)

    def to_hf(self, shards: Sequence[Tensor], sizes: dict[str, int]) -> dict[str, Tensor]:
        """The Megatron tensors of all tensor-parallel ranks -> whole Hugging Face tensors."""
        if self.axis is None:
            shards = shards[:1]
        parts = [self.split(shard, sizes) for shard in shards]
        whole = [_cat(pieces, self.axis or 0) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True)]
        shapes = self.hf_shapes(sizes)
        return {name: self._unpadded(t, shapes[name]) for name, t in zip(self.hf, whole, strict=True)}

    def _padded(self, tensor: Tensor, tp_size: int) -> Tensor:
        return tensor

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor


@dataclass(frozen=True)
class VocabMapping(ParamMapping):
    """A table with one row per token; Megatron pads the vocabulary to a multiple of the tensor-parallel size."""

    def _padded(self, tensor: Tensor, tp_size: int) -> Tensor:
        missing = -tensor.size(0) % tp_size
        return _cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tensor[: shape[0]]


@dataclass(frozen=True)
class QKVMapping(ParamMapping):
    """Query, key and value projections [heads*d, ...] <-> Megatron's one tensor, ordered by key/value group.

    For each group: its query heads, its key head, its value head.
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
    """Gate and up projections <-> Megatron's one tensor: on each rank its gate shard, then its up shard."""

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        return _cat(list(parts), 0)

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        return list(tensor.chunk(2, 0))


@dataclass(frozen=True, slots=True)
class Box:
    """Indices `starts[d] <= i < starts[d] + sizes[d]` along every dim d."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index a tensor with."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))

    def narrow(self, dim: int, start: int, end: int) -> Box:
        """The part between two absolute indices of `dim`; empty where they lie outside."""
        low = min(max(start, self.starts[dim]), self.starts[dim] + self.sizes[dim])
        high = max(low, min(end, self.starts[dim] + self.sizes[dim]))
        return Box(_put(self.starts, dim, low), _put(self.sizes, dim, high - low))

    def intersect(self, other: Box) -> Box:
        """What both hold; may be empty."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = map(min, self._ends, other._ends)
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    @property
    def _ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.starts, self.sizes))

    def within(self, outer: Box) -> Box:
        """The same part, counted from the beginning of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.sizes)

    def pieces(self, most: int) -> list[Box]:
        """Cut along the first dims into boxes of at most `most` elements, at least one each."""
        if self.numel <= most:
            return [self]
        dim = next(d for d, size in enumerate(self.sizes) if size > 1)
        step = max(1, most // (self.numel // self.sizes[dim]))
        first, end = self.starts[dim], self.starts[dim] + self.sizes[dim]
        parts = [self.narrow(dim, start, start + step) for start in range(first, end, step)]
        return [piece for part in parts for piece in part.pieces(most)]


def _put(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
