"""GPU memory of trainer ranks in each phase of a step, in closed form for each pipeline stage: fast enough to search layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from models.megatron_overrides import UNEVEN_STAGE_FIELDS
from mrl.planner.activation_bytes import (
    GPU_KERNELS,
    Kernels,
    MicroBatchShape,
    Recompute,
    end_bytes,
    layer_bytes,
    virtual_stage_bytes,
)
from mrl.planner.model_shape import HeadKind, ModelShape
from mrl.planner.trainer_state_bytes import StateBytes, VirtualStage, largest_state, pipeline_stages
from parallel.dims import ParallelDims

SENDER_BUCKETS = 2  # buckets of the weight sync that a sender allocates
FLOAT32_BYTES = 4  # of a logit, and of a gradient that is summed in float32


@dataclass(frozen=True)
class TrainerSettings:
    """Settings that determine a trainer's memory, together with the model and the layout."""

    max_tokens: int = 8192  # of one micro-batch, over all context-parallel ranks
    itemsize: int = 2  # bytes of a weight and of an activation
    head: HeadKind = "vocabulary"
    trained: bool = True
    logprob_chunk: int = 1024  # number of tokens whose logits are in memory together
    entropy: bool = False  # the loss needs entropies: one more chunk of logits
    recompute: Recompute = field(default_factory=Recompute)
    micro_batches: int | None = None  # of one optimizer step on a replica; None: enough to fill the pipeline
    keys_per_token: float = 1.0  # keys that attention reads per token; above 1 where responses share a prompt
    imbalance: float = 1.0  # tokens that reach the busiest rank's experts, divided by the mean of all ranks
    bucket_bytes: int = 64 * 1024 * 1024  # of the weight sync
    kernels: Kernels = GPU_KERNELS
    uneven: tuple[tuple[str, Any], ...] = ()  # fields of Megatron that give stages different numbers of layers

    @classmethod
    def with_megatron(cls, megatron: Mapping[str, Any], **settings: Any) -> TrainerSettings:
        """Combine `settings` with recomputation and uneven stages from the config's section `megatron`."""
        uneven = tuple((name, value) for name, value in sorted(megatron.items()) if name in UNEVEN_STAGE_FIELDS)
        return cls(recompute=Recompute.of(megatron), uneven=uneven, **settings)


@dataclass(frozen=True)
class TrainerRankMemory:
    """Bytes on the GPU of the busiest rank of one pipeline stage."""

    stage: int
    state: StateBytes
    saved: int  # activations kept for backward passes, of all micro-batches in flight
    working: int  # temporary bytes of a pass: logits, gradients of activations, one recomputed layer
    scoring: int  # activations and logits of a pass without gradients
    buckets: int  # of the weight sync

    @property
    def update(self) -> int:
        """Bytes during the optimizer steps."""
        return self.state.total + self.saved + self.working

    @property
    def score(self) -> int:
        """Bytes while log-probabilities or values are computed."""
        return self.state.total + self.scoring

    @property
    def push(self) -> int:
        """Bytes during a weight sync on shared GPUs, where gradients and optimizer state are offloaded."""
        return self.state.weights + self.buckets

    def phases(self) -> dict[str, int]:
        """Return the bytes in each phase of a step, on GPUs that no other role shares."""
        return dict(update=self.update, score=self.score, weight_sync=self.state.total + self.buckets)


@dataclass(frozen=True)
class TrainerMemory:
    """GPU memory of all pipeline stages of a model."""

    stages: tuple[TrainerRankMemory, ...]
    by_phase: Mapping[str, int] = field(default_factory=dict)  # bytes of the busiest rank in each phase

    @property
    def peak(self) -> TrainerRankMemory:
        """The stage that needs the most memory in any phase."""
        return max(self.stages, key=lambda rank: max(rank.phases().values()))


def trainer_memory(shape: ModelShape, dims: ParallelDims, settings: TrainerSettings) -> TrainerMemory:
    """Return the bytes of the busiest rank of each stage, by phase. The layout must satisfy Architecture.check_layout."""
    batch = MicroBatchShape.of(
        dims,
        settings.max_tokens,
        settings.itemsize,
        keys_per_token=settings.keys_per_token,
        imbalance=min(settings.imbalance, dims.ep),
        kernels=settings.kernels,
    )
    stages = tuple(
        _rank_memory(shape, dims, settings, batch, number, stage)
        for number, stage in enumerate(cached_pipeline_stages(shape.num_layers, dims.pp, dims.vpp, settings.uneven))
    )
    names = stages[0].phases() if settings.trained else ("score",)
    return TrainerMemory(stages, {name: max(rank.phases()[name] for rank in stages) for name in names})


@lru_cache(maxsize=4096)
def cached_pipeline_stages(
    num_layers: int, pp: int, vpp: int, uneven: tuple[tuple[str, Any], ...] = ()
) -> list[list[VirtualStage]]:
    """Return `pipeline_stages` of these sizes: [pp][vpp]. Callers must not change the result."""
    return pipeline_stages(num_layers, ParallelDims(pp=pp, vpp=vpp), dict(uneven))


