"""Rewards for how a response is written, whatever it says: its form, its length, its repetitions."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from mrl.rewards.base import Response


@dataclass(frozen=True)
class Format:
    """1 when the whole response has the form, else 0.

    With `tags` (think, answer) it is `<think>...</think> <answer>...</answer>`: each tag once, in this order, nothing but
    white space around them. A `pattern` is a regular expression of the whole response, in which `.` is also a line break.

    Raises: ValueError when the pattern is no regular expression, or neither or both are given.
    """

    tags: tuple[str, ...] = ()  # or the name of one
    pattern: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", (self.tags,) if isinstance(self.tags, str) else tuple(self.tags))
        if bool(self.tags) == (self.pattern is not None):
            raise ValueError(f"give either tags or pattern, got tags={list(self.tags)} and pattern={self.pattern!r}.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is no regular expression: {error}.") from error

    def __call__(self, responses: list[Response]) -> list[float]:
        fits = self._has_tags if self.pattern is None else self._matches
        return [float(fits(response.text)) for response in responses]

    def _matches(self, text: str) -> bool:
        assert self.pattern is not None, "checked when built"
        return re.fullmatch(self.pattern, text, re.DOTALL) is not None

    def _has_tags(self, text: str) -> bool:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        outside = ""
        for number, mark in enumerate(marks):
            before, found, text = text.partition(mark)
            if not found or any(other in before for other in marks):
                return False
            outside += before if number % 2 == 0 else ""  # between two pairs, or before the first
        return not (outside + text).strip()


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class Length:
    """1 for an empty response, falling to 0 at `max_tokens` and beyond: along a line, or along half a cosine.

    Raises: ValueError for an unknown shape, or when `max_tokens` is below 1.
    """

    in_process: ClassVar[bool] = True

    max_tokens: int
    shape: str = "linear"  # linear or cosine

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise ValueError(f"shape={self.shape!r}: expected {' or '.join(_SHAPES)}.")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be 1 or more.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [_SHAPES[self.shape](min(r.num_tokens / self.max_tokens, 1.0)) for r in responses]


@dataclass(frozen=True)
class Overlong:
    """The soft punishment of long responses of DAPO (Yu et al. 2025, equation 13).

    0 up to `max_tokens - cache_tokens` sampled tokens, from there falling to -1 at `max_tokens`, -1 beyond.

    Raises: ValueError unless 0 < cache_tokens <= max_tokens.
    """

    in_process: ClassVar[bool] = True

    max_tokens: int  # L_max
    cache_tokens: int  # L_cache: the last tokens, in which the punishment grows

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ValueError(f"cache_tokens={self.cache_tokens}: must be from 1 to max_tokens={self.max_tokens}.")

    def __call__(self, responses: list[Response]) -> list[float]:
        free = self.max_tokens - self.cache_tokens
        return [min(0.0, max(-1.0, (free - r.num_tokens) / self.cache_tokens)) for r in responses]


@dataclass(frozen=True)
class Repetition:
    """Minus the fraction of word n-grams that came before: 0 when all are distinct, near -1 for a loop.

    After the repetition penalty of Yeo et al. 2025 (Demystifying Long Chain-of-Thought Reasoning in LLMs), as a fraction
    of the response in place of a price per token.

    Raises: ValueError when `ngram` is below 1.
    """

    in_process: ClassVar[bool] = True

    ngram: int = 20  # words

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"ngram={self.ngram}: must be 1 or more.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [self._penalty(response.text.split()) for response in responses]

    def _penalty(self, words: list[str]) -> float:
        grams = list(zip(*(words[i:] for i in range(self.ngram)), strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
