"""What a certificate says of differences, without any model."""

from dataclasses import replace

import numpy as np
import pytest

from mrl.commands import certify as command
from mrl.workers.trace_comparison import AFTER, OUTPUTS, TOLERANCES, TensorFile, StepTrace, compare

REFERENCE = StepTrace(
    loss=0.5,
    grad_norm=2.0,
    outputs={0: np.array([-1.0, -2.0]), 3: np.array([-0.5])},
    gradients={"a.0.w": np.array([[0.1, -0.4]]), "a.1.w": np.array([0.0, 0.2])},
    weights={"a.0.w": np.array([[1.0, 2.0]]), "a.1.w": np.array([3.0, 4.0])},
    updates={"a.0.w": np.array([[1e-4, 1e-4]]), "a.1.w": np.array([1e-4, -1e-4])},
    after={0: np.array([-1.1, -2.1]), 3: np.array([-0.6])},
)


def first_wrong(other: StepTrace) -> str:
    wrong = [d.name for d in compare(REFERENCE, other) if not d.within]
    return wrong[0] if wrong else ""


def test_equal_steps_have_no_difference():
    found = compare(REFERENCE, REFERENCE)
    assert [d.name for d in found[:3]] == [OUTPUTS, "loss", "gradient norm"]
    assert len(found) == 10 and all(d.within and d.absolute == d.relative == 0 for d in found)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(outputs={0: np.array([-1.0, -2.0]), 3: np.array([-0.50002])}), OUTPUTS),
        (dict(outputs={0: np.array([-1.0, -2.0])}), OUTPUTS),
        (dict(loss=0.50002), "loss"),
        (dict(grad_norm=float("nan")), "gradient norm"),
        (dict(gradients={"a.0.w": np.array([[0.1, -0.4]]), "a.1.w": np.array([1e-5, 0.2])}), "gradient a.1.w"),
        (dict(gradients={"a.0.w": np.array([[0.1, -0.4]])}), "gradient a.1.w"),
        (dict(gradients={**REFERENCE.gradients, "b.w": np.array([1.0])}), "gradient b.w"),
        (dict(weights={"a.0.w": np.array([[1.0, 2.0]]), "a.1.w": np.array([3.0])}), "weight a.1.w"),
        (dict(updates={"a.0.w": np.zeros((1, 2)), "a.1.w": np.array([1e-4, -1e-4])}), "update a.0.w"),
        (dict(after={0: np.array([-1.1, -2.1]), 3: np.array([-0.7])}), AFTER),
    ],
)
def test_the_first_difference_is_named(change, name):
    assert first_wrong(replace(REFERENCE, **change)) == name


def test_differences_within_tolerance_are_no_differences():
    close = replace(REFERENCE, loss=0.500009, outputs={0: np.array([-1.0, -2.000009]), 3: np.array([-0.5])})
    assert first_wrong(close) == ""
    half = replace(REFERENCE, loss=0.53)
    assert first_wrong(half) == "loss"
    assert all(d.within for d in compare(REFERENCE, half, TOLERANCES["bfloat16"]))


def test_tensors_in_files_are_the_same_tensors(tmp_path):
    stored = REFERENCE.stored(tmp_path)
    assert isinstance(stored.gradients, TensorFile) and set(stored.weights) == {"a.0.w", "a.1.w"}
    assert first_wrong(stored) == "" and StepTrace().stored(tmp_path) == StepTrace()


def test_the_table_has_a_row_for_each_kind_of_tensor(capsys):
    command.show(compare(REFERENCE, replace(REFERENCE, grad_norm=3.0)), "tp2")
    lines = capsys.readouterr().out.splitlines()
    assert any("gradient a.*.w" in line and " 2 " in line and "equal" in line for line in lines)
    assert any("gradient norm" in line and "DIFFERS" in line for line in lines)
