"""Evaluation on held-out prompts: how each held-out set is sampled, and the metrics of the scored responses."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.algorithms.filters import CORRECTNESS_PARTS
from mrl.core.metric_families import name_part
from mrl.core.metrics import Metrics
from mrl.rewards.pass_at_k import default_ks, majorities, pass_at_k, voted_answers
from mrl.rewards.reward_types import Response, Reward, Score
from mrl.rollout.client import SamplingParams
from parallel.durable_files import atomic_file

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
    kind: str = ""
    reward: Reward | None = None  # None: the reward of the run
    has_total: bool = False  # whether there are also metrics of all sets together

    def rows(self, rows_of_set: Mapping[str, range]) -> dict[str, range]:
        """Return name of a set -> rows that are evaluated. `rows_of_set`: name of a set -> all its rows."""
        return {name: rows_of_set[name][:count] for name, count in self.sets.items()}


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
        """Return the metrics eval/* of each named set and, if the evaluation has totals, of all sets together.

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
            ending = f"_{self.evaluation.kind}" if self.evaluation.kind else ""
            found |= {f"{prefix}{quantity}{ending}": value for quantity, value in values.items()}
        return found

    def _parts(self) -> Iterator[tuple[str, slice]]:
        """Yield (name of a set, its responses); the name of all sets together is ""."""
        start = 0
        for name, rows in self.rows.items():
            end = start + self.evaluation.sampling.n * len(rows)
            if name:
                yield name, slice(start, end)
            start = end
        if self.evaluation.has_total:
            yield "", slice(0, start)

    def write(self, path: Path) -> None:
        """Write one JSON object for each response, with its score and its answer."""
        n, correct = self.evaluation.sampling.n, correct_responses(self.scores)
        positions = [(name, row, member) for name, rows in self.rows.items() for row in rows for member in range(n)]
        lines = [
            dict(
                set=name,
                sampling=self.evaluation.kind,
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
    votes = [majorities(answers[prompt], correct[prompt], ks) for prompt in prompts]
    return values | {f"maj_at_{k}": float(np.mean([of_prompt[k] for of_prompt in votes])) for k in ks}
