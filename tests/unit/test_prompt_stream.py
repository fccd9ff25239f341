"""The order of prompts: sources get shares by their weights, epochs are complete, and positions resume exactly."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.prompts import MixtureSource, PromptStream

SHARES = st.lists(
    st.builds(MixtureSource, st.text("abc", max_size=2), st.integers(1, 40), st.floats(0.05, 20)),
    min_size=1,
    max_size=5,
)


def stream(shares, batch_size=7, seed=0, shuffle=True, fingerprint="rows"):
    return PromptStream(sum(s.rows for s in shares), batch_size, seed, shuffle, shares, fingerprint)


def draw(prompts, batches):
    return np.concatenate([next(prompts) for _ in range(batches)]) if batches else np.empty(0, np.int64)


def source_of(shares, rows):
    return np.searchsorted(np.cumsum([s.rows for s in shares]), rows, side="right")


@settings(max_examples=60)
@given(SHARES, st.integers(1, 30), st.integers(0, 9), st.integers(0, 20), st.integers(1, 20), st.booleans())
def test_a_stream_restored_at_any_position_continues_identically(shares, batch_size, seed, before, after, shuffle):
    whole = draw(stream(shares, batch_size, seed, shuffle), before + after)
    first = stream(shares, batch_size, seed, shuffle)
    draw(first, before)
    state = json.loads(json.dumps(first.state_dict()))  # as a checkpoint stores it
    second = stream(shares, batch_size, seed, shuffle)
    draw(second, 3)  # move it to another position
    second.load_state_dict(state)
    np.testing.assert_array_equal(draw(second, after), whole[before * batch_size :])


@settings(max_examples=60)
@given(SHARES, st.integers(1, 30), st.integers(0, 9))
def test_sources_are_drawn_in_proportion_to_their_weights_at_every_moment(shares, batch_size, seed):
    whose = source_of(shares, draw(stream(shares, batch_size, seed), 40))
    weights = np.array([s.weight for s in shares]) / sum(s.weight for s in shares)
    counts = np.cumsum(whose[:, None] == np.arange(len(shares)), axis=0)
    ahead = counts - np.arange(1, len(whose) + 1)[:, None] * weights
    assert ahead.max() < 1 and ahead.min() > -(len(shares) - 1) - 1e-9


@settings(max_examples=60)
@given(SHARES, st.integers(1, 30), st.booleans())
def test_no_row_repeats_within_an_epoch_of_its_source(shares, batch_size, shuffle):
    rows = draw(stream(shares, batch_size, 1, shuffle), 30)
    whose, first = source_of(shares, rows), 0
    for source, share in enumerate(shares):
        of_source = rows[whose == source]
        for start in range(0, len(of_source), share.rows):
            epoch = of_source[start : start + share.rows]
            assert len(set(epoch.tolist())) == len(epoch)
            assert epoch.min() >= first and epoch.max() < first + share.rows
        first += share.rows


def test_each_epoch_of_a_source_has_its_own_order():
    shares = [MixtureSource("a", 50), MixtureSource("b", 50)]
    rows = draw(stream(shares, batch_size=100), 2)
    epochs = [rows[source_of(shares, rows) == source][start : start + 50] for source in (0, 1) for start in (0, 50)]
    orders = [tuple(epoch % 50) for epoch in epochs]
    assert len(set(orders)) == 4 and all(sorted(order) == list(range(50)) for order in orders)


def test_weights_of_two_to_one_give_two_thirds_and_one_third_of_a_batch():
    shares = [MixtureSource("a", 1000, 2.0), MixtureSource("b", 30, 1.0)]
    prompts = stream(shares, batch_size=9)
    for _ in range(50):
        assert np.bincount(source_of(shares, next(prompts))).tolist() == [6, 3]


def test_one_source_is_streamed_as_if_there_were_no_mixture():
    alone, mixed = PromptStream(20, 6, seed=4, shuffle=True), stream([MixtureSource("only", 20, 3.0)], 6, seed=4)
    np.testing.assert_array_equal(draw(alone, 9), draw(mixed, 9))


def test_a_restored_stream_may_have_another_batch_size():
    shares = [MixtureSource("a", 13, 1.0), MixtureSource("b", 5, 0.7)]
    whole, first, second = (stream(shares, size, seed=2) for size in (1, 4, 10))
    draw(first, 5)
    second.load_state_dict(first.state_dict())
    np.testing.assert_array_equal(draw(second, 2), draw(whole, 40)[20:])


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("seed", lambda shares: stream(shares, seed=1)),
        ("shuffle", lambda shares: stream(shares, shuffle=False)),
        ("data", lambda shares: stream(shares, fingerprint="others")),
        ("weights", lambda shares: stream([shares[0], MixtureSource("b", 5, 2.0)])),
        ("rows", lambda shares: stream([shares[0], MixtureSource("b", 6)])),
        ("sources", lambda shares: stream([shares[0], MixtureSource("c", 5)])),
    ],
)
def test_the_position_in_another_stream_is_refused(what, other):
    shares = [MixtureSource("a", 9), MixtureSource("b", 5)]
    prompts = stream(shares)
    with pytest.raises(ValueError, match=f"does not fit this run: {what} was .*, and is now .*start a new run"):
        prompts.load_state_dict(other(shares).state_dict())
    assert prompts.drawn == [0, 0]


def test_a_damaged_position_is_refused():
    prompts = stream([MixtureSource("a", 9), MixtureSource("b", 5)])
    with pytest.raises(ValueError, match=r"is \[3\]; expected 2 numbers, one for each source"):
        prompts.load_state_dict(prompts.state_dict() | {"drawn": [3]})


def test_the_order_of_an_epoch_is_computed_once():
    prompts = stream([MixtureSource("a", 1000), MixtureSource("b", 3)], batch_size=4)
    next(prompts)
    order = prompts._table.order(0, 0, 0)
    draw(prompts, 100)
    assert prompts._table.order(0, 0, 0) is order and prompts.drawn == [202, 202]
