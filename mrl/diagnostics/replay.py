"""A kept step again, under two layouts, number by number: where do they part, and where does a NaN begin?"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from mrl.algorithms.losses import Loss
from mrl.core.types import RankBatch, TokenBlock, TrainBatch
from mrl.diagnostics.step_dump import Capsule
from mrl.workers.dp_partition import Packing, merge_rank_batches, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.trace_comparison import (
    TOLERANCES,
    ParityDifference,
    LayerDifference,
    StepTrace,
    compare_gradients,
    compare_sketches,
    first_nonfinite,
    layer_difference,
    row_and_position,
)
from parallel.dims import ParallelDims

LOGPROBS = "log-probabilities"


@dataclass(frozen=True)
class Found:
    """A place in the model, and the token that shows it."""

    name: str
    row: int
    position: int  # in the row, prompt included
    token: int  # its id
    in_prompt: bool


@dataclass(frozen=True)
class Verdict:
    """What two layouts say of one step."""

    places: list[LayerDifference]  # in the order in which a token passes them
    numbers: list[ParityDifference]  # log-probabilities, loss, gradient norm, gradients
    grad_norms: tuple[float, float]  # under the layout, under the reference
    losses: tuple[float, float]
    first_different: Found | None
    first_nonfinite: Found | None
    broken_gradients: list[str]  # names of those that are not finite under the layout, as the forward pass meets them

    @property
    def equal(self) -> bool:
        """Everything is finite and within tolerance."""
        return all(p.within and p.finite for p in self.places) and all(d.within for d in self.numbers)


@dataclass(frozen=True)
class Replay:
    """One comparison, its parts wired by mrl.controller.build."""

    capsule: Capsule
    checkpoint: str | None  # Megatron's, whose weights are taken; None: those that processes are started with
    packing: Packing
    loss: Loss
    dtype: str
    folder: str  # tensors go here
    balanced: bool  # a balancing loss is on, which depends on the packs
    start: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]

    def run(self, dims: ParallelDims, against: ParallelDims) -> Verdict:
        """The capsule's mini-batch under `dims`, compared with the same under `against`; no weight is changed."""
        block = self.capsule.block()
        batch = self.capsule.batch(block)
        content = self.capsule.content
        step = partition_step(batch, dims, self.packing, content.aggregation, content.longest)
        found = self._trace(block, dims, step.shares, "layout")
        reference = [merge_rank_batches(step)] if self.balanced else self._plain(batch, against)
        expected = self._trace(block, against, reference, "against")
        return verdict(block, expected, found, self.dtype)

    def _plain(self, batch: TrainBatch, dims: ParallelDims) -> list[RankBatch]:
        """The shares of the reference, which computes every prompt for itself: a mistake in sharing them is seen then."""
        plain = replace(self.packing, share_prompts=False)
        return partition_step(batch, dims, plain, self.capsule.content.aggregation, self.capsule.content.longest).shares

    def _trace(self, block: TokenBlock, dims: ParallelDims, shares: list[RankBatch], name: str) -> StepTrace:
        how = dict(loss=self.loss, temperature=self.capsule.content.temperature, folder=f"{self.folder}/{name}")
        with self.start(dims) as group:
            group.call("begin_from", str(self.capsule.path), self.checkpoint)
            return group.trace_layers(block, shares, **how)


def verdict(block: TokenBlock, reference: StepTrace, other: StepTrace, dtype: str) -> Verdict:
    """Compare two traces of one step of this block."""
    within = TOLERANCES[dtype]
    places = compare_sketches(reference.sketches, other.sketches, within.layers)
    places.append(_of_outputs(block, reference, other, within.outputs))
    different = next((place for place in places if not place.within), None)
    broken = next((place for place in places if not place.finite), None)
    return Verdict(
        places,
        compare_gradients(reference, other, within),
        (other.grad_norm, reference.grad_norm),
        (other.loss, reference.loss),
        _found(block, different.name, different.token) if different else None,
        _found(block, broken.name, max(broken.broken, broken.reference_nonfinite)) if broken else None,
        [name for name, gradient in other.gradients.items() if not np.isfinite(gradient).all()],
    )


def _of_outputs(block: TokenBlock, reference: StepTrace, other: StepTrace, tolerance: float) -> LayerDifference:
    """Log-probabilities as a last place; the token is the one that was sampled."""
    both = sorted(reference.outputs.keys() & other.outputs.keys())
    pieces = np.split(block.sampled_index, np.cumsum(block.sampled_lengths)[:-1])
    tokens = np.concatenate([np.empty(0, np.int64), *(pieces[row] for row in both)])
    mine, theirs = (np.concatenate([np.empty(0), *(t.outputs[row] for row in both)]) for t in (reference, other))
    broken = first_nonfinite(tokens, theirs), first_nonfinite(tokens, mine)
    return layer_difference(LOGPROBS, tokens, np.abs(theirs - mine), broken, tolerance)


def _found(block: TokenBlock, name: str, token: int) -> Found | None:
    if token < 0:
        return Found(name, -1, -1, -1, False)
    row, position = row_and_position(block, token)
    return Found(name, row, position, int(block.tokens[token]), position < int(block.prompt_lengths[row]))
