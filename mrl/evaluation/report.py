"""Rows of scored responses -> pass@k, maj@k and mean score, of each data source and of all prompts together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrl.evaluation import intervals
from mrl.evaluation.estimators import majorities, pass_at_k
from mrl.evaluation.intervals import Estimate
from mrl.evaluation.questions import key
from mrl.evaluation.store import Row

OVERALL = "overall"


@dataclass(frozen=True)
class Prompt:
    """The n responses to one prompt."""

    data_source: str
    scores: list[float]
    answers: list[str | None]
    failed: int  # responses that the reward gave up on: their score is 0
    cut: int  # responses cut at the token limit
    tokens: int  # of all responses

    @property
    def samples(self) -> int:
        return len(self.scores)

    def passed(self, threshold: float) -> list[bool]:
        """Which responses pass."""
        return [score >= threshold for score in self.scores]


@dataclass(frozen=True)
class Summary:
    """What the responses to some prompts say; every prompt counts the same."""

    name: str  # a data source, or OVERALL
    prompts: int
    responses: int
    mean_score: Estimate  # mean@n: the mean score of n responses, which for any other number is expected to be the same
    pass_at: dict[int, Estimate]  # by k
    maj_at: dict[int, Estimate]  # by k
    failed_fraction: float  # of responses: the reward gave no score
    unanswered_fraction: float  # of responses: no answer to vote for
    cut_fraction: float  # of responses: cut at the token limit
    mean_tokens: float  # per response


def prompts_of(rows: Sequence[Row], answers: Sequence[str | None]) -> list[Prompt]:
    """Group scored rows by prompt; `answers` [B]: what each response votes for."""
    places: dict[tuple[int, int], list[int]] = {}
    for at, row in enumerate(rows):
        places.setdefault(key(row), []).append(at)
    return [
        Prompt(
            rows[of[0]]["data_source"],
            [rows[at]["score"] for at in of],
            [answers[at] for at in of],
            sum(rows[at]["failure"] is not None for at in of),
            sum(rows[at]["finish_reason"] == "length" for at in of),
            sum(rows[at]["num_tokens"] for at in of),
        )
        for of in places.values()
    ]


def choose_k(wanted: Sequence[int], samples: int) -> list[int]:
    """Sorted `wanted`, or 1, 2, 4, ... and all; raises ValueError at one that needs more samples than there are."""
    if not wanted:
        return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})
    if max(wanted) > samples:
        raise ValueError(
            f"evaluate.k={list(wanted)}: there are {samples} responses to a prompt; use at most {samples}, or raise "
            "generate.samples."
        )
    return sorted(set(wanted))


def summarise(prompts: Sequence[Prompt], ks: Sequence[int], threshold: float, confidence: float) -> list[Summary]:
    """Of each data source, in the order of their names; and of all, where there are several."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.data_source, []).append(prompt)
    parts = sorted(by_source.items()) + ([(OVERALL, list(prompts))] if len(by_source) > 1 else [])
    return [_summary(name, of, ks, threshold, confidence) for name, of in parts]


def _summary(name: str, prompts: Sequence[Prompt], ks: Sequence[int], threshold: float, confidence: float) -> Summary:
    passed = [prompt.passed(threshold) for prompt in prompts]
    majority = [majorities(prompt.answers, p, ks) for prompt, p in zip(prompts, passed, strict=True)]

    def over_prompts(values: Sequence[float]) -> Estimate:
        return intervals.share(np.array(values), confidence)

    responses = sum(prompt.samples for prompt in prompts)
    return Summary(
        name=name,
        prompts=len(prompts),
        responses=responses,
        mean_score=intervals.mean(np.array([np.mean(prompt.scores) for prompt in prompts]), confidence),
        pass_at={k: over_prompts([pass_at_k(len(p), sum(p), k) for p in passed]) for k in ks},
        maj_at={k: over_prompts([of[k] for of in majority]) for k in ks},
        failed_fraction=sum(prompt.failed for prompt in prompts) / responses,
        unanswered_fraction=sum(prompt.answers.count(None) for prompt in prompts) / responses,
        cut_fraction=sum(prompt.cut for prompt in prompts) / responses,
        mean_tokens=sum(prompt.tokens for prompt in prompts) / responses,
    )
