"""Memory of trainer ranks by phase: closed form per pipeline stage, so that a search can ask for many layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from models.megatron_fields import UNEVEN
from mrl.planner import activation_bytes
from mrl.planner.activation_bytes import GPU, Kernels, Pass, Recompute
from mrl.planner.model_shape import Head, ModelShape
from mrl.planner.trainer_state_bytes import Chunk, StateBytes, largest_state, stages_of
from parallel.dims import ParallelDims

SLOTS = 2  # buckets that a sender of weights has
WIDE = 4  # bytes of logits and of what is summed from them


@dataclass(frozen=True)
class TrainerSettings:
    """What memory depends on beside the model and its layout."""

    max_tokens: int = 8192  # of one micro-batch, all context-parallel ranks together
    itemsize: int = 2  # bytes of a weight and of an activation
    head: Head = "vocabulary"
    trained: bool = True
    logprob_chunk: int = 1024  # tokens whose logits exist at one time
    entropy: bool = False  # the loss needs entropies: one chunk of logits more
    recompute: Recompute = field(default_factory=Recompute)
    micro_batches: int | None = None  # of one optimizer step on a replica; None: as many as fill the pipeline
    keys_per_token: float = 1.0  # of attention, where responses share a prompt
    imbalance: float = 1.0  # tokens that the busiest rank's experts get, over the mean
    bucket_bytes: int = 64 * 1024 * 1024  # of the weight sync
    kernels: Kernels = GPU
    uneven: tuple[tuple[str, Any], ...] = ()  # fields of Megatron that give stages different numbers of layers

    @classmethod
    def with_megatron(cls, megatron: Mapping[str, Any], **settings: Any) -> TrainerSettings:
        """Of the config's section `megatron`, beside `settings`."""
        uneven = tuple((name, value) for name, value in sorted(megatron.items()) if name in UNEVEN)
        return cls(recompute=Recompute.of(megatron), uneven=uneven, **settings)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the busiest rank of a pipeline stage on its device."""

    stage: int
    state: StateBytes
    saved: int  # activations kept for backward passes, of all micro-batches on their way
    working: int  # what a pass has besides for a moment: logits, gradients of activations, one layer recomputed
    scoring: int  # activations and logits of a pass without gradients
    buckets: int  # of the weight sync

    @property
    def update(self) -> int:
        """While it trains."""
        return self.state.total + self.saved + self.working

    @property
    def score(self) -> int:
        """While it computes log-probabilities or values."""
        return self.state.total + self.scoring

    @property
    def push(self) -> int:
        """While weights are sent and the rest of the model is away: where devices are shared."""
        return self.state.weights + self.buckets

    def phases(self) -> dict[str, int]:
        """Bytes by phase."""
        return dict(update=self.update, score=self.score, weight_sync=self.state.total + self.buckets)


@dataclass(frozen=True)
class TrainerMemory:
    """All pipeline stages of a model."""

    stages: tuple[RankMemory, ...]
    by_phase: Mapping[str, int] = field(default_factory=dict)  # bytes of the busiest rank in each

    @property
    def peak(self) -> RankMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda rank: max(rank.phases().values()))


def trainer_memory(shape: ModelShape, dims: ParallelDims, settings: TrainerSettings) -> TrainerMemory:
    """Bytes of the busiest rank of each stage, by phase; the layout was checked (Architecture.check_layout)."""
    run = Pass.of(
        dims,
        settings.max_tokens,
        settings.itemsize,
        keys_per_token=settings.keys_per_token,
        imbalance=min(settings.imbalance, dims.ep),
        kernels=settings.kernels,
    )
    stages = tuple(
        _rank(shape, dims, settings, run, number, stage)
        for number, stage in enumerate(_stages(shape, dims.pp, dims.vpp, settings.uneven))
    )
    names = stages[0].phases() if settings.trained else ("score",)
    return TrainerMemory(stages, {name: max(rank.phases()[name] for rank in stages) for name in names})


@lru_cache(maxsize=4096)
def _stages(shape: ModelShape, pp: int, vpp: int, uneven: tuple[tuple[str, Any], ...]) -> list[list[Chunk]]:
    return stages_of(shape, ParallelDims(pp=pp, vpp=vpp), dict(uneven))


def _rank(
    shape: ModelShape, dims: ParallelDims, settings: TrainerSettings, run: Pass, number: int, stage: list[Chunk]
) -> RankMemory:
    state = largest_state(shape, dims, stage, settings.itemsize, settings.head, settings.trained)
    kinds = tuple(shape.moe[c.first : c.first + c.layers] for c in stage)
    last = stage[-1].is_last
    saved = working = 0
    if settings.trained:
        kept = max(
            _kept(shape, run, kind, settings.recompute) + activation_bytes.ends(shape, run, c.is_first, c.is_last)
            for kind, c in zip(kinds, stage, strict=True)
        )
        saved = kept * in_flight(dims, number, settings.micro_batches)
        head = head_bytes(shape, run, settings, gradients=True) if last else 0
        working = max(head, _backward(shape, run, kinds, settings.recompute))
    widest = max((_widest(shape, run, kind) for kind in kinds), default=0)
    scoring = max(widest, head_bytes(shape, run, settings, gradients=False) if last else 0)
    return RankMemory(number, state, saved, working, scoring, SLOTS * settings.bucket_bytes)


@lru_cache(maxsize=65536)
def _kept(shape: ModelShape, run: Pass, kinds: tuple[bool, ...], recompute: Recompute) -> int:
    return activation_bytes.chunk(shape, run, kinds, recompute)


def in_flight(dims: ParallelDims, stage: int, micro_batches: int | None = None) -> int:
    """Passes of a virtual stage that wait for their backward pass at once, on pipeline rank `stage`.

    One forward, one backward: pp - stage micro-batches. Interleaved: each has vpp passes, and 2 (pp - stage - 1) +
    (vpp - 1) pp of them come before the first backward, Korthikanti et al. 2022, section 4.2.3: L (1 + (p - 1) / (p m)) layers
    on the first stage.
    """
    if dims.vpp == 1:
        warm = dims.pp - stage
        return warm if micro_batches is None else min(warm, micro_batches)
    warm = 2 * (dims.pp - stage - 1) + (dims.vpp - 1) * dims.pp + 1
    return warm if micro_batches is None else min(warm, micro_batches * dims.vpp)


@lru_cache(maxsize=65536)
def _backward(shape: ModelShape, run: Pass, kinds: tuple[tuple[bool, ...], ...], recompute: Recompute) -> int:
    """Besides what was kept: gradients inside one layer, and the layers that are computed again."""
    found = {kind for of_chunk in kinds for kind in of_chunk}
    gradients = max((_layer_gradients(shape, run, kind) for kind in found), default=0)
    if recompute.granularity == "full":
        group = recompute.num_layers if recompute.method == "uniform" else 1
        longest = max((of_chunk for of_chunk in kinds), key=len, default=())
        group = min(group, len(longest))
        return gradients + group * max((activation_bytes.layer(shape, kind, run) for kind in found), default=0)
    if recompute.granularity == "selective":
        again = (
            activation_bytes.layer(shape, kind, run) - activation_bytes.layer(shape, kind, run, recompute.modules)
            for kind in found
        )
        return gradients + max(again, default=0)
    return gradients


def _layer_gradients(shape: ModelShape, run: Pass, moe: bool) -> int:
    """While an MLP or experts go backward: of what is between their matrices, of their input, and of their weights."""
    e, wide = run.itemsize, 3 if shape.gated else 2
    whole = 2 * run.tokens * shape.hidden * e  # gathered input, and its gradient before it is scattered
    if not moe:
        width = shape.ffn // run.tp
        return run.tokens * wide * width * e + whole + 2 * width * shape.hidden * e
    received = int(run.rows * shape.topk * run.etp * run.imbalance)
    return received * (wide * shape.moe_ffn // run.etp + 2 * shape.hidden) * e + whole


@lru_cache(maxsize=65536)
def _widest(shape: ModelShape, run: Pass, kinds: tuple[bool, ...]) -> int:
    """A pass without gradients has the tensors of one layer, and the hidden states that go in."""
    one = max((activation_bytes.layer(shape, kind, run) for kind in set(kinds)), default=0)
    return one + run.rows * shape.hidden * run.itemsize


@lru_cache(maxsize=65536)
def head_bytes(shape: ModelShape, run: Pass, settings: TrainerSettings, *, gradients: bool) -> int:
    """Of the head (parallel.logprobs): hidden states of the whole pack, chunks of logits, and the output weight's gradient."""
    hidden = run.tokens * shape.hidden * run.itemsize
    if settings.head == "value":
        return (2 if gradients else 1) * run.tokens * shape.hidden * WIDE + hidden
    rows = -(-shape.vocab // run.tp)
    chunks = min(settings.logprob_chunk, run.tokens) * rows * WIDE
    if not gradients:
        return hidden + (2 + settings.entropy) * chunks
    several = run.tokens > settings.logprob_chunk  # their parts of the gradient are summed in float32
    of_weight = rows * shape.hidden * (WIDE + run.itemsize if several else run.itemsize)
    return 2 * hidden + 3 * chunks + of_weight
