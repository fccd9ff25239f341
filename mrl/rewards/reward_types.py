"""Interface of rewards (Response, Score, Reward), combined rewards, and functions that call rewards."""

import asyncio
import difflib
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mrl.core.code_locations import describe_error
from mrl.core.metric_families import name_part

INVALID_RESULT = "the reward returned "
"""The reason of a failed score begins with these words if the reward returned an invalid value."""


@dataclass(frozen=True)
class Turn:
    """One message of a multi-turn response."""

    role: str  # assistant, user or tool
    text: str


@dataclass(frozen=True)
class Response:
    """One sampled response, with the ground truth and metadata of its prompt."""

    data_source: str  # value of the column data_source, or else the name of the data set in the config
    text: str  # decoded response, without special tokens; for a multi-turn response, its last turn
    ground_truth: Any  # text, list or dict, as it is in the data set
    extra_info: dict[str, Any] = field(default_factory=dict)  # further values of the row, as data.columns names them
    prompt: list[dict[str, Any]] = field(default_factory=list)  # messages {role, content}
    group: int = 0  # index of the group: responses to the same prompt have the same index
    num_tokens: int = 0  # number of sampled tokens
    truncated: bool = False  # whether the token limit or the turn limit ended the response
    turns: tuple[Turn, ...] = ()  # messages of a multi-turn response; empty: the response has one turn, `text`
    ability: str = ""  # value of the column ability, such as math; empty: the row has none
    style: str = ""  # value of the column reward_model.style, such as rule or model; empty: the row has none


@dataclass(frozen=True)
class Score:
    """The score of one response. If scoring failed, `failure` is the reason, and `value` is 0."""

    value: float
    failure: str | None = None  # why scoring failed; None: scoring succeeded
    parts: dict[str, float] = field(default_factory=dict)  # named components of the score, logged as reward/<name>_mean
    turn_values: tuple[float, ...] | None = None  # reward of each assistant turn; their sum is `value`
    # For GDPO. Set by Weighted: name of a part -> value of the part, not multiplied by its weight. Also set by BySource.
    gdpo_parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def failed(
        cls, why: str, parts: Mapping[str, float] | None = None, gdpo_parts: Mapping[str, float] | None = None
    ) -> "Score":
        """Return a failed score with value 0. The reason is truncated to 500 characters."""
        why = why if len(why) <= 500 else why[:500] + "..."
        return cls(0.0, failure=why, parts=dict(parts or {}), gdpo_parts=dict(gdpo_parts or {}))

    @classmethod
    def of_turns(cls, turn_values: Sequence[float], **fields: Any) -> "Score":
        """Return the score of a multi-turn response. `turn_values` are the rewards of its assistant turns."""
        return cls(float(sum(turn_values)), turn_values=tuple(map(float, turn_values)), **fields)


class Reward(Protocol):
    """Interface of a reward. `reward._target_` may name any callable of this form, including a coroutine function.

    By default, the reward is called in a worker process with a time limit, and one call gets all responses of a batch.
    All responses to one prompt are adjacent. If this call raises, hangs or crashes, the reward is called again, once for each
    prompt with all responses to this prompt. If one of these calls fails, the reward is called once for each response of the
    failed call. So only the responses that cause the failure get failed scores.

    A class may declare attributes that change this behavior:

    - `per_sample = True`: the reward scores each response independently. Each call gets one response.
    - `whole_groups = True`: a score depends on the other responses to the same prompt. Every call gets whole groups.
    - `in_process = True`: the reward is fast and cannot hang or crash, or it only waits for the network. It runs in the
      calling process, without a time limit.
    - `needs_server = True`: the reward calls a server, which may start later than the run. The reward is not called before
      the run starts (see `scoring.rehearse`).
    - `imports = ("module", ...)`: modules that are slow to import. They are imported once for all worker processes, so
      that new processes start fast.
    """

    def __call__(self, responses: list[Response]) -> Sequence[float | Score] | Awaitable[Sequence[float | Score]]: ...


def as_number(value: Any) -> float:
    """Convert a finite number, a bool or an array with one number to float. Raises ValueError for any other value."""
    if hasattr(value, "item") and not isinstance(value, Real):  # an array or tensor
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {str(value)[:80]!r} ({type(value).__name__}).")
    return float(value)


