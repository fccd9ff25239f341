"""Trajectories and groups with made-up tokens, for tests of the code that turns groups into the batch of a step."""

from mrl.rewards.reward_types import Score
from mrl.rollout.trajectory import Group, Sample, Trajectory


def trajectory(length: int, *, sampled: list[bool] | None = None, truncated: bool = False) -> Trajectory:
    count = length if sampled is None else sum(sampled)
    ends = (count - 1,) if sampled is None else (0, count - 1)
    tokens = list(range(100, 100 + length))
    return Trajectory(tokens, [-0.1 * n for n in range(count)], truncated, 3, sampled, turn_ends=ends)


def group(row: int, *scores: Score, greedy: float | None = None, **options) -> Group:
    samples = [Sample(row, [row, 7], trajectory(n + 2, **options), score) for n, score in enumerate(scores)]
    return Group(samples, None if greedy is None else Score(greedy))
