"""Boxes: the part of a tensor that a rank holds, as a range along every dim. Pure arithmetic on index ranges."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from operator import add


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
