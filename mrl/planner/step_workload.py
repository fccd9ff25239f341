"""Workload of one step: prompts, responses, and the distribution of their lengths. All results are deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

QUANTILES = 4096  # number of equally likely lengths that represent a log-normal distribution


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of prompts and responses. All prompts have the same length. All listed response lengths are equally likely."""

    prompt_tokens: int
    responses: NDArray[np.float64]  # [Q] lengths of responses in tokens, ascending

    @classmethod
    def log_normal(cls, prompt_tokens: int, median: float, sigma: float, longest: int) -> LengthDistribution:
        """Return log-normal response lengths, truncated at `longest` tokens.

        `sigma`: standard deviation of the logarithm; 0: all responses have the median length.
        """
        normal = NormalDist(log(median), sigma) if sigma else None
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        quantiles = [exp(normal.inv_cdf(share)) for share in shares] if normal else [median] * QUANTILES
        return cls(prompt_tokens, np.clip(np.array(quantiles), 1.0, longest))

    @classmethod
    def of(cls, prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> LengthDistribution:
        """Return the distribution of recorded groups: prompt lengths [T], response lengths [T, G]."""
        return cls(round(float(prompts.mean())), np.sort(responses.astype(np.float64), axis=None))

    @cached_property
    def mean(self) -> float:
        """Mean tokens of a response."""
        return float(self.responses.mean())

    @property
    def longest(self) -> float:
        """Tokens of a prompt with the longest response."""
        return self.prompt_tokens + float(self.responses[-1])

    @cached_property
    def mean_context(self) -> float:
        """Mean number of tokens before a sampled token. Long responses contribute more tokens, with longer contexts."""
        return self.prompt_tokens + float((self.responses**2).mean()) / (2 * self.mean)

    def longest_of(self, count: int) -> float:
        """Return the expected length of the longest of `count` responses, in tokens."""
        if count not in self._longest:
            shares = np.full(len(self.responses), 1 / len(self.responses))
            self._longest[count] = _expected_max(self.responses, shares, count)
        return self._longest[count]

    @cached_property
    def _longest(self) -> dict[int, float]:
        """Cache of `longest_of`: a search asks for the same counts many times."""
        return {}

    @cached_property
    def _remaining(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(remaining tokens [Q], probability [Q]) of a response that is looked at in a random step of its decoding."""
        steps = np.diff(self.responses, prepend=0.0)
        alive = 1 - np.arange(len(steps)) / len(steps)
        return self.responses - steps / 2, steps * alive / self.mean

    def remaining_of(self, count: int) -> tuple[float, float]:
        """Return the expected (mean, maximum) of the remaining tokens of `count` responses that are decoded in steady state."""
        if count not in self._remaining_by_count:
            tokens, probability = self._remaining
            largest = _expected_max(tokens, probability, count)
            self._remaining_by_count[count] = float((tokens * probability).sum()), largest
        return self._remaining_by_count[count]

    @cached_property
    def _remaining_by_count(self) -> dict[int, tuple[float, float]]:
        """Cache of `remaining_of`."""
        return {}


def _expected_max(values: NDArray[np.float64], shares: NDArray[np.float64], count: int) -> float:
    """Return the expected maximum of `count` draws from ascending `values` with probabilities `shares`."""
    below = np.minimum(np.cumsum(shares), 1.0) ** count
    return float((values * np.diff(below, prepend=0.0)).sum())


@dataclass(frozen=True)
class StepWorkload:
    """Prompts, responses and passes of one step of a run."""

    lengths: LengthDistribution
    prompts: int  # N
    responses_per_prompt: int  # G
    max_tokens: int  # token budget of a pack: trainer.max_tokens_per_micro_batch
    share_prompts: bool = True  # a prompt is computed once for all responses in a pack
    mini_batches: int = 1  # optimizer steps per epoch
    epochs: int = 1  # passes over the step's samples
    scoring_passes: int = 0  # additional forward passes, for old log-probabilities and for those of the reference
    critic: bool = (
        False  # a critic of the actor's size is trained: one more pass for values, and as many optimizer steps
    )
    mode: str = "sync"  # rollout.mode

    @property
    def responses(self) -> int:
        """N x G."""
        return self.prompts * self.responses_per_prompt

    @property
    def response_tokens(self) -> float:
        """Expected response tokens of a step."""
        return self.responses * self.lengths.mean

    @cached_property
    def _fills_pack(self) -> NDArray[np.bool_]:
        """[Q] whether a response of each length, together with its prompt, exceeds the token budget of a pack."""
        return self.lengths.responses + self.lengths.prompt_tokens > self.max_tokens

    @cached_property
    def prompt_copies(self) -> float:
        """Number of times that each prompt is computed in one pass."""
        if not self.share_prompts:
            return float(self.responses_per_prompt)
        alone = self.responses_per_prompt * float(self._fills_pack.mean())
        room = max(1, self.max_tokens - self.lengths.prompt_tokens)
        packed_tokens = self.responses_per_prompt * float((self.lengths.responses * ~self._fills_pack).mean())
        return min(float(self.responses_per_prompt), alone + ceil(packed_tokens / room))

    @cached_property
    def tokens(self) -> float:
        """Tokens that one forward pass over the step's samples computes."""
        return self.prompts * self.prompt_copies * self.lengths.prompt_tokens + self.response_tokens

    @cached_property
    def packs(self) -> float:
        """Minimum number of micro-batches of one pass, over all replicas."""
        alone = self.responses * float(self._fills_pack.mean())
        sequences = self.lengths.responses + self.lengths.prompt_tokens
        tokens_alone = self.responses * float((sequences * self._fills_pack).mean())
        return alone + max(0.0, self.tokens - tokens_alone) / self.max_tokens

    @cached_property
    def squares(self) -> float:
        """Sum of L**2 over the sequences of one pass. A prompt counts once for each time that it is computed."""
        prompt, response = self.lengths.prompt_tokens, self.lengths.responses
        return float(
            self.prompts * self.prompt_copies * prompt**2
            + self.responses * ((prompt + response) ** 2 - prompt**2).mean()
        )
