"""Bytes of parameters, gradients and optimizer state on trainer ranks and in checkpoints, as Megatron allocates them.

Megatron stores parameters and fp32 gradients in flat buffers. Each virtual pipeline stage has one buffer for its dense
parameters and one buffer for its experts. A buffer has the parameters in the reverse order of the modules, and every parameter
begins at a multiple of 64 elements. Usually, a buffer is one bucket. With a tied embedding under pipeline parallelism, each
copy of the embedding is a bucket of its own. The parameters before the copy are another bucket, as are those after it. The
number of elements of a bucket is a multiple of 128 and of the number of ranks that shard the optimizer state of this bucket.
Each rank stores the AdamW moments for one shard of each bucket. If the model weights have 16 bits, the rank also stores fp32
main weights for these shards.

If gradients are reduced during the backward pass (trainer.overlap_grad_reduce), the first stage has more buckets. Their padding,
at most some hundred elements for each bucket of 40 million elements, is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from mrl.planner.model_shape import HeadKind, LayerKind, ModelShape
from mrl.planner.parameter_shape import ParameterShape
from parallel.dims import ParallelDims

PARAMETER_ALIGNMENT = 64  # a parameter begins at a multiple of this number of elements
BUCKET_ALIGNMENT = 128  # the size of a bucket is a multiple of this number of elements
GRADIENT_BYTES = 4  # bytes of the summed gradient, for each parameter
MOMENT_BYTES = 8  # bytes of the two AdamW moments, for each parameter
MAIN_WEIGHT_BYTES = 4  # bytes of the fp32 main weight, for each parameter
BIAS_BYTES = 4  # bytes of one correction bias, which is float32 for every dtype of the model
PINNED_BLOCK = 1 << 26  # bytes of one block of pinned memory; parallel.offload allocates whole blocks

UnevenStages = Mapping[str, Any]
"""Fields of Megatron that give pipeline stages different numbers of layers; see models.megatron_overrides.UNEVEN_STAGE_FIELDS."""


@dataclass(frozen=True)
class VirtualStage:
    """Consecutive layers of one pipeline rank."""

    first: int  # index of the first layer
    layers: int  # number of layers
    is_first: bool  # whether the stage has the embedding
    is_last: bool  # whether the stage has the final norm and the head

    def moe_layers(self, moe: tuple[bool, ...]) -> int:
        """Return how many layers of this stage have experts. `moe`: [layers of the model] whether the layer has experts."""
        return sum(moe[self.first : self.first + self.layers])


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one trainer rank stores for a model between training steps."""

    weights: int  # parameters; biases and token counts of routers; indexers; a vision tower that is not trained
    gradients: int
    optimizer: int

    def __add__(self, other: StateBytes) -> StateBytes:
        sums = (self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)
        return StateBytes(*sums)

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def offloaded(self) -> int:
        """Bytes of pinned host memory for the offloaded model. Offloading drops the gradients instead of copying them."""
        return sum(map(pinned_bytes, (self.weights, self.optimizer)))


def pinned_bytes(nbytes: int) -> int:
    """Return the bytes of the blocks of pinned memory that contain a copy with `nbytes` bytes."""
    return _round_up(nbytes, PINNED_BLOCK)


def optimizer_bytes_per_parameter(itemsize: int) -> int:
    """Return the bytes of optimizer state for one parameter. `itemsize`: bytes of one element of a model weight."""
    return MOMENT_BYTES + (MAIN_WEIGHT_BYTES if itemsize < MAIN_WEIGHT_BYTES else 0)


def checkpoint_bytes(trained: Iterable[ModelShape], itemsize: int) -> int:
    """Return the bytes of one checkpoint on disk: weights, main weights and moments of the trained models, without padding.

    `trained`: shapes of the trained models. Megatron's distributed optimizer writes an fp32 main weight for every parameter, even
    if the weights are fp32.
    """
    per_parameter = itemsize + MAIN_WEIGHT_BYTES + MOMENT_BYTES
    return sum(
        (shape.num_parameters + shape.num_mtp_parameters) * per_parameter
        + shape.frozen_vision_weights * itemsize
        + _indexer_bytes(shape, shape.kinds, itemsize)
        for shape in trained
    )


