"""GPU memory of trainer ranks in each phase of a step.

Closed formulas give the memory of each pipeline stage. They are fast enough for the search of layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from mrl.planner.activation_bytes import (
    Adapters,
    bytes_outside_layers,
    indexer_working_bytes,
    layer_bytes,
    mtp_bytes,
    tower_working_bytes,
    virtual_stage_bytes,
)
from mrl.planner.micro_batch_shape import GPU_KERNELS, Kernels, MicroBatchShape, Recompute
from mrl.planner.model_shape import HeadKind, LayerKind, ModelShape
from mrl.planner.parameter_shape import FLOAT32_BYTES
from mrl.planner.trainer_state_bytes import GRADIENT_BYTES, StateBytes, VirtualStage, largest_state, pipeline_stages
from parallel.dims import ParallelDims
from parallel.trainer_config import MAX_MERGED_ELEMENTS

SENDER_BUCKETS = 2  # number of weight sync buckets that a sender allocates
MXFP8_GROUP = 32  # numbers that share one scale of one byte


@dataclass(frozen=True)
class TrainerSettings:
    """Settings that determine the memory of a trainer rank, together with the model and the layout."""

    max_tokens: int = 8192  # tokens of one micro-batch with gradients, over all context-parallel ranks
    forward_tokens: int | None = None  # tokens of one micro-batch without gradients; None: max_tokens
    itemsize: int = 2  # bytes of one element of a model weight or an activation
    gradient_bytes: int = GRADIENT_BYTES  # bytes of one element of a summed gradient
    head: HeadKind = "vocabulary"  # "value": the model is a critic
    trained: bool = True  # False: the model only computes log-probabilities or values
    logprob_chunk: int = 1024  # number of tokens whose logits are in memory at one time
    teacher_hidden: tuple[int, ...] = ()  # hidden sizes of the teachers whose output layers an update needs
    # whether gradients flow through log-probabilities of sampled tokens; False: only through divergences
    has_sampled_token_gradient: bool = True
    entropy: bool = False  # whether the loss needs entropies, which take one more chunk of logits
    recompute: Recompute = field(default_factory=Recompute)
    micro_batches: int | None = None  # micro-batches of a replica per optimizer step; None: enough to fill the pipeline
    keys_per_token: float = 1.0  # keys that attention reads, divided by tokens; above 1 if responses share a prompt
    forward_keys_per_token: float | None = None  # the same for micro-batches without gradients; None: keys_per_token
    imbalance: float = 1.0  # tokens that reach the experts of the busiest rank, divided by the mean of all ranks
    bucket_bytes: int = 64 * 1024 * 1024  # bytes of a weight sync bucket
    kernels: Kernels = GPU_KERNELS  # determines which activations are saved
    uneven: tuple[tuple[str, Any], ...] = ()  # fields of Megatron that give stages different numbers of layers
    adapters: ModelShape | None = None  # LoRA adapters, which are trained in place of the model; None: no adapters
    image_fraction: float = (
        0.0  # largest fraction of the tokens of a pack that are image tokens, if the model reads images
    )
    longest: int = 0  # tokens of the longest sequence; 0: one sequence may have all tokens of a micro-batch
    fp8: str = ""  # recipe with which matrix products are computed in FP8; "": in the dtype of the weights

    @property
    def trains_weights(self) -> bool:
        """Whether the weights of the model themselves are trained."""
        return self.trained and self.adapters is None

    @classmethod
    def with_megatron(cls, megatron: Mapping[str, Any], **settings: Any) -> TrainerSettings:
        """Return `settings` with the recomputation, the uneven stages and FP8 of the config's section `megatron`."""
        uneven = tuple((name, value) for name, value in sorted(megatron.items()) if name in UNEVEN_STAGE_FIELDS)
        fp8 = str(megatron.get("fp8_recipe")) if megatron.get("fp8") else ""
        return cls(recompute=Recompute.of(megatron), uneven=uneven, fp8=fp8, **settings)


