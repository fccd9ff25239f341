"""Reward for questions with lettered options."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from mrl.rewards.base import Response

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
