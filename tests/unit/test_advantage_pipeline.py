"""The advantage pipeline equals plain loops: KL in the reward, whitening, excluded responses, precomputed columns."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import GAE, GRPO, OnPolicyDistillation, ReinforcePlusPlus, ReMax
from mrl.algorithms.filters import PolicyFiltration
from mrl.algorithms.inputs import Advantages, ScoredBatch
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import ClipCov, KLCov, PPOClip, covariances
from mrl.algorithms.objective import Objective
from mrl.core.metrics import check

LENGTHS = np.array([3, 0, 2, 4, 1, 0, 2])


def make_scored(seed=0, lengths=LENGTHS, truncated=None):
    rng, count = np.random.default_rng(seed), len(lengths)
    groups, rewards = rng.integers(0, 3, count), rng.normal(size=count)
    flags = np.zeros(count, bool) if truncated is None else np.array(truncated)
    return ScoredBatch(rewards, groups, np.array(lengths), flags)


def make_columns(total, seed=0):
    rng = np.random.default_rng(seed)
    names = ("values", "old_logprobs", "ref_logprobs", "teacher_logprobs")
    return {name: -rng.random(total).astype(np.float32) for name in names}


def spans(lengths):
    ends = np.cumsum(lengths)
    return [range(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def test_the_reward_is_at_the_last_token_and_kl_is_subtracted_at_every_token():
    scored, columns = make_scored(), make_columns(12)
    kl = KLPenalty(kind="k3")
    found = AdvantagePipeline(ReinforcePlusPlus(), PPOClip(), kl)(scored, columns, 0.25, [0])
    expected, total = np.zeros(12), 0.0
    for row, span in enumerate(spans(LENGTHS)):
        running = 0.0
        for t in reversed(span):
            d = float(columns["old_logprobs"][t]) - float(columns["ref_logprobs"][t])
            penalty = np.exp(-d) - 1 + d
            total += penalty
            running += (scored.rewards[row] if t == span[-1] else 0.0) - 0.25 * penalty
            expected[t] = running
    np.testing.assert_allclose(found.columns["advantages"], expected, rtol=1e-5)
    assert found.columns["advantages"].dtype == np.float32 and set(found.columns) == {"advantages"}
    assert found.metrics["policy/kl_reward"] == pytest.approx(total / 12)
    assert found.metrics["advantage/mean"] == pytest.approx(expected.mean())
    assert found.metrics["advantage/std"] == pytest.approx(expected.std())
    check(found.metrics)


def test_turn_rewards_replace_the_reward_at_the_last_token():
    scored, columns = make_scored(), make_columns(12)
    turns = np.zeros(12)
    turns[[0, 2, 6]] = [0.5, 1.0, -1.0]
    found = AdvantagePipeline(GAE(0.9, 0.8), PPOClip())(replace(scored, turn_rewards=turns), columns, 0.0, [0])
    values, expected = columns["values"].astype(float), np.zeros(12)
    for span in spans(LENGTHS):
        running = 0.0
        for t in reversed(span):
            after = values[t + 1] if t + 1 in span else 0.0
            running = turns[t] + 0.9 * after - values[t] + 0.9 * 0.8 * running
            expected[t] = running
    np.testing.assert_allclose(found.columns["advantages"], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.columns["returns"], expected + values, rtol=1e-5, atol=1e-7)


def test_responses_without_tokens_are_left_out():
    scored = ScoredBatch(np.array([1.0, 9.0, 0.0]), np.zeros(3, int), np.array([2, 0, 1]), np.zeros(3, bool))
    found = AdvantagePipeline(GRPO(scale_rewards="none"), PPOClip())(scored, {}, 0.0, [0])
    assert found.columns["advantages"].tolist() == [0.5, 0.5, -0.5]
    assert found.zero_advantage.tolist() == [False, True, False]
    greedy = replace(scored, greedy_rewards=np.array([0.25, 5.0, 0.5]))
    assert AdvantagePipeline(ReMax(), PPOClip())(greedy, {}, 0.0, [0]).columns["advantages"].tolist() == [
        0.75,
        0.75,
        -0.5,
    ]


def test_a_batch_with_one_token_per_response_is_not_ambiguous():
    """Three responses, one of them empty, have three tokens: values per response must not be taken for values per token."""
    scored = ScoredBatch(np.array([1.0, 7.0, 0.0]), np.zeros(3, int), np.array([1, 0, 2]), np.zeros(3, bool))
    assert AdvantagePipeline(GRPO(scale_rewards="none"), PPOClip())(scored, {}, 0.0, [0]).columns[
        "advantages"
    ].tolist() == [
        0.5,
        -0.5,
        -0.5,
    ]
    values = {"values": np.array([0.5, 0.25, 0.125], np.float32)}
    assert AdvantagePipeline(GAE(lam=0.0), PPOClip())(scored, values, 0.0, [0]).columns["advantages"].tolist() == [
        0.5,
        -0.125,
        -0.125,
    ]


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 4), max_size=8), seed=st.integers(0, 1000), whiten=st.booleans(), data=st.data())
def test_any_lengths_are_accepted(lengths, seed, whiten, data):
    truncated = np.array(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))), bool)
    scored = make_scored(seed, np.array(lengths, int), truncated)
    columns, total = make_columns(sum(lengths), seed), sum(lengths)
    advantage_pipeline = AdvantagePipeline(GAE(), KLCov(), KLPenalty(), whiten, mask_truncated=True)
    found = advantage_pipeline(scored, columns, 0.1, [seed, 1])
    assert set(found.columns) == {"advantages", "returns", "kl_cov"}
    assert all(c.shape == (total,) and c.dtype == np.float32 and np.isfinite(c).all() for c in found.columns.values())
    np.testing.assert_array_equal(found.excluded, truncated)
    for row, span in enumerate(spans(lengths)):
        assert found.zero_advantage[row] == all(found.columns["advantages"][t] == 0 for t in span)
    assert np.isfinite(list(found.metrics.values())).all()


def test_whitening_uses_only_the_tokens_in_the_loss():
    truncated = [False, False, True, False, False, False, False]
    scored, columns = make_scored(truncated=truncated), make_columns(12)
    plain = (
        AdvantagePipeline(ReinforcePlusPlus(), PPOClip())(scored, columns, 0.0, [0]).columns["advantages"].astype(float)
    )
    found = AdvantagePipeline(ReinforcePlusPlus(), PPOClip(), whiten=True, mask_truncated=True)(
        scored, columns, 0.0, [0]
    )
    kept = [t for row, span in enumerate(spans(LENGTHS)) for t in span if not truncated[row]]
    assert len(kept) == 10
    mean = sum(plain[t] for t in kept) / 10
    std = (sum((plain[t] - mean) ** 2 for t in kept) / 9 + 1e-8) ** 0.5
    np.testing.assert_allclose(found.columns["advantages"], (plain - mean) / std, rtol=1e-5)
    assert found.metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-9)
    assert found.metrics["advantage/std"] == pytest.approx(0.9**0.5, rel=1e-6)
    assert found.excluded.tolist() == truncated


def test_the_critic_learns_unwhitened_returns():
    scored, columns = make_scored(), make_columns(12)
    plain, white = (AdvantagePipeline(GAE(), PPOClip(), whiten=w)(scored, columns, 0.0, [0]) for w in (False, True))
    np.testing.assert_array_equal(plain.columns["returns"], white.columns["returns"])
    assert np.abs(plain.columns["advantages"] - white.columns["advantages"]).max() > 0.1


@pytest.mark.parametrize("size", [1, 3, 5, 7, 10])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7])
def test_whitening_equal_advantages_gives_exactly_zero(size, reward):
    scored = ScoredBatch(np.full(size, reward), np.arange(size), np.ones(size, int), np.zeros(size, bool))
    found = AdvantagePipeline(ReinforcePlusPlus(), PPOClip(), whiten=True)(scored, {}, 0.0, [0])
    assert found.zero_advantage.all()


def test_truncated_responses_stay_in_their_group_and_leave_the_loss_only_if_masked():
    scored = ScoredBatch(np.array([1.0, 0.0]), np.zeros(2, int), np.ones(2, int), np.array([False, True]))
    for masked in (False, True):
        found = AdvantagePipeline(GRPO(scale_rewards="none"), PPOClip(), mask_truncated=masked)(scored, {}, 0.0, [0])
        assert found.columns["advantages"].tolist() == [0.5, -0.5] and found.excluded.tolist() == [False, masked]


@pytest.mark.parametrize("loss", [KLCov(fraction=0.3), ClipCov(fraction=0.3, low=-10, high=10)])
def test_losses_select_among_the_tokens_of_the_loss(loss):
    truncated = [False, False, False, True, False, False, False]
    scored, columns = make_scored(truncated=truncated), make_columns(12)
    advantage_pipeline = AdvantagePipeline(ReinforcePlusPlus(), Objective(loss), mask_truncated=True)
    found, again = advantage_pipeline(scored, columns, 0.0, [3, 4]), advantage_pipeline(scored, columns, 0.0, [3, 4])
    column = next(c for name, c in found.columns.items() if name.endswith("cov"))
    np.testing.assert_array_equal(column, next(c for name, c in again.columns.items() if name.endswith("cov")))
    kept = np.array([t for row, span in enumerate(spans(LENGTHS)) for t in span if not truncated[row]])
    assert column.sum() == 2 and set(np.flatnonzero(column)) <= set(kept)  # 0.3 of the 8 trained tokens, rounded down
    if isinstance(loss, KLCov):
        cov = covariances(found.columns["advantages"][kept], columns["old_logprobs"][kept])
        assert set(np.flatnonzero(column)) == set(kept[np.argsort(-cov)[:2]])


def test_the_pipeline_computes_the_precomputed_columns_of_the_correction():
    """The columns are computed without the excluded responses, as the precomputed columns of a loss are."""

    class AboveMeanEntropy:
        required_inputs = frozenset({"entropies"})

        def precomputed_columns(self, batch, advantages, rng):
            entropies = batch.columns["entropies"]
            return {"uncertain": (entropies > entropies.mean()).astype(np.float32)}

        def __call__(self, inputs):
            return inputs.columns["uncertain"], {}

    scored = make_scored(truncated=[True, *[False] * 6])
    entropies = np.array([9.0, 9.0, 9.0, *range(9)], np.float32)
    pipeline = AdvantagePipeline(GRPO(), Objective(PPOClip(), AboveMeanEntropy()), mask_truncated=True)
    assert pipeline.required_inputs == {"entropies"}
    found = pipeline(scored, {"entropies": entropies}, 0.0, [0])
    assert found.columns["uncertain"].tolist() == [0.0] * 8 + [1.0] * 4

    other = pipeline.with_parts(None, KLCov(fraction=0.5))
    assert other.required_inputs == {"entropies", "old_logprobs"}, "another policy loss keeps the correction"
    columns = other(scored, {"entropies": entropies, "old_logprobs": -entropies}, 0.0, [0]).columns
    assert columns["uncertain"].tolist() == [0.0] * 8 + [1.0] * 4 and columns["kl_cov"].sum() == 4
    replaced = pipeline.with_parts(None, Objective(PPOClip()))
    assert replaced.required_inputs == frozenset(), "an objective replaces all terms"


@dataclass(frozen=True)
class Bare:
    """A user-defined advantage and loss without the optional class attributes."""

    def __call__(self, inputs):
        return inputs.rewards


def test_needs_combine_those_of_all_parts():
    assert AdvantagePipeline(GRPO(), PPOClip()).required_inputs == frozenset()
    everything = AdvantagePipeline(OnPolicyDistillation(reward=GAE()), Objective(KLCov(), kl=KLPenalty()), KLPenalty())
    assert everything.required_inputs == {"teacher_logprobs", "old_logprobs", "values", "ref_logprobs"}
    assert AdvantagePipeline(ReMax(), PPOClip(), KLPenalty()).required_inputs == {
        "greedy_rewards",
        "ref_logprobs",
        "old_logprobs",
    }
    bare = AdvantagePipeline(Bare(), Bare())
    assert bare.required_inputs == frozenset()
    scored = ScoredBatch(np.array([1.0, 2.0]), np.zeros(2, int), np.array([1, 2]), np.zeros(2, bool))
    assert bare(scored, {}, 0.0, [0]).columns["advantages"].tolist() == [1.0, 2.0, 2.0]


def test_a_batch_without_tokens_has_metrics_of_zero():
    scored = ScoredBatch(np.array([1.0, 0.0]), np.zeros(2, int), np.zeros(2, int), np.zeros(2, bool))
    columns = {"old_logprobs": np.empty(0, np.float32), "ref_logprobs": np.empty(0, np.float32)}
    found = AdvantagePipeline(GRPO(), PPOClip(), kl=KLPenalty("k1"))(scored, columns, 0.5, [0])
    assert found.metrics["policy/kl_reward"] == 0.0
    assert (found.metrics["advantage/mean"], found.metrics["advantage/std"]) == (0.0, 0.0)


def test_whitening_leaves_rounding_differences_small():
    """Whitening adds 1e-8 to the variance, as verl and trl do. So advantages of ±1e-7 become ±0.001 instead of ±0.7."""
    scored = ScoredBatch(np.array([0.5, 0.5 + 2e-7]), np.arange(2), np.ones(2, np.int64), np.zeros(2, bool))
    found = AdvantagePipeline(ReinforcePlusPlus(), PPOClip(), whiten=True)(scored, {}, 0.0, [0]).columns["advantages"]
    variance = 2 * 1e-7**2  # the unbiased estimate
    np.testing.assert_allclose(found, np.array([-1e-7, 1e-7]) / np.sqrt(variance + 1e-8), rtol=1e-4)
    assert np.abs(found).max() < 2e-3


def test_a_token_whose_log_probability_is_unknown_has_no_penalty():
    scored, columns = make_scored(), make_columns(12)
    columns["old_logprobs"][3] = np.nan
    found = AdvantagePipeline(ReinforcePlusPlus(), KLCov(), KLPenalty())(scored, columns, 0.5, [0])
    assert all(np.isfinite(column).all() for column in found.columns.values())
    known = np.arange(12) != 3
    kl = (columns["old_logprobs"].astype(float) - columns["ref_logprobs"])[known]
    assert found.metrics["policy/kl_reward"] == pytest.approx(kl.mean())


def test_resampling_draws_from_the_responses_in_the_loss_with_the_seed_of_the_step():
    truncated = [False, False, True, False, False, False, False]
    scored, columns = make_scored(truncated=truncated), make_columns(12)
    plain = AdvantagePipeline(ReinforcePlusPlus(), ClipCov(0.3, -10, 10), whiten=True, mask_truncated=True)
    pipeline = replace(plain, resampling=PolicyFiltration(per_group=False))
    found, again, other = (pipeline(scored, columns, 0.0, [3, step]) for step in (4, 4, 5))
    counts, without = found.counts, plain(scored, columns, 0.0, [3, 4])
    assert counts.sum() == 4, "as many as there are responses with tokens that are not truncated"
    assert not counts[[1, 2, 5]].any() and counts.max() > 1
    np.testing.assert_array_equal(found.excluded, counts == 0)
    np.testing.assert_array_equal(counts, again.counts)
    assert (counts != other.counts).any()
    assert found.metrics["advantage/drawn_fraction"] == (counts > 0).mean()
    check(found.metrics)
    assert without.counts is None and "advantage/drawn_fraction" not in without.metrics
    for name, column in without.columns.items():  # the resampling changes no column
        np.testing.assert_array_equal(found.columns[name], column)


def test_responses_with_offline_advantages_count_once_under_a_resampling():
    """Offline rows with data.offline.advantage may have no reward. By the reward 0, they would never be drawn."""
    scored = make_scored()
    given = np.full(len(LENGTHS), np.nan)
    given[[1, 2, 5]] = 1.0  # response 1 has no tokens
    scored = replace(scored, rewards=np.where(np.isnan(given), 1.0, 0.0), offline_advantages=given)
    pipeline = AdvantagePipeline(GRPO(), PPOClip(), resampling=PolicyFiltration(per_group=False))
    for seed in range(5):
        found = pipeline(scored, {}, 0.0, [seed])
        in_file, sampled = ~np.isnan(given) & (LENGTHS > 0), np.isnan(given) & (LENGTHS > 0)
        assert (found.counts[in_file] == 1).all() and not found.excluded[in_file].any()
        assert found.counts[sampled].sum() == sampled.sum() and found.counts.sum() == (LENGTHS > 0).sum()
    assert pipeline(replace(scored, offline_advantages=np.ones(len(LENGTHS))), {}, 0.0, [0]).counts.max() == 1


def every_second(rewards, groups, rng):
    return np.arange(len(rewards)) % 2 * 2


def one_too_many(rewards, groups, rng):
    return np.ones(len(rewards) + 1)


def one_too_few(rewards, groups, rng):
    return np.ones(len(rewards) - 1)


def half(rewards, groups, rng):
    return np.full(len(rewards), 0.5)


def test_a_resampling_may_be_a_function_and_what_it_returns_is_checked():
    scored, pipeline = make_scored(), AdvantagePipeline(GRPO(), PPOClip())
    found = replace(pipeline, resampling=every_second)(scored, {}, 0.0, [0])
    assert found.counts.tolist() == [0, 0, 2, 0, 2, 0, 0] and found.excluded.tolist() == (found.counts == 0).tolist()
    for wrong, array in (
        (one_too_many, r"shape \(6,\)"),
        (one_too_few, r"shape \(4,\)"),
        (half, r"shape \(5,\), which contains 0\.5"),
    ):
        with pytest.raises(
            ValueError, match=rf"{wrong.__name__}.* returned an array of {array}; expected 5 whole numbers"
        ):
            replace(pipeline, resampling=wrong)(scored, {}, 0.0, [0])


def returns_for_each_response(batch):
    return Advantages(np.zeros(len(batch.rewards)), np.zeros(len(batch.rewards)))


returns_for_each_response.required_inputs = frozenset({"values"})


def test_an_estimator_gives_a_return_for_each_token():
    scored = make_scored()
    columns = {"values": np.zeros(int(scored.lengths.sum()), np.float32)}
    with pytest.raises(ValueError, match=r"returned returns of shape .*; expected one number for each of the"):
        AdvantagePipeline(returns_for_each_response, PPOClip())(scored, columns, 0.0, [0])


def test_rows_outside_a_selection_count_zero_times_under_a_resampling():
    scored, selected = make_scored(), np.array([True, True, True, False, True, False, True])
    pipeline = AdvantagePipeline(GRPO(), PPOClip(), resampling=every_second)
    found = pipeline.for_selected_rows(selected, scored, {}, 0.0, [0])
    assert found.counts.tolist() == [0, 0, 2, 0, 0, 0, 2], "every second of rows 0, 2, 4 and 6; row 1 has no tokens"
    np.testing.assert_array_equal(found.excluded, found.counts == 0)


def test_offline_advantages_replace_those_of_the_estimator_after_whitening():
    scored, columns = make_scored(), make_columns(12)
    given = np.full(len(LENGTHS), np.nan)
    given[[2, 3]] = 0.5, 0.0
    plain = AdvantagePipeline(GRPO(), PPOClip(), whiten=True)(scored, columns, 0.0, [0])
    found = AdvantagePipeline(GRPO(), PPOClip(), whiten=True)(
        replace(scored, offline_advantages=given), columns, 0.0, [0]
    )
    expected = plain.columns["advantages"].copy()
    for row, span in enumerate(spans(LENGTHS)):
        if not np.isnan(given[row]):
            expected[list(span)] = given[row]
    np.testing.assert_array_equal(found.columns["advantages"], expected)
    assert found.zero_advantage[3] and not found.zero_advantage[2]
    chosen = np.array([False, False, True, True, True, False, False])
    part = AdvantagePipeline(GRPO(), PPOClip()).for_selected_rows(
        chosen, replace(scored, offline_advantages=given), columns, 0.0, [0]
    )
    assert set(part.columns["advantages"][list(spans(LENGTHS)[2])]) == {0.5}, "a selection keeps them"


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 99))
def test_grpo_compares_each_response_with_the_responses_of_its_own_group_whatever_the_sizes(sizes, seed):
    """The reference is section 4.1.2 of DeepSeekMath (2024) in plain loops, over groups of different sizes."""
    rewards = np.random.default_rng(seed).integers(0, 3, sum(sizes)).astype(float)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    lengths = np.ones(len(rewards), np.int64)
    scored = ScoredBatch(rewards, groups, lengths, np.zeros(len(rewards), bool))
    found = AdvantagePipeline(GRPO(), PPOClip())(scored, {}, 0.0, [0]).columns["advantages"]
    start = 0
    for size in sizes:
        own = rewards[start : start + size]
        std = own.std(ddof=1) if size > 1 else 0.0
        np.testing.assert_allclose(found[start : start + size], (own - own.mean()) / (std + 1e-4), rtol=1e-5, atol=1e-6)
        start += size
