"""Comparison of step traces and of activation sketches, without a model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mrl.commands import certify as command
from mrl.core.types import TokenBlock
from mrl.workers.parity_trace import sketch
from mrl.workers.trace_comparison import (
    NUM_PROJECTIONS,
    OUTPUTS,
    OUTPUTS_AFTER_STEP,
    TOLERANCES,
    ActivationSketch,
    StepTrace,
    TensorFile,
    compare_sketches,
    compare_traces,
    merge_sketches,
    row_and_position,
)

REFERENCE = StepTrace(
    loss=0.5,
    grad_norm=2.0,
    outputs={0: np.array([-1.0, -2.0]), 3: np.array([-0.5])},
    gradients={"a.0.w": np.array([[0.1, -0.4]]), "a.1.w": np.array([0.0, 0.2])},
    weights={"a.0.w": np.array([[1.0, 2.0]]), "a.1.w": np.array([3.0, 4.0])},
    updates={"a.0.w": np.array([[1e-4, 1e-4]]), "a.1.w": np.array([1e-4, -1e-4])},
    outputs_after_step={0: np.array([-1.1, -2.1]), 3: np.array([-0.6])},
)


def first_difference(other: StepTrace) -> str:
    wrong = [d.name for d in compare_traces(REFERENCE, other) if not d.within]
    return wrong[0] if wrong else ""


def test_equal_traces_do_not_differ():
    found = compare_traces(REFERENCE, REFERENCE)
    assert [d.name for d in found[:3]] == [OUTPUTS, "loss", "gradient norm"]
    assert len(found) == 10 and all(d.within and d.absolute == d.relative == 0 for d in found)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(outputs={0: np.array([-1.0, -2.0]), 3: np.array([-0.50003])}), OUTPUTS),
        (dict(outputs={0: np.array([-1.0, -2.0])}), OUTPUTS),
        (dict(outputs={0: np.array([-1.0, -2.0]), 4: np.array([-0.5])}), OUTPUTS),
        (dict(loss=0.50002), "loss"),
        (dict(grad_norm=float("nan")), "gradient norm"),
        (dict(gradients={"a.0.w": np.array([[0.1, -0.4]]), "a.1.w": np.array([2e-5, 0.2])}), "gradient a.1.w"),
        (dict(gradients={"a.0.w": np.array([[0.1, -0.4]])}), "gradient a.1.w"),
        (dict(gradients={**REFERENCE.gradients, "b.w": np.array([1.0])}), "gradient b.w"),
        (dict(weights={"a.0.w": np.array([[1.0, 2.0]]), "a.1.w": np.array([3.0])}), "weight a.1.w"),
        (dict(updates={"a.0.w": np.zeros((1, 2)), "a.1.w": np.array([1e-4, -1e-4])}), "update a.0.w"),
        (dict(outputs_after_step={0: np.array([-1.1, -2.1]), 3: np.array([-0.7])}), OUTPUTS_AFTER_STEP),
    ],
)
def test_the_first_difference_in_order_of_computation_is_named(change, name):
    assert first_difference(replace(REFERENCE, **change)) == name


def test_differences_within_the_tolerance_are_accepted():
    close = replace(REFERENCE, loss=0.500009, outputs={0: np.array([-1.0, -2.000009]), 3: np.array([-0.5])})
    assert first_difference(close) == ""
    other = replace(REFERENCE, loss=0.53)
    assert first_difference(other) == "loss"
    assert all(d.within for d in compare_traces(REFERENCE, other, TOLERANCES["bfloat16"]))


def test_stored_tensors_equal_the_originals(tmp_path):
    stored = REFERENCE.store(tmp_path)
    assert isinstance(stored.gradients, TensorFile) and set(stored.weights) == {"a.0.w", "a.1.w"}
    assert first_difference(stored) == "" and StepTrace().store(tmp_path) == StepTrace()


def test_stored_tensors_keep_the_order_of_the_layers(tmp_path):
    names = ["embedding.w", "layers.2.w", "layers.10.w", "a_norm.w"]
    stored = StepTrace(gradients={name: np.zeros(2) for name in names}).store(tmp_path)
    assert list(stored.gradients) == names
    other = StepTrace(gradients={"layers.2.w": np.zeros(2), "b.w": np.ones(2)}).store(tmp_path / "other")
    wrong = [d.name for d in compare_traces(stored, other) if not d.within]
    assert wrong == ["gradient embedding.w", "gradient layers.10.w", "gradient a_norm.w", "gradient b.w"]


def test_the_printed_table_has_a_row_for_each_kind_of_tensor(capsys):
    command.print_table(compare_traces(REFERENCE, replace(REFERENCE, grad_norm=3.0)), "tp2")
    lines = capsys.readouterr().out.splitlines()
    assert any("gradient a.*.w" in line and " 2 " in line and "equal" in line for line in lines)
    assert any("gradient norm" in line and "DIFFERS" in line for line in lines)


def sketch_of(hidden: torch.Tensor, depth: int = 3, tokens=None) -> ActivationSketch:
    indices = np.arange(len(hidden)) if tokens is None else np.asarray(tokens)
    return ActivationSketch(depth, indices, sketch(hidden).numpy())


def hidden_states(tokens: int = 2000, size: int = 64) -> torch.Tensor:
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(1)) * 3


def test_sketches_estimate_the_distance_of_two_states():
    """The root mean square of K products estimates the length of the difference. Its relative error is about a third."""
    hidden, noise = hidden_states(), torch.randn(2000, 64, generator=torch.Generator().manual_seed(2))
    exact = (0.01 * noise).norm(dim=1) / hidden.norm(dim=1)
    before, after = sketch(hidden)[:, 1:], sketch(hidden + 0.01 * noise)[:, 1:]
    estimate = (after - before).square().mean(dim=1).sqrt() / hidden.norm(dim=1)
    ratios = estimate / exact
    assert 0.95 < ratios.square().mean().sqrt() < 1.05 and ratios.std() < 0.4
    assert sketch(hidden).shape == (2000, 1 + NUM_PROJECTIONS)


def test_the_order_of_tokens_does_not_matter():
    hidden, order = hidden_states(50), np.random.default_rng(0).permutation(50)
    (found,) = compare_sketches([sketch_of(hidden)], [sketch_of(hidden[order], tokens=order)], 1e-5)
    assert found.largest == 0 and found.compared == 50 and found.within and found.finite


def test_the_token_with_the_largest_difference_is_named():
    hidden, other = hidden_states(50), hidden_states(50)
    other[17] *= 1.01
    (found,) = compare_sketches([sketch_of(hidden)], [sketch_of(other)], 1e-5)
    assert found.token == 17 and not found.within and 0.003 < found.largest < 0.03


def test_only_common_tokens_are_compared_and_having_none_is_a_difference():
    hidden = hidden_states(6)
    (found,) = compare_sketches([sketch_of(hidden)], [sketch_of(hidden[2:4], tokens=[2, 3])], 1e-5)
    assert found.compared == 2 and found.within
    (found,) = compare_sketches([sketch_of(hidden)], [sketch_of(hidden, tokens=range(6, 12))], 1e-5)
    assert found.compared == 0 and not found.within


def test_a_depth_that_one_side_lacks_is_a_difference():
    hidden = hidden_states(4)
    found = compare_sketches(
        [sketch_of(hidden, 1), sketch_of(hidden, 2)], [sketch_of(hidden, 2), sketch_of(hidden, 3)], 1e-5
    )
    assert [(f.name, f.within) for f in found] == [("layer 0", False), ("layer 1", True), ("layer 2", False)]


def test_the_first_nonfinite_token_is_found_on_either_side():
    hidden, other = hidden_states(9), hidden_states(9)
    other[[7, 4], 0] = float("nan")
    (found,) = compare_sketches([sketch_of(hidden)], [sketch_of(other)], 1e-5)
    assert (found.nonfinite, found.reference_nonfinite, found.finite) == (4, -1, False)
    (found,) = compare_sketches([sketch_of(other)], [sketch_of(hidden)], 1e-5)
    assert (found.nonfinite, found.reference_nonfinite, found.finite) == (-1, 4, False)


def test_sketches_of_all_ranks_are_merged_in_the_order_of_the_layers():
    hidden = hidden_states(4)
    found = merge_sketches(
        [
            sketch_of(hidden[2:], 2, [2, 3]),
            sketch_of(hidden, 10**6),
            sketch_of(hidden[:2], 2, [0, 1]),
            sketch_of(hidden, 0),
        ]
    )
    assert [s.name for s in found] == ["embedding", "layer 1", "final norm"]
    (difference,) = compare_sketches([sketch_of(hidden, 2)], found[1:2], 1e-5)
    assert difference.compared == 4 and difference.within


def test_a_token_of_the_block_is_located_in_its_row():
    block = TokenBlock.from_lists([[1, 2], [3]], [[4], [5, 6]])
    assert [row_and_position(block, token) for token in (0, 2, 3, 5)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
