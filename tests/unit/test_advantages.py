"""Advantage estimators equal the formulas of their papers in plain loops, for groups of any size and rows in any order."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    LogMeanExp,
    OnPolicyDistillation,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from mrl.algorithms.corrections import ImportanceSampling
from mrl.algorithms.inputs import AdvantageInputs, Advantages, broadcast_to_tokens


def make_batch(seed: int, sizes: list[int], shuffled: bool = True) -> AdvantageInputs:
    """Return a random batch with groups of these sizes. Rewards have ties, and some are not at the last token."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.permutation(100)[: len(sizes)], sizes)
    if shuffled:
        rng.shuffle(groups)
    count = len(groups)
    lengths = rng.integers(1, 6, count)
    token_rewards = np.where(rng.random(lengths.sum()) < 0.3, rng.normal(size=lengths.sum()), 0.0)
    ends = np.cumsum(lengths) - 1
    token_rewards[ends] += rng.integers(0, 3, count) / 2
    names = ("values", "old_logprobs", "teacher_logprobs")
    columns = {name: rng.normal(size=lengths.sum()).astype(np.float32) for name in names}
    columns |= policy_columns(seed, int(lengths.sum()))
    parts = {"right": rng.integers(0, 2, count).astype(float), "short": rng.normal(size=count)}
    return AdvantageInputs(token_rewards, groups, lengths, columns, rng.normal(size=count), parts)


def policy_columns(seed, total, vocabulary=7):
    """Draw a distribution for each token, and return its columns: of the sampled token, and of the whole vocabulary."""
    rng = np.random.default_rng([seed, 1])
    logits = rng.normal(size=(total, vocabulary))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    old = np.log(probabilities[np.arange(total), rng.integers(0, vocabulary, total)])
    columns = {
        "old_logprobs": old,
        "sum_pi_squared": (probabilities**2).sum(1),
        "rollout_logprobs": old + rng.normal(scale=0.5, size=total),
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}


def loop_rewards(batch):
    found, start = [], 0
    for length in batch.lengths:
        found.append(sum(batch.token_rewards[start : start + length]))
        start += length
    return found


def by_group(batch, values, formula):
    """Return for each row `formula(values of its group, index of the row in the group, lengths of its group)`."""
    found = []
    for row, group in enumerate(batch.groups):
        members = [r for r in range(len(batch.groups)) if batch.groups[r] == group]
        found.append(formula([values[m] for m in members], members.index(row), [batch.lengths[m] for m in members]))
    return np.array(found)


def mean(x):
    return sum(x) / len(x)


def std(x, ddof=1):
    return math.sqrt(sum((v - mean(x)) ** 2 for v in x) / max(len(x) - ddof, 1))


def loop_grpo_batch(batch):
    rewards = loop_rewards(batch)
    return by_group(batch, rewards, lambda r, i, n: (r[i] - mean(r)) / (std(rewards) + 1e-4))


def loop_gpg(batch):
    rewards = loop_rewards(batch)
    varied = by_group(batch, rewards, lambda r, i, n: float(max(r) > min(r)))
    centered = by_group(batch, rewards, lambda r, i, n: r[i] - mean(r))
    return centered * len(rewards) / max(varied.sum(), 1)


def loop_gdpo(batch):
    total = 0.5 * by_group(batch, batch.reward_parts["right"], lambda r, i, n: (r[i] - mean(r)) / (std(r) + 1e-4))
    total = total + by_group(batch, batch.reward_parts["short"], lambda r, i, n: (r[i] - mean(r)) / (std(r) + 1e-4))
    return (total - mean(total)) / (std(total) + 1e-4)


def loop_to_go(batch, values, factor):
    found, start = np.zeros(len(values)), 0
    for length in batch.lengths:
        for t in range(start, start + length):
            found[t] = sum(factor ** (u - t) * values[u] for u in range(t, start + length))
        start += length
    return found


def loop_gae(batch, gamma, lam):
    values, found, start = batch.columns["values"].astype(float), np.zeros(len(batch.token_rewards)), 0
    for length in batch.lengths:
        running = 0.0
        for t in reversed(range(start, start + length)):
            after = values[t + 1] if t + 1 < start + length else 0.0
            running = batch.token_rewards[t] + gamma * after - values[t] + gamma * lam * running
            found[t] = running
        start += length
    return found


