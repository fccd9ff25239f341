"""Scores of responses, and the answers that they vote for."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from mrl.config.schema import ScoringConfig
from mrl.rewards.base import Response, Reward, Score
from mrl.rewards.scorer import Scorer


@runtime_checkable
class GivesAnswers(Protocol):
    """A reward that says which answer it found in a response; responses with equal answers vote together in maj@k."""

    def answer(self, response: Response) -> str | None:
        """The answer in the form in which equal ones are equal; None where there is none."""


def scorer_of(reward: Reward | None, config: ScoringConfig) -> AbstractContextManager[Scorer | None]:
    """A context in which responses are scored; without a reward nothing is."""
    return Scorer(reward, **asdict(config)) if reward else nullcontext()


def with_scores(rows: Sequence[dict[str, Any]], scored: Sequence[Score]) -> list[dict[str, Any]]:
    """Rows with the columns score, failure and parts."""
    return [
        row | dict(score=one.value, failure=one.failure, parts=one.parts) for row, one in zip(rows, scored, strict=True)
    ]


def answers(reward: Reward | None, responses: Sequence[Response]) -> list[str | None]:
    """What each response votes for: the reward's `answer` where it has one, else the text without spaces around it.

    A response without text has no answer.
    """
    if isinstance(reward, GivesAnswers):
        return [reward.answer(response) for response in responses]
    return [response.text.strip() or None for response in responses]
