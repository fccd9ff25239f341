"""Parity check: compares one training step under a parallel layout with the same step in one process.

mrl.core.types explains the letters of the array dimensions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from mrl.algorithms.inputs import AdvantageInputs, join_extra_columns, needs_of
from mrl.algorithms.losses import Loss, ValueLossFunction
from mrl.algorithms.objective import TokenWeighting
from mrl.config.schema import CertifyConfig
from mrl.core.types import Column, RankBatch, TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, StepPartition, merge_rank_batches, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.trace_comparison import TOLERANCES, ParityDifference, StepTrace, compare_traces
from parallel.dims import ParallelDims

_FROM_LOGPROBS: dict[str, Callable[[Column], Column]] = {
    "entropies": lambda logprobs: np.maximum(-logprobs, 0),
    "sum_pi_squared": lambda logprobs: np.minimum(np.exp(logprobs), 1),
}
"""Column that is not a log-probability -> function that makes plausible values from log-probabilities."""


@dataclass(frozen=True)
class ParityCheck:
    """One parity check of `mrl certify`. mrl.controller.build creates it."""

    settings: CertifyConfig
    arch: Architecture
    packing: Packing
    loss: Loss | ValueLossFunction  # loss of the actor, or the critic's loss if settings.critic
    weighting: TokenWeighting  # computes the weight of each token in the loss (algorithm.aggregation)
    temperature: float  # sampling temperature
    folder: str  # where the tensors of the traces are written
    has_balancing_loss: bool  # whether the loss includes a load-balancing loss, which depends on the packs
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
            logprobs = np.concatenate([outputs[row] for row in range(len(outputs))])
            block = self._make_off_policy(block, logprobs, groups, rng)
            expected = self._trace(group, block, [reference_batch], "one_process")
        with self.start_ranks(dims) as group:
            actual = self._trace(group, block, partition.rank_batches, "layout")
        return compare_traces(expected, actual, TOLERANCES[self.settings.dtype])

    def _make_off_policy(
        self, block: TokenBlock, logprobs: Column, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> TokenBlock:
        """Return the block as if older weights had sampled it, with all columns that the loss needs.

        Each column of log-probabilities is `logprobs` [R] plus noise. The other columns are estimates of the real values from
        a single sample: the mean of -log pi is the entropy, and the mean of pi is the sum of pi^2.
        """
        advantages = block.columns["advantages"]

        def perturb() -> Column:
            return (logprobs + rng.normal(scale=0.1, size=len(logprobs))).astype(np.float32)

        block = replace(block, rollout_logprobs=perturb())
        needs = needs_of(self.loss) | ({"values"} if self.settings.critic else set())
        columns = {name: perturb() for name in ("old_logprobs", *sorted(needs - {"rollout_logprobs"}))}
        columns |= {name: make(columns[name]) for name, make in _FROM_LOGPROBS.items() if name in needs}
        known = columns | {"rollout_logprobs": block.rollout_logprobs}
        inputs = AdvantageInputs(advantages.astype(np.float64), groups, block.sampled_lengths, known)
        columns |= join_extra_columns([self.loss], inputs, advantages, rng)
        return block.with_columns(**columns)

    def _reference_batch(self, step: TrainBatch, partition: StepPartition) -> RankBatch:
        """Return the batch for the single process: one pack without shared prompts.

        If the loss depends on the packs, the batch has the packs of all replicas of the layout instead.
        """
        if self.has_balancing_loss:
            return merge_rank_batches(partition)
        plain = replace(self.packing, share_prompts=False, max_tokens=10**9)
        return partition_step(step, ParallelDims(), plain, self.weighting).rank_batches[0]

    def _trace(self, group: WorkerGroup, block: TokenBlock, batches: Sequence[RankBatch], name: str) -> StepTrace:
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

    These differ from the experts that the router would choose. Equal tokens at equal positions get equal experts, because a
    shared prompt is computed only once.
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