def loop_otb(batch, zero_tail=True, ratio_bound=None):
    old, squares = (batch.columns[name].astype(float) for name in ("old_logprobs", "sum_pi_squared"))
    rollout, to_go = batch.columns["rollout_logprobs"].astype(float), loop_to_go(batch, batch.token_rewards, 1.0)
    weights, start, spans = np.zeros(len(old)), 0, []
    for length in batch.lengths:
        spans.append(range(start, start + length))
        running = 0.0
        for t in spans[-1]:
            ratio = min(math.exp(old[t] - rollout[t]), ratio_bound) if ratio_bound else 1.0
            running += (1 - 2 * math.exp(old[t]) + squares[t]) * ratio**2
            weights[t] = running
        start += length
    found = np.zeros(len(old))
    for row, span in enumerate(spans):
        for index, t in enumerate(span):
            same = [s[index] for r, s in enumerate(spans) if batch.groups[r] == batch.groups[row] and index < len(s)]
            baseline = sum(weights[u] * to_go[u] for u in same) / sum(weights[u] for u in same)
            if len(same) == 1:
                baseline = 0.0 if zero_tail else to_go[t]
            found[t] = to_go[t] - baseline
    return found


def others_mean(r, i):
    rest = r[:i] + r[i + 1 :]
    return mean(rest) if rest else r[i]


def lead_over_others(r, i):
    rest = r[:i] + r[i + 1 :]
    return max(r) - max(rest) if rest else 0.0


GROUPED = {
    "grpo": (GRPO(), lambda r, i, n: (r[i] - mean(r)) / (std(r) + 1e-4)),
    "grpo_population": (GRPO(ddof=0), lambda r, i, n: (r[i] - mean(r)) / (std(r, 0) + 1e-4)),
    "dr_grpo": (GRPO(scale_rewards="none"), lambda r, i, n: r[i] - mean(r)),
    "rloo": (RLOO(), lambda r, i, n: r[i] - others_mean(r, i)),
    "reinforce_pp_baseline": (ReinforcePlusPlusBaseline(), lambda r, i, n: r[i] - mean(r)),
    "opo": (OPO(), lambda r, i, n: r[i] - sum(a * b for a, b in zip(r, n, strict=True)) / sum(n)),
    "pass_at_k": (PassAtK(), lambda r, i, n: lead_over_others(r, i)),
    "pass_at_k_scaled": (PassAtK(normalize_std=True), lambda r, i, n: lead_over_others(r, i) / (std(r) + 1e-4)),
    "log_mean_exp": (LogMeanExp(0.5), lambda r, i, n: r[i] - 0.5 * math.log(mean([math.exp(x / 0.5) for x in r]))),
}
BATCHWISE = {
    "grpo_batch": (GRPO(scale_rewards="batch"), loop_grpo_batch),
    "gpg": (GPG(), loop_gpg),
    "gdpo": (GDPO(weights={"right": 0.5}), loop_gdpo),
    "remax": (ReMax(), lambda b: np.array(loop_rewards(b)) - b.greedy_rewards),
    "remax_to_go": (
        ReMax(to_go=True),
        lambda b: loop_to_go(b, b.token_rewards, 1.0) - b.greedy_rewards[b.response_of_token],
    ),
    "reinforce_pp": (ReinforcePlusPlus(0.9), lambda b: loop_to_go(b, b.token_rewards, 0.9)),
    "otb": (OptimalTokenBaseline(), loop_otb),
    "otb_without_tail": (OptimalTokenBaseline(zero_tail=False), lambda b: loop_otb(b, zero_tail=False)),
    "otb_corrected": (
        OptimalTokenBaseline(correction=ImportanceSampling(high=1.3)),
        lambda b: loop_otb(b, ratio_bound=1.3),
    ),
    "gae": (GAE(0.97, 0.8), lambda b: loop_gae(b, 0.97, 0.8)),
    "distill": (
        OnPolicyDistillation(coef=0.5),
        lambda b: 0.5 * (b.columns["teacher_logprobs"].astype(float) - b.columns["old_logprobs"]),
    ),
    "minillm": (
        OnPolicyDistillation(gamma=1.0),
        lambda b: loop_to_go(b, b.columns["teacher_logprobs"].astype(float) - b.columns["old_logprobs"], 1.0),
    ),
}


