"""A few numbers that stand for a token's hidden state, and what the sketches of two layouts say of each other.

A sketch is the state's length and its products with K random vectors, the same everywhere. The mean square of the products of
a difference d is about |d|^2 (Johnson and Lindenstrauss 1984), so sketches tell how far apart two states are without keeping
them: K + 1 numbers in place of H.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrl.core.types import TokenBlock

PROJECTIONS = 8  # K
EMBEDDING, NORM = 0, 10**6  # places; a layer's is its number, from 1


@dataclass(frozen=True)
class Sketch:
    """Of n tokens at one place between layers."""

    place: int
    tokens: NDArray[np.int64]  # [n] of the block
    values: NDArray[np.float32]  # [n, 1 + K] length, products

    @property
    def name(self) -> str:
        """The part of the model that made these states; layers are counted from 0, as in Hugging Face names."""
        return {EMBEDDING: "embedding", NORM: "final norm"}.get(self.place, f"layer {self.place - 1}")


def joined(sketches: Iterable[Sketch]) -> tuple[Sketch, ...]:
    """One for each place, in the order in which a token passes them."""
    parts: dict[int, list[Sketch]] = {}
    for sketch in sketches:
        parts.setdefault(sketch.place, []).append(sketch)
    return tuple(
        Sketch(place, np.concatenate([s.tokens for s in found]), np.concatenate([s.values for s in found]))
        for place, found in sorted(parts.items())
    )


@dataclass(frozen=True)
class PlaceDifference:
    """How far apart two layouts are at one place."""

    name: str
    largest: float  # distance of a token's states over the reference's length; of log-probabilities, in nats
    token: int  # of the block, where that is; -1: nowhere
    compared: int  # tokens that both sides computed
    broken: int  # first token that is not finite under the layout looked at; -1: none
    reference_broken: int  # the same under the reference
    tolerance: float

    @property
    def within(self) -> bool:
        return self.largest <= self.tolerance

    @property
    def finite(self) -> bool:
        return self.broken < 0 and self.reference_broken < 0


def compare_sketches(reference: Sequence[Sketch], other: Sequence[Sketch], tolerance: float) -> list[PlaceDifference]:
    """A line for each place that either side has; one that a side lacks is infinitely far."""
    pairs = {sketch.place: sketch for sketch in other}
    nothing = np.empty(0, np.int64), np.empty((0, 1 + PROJECTIONS), np.float32)
    found = []
    for place in sorted({s.place for s in (*reference, *other)}):
        mine = next((s for s in reference if s.place == place), Sketch(place, *nothing))
        found.append(_compare(mine, pairs.get(place, Sketch(place, *nothing)), tolerance))
    return found


def _compare(reference: Sketch, other: Sketch, tolerance: float) -> PlaceDifference:
    tokens, mine, theirs = np.intersect1d(reference.tokens, other.tokens, return_indices=True)
    expected, found = reference.values[mine].astype(np.float64), other.values[theirs].astype(np.float64)
    distance = np.sqrt(np.square(found[:, 1:] - expected[:, 1:]).mean(axis=1))
    relative = distance / np.maximum(expected[:, 0], np.finfo(np.float32).tiny)
    broken, reference_broken = (first_broken(s.tokens, s.values) for s in (other, reference))
    return place_difference(reference.name, tokens, relative, (broken, reference_broken), tolerance)


def place_difference(
    name: str, tokens: NDArray, differences: NDArray, broken: tuple[int, int], tolerance: float
) -> PlaceDifference:
    """`differences` [n] of `tokens` [n]; without any, or where one is not a number, infinity."""
    sizes = np.where(np.isfinite(differences), differences, np.inf)
    where = int(sizes.argmax()) if len(sizes) else -1
    largest, token = (float(sizes[where]), int(tokens[where])) if len(sizes) else (float("inf"), -1)
    return PlaceDifference(name, largest, token, len(tokens), *broken, tolerance)


def first_broken(tokens: NDArray, values: NDArray) -> int:
    """The first token with a value that is not finite, -1 if there is none; `values` [n, ...]."""
    wrong = tokens[~np.isfinite(values.reshape(len(tokens), -1)).all(axis=1)] if len(tokens) else tokens
    return int(wrong.min()) if len(wrong) else -1


def whereabouts(block: TokenBlock, token: int) -> tuple[int, int]:
    """(row, position in the row) of a token of the block."""
    row = int(np.searchsorted(block.cu_seqlens, token, side="right")) - 1
    return row, token - int(block.cu_seqlens[row])
