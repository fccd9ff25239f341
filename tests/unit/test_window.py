"""Admission and choice of groups: bounds on staleness and memory, who is preferred, and that nobody waits for ever."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mrl.rollout.window import Ticket, Window


def run(window, steps, durations, keep=lambda number: True):
    """A run in which the ticket with this number takes `durations[number]` events; (chosen, age bound, most held) by step."""
    chosen, born, clock, due, most = [], {}, 0, {}, 0
    for step in range(steps):
        while True:
            for ticket in window.admit([7] * window.room(), step):
                born[ticket.number] = step
                due[ticket.number] = clock + durations[ticket.number % len(durations)]
            most = max(most, len(window.waiting))
            found = window.choose(step)
            if found is not None:
                break
            assert window.open, "a step waits and nothing is in the making"
            first = min(window.open, key=lambda number: (due[number], number))
            clock = max(clock, due[first])
            window.finish(first, f"group {first}", keep(first))
        for number in found.dropped:
            due.pop(number)
        chosen.append(found)
    return chosen, born, most


DURATIONS = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(DURATIONS, st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_every_group_is_trained_once_and_none_too_late(durations, size, staleness, in_order):
    chosen, born, most = run(Window(size, staleness, in_order=in_order), 12, durations)
    trained = [number for step in chosen for number in step.numbers]
    assert len(set(trained)) == len(trained) == 12 * size
    assert all(step - born[number] <= staleness for step, found in enumerate(chosen) for number in found.numbers)
    assert most <= (staleness + 1) * size and not any(step.dropped for step in chosen)
    if in_order:
        assert trained == list(range(12 * size))


@given(DURATIONS, st.integers(1, 5), st.booleans())
def test_without_staleness_a_step_trains_exactly_what_it_drew(durations, size, in_order):
    chosen, _, _ = run(Window(size, 0, in_order=in_order), 6, durations)
    assert [found.numbers for found in chosen] == [list(range(step * size, step * size + size)) for step in range(6)]


@given(DURATIONS, st.integers(1, 5), st.integers(0, 3), st.integers(1, 6))
def test_over_sampling_waits_for_nobody_and_drops_what_is_too_old(durations, size, staleness, extra):
    chosen, born, most = run(Window(size, staleness, extra=extra), 10, durations)
    assert all(len(found.numbers) == size for found in chosen)
    assert all(step - born[n] <= staleness for step, found in enumerate(chosen) for n in found.numbers)
    assert all(born[n] <= step - staleness for step, found in enumerate(chosen) for n in found.dropped)
    assert most <= (staleness + 1) * size + extra


@given(DURATIONS, st.integers(1, 4), st.integers(0, 2), st.lists(st.booleans(), min_size=2, max_size=30), st.booleans())
def test_refused_groups_are_replaced_up_to_a_limit(durations, size, staleness, verdicts, in_order):
    window = Window(size, staleness, in_order=in_order, refusals=2 * size)
    chosen, born, _ = run(window, 6, durations, keep=lambda number: verdicts[number % len(verdicts)])
    for step, found in enumerate(chosen):
        assert all(step - born[number] <= staleness for number in found.numbers)
        assert all(verdicts[number % len(verdicts)] for number in found.numbers)
        assert not any(verdicts[number % len(verdicts)] for number in found.refused_numbers)
        assert len(found.numbers) == size or len(found.refused) >= 2 * size


@given(DURATIONS, st.integers(1, 4), st.lists(st.booleans(), min_size=2, max_size=30))
def test_which_prompts_a_synchronous_step_draws_does_not_depend_on_speed(durations, size, verdicts):
    def numbers(times):
        window = Window(size, 0, refusals=8 * size)
        chosen, _, _ = run(window, 5, times, keep=lambda number: verdicts[number % len(verdicts)])
        return [(found.numbers, sorted(found.refused_numbers)) for found in chosen]

    assert numbers(durations) == numbers([0])


def test_the_quick_are_preferred_unless_in_order():
    quick = run(Window(1, 3), 3, [9, 1, 2, 3])[0]
    fair = run(Window(1, 3, in_order=True), 3, [9, 1, 2, 3])[0]
    assert [found.numbers for found in quick] == [[1], [2], [3]]
    assert [found.numbers for found in fair] == [[0], [1], [2]]


def test_a_window_goes_on_from_its_waiting_tickets():
    window = Window(2, 1)
    window.admit([5, 6, 7, 8], 0)
    window.finish(2, "c", True)
    window.finish(0, "a", True)
    assert [ticket.number for ticket in window.waiting] == [0, 1, 2, 3]
    again = Window(2, 1)
    again.restore(window.drawn, window.waiting, 0)
    assert again.waiting == window.waiting and again.room() == 0
    again.take([0, 1])
    assert again.room() == 2 and again.admit([9], 1) == [Ticket(4, 9, 1)]
    with pytest.raises(AssertionError, match="room for 1"):
        again.admit([1, 2], 1)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.booleans(), DURATIONS)
def test_a_window_that_holds_less_takes_up_what_was_drawn(size, before, staleness, step, in_order, durations):
    """A run goes on with another staleness: nothing is lost, and nothing is asked for too early."""
    wide, narrow = Window(size, before), Window(size, staleness, in_order=in_order)
    run(wide, step, durations)
    waiting = wide.waiting
    narrow.restore(wide.drawn, waiting, step)
    trained: list[int] = []
    for now in range(step, step + before + 2):
        narrow.admit([7] * narrow.room(), now)
        for number, ticket in list(narrow.open.items()):
            if ticket.born <= now:
                narrow.finish(number, "", True)
        found = narrow.choose(now)
        assert found and len(found.numbers) == size
        trained += found.numbers
    assert {ticket.number for ticket in waiting} <= set(trained) and len(set(trained)) == len(trained)
