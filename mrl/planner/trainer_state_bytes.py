"""Bytes of parameters, gradients and optimizer state of trainer ranks: what Megatron allocates, to the byte.

Parameters and fp32 gradients are in flat buffers, one of all of a virtual stage's dense parameters and one of its experts'. In
them each parameter begins at a multiple of 64 elements, and each buffer ends at a multiple of 128 and of the ranks that share
its optimizer state. A rank keeps AdamW's moments, and fp32 main weights of 16-bit ones, for its part of the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from models.megatron_fields import UNEVEN
from mrl.planner.model_shape import Head, ModelShape, Parameter
from parallel.dims import ParallelDims

START = 64  # elements; a parameter begins at a multiple of it
END = 128  # elements; a buffer ends at a multiple of it
GRADIENT = 4  # bytes of a gradient
MOMENTS = 8  # bytes of AdamW's two
MAIN = 4  # bytes of a main weight, where weights have 16 bits


@dataclass(frozen=True)
class Chunk:
    """A virtual stage."""

    first: int  # number of its first layer
    layers: int
    is_first: bool  # of the model: it has the embedding
    is_last: bool  # it has the final norm and the head


@dataclass(frozen=True)
class StateBytes:
    """What one trainer rank holds of a model between steps."""

    weights: int  # flat buffers and other buffers of the modules
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def layers_of_stages(num_layers: int, dims: ParallelDims, uneven: Mapping[str, Any] | None = None) -> list[list[int]]:
    """Layers of each virtual stage, by pipeline rank. `uneven`: the fields of Megatron that give stages different numbers.

    Raises ValueError where they leave layers over, or say it by pipeline_model_parallel_layout, which is not read here.
    """
    asked = {name: value for name, value in (uneven or {}).items() if name in UNEVEN and value}
    if layout := asked.get("pipeline_model_parallel_layout"):
        raise ValueError(
            f"megatron.pipeline_model_parallel_layout={layout!r} is not read by mrl plan; use "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage."
        )
    ends = [asked.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    beside = [int(asked.get(f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")]
    inner = [dims.pp - sum(end is not None for end in ends), num_layers + sum(beside) - sum(end or 0 for end in ends)]
    if inner[1] < 0 or (inner[0] and inner[1] % inner[0]) or (not inner[0] and inner[1]):
        raise ValueError(f"megatron: {inner[1]} layers do not divide over {inner[0]} pipeline stages ({asked}).")
    counts = [inner[1] // inner[0] if inner[0] else 0] * dims.pp
    for place, end in zip((0, -1), ends, strict=True):
        counts[place] = counts[place] if end is None else end
    if bad := [count for count in counts if count % dims.vpp]:
        raise ValueError(f"parallel.vpp={dims.vpp} does not divide the {bad[0]} layers of a pipeline stage.")
    stages = [[count // dims.vpp] * dims.vpp for count in counts]
    stages[0][0] -= beside[0]
    stages[-1][-1] -= beside[1]
    return stages


def stages_of(shape: ModelShape, dims: ParallelDims, uneven: Mapping[str, Any] | None = None) -> list[list[Chunk]]:
    """The virtual stages of each pipeline rank; consecutive layers go round the ranks."""
    counts, first = layers_of_stages(shape.num_layers, dims, uneven), 0
    stages: list[list[Chunk]] = [[] for _ in counts]
    for turn in range(dims.vpp):
        for rank, of_rank in enumerate(counts):
            ends = (turn == rank == 0, turn == dims.vpp - 1 and rank == dims.pp - 1)
            stages[rank].append(Chunk(first, of_rank[turn], *ends))
            first += of_rank[turn]
    return stages


def state_of_rank(
    shape: ModelShape,
    dims: ParallelDims,
    rank: int,
    itemsize: int,
    *,
    head: Head = "vocabulary",
    trained: bool = True,
    uneven: Mapping[str, Any] | None = None,
) -> StateBytes:
    """Exactly what `rank` holds; `itemsize`: bytes of a weight. A model that is not trained has its weights only."""
    coords = dims.coords(rank)
    stage = stages_of(shape, dims, uneven)[coords.pp]
    weights = sum(_module_buffers(shape, chunk, itemsize) for chunk in stage)
    gradients = optimizer = 0
    for chunk in stage:
        for sizes, ranks, place in _buffers(shape, dims, rank, chunk, head):
            numel = _aligned(sum(map(_start, sizes)), lcm(END, ranks)) if trained else sum(sizes)
            weights += numel * itemsize
            if trained:
                gradients += numel * GRADIENT
                optimizer += _held(sizes, numel // ranks, place) * state_bytes(itemsize)
    return StateBytes(weights, gradients, optimizer)


def state_bytes(itemsize: int) -> int:
    """Bytes of optimizer state for one parameter."""
    return MOMENTS + (MAIN if itemsize < MAIN else 0)


def _buffers(
    shape: ModelShape, dims: ParallelDims, rank: int, chunk: Chunk, head: Head
) -> Iterator[tuple[list[int], int, int]]:
    """(elements of each parameter as the buffer has them, ranks that share its state, this rank's place among them)."""
    dense, experts = _sizes(shape, dims, chunk, head)
    coords, ranks = dims.coords(rank), dims.dp * dims.cp
    if dense:
        yield dense[::-1], ranks, coords.dp * dims.cp + coords.cp
    if experts:
        one_copy = dims.ep * dims.expert_tp
        in_stage = rank % (dims.world_size // dims.pp)
        yield experts[::-1], expert_replicas(dims), in_stage // one_copy


def expert_replicas(dims: ParallelDims) -> int:
    """Ranks of a pipeline stage that hold the same part of the same experts."""
    return dims.tp * dims.cp * dims.dp // (dims.ep * dims.expert_tp)


def _sizes(shape: ModelShape, dims: ParallelDims, chunk: Chunk, head: Head) -> tuple[list[int], list[int]]:
    """Elements of each parameter of a chunk on one rank, in the order of its modules: dense ones, experts'."""
    dense = [p.numel(dims.tp) for p in shape.parameters if p.place == "first"] if chunk.is_first else []
    experts: list[int] = []
    for layer in range(chunk.first, chunk.first + chunk.layers):
        kind = ("always", "moe" if shape.moe[layer] else "dense")
        mine = [p for p in shape.parameters if p.where in kind]
        dense += [p.numel(dims.tp) for p in mine if p.place == "layer"]
        of_one = [p.numel(dims.expert_tp) for p in mine if p.place == "expert"]
        experts += of_one * (shape.experts // dims.ep) if of_one else []
    return dense + (_of_end(shape, dims, chunk, head) if chunk.is_last else []), experts


def _of_end(shape: ModelShape, dims: ParallelDims, chunk: Chunk, head: Head) -> list[int]:
    """Of the final norm and the head; a tied output layer is a copy where the embedding is elsewhere."""
    found = [p.numel(dims.tp) for p in shape.parameters if p.place == "last" and not p.is_vocabulary]
    if head == "value":
        return [*found, shape.hidden, 1]
    if shape.tied and chunk.is_first:
        return found
    return [*found, -(-shape.vocab // dims.tp) * shape.hidden]


def _module_buffers(shape: ModelShape, chunk: Chunk, itemsize: int) -> int:
    """Bytes of correction biases (fp32), and of the counts beside them (of the model's dtype)."""
    layers = sum(shape.moe[chunk.first : chunk.first + chunk.layers])
    return layers * sum(p.numel(1) for p in shape.buffers) * (4 + itemsize)


def _held(sizes: list[int], part: int, place: int) -> int:
    """Elements of parameters, padding left out, in part number `place` of a buffer of these parameters."""
    low, high = place * part, (place + 1) * part
    held = at = 0
    for size in sizes:
        at = _start(at)
        held += max(0, min(high, at + size) - max(low, at))
        at += size
    return held


def _start(elements: int) -> int:
    return _aligned(elements, START)


def _aligned(elements: int, to: int) -> int:
    return -(-elements // to) * to


@lru_cache(maxsize=4096)
def _of_a_layer(shape: ModelShape, moe: bool, tp: int, etp: int) -> tuple[int, int]:
    """Elements in the buffers of (a layer's dense parameters, one of its experts)."""
    mine = [p for p in shape.parameters if p.where in ("always", "moe" if moe else "dense")]
    return _padded([p for p in mine if p.place == "layer"], tp), _padded([p for p in mine if p.place == "expert"], etp)


def _padded(parameters: list[Parameter], ranks: int) -> int:
    return sum(_start(p.numel(ranks)) for p in parameters)


@lru_cache(maxsize=4096)
def _of_ends(shape: ModelShape, tp: int, head: Head, whole: bool) -> tuple[int, int]:
    """Elements in the buffers of (the embedding, final norm and head); `whole`: both are on one virtual stage."""
    chunk = Chunk(0, 0, whole, True)
    last = sum(map(_start, _of_end(shape, ParallelDims(tp=tp), chunk, head)))
    return _padded([p for p in shape.parameters if p.place == "first"], tp), last


def largest_state(
    shape: ModelShape, dims: ParallelDims, stage: list[Chunk], itemsize: int, head: Head, trained: bool
) -> StateBytes:
    """The most that any rank of a pipeline stage holds, in closed form: `state_of_rank`, but for a part's padding."""
    weights = gradients = optimizer = 0
    for chunk in stage:
        moe = sum(shape.moe[chunk.first : chunk.first + chunk.layers])
        dense_layer, _ = _of_a_layer(shape, False, dims.tp, dims.expert_tp)
        moe_layer, expert = _of_a_layer(shape, True, dims.tp, dims.expert_tp) if moe else (0, 0)
        first, last = _of_ends(shape, dims.tp, head, chunk.is_first and chunk.is_last)
        dense = (chunk.layers - moe) * dense_layer + moe * moe_layer + chunk.is_first * first + chunk.is_last * last
        weights += _module_buffers(shape, chunk, itemsize) if moe and shape.buffers else 0
        experts = moe * expert * (shape.experts // dims.ep)
        for numel, ranks in ((dense, dims.dp * dims.cp), (experts, expert_replicas(dims) if experts else 1)):
            if numel:
                whole = _aligned(numel, lcm(END, ranks)) if trained else numel
                weights += whole * itemsize
                gradients += whole * GRADIENT * trained
                optimizer += min(numel, whole // ranks) * state_bytes(itemsize) * trained
    return StateBytes(weights, gradients, optimizer)
