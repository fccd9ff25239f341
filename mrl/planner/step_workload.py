"""Workload of one training step: prompts, responses, and the distribution of their lengths. All results are deterministic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, log
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

QUANTILES = 4096  # a log-normal distribution is represented by this number of equally likely lengths


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths of prompts and responses. All prompts have the same length."""

    prompt_tokens: int
    responses: NDArray[np.float64]  # [Q] Q equally likely lengths of a response in tokens, ascending

    @classmethod
    def log_normal(cls, prompt_tokens: int, median: float, sigma: float, longest: int) -> LengthDistribution:
        """Return log-normal response lengths, clipped to the range from 1 to `longest` tokens.

        `sigma`: standard deviation of the logarithm of the length. If `sigma` is 0, all responses have the median length.
        """
        normal = NormalDist(log(median), sigma) if sigma else None
        probabilities = (np.arange(QUANTILES) + 0.5) / QUANTILES
        quantiles = [exp(normal.inv_cdf(p)) for p in probabilities] if normal else [median] * QUANTILES
        return cls(prompt_tokens, np.clip(np.array(quantiles), 1.0, longest))

    @classmethod
    def of(cls, prompts: NDArray[np.int64], responses: NDArray[np.int64]) -> LengthDistribution:
        """Return the distribution of T recorded groups of G responses. `prompts`: [T] lengths. `responses`: [T, G] lengths."""
        return cls(round(float(prompts.mean())), np.sort(responses.astype(np.float64), axis=None))

    @cached_property
    def mean(self) -> float:
        """Mean number of tokens of a response."""
        return float(self.responses.mean())

    @property
    def longest(self) -> float:
        """Number of tokens of the longest sequence: the prompt together with the longest response."""
        return self.prompt_tokens + float(self.responses[-1])

    @cached_property
    def mean_context(self) -> float:
        """Mean number of tokens in front of a sampled token, over all sampled tokens."""
        return self.prompt_tokens + float((self.responses**2).mean()) / (2 * self.mean)

    def longest_response_of(self, count: int) -> float:
        """Return the expected length of the longest of `count` responses, in tokens, without the prompt."""
        if count not in self._longest:
            probabilities = np.full(len(self.responses), 1 / len(self.responses))
            self._longest[count] = _expected_max(self.responses, probabilities, count)
        return self._longest[count]

    @cached_property
    def _longest(self) -> dict[int, float]:
        """Cache of `longest_response_of`, because a search calls it many times with the same counts."""
        return {}

    @cached_property
    def _remaining(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distribution of the number of tokens that a running response still needs: (numbers, probabilities) [Q]."""
        steps = np.diff(self.responses, prepend=0.0)
        unfinished = 1 - np.arange(len(steps)) / len(steps)  # fraction of responses
        return self.responses - steps / 2, steps * unfinished / self.mean

    def remaining_of(self, count: int) -> tuple[float, float]:
        """Return (mean, expected maximum) of the numbers of tokens that `count` running responses still need.

        The engine is in steady state: whenever a response finishes, the engine starts a new response.
        """
        if count not in self._remaining_by_count:
            tokens, probability = self._remaining
            largest = _expected_max(tokens, probability, count)
            self._remaining_by_count[count] = float((tokens * probability).sum()), largest
        return self._remaining_by_count[count]

    @cached_property
    def _remaining_by_count(self) -> dict[int, tuple[float, float]]:
        """Cache of `remaining_of`."""
        return {}


def _expected_max(values: NDArray[np.float64], probabilities: NDArray[np.float64], count: int) -> float:
    """Return the expected maximum of `count` random draws.

    `values`: possible results of a draw, ascending. `probabilities`: the probability of each value.
    """
    below = np.minimum(np.cumsum(probabilities), 1.0) ** count
    return float((values * np.diff(below, prepend=0.0)).sum())


@dataclass(frozen=True)
class StepWorkload:
    """Numbers of prompts, responses and passes in one training step."""

    lengths: LengthDistribution
    prompts: int  # N
    responses_per_prompt: int  # G
    max_tokens: int  # token budget of a pack in training passes
    forward_max_tokens: int | None = None  # token budget of a pack in passes without gradients; None: max_tokens
    share_prompts: bool = True  # whether a prompt is computed only once for all its responses in a pack
    mini_batches: int = 1  # optimizer steps per epoch
    epochs: int = 1  # training passes over the responses of a step
    scoring_passes: int = 0  # additional forward passes for log-probabilities of the actor and of the reference
    critic: bool = False  # whether a critic of the actor's size is trained, with a forward pass and optimizer steps
    critic_budgets: tuple[int, int] | None = None  # max_tokens and forward_max_tokens of the critic; None: the actor's

    @cached_property
    def without_gradients(self) -> StepWorkload:
        """The same step, but all passes have the token budget `forward_max_tokens`."""
        return replace(self, max_tokens=self.forward_max_tokens or self.max_tokens)

    @cached_property
    def of_critic(self) -> StepWorkload:
        """The same step, but with the token budgets of the critic."""
        train, forward = self.critic_budgets or (self.max_tokens, self.forward_max_tokens)
        return replace(self, max_tokens=train, forward_max_tokens=forward)

    @property
    def responses(self) -> int:
        """Number of responses of a step: N x G."""
        return self.prompts * self.responses_per_prompt

    @property
    def response_tokens(self) -> float:
        """Expected number of response tokens of a step."""
        return self.responses * self.lengths.mean

    @cached_property
    def _exceeds_pack(self) -> NDArray[np.bool_]:
        """[Q] whether a response of this length and its prompt exceed the token budget, so that they need a separate pack."""
        return self.lengths.responses + self.lengths.prompt_tokens > self.max_tokens

    @cached_property
    def prompt_copies(self) -> float:
        """Mean number of times that each prompt is computed in one pass."""
        if not self.share_prompts:
            return float(self.responses_per_prompt)
        # copies for responses that need a separate pack
        alone = self.responses_per_prompt * float(self._exceeds_pack.mean())
        room = max(1, self.max_tokens - self.lengths.prompt_tokens)  # response tokens of a pack
        packed_tokens = self.responses_per_prompt * float((self.lengths.responses * ~self._exceeds_pack).mean())
        return min(float(self.responses_per_prompt), alone + ceil(packed_tokens / room))

    @cached_property
    def tokens(self) -> float:
        """Number of tokens that one pass over all responses of the step computes."""
        return self.prompts * self.prompt_copies * self.lengths.prompt_tokens + self.response_tokens

    @cached_property
    def packs(self) -> float:
        """Lower bound for the number of micro-batches of one pass, summed over all replicas. It may be a fraction."""
        alone = self.responses * float(self._exceeds_pack.mean())
        sequences = self.lengths.responses + self.lengths.prompt_tokens
        tokens_alone = self.responses * float((sequences * self._exceeds_pack).mean())
        return alone + max(0.0, self.tokens - tokens_alone) / self.max_tokens

    @cached_property
    def sum_of_squared_lengths(self) -> float:
        """Sum of L**2 over the sequences of one pass, where L is the number of tokens of a sequence.

        A shared prompt contributes once for each time that it is computed.
        """
        prompt, response = self.lengths.prompt_tokens, self.lengths.responses
        return float(
            self.prompts * self.prompt_copies * prompt**2
            + self.responses * ((prompt + response) ** 2 - prompt**2).mean()
        )
