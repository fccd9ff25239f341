"""Rewards for problems with one right answer: 1 when it is found in the response, else 0."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from mrl.rewards.base import Response

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
