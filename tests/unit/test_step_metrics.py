"""Metrics of a step: rewards of all groups, and how much shorter trained responses are because steps prefer fast groups."""

import pytest
from sampled_groups import group

from mrl.core import metrics
from mrl.rewards.reward_types import Score
from mrl.rollout.response_metrics import MAX_SOURCES, LengthBias, SampledStep, UnscoredStepError, source_names
from mrl.rollout.staleness_buffer import ResponseLengths
from mrl.rollout.trajectory import Group, Sample, StepGroups, Trajectory

ALL, SOME, NONE = (Score(1.0), Score(1.0)), (Score(1.0), Score(0.0)), (Score(0.0), Score.failed("it hung"))


def test_metrics_cover_filtered_groups_as_well():
    step = SampledStep([group(1, *SOME), group(3, *SOME)], [group(0, *ALL), group(2, *NONE)], 2, 3.0, 2.0, 1.5)
    assert [one.row for one in step.trained_groups(8)] == [1, 3]
    numbers = step.metrics()
    assert numbers["reward/mean"] == 4 / 8 and numbers["reward/failed_fraction"] == 1 / 8
    assert numbers["rollout/kept_groups_fraction"] == 2 / 4 and numbers["rollout/rounds"] == 2
    spent = {name: value for name, value in numbers.items() if name.startswith("component_time/")}
    assert spent == {
        "component_time/engine_s": 3.0,
        "component_time/reward_s": 2.0,
        "component_time/reward_overlap_s": 1.5,
    }
    metrics.check(spent)


def test_each_data_source_has_metrics_of_its_own():
    first = (Score(1.0, parts={"form": 1.0}), Score(0.5, parts={"form": 0.0}))
    step = SampledStep([group(0, *first), group(1, *SOME)], [group(2, *NONE), group(3, *ALL)])
    numbers = step.metrics({0: "gsm8k", 1: "code", 2: "code"}.get)
    own = {name: value for name, value in numbers.items() if name.count("/") == 2}
    assert own == {
        "reward/gsm8k/mean": 0.75,
        "reward/gsm8k/form_mean": 0.5,
        "reward/gsm8k/failed_fraction": 0.0,
        "reward/code/mean": 0.25,
        "reward/code/failed_fraction": 0.25,
    }
    metrics.check(numbers)
    assert numbers["reward/mean"] == 4.5 / 8, "of all responses, also of sources without metrics of their own"


def test_names_of_data_sources_in_metrics_are_valid_and_distinct():
    assert source_names({"openai/gsm8k": 5}) == {}, "the metrics of all responses are those of the only source"
    found = source_names({"a/b": 1, "a-b": 3, "math 500": 2, "a_b": 2})
    assert found == {"a-b": "a_b", "a_b": "a_b_2", "math 500": "math_500", "a/b": "a_b_3"}
    many = source_names({f"s{number}": number for number in range(50)})
    assert list(many) == [f"s{number}" for number in range(49, 29, -1)] and len(many) == MAX_SOURCES == 20


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
        assert numbers == {"rollout/trained_length_ratio": 1.0}


def test_the_bias_of_fast_groups_shows_until_the_slow_ones_are_trained():
    bias = LengthBias(num_steps=1)
    assert bias.update(step_of({0: 10, 2: 10}), {1: group_of(100)}) == {
        "rollout/trained_length_ratio": pytest.approx(10 / 55)
    }, "compared with prompt requests 1 and 2"
    found = bias.update(step_of({1: 100, 3: 10}), {})
    assert found == {"rollout/trained_length_ratio": pytest.approx(55 / 10)}, "compared with prompt requests 2 and 3"


def test_the_comparison_ends_before_the_first_unfinished_group():
    bias = LengthBias(num_steps=1)
    assert bias.update(step_of({1: 10}), {2: group_of(30)}) != {}
    assert LengthBias().update(step_of({}), {}) == {}


def test_a_dropped_group_counts_as_the_longest_of_its_step():
    bias = LengthBias(num_steps=1)
    found = bias.update(step_of({0: 10, 2: 30}, dropped=[1, 3]), {})
    assert found == {"rollout/trained_length_ratio": pytest.approx(20 / 30)}


def test_lengths_of_old_requests_are_discarded():
    bias = LengthBias(num_steps=1)
    for step in range(100):
        bias.update(step_of({2 * step: 10, 2 * step + 1: 20}), {})
    assert len(bias._lengths) <= 12
