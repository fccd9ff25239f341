"""Rule-based rewards: compare answers with the ground truth, or check the form, length and repetition of a response."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mrl.rewards.reward_types import Response

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKED = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_TAIL = 4000  # number of characters at the end of a response that are searched for the answer


@dataclass(frozen=True)
class ExactMatch:
    """1 if the stripped response equals the ground truth, else 0."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(r.text.strip() == str(r.ground_truth).strip()) for r in responses]


@dataclass(frozen=True)
class GSM8K:
    """1 if the final number equals the ground truth, else 0. The final number is the last one after `####`.

    Without `strict`, a response without `####` is judged by its last number.
    """

    in_process: ClassVar[bool] = True

    strict: bool = True  # False: accept a last number without ####

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the final number in a canonical form; None if there is none."""
        found = _MARKED.findall(response.text)
        if not found and not self.strict:
            found = _NUMBER.findall(response.text)
        return _canonical(found[-1]) if found else None

    def _correct(self, response: Response) -> bool:
        answer = self.answer(response)
        return answer is not None and answer == _canonical(str(response.ground_truth))


def _canonical(text: str) -> str | None:
    """Return a number in a canonical form, the same for equal numbers; None if the text is not a number."""
    try:
        return repr(float(text.replace(",", "")) + 0.0)  # turns -0 into 0
    except ValueError:
        return None


@dataclass(frozen=True)
class MathVerify:
    r"""1 if the answer is mathematically equal to the ground truth, else 0: \frac{1}{2} = 0.5 = 1/2 (library math-verify).

    The answer is the last \boxed{...} of the response, or else its last formula or number. The ground truth is a number
    or LaTeX, with or without \boxed or dollar signs. Only the last 4,000 characters are read. Some comparisons do not
    terminate; the scorer stops them at its time limit.
    """

    per_sample: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("math_verify",)

    boxed: bool = False  # True: only an answer in \boxed{...} counts

    def __call__(self, responses: list[Response]) -> list[float]:
        """Return 0 or 1 per response. Raises ValueError if a ground truth is neither a number nor LaTeX."""
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the last boxed answer without spaces, or else the last number. It is not simplified."""
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
    r"""Return the content of the last complete \boxed{...} or \fbox{...} in the last 4,000 characters, or None."""
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
    """Return the parsed forms of the last formula or number: expressions and text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # sympy takes a second to import

    _silence_warnings()
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # no timeout of the library: it uses signals, which cannot stop long arithmetic
    return parse(text, targets, parsing_timeout=0)


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return verify(gold, answer, timeout_seconds=0)


def _silence_warnings() -> None:
    """Silence the library's warning about disabled timeouts; the scorer has its own limits."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)


# Possessive quantifiers (`*+`) prevent exponential backtracking on responses of many brackets.
_WRAPPED = r"[\s$*_`\"'({\[]*+(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*+\{\s*+)*+[\s(]*+([%s])(?![A-Za-z'’])"
_FORMS = (  # in order of priority; the last match of a form counts
    r"\\boxed\s*+\{%s",
    r"<answer>%s",
    r"(?i:answer|choice|option)\b[*_]*+(?i:\s++(?:is|would be|must be))?+[*_]*+\s*+:?+(?i:\s*+option)?+%s",
)
_LONE = r"^[\s*(\[]*+([%s])[\s*)\].:]*+$"  # a line with the letter only
_OPENING = r"^[\s*(\[]*+([%s])[*)\].:]+(?:\s|$)"  # "B) because ..."


@dataclass(frozen=True)
class MultipleChoice:
    r"""1 if the response chooses the letter of the ground truth, else 0.

    Accepted forms, in order of priority: \boxed{B}, <answer>B</answer>, "the answer is (B)", a line with only the
    letter, and a response that begins with "B)" or "B." The last match of a form counts. Only capital letters count,
    because "a" is also an article.

    Raises ValueError if `letters` are not capital letters. Scoring raises ValueError if a ground truth is not one of
    the letters.
    """

    in_process: ClassVar[bool] = True

    letters: str = "ABCDEFGHIJ"  # letters of the options

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]+", self.letters):
            raise ValueError(f"letters={self.letters!r}: expected capital letters, such as ABCD.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self.choice(r.text) == self._truth(r.ground_truth)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the letter that a response chooses."""
        return self.choice(response.text)

    def choice(self, text: str) -> str | None:
        """Return the letter that a text chooses, or None."""
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
            raise ValueError(f"the ground truth {str(truth)[:80]!r} is not one of the letters {self.letters}.")
        return letter


@dataclass(frozen=True)
class Format:
    """1 if the whole response has the given form, else 0.

    `tags` (think, answer) mean `<think>...</think> <answer>...</answer>`: each tag once, in this order, with only
    white space around them. `pattern` is a regular expression of the whole response, in which `.` matches line breaks.

    Raises ValueError for an invalid regular expression, and unless exactly one of `tags` and `pattern` is set.
    """

    tags: tuple[str, ...] = ()  # or one tag as a text
    pattern: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", (self.tags,) if isinstance(self.tags, str) else tuple(self.tags))
        if bool(self.tags) == (self.pattern is not None):
            raise ValueError(f"give either tags or pattern, got tags={list(self.tags)} and pattern={self.pattern!r}.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}.") from error

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
            outside += before if number % 2 == 0 else ""  # text before an opening tag
        return not (outside + text).strip()


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class Length:
    """1 for an empty response, decreasing to 0 at `max_tokens` and beyond, linearly or as half a cosine.

    Raises ValueError for an unknown shape, and if `max_tokens` is below 1.
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
    """DAPO's soft overlong punishment (Yu et al. 2025, equation 13).

    It is 0 up to `max_tokens - cache_tokens` sampled tokens, decreases linearly to -1 at `max_tokens`, and is -1
    beyond.

    Raises ValueError unless 0 < cache_tokens <= max_tokens.
    """

    in_process: ClassVar[bool] = True

    max_tokens: int  # L_max
    cache_tokens: int  # L_cache: length of the interval in which the punishment grows

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ValueError(f"cache_tokens={self.cache_tokens}: must be from 1 to max_tokens={self.max_tokens}.")

    def __call__(self, responses: list[Response]) -> list[float]:
        free = self.max_tokens - self.cache_tokens
        return [min(0.0, max(-1.0, (free - r.num_tokens) / self.cache_tokens)) for r in responses]


@dataclass(frozen=True)
class Repetition:
    """Minus the fraction of repeated word n-grams: 0 if all are distinct, near -1 for a loop.

    It follows the repetition penalty of Yeo et al. 2025 (Demystifying Long Chain-of-Thought Reasoning in LLMs), but as
    a fraction of the response instead of a penalty per token.

    Raises ValueError if `ngram` is below 1.
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
