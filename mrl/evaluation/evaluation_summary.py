"""Summaries of scored responses: pass@k, maj@k and mean score, per data source and over all prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrl.evaluation.evaluation_prompts import prompt_key
from mrl.evaluation.pass_at_k import IntervalEstimate, majorities, pass_at_k, student_t_mean, wilson_mean
from mrl.evaluation.response_store import Row

OVERALL = "overall"


@dataclass(frozen=True)
class PromptScores:
    """Scores and answers of the n responses to one prompt."""

    data_source: str
    scores: list[float]
    answers: list[str | None]
    failed: int  # responses that could not be scored; their score is 0
    cut: int  # responses cut at the token limit
    tokens: int  # of all responses together

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
    mean_score: IntervalEstimate  # mean@n; its expectation does not depend on the number of responses n
    pass_at: dict[int, IntervalEstimate]  # by k
    maj_at: dict[int, IntervalEstimate]  # by k
    failed_fraction: float  # responses that could not be scored
    unanswered_fraction: float  # responses without an answer to vote for
    cut_fraction: float  # responses cut at the token limit
    mean_tokens: float  # per response


def group_by_prompt(rows: Sequence[Row], answers: Sequence[str | None]) -> list[PromptScores]:
    """Group scored rows by prompt. `answers` [B] are the answers that the responses vote for."""
    indices: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        indices.setdefault(prompt_key(row), []).append(index)
    return [
        PromptScores(
            rows[group[0]]["data_source"],
            [rows[i]["score"] for i in group],
            [answers[i] for i in group],
            sum(rows[i]["failure"] is not None for i in group),
            sum(rows[i]["finish_reason"] == "length" for i in group),
            sum(rows[i]["num_tokens"] for i in group),
        )
        for group in indices.values()
    ]


def choose_k(ks: Sequence[int], samples: int) -> list[int]:
    """Return `ks` sorted; if empty, the powers of 2 up to `samples`, and `samples`. Raises ValueError for a k above `samples`."""
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
    """Return the summary of each data source, sorted by name; with several sources, the summary of all prompts comes last."""
    by_source: dict[str, list[PromptScores]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.data_source, []).append(prompt)
    parts = sorted(by_source.items()) + ([(OVERALL, list(prompts))] if len(by_source) > 1 else [])
    return [_summary(name, of_source, ks, threshold, confidence) for name, of_source in parts]


def _summary(
    name: str, prompts: Sequence[PromptScores], ks: Sequence[int], threshold: float, confidence: float
) -> EvaluationSummary:
    passed = [prompt.passed(threshold) for prompt in prompts]
    majority = [majorities(prompt.answers, p, ks) for prompt, p in zip(prompts, passed, strict=True)]

    def over_prompts(values: Sequence[float]) -> IntervalEstimate:
        return wilson_mean(np.array(values), confidence)

    responses = sum(prompt.samples for prompt in prompts)
    return EvaluationSummary(
        name=name,
        prompts=len(prompts),
        responses=responses,
        mean_score=student_t_mean(np.array([np.mean(prompt.scores) for prompt in prompts]), confidence),
        pass_at={k: over_prompts([pass_at_k(len(p), sum(p), k) for p in passed]) for k in ks},
        maj_at={k: over_prompts([by_k[k] for by_k in majority]) for k in ks},
        failed_fraction=sum(prompt.failed for prompt in prompts) / responses,
        unanswered_fraction=sum(prompt.answers.count(None) for prompt in prompts) / responses,
        cut_fraction=sum(prompt.cut for prompt in prompts) / responses,
        mean_tokens=sum(prompt.tokens for prompt in prompts) / responses,
    )
