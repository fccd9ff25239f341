"""The rollout simulator agrees with schedules worked out by hand, with sums of phases, and with the lower bound."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mrl.planner.engine_time import EngineSpeeds
from mrl.planner.rollout_simulator import GroupLengths, RolloutSetup, RunSpeeds, best_possible_s, simulate


def groups_of(*lengths, prompt_tokens=0):
    """Return one group for each argument: a number is the length of its only response, a list has several lengths."""
    table = np.array([[tokens] if np.isscalar(tokens) else tokens for tokens in lengths])
    return GroupLengths(table, np.full(len(table), prompt_tokens))


def speeds_of(train_s=3.0, push_s=0.5, max_running=4, **engine):
    return RunSpeeds(
        EngineSpeeds(**{**dict(fixed_step_s=1.0, request_s=0.0, prefill_s=0.0), **engine}, max_running=max_running),
        train_s,
        0.0,
        push_s,
    )


def test_synchronous_steps_are_the_sums_of_their_phases():
    prediction = simulate(groups_of(4, 9, 2, 5, 1, 7), speeds_of(), RolloutSetup(2, 2, staleness=0), 3)
    assert prediction.step_s.tolist() == pytest.approx([9 + 3.5, 5 + 3.5, 7 + 3.5])
    assert prediction.tokens.tolist() == [13, 7, 8] and prediction.ages == {0: 6} and prediction.selection_ratio == 1
    assert prediction.engine_idle_fraction == pytest.approx(1 - 28 / (2 * 31.5))


def test_one_step_off_samples_a_step_while_the_previous_one_is_trained():
    """There is one engine. The four groups of the first two steps start together, and need 4, 9, 2 and 5 s."""
    prediction = simulate(groups_of(4, 9, 2, 5, 1, 7), speeds_of(), RolloutSetup(2, 1, staleness=1), 3)
    # Step 0 waits for two groups: groups 2 and 0 finish at 2 and 4 s. Step 0 trains until 7 and pushes until 7.5. Then groups 4
    # and 5 (1 and 7 tokens) start, and group 1 has 2 of its 9 tokens left. Step 1 must train groups 1 and 3. The last of them,
    # group 1, finishes at 9.5. Step 1 trains until 12.5 and pushes until 13. Step 2 trains groups 4 and 5. Group 4 has finished
    # at 8.5. Group 5 has 5 of its 7 tokens at 12.5, decodes 2 more after 13, and finishes at 15.
    assert prediction.step_s.tolist() == pytest.approx([7.5, 13 - 7.5, 15 + 3.5 - 13])
    assert prediction.ages == {0: 2, 1: 4}


def test_in_order_short_groups_wait_for_long_ones():
    as_finished, in_order = (
        simulate(groups_of(9, 1, 1, 1), speeds_of(), RolloutSetup(1, 1, staleness=3, in_order=ordered), 2).step_s
        for ordered in (False, True)
    )
    assert as_finished.tolist() == pytest.approx([1 + 3.5, 3.5]) and in_order.tolist() == pytest.approx([9 + 3.5, 3.5])


def test_over_sampling_drops_the_longest_groups():
    prediction = simulate(
        groups_of(50, 3, 2, 50, 4, 6), speeds_of(), RolloutSetup(2, 1, staleness=0, extra_groups=1), 2
    )
    assert prediction.step_s.tolist() == pytest.approx([3 + 3.5, 6 + 3.5])
    assert prediction.dropped == 2 and prediction.selection_ratio == pytest.approx((15 / 4) / (115 / 6))


def test_a_push_makes_running_requests_prefill_their_tokens_again():
    """Responses of 2 and 10 tokens run together. After the push, the prompt and the tokens of the second are prefilled again."""
    prediction = simulate(
        groups_of(2, 10, prompt_tokens=5), speeds_of(train_s=1.0, prefill_s=0.1), RolloutSetup(1, 1, staleness=1), 2
    )
    first = 2 * 0.5 + 2 + 1.0 + 0.5  # both prompts, 2 tokens, training, push
    again = (5 + 3) * 0.1 + 0.5  # the second response has 3 tokens by then; the next prompt comes later
    assert prediction.step_s.tolist() == pytest.approx([first, again + 7 + 1.5])


@pytest.mark.parametrize(
    ("groups", "setup"),
    [
        ([[5], [8]], RolloutSetup(1, 2, staleness=2)),
        ([[6, 3], [7, 4], [10, 11]], RolloutSetup(1, 2, staleness=1, extra_groups=1)),
    ],
    ids=["as groups are admitted", "as groups are dropped"],
)
def test_a_response_that_finishes_by_rounding_at_the_present_moment_is_not_lost(groups, setup):
    """Times are not exact in binary, so a response may finish at the moment at which groups are admitted or dropped."""
    lengths = GroupLengths(
        np.array(groups), np.array([[0, 4, 0], [3, 1, 4]][setup.extra_groups][: len(groups)]), seed=522
    )
    speeds = speeds_of(train_s=0.3, push_s=0.1, fixed_step_s=0.1)
    if setup.extra_groups:
        lengths = replace(lengths, seed=2238)
        speeds = speeds_of(train_s=0.7, push_s=0.5, fixed_step_s=0.1, max_running=2)
    prediction = simulate(lengths, speeds, setup, 12)
    assert prediction.tokens.min() > 0 and len(prediction.step_s) == 12


def test_colocated_engines_do_not_sample_during_training():
    disaggregated, shared = (
        simulate(groups_of(4, 9, 2, 5), speeds_of(), RolloutSetup(1, 1, staleness=1, colocated=colocated), 2).step_s
        for colocated in (False, True)
    )
    assert disaggregated.tolist() == pytest.approx([4 + 3.5, 2 + 3.5])  # group 1 has 7 of 9 tokens after training
    assert shared.tolist() == pytest.approx([4 + 3.5, 5 + 3.5])


def test_training_time_is_linear_in_tokens_and_scales_with_the_trainers():
    speeds = RunSpeeds(EngineSpeeds(1.0, 0.0, 0.0, 8), train_s=2.0, train_token_s=0.25, push_s=0.0)
    for scale in (1.0, 0.5):
        prediction = simulate(groups_of([4, 8], prompt_tokens=10), speeds, RolloutSetup(1, 1, 0, train_scale=scale), 1)
        assert prediction.seconds() == pytest.approx(8 + 2 + scale * 0.25 * (12 + 2 * 10))


def test_after_the_recorded_groups_whole_groups_are_drawn_at_random_and_reproducibly():
    one, two = (GroupLengths(np.array([[1, 2], [30, 40]]), np.array([5, 6])) for _ in range(2))
    drawn = [one.tokens_of(number) for number in range(200)]
    assert drawn[:2] == [(5, [1, 2]), (6, [30, 40])] and set(map(str, drawn)) == set(map(str, drawn[:2]))
    assert [two.tokens_of(number) for number in range(200)] == drawn


LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=2), min_size=1, max_size=30)
SPEEDS = st.builds(
    speeds_of,
    st.floats(0, 20),
    st.floats(0, 3),
    st.integers(1, 6),
    request_s=st.floats(0, 1),
    prefill_s=st.floats(0, 0.1),
)
SETUPS = st.builds(
    RolloutSetup,
    st.integers(1, 4),
    st.integers(1, 3),
    staleness=st.integers(0, 4),
    in_order=st.booleans(),
    colocated=st.booleans(),
)


@given(LENGTHS, SPEEDS, SETUPS, st.integers(0, 3), st.integers(1, 8))
def test_no_run_is_faster_than_the_bound_and_no_group_is_too_old(lengths, speeds, setup, extra_groups, steps):
    setup = RolloutSetup(**{**vars(setup), "extra_groups": 0 if setup.in_order else extra_groups})
    prediction = simulate(groups_of(*lengths, prompt_tokens=3), speeds, setup, steps)
    assert prediction.seconds() >= prediction.best_possible_s * (1 - 1e-9)
    assert sum(prediction.ages.values()) == steps * setup.prompts_per_step and max(prediction.ages) <= setup.staleness
    assert 0 <= prediction.engine_idle_fraction < 1 and 0 < prediction.occupancy <= 1 + 1e-9
    assert prediction.dropped == 0 or setup.extra_groups


@given(LENGTHS, SPEEDS, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_synchronous_step_is_the_sum_of_rollout_training_and_push(lengths, speeds, size, engines, in_order):
    groups = groups_of(*lengths)
    run = simulate(groups, speeds, RolloutSetup(size, engines, 0, in_order), 4)
    no_training = RunSpeeds(speeds.engine, 0.0, 0.0, 0.0)
    rollout = simulate(groups_of(*lengths), no_training, RolloutSetup(size, engines, 0, in_order), 4)
    assert run.step_s == pytest.approx(rollout.step_s + speeds.train_s + speeds.push_s)


@given(LENGTHS, SPEEDS, st.integers(1, 4), st.integers(1, 3))
def test_sharing_gpus_never_lowers_the_bound(lengths, speeds, size, engines):
    tokens = float(np.mean(lengths)) * 2 * size
    colocated, disaggregated = (
        best_possible_s(tokens, 5.0, speeds, RolloutSetup(size, engines, 1, colocated=c)) for c in (True, False)
    )
    assert colocated >= disaggregated
