"""Losses and advantages give the values and gradients of trl's GRPOTrainer."""

import numpy as np
import pytest
from loss_cases import loss_and_gradient, make_case
from peer_functions import trl_advantages, trl_loss

from mrl.algorithms.advantages import GDPO, GRPO
from mrl.algorithms.corrections import OffPolicyMask
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import CISPO, SAPO, PPOClip, TopEntropy
from mrl.algorithms.objective import AGGREGATIONS, Objective, TokenWeighting
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
    """In trl the quantile is over a micro-batch of all ranks. If the step is one micro-batch, the tokens are the same."""
    inner, aggregation, settings = LOSSES[name]
    loss, case = TopEntropy(inner, fraction), case_with_entropies(0)
    batch = AdvantageInputs(np.zeros(30), np.zeros(10, int), case.lengths, {"entropies": case.columns["entropies"]})
    case.columns.update(loss.extra_columns(batch, case.advantages, np.random.default_rng(0)))
    assert 0 < case.columns["top_entropy"].sum() < 30
    expected, slope = peer(trl_loss, case, settings | {"top_entropy_quantile": fraction})
    weights = weighted(case, aggregation)
    value, gradient = loss_and_gradient(loss, case, weights)
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-9)


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
    batch = AdvantageInputs(rewards.sum(1), np.repeat(np.arange(3), 4), np.ones(12, int), parts=parts)
    np.testing.assert_allclose(GDPO()(batch), expected, rtol=1e-6, atol=1e-9)
