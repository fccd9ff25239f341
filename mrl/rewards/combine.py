"""Rewards made of rewards."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mrl.rewards.base import Response, Reward, Score, as_score

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of named parts; each part is logged as `reward/<name>_mean`, before its weight.

    The parts are also the `terms` of every score, 0 for one that failed: what an algorithm that normalises each by itself
    is given.

    A response fails when one of its parts fails: a sum without it would be another reward. Parts of a part are named
    `<name>_<part>`. Values per turn add up likewise; a part without them counts at the last turn.

    Raises: ValueError for parts and weights with different names, or names that no metric can have.
    """

    parts: Mapping[str, Reward]
    weights: Mapping[str, float] = field(default_factory=dict)  # by name of the part; empty: all 1

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty; name at least one reward, as parts: {name: {_target_: ...}}.")
        for name, part in self.parts.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"parts.{name}: a name is made of a-z, 0-9 and _, and begins with a letter.")
            if not callable(part):
                raise ValueError(f"parts.{name}: expected a reward (a node with _target_), got {part!r:.80}.")
        for name in self.weights.keys() - self.parts.keys():
            near = difflib.get_close_matches(name, self.parts, n=1, cutoff=0.0)[0]
            raise ValueError(f"weights.{name}: there is no part of this name; did you mean {near!r}?")
        for name in (self.parts.keys() - self.weights.keys()) if self.weights else ():
            raise ValueError(f"weights.{name} is missing; give a weight to every part, or to none.")
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ValueError(f"weights.{name}={weight!r}: expected a number.")

    def __call__(self, responses: list[Response]) -> list[Score]:
        """Scores by calling the parts, all of them sync, one after another; mrl.rewards.scorer runs them side by side."""
        found: dict[str, list[Score]] = {}
        for name, part in self.parts.items():
            values: Any = part(responses)
            found[name] = [as_score(value, response) for value, response in zip(values, responses, strict=True)]
        return self.combine(found)

    def combine(self, found: Mapping[str, list[Score]]) -> list[Score]:
        """Total scores from the scores of each part, all lists in the order of the responses."""
        count = len(next(iter(found.values())))
        return [self._total({name: scores[i] for name, scores in found.items()}) for i in range(count)]

    def _total(self, found: Mapping[str, Score]) -> Score:
        parts = {name: score.value for name, score in found.items() if score.failure is None}
        parts |= {f"{name}_{inner}": x for name, score in found.items() for inner, x in score.parts.items()}
        terms = {name: score.value if score.failure is None else 0.0 for name, score in found.items()}
        failures = [f"{name}: {score.failure}" for name, score in found.items() if score.failure is not None]
        if failures:
            return Score.failed("; ".join(failures), parts, terms)
        turns = max((len(score.turn_values) for score in found.values() if score.turn_values is not None), default=0)
        values = [0.0] * max(turns, 1)
        for name, score in found.items():
            weight, given = self.weights.get(name, 1.0), score.turn_values or (score.value,)
            for i, value in enumerate(given, start=len(values) - len(given)):
                values[i] += weight * value
        if turns:
            return Score.of_turns(values, parts=parts, terms=terms)
        return Score(values[0], parts=parts, terms=terms)
