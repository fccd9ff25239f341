"""What a reward sees and gives."""

import difflib
import math
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

# FROM: Rewards made of rewards.


@dataclass(frozen=True)
class Turn:
    """One message of a conversation after its prompt."""

    role: str  # assistant, user or tool
    text: str


@dataclass(frozen=True)
class Response:
    """One sampled response and what its prompt's row says of the answer."""

    data_source: str
    text: str  # decoded, special tokens left out; of several turns the last
    ground_truth: Any  # text, number, list or dict, as the row has it
    extra_info: dict[str, Any] = field(default_factory=dict)
    prompt: list[dict[str, Any]] = field(default_factory=list)  # messages {role, content}
    group: int = 0  # responses with the same number answer the same prompt
    num_tokens: int = 0  # sampled
    truncated: bool = False  # cut at the token limit
    turns: tuple[Turn, ...] = ()  # of a multi-turn conversation after the prompt; empty: one answer, `text`


@dataclass(frozen=True)
class Score:
    """What one response is worth; where that could not be found, 0 and why."""

    value: float
    failure: str | None = None  # why there is no value; None: there is one
    parts: dict[str, float] = field(
        default_factory=dict
    )  # named numbers behind the value, logged as reward/<name>_mean
    turn_values: tuple[float, ...] | None = None  # of each assistant turn; `value` is their sum
    terms: dict[str, float] = field(default_factory=dict)  # what a combined reward is made of, before weights

    @classmethod
    def failed(
        cls, why: str, parts: Mapping[str, float] | None = None, terms: Mapping[str, float] | None = None
    ) -> "Score":
        """A value of 0 with its reason, cut to a length that logs can take."""
        why = why if len(why) <= 500 else why[:500] + "..."
        return cls(0.0, failure=why, parts=dict(parts or {}), terms=dict(terms or {}))

    @classmethod
    def of_turns(cls, turn_values: Sequence[float], **more: Any) -> "Score":
        """The score of a conversation from the values of its assistant turns."""
        return cls(float(sum(turn_values)), turn_values=tuple(map(float, turn_values)), **more)


class Reward(Protocol):
    """Any callable of this form can be named in `reward._target_`; it may also be a coroutine function.

    It gets the whole list, in which the responses to one prompt are complete and stand together. It is called in a
    worker process under a time limit; when it raises, hangs or dies, it is called again with each prompt's responses
    alone, and at last with single responses, so that only the guilty ones fail. A class may say otherwise of itself:

    - `per_sample = True`: it scores each response by itself; responses are spread over the workers, one at a time.
    - `whole_groups = True`: its values depend on the other responses to the prompt; it never gets a part of a group.
    - `in_process = True`: it is quick and cannot hang or die (or only waits for the network); no worker is used.
    - `imports = ("module", ...)`: heavy modules that all workers share, so that a new worker starts quickly.
    """

    def __call__(self, responses: list[Response]) -> Sequence[float | Score] | Awaitable[Sequence[float | Score]]: ...


def as_number(value: Any) -> float:
    """A finite float from a number, bool or array of one number.

    Raises: ValueError for anything else.
    """
    if hasattr(value, "item") and not isinstance(value, Real):  # an array or tensor of somebody else's
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {str(value)[:80]!r} ({type(value).__name__}).")
    return float(value)


def as_score(value: Any, response: Response) -> Score:
    """What a reward gave for one response, checked; a failed Score where it is no finite number."""
    try:
        return _checked(value, response) if isinstance(value, Score) else Score(as_number(value))
    except Exception as error:  # whatever numbers and mappings of somebody else's can raise
        return Score.failed(f"the reward gave no score: {error or type(error).__name__}")


def _checked(score: Score, response: Response) -> Score:
    if score.failure is not None:
        return Score.failed(str(score.failure), _named(score.parts), _named(score.terms))
    parts, terms = _named(score.parts), _named(score.terms)
    if score.turn_values is None:
        return Score(as_number(score.value), parts=parts, terms=terms)
    turns = tuple(map(as_number, score.turn_values))
    expected = sum(turn.role == "assistant" for turn in response.turns) or 1
    if len(turns) != expected:
        raise ValueError(f"{len(turns)} turn_values for {expected} assistant turns.")
    if not math.isclose(sum(turns), as_number(score.value), rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(f"value {score.value} is not the sum {sum(turns)} of turn_values.")
    return Score(float(sum(turns)), parts=parts, turn_values=turns, terms=terms)


def _named(parts: Mapping[str, Any]) -> dict[str, float]:
    """Parts with names that a metric can have."""
    return {re.sub(r"\W+", "_", str(name)): as_number(value) for name, value in parts.items()}


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, as the driver needs them."""

    values: NDArray[np.float64]  # [B] 0 where scoring failed
    failed: NDArray[np.bool_]  # [B]
    parts: dict[str, NDArray[np.float64]]  # each [B]; NaN where a response has no such part
    turn_values: tuple[tuple[float, ...] | None, ...]  # [B] per assistant turn, from rewards that give them
    seconds: float  # spent on decoding and scoring, where that happened

    @classmethod
    def of(cls, scores: Sequence[Score], seconds: float = 0.0) -> "Scores":
        """Columns of a list of scores."""
        names = sorted({name for score in scores for name in score.parts})
        return cls(
            np.array([score.value for score in scores], np.float64),
            np.array([score.failure is not None for score in scores], np.bool_),
            {name: np.array([score.parts.get(name, np.nan) for score in scores]) for name in names},
            tuple(score.turn_values for score in scores),
            seconds,
        )

    def metrics(self) -> dict[str, float]:
        """Means over the responses: of the reward, of each part that was given, and of failures."""
        parts = {f"reward/{name}_mean": float(np.nanmean(column)) for name, column in self.parts.items()}
        return parts | {
            "reward/mean": float(self.values.mean()),
            "reward/failed_fraction": float(self.failed.mean()),
            "spent/reward_s": self.seconds,
        }


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
