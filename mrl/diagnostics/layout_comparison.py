"""Compares a training step under two layouts: the parity check of `mrl certify`, and the replay of a dumped step.

The parity check compares the step under a parallel layout with the same step in one process. The replay finds the first layer
that differs between two layouts, and the first layer whose output is not finite.

mrl.core.types explains the letters of the array dimensions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from mrl.algorithms.inputs import AdvantageInputs, join_precomputed_columns, required_inputs_of
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.objective import TokenWeighting
from mrl.config.schema import CertifyConfig
from mrl.core.types import Column, ReplicaBatch, TokenBlock, TrainBatch
from mrl.diagnostics.step_dump import StepDump
from mrl.workers.dp_partition import Packing, StepPartition, merge_replica_batches, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.trace_comparison import (
    TOLERANCES,
    LayerDifference,
    ParityDifference,
    StepTrace,
    compare_gradients,
    compare_sketches,
    compare_traces,
    first_nonfinite,
    layer_difference,
    row_and_position,
)
from mrl.workers.worker import TrainWorker
from parallel.dims import ParallelDims
from parallel.durable_files import atomic_file

_FROM_LOGPROBS: dict[str, Callable[[Column], Column]] = {
    "entropies": lambda logprobs: np.maximum(-logprobs, 0),
    "sum_pi_squared": lambda logprobs: np.minimum(np.exp(logprobs), 1),
}
"""Column that is not a log-probability -> function that makes plausible values from log-probabilities.

The mean of -log pi over tokens sampled from pi is the entropy, and the mean of pi is the sum of pi^2. So each function
estimates its column from one sampled token.
"""


@dataclass(frozen=True)
class ParityCheck:
    """One parity check of `mrl certify`. mrl.controller.build creates it."""

    settings: CertifyConfig
    arch: Architecture
    packing: Packing  # how rows are divided into micro-batches
    loss: Loss | ValueLossFunction  # loss of the actor, or the critic's loss if settings.critic
    weighting: TokenWeighting  # computes the weight of each token in the loss (algorithm.aggregation)
    temperature: float  # sampling temperature
    folder: str  # where the tensors of the traces are written
    has_balancing_loss: bool  # whether the loss includes a load-balancing loss, which depends on the micro-batches
    routing_replay: bool  # whether tokens are routed to the experts that the engine chose
    start_ranks: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]  # starts trainer ranks under a layout

    def run(self, dims: ParallelDims) -> list[ParityDifference]:
        """Return the difference of each compared quantity, in the order in which a step computes the quantities."""
        block, groups = random_groups(self.settings, self.arch.vocab_size)
        if self.routing_replay:
            block = replace(block, routed_experts=random_experts(block, self.arch))
        rng = np.random.default_rng(1)
        advantages = rng.normal(size=len(groups)).astype(np.float32).repeat(block.sampled_lengths)
        block = block.with_columns(advantages=advantages, returns=advantages)
        step = TrainBatch.of(block, groups)
        partition = partition_step(step, dims, self.packing, self.weighting)
        reference_batch = self._reference_batch(step, partition)
        with self.start_ranks(dims.single_process()) as group:
            outputs = group.forward_outputs(block, [reference_batch], temperature=self.temperature)
            logprobs = np.concatenate([outputs[row] for row in range(len(outputs))])  # for a critic: its values
            block = self._make_off_policy(block, logprobs, groups, rng)
            expected = self._trace(group, block, [reference_batch], "one_process")
        with self.start_ranks(dims) as group:
            actual = self._trace(group, block, partition.replica_batches, "layout")
        return compare_traces(expected, actual, TOLERANCES[self.settings.dtype])

    def _make_off_policy(
        self, block: TokenBlock, logprobs: Column, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> TokenBlock:
        """Return the block as if older weights had sampled it, with all columns that the loss needs.

        `logprobs` [R]: log-probabilities, or the critic's values, that one process has computed. A column of log-probabilities
        or of values is `logprobs` plus noise. `_FROM_LOGPROBS` computes the other columns. `groups`: [B] index of each row's
        prompt.
        """
        advantages = block.columns["advantages"]

        def perturb() -> Column:
            return (logprobs + rng.normal(scale=0.1, size=len(logprobs))).astype(np.float32)

        block = replace(block, rollout_logprobs=perturb())
        required_inputs = required_inputs_of(self.loss) | ({"values"} if self.settings.critic else set())
        columns = {name: perturb() for name in ("old_logprobs", *sorted(required_inputs - {"rollout_logprobs"}))}
        columns |= {name: make(columns[name]) for name, make in _FROM_LOGPROBS.items() if name in required_inputs}
        known = columns | {"rollout_logprobs": block.rollout_logprobs}
        inputs = AdvantageInputs(advantages.astype(np.float64), groups, block.sampled_lengths, known)
        columns |= join_precomputed_columns([self.loss], inputs, advantages, rng)
        return block.with_columns(**columns)

    def _reference_batch(self, step: TrainBatch, partition: StepPartition) -> ReplicaBatch:
        """Return the batch for the single process: one micro-batch without shared prompts.

        If the loss depends on the micro-batches, the batch has the micro-batches of all replicas of the layout instead.
        """
        if self.has_balancing_loss:
            return merge_replica_batches(partition)
        plain = replace(self.packing, share_prompts=False, max_tokens=10**9)
        return partition_step(step, ParallelDims(), plain, self.weighting).replica_batches[0]

    def _trace(self, group: WorkerGroup, block: TokenBlock, batches: Sequence[ReplicaBatch], name: str) -> StepTrace:
        return group.trace_step(
            block,
            batches,
            loss=self.loss,
            lr=self.settings.lr,
            temperature=self.temperature,
            folder=f"{self.folder}/{name}",
        )


def random_experts(block: TokenBlock, arch: Architecture) -> NDArray[np.int16]:
    """Return random experts [S, layers, topk], in the form in which an engine reports the experts that it chose.

    The random experts differ from those that the router would choose. Equal tokens at equal positions get equal experts,
    because a shared prompt is computed only once.
    """
    rng = np.random.default_rng(2)
    topk, num_patterns = arch.transformer["moe_router_topk"], 997
    scores = rng.random((num_patterns, arch.num_layers, arch.num_experts))
    chosen = scores.argpartition(topk - 1, axis=-1)[..., :topk].astype(np.int16)
    return chosen[(block.tokens * 31 + block.positions) % num_patterns]


def random_groups(settings: CertifyConfig, vocab_size: int) -> tuple[TokenBlock, np.ndarray]:
    """Return `(block, groups [B])` with random tokens and lengths. The seed is fixed."""
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(settings.prompts):
        prompt = rng.integers(0, vocab_size, rng.integers(1, settings.prompt_tokens + 1)).tolist()
        prompts += [prompt] * settings.responses_per_prompt
        lengths = rng.integers(1, settings.response_tokens + 1, settings.responses_per_prompt)
        responses += [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    groups = np.repeat(np.arange(settings.prompts), settings.responses_per_prompt)
    return TokenBlock.from_lists(prompts, responses), groups


LOGPROBS = "log-probabilities"


@dataclass(frozen=True)
class TokenLocation:
    """A layer, and a token for which the layer's output differs or is not finite."""

    layer: str
    row: int  # index of the sequence in the block; -1: there is no token, because only one of the layouts has the layer
    position: int  # position of the token in its sequence, from 0 at the start of the prompt
    token: int  # token id
    in_prompt: bool


