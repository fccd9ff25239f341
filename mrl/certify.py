"""The layout-invariance certificate: one step under a layout is one step in one process, number by number."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from mrl.algorithms.losses import Loss
from mrl.config import CertifyConfig
from mrl.types import TokenBlock, TrainBatch
from mrl.workers.certificate import Difference, Trace, compare
from mrl.workers.group import WorkerGroup
from mrl.workers.plan import Packing
from parallel.dims import ParallelDims

TOLERANCES = {"float32": 2e-5, "bfloat16": 5e-2}
"""Largest relative difference by dtype; in float32 log-probabilities may differ by 1e-5 nats besides."""


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
    tolerance: float
    start: Callable[[ParallelDims], AbstractContextManager[WorkerGroup]]

    def run(self, dims: ParallelDims) -> list[Difference]:
        """All differences, in the order in which a step makes the numbers; the layout first, then one process."""
        block, groups = random_groups(self.settings, self.vocab_size)
        rng = np.random.default_rng(1)
        rows = np.arange(len(groups))
        advantages = rng.normal(size=len(rows)).astype(np.float32)
        step = TrainBatch(block, block.prompt_lengths, block.response_lengths, groups, advantages, rows, rows)
        found = self._trace(dims, step, self.packing)
        # One process computes everything the plain way: no shared prompts, one pack.
        expected = self._trace(dims.alone(), step, replace(self.packing, share_prompts=False, max_tokens=10**9))
        outputs = self.tolerance / 2 if self.tolerance < 1e-3 else self.tolerance
        return compare(expected, found, self.tolerance, outputs)

    def _trace(self, dims: ParallelDims, step: TrainBatch, packing: Packing) -> Trace:
        with self.start(dims) as group:
            return group.trace(
                step,
                packing,
                aggregation=self.aggregation,
                loss=self.loss,
                lr=self.settings.lr,
                temperature=self.temperature,
                folder=f"{self.folder}/{'one' if dims.world_size == 1 else 'layout'}",
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
