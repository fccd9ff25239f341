"""Packed sequences: many sequences of different lengths in one row of tokens, not padded to a common length.

This module does not communicate.

A pack consists of segments. A token attends to itself and the earlier tokens of its segment, and to all tokens of the segment's
ancestors. A plain sequence is one segment. A prompt with G responses is a segment with G children, so the prompt is computed
only once.

Context parallelism splits every segment into `2 * cp` chunks of equal length. Rank r holds chunks `r` and `2 * cp - 1 - r`. This
zig-zag order balances the work, because early tokens attend to few tokens and late tokens attend to many. If the length of a
segment is not a multiple of `2 * cp`, padding tokens are added at its end. No real token attends to a padding token.

In shapes, S is the number of real tokens in all segments, L is the number of tokens on this rank, including padding, H is the
hidden size, and K is the number of keys that all attention calls on this rank read, repetitions included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from parallel.device import copy_to_device

if TYPE_CHECKING:
    from parallel.image_packing import PackedImages

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens in a pack."""

    length: int
    parent: int | None = None  # index of the earlier segment that this segment continues; None: no parent


@dataclass(frozen=True)
class AttentionCall:
    """One batched attention call over `count` chunks of equal shape.

    Query i of a chunk attends to the first `num_keys - num_queries + i + 1` keys.
    """

    count: int
    num_queries: int
    num_keys: int