@dataclass(frozen=True)
class ReplayResult:
    """Result of comparing one step under a layout with the same step under a reference layout."""

    layers: list[LayerDifference]  # in forward order; the last entry compares the log-probabilities
    differences: list[ParityDifference]  # log-probabilities, loss, gradient norm, gradients
    grad_norms: tuple[float, float]  # (under the layout, under the reference layout)
    losses: tuple[float, float]  # (under the layout, under the reference layout)
    # First layer whose difference exceeds its tolerance. None: no layer.
    first_different: TokenLocation | None
    # First layer whose output is not finite under one of the layouts. None: no layer.
    first_nonfinite: TokenLocation | None
    nonfinite_gradients: list[str]  # names of the gradients that are not finite under the layout, in forward order

    @property
    def equal(self) -> bool:
        """Whether all values are finite and within tolerance."""
        return all(layer.within and layer.finite for layer in self.layers) and all(d.within for d in self.differences)


@dataclass(frozen=True)
class StepReplay:
    """One replay of `mrl replay`. mrl.controller.build creates it."""

    dump: StepDump
    checkpoint: str | None  # Megatron checkpoint with the weights; None: the ranks load the weights when they start
    packing: Packing  # how rows are divided into micro-batches
    loss: Loss
    weighting: TokenWeighting  # computes the weight of each token in the loss (algorithm.aggregation)
    dtype: str  # key of TOLERANCES: precision of both computations
    folder: str  # where the tensors of the traces are written
    has_balancing_loss: bool  # whether the loss includes a load-balancing loss, which depends on the micro-batches
    start_ranks: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]  # starts trainer ranks under a layout

    def run(self, dims: ParallelDims, reference_dims: ParallelDims) -> ReplayResult:
        """Replay the dumped mini-batch under `dims` and under `reference_dims`, and compare the results.

        Gradients are computed, but no optimizer step follows.
        """
        block = self.dump.block()
        batch = self.dump.batch(block)
        step = partition_step(batch, dims, self.packing, self.weighting)
        actual = self._trace(block, dims, step.replica_batches, "layout")
        reference_batches = (
            [merge_replica_batches(step)] if self.has_balancing_loss else self._reference_batches(batch, reference_dims)
        )
        expected = self._trace(block, reference_dims, reference_batches, "against")
        return compare_step_traces(block, expected, actual, self.dtype)

    def _reference_batches(self, batch: TrainBatch, dims: ParallelDims) -> list[ReplicaBatch]:
        """Partition the batch for the reference layout, without shared prompts.

        So the comparison also finds errors in the computation of shared prompts.
        """
        return partition_step(batch, dims, replace(self.packing, share_prompts=False), self.weighting).replica_batches

    def _trace(self, block: TokenBlock, dims: ParallelDims, batches: list[ReplicaBatch], name: str) -> StepTrace:
        temperature, folder = self.dump.description.temperature, f"{self.folder}/{name}"
        with self.start_ranks(dims) as group:
            group.call(TrainWorker.load_step_dump, str(self.dump.path), self.checkpoint)
            return group.trace_layers(block, batches, loss=self.loss, temperature=temperature, folder=folder)


