"""Chooses the sampled groups on which a step trains, computes their metrics, and measures the bias towards short responses."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from mrl.core.metric_families import name_part
from mrl.rewards.reward_types import Score, Scores
from mrl.rollout.trajectory import Group, ResponseUsage, Sample, StepGroups

MAX_SOURCES = 20  # largest number of data sources that have metrics of their own
RolloutFilter = Callable[[NDArray[np.float64]], bool]  # rewards of a group -> whether steps may train on it


def score_failures(groups: Iterable[Group]) -> list[str | None]:
    """Return, for each response, the reason why it could not be scored; None if it was scored."""
    return [sample.score.failure for group in groups for sample in group.samples]


def prompt_rewards(step: StepGroups[Group]) -> list[tuple[int, float]]:
    """Return (row, mean reward of the scored responses) of each group of a step, in the order in which prompts were drawn.

    The groups that the rollout filter rejected are included. A group without a scored response has no entry.
    """
    numbers = [*step.numbers, *step.filtered_numbers]
    groups = dict(zip(numbers, [*step.groups, *step.filtered], strict=True))
    found = []
    for number in sorted(groups):
        values = [sample.score.value for sample in groups[number].samples if sample.score.failure is None]
        if values:
            found.append((int(groups[number].row), float(np.mean(values))))
    return found


class UnscoredStepError(RuntimeError):
    """No response of a step could be scored, because the reward has a bug or its service is down."""


@dataclass
class SampledStep:
    """The sampled groups of one step, how often prompts were drawn for the step, and how long the step waited."""

    kept: list[Group] = field(default_factory=list)  # groups that passed the rollout filter
    filtered: list[Group] = field(default_factory=list)  # groups that the rollout filter rejected
    rounds: int = 1  # how often prompts were drawn: once for the step, and again after groups were rejected
    engine_s: float = 0.0  # seconds that the step waited for engines
    reward_s: float = 0.0  # seconds that the step waited for decoding and scoring, which mostly run during sampling
    reward_overlap_s: float = 0.0  # seconds of scoring while the engines sampled, or while no step waited

    def trained_groups(self, num_groups: int) -> list[Group]:
        """Return the groups on which the step trains: those that passed the rollout filter.

        If the filter rejected all groups, returns `num_groups` rejected groups, so that the step has metrics. Raises
        UnscoredStepError if no response could be scored.
        """
        self._check_scored()
        return self.kept or self.filtered[:num_groups]

    def _check_scored(self) -> None:
        reasons = score_failures([*self.kept, *self.filtered])
        if reasons and None not in reasons:
            (reason, count), *_ = Counter(reasons).most_common(1)
            raise UnscoredStepError(
                f"none of the step's {len(reasons)} responses could be scored, so the step has nothing to train on; {count} of "
                f"them: {reason} Correct the reward function. If it calls a service, check that the service runs."
            )

    def metrics(self, source_name: Callable[[int], str | None] = lambda row: None) -> dict[str, float]:
        """Return the metrics of the step. They describe all sampled responses, also those of rejected groups.

        `source_name`: row of the data set -> name of its data source in metrics; None: the data source has no metrics of its
        own.
        """
        groups = [*self.kept, *self.filtered]
        samples = [sample for group in groups for sample in group.samples]
        usages = [sample.trajectory.usage for sample in samples]
        return {
            **Scores.of([sample.score for sample in samples]).metrics(),
            "spent/reward_s": self.reward_s,
            "spent/reward_overlap_s": self.reward_overlap_s,
            **_source_metrics(samples, source_name),
            **_reward_statistics([group.rewards for group in groups]),
            **_multi_turn_metrics([usage for usage in usages if usage]),
            "rollout/kept_groups_fraction": len(self.kept) / len(groups),
            "rollout/rounds": float(self.rounds),
            "spent/engine_s": self.engine_s,
        }


def source_names(num_rows: Mapping[str, int]) -> dict[str, str]:
    """Return data source -> its name in metrics, for each data source that has metrics of its own.

    These are the MAX_SOURCES data sources with the most rows. A single data source has no metrics of its own, because these
    would repeat the metrics of all responses. `num_rows`: data source -> number of its rows.
    """
    if len(num_rows) < 2:
        return {}
    names: dict[str, str] = {}
    for source in sorted(num_rows, key=lambda source: (-num_rows[source], source))[:MAX_SOURCES]:
        cleaned = name_part(source)
        numbered = (f"{cleaned}_{number}" if number > 1 else cleaned for number in count(1))
        names[source] = next(name for name in numbered if name not in names.values())
    return names


def _source_metrics(samples: Sequence[Sample], source_name: Callable[[int], str | None]) -> dict[str, float]:
    """Return the metrics reward/<source>/* of each data source."""
    scores: dict[str, list[Score]] = {}
    for sample in samples:
        if (name := source_name(sample.row)) is not None:
            scores.setdefault(name, []).append(sample.score)
    return {
        metric: value
        for name in sorted(scores)
        for metric, value in Scores.of(scores[name]).metrics(f"reward/{name}").items()
    }


def _reward_statistics(groups: list[NDArray[np.float64]]) -> dict[str, float]:
    """Return the mean reward over prompts, and how much rewards differ. `groups`: the rewards of each group."""
    rewards, has_equal_sizes = np.concatenate(groups), len({len(group) for group in groups}) == 1
    return {
        "reward/mean": float(rewards.mean() if has_equal_sizes else np.mean([group.mean() for group in groups])),
        "reward/std": float(rewards.std()) if np.ptp(rewards) else 0.0,  # exactly 0 for equal rewards
        "reward/uniform_groups_fraction": float(np.mean([np.ptp(group) == 0 for group in groups])),
    }


def _multi_turn_metrics(usages: list[ResponseUsage]) -> dict[str, float]:
    """Return metrics of multi-turn responses. Returns an empty dict if there are no such responses."""
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
    """Measures how much shorter the trained responses are because steps take the groups that finish first.

    The groups on which the last `num_steps` steps trained are compared with equally many groups whose prompts were drawn one
    after another. The mean length of a dropped group is unknown. Instead, the class uses an underestimate: the largest mean
    length among the groups on which the same step trained.
    """

    num_steps: int = 4  # number of last steps that are compared
    # Serial number of a prompt request -> mean length of its group
    _lengths: dict[int, float] = field(default_factory=dict)
    # For each of the last steps, the mean lengths of the groups on which the step trained
    _trained: deque[list[float]] = field(default_factory=deque)

    def update(self, step: StepGroups[Group], finished: Mapping[int, Group]) -> dict[str, float]:
        """Add a step, and return the metric `rollout/length_selected_ratio`.

        The metric is (mean length of the trained groups) / (mean length of the groups drawn one after another). It is 1 if
        there is no bias. `finished`: serial number of the prompt request -> sampled group that waits in the staleness buffer.
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
        """Return the mean lengths of the last `count` prompt requests before `end`.

        `end` is the serial number of the first prompt request whose group is not sampled yet. Also deletes the lengths
        of the requests before `end - 4 * count`.
        """
        end = first = min(self._lengths, default=0)
        while end in self._lengths:
            end += 1
        for number in range(first, end - 4 * count):
            del self._lengths[number]
        return [self._lengths[number] for number in range(max(first, end - count), end)]


def _mean_length(group: Group) -> float:
    return float(np.mean([sample.trajectory.num_sampled for sample in group.samples]))
