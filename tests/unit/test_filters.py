"""Filters keep the groups that can teach, and policy filtration draws responses with the probabilities of its method."""

from types import SimpleNamespace

import numpy as np
import pytest
from sampled_groups import group

from mrl.algorithms.filters import NonzeroVariance, PolicyFiltration, RewardRange, filter_values
from mrl.controller.plan_train import check_filter_metric
from mrl.rewards.reward_types import Score, Weighted
from mrl.rewards.rule_based import ExactMatch, Overlong
from mrl.rollout.worker import RolloutWorker


def test_filters_keep_what_can_teach():
    keep = NonzeroVariance()
    assert keep(np.array([0.0, 1.0])) and not keep(np.array([0.1, 0.1, 0.1])) and not keep(np.array([1.0]))
    assert not keep(np.zeros(0)) and keep(np.array([0.0, 1e-12])) and not NonzeroVariance(1e-6)(np.array([0.0, 1e-12]))
    between = RewardRange(0.25, 0.5)
    assert (
        between(np.array([0.0, 0.0, 0.0, 1.0])) and between(np.array([0.0, 1.0])) and not between(np.array([1.0, 1.0]))
    )
    assert not between(np.array([0.0, 0.0])) and not between(np.zeros(0))
    with pytest.raises(ValueError, match=r"low=0\.9, high=0\.1: expected low <= high"):
        RewardRange(0.9, 0.1)


def test_a_filter_decides_from_the_part_that_it_names():
    """DAPO drops a group of only wrong responses, even if a penalty for length makes their rewards differ."""
    rewards = np.array([0.0, 0.0, 0.0, -0.4])
    parts = [{"correct": 0.0, "overlong": x} for x in (0.0, 0.0, 0.0, -0.4)]
    keep = lambda filter, parts: filter(filter_values(filter.metric, rewards, parts))  # noqa: E731
    assert keep(NonzeroVariance(), parts)
    assert not keep(NonzeroVariance(metric="correctness"), parts) and not keep(NonzeroVariance(metric="correct"), parts)
    assert keep(NonzeroVariance(metric="overlong"), parts)
    assert keep(RewardRange(-0.2, 0.0, metric="overlong"), parts)
    assert keep(NonzeroVariance(metric="correctness"), [{}] * 4)  # without the part, rewards decide
    one_failed = [{"acc": 1.0}, {}, {"acc": 1.0}, {"acc": 1.0}]
    assert keep(NonzeroVariance(metric="correctness"), one_failed)


def test_an_unknown_part_is_refused_with_the_names_of_the_parts():
    parts = [{"correct": 0.0, "overlong": -0.4}]
    with pytest.raises(ValueError, match=r"metric=length: the reward has no part .* its parts are correct, overlong"):
        filter_values("length", np.array([-0.4]), parts)
    with pytest.raises(ValueError, match=r"it has no parts\. Remove rollout.filter.metric"):
        filter_values("length", np.array([1.0]), [{}])
    assert filter_values("length", np.zeros(2), [{}, {}]).tolist() == [0.0, 0.0]  # all failed


def test_an_unknown_part_of_a_weighted_reward_is_refused_before_the_run():
    reward = Weighted({"correct": ExactMatch(), "overlong": Overlong(10, 5)})
    for metric in (None, "correctness", "correct", "overlong", "correct_inner"):
        check_filter_metric(NonzeroVariance(metric=metric), reward)
    check_filter_metric(NonzeroVariance(metric="any"), ExactMatch())
    check_filter_metric(None, reward)
    with pytest.raises(ValueError, match=r"rollout.filter.metric=right: .* its parts are correct, overlong"):
        check_filter_metric(NonzeroVariance(metric="right"), reward)


@pytest.mark.parametrize(("metric", "kept"), [(None, True), ("correctness", False)])
def test_the_rollout_worker_filters_by_the_part_of_the_reward(metric, kept):
    """The group has two wrong responses, and one of them is too long."""
    scores = [Score(-0.4 * n, parts={"correct": 0.0, "overlong": -0.4 * n}) for n in range(2)]
    worker = SimpleNamespace(spec=SimpleNamespace(rollout_filter=NonzeroVariance(metric=metric)))
    assert RolloutWorker._passes_filter(worker, group(0, *scores)) is kept


def test_policy_filtration_draws_with_the_probabilities_of_its_method():
    rewards = np.array([0.0, 1.0, 0.5, -2.0, 1.0])
    expected = {
        PolicyFiltration("pow", 2.0): [0.0, 1.0, 0.25, 4.0, 1.0],
        PolicyFiltration("pow", 0.0): [1.0] * 5,
        PolicyFiltration("max_min"): [0.0, 1.0, 0.0, 1.0, 1.0],
        PolicyFiltration("max_random"): [0.1, 0.4, 0.1, 0.1, 0.4],
    }
    for filtration, numbers in expected.items():
        np.testing.assert_allclose(filtration.weights(rewards), np.array(numbers) + 1e-8, rtol=1e-12)
        total = np.zeros(5)
        for seed in range(4000):
            counts = filtration(rewards, np.zeros(5, int), np.random.default_rng(seed))
            assert counts.sum() == 5 and counts.dtype == np.int64
            total += counts
        np.testing.assert_allclose(total / 20_000, np.array(numbers) / sum(numbers), atol=0.01)


def test_policy_filtration_draws_within_groups_or_from_the_whole_step():
    rewards, groups = np.array([0.0, 1.0, 1.0, 4.0, 0.0, 0.0]), np.array([5, 5, 2, 2, 9, 9])
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = PolicyFiltration("max_min")(rewards, groups, rng)
        assert [counts[groups == group].sum() for group in (5, 2, 9)] == [2, 2, 2]
    sums = [
        PolicyFiltration("max_min", per_group=False)(rewards, groups, np.random.default_rng(n))[groups == 2].sum()
        for n in range(20)
    ]
    assert len(set(sums)) > 2
    nothing = PolicyFiltration(per_group=False)(np.zeros(0), np.zeros(0, int), rng)
    assert nothing.shape == (0,) and PolicyFiltration()(np.zeros(0), np.zeros(0, int), rng).shape == (0,)
    with pytest.raises(ValueError, match="method='best': expected one of pow, max_min, max_random"):
        PolicyFiltration("best")
    with pytest.raises(ValueError, match="power=-1: must be 0 or more"):
        PolicyFiltration(power=-1)
