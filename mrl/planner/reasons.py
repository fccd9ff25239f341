"""Why an answer of the search is as quick as it is, and what others lose against it, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.planner.search import Candidate, Search
from mrl.planner.times import PARTS

MEANING = dict(
    matmul="arithmetic of attention's projections, MLPs and the output layer",
    attention="arithmetic of attention",
    experts="arithmetic of experts, or reading their weights",
    tensor="tensor-parallel messages",
    context="gathering keys and values over context-parallel ranks",
    dispatch="tokens on their way to experts and back",
    pipeline="the pipeline's bubble, and messages between stages",
    gradients="summing gradients, gathering weights",
    optimizer="the optimizer's memory traffic",
    rollout="sampling",
    push="bringing weights to engines",
    switch="giving GPUs to each other",
)
"""Parts of a step's seconds, as Search.parts has them."""
NOTICED_S = 0.005  # share of a step below which a difference is not told


def limits(search: Search, answer: Candidate) -> list[str]:
    """What holds the best answer back, the largest first."""
    return [_balance(answer), _sampling(search, answer), _training(search, answer)]


def _balance(answer: Candidate) -> str:
    rollout, train = answer.rollout_s, answer.trainers.seconds
    if answer.mode == "sync":
        shares = f"sampling {rollout / answer.step_s:.0%}, training {train / answer.step_s:.0%}"
        rest = (answer.push_s + answer.switch_s) / answer.step_s
        return f"in turns: {shares}, weights and switches {rest:.0%} of the step"
    longer, shorter = ("sampling", "training") if rollout >= train else ("training", "sampling")
    waits = 1 - min(rollout, train) / max(rollout, train)
    return f"beside each other: {longer} takes longer, {shorter} waits {waits:.0%} of that time"


def _sampling(search: Search, answer: Candidate) -> str:
    running, asked = search.load(answer)
    if asked > running:
        return f"sampling: the KV cache of an engine holds {running:,} of {asked:,} responses at one time"
    longest = search.work.lengths.longest_of(search.work.responses)
    return (
        f"sampling: all {asked:,} responses of an engine run at once; the longest, {longest:,.0f} tokens, is waited for"
    )


def _training(search: Search, answer: Candidate) -> str:
    parts = search.parts(answer)
    named = sorted(((parts[name], name) for name in PARTS), reverse=True)[:3]
    total = answer.trainers.seconds
    return "training: " + ", ".join(f"{seconds / total:.0%} {MEANING[name]}" for seconds, name in named)


def losses(search: Search, best: Candidate, other: Candidate) -> str:
    """What another answer loses and wins against the best, the largest first."""
    mine, theirs = search.parts(best), search.parts(other)
    apart = sorted(((theirs[name] - mine[name], name) for name in mine), key=lambda pair: -abs(pair[0]))
    told = [f"{name} {seconds:+.3g} s" for seconds, name in apart if abs(seconds) > NOTICED_S * best.step_s][:4]
    return ", ".join([*_changes(best, other), *told]) or "as quick"


def _changes(best: Candidate, other: Candidate) -> Iterator[str]:
    if best.placement != other.placement:
        yield other.placement
    if best.mode != other.mode:
        yield other.mode