def reference(name, batch):
    if name in GROUPED:
        return by_group(batch, loop_rewards(batch), GROUPED[name][1])
    return BATCHWISE[name][1](batch)


def estimate(name, batch):
    found = (GROUPED | BATCHWISE)[name][0](batch)
    return found.advantages if isinstance(found, Advantages) else found


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@pytest.mark.parametrize("name", GROUPED | BATCHWISE)
@settings(max_examples=25)
@given(sizes=sizes, seed=st.integers(0, 10_000))
def test_advantages_are_those_of_the_paper(name, sizes, seed):
    batch = make_batch(seed, sizes)
    np.testing.assert_allclose(estimate(name, batch), reference(name, batch), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", GROUPED | BATCHWISE)
@settings(max_examples=15)
@given(sizes=sizes, seed=st.integers(0, 10_000))
def test_the_order_of_rows_does_not_matter(name, sizes, seed):
    batch = make_batch(seed, sizes)
    order = np.random.default_rng(seed).permutation(len(batch.groups))
    tokens = np.concatenate([np.flatnonzero(batch.response_of_token == row) for row in order])
    moved = AdvantageInputs(
        batch.token_rewards[tokens],
        batch.groups[order],
        batch.lengths[order],
        {name: values[tokens] for name, values in batch.columns.items()},
        batch.greedy_rewards[order],
        {name: values[order] for name, values in batch.reward_parts.items()},
    )
    np.testing.assert_allclose(
        broadcast_to_tokens(estimate(name, moved), moved),
        broadcast_to_tokens(estimate(name, batch), batch)[tokens],
        rtol=1e-7,
        atol=1e-9,
    )


@pytest.mark.parametrize("name", [*GROUPED, "grpo_batch", "gpg", "gdpo", "otb_without_tail"])
def test_a_response_alone_in_its_group_has_advantage_zero(name):
    batch = make_batch(0, [1, 1, 1])
    assert (estimate(name, batch) == 0).all()


@pytest.mark.parametrize("name", [*GROUPED, "grpo_batch", "gpg", "otb"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("size", [3, 7, 10])
def test_equal_rewards_give_exactly_zero(name, reward, size):
    """The advantage must be exactly 0, because training skips only responses of advantage 0."""
    batch = AdvantageInputs(np.full(size, reward), np.zeros(size, int), np.ones(size, int), policy_columns(0, size))
    assert (estimate(name, batch) == 0).all()


def test_grpo_of_right_and_wrong_answers():
    batch = AdvantageInputs(np.array([1.0, 0, 0, 1]), np.array([7, 7, 7, 7]), np.ones(4, int))
    np.testing.assert_allclose(GRPO(eps=0.0)(batch), np.array([1, -1, -1, 1]) * 0.5 / math.sqrt(1 / 3))
    np.testing.assert_allclose(GRPO(eps=0.0, ddof=0)(batch), [1, -1, -1, 1])


def test_the_std_of_the_batch_keeps_the_order_of_groups_with_different_spread():
    """The groups have the rewards (0, 1) and (0, 4). Divided by its own standard deviation, each gives the same advantages."""
    batch = AdvantageInputs(np.array([0.0, 1.0, 0.0, 4.0]), np.array([0, 0, 1, 1]), np.ones(4, int))
    np.testing.assert_allclose(GRPO(eps=0.0)(batch)[[1, 3]], [math.sqrt(0.5)] * 2)
    scaled = GRPO(eps=0.0, scale_rewards="batch")(batch)
    np.testing.assert_allclose(scaled, np.array([-0.5, 0.5, -2.0, 2.0]) / std([0.0, 1.0, 0.0, 4.0]))
    for refused in ("std", True):
        with pytest.raises(ValueError, match=r"scale_rewards=.*expected one of group, batch, none"):
            GRPO(scale_rewards=refused)


def test_gae_returns_are_advantages_and_values():
    batch = make_batch(3, [2, 2])
    found = GAE(0.97, 0.8)(batch)
    np.testing.assert_allclose(found.returns, loop_gae(batch, 0.97, 0.8) + batch.columns["values"])
    full = GAE(1.0, 1.0)(batch)
    np.testing.assert_allclose(full.returns, loop_to_go(batch, batch.token_rewards, 1.0), atol=1e-12)  # Monte Carlo
    one_step = GAE(0.9, 0.0)(batch)
    np.testing.assert_allclose(one_step.advantages, loop_gae(batch, 0.9, 0.0))


def test_the_optimal_token_baseline_has_less_variance_than_the_mean_of_the_group():
    """Responses have one token: likely responses have reward 1 and small gradients, unlikely responses have reward 0."""
    rng = np.random.default_rng(0)
    probabilities = np.array([0.9, 0.1])
    chosen = (rng.random(4000) > 0.9).astype(int)
    old, squares = np.log(probabilities[chosen]), np.full(4000, (probabilities**2).sum())
    batch = AdvantageInputs(
        (chosen == 0).astype(float),
        np.zeros(4000, int),
        np.ones(4000, int),
        {"old_logprobs": old, "sum_pi_squared": squares},
    )
    gradient = (np.eye(2) - probabilities)[chosen]  # gradient of log pi with respect to the logits
    np.testing.assert_allclose((gradient**2).sum(1), 1 - 2 * np.exp(old) + squares)
    spread = lambda advantages: (gradient * advantages[:, None]).var(0).sum()  # noqa: E731
    otb, mean_of_group = OptimalTokenBaseline()(batch), GRPO(scale_rewards="none")(batch)
    assert spread(otb) < 0.2 * spread(mean_of_group)
    np.testing.assert_allclose(
        (gradient * otb[:, None]).mean(0), (gradient * mean_of_group[:, None]).mean(0), atol=0.02
    )


def test_tokens_that_only_the_longest_response_has_have_no_baseline():
    batch = AdvantageInputs(np.array([0, 1.0, 0, 0, 0, 2.0]), np.zeros(2, int), np.array([2, 4]), policy_columns(1, 6))
    np.testing.assert_allclose(OptimalTokenBaseline()(batch)[4:], [2.0, 2.0])
    assert (OptimalTokenBaseline(zero_tail=False)(batch)[4:] == 0).all()
    assert not OptimalTokenBaseline().group_relative and OptimalTokenBaseline(zero_tail=False).group_relative
    assert OptimalTokenBaseline().required_inputs == {"old_logprobs", "sum_pi_squared"}
    corrected = OptimalTokenBaseline(correction=ImportanceSampling())
    assert corrected.required_inputs == {"old_logprobs", "sum_pi_squared", "rollout_logprobs"}


def test_a_token_whose_log_probability_is_unknown_adds_nothing_to_the_weights_of_the_baseline():
    batch = make_batch(3, [3, 3])
    first = np.cumsum(batch.lengths) - batch.lengths
    unknown = {name: values.copy() for name, values in batch.columns.items()}
    unknown["old_logprobs"][first[0]] = np.nan
    certain = unknown | {name: values.copy() for name, values in unknown.items()}
    certain["old_logprobs"][first[0]], certain["sum_pi_squared"][first[0]] = 0.0, 1.0  # the weight is 1 - 2 + 1 = 0
    found, expected = (OptimalTokenBaseline()(replace(batch, columns=columns)) for columns in (unknown, certain))
    np.testing.assert_array_equal(found, expected)
    assert np.isfinite(found).all()


def test_opo_has_less_variance_than_the_mean_as_baseline():
    """As in the derivation of the paper, the gradient of a response is a sum of independent unit steps, one for each token."""
    rng = np.random.default_rng(0)
    lengths, chosen = np.array([2, 30]), rng.integers(0, 2, 4000)
    steps = np.sqrt(lengths[chosen]) * rng.normal(size=4000)  # the norm grows with the square root of the length
    rewards = chosen.astype(float)
    batch = AdvantageInputs(rewards, np.zeros(4000, int), np.ones(4000, int))
    weighted = rewards - (lengths[chosen] * rewards).sum() / lengths[chosen].sum()
    assert np.var(steps * weighted) < 0.3 * np.var(steps * GRPO(scale_rewards="none")(batch))
    tokens = np.concatenate([[0.0] * (n - 1) + [r] for n, r in zip(lengths[chosen], rewards, strict=True)])
    found = OPO()(AdvantageInputs(tokens, np.zeros(4000, int), lengths[chosen]))
    np.testing.assert_allclose(found, weighted, rtol=1e-9)


def test_gpg_keeps_the_gradient_scale_when_groups_have_equal_rewards():
    rewards, groups = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1, 2, 2])
    found = GPG()(AdvantageInputs(rewards, groups, np.ones(6, int)))
    np.testing.assert_allclose(found, [1.5, -1.5, 0, 0, 0, 0])  # 0.5 * 6 / 2, as 2 of 6 rewards differ
    scaled = GPG(normalize_std=True, eps=1e-12)(AdvantageInputs(rewards, groups, np.ones(6, int)))
    np.testing.assert_allclose(scaled[:2], 3 * np.array([0.5, -0.5]) / math.sqrt(0.5))


def test_log_mean_exp_tends_to_the_mean_and_does_not_overflow():
    batch = make_batch(1, [4, 3])
    np.testing.assert_allclose(LogMeanExp(1e6)(batch), GRPO(scale_rewards="none")(batch), atol=1e-5)
    big = AdvantageInputs(np.array([1000.0, 0.0]), np.zeros(2, int), np.ones(2, int))
    np.testing.assert_allclose(LogMeanExp(0.1)(big), [0.1 * math.log(2), -1000 + 0.1 * math.log(2)])


def test_gdpo_distinguishes_responses_that_grpo_does_not():
    """The paper's example: rewards (0, 1) and (0, 2) in groups of two look the same to GRPO."""
    parts = {"a": np.array([0.0, 1.0, 0.0, 1.0]), "b": np.array([0.0, 0.0, 0.0, 1.0])}
    total, groups = parts["a"] + parts["b"], np.array([0, 0, 1, 1])
    batch = AdvantageInputs(total, groups, np.ones(4, int), reward_parts=parts)
    grpo, gdpo = GRPO(eps=1e-12)(batch), GDPO(eps=1e-12, normalize_batch=False)(batch)
    np.testing.assert_allclose(grpo[1], grpo[3])
    np.testing.assert_allclose(gdpo[3], 2 * gdpo[1])


def test_gdpo_lists_the_parts_of_the_reward_for_an_unknown_weight():
    batch = make_batch(0, [2, 2])
    with pytest.raises(ValueError, match=r"weights=.*wrong.*the reward has the parts right, short"):
        GDPO(weights={"wrong": 1.0})(batch)
    alone = AdvantageInputs(np.array([1.0, 0.0, 0.5, 0.5]), np.array([0, 0, 1, 1]), np.ones(4, int))
    np.testing.assert_array_equal(GDPO()(alone), GDPO()(replace(alone, reward_parts={"reward": alone.rewards})))


def test_gdpo_is_exactly_zero_in_a_group_of_equal_parts():
    rng = np.random.default_rng(0)
    parts = {name: np.repeat(rng.normal(size=4), 3) for name in ("a", "b")}
    parts["a"][:3] = [1.0, 2.0, 4.0]
    batch = AdvantageInputs(parts["a"] + parts["b"], np.repeat(np.arange(4), 3), np.ones(12, int), reward_parts=parts)
    assert (GDPO()(batch)[3:] == 0).all() and (GDPO()(batch)[:3] != 0).all()


def test_distillation_may_be_combined_with_a_reward_advantage():
    batch = make_batch(2, [3, 2])
    mixed = OnPolicyDistillation(coef=0.3, reward=GAE(), reward_coef=2.0)
    gae, found = GAE()(batch), mixed(batch)
    expected = (
        0.3 * (batch.columns["teacher_logprobs"].astype(float) - batch.columns["old_logprobs"]) + 2.0 * gae.advantages
    )
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-9)
    np.testing.assert_allclose(found.returns, gae.returns)
    assert mixed.required_inputs == {"teacher_logprobs", "old_logprobs", "values"}
    grouped = OnPolicyDistillation(coef=0.0, reward=GRPO())(batch)
    np.testing.assert_allclose(grouped.advantages, GRPO()(batch)[batch.response_of_token])
    assert grouped.returns is None


def test_advantages_of_a_wrong_shape_are_refused():
    batch = make_batch(2, [3, 2])
    with pytest.raises(ValueError, match=r"shape \(2,\); expected one number for each of the 5 responses"):
        broadcast_to_tokens(np.zeros(2), batch)
