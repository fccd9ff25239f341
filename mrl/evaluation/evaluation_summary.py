"""Summarizes scored responses, and compares an evaluation with an earlier one.

The summary has pass@k, maj@k and mean score with confidence intervals, per data source and overall. The comparison
(`evaluate.compare`) has paired differences over the prompts of both evaluations.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrl.evaluation.evaluation_prompts import prompt_key
from mrl.evaluation.response_store import Row
from mrl.rewards.pass_at_k import default_ks, majority_at_ks, pass_at_k


@dataclass(frozen=True)
class IntervalEstimate:
    """A mean over prompts, and its confidence interval [low, high]. The bounds are None if they cannot be estimated."""

    value: float
    low: float | None
    high: float | None


def wilson_mean(values: NDArray[np.float64], confidence: float) -> IntervalEstimate:
    """Return the mean of `values` [P], and Wilson's score interval. Each of the P prompts has one value from 0 to 1.

    If all values are 0 or 1, this is Wilson's interval for P prompts. Values between 0 and 1, such as pass@k of a prompt,
    have a smaller variance than m(1 - m), where m is their mean. For such values, P is replaced by an effective number of
    prompts, P * m(1 - m) / variance, as in surveys (Franco et al. 2019, "Comparative Study of Confidence Intervals for
    Proportions in Complex Sample Surveys"). The variance includes an imaginary prompt with the squared deviation m(1 - m),
    which is the largest possible variance. Without this prompt, a few equal values would give an interval of width 0.
    """
    from scipy.stats import norm  # the import takes a second

    assert np.abs(values - 0.5).max() < 0.5 + 1e-9, f"values from {values.min()} to {values.max()}"
    mean, count = float(values.clip(0, 1).mean()), len(values)
    largest = mean * (1 - mean)
    variance = (float(np.square(values - mean).sum()) + largest) / (count + 1)
    effective = count * largest / variance if variance > 0 else count
    z = float(norm.ppf((1 + confidence) / 2))
    center = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * np.sqrt(largest / effective + z**2 / (4 * effective**2))
    return IntervalEstimate(mean, max(0.0, float(center - half)), min(1.0, float(center + half)))


def student_t_mean(values: NDArray[np.floating], confidence: float) -> IntervalEstimate:
    """Return the mean of `values` [P], one per prompt, and Student's t interval. With one prompt, the bounds are None."""
    from scipy.stats import t  # the import takes a second

    middle, count = float(values.mean()), len(values)
    if count < 2:
        return IntervalEstimate(middle, None, None)
    half = float(t.ppf((1 + confidence) / 2, count - 1) * values.std(ddof=1) / np.sqrt(count))
    return IntervalEstimate(middle, middle - half, middle + half)


OVERALL = "overall"  # name of the summary of all prompts


@dataclass(frozen=True)
class PromptScores:
    """Scores and answers of the n responses to one prompt."""

    data_source: str
    prompt_digest: str  # digest of the prompt, by which evaluations are compared
    scores: list[float]
    answers: list[str | None]  # answer for which each response votes in maj@k; None: no answer
    failed: int  # number of responses that could not be scored; their score is 0
    truncated: int | None  # number of responses that were truncated at the token limit; None: unknown
    tokens: int | None  # number of tokens in all responses together; None: unknown

    @property
    def samples(self) -> int:
        return len(self.scores)

    def passed(self, threshold: float) -> list[bool]:
        """Return which responses pass: those with a score of at least `threshold`."""
        return [score >= threshold for score in self.scores]


@dataclass(frozen=True)
class EvaluationSummary:
    """Results over the prompts of one data source, or over all prompts.

    In mean_score, pass_at and maj_at, every prompt has the same weight. In the other numbers, every response has the same weight.
    """

    name: str  # data source, or OVERALL
    prompts: int
    responses: int
    # Mean@n, where n is the number of responses to a prompt. Its expected value does not depend on n.
    mean_score: IntervalEstimate
    pass_at: dict[int, IntervalEstimate]  # k -> mean of pass@k
    maj_at: dict[int, IntervalEstimate]  # k -> mean of maj@k
    failed_fraction: float  # fraction of responses that could not be scored
    unanswered_fraction: float  # fraction of responses without an answer, which do not vote in maj@k
    truncated_fraction: float | None  # fraction of responses that were truncated at the token limit; None: unknown
    mean_tokens: float | None  # mean number of tokens in a response; None: unknown


def group_by_prompt(rows: Sequence[Row], answers: Sequence[str | None]) -> list[PromptScores]:
    """Group scored rows by prompt. `answers`: for each row, the answer for which the response votes in maj@k.

    The rows need the columns prompt_digest (see evaluation_prompts.prompt_digest), finish_reason and num_tokens.
    The values of finish_reason and num_tokens may be None.
    """
    indices: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(prompt_key(row), []).append(index)
    return [
        PromptScores(
            data_source=rows[group[0]]["data_source"],
            prompt_digest=rows[group[0]]["prompt_digest"],
            scores=[rows[i]["score"] for i in group],
            answers=[answers[i] for i in group],
            failed=sum(rows[i]["failure"] is not None for i in group),
            truncated=_sum_or_none([_is_truncated(rows[i]) for i in group]),
            tokens=_sum_or_none([rows[i]["num_tokens"] for i in group]),
        )
        for group in indices.values()
    ]


def _is_truncated(row: Row) -> bool | None:
    reason = row["finish_reason"]
    return None if reason is None else reason == "length"


def _sum_or_none(values: Sequence[int | None]) -> int | None:
    """Return the sum, or None if a value is None."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def choose_k(ks: Sequence[int], samples: int) -> list[int]:
    """Return `ks` in ascending order. If `ks` is empty, return the powers of 2 below `samples`, and `samples`.

    Raises ValueError if a k exceeds `samples`, the number of responses to a prompt.
    """
    if not ks:
        return default_ks(samples)
    if max(ks) > samples:
        raise ValueError(
            f"evaluate.k={list(ks)}: there are {samples} responses to a prompt; use at most {samples}, or raise "
            "generate.samples."
        )
    return sorted(set(ks))


def summarize(
    prompts: Sequence[PromptScores], ks: Sequence[int], threshold: float, confidence: float
) -> list[EvaluationSummary]:
    """Return the summary of each data source, sorted by name. If there are several, a summary of all prompts follows.

    A response passes if its score is at least `threshold`. `confidence` is the confidence level of the intervals.
    """
    return [_summary(name, of_source, ks, threshold, confidence) for name, of_source in by_data_source(prompts)]


def by_data_source(prompts: Sequence[PromptScores]) -> list[tuple[str, list[PromptScores]]]:
    """Return (name, prompts) for each data source, sorted by name. If there are several, OVERALL with all prompts follows."""
    by_source: dict[str, list[PromptScores]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.data_source, []).append(prompt)
    return sorted(by_source.items()) + ([(OVERALL, list(prompts))] if len(by_source) > 1 else [])


def _summary(
    name: str, prompts: Sequence[PromptScores], ks: Sequence[int], threshold: float, confidence: float
) -> EvaluationSummary:
    passed = [prompt.passed(threshold) for prompt in prompts]
    majority = [majority_at_ks(prompt.answers, p, ks) for prompt, p in zip(prompts, passed, strict=True)]

    def over_prompts(values: Sequence[float]) -> IntervalEstimate:
        return wilson_mean(np.array(values), confidence)

    responses = sum(prompt.samples for prompt in prompts)
    truncated = _sum_or_none([prompt.truncated for prompt in prompts])
    tokens = _sum_or_none([prompt.tokens for prompt in prompts])
    return EvaluationSummary(
        name=name,
        prompts=len(prompts),
        responses=responses,
        mean_score=student_t_mean(np.array([np.mean(prompt.scores) for prompt in prompts]), confidence),
        pass_at={k: over_prompts([pass_at_k(len(p), sum(p), k) for p in passed]) for k in ks},
        maj_at={k: over_prompts([by_k[k] for by_k in majority]) for k in ks},
        failed_fraction=sum(prompt.failed for prompt in prompts) / responses,
        unanswered_fraction=sum(prompt.answers.count(None) for prompt in prompts) / responses,
        truncated_fraction=None if truncated is None else truncated / responses,
        mean_tokens=None if tokens is None else tokens / responses,
    )


SCORES = "scores.parquet"
"""Name of the file with the scores of an evaluation."""


@dataclass(frozen=True)
class PairedDifference:
    """Mean differences between two evaluations (later minus earlier), over the prompts of one data source or all prompts."""

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
    equal, they are paired in order. Values of k above the smallest number of responses to a paired prompt are left out. The
    intervals are Student's t intervals over the differences of the prompts.

    Raises ValueError if the evaluations have no prompt in common.
    """
    pairs = _pair(before, now)
    if not pairs:
        raise ValueError(
            f"evaluate.compare={folder}: none of its {len(before)} prompts is among the {len(now)} prompts of this evaluation. "
            "Two prompts are the same if their ground truths and messages (without system and developer messages) are equal."
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
        waiting[prompt.prompt_digest].append(prompt)
    return [(waiting[prompt.prompt_digest].popleft(), prompt) for prompt in now if waiting[prompt.prompt_digest]]


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
        return lambda prompt: majority_at_ks(prompt.answers, prompt.passed(threshold), [k])[k]

    return PairedDifference(
        name=name,
        prompts=len(pairs),
        mean_score=mean_of(lambda prompt: float(np.mean(prompt.scores))),
        pass_at={k: mean_of(pass_at(k)) for k in ks},
        maj_at={k: mean_of(maj_at(k)) for k in ks},
    )