@dataclass(frozen=True)
class TrainerRankMemory:
    """Bytes on the GPU of one trainer rank: the rank that needs the most memory in its pipeline stage."""

    stage: int  # index of the pipeline stage
    state: StateBytes  # weights, gradients and optimizer state
    saved: int  # activations of all micro-batches in flight, which are saved for backward passes
    working: int  # temporary tensors of a training pass: logits, gradients inside one layer, recomputed activations
    scoring: int  # activations and logits of a forward pass without gradients
    buckets: int  # buckets of the weight sync
    merged: int = 0  # tensors of one linear layer while the weight sync merges its LoRA adapters into its weight
    fp8: int = 0  # copies of weights in FP8, which Transformer Engine keeps as long as the weights are on the GPU

    @property
    def weights(self) -> int:
        """Bytes of the weights with their copies in FP8."""
        return self.state.weights + self.fp8

    @property
    def update(self) -> int:
        """Bytes during training passes and optimizer steps."""
        return self.state.total + self.fp8 + self.saved + self.working

    @property
    def score(self) -> int:
        """Bytes while log-probabilities or values are computed."""
        return self.state.total + self.fp8 + self.scoring

    @property
    def push(self) -> int:
        """Bytes during a weight push if engines share the GPU. Gradients and optimizer state are off the GPU then."""
        return self.weights + self.merged + self.buckets

    def phases(self) -> dict[str, int]:
        """Return the bytes in each phase of a step, if no other role shares the GPU."""
        weight_sync = self.state.total + self.fp8 + self.merged + self.buckets
        return dict(update=self.update, score=self.score, weight_sync=weight_sync)


@dataclass(frozen=True)
class TrainerMemory:
    """GPU memory of all pipeline stages of a model."""

    stages: tuple[TrainerRankMemory, ...]
    by_phase: Mapping[str, int] = field(default_factory=dict)  # phase -> bytes of the rank that needs the most memory

    @property
    def peak(self) -> TrainerRankMemory:
        """Memory of the stage that needs the most memory in any phase."""
        return max(self.stages, key=lambda rank: max(rank.phases().values()))


def trainer_memory(shape: ModelShape, dims: ParallelDims, settings: TrainerSettings) -> TrainerMemory:
    """Return the memory of all pipeline stages. The layout `dims` must be one that Architecture.check_layout accepts."""
    batch = _micro_batch(dims, settings, settings.max_tokens, settings.keys_per_token)
    if (
        settings.trains_weights
    ):  # a matrix that is not trained saves no input, and adapters save their inputs without FP8
        batch = replace(batch, fp8=settings.fp8)
    forward_batch = _micro_batch(
        dims,
        settings,
        settings.forward_tokens or settings.max_tokens,
        settings.forward_keys_per_token or settings.keys_per_token,
    )
    stages = tuple(
        _rank_memory(shape, dims, settings, (batch, forward_batch), index, stage)
        for index, stage in enumerate(cached_pipeline_stages(shape.num_layers, dims.pp, dims.vpp, settings.uneven))
    )
    names = stages[0].phases() if settings.trained else ("score",)
    return TrainerMemory(stages, {name: max(rank.phases()[name] for rank in stages) for name in names})


def _micro_batch(dims: ParallelDims, settings: TrainerSettings, tokens: int, keys_per_token: float) -> MicroBatchShape:
    sizes = dict(keys_per_token=keys_per_token, imbalance=min(settings.imbalance, dims.ep), kernels=settings.kernels)
    sizes |= dict(longest=min(settings.longest, tokens))
    images = int(tokens * settings.image_fraction)
    return MicroBatchShape.of(dims, tokens, settings.itemsize, images=images, **sizes)


@lru_cache(maxsize=4096)
def cached_pipeline_stages(
    num_layers: int, pp: int, vpp: int, uneven: tuple[tuple[str, Any], ...] = ()
) -> list[list[VirtualStage]]:
    """Return pipeline_stages() for these sizes, as `[pp][vpp]`. The result is cached, so callers must not change it."""
    return pipeline_stages(num_layers, ParallelDims(pp=pp, vpp=vpp), dict(uneven))