def as_score(value: Any, response: Response) -> Score:
    """Return the Score of one response. The reward returned `value` for this response; an invalid value gives a failed Score."""
    try:
        return _validate(value, response) if isinstance(value, Score) else Score(as_number(value))
    except Exception as error:  # user-defined numbers and mappings may raise anything
        return Score.failed(f"{INVALID_RESULT}no valid score: {error or type(error).__name__}")


def _validate(score: Score, response: Response) -> Score:
    if score.failure is not None:
        return Score.failed(str(score.failure), _rename_parts(score.parts), _rename_parts(score.gdpo_parts))
    parts, gdpo_parts = _rename_parts(score.parts), _rename_parts(score.gdpo_parts)
    if score.turn_values is None:
        return Score(as_number(score.value), parts=parts, gdpo_parts=gdpo_parts)
    turns = tuple(map(as_number, score.turn_values))
    expected = sum(turn.role == "assistant" for turn in response.turns) or 1
    if len(turns) != expected:
        raise ValueError(f"{len(turns)} turn_values for {expected} assistant turns.")
    if not math.isclose(sum(turns), as_number(score.value), rel_tol=1e-6, abs_tol=1e-6):
        raise ValueError(f"value {score.value} is not the sum {sum(turns)} of turn_values.")
    return Score(float(sum(turns)), parts=parts, turn_values=turns, gdpo_parts=gdpo_parts)