def _rank_memory(
    shape: ModelShape,
    dims: ParallelDims,
    settings: TrainerSettings,
    batch: MicroBatchShape,
    number: int,
    stage: list[VirtualStage],
) -> TrainerRankMemory:
    state = largest_state(shape, dims, stage, settings.itemsize, settings.head, settings.trained)
    moe_by_stage = tuple(shape.moe[v.first : v.first + v.layers] for v in stage)
    is_last = stage[-1].is_last
    saved = working = 0
    if settings.trained:
        kept = max(
            _kept_bytes(shape, batch, moe, settings.recompute) + end_bytes(shape, batch, v.is_first, v.is_last)
            for moe, v in zip(moe_by_stage, stage, strict=True)
        )
        saved = kept * in_flight(dims, number, settings.micro_batches)
        head = head_bytes(shape, batch, settings, gradients=True) if is_last else 0
        working = max(head, _backward_bytes(shape, batch, moe_by_stage, settings.recompute))
    widest = max((_forward_bytes(shape, batch, moe) for moe in moe_by_stage), default=0)
    scoring = max(widest, head_bytes(shape, batch, settings, gradients=False) if is_last else 0)
    return TrainerRankMemory(number, state, saved, working, scoring, SENDER_BUCKETS * settings.bucket_bytes)


@lru_cache(maxsize=65536)
def _kept_bytes(shape: ModelShape, batch: MicroBatchShape, moe: tuple[bool, ...], recompute: Recompute) -> int:
    return virtual_stage_bytes(shape, batch, moe, recompute)


def in_flight(dims: ParallelDims, stage: int, micro_batches: int | None = None) -> int:
    """Return the largest number of forward passes on pipeline rank `stage` whose backward pass has not run yet.

    The 1F1B schedule has pp - stage micro-batches in flight. The interleaved schedule has vpp passes per micro-batch. It runs
    2 (pp - stage - 1) + (vpp - 1) pp passes before the first backward pass (Korthikanti et al. 2022, section 4.2.3). The first
    stage then keeps the activations of L (1 + (p - 1) / (p m)) layers, where L is the number of layers, p is pp and m is vpp.
    """
    if dims.vpp == 1:
        warmup = dims.pp - stage
        return warmup if micro_batches is None else min(warmup, micro_batches)
    warmup = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return warmup if micro_batches is None else min(warmup, micro_batches * dims.vpp)


@lru_cache(maxsize=65536)
def _backward_bytes(
    shape: ModelShape, batch: MicroBatchShape, moe_by_stage: tuple[tuple[bool, ...], ...], recompute: Recompute
) -> int:
    """Return the temporary bytes of a backward pass: gradients inside one layer, and the layers that are recomputed together."""
    kinds = {is_moe for moe in moe_by_stage for is_moe in moe}
    gradients = max((_layer_gradient_bytes(shape, batch, is_moe) for is_moe in kinds), default=0)
    if recompute.granularity == "full":
        group = recompute.num_layers if recompute.method == "uniform" else 1
        group = min(group, max(map(len, moe_by_stage), default=0))
        return gradients + group * max((layer_bytes(shape, is_moe, batch) for is_moe in kinds), default=0)
    if recompute.granularity == "selective":
        recomputed = (
            layer_bytes(shape, is_moe, batch) - layer_bytes(shape, is_moe, batch, recompute.modules) for is_moe in kinds
        )
        return gradients + max(recomputed, default=0)
    return gradients


def _layer_gradient_bytes(shape: ModelShape, batch: MicroBatchShape, moe: bool) -> int:
    """Return the bytes of gradients during the backward pass of a dense MLP or of experts.

    They are the gradients of the activations between the matrices, of the input and, for a dense MLP, of the weights.
    """
    e, matrices = batch.itemsize, 3 if shape.gated else 2
    gathered = 2 * batch.tokens * shape.hidden * e  # the gathered input, and its gradient before it is scattered
    if not moe:
        width = shape.ffn // batch.tp
        return batch.tokens * matrices * width * e + gathered + 2 * width * shape.hidden * e
    received = batch.expert_rows(shape.topk)
    return received * (matrices * shape.moe_ffn // batch.etp + 2 * shape.hidden) * e + gathered


@lru_cache(maxsize=65536)
def _forward_bytes(shape: ModelShape, batch: MicroBatchShape, moe: tuple[bool, ...]) -> int:
    """Return the bytes of a pass without gradients: the tensors of the largest layer and its input."""
    largest = max((layer_bytes(shape, is_moe, batch) for is_moe in set(moe)), default=0)
    return largest + batch.rows * shape.hidden * batch.itemsize


@lru_cache(maxsize=65536)
def head_bytes(shape: ModelShape, batch: MicroBatchShape, settings: TrainerSettings, *, gradients: bool) -> int:
    """Return the bytes of the head (parallel.logprobs): the pack's hidden states, chunks of logits, the weight's gradient."""
    hidden = batch.tokens * shape.hidden * batch.itemsize
    if settings.head == "value":
        return (2 if gradients else 1) * batch.tokens * shape.hidden * FLOAT32_BYTES + hidden
    rows = -(-shape.vocab // batch.tp)
    chunk = min(settings.logprob_chunk, batch.tokens) * rows * FLOAT32_BYTES
    if not gradients:
        return hidden + (2 + settings.entropy) * chunk
    several_chunks = batch.tokens > settings.logprob_chunk  # their weight gradients are summed in float32
    element = FLOAT32_BYTES + batch.itemsize if several_chunks else batch.itemsize
    return 2 * hidden + 3 * chunk + rows * shape.hidden * element
