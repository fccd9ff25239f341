"""Compares an evaluation with an earlier one (`evaluate.compare`): paired differences over the prompts of both evaluations."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mrl.evaluation.evaluation_summary import (
    IntervalEstimate,
    PromptScores,
    by_data_source,
    group_by_prompt,
    student_t_mean,
)
from mrl.rewards.pass_at_k import majorities, pass_at_k

SCORES = "scores.parquet"
"""Name of the file with the scores of an evaluation."""


@dataclass(frozen=True)
class PairedDifference:
    """The later value minus the earlier value, averaged over the prompts of one data source, or over all prompts."""

    name: str  # data source, or OVERALL
    prompts: int  # number of prompts that both evaluations have
    mean_score: IntervalEstimate
    pass_at: dict[int, IntervalEstimate]  # k -> difference of pass@k
    maj_at: dict[int, IntervalEstimate]  # k -> difference of maj@k


@dataclass(frozen=True)
class Comparison:
    """The differences between an evaluation and the earlier evaluation in `folder`."""

    folder: str
    only_now: int  # number of prompts that only the later evaluation has
    only_before: int  # number of prompts that only the earlier evaluation has
    differences: list[PairedDifference]


def read_scores(folder: Path) -> list[PromptScores]:
    """Return the scores of an earlier evaluation. Raises ValueError if there are none or another version of mrl wrote them."""
    import pyarrow.parquet as pq  # the import takes seconds

    path = folder / SCORES
    if not path.is_file():
        raise ValueError(f"evaluate.compare={folder}: no {SCORES} there; expected a folder that `mrl evaluate` wrote.")
    table = pq.read_table(path)
    if "prompt_digest" not in table.column_names:
        raise ValueError(f"evaluate.compare={folder}: another version of mrl wrote it; evaluate these responses again.")
    rows = [row | dict(finish_reason=None, num_tokens=None) for row in table.to_pylist()]
    return group_by_prompt(rows, [row["answer"] for row in rows])


def compare(
    folder: Path,
    before: Sequence[PromptScores],
    now: Sequence[PromptScores],
    ks: Sequence[int],
    threshold: float,
    confidence: float,
) -> Comparison:
    """Return the differences between two evaluations. `before` are the scores that `folder` contains.

    A prompt of one evaluation is paired with the prompt of the other evaluation that has the same digest. If several prompts are
    equal, they are paired in order. The result contains only values of k up to the number of responses to each prompt. The
    intervals are Student's t intervals over the differences of the prompts.

    Raises ValueError if the evaluations have no prompt in common.
    """
    pairs = _pair(before, now)
    if not pairs:
        raise ValueError(
            f"evaluate.compare={folder}: none of its {len(before)} prompts is among the {len(now)} prompts of this evaluation. "
            "Two prompts are the same if their messages, without the system message, and their ground truths are equal."
        )
    fewest = min(min(first.samples, second.samples) for first, second in pairs)
    shared_ks = [k for k in ks if k <= fewest]
    earlier_of = {id(second): first for first, second in pairs}
    differences = [
        _difference(name, [(earlier_of[id(each)], each) for each in prompts], shared_ks, threshold, confidence)
        for name, prompts in by_data_source([second for _, second in pairs])
    ]
    return Comparison(str(folder), len(now) - len(pairs), len(before) - len(pairs), differences)


def _pair(before: Sequence[PromptScores], now: Sequence[PromptScores]) -> list[tuple[PromptScores, PromptScores]]:
    waiting: defaultdict[str, deque[PromptScores]] = defaultdict(deque)
    for prompt in before:
        waiting[prompt.digest].append(prompt)
    return [(waiting[prompt.digest].popleft(), prompt) for prompt in now if waiting[prompt.digest]]


def _difference(
    name: str,
    pairs: Sequence[tuple[PromptScores, PromptScores]],
    ks: Sequence[int],
    threshold: float,
    confidence: float,
) -> PairedDifference:
    def mean_of(value: Callable[[PromptScores], float]) -> IntervalEstimate:
        return student_t_mean(np.array([value(now) - value(before) for before, now in pairs]), confidence)

    def pass_at(k: int) -> Callable[[PromptScores], float]:
        return lambda prompt: pass_at_k(prompt.samples, sum(prompt.passed(threshold)), k)

    def maj_at(k: int) -> Callable[[PromptScores], float]:
        return lambda prompt: majorities(prompt.answers, prompt.passed(threshold), [k])[k]

    return PairedDifference(
        name=name,
        prompts=len(pairs),
        mean_score=mean_of(lambda prompt: float(np.mean(prompt.scores))),
        pass_at={k: mean_of(pass_at(k)) for k in ks},
        maj_at={k: mean_of(maj_at(k)) for k in ks},
    )
