"""What a step has to do: prompts, responses, and how their lengths are spread. Pure, and the same every time it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, exp, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

QUANTILES = 4096


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts and responses: every prompt as long, responses as likely to be each of the given ones."""

    prompt_tokens: int
    responses: NDArray[np.float64]  # [Q] tokens, ascending

    @classmethod
    def log_normal(cls, prompt_tokens: int, median: float, sigma: float, longest: int) -> Lengths:
        """Responses whose logarithm is normal, cut at `longest` tokens."""
        normal = NormalDist(log(median), sigma) if sigma else None
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        drawn = [exp(normal.inv_cdf(share)) for share in shares] if normal else [median] * QUANTILES
        return cls(prompt_tokens, np.clip(np.array(drawn), 1.0, longest))

    @classmethod
    def of(cls, prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> Lengths:
        """Those of groups: prompts [T], responses [T, G]."""
        return cls(round(float(prompts.mean())), np.sort(responses.astype(np.float64), axis=None))

    @cached_property
    def mean(self) -> float:
        """Tokens of a mean response."""
        return float(self.responses.mean())

    @property
    def longest(self) -> float:
        """Tokens of prompt and longest response."""
        return self.prompt_tokens + float(self.responses[-1])

    @cached_property
    def mean_context(self) -> float:
        """Tokens before a mean sampled one: long responses have more of them."""
        return self.prompt_tokens + float((self.responses**2).mean()) / (2 * self.mean)

    def longest_of(self, count: int) -> float:
        """Expected tokens of the longest of so many responses."""
        if count not in self._longest:
            shares = np.full(len(self.responses), 1 / len(self.responses))
            self._longest[count] = _expected_max(self.responses, shares, count)
        return self._longest[count]

    @cached_property
    def _longest(self) -> dict[int, float]:
        """As it was asked for: a search asks the same again and again."""
        return {}

    @cached_property
    def _left(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens that a response picked in the middle of a long run still lacks, and how likely each is."""
        steps = np.diff(self.responses, prepend=0.0)
        alive = 1 - np.arange(len(steps)) / len(steps)
        return self.responses - steps / 2, steps * alive / self.mean

    def left_of(self, count: int) -> tuple[float, float]:
        """Of so many responses that are decoded at one time in a long run: (mean, largest) of the tokens they still lack."""
        if count not in self._lefts:
            left, share = self._left
            self._lefts[count] = float((left * share).sum()), _expected_max(left, share, count)
        return self._lefts[count]

    @cached_property
    def _lefts(self) -> dict[int, tuple[float, float]]:
        """Likewise."""
        return {}


def _expected_max(values: NDArray[np.float64], shares: NDArray[np.float64], count: int) -> float:
    """Mean of the largest of so many draws of ascending values."""
    below = np.minimum(np.cumsum(shares), 1.0) ** count
    return float((values * np.diff(below, prepend=0.0)).sum())


@dataclass(frozen=True)
class Workload:
    """One step of a run."""

    lengths: Lengths
    prompts: int  # N
    responses_per_prompt: int  # G
    max_tokens: int  # of a pack of sequences: trainer.max_tokens_per_micro_batch
    share_prompts: bool = True  # a prompt is computed once for all responses of a pack
    mini_batches: int = 1  # optimizer steps on each pass over the step's samples
    epochs: int = 1
    scoring_passes: int = 0  # forward passes besides: old log-probabilities, the reference's
    critic: bool = False  # values, and as many optimizer steps of a model as large as the actor
    mode: str = "sync"

    @property
    def responses(self) -> int:
        """N x G."""
        return self.prompts * self.responses_per_prompt

    @property
    def response_tokens(self) -> float:
        """Sampled in a step."""
        return self.responses * self.lengths.mean

    @cached_property
    def _long(self) -> NDArray[np.bool_]:
        """[Q] which responses fill a pack alone."""
        return self.lengths.responses + self.lengths.prompt_tokens > self.max_tokens

    @cached_property
    def copies(self) -> float:
        """How often a prompt is computed in one pass."""
        if not self.share_prompts:
            return float(self.responses_per_prompt)
        long = self.responses_per_prompt * float(self._long.mean())
        room = max(1, self.max_tokens - self.lengths.prompt_tokens)
        short = self.responses_per_prompt * float((self.lengths.responses * ~self._long).mean())
        return min(float(self.responses_per_prompt), long + ceil(short / room))

    @cached_property
    def tokens(self) -> float:
        """Computed in one forward pass over the step's samples."""
        return self.prompts * self.copies * self.lengths.prompt_tokens + self.response_tokens

    @cached_property
    def packs(self) -> float:
        """Micro-batches in one pass, at least, over all replicas."""
        alone = self.responses * float(self._long.mean())
        long_tokens = self.responses * float(
            ((self.lengths.responses + self.lengths.prompt_tokens) * self._long).mean()
        )
        return alone + max(0.0, self.tokens - long_tokens) / self.max_tokens

    @cached_property
    def squares(self) -> float:
        """Sum of L**2 over the sequences of one pass, prompts counted as often as they are computed."""
        prompt, response = self.lengths.prompt_tokens, self.lengths.responses
        return float(
            self.prompts * self.copies * prompt**2 + self.responses * ((prompt + response) ** 2 - prompt**2).mean()
        )
