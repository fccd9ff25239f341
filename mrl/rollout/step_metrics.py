"""The groups of one step: the trained groups, the metrics of all groups, and the length bias of the trained groups."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mrl.rewards.reward_types import Scores
from mrl.rollout.trajectory import Group, ResponseUsage, StepGroups

GroupFilter = Callable[[NDArray[np.float64]], bool]  # rewards [G] of a group -> whether the group is trained


def score_failures(groups: Iterable[Group]) -> list[str | None]:
    """Return the reason why each response could not be scored; None for a scored response."""
    return [sample.score.failure for group in groups for sample in group.samples]


class UnscoredStepError(RuntimeError):
    """No response of a step could be scored: the reward's service is down, or the reward is wrong."""


@dataclass
class SampledStep:
    """The groups of one step, and the rounds and seconds of their sampling."""

    kept: list[Group] = field(default_factory=list)
    filtered: list[Group] = field(default_factory=list)  # rejected by the group filter
    rounds: int = 1  # how often prompts were drawn
    engine_s: float = 0.0  # time that the step waited for engines
    reward_s: float = 0.0  # time that the step waited for decoding and scoring, which run beside sampling

    def trained_groups(self, num_groups: int) -> list[Group]:
        """Return the kept groups; if the filter rejected all, `num_groups` rejected groups, so that the step has metrics.

        Raises UnscoredStepError if no response could be scored.
        """
        self._check_scored()
        return self.kept or self.filtered[:num_groups]

    def _check_scored(self) -> None:
        reasons = score_failures([*self.kept, *self.filtered])
        if reasons and None not in reasons:
            (reason, count), *_ = Counter(reasons).most_common(1)
            raise UnscoredStepError(
                f"none of the step's {len(reasons)} responses could be scored, and rewards of zero teach nothing; {count} of "
                f"them: {reason} Is the reward's service up, and does the reward work on a response to this data?"
            )

    def metrics(self) -> dict[str, float]:
        """Return metrics of all groups, including rejected groups: they describe the policy, not the selection."""
        groups = [*self.kept, *self.filtered]
        samples = [sample for group in groups for sample in group.samples]
        usages = [sample.trajectory.usage for sample in samples]
        return {
            **Scores.of([sample.score for sample in samples], self.reward_s).metrics(),
            **_multi_turn_metrics([usage for usage in usages if usage]),
            "rollout/kept_groups_fraction": len(self.kept) / len(groups),
            "rollout/rounds": float(self.rounds),
            "spent/engine_s": self.engine_s,
        }


def _multi_turn_metrics(usages: list[ResponseUsage]) -> dict[str, float]:
    """Return metrics of multi-turn responses; empty if there are none."""
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


@dataclass
class LengthBias:
    """Measures how much shorter trained responses are because steps train the groups that finish first.

    The trained groups of the last steps are compared with equally many consecutive prompt requests, all of which were sampled.
    The length of a dropped group is unknown. It counts as the longest mean length of its step, which is an underestimate.
    """

    num_steps: int = 4  # steps in one comparison
    _lengths: dict[int, float] = field(default_factory=dict)  # prompt request -> mean length of its sampled group
    _trained: deque[list[float]] = field(default_factory=deque)  # mean lengths of the last steps' groups

    def update(self, step: StepGroups[Group], finished: Mapping[int, Group]) -> dict[str, float]:
        """Add a step; return `rollout/length_selected_ratio`: mean trained length over mean drawn length, 1 is unbiased.

        `finished`: sampled groups that wait in the buffer, by prompt request.
        """
        trained = [_mean_length(group) for group in step.groups]
        self._lengths |= dict(zip(step.numbers, trained, strict=True))
        self._lengths |= zip(step.filtered_numbers, map(_mean_length, step.filtered), strict=True)
        self._lengths |= dict.fromkeys(step.dropped, max(trained, default=0.0))
        self._lengths |= {number: _mean_length(group) for number, group in finished.items()}
        self._trained = deque([*self._trained, trained], maxlen=self.num_steps)
        recent = [length for lengths in self._trained for length in lengths]
        drawn = self._consecutive(len(recent))
        return {"rollout/length_selected_ratio": float(np.mean(recent) / np.mean(drawn))} if drawn else {}

    def _consecutive(self, count: int) -> list[float]:
        """Return the lengths of the last `count` requests before the first unsampled one; forget much older ones."""
        end = first = min(self._lengths, default=0)
        while end in self._lengths:
            end += 1
        for number in range(first, end - 4 * count):
            del self._lengths[number]
        return [self._lengths[number] for number in range(max(first, end - count), end)]


def _mean_length(group: Group) -> float:
    return float(np.mean([sample.trajectory.num_sampled for sample in group.samples]))