def layers_of_stages(num_layers: int, dims: ParallelDims, uneven: UnevenStages | None = None) -> list[list[int]]:
    """Return the number of layers of each virtual stage, as `[pp][vpp]`.

    Raises ValueError if the layers cannot be divided evenly over the stages for which `uneven` sets no number of layers, or if
    parallel.vpp does not divide the layers of a stage. Also raises ValueError if `uneven` sets pipeline_model_parallel_layout,
    because mrl plan does not support this field.
    """
    fields = {name: value for name, value in (uneven or {}).items() if name in UNEVEN_STAGE_FIELDS and value}
    if layout := fields.get("pipeline_model_parallel_layout"):
        raise ValueError(
            f"megatron.pipeline_model_parallel_layout={layout!r} is not supported by mrl plan; use "
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage."
        )
    ends = [fields.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last")]
    # If these fields are true, Megatron counts the embedding and the loss as one layer each.
    extra_layers = [int(fields.get(f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")]
    inner_stages = dims.pp - sum(end is not None for end in ends)
    inner_layers = num_layers + sum(extra_layers) - sum(end or 0 for end in ends)
    if inner_layers < 0 or (inner_stages and inner_layers % inner_stages) or (not inner_stages and inner_layers):
        raise ValueError(
            f"megatron: {inner_layers} layers cannot be divided evenly over {inner_stages} pipeline stages ({fields})."
        )
    counts = [inner_layers // inner_stages if inner_stages else 0] * dims.pp
    for stage, end in zip((0, -1), ends, strict=True):
        counts[stage] = counts[stage] if end is None else end
    if bad := [count for count in counts if count % dims.vpp]:
        raise ValueError(f"parallel.vpp={dims.vpp} does not divide the {bad[0]} layers of a pipeline stage.")
    stages = [[count // dims.vpp] * dims.vpp for count in counts]
    stages[0][0] -= extra_layers[0]
    stages[-1][-1] -= extra_layers[1]
    return stages


def pipeline_stages(
    num_layers: int, dims: ParallelDims, uneven: UnevenStages | None = None
) -> list[list[VirtualStage]]:
    """Return the virtual stages of each pipeline rank, as `[pp][vpp]`. Consecutive virtual stages are on consecutive ranks."""
    counts, first = layers_of_stages(num_layers, dims, uneven), 0
    stages: list[list[VirtualStage]] = [[] for _ in counts]
    for virtual in range(dims.vpp):
        for rank, rank_counts in enumerate(counts):
            is_first, is_last = virtual == rank == 0, virtual == dims.vpp - 1 and rank == dims.pp - 1
            stages[rank].append(VirtualStage(first, rank_counts[virtual], is_first, is_last))
            first += rank_counts[virtual]
    return stages


def state_of_rank(
    shape: ModelShape,
    dims: ParallelDims,
    rank: int,
    itemsize: int,
    *,
    head: HeadKind = "vocabulary",
    trained: bool = True,
    uneven: UnevenStages | None = None,
) -> StateBytes:
    """Return the bytes of the state that `rank` stores. A model that is not trained has only weights, without padding.

    `itemsize`: bytes of one element of a model weight.
    """
    coords = dims.coords(rank)
    stage = pipeline_stages(shape.num_layers, dims, uneven)[coords.pp]
    weights = sum(_other_weight_bytes(shape, virtual, itemsize) for virtual in stage)
    gradients = optimizer = 0
    for virtual in stage:
        for sizes, replicas, replica in _buckets(shape, dims, rank, virtual, head):
            numel = _round_up(sum(map(_padded, sizes)), lcm(BUCKET_ALIGNMENT, replicas)) if trained else sum(sizes)
            weights += numel * itemsize
            if trained:
                gradients += numel * GRADIENT_BYTES
                owned = _elements_in_shard(sizes, numel // replicas, replica)
                optimizer += owned * optimizer_bytes_per_parameter(itemsize)
    return StateBytes(weights, gradients, optimizer)


def _buckets(
    shape: ModelShape, dims: ParallelDims, rank: int, virtual: VirtualStage, head: HeadKind
) -> Iterator[tuple[list[int], int, int]]:
    """Yield one result for each bucket in the flat buffers of a virtual stage.

    A result is (list with the number of elements of each parameter, number of shards of the optimizer state, index of this
    rank's shard).
    """
    dense, experts = _parameter_sizes(shape, dims, virtual, head)
    coords, replicas = dims.coords(rank), dims.dp * dims.cp  # replicas: number of ranks with the same dense parameters
    shared = [_tied_embedding_numel(shape, dims, virtual, head)]  # size of the copy of a tied embedding
    parts = [dense]
    if any(shared):
        # On the first stage, the embedding is the first parameter. On the last stage, the copy is the weight of the output layer,
        # and only the parameters of MTP layers come after it.
        copy = 0 if virtual.is_first else len(dense) - 1 - len(_mtp_sizes(shape, dims.tp, "layer"))
        parts = [shared, dense[copy + 1 :], dense[:copy]]
    for part in parts:
        if part:
            yield part[::-1], replicas, coords.dp * dims.cp + coords.cp  # flat buffers have the reverse order
    if experts:
        ranks_per_copy = dims.ep * dims.expert_tp
        rank_in_stage = rank % (dims.world_size // dims.pp)
        yield experts[::-1], ranks_per_expert_shard(dims), rank_in_stage // ranks_per_copy


def _tied_embedding_numel(shape: ModelShape, dims: ParallelDims, virtual: VirtualStage, head: HeadKind) -> int:
    """Return the number of elements in this virtual stage's copy of a tied embedding. Megatron makes a bucket for each copy.

    If the virtual stage has no such copy, return 0.
    """
    has_copies = shape.tied and head == "vocabulary" and dims.pp > 1
    return -(-shape.vocab // dims.tp) * shape.hidden if has_copies and (virtual.is_first or virtual.is_last) else 0


def ranks_per_expert_shard(dims: ParallelDims) -> int:
    """Return the number of ranks of a pipeline stage that have the same shard of the same experts."""
    return dims.tp * dims.cp * dims.dp // (dims.ep * dims.expert_tp)


def _parameter_sizes(
    shape: ModelShape, dims: ParallelDims, virtual: VirtualStage, head: HeadKind
) -> tuple[list[int], list[int]]:
    """Return the number of elements of each parameter on one rank: (for dense parameters, for experts).

    The parameters are in the order of the modules.
    """
    dense = [p.shard_numel(dims.tp) for p in shape.parameters if p.location == "first"] if virtual.is_first else []
    experts: list[int] = []
    for layer in range(virtual.first, virtual.first + virtual.layers):
        layer_parameters = [p for p in shape.parameters if p.present_in in shape.kinds[layer].present]
        dense += [p.shard_numel(dims.tp) for p in layer_parameters if p.location == "layer"]
        one_expert = [p.shard_numel(dims.expert_tp) for p in layer_parameters if p.location == "expert"]
        experts += one_expert * (shape.num_experts // dims.ep) if one_expert else []
    if virtual.is_last:
        one_expert = _mtp_sizes(shape, dims.expert_tp, "expert", 1)
        experts += shape.mtp_layers * one_expert * (shape.num_experts // dims.ep)
    return dense + (_last_sizes(shape, dims.tp, virtual, head) if virtual.is_last else []), experts


def _last_sizes(shape: ModelShape, tp: int, virtual: VirtualStage, head: HeadKind) -> list[int]:
    """Return the number of elements of each parameter of the final norm, the head and the MTP layers, except for experts.

    If the output layer shares its weights with an embedding on the same stage, the result omits the output layer. If the
    embedding is on another stage, the last stage has its own copy of the shared weights, which the result includes.
    """
    norm = [p.shard_numel(tp) for p in shape.parameters if p.location == "last" and not p.is_vocabulary]
    if head == "value":
        return [*norm, shape.hidden, 1]
    mtp = _mtp_sizes(shape, tp, "layer")
    if shape.tied and virtual.is_first:
        return [*norm, *mtp]
    return [*norm, -(-shape.vocab // tp) * shape.hidden, *mtp]


def _mtp_sizes(shape: ModelShape, ranks: int, location: str, layers: int | None = None) -> list[int]:
    """Return the number of elements of each parameter of `layers` MTP layers (None: all) at this location.

    `ranks`: number of tensor-parallel ranks, or of expert-tensor-parallel ranks if the location is "expert".
    """
    one_layer = [p.shard_numel(ranks) for p in shape.mtp_parameters if p.location == location]
    return one_layer * (shape.mtp_layers if layers is None else layers)


def _other_weight_bytes(shape: ModelShape, virtual: VirtualStage, itemsize: int) -> int:
    """Return the bytes of weights outside the flat buffers: torch buffers of routers, indexers, and a frozen vision tower."""
    of_indexers = _indexer_bytes(shape, shape.kinds[virtual.first : virtual.first + virtual.layers], itemsize)
    frozen = virtual.is_first * shape.frozen_vision_weights * itemsize
    return _module_buffer_bytes(shape, virtual, itemsize) + of_indexers + frozen


def _indexer_bytes(shape: ModelShape, kinds: Sequence[LayerKind], itemsize: int) -> int:
    """Return the bytes of the indexers in layers of these kinds."""
    return sum(kind.indexer for kind in kinds) * shape.indexer.num_bytes(itemsize) if shape.indexer else 0


def _module_buffer_bytes(shape: ModelShape, virtual: VirtualStage, itemsize: int) -> int:
    """Return the bytes of torch buffers of the routers: correction biases in fp32, and token counts in the model's dtype."""
    layers = virtual.moe_layers(shape.moe) + shape.mtp_layers * virtual.is_last * shape.mtp_kind.experts
    return layers * sum(p.numel for p in shape.router_buffers) * (BIAS_BYTES + itemsize)


def _elements_in_shard(sizes: list[int], shard_size: int, index: int) -> int:
    """Return the number of elements, without padding, in the shard at `index` of a flat buffer.

    `sizes`: number of elements of each parameter in the buffer. `shard_size`: number of elements of a shard with its padding.
    """
    low, high = index * shard_size, (index + 1) * shard_size
    count = start = 0
    for size in sizes:
        start = _padded(start)
        count += max(0, min(high, start + size) - max(low, start))
        start += size
    return count


def _padded(elements: int) -> int:
    return _round_up(elements, PARAMETER_ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@lru_cache(maxsize=4096)
def _layer_numel(shape: ModelShape, kind: LayerKind, tp: int, etp: int) -> tuple[int, int]:
    """Return the number of elements in flat buffers for one layer: (its dense parameters, one of its experts)."""
    layer_parameters = [p for p in shape.parameters if p.present_in in kind.present]
    dense, expert = ([p for p in layer_parameters if p.location == location] for location in ("layer", "expert"))
    return _padded_numel(dense, tp), _padded_numel(expert, etp)


def _padded_numel(parameters: list[ParameterShape], ranks: int) -> int:
    return sum(_padded(p.shard_numel(ranks)) for p in parameters)


@lru_cache(maxsize=4096)
def _embedding_and_head_numel(shape: ModelShape, tp: int, head: HeadKind, one_stage: bool) -> tuple[int, int]:
    """Return the number of elements in flat buffers: (of the parameters before the layers, of the parameters of `_last_sizes`).

    `one_stage`: whether the embedding and the head are on the same virtual stage.
    """
    last = sum(map(_padded, _last_sizes(shape, tp, VirtualStage(0, 0, one_stage, True), head)))
    return _padded_numel([p for p in shape.parameters if p.location == "first"], tp), last


def buffer_numel(
    shape: ModelShape, virtual: VirtualStage, tp: int, ep: int, etp: int, head: HeadKind = "vocabulary"
) -> tuple[int, int]:
    """Return the number of elements in a rank's flat buffers for one virtual stage: (dense parameters, experts).

    The padding at the end of the buffers is not included.
    """
    kinds = Counter(shape.kinds[virtual.first : virtual.first + virtual.layers])
    layers = [(count, *_layer_numel(shape, kind, tp, etp)) for kind, count in kinds.items()]
    embedding, last = _embedding_and_head_numel(shape, tp, head, virtual.is_first and virtual.is_last)
    outside_layers = virtual.is_first * embedding + virtual.is_last * last
    dense = sum(count * numel for count, numel, _ in layers) + outside_layers
    in_mtp = virtual.is_last * sum(map(_padded, _mtp_sizes(shape, etp, "expert")))
    return dense, (sum(count * expert for count, _, expert in layers) + in_mtp) * (shape.num_experts // ep)


def largest_state(
    shape: ModelShape, dims: ParallelDims, stage: list[VirtualStage], itemsize: int, head: HeadKind, trained: bool
) -> StateBytes:
    """Return an upper bound for the state of every rank of one pipeline stage, from a closed formula, which is fast.

    For a trained model, the bound is the largest `state_of_rank` of the stage, except that padding elements count as if they had
    optimizer state. For a model that is not trained, the bound also includes the padding between parameters.
    """
    weights = gradients = optimizer = 0
    for virtual in stage:
        dense, experts = buffer_numel(shape, virtual, dims.tp, dims.ep, dims.expert_tp, head)
        weights += _other_weight_bytes(shape, virtual, itemsize)
        shared, replicas_of_dense = _padded(_tied_embedding_numel(shape, dims, virtual, head)), dims.dp * dims.cp
        mtp = sum(map(_padded, _mtp_sizes(shape, dims.tp, "layer"))) if shared and virtual.is_last else 0
        buckets = (
            (shared, replicas_of_dense),
            (mtp, replicas_of_dense),
            (dense - shared - mtp, replicas_of_dense),
            (experts, ranks_per_expert_shard(dims) or 1),
        )
        for numel, replicas in buckets:
            if numel:
                padded = _round_up(numel, lcm(BUCKET_ALIGNMENT, replicas)) if trained else numel
                weights += padded * itemsize
                gradients += padded * GRADIENT_BYTES * trained
                per_parameter = optimizer_bytes_per_parameter(itemsize) * trained
                optimizer += min(numel, padded // replicas) * per_parameter
    return StateBytes(weights, gradients, optimizer)
