"""pass@k and maj@k equal the enumeration of all subsets. Confidence intervals agree with simulations."""

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.evaluation.evaluation_summary import student_t_mean, wilson_mean
from mrl.rewards.pass_at_k import majority_at_k, majority_at_ks, pass_at_k

RESPONSES = st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d", None]), st.booleans()), min_size=1, max_size=8)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(combinations(passed, k))
    expected = sum(map(any, subsets)) / len(subsets)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(expected, abs=1e-12)


def vote(subset: list[tuple[str | None, bool]], passing: dict[str, float]) -> float:
    """Return the value of the most frequent answer, or the mean value of the answers that tie."""
    answers = [answer for answer, _ in subset if answer is not None]
    if not answers:
        return 0.0
    most = max(answers.count(answer) for answer in answers)
    winners = {answer for answer in answers if answers.count(answer) == most}
    return sum(passing[answer] for answer in winners) / len(winners)


@pytest.mark.extended
@settings(max_examples=150)
@given(RESPONSES, st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    answers, passed = zip(*responses, strict=True)
    passing = {a: float(np.mean([p for b, p in responses if b == a])) for a in set(answers) if a is not None}
    subsets = list(combinations(responses, k))
    expected = sum(vote(list(subset), passing) for subset in subsets) / len(subsets)
    assert majority_at_k(answers, passed, k) == pytest.approx(expected, abs=1e-12)
    assert majority_at_ks(answers, passed, [1, len(responses), k])[k] == pytest.approx(expected, abs=1e-12)


def test_a_vote_of_one_is_the_fraction_that_passes_with_an_answer():
    assert majority_at_k(["1", "2", None, "1"], [True, False, True, True], 1) == pytest.approx(0.5)


def test_a_vote_of_all_is_decided_by_the_largest_class():
    answers = ["7"] * 40 + ["8"] * 23 + [None]
    assert majority_at_k(answers, [a == "7" for a in answers], 64) == pytest.approx(1.0)
    assert majority_at_k(answers, [a == "8" for a in answers], 64) == pytest.approx(0.0)
    many = [str(i % 30) for i in range(1000)]  # large numbers must not overflow
    shares = [majority_at_k(many, [a == "0" for a in many], k) for k in (1, 2, 500, 1000)]
    assert shares[:2] == pytest.approx([34 / 1000, 34 / 1000]) and shares[3] == pytest.approx(1 / 10)
    assert np.isfinite(shares).all()


@pytest.mark.extended_after(1)
@pytest.mark.parametrize(
    "answers",
    [
        [str(i % 120) for i in range(400)] + [f"z{i}" for i in range(200)] + [f"w{i % 9}" for i in range(150)],
        [str(i) for i in range(1000)],
        [f"{size}" for size in range(1, 39) for _ in range(size)],
    ],
    ids=["mixed", "all differ", "all sizes"],
)
def test_many_responses_are_counted_in_seconds(answers):
    begun = time.process_time()
    found = majority_at_ks(answers, [True] * len(answers), [1, 8, len(answers)])
    assert list(found.values()) == pytest.approx([1.0] * 3) and max(found.values()) <= 1, "one answer always wins"
    assert time.process_time() - begun < 5.0  # about 1 s on an idle core


def test_the_interval_of_zeros_and_ones_is_wilsons():
    from scipy.stats import binomtest

    values = np.array([1.0] * 13 + [0.0] * 27)
    expected = binomtest(13, 40).proportion_ci(0.95, method="wilson")
    found = wilson_mean(values, 0.95)
    assert (found.value, found.low, found.high) == pytest.approx((13 / 40, expected.low, expected.high))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_values_do_not_give_an_interval_of_width_zero(value):
    found = wilson_mean(np.full(20, value), 0.95)
    assert found.low <= value <= found.high and found.high - found.low == pytest.approx(0.161, abs=0.01)
    wide = wilson_mean(np.array([0.5]), 0.95)
    assert wide.high - wide.low > 0.6, "one prompt says little of others"


@pytest.mark.extended_after(2)
@pytest.mark.parametrize("k", [1, 4, 16])
@pytest.mark.parametrize("prompts", [20, 200])
def test_the_interval_of_pass_at_k_covers_the_truth_as_often_as_it_says(k, prompts):
    """Prompts have success rates p from Beta(0.5, 1), and 16 responses each. The truth is the mean of 1 - (1 - p)^k."""
    random = np.random.default_rng(k + prompts)
    truth = float(np.mean(1 - (1 - random.beta(0.5, 1.0, 400_000)) ** k))
    table = np.array([pass_at_k(16, c, k) for c in range(17)])
    hits, trials = 0, 600
    for _ in range(trials):
        found = wilson_mean(table[random.binomial(16, random.beta(0.5, 1.0, prompts))], 0.95)
        hits += found.low <= truth <= found.high
    assert 0.92 <= hits / trials <= 0.985, hits / trials


def test_the_interval_of_a_mean_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    found = [student_t_mean(random.normal(3.0, 2.0, 12), 0.95) for _ in range(1000)]
    assert 0.93 <= np.mean([f.low <= 3.0 <= f.high for f in found]) <= 0.97
    alone = student_t_mean(np.array([1.0]), 0.95)
    assert (alone.value, alone.low, alone.high) == (1.0, None, None)
