"""Summarises scored responses: pass@k, maj@k and mean score with confidence intervals, per data source and overall."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrl.evaluation.evaluation_prompts import prompt_key
from mrl.evaluation.response_store import Row

MAX_SAMPLES = 1000
"""Largest number of responses to a prompt. With more responses, the binomial coefficients would overflow float64."""


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passed: 1 - C(n-c, k) / C(n, k).

    The k responses are drawn without replacement from n = `num_samples` responses, of which c = `num_passed` passed. The
    estimate is unbiased for every n >= k (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    """
    assert 0 <= num_passed <= num_samples and 1 <= k <= num_samples, f"n={num_samples}, c={num_passed}, k={k}"
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def majority_at_k(answers: Sequence[str | None], passed: Sequence[bool], k: int) -> float:
    """Return the probability that the majority answer of k responses passes.

    The k responses are drawn without replacement from n responses. Each drawn response votes for its answer. A response
    without an answer (None) does not vote. If no drawn response has an answer, the majority does not pass. Tied answers win
    with equal probability. The probability that an answer passes is the fraction of its responses that pass.
    The result is the exact mean over all subsets and ties.
    """
    return majorities(answers, passed, [k])[k]


def majorities(answers: Sequence[str | None], passed: Sequence[bool], ks: Sequence[int]) -> dict[int, float]:
    """Return majority_at_k for each k in `ks`. The votes are counted only once."""
    assert len(answers) == len(passed) and min(ks) >= 1 and max(ks) <= len(answers), f"{len(answers)} answers, k={ks}"
    votes, passing = Counter(answers), Counter(a for a, p in zip(answers, passed, strict=True) if p)
    num_unanswered = votes.pop(None, 0)
    passing.pop(None, None)
    sizes = frozenset(votes[answer] for answer in passing)
    wins = _win_probabilities(tuple(sorted(votes.values())), num_unanswered, sizes, max(ks))
    totals = {k: float(sum(wins[votes[a]][k] * count / votes[a] for a, count in passing.items())) for k in ks}
    return {k: min(1.0, total) for k, total in totals.items()}  # rounding may give a value slightly above 1


@lru_cache(maxsize=4096)
def _win_probabilities(
    counts: tuple[int, ...], num_unanswered: int, sizes: frozenset[int], max_k: int
) -> dict[int, NDArray[np.float64]]:
    """Return the probability that an answer wins the vote, as size -> [max_k + 1].

    The size of an answer is the number of responses that have this answer. The array is indexed by k, the number of drawn
    responses. `counts` are the sizes of all answers. The result contains the sizes in `sizes`. `num_unanswered` responses have
    no answer.
    """
    total = sum(counts) + num_unanswered
    draws = np.array([float(comb(total, k)) for k in range(max_k + 1)])
    won = {size: np.zeros(max_k + 1) for size in sizes}
    for votes in range(1, min(max(sizes, default=0), max_k) + 1):
        for size, ways_m in _ways_of_other_answers(counts, num_unanswered, votes, sizes, max_k - votes):
            won[size][votes:] += comb(size, votes) * ways_m
    return {size: ways / draws for size, ways in won.items()}


