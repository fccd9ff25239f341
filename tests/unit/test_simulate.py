"""Simulated runs against what can be worked out by hand, against the phases they are made of, and against the bound."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from mrl.planner.engine_queue import EngineSpeeds
from mrl.planner.rollout_simulator import Groups, Setup, Speeds, best_possible_s, simulate


def groups_of(*lengths, prompt_tokens=0):
    """A group of one response for each number, or of several for each list."""
    table = np.array([[tokens] if np.isscalar(tokens) else tokens for tokens in lengths])
    return Groups(table, np.full(len(table), prompt_tokens))


def speeds_of(train_s=3.0, push_s=0.5, max_running=4, **engine):
    return Speeds(
        EngineSpeeds(**{**dict(step_s=1.0, request_s=0.0, prefill_s=0.0), **engine}, max_running=max_running),
        train_s,
        0.0,
        push_s,
    )


def test_synchronous_steps_are_the_sums_of_their_phases():
    found = simulate(groups_of(4, 9, 2, 5, 1, 7), speeds_of(), Setup(2, 2, staleness=0), 3)
    assert found.step_s.tolist() == pytest.approx([9 + 3.5, 5 + 3.5, 7 + 3.5])
    assert found.tokens.tolist() == [13, 7, 8] and found.ages == {0: 6} and found.selection_ratio == 1
    assert found.engine_idle_fraction == pytest.approx(1 - 28 / (2 * 31.5))


def test_one_step_off_samples_a_step_while_the_one_before_is_trained():
    """Two groups each; all four of the first two steps begin at once: 4, 9, 2 and 5 s, one engine."""
    found = simulate(groups_of(4, 9, 2, 5, 1, 7), speeds_of(), Setup(2, 1, staleness=1), 3)
    # Step 0 waits for two groups: tickets 2 and 0, finished at 2 and 4; trained until 7, pushed until 7.5. Then tickets 4 and 5
    # (1 and 7 tokens) join; ticket 1 has 2 of 9 left. Step 1 must have 1 and 3: at 9.5. Trained until 12.5, pushed until 13.
    # Then ticket 4 is done since 8.5, and 5 at 15 (5 of its 7 tokens by 12.5, 2 more from 13).
    assert found.step_s.tolist() == pytest.approx([7.5, 13 - 7.5, 15 + 3.5 - 13])
    assert found.ages == {0: 2, 1: 4}


def test_in_the_order_of_drawing_the_quick_wait_for_the_slow():
    quick, fair = (
        simulate(groups_of(9, 1, 1, 1), speeds_of(), Setup(1, 1, staleness=3, in_order=in_order), 2).step_s
        for in_order in (False, True)
    )
    assert quick.tolist() == pytest.approx([1 + 3.5, 3.5]) and fair.tolist() == pytest.approx([9 + 3.5, 3.5])


def test_over_sampling_drops_what_is_slow():
    found = simulate(groups_of(50, 3, 2, 50, 4, 6), speeds_of(), Setup(2, 1, staleness=0, extra=1), 2)
    assert found.step_s.tolist() == pytest.approx([3 + 3.5, 6 + 3.5])
    assert found.dropped == 2 and found.selection_ratio == pytest.approx((15 / 4) / (115 / 6))


def test_a_push_makes_running_requests_compute_their_tokens_again():
    """One response of 10 tokens beside one of 2: 4 of its tokens (and its prompt of 5) are computed again at 0.1 s each."""
    found = simulate(
        groups_of(2, 10, prompt_tokens=5), speeds_of(train_s=1.0, prefill_s=0.1), Setup(1, 1, staleness=1), 2
    )
    first = 2 * 0.5 + 2 + 1.0 + 0.5  # both prompts, 2 tokens, training, push
    again = (5 + 3) * 0.1 + 0.5  # 3 tokens by then; the new ticket's prompt joins behind it
    assert found.step_s.tolist() == pytest.approx([first, again + 7 + 1.5])


def test_colocated_engines_and_trainers_take_turns():
    apart, together = (
        simulate(groups_of(4, 9, 2, 5), speeds_of(), Setup(1, 1, staleness=1, colocated=colocated), 2).step_s
        for colocated in (False, True)
    )
    assert apart.tolist() == pytest.approx([4 + 3.5, 2 + 3.5])  # ticket 1 has 7 of 9 tokens after training
    assert together.tolist() == pytest.approx([4 + 3.5, 5 + 3.5])


def test_training_costs_what_its_tokens_cost_and_replicas_share_it():
    speeds = Speeds(EngineSpeeds(1.0, 0.0, 0.0, 8), train_s=2.0, train_token_s=0.25, push_s=0.0)
    for scale in (1.0, 0.5):
        found = simulate(groups_of([4, 8], prompt_tokens=10), speeds, Setup(1, 1, 0, train_scale=scale), 1)
        assert found.seconds() == pytest.approx(8 + 2 + scale * 0.25 * (12 + 2 * 10))


def test_beyond_the_trace_groups_are_drawn_again_whole_and_the_same_each_time():
    one, two = (Groups(np.array([[1, 2], [30, 40]]), np.array([5, 6])) for _ in range(2))
    drawn = [one.of(ticket) for ticket in range(200)]
    assert drawn[:2] == [(5, [1, 2]), (6, [30, 40])] and set(map(str, drawn)) == set(map(str, drawn[:2]))
    assert [two.of(ticket) for ticket in range(200)] == drawn


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
    Setup,
    st.integers(1, 4),
    st.integers(1, 3),
    staleness=st.integers(0, 4),
    in_order=st.booleans(),
    colocated=st.booleans(),
)


@given(LENGTHS, SPEEDS, SETUPS, st.integers(0, 3), st.integers(1, 8))
def test_nothing_beats_the_bound_and_no_group_is_too_old(lengths, speeds, setup, extra, steps):
    setup = Setup(**{**vars(setup), "extra": 0 if setup.in_order else extra})
    found = simulate(groups_of(*lengths, prompt_tokens=3), speeds, setup, steps)
    assert found.seconds() >= found.best_possible_s * (1 - 1e-9)
    assert sum(found.ages.values()) == steps * setup.prompts_per_step and max(found.ages) <= setup.staleness
    assert 0 <= found.engine_idle_fraction < 1 and 0 < found.occupancy <= 1
    assert found.dropped == 0 or setup.extra


@given(LENGTHS, SPEEDS, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_without_staleness_steps_are_rollout_then_training_then_push(lengths, speeds, size, engines, in_order):
    groups = groups_of(*lengths)
    whole = simulate(groups, speeds, Setup(size, engines, 0, in_order), 4)
    no_training = Speeds(speeds.engine, 0.0, 0.0, 0.0)
    rollout = simulate(groups_of(*lengths), no_training, Setup(size, engines, 0, in_order), 4)
    assert whole.step_s == pytest.approx(rollout.step_s + speeds.train_s + speeds.push_s)


@given(LENGTHS, SPEEDS, st.integers(1, 4), st.integers(1, 3))
def test_staleness_never_makes_the_bound_looser(lengths, speeds, size, engines):
    tokens = float(np.mean(lengths)) * 2 * size
    together, apart = (
        best_possible_s(tokens, 5.0, speeds, Setup(size, engines, 1, colocated=c)) for c in (True, False)
    )
    assert together >= apart
