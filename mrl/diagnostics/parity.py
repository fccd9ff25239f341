"""The layout-invariance certificate: one step under a layout is one step in one process, number by number."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.losses import Loss
from mrl.config.schema import CertifyConfig
from mrl.core.types import Column, RankBatch, TokenBlock, TrainBatch
from mrl.workers.dp_partition import Packing, StepPartition, merge_rank_batches, partition_step
from mrl.workers.group import WorkerGroup
from mrl.workers.trace_comparison import TOLERANCES, ParityDifference, StepTrace, compare
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Certification:
    """One comparison, its parts wired by mrl.controller.build."""

    settings: CertifyConfig
    arch: Architecture
    packing: Packing
    loss: Loss | None  # None: a critic
    aggregation: str
    temperature: float
    folder: str  # tensors go here
    balanced: bool  # a balancing loss is on, which depends on the packs
    routing: bool  # experts are replayed
    start: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]

    def run(self, dims: ParallelDims) -> list[ParityDifference]:
        """All differences, in the order in which a step makes the numbers."""
        block, groups = random_groups(self.settings, self.arch.vocab_size)
        if self.routing:
            block = replace(block, routed_experts=random_experts(block, self.arch))
        rng = np.random.default_rng(1)
        drawn = rng.normal(size=len(groups)).astype(np.float32).repeat(block.sampled_lengths)
        block = block.with_columns(advantages=drawn, returns=drawn)
        step = TrainBatch.of(block, groups)
        plan = partition_step(step, dims, self.packing, self.aggregation, self.settings.response_tokens)
        alone = self._alone(step, plan)
        with self.start(dims.single_process()) as group:
            now = group.look(block, [alone], temperature=self.temperature)
            block = self._off_policy(block, np.concatenate([now[row] for row in range(len(now))]), groups, rng)
            expected = self._trace(group, block, [alone], "one_process")
        with self.start(dims) as group:
            found = self._trace(group, block, plan.shares, "layout")
        return compare(expected, found, TOLERANCES[self.settings.dtype])

    def _off_policy(
        self, block: TokenBlock, now: Column, groups: NDArray[np.int64], rng: np.random.Generator
    ) -> TokenBlock:
        """The block as if older weights had sampled it, with the columns that the loss asks for, all near `now` [R]."""
        loss, advantages = self.loss, block.columns["advantages"]

        def near() -> Column:
            return (now + rng.normal(scale=0.1, size=len(now))).astype(np.float32)

        block = replace(block, rollout_logprobs=near())
        columns = {name: near() for name in ("old_logprobs", *sorted(loss.needs if loss else ()))}
        if loss:
            inputs = AdvantageInputs(advantages.astype(np.float64), groups, block.sampled_lengths, columns)
            columns |= loss.extra_columns(inputs, advantages, rng)
        return block.with_columns(**columns)

    def _alone(self, step: TrainBatch, plan: StepPartition) -> RankBatch:
        """What one process computes: everything the plain way, in one pack, unless packs are part of the loss."""
        if self.balanced:
            return merge_rank_batches(plan)
        plain = replace(self.packing, share_prompts=False, max_tokens=10**9)
        return partition_step(step, ParallelDims(), plain, self.aggregation, self.settings.response_tokens).shares[0]

    def _trace(self, group: WorkerGroup, block: TokenBlock, shares: Sequence[RankBatch], name: str) -> StepTrace:
        return group.trace(
            block,
            shares,
            loss=self.loss,
            lr=self.settings.lr,
            temperature=self.temperature,
            folder=f"{self.folder}/{name}",
        )


def random_experts(block: TokenBlock, arch: Architecture) -> NDArray[np.int16]:
    """[S, layers, topk] experts as an engine would send them, surely not the router's choice; alike for alike prompts."""
    rng = np.random.default_rng(2)
    topk, kinds = arch.transformer["moe_router_topk"], 997
    scores = rng.random((kinds, arch.num_layers, arch.num_experts))
    chosen = scores.argpartition(topk - 1, axis=-1)[..., :topk].astype(np.int16)
    return chosen[(block.tokens * 31 + block.positions) % kinds]


def random_groups(settings: CertifyConfig, vocab_size: int) -> tuple[TokenBlock, np.ndarray]:
    """(block, [B] groups): prompts and responses of random tokens and lengths, always the same."""
    rng = np.random.default_rng(0)
    prompts, responses = [], []
    for _ in range(settings.prompts):
        prompt = rng.integers(0, vocab_size, rng.integers(1, settings.prompt_tokens + 1)).tolist()
        prompts += [prompt] * settings.responses_per_prompt
        lengths = rng.integers(1, settings.response_tokens + 1, settings.responses_per_prompt)
        responses += [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    groups = np.repeat(np.arange(settings.prompts), settings.responses_per_prompt)
    return TokenBlock.from_lists(prompts, responses), groups
