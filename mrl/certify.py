"""The layout-invariance certificate: one step under a layout is one step in one process, number by number."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from mrl.algorithms.losses import Loss
from mrl.config import CertifyConfig
from mrl.types import TokenBlock, TrainBatch
from mrl.workers.certificate import Difference, Tolerances, Trace, compare
from mrl.workers.group import WorkerGroup
from mrl.workers.plan import Packing
from parallel.dims import ParallelDims


@dataclass(frozen=True)
class Certification:
    """One comparison, its parts wired by mrl.build."""

    settings: CertifyConfig
    vocab_size: int
    packing: Packing
    loss: Loss | None  # None: a critic
    aggregation: str
    temperature: float
    folder: str  # tensors go here
    within: Tolerances
    start: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]

    def run(self, dims: ParallelDims) -> list[Difference]:
        """All differences, in the order in which a step makes the numbers."""
        block, groups = random_groups(self.settings, self.vocab_size)
        rng = np.random.default_rng(1)
        rows = np.arange(len(groups))
        advantages = rng.normal(size=len(rows)).astype(np.float32)
        step = TrainBatch(block, block.prompt_lengths, block.response_lengths, groups, advantages, rows, rows)
        # One process computes everything the plain way: no shared prompts, one pack.
        plain = replace(self.packing, share_prompts=False, max_tokens=10**9)
        with self.start(dims.alone()) as group:
            drift = rng.normal(scale=0.1, size=len(block.rollout_logprobs))  # as if older weights had sampled
            now = group.look(step, plain, aggregation=self.aggregation, temperature=self.temperature)
            old = np.concatenate([now[row] for row in range(len(now))]) + drift
            step = replace(step, block=replace(block, rollout_logprobs=old.astype(np.float32)))
            expected = self._trace(group, step, plain, "one_process")
        with self.start(dims) as group:
            found = self._trace(group, step, self.packing, "layout")
        return compare(expected, found, self.within)

    def _trace(self, group: WorkerGroup, step: TrainBatch, packing: Packing, name: str) -> Trace:
        return group.trace(
            step,
            packing,
            aggregation=self.aggregation,
            loss=self.loss,
            lr=self.settings.lr,
            temperature=self.temperature,
            folder=f"{self.folder}/{name}",
        )


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
