"""Metrics of scored responses: of the groups that were sampled for a step, and of the responses to held-out prompts.

The module chooses the sampled groups on which a step trains, computes the metrics of all sampled groups, and measures the bias
towards short responses. For the evaluation on held-out prompts, it describes how each held-out set is sampled.
"""

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.algorithms.filters import CORRECTNESS_PARTS
from mrl.core.metric_families import name_part
from mrl.core.metrics import Metrics
from mrl.rewards.pass_at_k import default_ks, majority_at_ks, pass_at_k, voted_answers
from mrl.rewards.reward_types import Response, Reward, Score, Scores
from mrl.rollout.client import SamplingParams
from mrl.rollout.trajectory import Group, ResponseUsage, Sample, StepGroups
from parallel.durable_files import atomic_file

MAX_SOURCES = 20  # largest number of data sources that have metrics of their own
RolloutFilter = Callable[[NDArray[np.float64]], bool]  # rewards of a group -> whether steps may train on it


def score_failures(groups: Iterable[Group]) -> list[str | None]:
    """Return, for each response, the reason why it could not be scored; None if it was scored."""
    return [sample.score.failure for group in groups for sample in group.samples]


def prompt_rewards(step: StepGroups[Group]) -> list[tuple[int, float]]:
    """Return (row, mean reward of the scored responses) of each group of a step, in the order in which prompts were drawn.

    The groups that the rollout filter rejected are included. A group without a scored response has no entry.
    """
    # serial numbers of prompt requests; a prompt that is drawn later has a larger number
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
        """Return the metrics of the step. They describe all sampled responses, including those of rejected groups.

        `source_name` takes a row of the data set, and returns the name of its data source in metrics, or None if the data
        source has no metrics of its own.
        """
        groups = [*self.kept, *self.filtered]
        samples = [sample for group in groups for sample in group.samples]
        usages = [sample.trajectory.usage for sample in samples]
        return {
            **Scores.of([sample.score for sample in samples]).metrics(),
            "component_time/reward_s": self.reward_s,
            "component_time/reward_overlap_s": self.reward_overlap_s,
            **_source_metrics(samples, source_name),
            **_reward_statistics([group.rewards for group in groups]),
            **_multi_turn_metrics([usage for usage in usages if usage]),
            "rollout/kept_groups_fraction": len(self.kept) / len(groups),
            "rollout/rounds": float(self.rounds),
            "component_time/engine_s": self.engine_s,
        }


