"""Rule-based rewards: they compare answers with the ground truth, or check the form, length and repetition of a response.

mrl.rewards.reward_types.Reward explains the class attributes `in_process`, `per_sample` and `imports`.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from mrl.rewards.reward_types import Response

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKED_NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
_SEARCHED_CHARACTERS = 4000  # number of characters at the end of a response in which the answer is searched


@dataclass(frozen=True)
class ExactMatch:
    """Gives the score 1 if the response equals the ground truth, else 0. White space at the beginning and end is ignored."""

    in_process: ClassVar[bool] = True

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(r.text.strip() == str(r.ground_truth).strip()) for r in responses]


@dataclass(frozen=True)
class GSM8K:
    """Gives the score 1 if the final number of the response equals the ground truth, else 0.

    The final number is the last number that directly follows a `####`. With `strict=False`, if no number follows `####`, it is
    the last number of the response.
    """

    in_process: ClassVar[bool] = True

    strict: bool = True  # False: a response without #### is scored by its last number

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the final number in a canonical form, or None if there is no final number."""
        found = _MARKED_NUMBER.findall(response.text)
        if not found and not self.strict:
            found = _NUMBER.findall(response.text)
        return _canonical(found[-1]) if found else None

    def _correct(self, response: Response) -> bool:
        answer = self.answer(response)
        return answer is not None and answer == _canonical(str(response.ground_truth))


def _canonical(text: str) -> str | None:
    """Return a number in a canonical form, which is the same for equal numbers; None if the text is not a number."""
    try:
        return repr(float(text.replace(",", "")) + 0.0)  # turns -0 into 0
    except ValueError:
        return None


