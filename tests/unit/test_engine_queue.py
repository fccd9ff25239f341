"""The engine queue equals schedules worked out by hand, and obeys laws that hold for all requests."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mrl.config.process_schema import PauseMode
from mrl.planner.engine_time import EngineQueue, EngineSpeeds, SimulatedRequest

STEPS = EngineSpeeds(fixed_step_s=1.0, request_s=0.0, prefill_s=0.0, max_running=2)


def add_requests(queue, *lengths, prompt_tokens=1):
    requests = [SimulatedRequest(number, number, prompt_tokens, tokens) for number, tokens in enumerate(lengths)]
    for request in requests:
        queue.add(request)
    return requests


def finishes(queue, until=1e9):
    """Return [(second, key)] of the requests that finish up to the second `until`."""
    found = []
    while queue.next_finish() <= until:
        now = queue.next_finish()
        found += [(pytest.approx(now), request.key) for request in queue.advance(now)]
    return found


def test_requests_run_together_and_others_wait_in_order():
    queue = EngineQueue(STEPS)
    add_requests(queue, 5, 2, 4)
    assert finishes(queue) == [(2, 1), (5, 0), (6, 2)]
    assert queue.busy_s == 6 and queue.request_seconds == 5 + 2 + 4


def test_a_decoding_step_takes_longer_with_more_running_requests():
    queue = EngineQueue(EngineSpeeds(1.0, 0.5, 0.0, 4))
    add_requests(queue, 2, 4)
    assert finishes(queue) == [(2 * 2.0, 0), (2 * 2.0 + 2 * 1.5, 1)]


def test_prefill_stops_decoding_and_a_shared_prompt_is_prefilled_once():
    queue = EngineQueue(EngineSpeeds(1.0, 0.0, 0.1, 4))
    queue.add(SimulatedRequest("a", "prompt", 50, 3))
    queue.advance(5.0 + 2)  # the prefill, and two tokens
    queue.add(SimulatedRequest("b", "prompt", 50, 2))
    assert finishes(queue) == [(7 + 0.1 + 1, "a"), (7 + 0.1 + 2, "b")]
    assert queue.prefilled_tokens == 51


def test_a_retracted_request_keeps_its_tokens_prefills_them_again_and_goes_to_the_end_of_the_queue():
    queue = EngineQueue(EngineSpeeds(1.0, 0.0, 0.25, 1))
    first, second = add_requests(queue, 10, 1)
    queue.advance(0.25 + 4)
    queue.pause(PauseMode.retract)
    assert queue.next_finish() == float("inf") and not queue.advance(100)
    assert first.decoded == 4 and [request.key for request in queue.waiting] == [1, 0]
    queue.flush()
    queue.resume()
    assert finishes(queue) == [(100 + 0.25 + 1, 1), (101.25 + (1 + 4) * 0.25 + 6, 0)]
    assert second.cached_tokens == 0


def test_a_request_paused_in_place_continues_where_it_stopped():
    queue = EngineQueue(EngineSpeeds(1.0, 0.0, 1.0, 2))
    add_requests(queue, 3)
    queue.advance(0.5)  # half of the prefill of request 0
    queue.pause(PauseMode.in_place)
    queue.advance(10)
    queue.resume()
    assert finishes(queue) == [(10 + 0.5 + 3, 0)]


def test_an_aborted_request_makes_room_for_others():
    queue = EngineQueue(STEPS)
    requests = add_requests(queue, 9, 9, 2, 9)
    queue.advance(3)
    assert queue.abort(lambda request: request.key in (0, 3)) == [requests[0], requests[3]]
    assert requests[0].decoded == 3 and requests[3].decoded == 0
    assert finishes(queue) == [(5, 2), (9, 1)]
    add_requests(queue, 4)
    queue.advance(10)
    assert [request.decoded for request in queue.pause(PauseMode.abort)] == [1] and queue.pending == 0


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(
    LENGTHS,
    st.integers(1, 5),
    st.lists(st.floats(0.0, 40), max_size=5),
    st.sampled_from([PauseMode.retract, PauseMode.in_place]),
)
def test_pauses_do_not_change_which_tokens_are_decoded(lengths, limit, pauses, mode):
    queue = EngineQueue(EngineSpeeds(0.1, 0.01, 0.001, limit))
    requests = add_requests(queue, *lengths)
    finished = []
    for now in sorted(pauses):
        finished += queue.advance(now)
        queue.pause(mode)
        assert all(queue.decoded(request) <= request.response_tokens for request in requests)
        finished += queue.advance(now + 0.5)
        queue.resume()
    finished += queue.advance(1e6)
    assert sorted(request.key for request in finished) == list(range(len(lengths)))
    assert [request.decoded for request in requests] == lengths


@given(LENGTHS, st.integers(1, 5), st.lists(st.floats(0.0, 40), max_size=8))
def test_advancing_in_small_steps_gives_the_same_result(lengths, limit, times):
    speeds = EngineSpeeds(0.1, 0.01, 0.001, limit)
    one_step, many_steps = EngineQueue(speeds), EngineQueue(speeds)
    add_requests(one_step, *lengths), add_requests(many_steps, *lengths)
    order = [request.key for now in [*sorted(times), 1e6] for request in many_steps.advance(now)]
    assert sorted(order) == sorted(request.key for request in one_step.advance(1e6))
    assert many_steps.busy_s == pytest.approx(one_step.busy_s)
    assert many_steps.request_seconds == pytest.approx(one_step.request_seconds)


@given(LENGTHS, st.integers(1, 5))
def test_an_engine_is_never_faster_than_full_batches(lengths, limit):
    speeds = EngineSpeeds(0.1, 0.01, 0.0, limit)
    queue = EngineQueue(speeds)
    add_requests(queue, *lengths)
    queue.advance(1e6)
    assert queue.busy_s >= sum(lengths) * speeds.decoding_step_s(limit) / limit - 1e-9
    assert queue.busy_s >= max(lengths) * speeds.decoding_step_s(1) - 1e-9
