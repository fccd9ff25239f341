"""Metrics of a step: rewards of all groups, and how much choosing fast groups shortens the trained responses."""

import pytest
from sampled_groups import group

from mrl.rewards.reward_types import Score
from mrl.rollout.staleness_buffer import ResponseLengths
from mrl.rollout.step_metrics import LengthBias, SampledStep, UnscoredStepError
from mrl.rollout.trajectory import Group, Sample, StepGroups, Trajectory

ALL, SOME, NONE = (Score(1.0), Score(1.0)), (Score(1.0), Score(0.0)), (Score(0.0), Score.failed("it hung"))


def test_metrics_cover_filtered_groups_as_well():
    step = SampledStep([group(1, *SOME), group(3, *SOME)], [group(0, *ALL), group(2, *NONE)], rounds=2)
    assert [one.row for one in step.trained_groups(8)] == [1, 3]
    numbers = step.metrics()
    assert numbers["reward/mean"] == 4 / 8 and numbers["reward/failed_fraction"] == 1 / 8
    assert numbers["rollout/kept_groups_fraction"] == 2 / 4 and numbers["rollout/rounds"] == 2


def test_a_step_without_kept_groups_returns_as_many_filtered_ones_as_asked():
    step = SampledStep([], [group(0, *ALL), group(1, *NONE), group(2, *ALL)])
    assert [one.row for one in step.trained_groups(2)] == [0, 1] and not step.kept


def test_a_step_without_any_score_raises():
    down = Score.failed("ConnectError: refused")
    step = SampledStep([], [group(0, down, down, Score.failed("it hung"))])
    with pytest.raises(
        UnscoredStepError, match=r"none of the step's 3 responses could be scored.*2 of them: ConnectError"
    ):
        step.trained_groups(8)
    step.filtered.append(group(1, *NONE))
    assert len(step.trained_groups(8)) == 2, "one scored response is enough"


def group_of(length: int) -> Group:
    return Group([Sample(0, [1], Trajectory([5] * length, [0.0] * length, False, 0), Score(1.0))] * 2)


def step_of(lengths: dict[int, int], dropped=()) -> StepGroups[Group]:
    return StepGroups(list(lengths), [group_of(length) for length in lengths.values()], [], [], list(dropped))


def test_a_row_is_expected_to_be_as_long_as_its_last_group():
    lengths = ResponseLengths(initial_guess=50)
    assert lengths.expected(3) == 50
    lengths.learn(3, [10, 30])
    lengths.learn(4, [100, 100])
    assert (lengths.expected(3), lengths.expected(4), lengths.expected(5)) == (20, 100, 60)
    lengths.learn(3, [40, 40])
    assert lengths.expected(3) == 40


def test_steps_in_the_order_of_drawing_have_no_length_bias():
    bias = LengthBias()
    for step in range(6):
        numbers = bias.update(step_of({2 * step: 10, 2 * step + 1: 90}), {})
        assert numbers == {"rollout/length_selected_ratio": 1.0}


def test_the_bias_of_fast_groups_shows_until_the_slow_ones_are_trained():
    bias = LengthBias(num_steps=1)
    assert bias.update(step_of({0: 10, 2: 10}), {1: group_of(100)}) == {
        "rollout/length_selected_ratio": pytest.approx(10 / 55)
    }, "compared with prompt requests 1 and 2"
    found = bias.update(step_of({1: 100, 3: 10}), {})
    assert found == {"rollout/length_selected_ratio": pytest.approx(55 / 10)}, "compared with prompt requests 2 and 3"


def test_the_comparison_ends_before_the_first_unfinished_group():
    bias = LengthBias(num_steps=1)
    assert bias.update(step_of({1: 10}), {2: group_of(30)}) != {}
    assert LengthBias().update(step_of({}), {}) == {}


def test_a_dropped_group_counts_as_the_longest_of_its_step():
    bias = LengthBias(num_steps=1)
    found = bias.update(step_of({0: 10, 2: 30}, dropped=[1, 3]), {})
    assert found == {"rollout/length_selected_ratio": pytest.approx(20 / 30)}


def test_lengths_of_old_requests_are_discarded():
    bias = LengthBias(num_steps=1)
    for step in range(100):
        bias.update(step_of({2 * step: 10, 2 * step + 1: 20}), {})
    assert len(bias._lengths) <= 12
