"""What sketches of hidden states say of their difference."""

import numpy as np
import torch

from mrl.core.types import TokenBlock
from mrl.workers.parity_trace import sketch
from mrl.workers.trace_comparison import PROJECTIONS, ActivationSketch, compare_sketches, merge_sketches, row_and_position


def of(hidden: torch.Tensor, place: int = 3, tokens=None) -> ActivationSketch:
    where = np.arange(len(hidden)) if tokens is None else np.asarray(tokens)
    return ActivationSketch(place, where, sketch(hidden).numpy())


def states(tokens: int = 2000, size: int = 64) -> torch.Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(1)) * 3


def test_a_sketch_tells_how_far_two_states_are_apart():
    """The root mean square of K products is the length of the difference, give or take a third or so."""
    hidden, noise = states(), torch.randn(2000, 64, generator=torch.Generator().manual_seed(2))
    exact = (0.01 * noise).norm(dim=1) / hidden.norm(dim=1)
    before, after = sketch(hidden)[:, 1:], sketch(hidden + 0.01 * noise)[:, 1:]
    seen = (after - before).square().mean(dim=1).sqrt() / hidden.norm(dim=1)
    ratios = seen / exact
    assert 0.95 < ratios.square().mean().sqrt() < 1.05 and ratios.std() < 0.4
    assert sketch(hidden).shape == (2000, 1 + PROJECTIONS)


def test_equal_states_in_another_order_are_equal():
    hidden, order = states(50), np.random.default_rng(0).permutation(50)
    (found,) = compare_sketches([of(hidden)], [of(hidden[order], tokens=order)], 1e-5)
    assert found.largest == 0 and found.compared == 50 and found.within and found.finite


def test_the_token_that_differs_most_is_named():
    hidden, other = states(50), states(50)
    other[17] *= 1.01
    (found,) = compare_sketches([of(hidden)], [of(other)], 1e-5)
    assert found.token == 17 and not found.within and 0.003 < found.largest < 0.03


def test_only_tokens_of_both_sides_are_compared_and_none_is_a_difference():
    hidden = states(6)
    (found,) = compare_sketches([of(hidden)], [of(hidden[2:4], tokens=[2, 3])], 1e-5)
    assert found.compared == 2 and found.within
    (found,) = compare_sketches([of(hidden)], [of(hidden, tokens=range(6, 12))], 1e-5)
    assert found.compared == 0 and not found.within


def test_a_place_that_one_side_lacks_is_a_difference():
    hidden = states(4)
    found = compare_sketches([of(hidden, 1), of(hidden, 2)], [of(hidden, 2), of(hidden, 3)], 1e-5)
    assert [(f.name, f.within) for f in found] == [("layer 0", False), ("layer 1", True), ("layer 2", False)]


def test_the_first_token_that_is_not_finite_is_found_on_either_side():
    hidden, other = states(9), states(9)
    other[[7, 4], 0] = float("nan")
    (found,) = compare_sketches([of(hidden)], [of(other)], 1e-5)
    assert (found.broken, found.reference_nonfinite, found.finite) == (4, -1, False)
    (found,) = compare_sketches([of(other)], [of(hidden)], 1e-5)
    assert (found.broken, found.reference_nonfinite, found.finite) == (-1, 4, False)


def test_parts_of_all_ranks_are_joined_in_the_order_of_the_model():
    hidden = states(4)
    found = merge_sketches([of(hidden[2:], 2, [2, 3]), of(hidden, 10**6), of(hidden[:2], 2, [0, 1]), of(hidden, 0)])
    assert [s.name for s in found] == ["embedding", "layer 1", "final norm"]
    (difference,) = compare_sketches([of(hidden, 2)], found[1:2], 1e-5)
    assert difference.compared == 4 and difference.within


def test_a_token_is_found_in_its_row():
    block = TokenBlock.from_lists([[1, 2], [3]], [[4], [5, 6]])
    assert [row_and_position(block, token) for token in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
