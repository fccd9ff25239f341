"""Trajectories and groups, and the token block and the columns that are made from them."""

from dataclasses import replace

import numpy as np
from sampled_groups import group, trajectory

from mrl.rewards.reward_types import Score
from mrl.rollout.trajectory import (
    Group,
    Sample,
    block_trajectories,
    driver_columns,
    to_block,
    to_scored_batch,
)

ALL, SOME = (Score(1.0), Score(1.0)), (Score(1.0), Score(0.0))


def test_columns_are_in_the_order_of_the_block():
    groups = [group(5, *SOME, greedy=1.0), group(4, *ALL, greedy=0.0)]
    block, columns, scored = to_block(groups), driver_columns(groups), to_scored_batch(groups)
    assert columns["rows"].tolist() == [5, 5, 4, 4] and columns["groups"].tolist() == [0, 0, 1, 1]
    assert scored.rewards.tolist() == [1, 0, 1, 1] and scored.greedy_rewards.tolist() == [1, 1, 0, 0]
    assert scored.lengths.tolist() == block.sampled_lengths.tolist() == [2, 3, 2, 3]
    assert block.prompt(2).tolist() == [4, 7] and scored.turn_rewards is None


def test_gdpo_parts_become_columns_and_logged_numbers_do_not():
    full = Score(2.0, parts={"right": 1.0, "num_chars": 900.0}, gdpo_parts={"right": 1.0, "short": 0.5})
    scored = to_scored_batch(
        [group(0, full, Score.failed("it hung")), group(1, full, Score(1.0, parts={"num_chars": 3.0}))]
    )
    assert {name: column.tolist() for name, column in scored.reward_parts.items()} == {
        "right": [1, 0, 1, 0],
        "short": [0.5, 0, 0.5, 0],
    }
    assert to_scored_batch([group(0, Score(1.0, parts={"num_chars": 3.0}))]).reward_parts == {}


def test_turn_rewards_are_at_the_last_token_of_each_turn():
    turns = Score.of_turns([0.25, 1.0])
    multi_turn = Sample(0, [0, 7], trajectory(4, sampled=[True, False, True, True]), turns)
    plain = replace(trajectory(3), turn_ends=())  # a single turn
    groups = [Group([multi_turn]), Group([Sample(1, [1, 7], plain, Score.of_turns([3.0]))])]
    scored, block = to_scored_batch(groups), to_block(groups)
    assert scored.turn_rewards.tolist() == [0.25, 0, 1.0, 0, 0, 3.0]
    assert block.sampled.tolist() == [False, False, True, False, True, True, False, False, True, True, True]


def test_a_block_is_cut_back_into_its_trajectories():
    multi_turn = Sample(1, [1, 7], trajectory(4, sampled=[True, False, True, True]), Score(0.0))
    groups = [group(0, *SOME, truncated=True), Group([multi_turn])]
    columns = driver_columns(groups)
    found = block_trajectories(to_block(groups), columns["truncated"], columns["weight_versions"])
    expected = [sample.trajectory for one in groups for sample in one.samples]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids and mine.truncated == theirs.truncated and mine.weight_version == 3
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-6)
        assert mine.sampled == (theirs.sampled or [True] * len(theirs.token_ids))
