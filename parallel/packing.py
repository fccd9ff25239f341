"""Ragged batches: many sequences laid end to end in one row of tokens. Pure: no torch.distributed.

A pack is made of segments. A segment attends causally to itself and wholly to its parent and the parent's parents, so a
plain sequence is one segment, and a prompt with its G responses is one segment and G children: the prompt is computed once.

Context parallelism cuts every segment into 2 * cp chunks of equal length, of which rank r holds numbers r and 2 * cp - 1 - r
(zig-zag: early tokens attend to little, late ones to much). A segment whose length 2 * cp does not divide is lengthened by
tokens that nobody attends to; they are made and dropped here, and no caller sees them.

Shapes: S real tokens of all segments, L tokens that this rank holds, padding included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """A run of tokens of a pack."""

    length: int
    parent: int | None = None  # the segment, earlier in the pack, that this one continues


@dataclass(frozen=True)
class AttentionCall:
    """Pieces of like shape: one batched call. Every query sees the first `num_keys - num_queries` keys, and then its own."""

    count: int
    num_queries: int
    num_keys: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, and what our own attention and RoPE read instead of its `cu_seqlens`.

    `cu_seqlens_q` and its like are set for Transformer Engine alone: Megatron's own RoPE turns to them where they are.
    """

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))  # [L] position inside its own sequence
    source: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # [L] which of the S tokens; -1: padding
    calls: tuple[AttentionCall, ...] = ()
    query_index: Tensor | None = None  # [L] the order in which the calls take queries; None: as they lie
    key_index: Tensor | None = None  # [K] rows of the cp ranks' gathered keys, call after call; None: as they lie
    padding: Tensor | None = None  # [L] True where a token only pads; None: on no rank
    num_tokens: int = 0  # S
    max_position: int = 0  # of position_ids

    @property
    def local_of(self) -> Ints:
        """[S] where each real token lies on this rank, -1 where it lies on another."""
        where = np.full(self.num_tokens, -1, np.int64)
        real = np.flatnonzero(self.source >= 0)
        where[self.source[real]] = real
        return where


def pack(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple: int = 1,
    cu_seqlens: bool = False,
) -> PackedSequences:
    """Describe what rank `cp_rank` holds of a pack of these segments.

    `multiple`: L must divide by it (the tensor-parallel size under sequence parallelism, more for FP8 kernels); the last
    segment is lengthened.
    `cu_seqlens`: describe it for Transformer Engine's attention, which knows no parents.
    Raises ValueError at an empty pack, an empty segment, or a parent that does not come first.
    """
    _check(segments)
    assert not cu_seqlens or all(s.parent is None for s in segments), "cu_seqlens cannot describe shared prompts"
    layout = _Layout.of(segments, cp_size, multiple)
    source, positions = layout.tokens(cp_rank)
    shapes, queries, keys = layout.attention(cp_rank)
    order = sorted(range(len(shapes)), key=lambda piece: shapes[piece])
    calls: list[AttentionCall] = []
    for piece in order:
        shape = shapes[piece]
        if calls and (calls[-1].num_queries, calls[-1].num_keys) == shape:
            calls[-1] = AttentionCall(calls[-1].count + 1, *shape)
        else:
            calls.append(AttentionCall(1, *shape))
    local, total = len(source), len(source) * cp_size
    pads = source < 0
    packed = PackedSequences(
        qkv_format="thd",
        position_ids=torch.from_numpy(positions).to(device),
        source=source,
        calls=tuple(calls),
        query_index=_index([queries[piece] for piece in order], local, device),
        key_index=_index([keys[piece] for piece in order], total, device),
        padding=torch.from_numpy(pads).to(device) if layout.padded.sum() > layout.lengths.sum() else None,
        num_tokens=int(layout.lengths.sum()),
        max_position=int(positions.max()),
    )
    if cu_seqlens:
        packed.cu_seqlens_q = packed.cu_seqlens_kv = layout.cu_seqlens(device)
        packed.max_seqlen_q = packed.max_seqlen_kv = int(layout.padded.max())
    return packed


