"""StalenessBuffer: bounds on staleness and memory, the groups that a step prefers, and that no step waits for ever."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mrl.rollout.staleness_buffer import (
    MAX_RESPONSES_PER_REQUEST,
    PromptRequest,
    StalenessBuffer,
    longest_first,
    split_over_engines,
)


def run(buffer, steps, durations, keep=lambda number: True):
    """Simulate a run in which request `number` takes `durations[number]` time units.

    Returns the groups of each step, the lowest weight version of each request, and the largest number of waiting requests.
    """
    taken, versions, clock, due, largest = [], {}, 0, {}, 0
    for step in range(steps):
        while True:
            for request in buffer.admit([7] * buffer.free_capacity(), step):
                versions[request.serial_number] = step
                due[request.serial_number] = clock + durations[request.serial_number % len(durations)]
            largest = max(largest, len(buffer.untrained_requests))
            groups = buffer.take_step(step)
            if groups is not None:
                break
            assert buffer.in_flight, "a step waits, but nothing is in flight"
            first = min(buffer.in_flight, key=lambda number: (due[number], number))
            clock = max(clock, due[first])
            buffer.finish(first, f"group {first}", keep(first))
        for number in groups.dropped:
            due.pop(number)
        taken.append(groups)
    return taken, versions, largest


DURATIONS = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(DURATIONS, st.integers(1, 5), st.integers(0, 4), st.booleans())
def test_every_group_is_trained_once_and_none_is_too_old(durations, size, staleness, in_order):
    taken, versions, largest = run(StalenessBuffer(size, staleness, in_order=in_order), 12, durations)
    trained = [number for groups in taken for number in groups.numbers]
    assert len(set(trained)) == len(trained) == 12 * size
    assert all(step - versions[number] <= staleness for step, groups in enumerate(taken) for number in groups.numbers)
    assert largest <= (staleness + 1) * size and not any(groups.dropped for groups in taken)
    if in_order:
        assert trained == list(range(12 * size))


@given(DURATIONS, st.integers(1, 5), st.booleans())
def test_without_staleness_a_step_trains_exactly_the_prompts_that_it_drew(durations, size, in_order):
    taken, _, _ = run(StalenessBuffer(size, 0, in_order=in_order), 6, durations)
    assert [groups.numbers for groups in taken] == [list(range(step * size, step * size + size)) for step in range(6)]


@given(DURATIONS, st.integers(1, 5), st.integers(0, 3), st.integers(1, 6))
def test_over_sampling_drops_only_groups_that_are_too_old(durations, size, staleness, extra):
    taken, versions, largest = run(StalenessBuffer(size, staleness, extra_groups=extra), 10, durations)
    assert all(len(groups.numbers) == size for groups in taken)
    assert all(step - versions[n] <= staleness for step, groups in enumerate(taken) for n in groups.numbers)
    assert all(versions[n] <= step - staleness for step, groups in enumerate(taken) for n in groups.dropped)
    assert largest <= (staleness + 1) * size + extra


@given(DURATIONS, st.integers(1, 4), st.integers(0, 2), st.lists(st.booleans(), min_size=2, max_size=30), st.booleans())
def test_filtered_groups_are_replaced_up_to_a_limit(durations, size, staleness, kept, in_order):
    buffer = StalenessBuffer(size, staleness, in_order=in_order, max_replaced_groups=2 * size)
    taken, versions, _ = run(buffer, 6, durations, keep=lambda number: kept[number % len(kept)])
    for step, groups in enumerate(taken):
        assert all(step - versions[number] <= staleness for number in groups.numbers)
        assert all(kept[number % len(kept)] for number in groups.numbers)
        assert not any(kept[number % len(kept)] for number in groups.filtered_numbers)
        assert len(groups.numbers) == size or len(groups.filtered) >= 2 * size


@given(DURATIONS, st.integers(1, 4), st.lists(st.booleans(), min_size=2, max_size=30))
def test_the_prompts_of_a_synchronous_step_do_not_depend_on_speed(durations, size, kept):
    def numbers(times):
        buffer = StalenessBuffer(size, 0, max_replaced_groups=8 * size)
        taken, _, _ = run(buffer, 5, times, keep=lambda number: kept[number % len(kept)])
        return [(groups.numbers, sorted(groups.filtered_numbers)) for groups in taken]

    assert numbers(durations) == numbers([0])


def test_fast_groups_are_preferred_unless_steps_train_in_order():
    fast_first = run(StalenessBuffer(1, 3), 3, [9, 1, 2, 3])[0]
    in_order = run(StalenessBuffer(1, 3, in_order=True), 3, [9, 1, 2, 3])[0]
    assert [groups.numbers for groups in fast_first] == [[1], [2], [3]]
    assert [groups.numbers for groups in in_order] == [[0], [1], [2]]


def test_a_step_waits_for_an_older_group_if_later_steps_could_not_take_all_of_them_in_time():
    """N = 1 and K = 3. Request 0 may train until step 6, requests 1 and 2 until step 7: step 5 must take one of them."""
    buffer = StalenessBuffer(1, 3)
    versions = [3, 4, 4, 5]
    buffer.restore(4, [PromptRequest(number, 7, version) for number, version in enumerate(versions)], 5)
    assert [request.min_weight_version for request in buffer.untrained_requests] == versions
    buffer.finish(3, "group 3", True)
    assert buffer.take_step(5) is None
    buffer.finish(2, "group 2", True)
    assert buffer.take_step(5).numbers == [2]


def test_a_buffer_is_restored_from_its_waiting_requests():
    buffer = StalenessBuffer(2, 1)
    buffer.admit([5, 6, 7, 8], 0)
    buffer.finish(2, "c", True)
    buffer.finish(0, "a", True)
    assert [request.serial_number for request in buffer.untrained_requests] == [0, 1, 2, 3]
    restored = StalenessBuffer(2, 1)
    restored.restore(buffer.num_drawn, buffer.untrained_requests, 0)
    assert restored.untrained_requests == buffer.untrained_requests and restored.free_capacity() == 0
    restored.remove([0, 1])
    assert restored.free_capacity() == 2 and restored.admit([9], 1) == [PromptRequest(4, 9, 1)]
    with pytest.raises(AssertionError, match="room for 1"):
        restored.admit([1, 2], 1)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.booleans(), DURATIONS)
def test_a_smaller_buffer_takes_over_all_waiting_requests(size, before, staleness, step, in_order, durations):
    """This happens when a run is resumed with another staleness. No request is lost, and none is sent too early."""
    large, small = StalenessBuffer(size, before), StalenessBuffer(size, staleness, in_order=in_order)
    run(large, step, durations)
    waiting = large.untrained_requests
    small.restore(large.num_drawn, waiting, step)
    trained: list[int] = []
    for now in range(step, step + before + 2):
        small.admit([7] * small.free_capacity(), now)
        for number, request in list(small.in_flight.items()):
            if request.min_weight_version <= now:
                small.finish(number, "", True)
        groups = small.take_step(now)
        assert groups and len(groups.numbers) == size
        trained += groups.numbers
    assert {request.serial_number for request in waiting} <= set(trained) and len(set(trained)) == len(trained)


def test_requests_are_split_evenly_over_engines_and_into_http_requests_of_limited_size():
    requests = list(range(11))
    found = split_over_engines(requests, num_engines=2, responses_per_prompt=MAX_RESPONSES_PER_REQUEST // 2)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert split_over_engines(requests, 3, 1) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert split_over_engines(requests[:2], 1, 10 * MAX_RESPONSES_PER_REQUEST) == [[0], [1]], "at least one in each"


def test_requests_with_long_responses_are_first_and_equal_ones_keep_their_order():
    lengths = {"a": 3.0, "b": 9.0, "c": 0.0, "d": 9.0, "e": 5.0}
    assert longest_first(list(lengths), lengths.__getitem__) == ["b", "d", "e", "a", "c"]