@dataclass(frozen=True)
class MathVerify:
    r"""Gives the score 1 if the answer is mathematically equal to the ground truth, else 0.

    For example, \frac{1}{2}, 0.5 and 1/2 are equal. The library math-verify makes the comparison. Some comparisons do not
    terminate; the Scorer ends them at its time limit.

    The answer is the content of the last \boxed{...} of the response. If there is no \boxed, the answer is the last
    formula or number. Only the last 4,000 characters of a response are read. The ground truth is a number or LaTeX, with
    or without \boxed or dollar signs.
    """

    per_sample: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("math_verify",)

    boxed: bool = False  # True: only an answer in \boxed{...} counts

    def __call__(self, responses: list[Response]) -> list[float]:
        """Return 0 or 1 for each response. Raises ValueError if a ground truth is neither a number nor LaTeX."""
        return [float(self._correct(r)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the last boxed answer without spaces. If there is none, return the last number, or None if `boxed` is set."""
        found = last_closed_box(response.text)
        if found is None and not self.boxed:
            found = (_NUMBER.findall(response.text[-_SEARCHED_CHARACTERS:]) or [None])[-1]
        return "".join(found.split()) or None if found else None

    def _correct(self, response: Response) -> bool:
        gold = _parsed_truth(response.ground_truth)
        answer = last_closed_box(response.text)
        if answer is None and self.boxed:
            return False
        return _equal(
            gold, _parsed(response.text[-_SEARCHED_CHARACTERS:] if answer is None else rf"\boxed{{{answer}}}")
        )


def last_closed_box(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...} or \fbox{...} in the last 4,000 characters, or None."""
    tail = text[-_SEARCHED_CHARACTERS:]
    for opening in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", tail))):
        depth = 1
        for end in range(opening.end(), len(tail)):
            depth += (tail[end] == "{") - (tail[end] == "}")
            if depth == 0:
                return tail[opening.end() : end]
    return None


def _parsed_truth(truth: Any) -> list[Any]:
    text = str(truth).strip()
    inner = last_closed_box(text)
    bare = text.strip("$") if inner is None else inner
    gold = _parsed(rf"\boxed{{{bare}}}") or _parsed(text)
    if not gold:
        raise ValueError(f"the ground truth {text[:80]!r} is neither a number nor LaTeX.")
    return gold


def _parsed(text: str) -> list[Any]:
    """Return the forms of the last formula or number that math-verify finds: SymPy expressions and text."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # sympy takes a second to import

    _silence_warnings()
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # The timeouts of the library are off: they use signals, which cannot stop long arithmetic.
    return parse(text, targets, parsing_timeout=0)


def _equal(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return verify(gold, answer, timeout_seconds=0)


def _silence_warnings() -> None:
    """Silence the warning of math-verify about disabled timeouts. The Scorer has its own time limits."""
    import logging

    logging.getLogger("math_verify").setLevel(logging.ERROR)


# Pattern of an option letter, which may be inside brackets or markup. Possessive quantifiers (`*+`) prevent exponential
# backtracking on responses with many brackets.
_WRAPPED = r"[\s$*_`\"'({\[]*+(?:\\(?:text|textbf|mathrm|mathbf|boxed)\s*+\{\s*+)*+[\s(]*+([%s])(?![A-Za-z'’])"
_FORMS = (  # forms of an answer, in order of priority; %s stands for the pattern _WRAPPED. The last match of a form counts
    r"\\boxed\s*+\{%s",
    r"<answer>%s",
    r"(?i:answer|choice|option)\b[*_]*+(?i:\s++(?:is|would be|must be))?+[*_]*+\s*+:?+(?i:\s*+option)?+%s",
)
_LETTER_LINE = r"^[\s*(\[]*+([%s])[\s*)\].:]*+$"  # a line that contains only the letter
_OPENING = r"^[\s*(\[]*+([%s])[*)\].:]+(?:\s|$)"  # the beginning of a response, as in "B) because ..."


@dataclass(frozen=True)
class MultipleChoice:
    r"""Gives the score 1 if the response chooses the letter of the ground truth, else 0.

    These forms of an answer are accepted, in order of priority: \boxed{B}, <answer>B</answer>, "the answer is (B)", a
    line that contains only the letter, and a response that begins with "B)" or "B." The last match of a form counts.
    Only capital letters are accepted, because "a" is also an article.

    Raises ValueError if `letters` contains anything but capital letters. Scoring raises ValueError if a ground truth is
    not one of the letters.
    """

    in_process: ClassVar[bool] = True

    letters: str = "ABCDEFGHIJ"  # letters of the options

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Z]+", self.letters):
            raise ValueError(f"letters={self.letters!r}: expected capital letters, such as ABCD.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self.choice(r.text) == self._truth(r.ground_truth)) for r in responses]

    def answer(self, response: Response) -> str | None:
        """Return the letter that a response chooses, or None."""
        return self.choice(response.text)

    def choice(self, text: str) -> str | None:
        """Return the letter that a text chooses, or None."""
        text = re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", text)
        tail = text[-_SEARCHED_CHARACTERS:]
        wrapped = _WRAPPED % self.letters
        for form in _FORMS:
            if found := re.findall(form % wrapped, tail):
                return found[-1]
        if found := re.findall(_LETTER_LINE % self.letters, tail, re.MULTILINE):
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
    """Gives the score 1 if the whole response has the given form, else 0.

    With `tags`, for example (think, answer), the form is `<think>...</think> <answer>...</answer>`: each tag occurs once,
    in this order, and there is only white space between and around the tags. With `pattern`, the form is a regular
    expression that matches the whole response; `.` also matches line breaks.

    Raises ValueError if the regular expression is invalid, or if both or neither of `tags` and `pattern` are given.
    """

    tags: tuple[str, ...] = ()  # names of the tags; a str is the name of a single tag
    pattern: str | None = None  # regular expression for the whole response

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", (self.tags,) if isinstance(self.tags, str) else tuple(self.tags))
        if bool(self.tags) == (self.pattern is not None):
            raise ValueError(f"give either tags or pattern; got tags={list(self.tags)} and pattern={self.pattern!r}.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}.") from error

    def __call__(self, responses: list[Response]) -> list[float]:
        fits = self._has_tags if self.pattern is None else self._matches
        return [float(fits(response.text)) for response in responses]

    def _matches(self, text: str) -> bool:
        assert self.pattern is not None, "only called with a pattern"
        return re.fullmatch(self.pattern, text, re.DOTALL) is not None

    def _has_tags(self, text: str) -> bool:
        tags = [tag for name in self.tags for tag in (f"<{name}>", f"</{name}>")]
        outside = ""  # text outside the tags
        for index, tag in enumerate(tags):
            before, found, text = text.partition(tag)
            if not found or any(other in before for other in tags):
                return False
            outside += before if index % 2 == 0 else ""  # text before an opening tag
        return not (outside + text).strip()


_SHAPES: dict[str, Callable[[float], float]] = {  # shape -> function (length / max_tokens) -> score
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@dataclass(frozen=True)
class Length:
    """Gives a score that decreases from 1 for an empty response to 0 at `max_tokens` sampled tokens. Longer responses get 0.

    The score decreases linearly, or as a cosine from angle 0 to pi. Raises ValueError for an unknown shape, and if
    `max_tokens` is below 1.
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
    """Gives DAPO's soft overlong punishment (Yu et al. 2025, equation 13).

    The score is 0 up to `max_tokens - cache_tokens` sampled tokens. From there it decreases linearly to -1 at
    `max_tokens`. Longer responses get -1.

    Raises ValueError if `cache_tokens` is below 1 or above `max_tokens`.
    """

    in_process: ClassVar[bool] = True

    max_tokens: int  # L_max in the paper
    cache_tokens: int  # L_cache in the paper: length of the interval in which the score decreases

    def __post_init__(self) -> None:
        if not 0 < self.cache_tokens <= self.max_tokens:
            raise ValueError(f"cache_tokens={self.cache_tokens}: must be from 1 to max_tokens={self.max_tokens}.")

    def __call__(self, responses: list[Response]) -> list[float]:
        unpunished_tokens = self.max_tokens - self.cache_tokens
        return [min(0.0, max(-1.0, (unpunished_tokens - r.num_tokens) / self.cache_tokens)) for r in responses]


@dataclass(frozen=True)
class Repetition:
    """Gives minus the fraction of repeated word n-grams: 0 if all n-grams differ, near -1 if the text repeats itself.

    Yeo et al. 2025 (Demystifying Long Chain-of-Thought Reasoning in LLMs) define such a penalty for each token. This class
    gives one number for each response.

    Raises ValueError if `ngram` is below 1.
    """

    in_process: ClassVar[bool] = True

    ngram: int = 20  # number of words in an n-gram

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise ValueError(f"ngram={self.ngram}: must be 1 or more.")

    def __call__(self, responses: list[Response]) -> list[float]:
        return [self._penalty(response.text.split()) for response in responses]

    def _penalty(self, words: list[str]) -> float:
        grams = list(zip(*(words[i:] for i in range(self.ngram)), strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
