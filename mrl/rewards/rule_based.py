"""Rewards for problems with one right answer: 1 when it is found in the response, else 0."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mrl.rewards.reward_types import Response

# FROM: Reward for questions with lettered options.
# FROM: Rewards for how a response is written, whatever it says: its form, its length, its repetitions.

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKED = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_TAIL = 4000  # characters of a response in which its answer is looked for


@dataclass(frozen=True)
class ExactMatch:
    """The whole response, spaces around it left out, is the answer."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(r.text.strip() == str(r.ground_truth).strip()) for r in responses]


@dataclass(frozen=True)
class GSM8K:
    """The final number is the answer: the last one after `####` (strict), or else the last number at all."""

    in_process: ClassVar[bool] = True

    strict: bool = True  # False: also accept a last number that is not marked

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """The final number, the same text for the same number; None where there is none."""
        found = _MARKED.findall(response.text)
        if not found and not self.strict:
            found = _NUMBER.findall(response.text)
        return _canonical(found[-1]) if found else None

    def _correct(self, response: Response) -> bool:
        answer = self.answer(response)
        return answer is not None and answer == _canonical(str(response.ground_truth))


def _canonical(text: str) -> str | None:
    """The same text for the same number; None where it is none."""
    try:
        return repr(float(text.replace(",", "")) + 0.0)  # -0 is 0
    except ValueError:
        return None


@dataclass(frozen=True)
class MathVerify:
    r"""The answer equals the ground truth as mathematics: \frac{1}{2} is 0.5 is 1/2 (the math-verify library).

    The answer is the last \boxed{...} of the response, or else its last formula or number. The ground truth is a number
    or LaTeX, with or without \boxed or dollar signs. Only the last 4,000 characters are read. Some comparisons never end;
    the scorer's limit ends them.
    """

    per_sample: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("math_verify",)

    boxed: bool = False  # True: an answer that is not in \boxed{...} is wrong

    def __call__(self, responses: list[Response]) -> list[float]:
        """Raises ValueError where the ground truth of a response is no mathematics."""
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """The last boxed answer without spaces, or else the last number; not simplified, so equals may be told apart."""
        found = last_boxed(response.text)
        if found is None and not self.boxed:
            found = (_NUMBER.findall(response.text[-_TAIL:]) or [None])[-1]
        return "".join(found.split()) or None if found else None

    def _correct(self, response: Response) -> bool:
        gold = _parsed_truth(response.ground_truth)
        answer = last_boxed(response.text)
        if answer is None and self.boxed:
            return False
        return _equal(gold, _parsed(response.text[-_TAIL:] if answer is None else rf"\boxed{{{answer}}}"))


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete \boxed{...} or \fbox{...} of the text's last 4,000 characters."""
    tail = text[-_TAIL:]
    for opening in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", tail))):
        depth = 1
        for place in range(opening.end(), len(tail)):
            depth += (tail[place] == "{") - (tail[place] == "}")
            if depth == 0:
                return tail[opening.end() : place]
    return None


def _parsed_truth(truth: Any) -> list[Any]:
    text = str(truth).strip()
    inner = last_boxed(text)
    bare = text.strip("$") if inner is None else inner
    gold = _parsed(rf"\boxed{{{bare}}}") or _parsed(text)
    if not gold:
        raise ValueError(f"the ground truth {text[:80]!r} is neither a number nor LaTeX.")
    return gold


def _parsed(text: str) -> list[Any]:
    """Readings of the last formula or number: expressions, and its text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # sympy: a second

    _quiet()
    ways = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(text, ways, parsing_timeout=0)  # the library's limits are signals that stop no long arithmetic


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return verify(gold, answer, timeout_seconds=0)


def _quiet() -> None:
    """The library warns about limits that are off; ours are on."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)


# Quantifiers are possessive (`*+`): what one skips, the next could skip too, and a response of brackets would take hours.
_WRAPPED = r"[\s$*_`\"'({\[]*+(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*+\{\s*+)*+[\s(]*+([%s])(?![A-Za-z'’])"
_FORMS = (  # the surest first; of one form, the last in the text counts
    r"\\boxed\s*+\{%s",
    r"<answer>%s",
    r"(?i:answer|choice|option)\b[*_]*+(?i:\s++(?:is|would be|must be))?+[*_]*+\s*+:?+(?i:\s*+option)?+%s",
)
_LONE = r"^[\s*(\[]*+([%s])[\s*)\].:]*+$"  # a line with nothing but the letter
_OPENING = r"^[\s*(\[]*+([%s])[*)\].:]+(?:\s|$)"  # "B) because ..."


@dataclass(frozen=True)
class MultipleChoice:
    r"""1 when the response chooses the letter of the ground truth, else 0.

    Read, in this order: \boxed{B}, <answer>B</answer>, "the answer is (B)", a line with the letter alone, and a response
    that begins with "B)" or "B." Capital letters only, so that the article "a" is no choice; of several of one form the
    last counts.

    Raises: ValueError when `letters` are not capital letters; for a response, when its ground truth is none of them.
    """

    in_process: ClassVar[bool] = True

    letters: str = "ABCDEFGHIJ"  # of the options

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]+", self.letters):
            raise ValueError(f"letters={self.letters!r}: expected capital letters, such as ABCD.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self.choice(r.text) == self._truth(r.ground_truth)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """The letter that a response votes for."""
        return self.choice(response.text)

    def choice(self, text: str) -> str | None:
        """The letter that a response settles on; None when it chooses nothing."""
        text = re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", text)
        tail = text[-4000:]
        wrapped = _WRAPPED % self.letters
        for form in _FORMS:
            if found := re.findall(form % wrapped, tail):
                return found[-1]
        if found := re.findall(_LONE % self.letters, tail, re.MULTILINE):
            return found[-1]
        opening = re.match(_OPENING % self.letters, text)
        return opening[1] if opening else None

    def _truth(self, truth: Any) -> str:
        letter = str(truth).strip(" ().:").upper()
        if len(letter) != 1 or letter not in self.letters:
            raise ValueError(f"the ground truth {str(truth)[:80]!r} is none of the letters {self.letters}.")
        return letter


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