def source_names(num_rows: Mapping[str, int]) -> dict[str, str]:
    """Return data source -> its name in metrics, for each data source that has metrics of its own.

    These are the MAX_SOURCES data sources with the most rows. If there is only one data source, it has no metrics of its own,
    because they would repeat the metrics of all responses. `num_rows`: data source -> number of its rows.
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

    The groups on which the last `num_steps` steps trained are compared with the same number of groups of consecutively drawn
    prompts. This choice does not depend on lengths. The mean length of a dropped group is unknown. In its place, the class uses
    the largest mean length among the groups on which the step that dropped it trained. This is an underestimate.
    """

    num_steps: int = 4  # number of compared steps: the current step and the steps before it
    # Serial number of a prompt request (a prompt that was drawn for the engines) -> mean length of its group
    _lengths: dict[int, float] = field(default_factory=dict)
    # For each of these steps, the mean lengths of the groups on which the step trained
    _trained: deque[list[float]] = field(default_factory=deque)

    def update(self, step: StepGroups[Group], finished: Mapping[int, Group]) -> dict[str, float]:
        """Add a step, and return the metric `rollout/trained_length_ratio`.

        The metric is (mean length of the trained groups) / (mean length of the groups with consecutive serial numbers). It is 1
        if there is no bias. `finished`: serial number of a prompt request -> sampled group on which no step
        has trained yet: it waits in the staleness buffer.
        """
        trained = [_mean_length(group) for group in step.groups]
        self._lengths |= dict(zip(step.numbers, trained, strict=True))
        self._lengths |= zip(step.filtered_numbers, map(_mean_length, step.filtered), strict=True)
        self._lengths |= dict.fromkeys(step.dropped, max(trained, default=0.0))
        self._lengths |= {number: _mean_length(group) for number, group in finished.items()}
        self._trained = deque([*self._trained, trained], maxlen=self.num_steps)
        recent = [length for lengths in self._trained for length in lengths]
        drawn = self._consecutive(len(recent))
        return {"rollout/trained_length_ratio": float(np.mean(recent) / np.mean(drawn))} if drawn else {}

    def _consecutive(self, count: int) -> list[float]:
        """Return the mean lengths of the groups of the last `count` prompt requests before `end`.

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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOutEvaluation:
    """The held-out sets that are sampled in the same way and scored by the same reward.

    One evaluation of the policy may consist of several HeldOutEvaluations.
    """

    # Name of a held-out set -> number of its first rows that are evaluated; None: all rows. The name of data.test is ""
    sets: Mapping[str, int | None]
    sampling: SamplingParams
    # Suffix of the metric names: "sampled" or "greedy"; "" (no suffix) for a set with its own sampling
    metric_suffix: str = ""
    reward: Reward | None = None  # None: the reward of the run
    has_overall_metrics: bool = False  # whether there are also metrics of all sets together

    def rows(self, rows_of_set: Mapping[str, range]) -> dict[str, range]:
        """Return name of a set -> rows that are evaluated. `rows_of_set`: name of a set -> all its rows."""
        return {name: rows_of_set[name][:count] for name, count in self.sets.items()}


def response_limit_section(name: str) -> str:
    """Return the config section that limits the length of responses to a held-out set. The name of data.test is ""."""
    return f"data.test_sets.{name}" if name else "rollout"


def rewards_of_sets(evaluations: Sequence[HeldOutEvaluation]) -> dict[str, Reward]:
    """Return name of a held-out set -> its reward, for the sets that have a reward of their own."""
    return {name: evaluation.reward for evaluation in evaluations if evaluation.reward for name in evaluation.sets}


@dataclass(frozen=True)
class HeldOutResponses:
    """The scored responses of one HeldOutEvaluation, set after set and row after row, with n responses to each row."""

    evaluation: HeldOutEvaluation
    rows: Mapping[str, range]  # name of a set -> its rows in the data set of all held-out prompts
    responses: Sequence[Response]
    scores: Sequence[Score]
    answers: Sequence[str | None]  # answer for which each response votes in maj@k

    @classmethod
    def of(
        cls,
        evaluation: HeldOutEvaluation,
        rows: Mapping[str, range],
        responses: Sequence[Response],
        scores: Sequence[Score],
        reward: Reward,
    ) -> "HeldOutResponses":
        """Return the responses with their answers. `reward`: the reward that gave the scores."""
        return cls(evaluation, rows, responses, scores, voted_answers(reward, responses))

    def metrics(self) -> Metrics:
        """Return the metrics eval/* of each named set and, if the evaluation has overall metrics, of all sets together.

        A set without any scored response has no metrics.
        """
        found: Metrics = {}
        for name, part in self._parts():
            values = evaluation_values(self.scores[part], self.answers[part], self.evaluation.sampling.n)
            if not values:
                logger.warning(
                    "no response to the held-out prompts%s could be scored, for example: %s",
                    f" of {name}" if name else "",
                    self.scores[part][0].failure,
                )
            prefix = f"eval/{name_part(name)}/" if name else "eval/"
            ending = f"_{self.evaluation.metric_suffix}" if self.evaluation.metric_suffix else ""
            found |= {f"{prefix}{quantity}{ending}": value for quantity, value in values.items()}
        return found

    def _parts(self) -> Iterator[tuple[str, slice]]:
        """Yield (name of a set, slice of the responses to its prompts). The name of all sets together is ""."""
        start = 0
        for name, rows in self.rows.items():
            end = start + self.evaluation.sampling.n * len(rows)
            if name:
                yield name, slice(start, end)
            start = end
        if self.evaluation.has_overall_metrics:
            yield "", slice(0, start)

    def write(self, path: Path) -> None:
        """Write one JSON object for each response, with its score and its answer."""
        n, correct = self.evaluation.sampling.n, correct_responses(self.scores)
        positions = [(name, row, member) for name, rows in self.rows.items() for row in rows for member in range(n)]
        lines = [
            dict(
                set=name,
                sampling=self.evaluation.metric_suffix,
                row=row,
                sample=member,
                data_source=response.data_source,
                response=response.text.encode(errors="replace").decode(),
                num_tokens=response.num_tokens,
                truncated=response.truncated,
                reward=score.value,
                parts=score.parts,
                failure=score.failure,
                answer=answer,
                correct=None if correct is None else correct[index],
            )
            for index, ((name, row, member), response, score, answer) in enumerate(
                zip(positions, self.responses, self.scores, self.answers, strict=True)
            )
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def correct_responses(scores: Sequence[Score]) -> list[bool] | None:
    """Return whether each response is correct; None if the reward does not say so.

    - A response that could not be scored is not correct.
    - If the score has parts with names in CORRECTNESS_PARTS, the first of these names decides: 1 means correct.
    - If the score has no such part, the score itself decides: 1 means correct, and 0 means not correct. If such a score is
      neither 0 nor 1, the function returns None.
    """
    correct = []
    for score in scores:
        name = next((name for name in CORRECTNESS_PARTS if name in score.parts), None)
        if name is None and score.failure is None and score.value not in (0, 1):
            return None
        value = score.value if name is None else score.parts[name]
        correct.append(score.failure is None and value == 1)
    return correct


def evaluation_values(scores: Sequence[Score], answers: Sequence[str | None], n: int) -> dict[str, float]:
    """Return the mean reward and, if the reward says which responses are correct, the accuracy, pass@k and maj@k.

    k is 2, 4, 8, ... and n, so there are no pass@k and maj@k for n = 1. The n responses to a prompt are adjacent. Returns {} if
    no response could be scored.
    """
    if all(score.failure is not None for score in scores):
        return {}
    values = {"reward": float(np.mean([score.value for score in scores]))}
    correct = correct_responses(scores)
    if correct is None:
        return values
    values["accuracy"] = float(np.mean(correct))
    prompts = [slice(start, start + n) for start in range(0, len(scores), n)]
    ks = default_ks(n)[1:]
    if not ks:
        return values
    for k in ks:
        values[f"pass_at_{k}"] = float(np.mean([pass_at_k(n, sum(correct[prompt]), k) for prompt in prompts]))
    votes = [majority_at_ks(answers[prompt], correct[prompt], ks) for prompt in prompts]
    return values | {f"maj_at_{k}": float(np.mean([of_prompt[k] for of_prompt in votes])) for k in ks}
