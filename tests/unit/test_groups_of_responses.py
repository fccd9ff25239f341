"""Groups as they come in, and the block and columns that they become."""

from dataclasses import replace

import numpy as np
import pytest

from mrl.rewards.base import Score
from mrl.rollout.batch import Batch, UnscoredError
from mrl.rollout.trajectory import Group, Sample, Trajectory, control_columns, to_block, to_scored, trajectories


def path(length: int, *, sampled: list[bool] | None = None, truncated: bool = False) -> Trajectory:
    count = length if sampled is None else sum(sampled)
    ends = (count - 1,) if sampled is None else (0, count - 1)
    tokens = list(range(100, 100 + length))
    return Trajectory(tokens, [-0.1 * n for n in range(count)], truncated, 3, sampled, turn_ends=ends)


def group(row: int, *scores: Score, greedy: float | None = None, **of_path) -> Group:
    samples = [Sample(row, [row, 7], path(n + 2, **of_path), score) for n, score in enumerate(scores)]
    return Group(samples, None if greedy is None else Score(greedy))


ALL, SOME, NONE = (Score(1.0), Score(1.0)), (Score(1.0), Score(0.0)), (Score(0.0), Score.failed("it hung"))


def test_metrics_are_of_refused_groups_too():
    batch = Batch([group(1, *SOME), group(3, *SOME)], [group(0, *ALL), group(2, *NONE)], rounds=2)
    assert [one.samples[0].row for one in batch.groups(8)] == [1, 3]
    numbers = batch.numbers()
    assert numbers["reward/mean"] == 4 / 8 and numbers["reward/failed_fraction"] == 1 / 8
    assert numbers["rollout/kept_groups_fraction"] == 2 / 4 and numbers["rollout/rounds"] == 2


def test_where_every_group_is_refused_the_step_has_as_many_as_were_wanted():
    batch = Batch([], [group(0, *ALL), group(1, *NONE), group(2, *ALL)])
    assert [one.samples[0].row for one in batch.groups(2)] == [0, 1] and not batch.kept


def test_a_step_of_which_nothing_could_be_scored_ends_the_run():
    down = Score.failed("ConnectError: refused")
    batch = Batch([], [group(0, down, down, Score.failed("it hung"))])
    with pytest.raises(UnscoredError, match=r"none of the step's 3 responses could be scored.*2 of them: ConnectError"):
        batch.groups(8)
    batch.refused.append(group(1, *NONE))
    assert len(batch.groups(8)) == 2, "one score is enough to go on"


def test_columns_follow_the_block():
    groups = [group(5, *SOME, greedy=1.0), group(4, *ALL, greedy=0.0)]
    block, columns, scored = to_block(groups), control_columns(groups), to_scored(groups)
    assert columns["rows"].tolist() == [5, 5, 4, 4] and columns["groups"].tolist() == [0, 0, 1, 1]
    assert scored.rewards.tolist() == [1, 0, 1, 1] and scored.greedy_rewards.tolist() == [1, 1, 0, 0]
    assert scored.lengths.tolist() == block.sampled_lengths.tolist() == [2, 3, 2, 3]
    assert block.prompt(2).tolist() == [4, 7] and scored.turn_rewards is None


def test_terms_are_columns_and_numbers_that_are_only_logged_are_not():
    full = Score(2.0, parts={"right": 1.0, "num_chars": 900.0}, terms={"right": 1.0, "short": 0.5})
    scored = to_scored([group(0, full, Score.failed("it hung")), group(1, full, Score(1.0, parts={"num_chars": 3.0}))])
    assert {name: column.tolist() for name, column in scored.parts.items()} == {
        "right": [1, 0, 1, 0],
        "short": [0.5, 0, 0.5, 0],
    }
    assert to_scored([group(0, Score(1.0, parts={"num_chars": 3.0}))]).parts == {}


def test_rewards_of_turns_lie_where_turns_end():
    turns = Score.of_turns([0.25, 1.0])
    several = Sample(0, [0, 7], path(4, sampled=[True, False, True, True]), turns)
    plain = replace(path(3), turn_ends=())  # one turn
    groups = [Group([several]), Group([Sample(1, [1, 7], plain, Score.of_turns([3.0]))])]
    scored, block = to_scored(groups), to_block(groups)
    assert scored.turn_rewards.tolist() == [0.25, 0, 1.0, 0, 0, 3.0]
    assert block.sampled.tolist() == [False, False, True, False, True, True, False, False, True, True, True]


def test_a_block_gives_its_responses_back():
    several = Sample(1, [1, 7], path(4, sampled=[True, False, True, True]), Score(0.0))
    groups = [group(0, *SOME, truncated=True), Group([several])]
    columns = control_columns(groups)
    found = trajectories(to_block(groups), columns["truncated"], columns["weight_versions"])
    expected = [sample.trajectory for one in groups for sample in one.samples]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids and mine.truncated == theirs.truncated and mine.weight_version == 3
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-6)
        assert mine.sampled == (theirs.sampled or [True] * len(theirs.token_ids))
