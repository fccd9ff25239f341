"""Advantages, losses, KL estimates, aggregations, corrections and policy filtration give verl's values and gradients.

Where mrl differs from verl on purpose, a test shows the difference. The documentation names all these differences.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from loss_cases import loss_and_gradient, loss_inputs, make_case
from peer_functions import (
    verl_advantages,
    verl_aggregate,
    verl_bypass_loss,
    verl_correction,
    verl_filtration,
    verl_kl,
    verl_kl_coefs,
    verl_loss,
    verl_value_loss,
)

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from mrl.algorithms.corrections import ImportanceSampling, Product, Rejection
from mrl.algorithms.filters import PolicyFiltration
from mrl.algorithms.inputs import AdvantageInputs, Advantages, ScoredBatch, broadcast_to_tokens
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import (
    CISPO,
    DPPO,
    DRO,
    SAPO,
    ClipCov,
    KLCov,
    PolicyGradient,
    PPOClip,
    ValueLoss,
)
from mrl.algorithms.objective import AGGREGATIONS, Objective, TokenWeighting
from mrl.algorithms.parts import build_objective
from mrl.algorithms.sequence_losses import GMPO, GSPO, GSPOToken
from mrl.config.hydra_entry import CONF, check_overrides, compose_config

pytestmark = pytest.mark.extended
SEEDS = range(3)


# Advantages


def make_batch(seed: int, sizes=(3, 2, 4, 2), turns: bool = False) -> AdvantageInputs:
    """Return responses in groups of these sizes, in random order. With `turns`, tokens inside of a response have rewards, too."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    lengths = rng.integers(1, 7, len(groups))
    total = int(lengths.sum())
    token_rewards = np.where(rng.random(total) < 0.3, rng.normal(size=total), 0.0) * turns
    token_rewards[np.cumsum(lengths) - 1] += rng.integers(0, 3, len(groups)) / 2
    probabilities = rng.dirichlet(np.ones(5), total)
    columns = {
        "values": rng.normal(size=total),
        "old_logprobs": np.log(probabilities[:, 0]),
        "sum_pi_squared": (probabilities**2).sum(1),
    }
    parts = {"right": rng.integers(0, 2, len(groups)).astype(float), "short": rng.normal(size=len(groups))}
    return AdvantageInputs(token_rewards, groups, lengths, columns, rng.normal(size=len(groups)), parts)


def estimate(estimator, batch: AdvantageInputs, whiten: bool = False) -> np.ndarray:
    """Return the advantages [R] of mrl, as the advantage pipeline computes them."""
    if whiten:
        scored = ScoredBatch(
            batch.rewards,
            batch.groups,
            batch.lengths,
            np.zeros(len(batch.groups), bool),
            batch.token_rewards,
            batch.reward_parts,
        )
        pipeline = AdvantagePipeline(estimator, PPOClip(), whiten=True)
        return pipeline(scored, batch.columns, 0.0, [0]).columns["advantages"]
    found = estimator(batch)
    return broadcast_to_tokens(found.advantages if isinstance(found, Advantages) else found, batch)