def _rank_memory(
    shape: ModelShape,
    dims: ParallelDims,
    settings: TrainerSettings,
    batches: tuple[MicroBatchShape, MicroBatchShape],
    index: int,
    stage: list[VirtualStage],
) -> TrainerRankMemory:
    """Return the memory of pipeline stage `index`. `batches`: the largest micro-batches with and without gradients."""
    batch, forward_batch = batches
    adapters = Adapters(settings.adapters, shape.num_experts // dims.ep) if settings.adapters else None
    state = largest_state(shape, dims, stage, settings.itemsize, settings.head, settings.trains_weights)
    if settings.adapters is not None:
        state += largest_state(settings.adapters, dims, stage, settings.itemsize, settings.head, settings.trained)
    state = replace(state, gradients=state.gradients * settings.gradient_bytes // GRADIENT_BYTES)
    kinds_by_stage = tuple(shape.kinds[v.first : v.first + v.layers] for v in stage)
    is_first, is_last = stage[0].is_first, stage[-1].is_last
    saved = working = 0
    if settings.trained:
        saved_per_pass = max(
            _saved_bytes(shape, batch, kinds, settings.recompute, adapters)
            + bytes_outside_layers(shape, batch, v.is_first, v.is_last)
            + (mtp_bytes(shape, batch, settings.recompute) if v.is_last else 0)
            for kinds, v in zip(kinds_by_stage, stage, strict=True)
        )
        saved = saved_per_pass * in_flight(dims, index, settings.micro_batches)
        head = head_bytes(shape, batch, settings, gradients=True) if is_last else 0
        head += (
            mtp_head_bytes(shape, batch, settings, copies_embedding=not is_first and not shape.tied) if is_last else 0
        )
        tower = tower_working_bytes(shape.tower, shape.hidden, batch) if is_first else 0
        backward = _backward_bytes(shape, batch, kinds_by_stage, settings.recompute, adapters)
        working = max(head, tower, backward + indexer_working_bytes(shape, batch))
    widest = max((_forward_bytes(shape, forward_batch, kinds, adapters) for kinds in kinds_by_stage), default=0)
    widest += indexer_working_bytes(shape, forward_batch)
    tower = tower_working_bytes(shape.tower, shape.hidden, forward_batch) if is_first else 0
    scoring = max(widest, tower, head_bytes(shape, forward_batch, settings, gradients=False) if is_last else 0)
    merged = _merged_bytes(shape, settings.adapters, dims, settings.itemsize) if settings.adapters else 0
    fp8 = _fp8_bytes(shape, dims, kinds_by_stage, settings.fp8, settings.trained) if settings.fp8 else 0
    return TrainerRankMemory(index, state, saved, working, scoring, SENDER_BUCKETS * settings.bucket_bytes, merged, fp8)


@lru_cache(maxsize=4096)
def _fp8_bytes(
    shape: ModelShape, dims: ParallelDims, kinds_by_stage: tuple[tuple[LayerKind, ...], ...], recipe: str, trained: bool
) -> int:
    """Return the bytes of copies of weights in FP8.

    If the model or its adapters are trained, each matrix has one copy for the forward pass and one copy for the backward
    pass. Otherwise, each matrix has one copy. Scales are counted only for mxfp8. The scales of other recipes have less than a
    thousandth of the bytes of the copies.
    """
    in_layers = [p for p in shape.parameters if p.location in ("layer", "expert")]
    matrices = [p for p in in_layers if ".linear_" in p.name and p.name.endswith(".weight")]
    numel = 0
    for kind, count in Counter(kind for stage in kinds_by_stage for kind in stage).items():
        for p in matrices:
            if p.present_in in kind.present:
                is_expert = p.location == "expert"
                experts = shape.num_experts // dims.ep if is_expert else 1
                numel += count * experts * p.shard_numel(dims.expert_tp if is_expert else dims.tp)
    copies = (2 if trained else 1) * numel
    return copies + (copies // MXFP8_GROUP if recipe == "mxfp8" else 0)


@lru_cache(maxsize=4096)
def _merged_bytes(shape: ModelShape, adapters: ModelShape, dims: ParallelDims, itemsize: int) -> int:
    """Return the largest number of bytes that a sender needs for the merged weight of one linear layer.

    Three tensors exist at a time: the merged weight, its Hugging Face matrices, and the Hugging Face matrices of the previous
    linear layer. While W + (alpha / rank) B A is computed in float32, there are four more tensors, each with at most
    MAX_MERGED_ELEMENTS elements.
    """
    adapted = {p.name.partition(".lora.")[0] + ".weight" for p in adapters.parameters}
    shards = [
        p.shard_numel(dims.expert_tp if p.location == "expert" else dims.tp)
        for p in shape.parameters
        if p.name in adapted
    ]
    largest = max(shards)
    return 3 * largest * itemsize + 4 * min(largest, MAX_MERGED_ELEMENTS) * FLOAT32_BYTES


@lru_cache(maxsize=65536)
def _saved_bytes(
    shape: ModelShape,
    batch: MicroBatchShape,
    kinds: tuple[LayerKind, ...],
    recompute: Recompute,
    adapters: Adapters | None,
) -> int:
    return virtual_stage_bytes(shape, batch, kinds, recompute, adapters)


def in_flight(dims: ParallelDims, stage: int, micro_batches: int | None = None) -> int:
    """Return the largest number of forward passes on pipeline rank `stage` whose backward pass has not run yet.

    The 1F1B schedule has pp - stage micro-batches in flight. The interleaved schedule has vpp forward passes for each
    micro-batch. It runs 2 (pp - stage - 1) + (vpp - 1) pp forward passes before the first pair of a forward and a backward pass.
    The forward pass of this pair is one more pass in flight. A pass computes L / (pp vpp) layers, where L is the number of layers
    of the model. So the first stage saves the activations of L (1 + (pp - 1) / (pp vpp)) layers (Korthikanti et al. 2022, section
    4.2.3).
    """
    if dims.vpp == 1:
        warmup = dims.pp - stage
        return warmup if micro_batches is None else min(warmup, micro_batches)
    warmup = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return warmup if micro_batches is None else min(warmup, micro_batches * dims.vpp)


@lru_cache(maxsize=65536)
def _backward_bytes(
    shape: ModelShape,
    batch: MicroBatchShape,
    kinds_by_stage: tuple[tuple[LayerKind, ...], ...],
    recompute: Recompute,
    adapters: Adapters | None,
) -> int:
    """Return the temporary bytes of a backward pass: gradients inside one layer, and activations that are recomputed together."""
    kinds, modules = {kind for stage in kinds_by_stage for kind in stage}, recompute.modules
    gradients = max((_layer_gradient_bytes(shape, batch, kind, not adapters) for kind in kinds), default=0)
    if recompute.granularity == "full":
        group = recompute.num_layers if recompute.method == "uniform" else 1
        group = min(group, max(map(len, kinds_by_stage), default=0))
        whole = (layer_bytes(shape, kind, batch, adapters=adapters) for kind in kinds)
        return gradients + group * max(whole, default=0)
    if recompute.granularity == "selective":
        recomputed = (
            layer_bytes(shape, kind, batch, adapters=adapters) - layer_bytes(shape, kind, batch, modules, adapters)
            for kind in kinds
        )
        return gradients + max(recomputed, default=0)
    return gradients


def _layer_gradient_bytes(shape: ModelShape, batch: MicroBatchShape, kind: LayerKind, trains_weights: bool) -> int:
    """Return the bytes of gradients during the backward pass of one block of a layer.

    The block is the MLP or the experts. In a layer without them, it is the attention or the recurrence. The result includes the
    gradients of the activations inside this block, and the gradient of the input. If `trains_weights` is true, the result also
    includes the gradient of the weight of the block's first projection, except for experts.
    """
    e, matrices = batch.itemsize, 3 if shape.gated else 2
    gathered = 2 * batch.tokens * shape.hidden * e  # the gathered input, and the gradient of the gathered input
    if kind.experts:
        received = batch.expert_rows(shape.topk)
        return received * (matrices * shape.moe_ffn // batch.etp + 2 * shape.hidden) * e + gathered
    if "dense" in kind.blocks:
        first, inside = (matrices - 1) * shape.ffn, matrices * shape.ffn
    else:  # the projection before attention or a recurrence, and the gradients of its parts
        first = max(p.shape[0] for p in shape.parameters if p.present_in in kind.present and ".linear_" in p.name)
        inside = 2 * first
    weights = first // batch.tp * shape.hidden * e if trains_weights else 0
    return batch.tokens * inside // batch.tp * e + gathered + weights


@lru_cache(maxsize=65536)
def _forward_bytes(
    shape: ModelShape, batch: MicroBatchShape, kinds: tuple[LayerKind, ...], adapters: Adapters | None
) -> int:
    """Return the bytes of a forward pass without gradients: the input and the tensors of the layer that needs the most memory."""
    largest = max((layer_bytes(shape, kind, batch, adapters=adapters) for kind in set(kinds)), default=0)
    return largest + batch.residual_tokens * shape.hidden * batch.itemsize


@lru_cache(maxsize=65536)
def head_bytes(shape: ModelShape, batch: MicroBatchShape, settings: TrainerSettings, *, gradients: bool) -> int:
    """Return the bytes of the head (parallel.logprobs): hidden states, chunks of logits, gradient of the head's weight.

    A head that is frozen has no gradient of its weight.
    """
    hidden = batch.tokens * shape.hidden * batch.itemsize
    if settings.head == "value":
        return (2 if gradients else 1) * batch.tokens * shape.hidden * FLOAT32_BYTES + hidden
    rows = -(-shape.vocab // batch.tp)
    chunk = min(settings.logprob_chunk, batch.tokens) * rows * FLOAT32_BYTES
    if not gradients:
        return hidden + (2 + settings.entropy) * chunk
    # The weight gradients of several chunks are summed in float32.
    several_chunks = batch.tokens > settings.logprob_chunk
    element = FLOAT32_BYTES + batch.itemsize if several_chunks else batch.itemsize
    sampled = 3 * chunk + (rows * shape.hidden * element if settings.trains_weights else 0)
    if settings.teacher_hidden:
        return 2 * hidden + _distillation_bytes(shape, batch, settings, chunk, sampled)
    return 2 * hidden + sampled


def mtp_head_bytes(
    shape: ModelShape, batch: MicroBatchShape, settings: TrainerSettings, *, copies_embedding: bool
) -> int:
    """Return the bytes of the heads of MTP layers: hidden states and a chunk of logits for each of these layers.

    `copies_embedding`: whether the result also includes a copy of the embedding for the MTP layers.
    """
    rows = -(-shape.vocab // batch.tp)
    chunk = min(settings.logprob_chunk, batch.tokens) * rows * FLOAT32_BYTES
    hidden = 2 * batch.tokens * shape.hidden * batch.itemsize
    embedding = rows * shape.hidden * batch.itemsize if copies_embedding and shape.mtp_layers else 0
    return shape.mtp_layers * (chunk + hidden) + embedding


def _distillation_bytes(
    shape: ModelShape, batch: MicroBatchShape, settings: TrainerSettings, chunk: int, sampled: int
) -> int:
    """Return the bytes of distillation over the whole vocabulary (parallel.distillation), without the policy's hidden states.

    The result includes the output layers of the teachers, and the hidden states of the teachers for one micro-batch. `chunk`:
    bytes of a chunk of logits. `sampled`: bytes of a loss on sampled tokens. If the head is trained, the backward pass computes
    one gradient of its weight for each teacher, and one for the loss on sampled tokens. It computes these gradients one after
    another, and the sum of the earlier gradients stays in memory.
    """
    rows = -(-shape.vocab // batch.tp)
    weight_gradient = rows * shape.hidden * batch.itemsize if settings.trains_weights else 0
    hidden_gradient = batch.tokens * shape.hidden * FLOAT32_BYTES
    teachers = (rows + batch.tokens) * sum(settings.teacher_hidden) * batch.itemsize
    divergence = 2 * chunk + weight_gradient + hidden_gradient  # four tensors with half of a chunk each
    backward = max(divergence, sampled) if settings.has_sampled_token_gradient else divergence
    if len(settings.teacher_hidden) + settings.has_sampled_token_gradient > 1:  # two gradients and their sum
        backward = max(backward, 2 * weight_gradient) + weight_gradient + hidden_gradient
    return teachers + max(3 * chunk, backward)  # the forward pass also computes log-probabilities and entropies