def _ways_of_other_answers(
    counts: tuple[int, ...], num_unanswered: int, votes: int, sizes: frozenset[int], max_m: int
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield `(size, ways [max_m + 1])` for each size in `sizes`.

    One answer of this size has `votes` votes. `ways[m]` is the number of ways to draw m of the responses that do not have this
    answer, such that no other answer gets more than `votes` votes. If t other answers get exactly `votes` votes, the way
    counts only 1 / (t + 1), the probability that this answer wins the tie. 1 / (t + 1) is the integral of y**t over y from 0
    to 1. So each tied answer contributes a factor y to a polynomial in y, which Gauss-Legendre quadrature integrates exactly.
    """
    # Size -> count of the answers of this size that can get `votes` votes.
    rivals = Counter(size for size in counts if size >= votes)
    num_free = sum(size for size in counts if size < votes) + num_unanswered  # responses that cannot cause a tie
    nodes_y, weights_y = _legendre((rivals.total() + 1) // 2 + 1)  # of the quadrature over y
    free_m = np.array([float(comb(num_free, m)) for m in range(min(num_free, max_m) + 1)])
    ones_ym = np.ones((len(nodes_y), 1))
    for size, ways_ym in _products_without_one_rival(sorted(rivals.items()), sizes, nodes_y, votes, max_m, ones_ym):
        yield size, _fit_length(np.convolve(weights_y @ ways_ym, free_m), max_m + 1)


def _products_without_one_rival(
    rivals: list[tuple[int, int]],
    sizes: frozenset[int],
    nodes_y: NDArray[np.float64],
    votes: int,
    max_m: int,
    ways_ym: NDArray[np.float64],
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Yield `(size, product)` for each size in `sizes`. The product omits one rival of this size.

    A rival is an answer that can get `votes` votes. The product is `ways_ym` times the polynomials of all other rivals.
    `ways_ym` is [nodes of y, m + 1], where m is the number of drawn responses. `rivals` are pairs (size, count of rivals of
    this size). The list is halved recursively, so that most products are computed only once.
    """
    if not any(size in sizes for size, _ in rivals):
        return
    if len(rivals) == 1:
        ((size, count),) = rivals
        yield size, _multiply_by_rivals(ways_ym, [(size, count - 1)], nodes_y, votes, max_m)
        return
    half = len(rivals) // 2
    for kept, others in ((rivals[:half], rivals[half:]), (rivals[half:], rivals[:half])):
        if any(size in sizes for size, _ in kept):
            product = _multiply_by_rivals(ways_ym, others, nodes_y, votes, max_m)
            yield from _products_without_one_rival(kept, sizes, nodes_y, votes, max_m, product)


def _multiply_by_rivals(
    ways_ym: NDArray[np.float64],
    rivals: list[tuple[int, int]],
    nodes_y: NDArray[np.float64],
    votes: int,
    max_m: int,
) -> NDArray[np.float64]:
    """Multiply `ways_ym` by the polynomials of `rivals`, which are pairs (size, count of rivals of this size).

    A rival's polynomial has one coefficient for each d from 0 to `votes`: the number of ways to draw d of the rival's
    responses. If d equals `votes`, the rival is tied, and the coefficient is multiplied by y.
    """
    for size, count in rivals:
        if votes == 1:  # there may be many rivals, so their product is computed with the binomial theorem
            drawn_j = np.array([float(comb(count, j) * size**j) for j in range(min(count, max_m) + 1)])
            power = drawn_j * nodes_y[:, None] ** np.arange(len(drawn_j))
            grown = [np.convolve(ways, row)[: max_m + 1] for ways, row in zip(ways_ym, power, strict=True)]
            ways_ym = np.array(grown)
            continue
        drawn_d = np.array([float(comb(size, d)) for d in range(votes + 1)])
        for _ in range(count):
            grown = np.zeros((len(nodes_y), min(ways_ym.shape[1] + votes, max_m + 1)))
            for d in range(min(votes, max_m) + 1):
                ways = ways_ym[:, : grown.shape[1] - d] * drawn_d[d]
                grown[:, d : d + ways.shape[1]] += ways * nodes_y[:, None] if d == votes else ways
            ways_ym = grown
    return ways_ym


def _fit_length(values: NDArray[Any], length: int) -> NDArray[np.float64]:
    """Return `values` cut or zero-padded to `length`."""
    return np.pad(values[:length], (0, max(0, length - len(values))))


@lru_cache(maxsize=1024)
def _legendre(num_nodes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and weights that integrate polynomials of degree 2 * num_nodes - 1 from 0 to 1 exactly."""
    from scipy.special import roots_legendre  # the import is slow

    nodes, weights = roots_legendre(num_nodes)
    return (nodes + 1) / 2, weights / 2


@dataclass(frozen=True)
class IntervalEstimate:
    """A mean over prompts, and its confidence interval [low, high]. The bounds are None if they cannot be estimated."""

    value: float
    low: float | None
    high: float | None


def wilson_mean(values: NDArray[np.float64], confidence: float) -> IntervalEstimate:
    """Return the mean of `values` [P], and Wilson's score interval. Each of the P prompts has one value from 0 to 1.

    If all values are 0 or 1, this is Wilson's interval for P prompts. Values between 0 and 1, such as pass@k of a prompt,
    have a smaller variance than m(1 - m), where m is their mean. In this case, P is replaced by an effective number of
    prompts, P * m(1 - m) / variance, as in surveys (Franco et al. 2019, "Comparative Study of Confidence Intervals for
    Proportions in Complex Sample Surveys"). One additional prompt with the largest possible spread m(1 - m) is included in
    the variance. Otherwise a few equal values would give an interval of width 0.
    """
    from scipy.stats import norm  # the import takes a second

    assert np.abs(values - 0.5).max() < 0.5 + 1e-9, f"values from {values.min()} to {values.max()}"
    mean, count = float(values.clip(0, 1).mean()), len(values)
    largest = mean * (1 - mean)
    variance = (float(np.square(values - mean).sum()) + largest) / (count + 1)
    effective = count * largest / variance if variance > 0 else count
    z = float(norm.ppf((1 + confidence) / 2))
    centre = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * np.sqrt(largest / effective + z**2 / (4 * effective**2))
    return IntervalEstimate(mean, max(0.0, float(centre - half)), min(1.0, float(centre + half)))


def student_t_mean(values: NDArray[np.floating], confidence: float) -> IntervalEstimate:
    """Return the mean of `values` [P], one per prompt, and Student's t interval. With one prompt, its bounds are None."""
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
    digest: str  # digest of the prompt, by which evaluations are compared
    scores: list[float]
    answers: list[str | None]  # answer for which each response votes in maj@k; None: no answer
    failed: int  # number of responses that could not be scored; their score is 0
    cut: int | None  # number of responses that were truncated at the token limit; None: unknown
    tokens: int | None  # number of tokens in all responses together; None: unknown

    @property
    def samples(self) -> int:
        return len(self.scores)

    def passed(self, threshold: float) -> list[bool]:
        """Return which responses pass: those with a score of at least `threshold`."""
        return [score >= threshold for score in self.scores]


@dataclass(frozen=True)
class EvaluationSummary:
    """Results over the prompts of one data source, or over all prompts. Every prompt has the same weight."""

    name: str  # data source, or OVERALL
    prompts: int
    responses: int
    # Mean@n, where n is the number of responses to a prompt. Its expected value does not depend on n.
    mean_score: IntervalEstimate
    pass_at: dict[int, IntervalEstimate]  # by k
    maj_at: dict[int, IntervalEstimate]  # by k
    failed_fraction: float  # fraction of responses that could not be scored
    unanswered_fraction: float  # fraction of responses without an answer, which do not vote in maj@k
    cut_fraction: float | None  # fraction of responses that were truncated at the token limit; None: unknown
    mean_tokens: float | None  # mean number of tokens in a response; None: unknown


def group_by_prompt(rows: Sequence[Row], answers: Sequence[str | None]) -> list[PromptScores]:
    """Group scored rows by prompt. `answers` [B] are the answers for which the responses vote in maj@k.

    The rows need the columns prompt_digest (see `prompt_digest`), finish_reason and num_tokens. The latter two may be None.
    """
    indices: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(prompt_key(row), []).append(index)
    return [
        PromptScores(
            data_source=rows[group[0]]["data_source"],
            digest=rows[group[0]]["prompt_digest"],
            scores=[rows[i]["score"] for i in group],
            answers=[answers[i] for i in group],
            failed=sum(rows[i]["failure"] is not None for i in group),
            cut=_sum_or_none([_is_cut(rows[i]) for i in group]),
            tokens=_sum_or_none([rows[i]["num_tokens"] for i in group]),
        )
        for group in indices.values()
    ]


def _is_cut(row: Row) -> bool | None:
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
        return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    if max(ks) > samples:
        raise ValueError(
            f"evaluate.k={list(ks)}: there are {samples} responses to a prompt; use at most {samples}, or raise "
            "generate.samples."
        )
    return sorted(set(ks))


def summarise(
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
    majority = [majorities(prompt.answers, p, ks) for prompt, p in zip(prompts, passed, strict=True)]

    def over_prompts(values: Sequence[float]) -> IntervalEstimate:
        return wilson_mean(np.array(values), confidence)

    responses = sum(prompt.samples for prompt in prompts)
    cut, tokens = _sum_or_none([prompt.cut for prompt in prompts]), _sum_or_none([prompt.tokens for prompt in prompts])
    return EvaluationSummary(
        name=name,
        prompts=len(prompts),
        responses=responses,
        mean_score=student_t_mean(np.array([np.mean(prompt.scores) for prompt in prompts]), confidence),
        pass_at={k: over_prompts([pass_at_k(len(p), sum(p), k) for p in passed]) for k in ks},
        maj_at={k: over_prompts([by_k[k] for by_k in majority]) for k in ks},
        failed_fraction=sum(prompt.failed for prompt in prompts) / responses,
        unanswered_fraction=sum(prompt.answers.count(None) for prompt in prompts) / responses,
        cut_fraction=None if cut is None else cut / responses,
        mean_tokens=None if tokens is None else tokens / responses,
    )