def _check(segments: Sequence[Segment]) -> None:
    lengths = [s.length for s in segments]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a pack needs at least one segment and no empty one, got lengths {lengths[:8]}.")
    for number, segment in enumerate(segments):
        if segment.parent is not None and not 0 <= segment.parent < number:
            raise ValueError(f"segment {number} continues segment {segment.parent}, which does not come before it.")


def _index(parts: list[Ints], size: int, device: torch.device) -> Tensor | None:
    """All parts in one index, or None where that only counts 0 ... size - 1."""
    whole = np.concatenate(parts)
    if len(whole) == size and (whole == np.arange(size)).all():
        return None
    return torch.from_numpy(whole).to(device)


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of each segment lie; all arrays [segments]."""

    lengths: Ints  # real tokens
    padded: Ints  # with those that only pad
    starts: Ints  # first of the S tokens
    offsets: Ints  # position of the first token in its sequence
    ancestors: list[list[int]]  # parents' parents first
    cp_size: int

    @classmethod
    def of(cls, segments: Sequence[Segment], cp_size: int, multiple: int) -> "_Layout":
        lengths = np.array([s.length for s in segments], np.int64)
        chunks = 2 * cp_size if cp_size > 1 else 1
        padded = -(-lengths // chunks) * chunks
        padded[-1] += -padded.sum() % lcm(chunks, cp_size * multiple)
        ancestors: list[list[int]] = []
        for segment in segments:
            ancestors.append([] if segment.parent is None else [*ancestors[segment.parent], segment.parent])
        offsets = np.array([lengths[line].sum() for line in ancestors], np.int64)
        return cls(lengths, padded, np.cumsum(lengths) - lengths, offsets, ancestors, cp_size)

    @property
    def num_chunks(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def chunks_of(self, rank: int) -> list[int]:
        """Numbers of the chunks of every segment that `rank` holds."""
        return [rank, 2 * self.cp_size - 1 - rank] if self.cp_size > 1 else [0]

    def tokens(self, rank: int) -> tuple[Ints, Ints]:
        """([L] which of the S tokens or -1, [L] position in its sequence) on `rank`."""
        sizes = self.padded // self.num_chunks
        inside = np.concatenate([np.arange(c * n, (c + 1) * n) for n in sizes for c in self.chunks_of(rank)])
        segment = np.repeat(np.arange(len(sizes)), self.padded // self.cp_size)
        source = np.where(inside < self.lengths[segment], self.starts[segment] + inside, -1)
        return source, self.offsets[segment] + inside

    def attention(self, rank: int) -> tuple[list[tuple[int, int]], list[Ints], list[Ints]]:
        """For each chunk on `rank`: (queries, keys), its tokens on this rank, and its keys' rows after a gather."""
        local = int(self.padded.sum()) // self.cp_size
        first = (np.cumsum(self.padded) - self.padded) // self.cp_size  # of each segment, on any rank
        shapes, queries, keys = [], [], []
        for segment, size in enumerate((self.padded // self.num_chunks).tolist()):
            seen = [self._rows(s, int(self.lengths[s]), first, local) for s in self.ancestors[segment]]
            own = self._rows(segment, int(self.padded[segment]), first, local)
            for place, chunk in enumerate(self.chunks_of(rank)):
                rows = np.concatenate([*seen, own[: (chunk + 1) * size]])
                shapes.append((size, len(rows)))
                queries.append(first[segment] + place * size + np.arange(size))
                keys.append(rows)
        return shapes, queries, keys

    def _rows(self, segment: int, count: int, first: Ints, local: int) -> Ints:
        """Rows of the first `count` tokens of a segment, where all ranks' tokens are laid end to end."""
        inside = np.arange(count)
        if self.cp_size == 1:
            return first[segment] + inside
        size = self.padded[segment] // self.num_chunks
        chunk, within = np.divmod(inside, size)
        late = chunk >= self.cp_size
        rank = np.where(late, self.num_chunks - 1 - chunk, chunk)
        return rank * local + first[segment] + late * size + within

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Running sum as Transformer Engine reads it: over all context-parallel ranks, padding counted as tokens."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.padded)]).astype(np.int32)).to(device)