def _rename_parts(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts. In each name, characters that a metric name cannot have are replaced by underscores."""
    return {name_part(str(name)): as_number(value) for name, value in parts.items()}


@dataclass(frozen=True)
class Scores:
    """Scores of B responses, as arrays."""

    values: NDArray[np.float64]  # [B] value of each response; 0 if scoring failed
    failed: NDArray[np.bool_]  # [B] whether scoring failed
    parts: dict[str, NDArray[np.float64]]  # name of a part -> its values [B]; NaN if a response has no such part
    # [B] rewards of a response's assistant turns; None: no such rewards
    turn_values: tuple[tuple[float, ...] | None, ...]

    @classmethod
    def of(cls, scores: Sequence[Score]) -> "Scores":
        """Return the scores of a list as arrays."""
        names = sorted({name for score in scores for name in score.parts})
        return cls(
            np.array([score.value for score in scores], np.float64),
            np.array([score.failure is not None for score in scores], np.bool_),
            {name: np.array([score.parts.get(name, np.nan) for score in scores]) for name in names},
            tuple(score.turn_values for score in scores),
        )

    def metrics(self, area: str = "reward") -> dict[str, float]:
        """Return metrics: mean reward, mean of each part over the responses that have this part, and fraction of failures.

        Each name begins with `area`.
        """
        parts = {f"{area}/{name}_mean": float(np.nanmean(column)) for name, column in self.parts.items()}
        return parts | {
            f"{area}/mean": float(self.values.mean()),
            f"{area}/failed_fraction": float(self.failed.mean()),
        }


Calls = list[tuple[Reward, list[Response]]]
"""Rewards, each with the responses that it scores."""


class CombinedReward(ABC):
    """A reward that consists of other rewards, its inner rewards. An inner reward may itself be a combined reward.

    A Scorer does not call a combined reward itself. It calls all inner rewards at the same time, each in the way that its
    attributes declare (see Reward), and combines the scores.
    """

    @property
    @abstractmethod
    def inner_rewards(self) -> Mapping[str, Reward]:
        """Config key of each inner reward, relative to the key of this reward -> the inner reward."""

    @abstractmethod
    def assign(self, responses: Sequence[Response]) -> Mapping[str, Sequence[int]]:
        """Return a dict: key of an inner reward -> indices of the responses that this inner reward scores."""

    @abstractmethod
    def combine(self, response: Response, scores: Mapping[str, Score]) -> Score:
        """Return the score of a response. `scores`: key of each inner reward that scores this response -> its score."""

    @property
    @abstractmethod
    def gdpo_part_names(self) -> frozenset[str]:
        """Names that the `gdpo_parts` of the scores may have."""

    @abstractmethod
    def missing_part_reason(self, name: str) -> str:
        """Return why some score cannot have a part called `name`, or "" if every score may have it."""

    def unscored_reason(self, response: Response) -> str:
        """Return why no inner reward scores a response, or "" if an inner reward scores it."""
        return ""

    def score(self, responses: list[Response], run: Callable[[Calls], list[list[Score]]]) -> list[Score]:
        """Return the score of each response. `run` calls rewards and returns the scores of each call."""
        assigned = {key: indices for key, indices in self.assign(responses).items() if indices}
        calls = [(self.inner_rewards[key], [responses[i] for i in indices]) for key, indices in assigned.items()]
        scores: list[dict[str, Score]] = [{} for _ in responses]
        for (key, indices), found in zip(assigned.items(), run(calls), strict=True):
            for i, score in zip(indices, found, strict=True):
                scores[i][key] = score
        return [self.combine(response, found) for response, found in zip(responses, scores, strict=True)]

    def __call__(self, responses: list[Response]) -> list[Score]:
        """Call the inner rewards one after another. None of them may be a coroutine function."""

        def run(calls: Calls) -> list[list[Score]]:
            values: list[Any] = [reward(given) for reward, given in calls]
            pairs = [zip(found, given, strict=True) for found, (_, given) in zip(values, calls, strict=True)]
            return [[as_score(value, response) for value, response in each] for each in pairs]

        return self.score(responses, run)


def single_rewards(reward: Reward, response: Response | None = None) -> Iterator[Reward]:
    """Yield the rewards inside a combined reward at every depth. If `reward` is not a combined reward, yield only `reward`.

    With `response`, yield only the rewards that score this response.
    """
    if not isinstance(reward, CombinedReward):
        yield reward
        return
    keys = list(reward.inner_rewards)
    if response is not None:
        keys = [key for key, indices in reward.assign([response]).items() if indices]
    for key in keys:
        yield from single_rewards(reward.inner_rewards[key], response)


def unscored_reason(reward: Reward, response: Response) -> str:
    """Return why no inner reward of a combined reward scores a response.

    Returns "" if an inner reward scores the response, or if `reward` is not a combined reward.
    """
    if not isinstance(reward, CombinedReward):
        return ""
    inner = (reward.inner_rewards[key] for key, indices in reward.assign([response]).items() if indices)
    reasons = [reward.unscored_reason(response), *(unscored_reason(each, response) for each in inner)]
    return next(filter(None, reasons), "")


_NAME = re.compile(r"[a-z][a-z0-9_]*")  # allowed name of a part


@dataclass(frozen=True)
class Weighted(CombinedReward):
    """Weighted sum of named rewards, which are its parts. The mean of each part is logged as `reward/<name>_mean`.

    The logged mean is not multiplied by the weight. Every score also has `gdpo_parts`: the values of the parts, not
    multiplied by their weights. GDPO (docs/concepts/algorithms.md) normalizes each of them separately. If a part fails for
    a response, the response has a failed score, and the value of this part in `gdpo_parts` is 0. If the score of a part
    has parts of its own, these get the names `<name>_<inner part>`. If a part has a value for each turn, these values are
    added to the same turns of the sum. The value of any other part is added to the last turn.

    Raises ValueError in these cases:

    - `parts` is empty, or one of its values is not a reward.
    - A name does not begin with a letter, or has characters other than a-z, 0-9 and _.
    - `weights` is not empty, and has other names than `parts`.
    - A weight is not a number.
    """

    parts: Mapping[str, Reward]
    weights: Mapping[str, float] = field(default_factory=dict)  # name of a part -> weight; empty: all weights are 1

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("parts is empty; give at least one reward, in the form parts: {name: {_target_: ...}}.")
        for name, part in self.parts.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"parts.{name}: a name consists of a-z, 0-9 and _, and begins with a letter.")
            if not callable(part):
                raise ValueError(f"parts.{name}: expected a reward (a node with _target_), got {part!r:.80}.")
        for name in self.weights.keys() - self.parts.keys():
            near = difflib.get_close_matches(name, self.parts, n=1, cutoff=0.0)[0]
            raise ValueError(f"weights.{name}: there is no part with this name; did you mean {near!r}?")
        for name in (self.parts.keys() - self.weights.keys()) if self.weights else ():
            raise ValueError(f"weights.{name} is missing; give every part a weight, or give no weights.")
        for name, weight in self.weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ValueError(f"weights.{name}={weight!r}: expected a number.")

    @property
    def inner_rewards(self) -> dict[str, Reward]:
        """Key `parts.<name>` -> the part with this name."""
        return {f"parts.{name}": part for name, part in self.parts.items()}

    @property
    def gdpo_part_names(self) -> frozenset[str]:
        """Names of the parts."""
        return frozenset(self.parts)

    def assign(self, responses: Sequence[Response]) -> dict[str, range]:
        """Let each part score all responses."""
        return dict.fromkeys(self.inner_rewards, range(len(responses)))

    def missing_part_reason(self, name: str) -> str:
        """Return a reason that lists the parts, or "" if a part has this name or may have an inner part with this name."""
        if any(name == part or name.startswith(f"{part}_") for part in self.parts):
            return ""
        return f"its parts are {', '.join(sorted(self.parts))}"

    def combine(self, response: Response, scores: Mapping[str, Score]) -> Score:
        """Return the weighted sum of the scores of all parts. The keys of `scores` have the form `parts.<name>`."""
        part_scores = {key.removeprefix("parts."): score for key, score in scores.items()}
        parts = {name: score.value for name, score in part_scores.items() if score.failure is None}
        parts |= {f"{name}_{inner}": x for name, score in part_scores.items() for inner, x in score.parts.items()}
        gdpo_parts = {name: score.value if score.failure is None else 0.0 for name, score in part_scores.items()}
        failures = [f"{name}: {score.failure}" for name, score in part_scores.items() if score.failure is not None]
        if failures:
            return Score.failed("; ".join(failures), parts, gdpo_parts)
        turns = max(
            (len(score.turn_values) for score in part_scores.values() if score.turn_values is not None), default=0
        )
        values = [0.0] * max(turns, 1)
        for name, score in part_scores.items():
            weight, part_values = self.weights.get(name, 1.0), score.turn_values or (score.value,)
            for i, value in enumerate(part_values, start=len(values) - len(part_values)):
                values[i] += weight * value
        if turns:
            return Score.of_turns(values, parts=parts, gdpo_parts=gdpo_parts)
        return Score(values[0], parts=parts, gdpo_parts=gdpo_parts)


CallResult = list[Score] | str
"""The scores that a call of a reward returned, or the reason why the call failed."""


def call_reward(reward: Reward, responses: list[Response]) -> CallResult:
    """Call a reward, which may be a coroutine function. Return its scores, or why the call failed.

    This function must not be called inside a running event loop.
    """
    try:
        values: Any = reward(responses)
        if inspect.isawaitable(values):
            values = asyncio.run(_as_coroutine(values))
        values = list(values)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code may raise anything
        return describe_error(error)
    if len(values) != len(responses):
        return f"{INVALID_RESULT}{len(values)} values for {len(responses)} responses."
    return [as_score(value, response) for value, response in zip(values, responses, strict=True)]


async def _as_coroutine(result: Any) -> Any:
    return await result


async def gather_scores(
    calls: Sequence[Callable[[], Awaitable[Score]]],
    *,
    concurrency: int,
    timeout_s: float | None = None,
    deadline_s: float | None = None,
) -> list[Score]:
    """Run calls concurrently and return their scores in order. A call that raises or exceeds a limit gives a failed Score.

    Args:
        calls: functions, each of which returns the awaitable score of one response.
        concurrency: number of concurrent calls.
        timeout_s: time limit of one call in seconds, from the start of the call.
        deadline_s: time limit of all calls together in seconds.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run_call(call: Callable[[], Awaitable[Score]]) -> Score:
        async with slots:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await call()
            except (Exception, asyncio.CancelledError) as error:  # user code and the network may raise anything
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    raise  # the deadline has cancelled this task; the call did not cancel itself
                expired = limit.expired()
                return Score.failed(f"no answer within {timeout_s} s." if expired else describe_error(error))

    tasks = [asyncio.create_task(run_call(call)) for call in calls]
    if tasks:
        _, unfinished = await asyncio.wait(tasks, timeout=deadline_s)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
    return [
        Score.failed(f"not scored within {deadline_s} s, the limit of the whole batch.")
        if task.cancelled()
        else task.result()
        for task in tasks
    ]
