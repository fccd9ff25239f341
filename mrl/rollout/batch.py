"""The groups of a step as they come in: which count, and what is reported of all of them."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mrl.rewards.base import Scores
from mrl.rollout.trajectory import Group, Usage

Keep = Callable[[NDArray[np.float64]], bool]  # rewards [G] of a group -> whether it is trained


def failures(groups: Iterable[Group]) -> list[str | None]:
    """Why each response could not be scored; None for one that was."""
    return [sample.score.failure for group in groups for sample in group.samples]


class UnscoredError(RuntimeError):
    """A whole step without a score: its service is down, or the reward is wrong."""


@dataclass
class Batch:
    """Groups that one step took."""

    kept: list[Group] = field(default_factory=list)
    refused: list[Group] = field(default_factory=list)  # by the filter
    rounds: int = 1  # times that prompts were drawn
    engine_s: float = 0.0  # that the step waited for the engines
    reward_s: float = 0.0  # and for decoding and scoring, which goes on beside the sampling

    def groups(self, wanted: int) -> list[Group]:
        """Those to be trained; where the filter refused every one, `wanted` of them, for the step to measure something on.

        Raises UnscoredError where no response at all could be scored.
        """
        self._check_scored()
        return self.kept or self.refused[:wanted]

    def _check_scored(self) -> None:
        reasons = failures([*self.kept, *self.refused])
        if reasons and None not in reasons:
            (why, count), *_ = Counter(reasons).most_common(1)
            raise UnscoredError(
                f"none of the step's {len(reasons)} responses could be scored, and zeros teach nothing; {count} of them: {why} "
                "Is the reward's service up, and does the reward work on a response of this data?"
            )

    def numbers(self) -> dict[str, float]:
        """Metrics of all groups, refused ones included: what the policy achieves, not what was picked."""
        groups = [*self.kept, *self.refused]
        samples = [sample for group in groups for sample in group.samples]
        usages = [sample.trajectory.usage for sample in samples]
        return {
            **Scores.of([sample.score for sample in samples], self.reward_s).metrics(),
            **_numbers_of_turns([usage for usage in usages if usage]),
            "rollout/kept_groups_fraction": len(self.kept) / len(groups),
            "rollout/rounds": float(self.rounds),
            "spent/engine_s": self.engine_s,
        }


def _numbers_of_turns(usages: list[Usage]) -> dict[str, float]:
    """Metrics of responses of several turns; none where there are no such."""
    if not usages:
        return {}
    calls, errors = sum(usage.tool_calls for usage in usages), sum(usage.tool_errors for usage in usages)
    inputs, cached = sum(usage.input_tokens for usage in usages), sum(usage.cached_tokens for usage in usages)
    return {
        "rollout/turns_mean": float(np.mean([usage.turns for usage in usages])),
        "rollout/tool_calls_mean": calls / len(usages),
        "rollout/tool_errors_fraction": errors / max(1, calls),
        "rollout/cached_tokens_fraction": cached / inputs,
    }
