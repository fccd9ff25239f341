"""Rewards for problems with one right answer: 1 when it is found in the response, else 0."""

import re
from dataclasses import dataclass

from mrl.rewards.base import Response

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_MARKED = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


@dataclass(frozen=True)
class ExactMatch:
    """The whole response, spaces around it left out, is the answer."""

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(r.text.strip() == r.ground_truth.strip()) for r in responses]


@dataclass(frozen=True)
class GSM8K:
    """The final number is the answer: the last one after `####` (strict), or else the last number at all."""

    strict: bool = True  # False: also accept a last number that is not marked

    def __call__(self, responses: list[Response]) -> list[float]:
        return [float(self._correct(r)) for r in responses]

    def _correct(self, response: Response) -> bool:
        found = _MARKED.findall(response.text)
        if not found and not self.strict:
            found = _NUMBER.findall(response.text)
        return bool(found) and _value(found[-1]) == _value(response.ground_truth)


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