def compare_step_traces(block: TokenBlock, reference: StepTrace, other: StepTrace, dtype: str) -> ReplayResult:
    """Compare two traces of the step that trains on the rows of `block`.

    Hidden states are compared by their sketches. The sketch of a hidden state consists of its norm and a few of its products with
    random vectors (see mrl.workers.trace_comparison).
    """
    tolerances = TOLERANCES[dtype]
    layers = compare_sketches(reference.sketches, other.sketches, tolerances.layers)
    layers.append(_compare_outputs(block, reference, other, tolerances.outputs))
    different = next((layer for layer in layers if not layer.within), None)
    nonfinite = next((layer for layer in layers if not layer.finite), None)
    tokens = (nonfinite.nonfinite, nonfinite.reference_nonfinite) if nonfinite else ()
    first_token = min((token for token in tokens if token >= 0), default=-1)
    return ReplayResult(
        layers=layers,
        differences=compare_gradients(reference, other, tolerances),
        grad_norms=(other.grad_norm, reference.grad_norm),
        losses=(other.loss, reference.loss),
        first_different=_locate(block, different.name, different.token) if different else None,
        first_nonfinite=_locate(block, nonfinite.name, first_token) if nonfinite else None,
        nonfinite_gradients=[name for name, gradient in other.gradients.items() if not np.isfinite(gradient).all()],
    )


def _compare_outputs(block: TokenBlock, reference: StepTrace, other: StepTrace, tolerance: float) -> LayerDifference:
    """Compare the log-probabilities of the sampled tokens, and return the result as a LayerDifference."""
    rows = sorted(reference.outputs.keys() & other.outputs.keys())
    indices = np.split(block.sampled_index, np.cumsum(block.sampled_lengths)[:-1])
    tokens = np.concatenate([np.empty(0, np.int64), *(indices[row] for row in rows)])
    expected, actual = (np.concatenate([np.empty(0), *(t.outputs[row] for row in rows)]) for t in (reference, other))
    nonfinite = first_nonfinite(tokens, actual), first_nonfinite(tokens, expected)
    return layer_difference(LOGPROBS, tokens, np.abs(actual - expected), nonfinite, tolerance)


def _locate(block: TokenBlock, layer: str, token: int) -> TokenLocation:
    """Return the location of a token. `token` is its index in the block, or -1 if there is no token."""
    if token < 0:
        return TokenLocation(layer, row=-1, position=-1, token=-1, in_prompt=False)
    row, position = row_and_position(block, token)
    return TokenLocation(layer, row, position, int(block.tokens[token]), position < int(block.prompt_lengths[row]))


def plot_layers(path: Path, layers: Sequence[LayerDifference], *, title: str) -> None:
    """Write a PNG with the largest difference and the tolerance of each layer, on a logarithmic scale.

    Crosses mark layers whose output is not finite.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the import takes a second
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    floor = 1e-9  # height at which a difference of 0 is drawn
    sizes = np.array([max(layer.largest, floor) if np.isfinite(layer.largest) else np.nan for layer in layers])
    tolerances = np.array([layer.tolerance for layer in layers])
    indices = np.arange(len(layers))
    axes.plot(indices, sizes, "o-", color="#4C78A8", label="largest difference of a token")
    axes.step(indices, tolerances, where="mid", color="#79706E", linestyle="--", linewidth=1, label="tolerance")
    different = np.array([not layer.within and layer.finite for layer in layers])
    nonfinite = np.array([not layer.finite for layer in layers])
    for chosen, heights, marker, label in (
        (different, sizes, "o", "differs"),
        (nonfinite, tolerances, "x", "not finite"),
    ):
        if chosen.any():
            axes.plot(indices[chosen], heights[chosen], marker, color="#E45756", label=label)
    axes.set_yscale("log")
    every = max(1, len(layers) // 16)
    axes.set_xticks(indices[::every], [layer.name for layer in layers][::every], rotation=40, ha="right")
    axes.set(ylabel="distance relative to the hidden state's norm; last point: nats")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best", fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
