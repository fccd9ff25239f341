"""An engine's queue against what can be worked out by hand, and what holds whatever is asked of it."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mrl.planner.engine_queue import Decoding, EngineSpeeds, Request

STEPS = EngineSpeeds(step_s=1.0, request_s=0.0, prefill_s=0.0, max_running=2)


def asked(queue, *lengths, prompt_tokens=1):
    requests = [Request(number, number, prompt_tokens, tokens) for number, tokens in enumerate(lengths)]
    for request in requests:
        queue.add(request)
    return requests


def finishes(queue, until=1e9):
    """(second, key) of everything that is done by `until`."""
    found = []
    while queue.next_finish() <= until:
        now = queue.next_finish()
        found += [(pytest.approx(now), request.key) for request in queue.advance(now)]
    return found


def test_requests_run_side_by_side_and_others_wait_in_order():
    queue = Decoding(STEPS)
    asked(queue, 5, 2, 4)
    assert finishes(queue) == [(2, 1), (5, 0), (6, 2)]
    assert queue.busy_s == 6 and queue.request_seconds == 5 + 2 + 4


def test_steps_take_longer_the_more_requests_run():
    queue = Decoding(EngineSpeeds(1.0, 0.5, 0.0, 4))
    asked(queue, 2, 4)
    assert finishes(queue) == [(2 * 2.0, 0), (2 * 2.0 + 2 * 1.5, 1)]


def test_prefill_stops_decoding_and_a_shared_prompt_is_computed_once():
    queue = Decoding(EngineSpeeds(1.0, 0.0, 0.1, 4))
    queue.add(Request("a", "prompt", 50, 3))
    queue.advance(5.0 + 2)  # two tokens
    queue.add(Request("b", "prompt", 50, 2))
    assert finishes(queue) == [(7 + 0.1 + 1, "a"), (7 + 0.1 + 2, "b")]
    assert queue.prefilled_tokens == 51


def test_what_is_retracted_keeps_its_tokens_computes_them_again_and_goes_behind_those_that_wait():
    queue = Decoding(EngineSpeeds(1.0, 0.0, 0.25, 1))
    first, second = asked(queue, 10, 1)
    queue.advance(0.25 + 4)
    queue.pause("retract")
    assert queue.next_finish() == float("inf") and not queue.advance(100)
    assert first.decoded == 4 and [request.key for request in queue.waiting] == [1, 0]
    queue.flush()
    queue.resume()
    assert finishes(queue) == [(100 + 0.25 + 1, 1), (101.25 + (1 + 4) * 0.25 + 6, 0)]
    assert second.cached_tokens == 0


def test_what_is_paused_in_place_goes_on_where_it_was():
    queue = Decoding(EngineSpeeds(1.0, 0.0, 1.0, 2))
    asked(queue, 3)
    queue.advance(0.5)  # half of its prefill
    queue.pause("in_place")
    queue.advance(10)
    queue.resume()
    assert finishes(queue) == [(10 + 0.5 + 3, 0)]


def test_what_is_aborted_leaves_its_place_to_others():
    queue = Decoding(STEPS)
    requests = asked(queue, 9, 9, 2, 9)
    queue.advance(3)
    assert queue.abort(lambda request: request.key in (0, 3)) == [requests[0], requests[3]]
    assert requests[0].decoded == 3 and requests[3].decoded == 0
    assert finishes(queue) == [(5, 2), (9, 1)]
    asked(queue, 4)
    queue.advance(10)
    assert [request.decoded for request in queue.pause("abort")] == [1] and queue.pending == 0


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 5), st.lists(st.floats(0.0, 40), max_size=5), st.sampled_from(["retract", "in_place"]))
def test_every_request_is_finished_with_all_its_tokens_whatever_pauses_there_are(lengths, limit, pauses, mode):
    queue = Decoding(EngineSpeeds(0.1, 0.01, 0.001, limit))
    requests = asked(queue, *lengths)
    done = []
    for now in sorted(pauses):
        done += queue.advance(now)
        queue.pause(mode)
        assert all(queue.decoded(request) <= request.response_tokens for request in requests)
        done += queue.advance(now + 0.5)
        queue.resume()
    done += queue.advance(1e6)
    assert sorted(request.key for request in done) == list(range(len(lengths)))
    assert [request.decoded for request in requests] == lengths


@given(LENGTHS, st.integers(1, 5), st.lists(st.floats(0.0, 40), max_size=8))
def test_looking_at_a_queue_does_not_change_it(lengths, limit, looks):
    speeds = EngineSpeeds(0.1, 0.01, 0.001, limit)
    plain, watched = Decoding(speeds), Decoding(speeds)
    asked(plain, *lengths), asked(watched, *lengths)
    order = [request.key for now in [*sorted(looks), 1e6] for request in watched.advance(now)]
    assert sorted(order) == sorted(request.key for request in plain.advance(1e6))
    assert watched.busy_s == pytest.approx(plain.busy_s)
    assert watched.request_seconds == pytest.approx(plain.request_seconds)


@given(LENGTHS, st.integers(1, 5))
def test_an_engine_is_never_faster_than_full_batches(lengths, limit):
    speeds = EngineSpeeds(0.1, 0.01, 0.0, limit)
    queue = Decoding(speeds)
    asked(queue, *lengths)
    queue.advance(1e6)
    assert queue.busy_s >= sum(lengths) * speeds.token_s(limit) / limit - 1e-9
    assert queue.busy_s >= max(lengths) * speeds.token_s(1) - 1e-9