@dataclass(frozen=True)
class ChunkBounds:
    """Cumulative numbers of queries and keys of the chunks of a pack (cu_seqlens), for varlen attention kernels.

    Chunk i has the queries `queries[i]` to `queries[i + 1] - 1` and the keys `keys[i]` to `keys[i + 1] - 1`, in the
    order in which the attention calls read them.
    """

    queries: Tensor  # [chunks + 1] int32, on the device
    keys: Tensor  # [chunks + 1] int32, on the device
    max_queries: int  # largest number of queries of a chunk
    max_keys: int  # largest number of keys of a chunk

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int]], device: torch.device) -> "ChunkBounds":
        """Return the bounds of chunks with these numbers of (queries, keys)."""
        sizes = np.array([(0, 0), *shapes])
        queries, keys = copy_to_device(np.ascontiguousarray(sizes.cumsum(0).T.astype(np.int32)), device)
        return cls(queries, keys, *sizes.max(0).tolist())


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with additional fields for PackedAttention and PackedRotaryEmbedding.

    `cu_seqlens_q` and the related fields are set only for Transformer Engine's attention. If they are set, Megatron's RoPE
    counts positions from the start of each sequence and does not use `position_ids`.
    """

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))  # [L] position of each token in its sequence
    # [L] index of the token among the S real tokens; -1: padding
    token_index: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    calls: tuple[AttentionCall, ...] = ()  # together, they compute the attention of all L queries
    chunks: ChunkBounds | None = None  # the chunks of all calls, in order
    # [L] indices of the queries, in the order in which the calls read them; None: the queries already have this order
    query_index: Tensor | None = None
    # [K] indices of the keys, in the order in which the calls read them; None: the keys already have this order. An index is a
    # position in the concatenated keys of all context-parallel ranks.
    key_index: Tensor | None = None
    padding: Tensor | None = None  # [L] True at padding tokens; None: no rank has padding
    num_tokens: int = 0  # S
    max_position: int = 0  # largest position in the pack
    # [3, L] position of each token along time, height and width; None: the pack has no images, and all are equal to position_ids
    axis_position_ids: Tensor | None = None
    images: "PackedImages | None" = None
    # [L, 1, H] each, or [L/tp, 1, H] under sequence parallelism: what is added to the output of layer 0, 1, ... (DeepStack)
    layer_features: tuple[Tensor, ...] = ()
    layout: "PackLayout | None" = None  # positions of the segments, which recurrent layers need
    # index of a layer with an indexer -> the masks of the keys that the layer has chosen, one for each of `calls` (see
    # parallel.sparse_attention). A layer has an entry only if the next layer uses the same keys. In training, the layer's
    # backward pass removes the entry. Otherwise, the last layer that reads the entry removes it.
    chosen_keys: dict[int, list[Tensor | None]] = field(default_factory=dict)
    # [MTP layers, L] row i: for each token, the token i + 1 places later in its sequence, or 0 after the end of the sequence;
    # None: no MTP layer runs
    later_tokens: Tensor | None = None

    @property
    def index_on_rank(self) -> Ints:
        """Index [S] of each real token among the L tokens of this rank; -1 if the token is on another rank."""
        local = np.full(self.num_tokens, -1, np.int64)
        real = np.flatnonzero(self.token_index >= 0)
        local[self.token_index[real]] = real
        return local


def pack(
    segments: Sequence[Segment],
    device: torch.device,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple: int = 1,
    cu_seqlens: bool = False,
    chunks_in_token_order: bool = False,
) -> PackedSequences:
    """Return the description of a pack of these segments, for context-parallel rank `cp_rank`.

    Padding after the last segment makes L a multiple of `multiple`. For sequence parallelism, `multiple` must be a multiple of
    the tensor-parallel size, and FP8 kernels need a larger multiple. With `cu_seqlens`, the fields for Transformer Engine's
    attention are set. That attention does not support segments with a parent.

    By default, chunks of equal shape are next to each other, so that one batched call computes them. A kernel for sequences of
    variable length does not need this order. With `chunks_in_token_order`, the chunks keep the order of the tokens, so that the
    queries need no permutation. Without shared prompts and context parallelism, the keys need no permutation either.

    Raises ValueError if the pack or a segment is empty, or if a parent does not precede its child.
    """
    _check_segments(segments)
    assert not cu_seqlens or all(s.parent is None for s in segments), "cu_seqlens cannot describe shared prompts"
    layout = PackLayout.of(segments, cp_size, multiple)
    token_index, positions = layout.tokens(cp_rank)
    shapes, queries, keys = layout.attention(cp_rank)
    order = list(range(len(shapes)))
    if not chunks_in_token_order:
        order.sort(key=lambda chunk: shapes[chunk])
    calls: list[AttentionCall] = []
    for chunk in order:
        shape = shapes[chunk]
        if calls and (calls[-1].num_queries, calls[-1].num_keys) == shape:
            calls[-1] = AttentionCall(calls[-1].count + 1, *shape)
        else:
            calls.append(AttentionCall(1, *shape))
    tokens_per_rank, total = len(token_index), len(token_index) * cp_size
    is_padding = token_index < 0
    packed = PackedSequences(
        qkv_format="thd",
        position_ids=copy_to_device(positions, device),
        token_index=token_index,
        calls=tuple(calls),
        chunks=ChunkBounds.of([shapes[chunk] for chunk in order], device),
        query_index=_index([queries[chunk] for chunk in order], tokens_per_rank, device),
        key_index=_index([keys[chunk] for chunk in order], total, device),
        padding=copy_to_device(is_padding, device) if layout.padded.sum() > layout.lengths.sum() else None,
        num_tokens=int(layout.lengths.sum()),
        max_position=int(positions.max()),
        layout=layout,
    )
    if cu_seqlens:
        packed.cu_seqlens_q = packed.cu_seqlens_kv = layout.cu_seqlens(device)
        packed.max_seqlen_q = packed.max_seqlen_kv = int(layout.padded.max())
    return packed


def _check_segments(segments: Sequence[Segment]) -> None:
    lengths = [s.length for s in segments]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"a pack needs at least one segment, and no segment may be empty: got lengths {lengths[:8]}.")
    for number, segment in enumerate(segments):
        if segment.parent is not None and not 0 <= segment.parent < number:
            raise ValueError(f"segment {number} continues segment {segment.parent}, which does not come before it.")


def _index(parts: list[Ints], size: int, device: torch.device) -> Tensor | None:
    """Concatenate the parts to one index; return None if the result is `range(size)`."""
    index = np.concatenate(parts)
    if len(index) == size and (index == np.arange(size)).all():
        return None
    return copy_to_device(index, device)


@dataclass(frozen=True)
class PackLayout:
    """Positions of the segments in a pack. The fields `lengths` to `ancestors` have one entry for each segment."""

    lengths: Ints  # number of real tokens
    padded: Ints  # number of tokens, padding included
    starts: Ints  # index of the segment's first token among the S real tokens
    offsets: Ints  # position of the segment's first token in its sequence: the total length of all ancestors
    ancestors: list[list[int]]  # indices of all ancestors, the root first
    cp_size: int

    @classmethod
    def of(cls, segments: Sequence[Segment], cp_size: int, multiple: int) -> "PackLayout":
        lengths = np.array([s.length for s in segments], np.int64)
        chunks = 2 * cp_size if cp_size > 1 else 1
        padded = -(-lengths // chunks) * chunks
        padded[-1] += -padded.sum() % lcm(chunks, cp_size * multiple)
        ancestors: list[list[int]] = []
        for segment in segments:
            ancestors.append([] if segment.parent is None else [*ancestors[segment.parent], segment.parent])
        offsets = np.array([lengths[numbers].sum() for numbers in ancestors], np.int64)
        return cls(lengths, padded, np.cumsum(lengths) - lengths, offsets, ancestors, cp_size)

    @property
    def num_chunks(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1

    def chunks_of(self, rank: int) -> list[int]:
        """Return the indices of the chunks that `rank` holds of each segment."""
        return [rank, 2 * self.cp_size - 1 - rank] if self.cp_size > 1 else [0]

    def tokens(self, rank: int) -> tuple[Ints, Ints]:
        """Return two arrays [L] for the tokens on `rank`: (index of the real token or -1, position in its sequence)."""
        sizes = self.padded // self.num_chunks
        inside = np.concatenate([np.arange(c * n, (c + 1) * n) for n in sizes for c in self.chunks_of(rank)])
        segment = np.repeat(np.arange(len(sizes)), self.padded // self.cp_size)
        token_index = np.where(inside < self.lengths[segment], self.starts[segment] + inside, -1)
        return token_index, self.offsets[segment] + inside

    def attention(self, rank: int) -> tuple[list[tuple[int, int]], list[Ints], list[Ints]]:
        """Return three lists with one entry for each chunk on `rank`.

        The first list contains (number of queries, number of keys). The second list contains the indices of the queries among the
        L tokens of this rank. The third list contains the indices of the keys in the concatenated keys of all context-parallel
        ranks.
        """
        shapes, queries, keys = [], [], []
        for segment, size in enumerate((self.padded // self.num_chunks).tolist()):
            of_ancestors = [self._global_indices(s, int(self.lengths[s])) for s in self.ancestors[segment]]
            own = self._global_indices(segment, int(self.padded[segment]))
            for position, chunk in enumerate(self.chunks_of(rank)):
                indices = np.concatenate([*of_ancestors, own[: (chunk + 1) * size]])
                shapes.append((size, len(indices)))
                queries.append(self._first_tokens[segment] + position * size + np.arange(size))
                keys.append(indices)
        return shapes, queries, keys

    @cached_property
    def _tokens_per_rank(self) -> int:
        """L: number of tokens of each rank, including padding."""
        return int(self.padded.sum()) // self.cp_size

    @cached_property
    def _first_tokens(self) -> Ints:
        """Index of each segment's first token among the tokens of a rank. It is the same on every rank."""
        return (np.cumsum(self.padded) - self.padded) // self.cp_size

    def global_indices(self) -> Ints:
        """Return the index [S] of each real token in the concatenated tokens of all context-parallel ranks."""
        lengths = enumerate(self.lengths.tolist())
        return np.concatenate([self._global_indices(segment, length) for segment, length in lengths])

    def _global_indices(self, segment: int, count: int) -> Ints:
        """For the first `count` tokens of a segment, return their indices in the concatenated tokens of all ranks."""
        inside = np.arange(count)
        if self.cp_size == 1:
            return self._first_tokens[segment] + inside
        size = self.padded[segment] // self.num_chunks
        chunk, offset_in_chunk = np.divmod(inside, size)
        late = chunk >= self.cp_size
        rank = np.where(late, self.num_chunks - 1 - chunk, chunk)
        return rank * self._tokens_per_rank + self._first_tokens[segment] + late * size + offset_in_chunk

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Return the cumulative lengths of the whole segments for Transformer Engine, padding on all ranks included."""
        return copy_to_device(np.concatenate([[0], np.cumsum(self.padded)]).astype(np.int32), device)
