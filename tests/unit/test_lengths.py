"""Expected lengths, and what choosing by speed does to the lengths that are trained."""

import pytest

from mrl.rewards.base import Score
from mrl.rollout.journal import Entry
from mrl.rollout.lengths import Lengths, Selection
from mrl.rollout.trajectory import Group, Sample, Trajectory


def group(length: int) -> Group:
    return Group([Sample(0, [1], Trajectory([5] * length, [0.0] * length, False, 0), Score(1.0))] * 2)


def taken(lengths: dict[int, int], dropped=()) -> Entry:
    return Entry(list(lengths), [group(length) for length in lengths.values()], [], [], list(dropped))


def test_a_row_is_expected_to_be_as_long_as_the_last_time():
    lengths = Lengths(guess=50)
    assert lengths.expected(3) == 50
    lengths.learn(3, [10, 30])
    lengths.learn(4, [100, 100])
    assert (lengths.expected(3), lengths.expected(4), lengths.expected(5)) == (20, 100, 60)
    lengths.learn(3, [40, 40])
    assert lengths.expected(3) == 40


def test_steps_in_the_order_of_drawing_are_fair():
    selection = Selection()
    for step in range(6):
        numbers = selection.of_step(taken({2 * step: 10, 2 * step + 1: 90}), {})
        assert numbers == {"rollout/length_selected_ratio": 1.0}


def test_the_quick_first_shows_until_the_slow_are_trained():
    selection = Selection(steps=1)
    assert selection.of_step(taken({0: 10, 2: 10}), {1: group(100)}) == {
        "rollout/length_selected_ratio": pytest.approx(10 / 55)
    }, "of tickets 1 and 2"
    found = selection.of_step(taken({1: 100, 3: 10}), {})
    assert found == {"rollout/length_selected_ratio": pytest.approx(55 / 10)}, "compared with tickets 2 and 3"


def test_a_group_that_is_not_finished_ends_what_is_compared():
    selection = Selection(steps=1)
    assert selection.of_step(taken({1: 10}), {2: group(30)}) != {}
    assert Selection().of_step(taken({}), {}) == {}


def test_a_group_that_was_given_up_counts_as_the_longest_of_its_step():
    selection = Selection(steps=1)
    found = selection.of_step(taken({0: 10, 2: 30}, dropped=[1, 3]), {})
    assert found == {"rollout/length_selected_ratio": pytest.approx(20 / 30)}


def test_what_is_long_past_is_forgotten():
    selection = Selection(steps=1)
    for step in range(100):
        selection.of_step(taken({2 * step: 10, 2 * step + 1: 20}), {})
    assert len(selection._lengths) <= 12