# name -> (estimator of mrl, whether algorithm.whiten is set, name in verl, fields of verl's AlgoConfig)
ESTIMATORS = {
    "grpo": (GRPO(eps=1e-6), False, "grpo", {}),
    "grpo_vectorized": (GRPO(eps=1e-6), False, "grpo_vectorized", {}),
    "dr_grpo": (GRPO(scale_rewards="none"), False, "grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": (RLOO(), False, "rloo", {}),
    "rloo_vectorized": (RLOO(), False, "rloo_vectorized", {}),
    "opo": (OPO(), False, "opo", {}),
    "pass_at_k": (PassAtK(), False, "grpo_passk", {"norm_adv_by_std_in_grpo": False}),
    "pass_at_k_scaled": (PassAtK(normalize_std=True, eps=1e-6), False, "grpo_passk", {}),
    "reinforce_pp": (ReinforcePlusPlus(0.9), True, "reinforce_plus_plus", {"gamma": 0.9}),
    "reinforce_pp_baseline": (ReinforcePlusPlusBaseline(), True, "reinforce_plus_plus_baseline", {}),
    "remax": (ReMax(to_go=True), False, "remax", {}),
    "gae": (GAE(0.97, 0.9), True, "gae", {"gamma": 0.97, "lam": 0.9}),
    "gdpo": (
        GDPO({"right": 0.5}, eps=1e-6, normalize_batch=False),
        True,
        "gdpo",
        {"gdpo_reward_keys": ["right", "short"], "gdpo_reward_weights": [0.5, 1.0]},
    ),
    "otb": (OptimalTokenBaseline(), False, "optimal_token_baseline", {}),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("turns", [False, True])
def test_advantages_are_those_of_verl(peer, name, seed, turns):
    estimator, whiten, verl_name, settings = ESTIMATORS[name]
    batch = make_batch(seed, turns=turns)
    expected = peer(verl_advantages, verl_name, batch, settings)
    assert np.abs(expected).max() > 0.1
    tolerance = 1e-5 if whiten else 1e-7  # the columns of the pipeline are float32
    np.testing.assert_allclose(estimate(estimator, batch, whiten), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("ratio_bound", [None, 1.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimal_token_baseline_of_several_turns_is_that_of_verl(peer, zero_tail, ratio_bound, seed):
    """Tokens of tool results are between the sampled tokens. verl has an estimator of its own for such responses.

    For tool results, verl's other estimator gives other values: it compares tokens at the same position, and also counts the
    tokens of tool results for this position.
    """
    batch, rng = make_batch(seed, turns=True), np.random.default_rng(seed)
    total = len(batch.token_rewards)
    gaps, others = np.where(rng.random(total) < 0.3, rng.integers(1, 4, total), 0), {"handle_zero_tail": zero_tail}
    correction = None
    if ratio_bound:
        batch.columns["rollout_logprobs"] = batch.columns["old_logprobs"] + rng.normal(scale=0.5, size=total)
        ratio = np.exp(batch.columns["old_logprobs"] - batch.columns["rollout_logprobs"])
        assert (ratio > ratio_bound).any() and (ratio < ratio_bound).any()
        correction, others["rollout_is_weights"] = ImportanceSampling(high=ratio_bound), np.minimum(ratio, ratio_bound)
    found = OptimalTokenBaseline(zero_tail, correction)(batch)
    verl = partial(peer, verl_advantages)
    expected = verl("tir_optimal_token_baseline", batch, {}, gaps, **others)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    without_gaps = verl("optimal_token_baseline", batch, {}, None, **others)
    np.testing.assert_allclose(found, without_gaps, rtol=1e-6, atol=1e-6)
    assert np.abs(verl("optimal_token_baseline", batch, {}, gaps, **others) - found).max() > 0.1


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "rloo_vectorized"])
def test_a_response_alone_in_its_group_has_advantage_zero_and_in_verl_its_reward(peer, name):
    """verl's vectorized RLOO also gives 0. All other responses have the same advantage in mrl and in verl."""
    batch = make_batch(0, sizes=(1, 3))
    estimator, _, verl_name, settings = ESTIMATORS[name]
    found, expected = estimate(estimator, batch), peer(verl_advantages, verl_name, batch, settings)
    alone = batch.groups[batch.response_of_token] == 0
    np.testing.assert_allclose(found[~alone], expected[~alone], rtol=1e-7, atol=1e-9)
    assert (found[alone] == 0).all()
    reward = 0.0 if name == "rloo_vectorized" else batch.rewards[batch.response_of_token][alone]
    np.testing.assert_allclose(expected[alone], reward, rtol=1e-5)


def test_gpg_counts_groups_of_equal_rewards_and_verl_responses_with_reward_zero(peer):
    """Only the common factor differs.

    mrl: B / (number of responses in groups with different rewards). verl: B / (number of rewards other than 0).
    """
    batch = make_batch(1, sizes=(3, 2, 4))
    equal = np.isin(batch.groups, [1])
    batch.token_rewards[np.cumsum(batch.lengths) - 1] = np.where(equal, 0.5, np.arange(9) % 2)
    found, expected = estimate(GPG(), batch), peer(verl_advantages, "gpg", batch, {})
    ours, theirs = 9 / (9 - equal.sum()), 9 / np.count_nonzero(batch.rewards)
    assert ours != theirs
    np.testing.assert_allclose(found / ours, expected / theirs, rtol=1e-9, atol=1e-12)


# Losses

TOKEN, SEQUENCE, FIXED = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"
VERL_AGGREGATIONS = {
    TOKEN: "token_mean",
    SEQUENCE: "sequence_mean",
    FIXED: "fixed_length",
    "seq-mean-token-sum": "sequence_sum",
    "token-sum": "token_sum",
}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
# name -> (loss of mrl, verl's aggregation, name in verl, fields of verl's ActorConfig, fields of verl's PolicyLossConfig)
LOSSES = {
    "ppo": (PPOClip(0.2, 0.3, dual_clip=3.0), TOKEN, "vanilla", CLIP, {}),
    "ppo_dual_clip": (PPOClip(0.2, 0.3, dual_clip=1.2), FIXED, "vanilla", CLIP | {"clip_ratio_c": 1.2}, {}),
    "dppo_tv": (
        DPPO(0.1, 0.15, 1.3),
        TOKEN,
        "dppo_tv",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.3},
        {},
    ),
    "dppo_kl": (
        DPPO(0.01, 0.02, 1.3, "kl"),
        FIXED,
        "dppo_kl",
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "clip_ratio_c": 1.3},
        {},
    ),
    "gspo": (GSPO(0.2, 0.3), SEQUENCE, "gspo", CLIP, {}),
    "gspo_token": (GSPOToken(0.2, 0.3), SEQUENCE, "gspo", CLIP, {}),
    "sapo": (SAPO(1.0, 1.5), SEQUENCE, "sapo", {"tau_pos": 1.0, "tau_neg": 1.5}, {}),
    "gpg": (PolicyGradient(), TOKEN, "gpg", {}, {}),
    "gmpo": (GMPO(0.2, 0.3), SEQUENCE, "geo_mean", CLIP, {}),
    "dro": (DRO(0.3), TOKEN, "dro", {}, {"dro_beta": 0.3}),
    "cispo": (CISPO(0.2, 0.3), TOKEN, "cispo", CLIP, {}),
}


def weighted(case, aggregation: str) -> np.ndarray:
    """Return the loss weight [R] of each token in mrl, for an aggregation of verl. The length limit is the longest length."""
    weighting = TokenWeighting(AGGREGATIONS[VERL_AGGREGATIONS[aggregation]], int(max(case.lengths)))
    return weighting(case.lengths, case.lengths)[case.rows]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients_are_those_of_verl(peer, name, seed):
    loss, aggregation, mode, settings, policy_loss = LOSSES[name]
    case = make_case(seed)
    expected, slope = peer(verl_loss, mode, case, aggregation, settings, policy_loss)
    value, gradient = loss_and_gradient(loss, case, weighted(case, aggregation))
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("loss", "mode", "policy_loss"),
    [
        (
            ClipCov(fraction=1.0, low=0.1, high=0.6, clip_low=0.2, clip_high=0.2),
            "clip_cov",
            dict(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.6),
        ),
        (KLCov(fraction=0.3, coef=0.5, kl="abs"), "kl_cov", dict(kl_cov_ratio=0.3, ppo_kl_coef=0.5)),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_covariances_select_the_tokens_of_verl(peer, loss, mode, policy_loss, seed):
    """verl reads current log-probabilities, and mrl old ones. Here, they differ by a constant, which changes no covariance."""
    case = make_case(seed)
    case.logprobs[:] = case.old + 0.1
    batch = AdvantageInputs(np.zeros(15), np.zeros(5, int), case.lengths, {"old_logprobs": case.old})
    case.columns.update(loss.precomputed_columns(batch, case.advantages, np.random.default_rng(0)))
    columns = loss.precomputed_columns(batch, case.advantages, np.random.default_rng(0))
    assert 0 < next(iter(columns.values())).sum() < 15
    expected, slope = peer(verl_loss, mode, case, TOKEN, {}, policy_loss)
    value, gradient = loss_and_gradient(loss, case, weighted(case, TOKEN))
    assert value == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)


def test_the_covariances_of_verl_change_within_a_step(peer):
    """mrl selects the tokens of a step once, by the log-probabilities before its first optimizer step."""
    case = make_case(0)
    case.logprobs[:] = case.old[::-1]
    batch = AdvantageInputs(np.zeros(15), np.zeros(5, int), case.lengths, {"old_logprobs": case.old})
    loss = KLCov(fraction=0.3, kl="abs")
    case.columns.update(loss.precomputed_columns(batch, case.advantages, np.random.default_rng(0)))
    expected, _ = peer(verl_loss, "kl_cov", case, TOKEN, {}, dict(kl_cov_ratio=0.3, ppo_kl_coef=1.0))
    assert abs(loss_and_gradient(loss, case, weighted(case, TOKEN))[0] - expected) > 1e-3


@pytest.mark.parametrize("aggregation", VERL_AGGREGATIONS)
def test_aggregations_are_those_of_verl(peer, aggregation):
    case, losses = make_case(0), np.random.default_rng(0).normal(size=15)
    expected = peer(verl_aggregate, case.lengths, losses, aggregation, int(max(case.lengths)))
    assert (weighted(case, aggregation) * losses).sum() == pytest.approx(expected)


@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_the_value_loss_is_that_of_verl(peer, clip):
    rng, case = np.random.default_rng(0), make_case(0)
    old, returns = rng.normal(size=15), rng.normal(size=15)
    values = torch.tensor(old + rng.normal(scale=0.3, size=15), requires_grad=True)
    expected, slope = peer(verl_value_loss, case.lengths, values.detach().numpy(), returns, old, clip)
    loss = ValueLoss(clip if clip < 1 else 0.0)(values, torch.tensor(returns), torch.tensor(old)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(values.grad.numpy(), slope, rtol=1e-12)


# KL

KINDS = {
    "kl": "k1",
    "k1": "k1",
    "k1+": "k1+",
    "abs": "abs",
    "abs+": "abs+",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3+": "k3+",
}


@pytest.mark.parametrize("name", KINDS)
def test_kl_estimates_and_gradients_are_those_of_verl(peer, name):
    case = make_case(0)
    expected, slope = peer(verl_kl, case, name)
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    estimates = KLPenalty(kind=KINDS[name])(loss_inputs(case, logprobs))
    estimates.sum().backward()
    np.testing.assert_allclose(estimates.detach().numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(logprobs.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        KLPenalty(kind=KINDS[name]).values(case.logprobs, case.columns["ref_logprobs"]), expected
    )


def test_the_adaptive_coefficient_is_that_of_verl(peer):
    penalty, measured = KLPenalty(0.2, target=0.1, horizon=500), [0.05, 0.09, 0.1, 0.13, 0.5, 0.0]
    expected, coef, found = peer(verl_kl_coefs, 0.2, 0.1, 500, measured, 48), 0.2, []
    for value in measured:
        coef = penalty.next_coef(coef, value, 48)
        found.append(coef)
    assert found == pytest.approx(expected, rel=1e-12) and max(found) > 0.2 > min(found)


# Corrections


def correction_case(seed: int, spread: float = 0.5):
    """Return 40 responses. The standard deviation of log-ratios in a response is about 0, 0.2, 1 or 2 times `spread`."""
    case = make_case(seed, lengths=(3, 1, 5, 2) * 10)
    scale = np.repeat(np.random.default_rng(seed).choice([0.0, 0.2, 1.0, 2.0], 40), case.lengths)
    case.rollout[:] = case.old + (case.rollout - case.old) * scale * spread / 0.5
    return case


def correct(correction, case, current: bool = False) -> np.ndarray:
    """Return the weights [R] of a correction in mrl, 0 for rejected tokens."""
    rollout = case.rollout.astype(np.float64)
    batch = AdvantageInputs(
        np.zeros(len(case.old)),
        np.zeros(len(case.lengths), int),
        case.lengths,
        {"old_logprobs": case.old, "rollout_logprobs": rollout},
    )
    if hasattr(correction, "precomputed_columns"):
        case.columns.update(correction.precomputed_columns(batch, case.advantages, np.random.default_rng(0)))
    inputs = loss_inputs(case)
    return correction(replace(inputs, old_logprobs=inputs.rollout_logprobs) if current else inputs)[0].numpy()


REJECTIONS = {
    ("token_k1", "0.5_1.6"): ImportanceSampling("token", "reject", 1 / 1.6, 1 / 0.5),
    ("token_k2", "0.1"): Rejection(0.1, "token", "k2"),
    ("token_k3", "0.1"): Rejection(0.1, "token", "k3"),
    ("seq_sum_k1", "2.0"): ImportanceSampling("sequence", "reject", 0.5, 2.0),
    ("seq_sum_k2", "0.3"): Rejection(0.3, "sum", "k2"),
    ("seq_sum_k3", "0.3"): Rejection(0.3, "sum", "k3"),
    ("seq_mean_k1", "0.8_1.2"): ImportanceSampling("geometric", "reject", 1 / 1.2, 1 / 0.8),
    ("seq_mean_k2", "0.1"): Rejection(0.1, "mean", "k2"),
    ("seq_mean_k3", "0.1"): Rejection(0.1, "mean", "k3"),
    ("seq_max_k2", "0.2"): Rejection(0.2, "max", "k2"),
    ("seq_max_k3", "0.2"): Rejection(0.2, "max", "k3"),
    ("token_k1,seq_max_k3", "0.5_2.0,0.4"): Product(
        [ImportanceSampling("token", "reject", 0.5, 2.0), Rejection(0.4, "max", "k3")]
    ),
}


@pytest.mark.parametrize(("options", "threshold"), REJECTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_rejections_are_those_of_verl(peer, options, threshold, seed):
    case = correction_case(seed)
    settings = {"rollout_is": None, "rollout_rs": options, "rollout_rs_threshold": threshold}
    _, kept = peer(verl_correction, case, None, settings)
    assert 0 < kept.mean() < 1
    np.testing.assert_array_equal(correct(REJECTIONS[options, threshold], case), kept)


WEIGHTS = {
    ("token", 1.3): ImportanceSampling("token", "truncate", high=1.3),
    ("sequence", 1.3): ImportanceSampling("sequence", "truncate", high=1.3),
    ("token", "0.5_2.0"): ImportanceSampling("token", "mask", 0.5, 2.0),
    ("sequence", "0.5_2.0"): ImportanceSampling("sequence", "mask", 0.5, 2.0),
}


@pytest.mark.parametrize(("level", "threshold"), WEIGHTS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_are_those_of_verl(peer, level, threshold, normalize, seed):
    """With batch normalization, verl divides by a mean over the tokens or the responses of the whole step, as mrl does."""
    case = correction_case(seed)
    settings = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normalize}
    expected, _ = peer(verl_correction, case, None, settings)
    found = correct(replace(WEIGHTS[level, threshold], batch_normalize=normalize), case)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


PRESETS = sorted(path.stem for path in (CONF / "correction").glob("*.yaml") if path.stem != "none")


def preset_objective(name: str) -> Objective:
    words = ["experiment=quickstart", "algorithm=grpo", f"correction={name}", "run.dir=unused"]
    return build_objective(compose_config(check_overrides(words)))


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("decoupled")])
@pytest.mark.parametrize("spread", [5e-4, 0.5])
def test_presets_have_the_weights_of_verl(peer, name, spread):
    case = correction_case(0, spread)
    weights, kept = peer(verl_correction, case, name, {})
    np.testing.assert_allclose(correct(preset_objective(name).correction, case), weights * kept, rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("bypass")])
@pytest.mark.parametrize("spread", [5e-4, 0.5])
def test_presets_of_the_bypass_mode_have_the_loss_and_the_gradient_of_verl(peer, name, spread):
    """verl leaves rejected tokens out of the denominator of the loss, and mrl does not."""
    case = correction_case(0, spread)
    case.logprobs[:] = case.old  # so that the ratio of the current policy to the engine's policy has this spread
    expected, slope, kept = peer(verl_bypass_loss, case, name, TOKEN)
    value, gradient = loss_and_gradient(preset_objective(name), case, np.full(len(case.old), 1 / kept))
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)
    if "geo_rs" in name or ("k3_rs" in name and spread > 0.1):
        assert 0 < kept < len(case.old)


# Policy filtration


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_responses_are_drawn_as_often_as_in_verl(peer, method):
    rewards = np.array([0.5, 1.0, -2.0, 0.0, 1.5, -2.0])
    drawn = peer(verl_filtration, rewards, method, 1.5, 3000)
    weights = PolicyFiltration(method, 1.5, per_group=False).weights(rewards)
    np.testing.assert_allclose(weights / weights.sum(), drawn, atol=4 * math.sqrt(0.25 / 18_000))
