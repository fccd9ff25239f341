"""Losses, advantages, corrections and the entropy bonus give the values and gradients of trl's GRPOTrainer and RLOOTrainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import loss_and_gradient, loss_inputs, make_case
from peer_functions import trl_advantages, trl_entropy_steps, trl_loss, trl_rloo_advantages, trl_weights

from mrl.algorithms.advantage_pipeline import AdvantagePipeline
from mrl.algorithms.advantages import GDPO, GRPO, RLOO
from mrl.algorithms.corrections import ImportanceSampling, OffPolicyMask
from mrl.algorithms.inputs import AdvantageInputs, ScoredBatch
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import CISPO, SAPO, PPOClip, TopEntropy
from mrl.algorithms.objective import AGGREGATIONS, EntropyBonus, Objective, TokenWeighting
from mrl.algorithms.parts import Coefficients
from mrl.algorithms.sequence_losses import GSPO, VESPO

pytestmark = pytest.mark.extended
SEEDS = range(3)
CLIP = {"epsilon": 0.2, "epsilon_high": 0.3}
MAX_TOKENS = 9
# name -> (loss of mrl, aggregation of mrl, fields of trl's GRPOConfig)
LOSSES = {
    "grpo": (PPOClip(0.2, 0.3), "sequence_mean", CLIP),
    "bnpo": (PPOClip(0.2, 0.3), "token_mean", CLIP | {"loss_type": "bnpo"}),
    "dapo": (PPOClip(0.2, 0.3), "token_mean", CLIP | {"loss_type": "dapo"}),
    "dr_grpo": (PPOClip(0.2, 0.3), "fixed_length", CLIP | {"loss_type": "dr_grpo"}),
    "two_sided": (PPOClip(0.2, 0.3, dual_clip=1.5), "sequence_mean", CLIP | {"delta": 1.5}),
    "gspo": (GSPO(0.1, 0.2), "sequence_mean", {"epsilon": 0.1, "importance_sampling_level": "sequence"}),
    "luspo": (
        GSPO(0.1, 0.2),
        "sequence_sum",
        {"epsilon": 0.1, "importance_sampling_level": "sequence", "loss_type": "luspo"},
    ),
    "cispo": (CISPO(1.0, 0.4), "token_mean", {"epsilon_high": 1.4, "loss_type": "cispo"}),
    "sapo": (SAPO(1.0, 1.5), "sequence_mean", {"loss_type": "sapo", "sapo_temperature_neg": 1.5}),
    "vespo": (VESPO(), "token_mean", {"loss_type": "vespo"}),
    "vespo_with_other_constants": (
        VESPO(1.0, 0.5, 0.0, 1.0),
        "token_mean",
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 0.0,
            "vespo_lambda_neg": 1.0,
        },
    ),
    "k3": (Objective(PPOClip(), kl=KLPenalty(0.3, "k3")), "sequence_mean", {"beta": 0.3}),
    "unbiased_kl": (
        Objective(PPOClip(), kl=KLPenalty(0.3, "unbiased")),
        "sequence_mean",
        {"beta": 0.3, "use_bias_correction_kl": True},
    ),
    "off_policy_mask": (Objective(PPOClip(), OffPolicyMask(0.1)), "sequence_mean", {"off_policy_mask_threshold": 0.1}),
}


def weighted(case, aggregation: str) -> np.ndarray:
    """Return the loss weight [R] of each token in mrl."""
    return TokenWeighting(AGGREGATIONS[aggregation], MAX_TOKENS)(case.lengths, case.lengths)[case.rows]


def case_with_entropies(seed: int):
    case = make_case(seed, lengths=(3, 1, 5, 2, 4) * 2)
    case.columns["entropies"] = np.random.default_rng(seed).exponential(size=30).astype(np.float32)
    return case


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_losses_and_gradients_are_those_of_trl(peer, name, seed):
    loss, aggregation, settings = LOSSES[name]
    case = case_with_entropies(seed)
    expected, slope = peer(trl_loss, case, settings)
    weights = weighted(case, aggregation)
    value, gradient = loss_and_gradient(loss, case, weights)
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "sapo", "vespo"])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.55])
def test_the_tokens_with_the_largest_entropy_are_those_of_trl(peer, name, fraction):
    """trl takes the quantile over a micro-batch of all ranks, mrl over a step. Here, the step is one micro-batch."""
    inner, aggregation, settings = LOSSES[name]
    loss, case = TopEntropy(inner, fraction), case_with_entropies(0)
    batch = AdvantageInputs(np.zeros(30), np.zeros(10, int), case.lengths, {"entropies": case.columns["entropies"]})
    case.columns.update(loss.precomputed_columns(batch, case.advantages, np.random.default_rng(0)))
    assert 0 < case.columns["top_entropy"].sum() < 30
    expected, slope = peer(trl_loss, case, settings | {"top_entropy_quantile": fraction})
    weights = weighted(case, aggregation)
    value, gradient = loss_and_gradient(loss, case, weights)
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 1.3), (0.8, 1.3), (0.8, None)])
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights_and_their_losses_are_those_of_trl(peer, level, mode, low, high, seed):
    case, prefix = case_with_entropies(seed), "vllm_importance_sampling_"
    settings = {f"{prefix}mode": f"{level}_{mode}", f"{prefix}clip_min": low, f"{prefix}clip_max": high}
    expected = peer(trl_weights, case, settings)
    assert len(np.unique(expected)) > 1
    correction = ImportanceSampling(level, mode, low or 0.0, high or float("inf"))
    np.testing.assert_allclose(correction(loss_inputs(case))[0].numpy(), expected, rtol=1e-9)
    total, slope = peer(trl_loss, case, LOSSES["grpo"][2], expected)
    value, gradient = loss_and_gradient(Objective(PPOClip(0.2, 0.3), correction), case, weighted(case, "sequence_mean"))
    assert value == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_vespo_with_the_ratio_to_the_engine_is_that_of_trl(peer, seed):
    """trl multiplies a response's ratio by pi_old / pi_rollout of its tokens. In mrl, the engine's policy is the old policy."""
    case = case_with_entropies(seed)
    total, slope = peer(trl_loss, case, {"loss_type": "vespo"}, np.exp(case.old - case.rollout))
    objective = Objective(VESPO(), rollout_logprobs_as_old=True)
    value, gradient = loss_and_gradient(objective, case, weighted(case, "token_mean"))
    assert value == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_entropy_bonus_and_its_coefficient_are_those_of_trl(peer, adaptive):
    case, rng = case_with_entropies(0), np.random.default_rng(1)
    levels = [1.5, 0.7, 0.9, 0.6, 0.5, 0.8, 1.4, 1.2, 1.3, 1.6, 1.1, 1.5, 0.4]
    entropies = np.array([level * values / values.mean() for level in levels for values in [rng.exponential(size=30)]])
    settings = {"entropy_coef": 0.02, "use_adaptive_entropy": adaptive, "loss_type": "dapo"}
    adaptation = {"entropy_target": 1.0, "entropy_coef_delta": 0.01, "entropy_coef_max": 0.05}
    losses, coefs, slopes = peer(trl_entropy_steps, case, entropies, settings | adaptation)
    bonus = EntropyBonus(0.02, 1.0, 0.01, 0.05) if adaptive else EntropyBonus(0.02)
    coefficients, weights = Coefficients({"entropy": bonus}), torch.tensor(weighted(case, "token_mean"))
    for values, loss, coef, slope in zip(entropies, losses, coefs, slopes, strict=True):
        entropy = torch.tensor(values, requires_grad=True)
        objective = Objective(PPOClip(), entropy=bonus).with_coefs(coefficients.current())
        found = (objective(replace(loss_inputs(case), entropy=entropy))[0] * weights).sum()
        assert found.item() == pytest.approx(loss, rel=1e-9)
        gradient = torch.autograd.grad(found, entropy)[0] if found.requires_grad else torch.zeros(30)
        np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-9)
        coefficients.adapt({"policy/entropy_mean": float(values.mean())}, samples=10)
        assert coefficients.values["entropy"] == pytest.approx(coef, abs=1e-12)
    assert not adaptive or {0.0, 0.05} <= set(np.round(coefs, 9)), "both bounds are reached"


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_advantages_are_those_of_trl(peer, beta, seed):
    case = make_case(seed, lengths=(3, 1, 5, 2) * 3)
    rewards, groups = np.random.default_rng(seed).integers(0, 3, 12) / 2, np.repeat(np.arange(3), 4)
    expected = peer(trl_rloo_advantages, rewards, 4, case, beta)
    pipeline = AdvantagePipeline(RLOO(), PPOClip(), KLPenalty(beta, "k1"))
    columns = {"old_logprobs": case.old, "ref_logprobs": case.columns["ref_logprobs"]}
    found = pipeline(ScoredBatch(rewards, groups, case.lengths, np.zeros(12, bool)), columns, beta, [0])
    np.testing.assert_allclose(found.columns["advantages"], expected[case.rows], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_are_those_of_trl(peer, scale, seed):
    rewards = np.random.default_rng(seed).integers(0, 3, (12, 2)) / 2
    rewards[:4] = 0.5  # a group of equal rewards
    expected = peer(trl_advantages, rewards, 4, {"scale_rewards": scale})
    batch = AdvantageInputs(rewards.sum(1), np.repeat(np.arange(3), 4), np.ones(12, int))
    found = GRPO(scale_rewards=scale)(batch)
    assert np.abs(expected).max() > 0.1 and (found[:4] == 0).all()
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_several_rewards_are_those_of_trl(peer, seed):
    rewards = np.random.default_rng(seed).normal(size=(12, 2))
    expected = peer(trl_advantages, rewards, 4, {"multi_objective_aggregation": "normalize_then_sum"})
    parts = {"first": rewards[:, 0], "second": rewards[:, 1]}
    batch = AdvantageInputs(rewards.sum(1), np.repeat(np.arange(3), 4), np.ones(12, int), reward_parts=parts)
    np.testing.assert_allclose(GDPO()(batch), expected, rtol=1e-6, atol=1e-9)
