"""Conversion rules between Hugging Face tensors and Megatron parameters, and boxes (slices of tensors).

A rule has two steps. First, each Hugging Face tensor is split into tensor-parallel shards along `axis`. (If `axis` is None, every
rank has the whole tensor. If a tensor concatenates several parts, such as queries, keys and values in Phi-3, each part is
split.) Then `merge` combines the shards on one rank into a Megatron tensor. The inverse of the first step is concatenation along
`axis`, and the inverse of `merge` is `split`. Therefore one rule works in both directions. This module does not communicate with
other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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

    def contains(self, other: Box) -> bool:
        """Whether `other` lies in this box."""
        return self.intersect(other) == other

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

    This base class is for parameters that are equal to a single Hugging Face tensor. The argument `sizes` of the methods is
    Architecture.sizes: name of a dim -> its size in the whole model.
    """

    megatron: str  # parameter name; {layer} and {expert} are indices in the whole model, not indices on a rank
    hf: tuple[str, ...]  # Hugging Face tensor names, in the order in which `merge` needs the tensors
    # Shapes of the Hugging Face tensors, as keys of Architecture.sizes. If there are more shapes than names, the first tensor
    # concatenates several parts along dim 0, such as the queries, keys and values in Phi-3, and each part has a shape.
    shapes: tuple[tuple[str, ...], ...]
    axis: int | None = None  # dim of the Hugging Face tensors that (expert) tensor parallelism splits; None: not split
    # which models or layers have this parameter; untied models have separate embedding and output weights
    present_in: Literal[
        "all", "untied_models", "dense_layers", "moe_layers", "attention_layers", "recurrent_layers", "indexer_layers"
    ] = "all"
    is_buffer: bool = False  # always float32, and not updated by the optimizer
    is_frozen: bool = False  # never trained, and without a gradient
    part: str | None = None  # the optional part of the model (see Architecture.parts) that has the parameter
    replicated_in_engine: bool = False  # every engine rank has the whole tensor, although trainers split it
    negative_exp_in_engine: bool = (
        False  # engines store -exp(x) where this tensor has the value x, as for the decays A_log of Mamba-2
    )
    expert: int | None = None  # index of the expert, set by `for_layer`; None: the parameter belongs to no expert

    def for_layer(self, layer: int, expert: int | None = None) -> ParamMapping:
        """Return this row with the indices of one layer and one expert in its names."""

        def fill(name: str) -> str:
            return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        return replace(self, megatron=fill(self.megatron), hf=tuple(map(fill, self.hf)), expert=expert)

    def for_index(self, name: str, index: int) -> ParamMapping:
        """Return this row with `index` in place of `{name}`, a placeholder for a repeated part of the vision tower."""
        hf = tuple(each.replace(f"{{{name}}}", str(index)) for each in self.hf)
        return replace(self, megatron=self.megatron.replace(f"{{{name}}}", str(index)), hf=hf)

    @property
    def num_concatenated(self) -> int:
        """Number of parts that the first Hugging Face tensor concatenates. Tensor parallelism splits each part separately."""
        return 1 + len(self.shapes) - len(self.hf)

    def first_shape_index(self, name: str) -> int:
        """Return the index in `shapes` of the Hugging Face tensor `name`, or of the first part that it concatenates."""
        index = self.hf.index(name)
        return index + self.num_concatenated - 1 if index else 0

    def hf_shapes(self, sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each Hugging Face tensor by name."""
        shapes = [tuple(sizes[s] for s in shape) for shape in self.shapes]
        first, others = shapes[: self.num_concatenated], shapes[self.num_concatenated :]
        if len(first) > 1:
            first = [(sum(shape[0] for shape in first), *first[0][1:])]
        return dict(zip(self.hf, first + others, strict=True))

    def concatenated_boxes(self, sizes: dict[str, int]) -> dict[str, list[Box]]:
        """Return the concatenated parts of each Hugging Face tensor by name. Most tensors have one part, the whole tensor."""
        boxes = {name: [Box.whole(shape)] for name, shape in self.hf_shapes(sizes).items()}
        if self.num_concatenated > 1:
            assert self.axis == 0, f"{self.megatron}: a tensor with several concatenated parts is split along dim 0"
            (whole,) = boxes[self.hf[0]]
            ends = accumulate(self._concatenated_rows(sizes))
            boxes[self.hf[0]] = [whole.narrow(0, start, end) for start, end in pairwise([0, *ends])]
        return boxes

    def _concatenated_rows(self, sizes: dict[str, int]) -> list[int]:
        """Return the number of rows of each part that the first Hugging Face tensor concatenates."""
        return [sizes[shape[0]] for shape in self.shapes[: self.num_concatenated]]

    def split_over_ranks(self, sizes: dict[str, int], tp_size: int) -> dict[str, list[list[Box]]]:
        """Return for each Hugging Face tensor the boxes of each tensor-parallel rank, one box for each concatenated part.

        If every rank has the whole tensor, the list has a single entry, which applies to all ranks.
        """
        ranks = 1 if self.axis is None else tp_size
        return {
            name: [[self.rank_box(box, rank, ranks) for box in boxes] for rank in range(ranks)]
            for name, boxes in self.concatenated_boxes(sizes).items()
        }

    def rank_box(self, box: Box, rank: int, ranks: int) -> Box:
        """Return what rank `rank` of `ranks` holds of `box`, which is a whole tensor or one of its concatenated parts."""
        if self.axis is None or ranks == 1:
            return box
        rows = -(-box.sizes[self.axis] // ranks)  # the last ranks have padding if the rows do not divide evenly
        first = box.starts[self.axis]
        return box.narrow(self.axis, first + rank * rows, first + (rank + 1) * rows)

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        """Combine the shards of all parts on one rank into the Megatron tensor of the same rank."""
        (part,) = parts
        return part

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        """Split the Megatron tensor of one rank into shards of all parts. The inverse of `merge`."""
        return [tensor]

    def to_megatron(self, tensors: Sequence[Tensor], sizes: dict[str, int], tp_rank: int, tp_size: int) -> Tensor:
        """Convert whole Hugging Face tensors to the Megatron tensor of tensor-parallel rank `tp_rank`."""
        if self.num_concatenated > 1:
            tensors = [*tensors[0].split(self._concatenated_rows(sizes)), *tensors[1:]]
        padded = [self._padded(t, tp_size) for t in tensors]
        if self.axis is None or tp_size == 1:
            return self.merge(padded, sizes)
        return self.merge([t.chunk(tp_size, self.axis)[tp_rank] for t in padded], sizes)

    def to_hf(self, shards: Sequence[Tensor], sizes: dict[str, int]) -> dict[str, Tensor]:
        """Convert the Megatron tensors of all tensor-parallel ranks to whole Hugging Face tensors."""
        if self.axis is None:
            shards = shards[:1]
        parts = [self.split(shard, sizes) for shard in shards]
        hf_tensors = [
            _cat(pieces, self.axis or 0) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True)
        ]
        if self.num_concatenated > 1:
            hf_tensors = [_cat(hf_tensors[: self.num_concatenated]), *hf_tensors[self.num_concatenated :]]
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
        return self._split_groups(tensor, sizes["head_dim"], sizes["q"] // sizes["kv"])

    def _split_groups(self, tensor: Tensor, d: int, per_group: int) -> list[Tensor]:
        """Split the tensor of this rank, group by group, into queries (with the gates, if any), keys and values.

        A group has `per_group` query heads (or query heads and gates), one key head and one value head, of `d` rows each.
        """
        grouped = tensor.reshape(-1, (per_group + 2) * d, *tensor.shape[1:])
        parts = grouped.split([per_group * d, d, d], dim=1)
        return [p.reshape(-1, *tensor.shape[1:]) for p in parts]


@dataclass(frozen=True)
class GatedQKVMapping(QKVMapping):
    """Query, key and value projections of attention with an output gate.

    In the Hugging Face tensor, each query head is followed by its gate. In a group of the Megatron tensor, the query heads come
    before the gates of all these heads.
    """

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        d, (query, key, value) = sizes["head_dim"], parts
        heads = query.unflatten(0, (key.size(0) // d, -1, 2, d)).transpose(1, 2).flatten(0, 3)
        return super().merge([heads, key, value], sizes)

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        per_group = sizes["q_and_gate"] // sizes["kv"]
        query, key, value = self._split_groups(tensor, sizes["head_dim"], per_group)
        heads = query.unflatten(0, (key.size(0) // sizes["head_dim"], 2, -1, sizes["head_dim"])).transpose(1, 2)
        return [heads.flatten(0, 3), key, value]


@dataclass(frozen=True)
class RecurrentGroupsMapping(ParamMapping):
    """Input projections of a recurrent layer (gated delta net, Mamba-2), which Megatron stores in one tensor, group after group.

    The rows of each Hugging Face tensor, or of each part that it concatenates, belong to groups of heads:
    `[groups * rows per group, ...]`. In Megatron's tensor, a group has its rows of the first tensor (or part), then its rows of
    the second one, and so on. Before it is split over tensor-parallel ranks, a tensor has `sizes["head_groups"]` groups: one
    for each key head of a gated delta net, or the groups of Mamba-2.
    """

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        groups = parts[0].size(0) * sizes["head_groups"] // sizes[self.shapes[0][0]]
        return _cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        rows = [sizes[shape[0]] // sizes["head_groups"] for shape in self.shapes]
        return [part.flatten(0, 1) for part in tensor.unflatten(0, (-1, sum(rows))).split(rows, 1)]


@dataclass(frozen=True)
class GatedMLPMapping(ParamMapping):
    """Gate and up projections, which Megatron stores in one tensor: on each rank the gate shard, then the up shard."""

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        return _cat(list(parts), 0)

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        return list(tensor.chunk(2, 0))


@dataclass(frozen=True)
class InterleavedMLPMapping(ParamMapping):
    """Gate and up projections in one tensor with alternating rows: first row of the gate, first row of the up projection, ...

    Megatron stores on each rank the gate shard, then the up shard.
    """

    def merge(self, parts: Sequence[Tensor], sizes: dict[str, int]) -> Tensor:
        (rows,) = parts
        return _cat([rows[::2], rows[1::2]])

    def split(self, tensor: Tensor, sizes: dict[str, int]) -> list[Tensor]:
        return [_cat([half.unsqueeze(1) for half in tensor.chunk(2, 0)], 1).flatten(0, 1)]
