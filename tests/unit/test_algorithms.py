"""Advantages, losses and weights against independent float64 references."""

import numpy as np
import pytest
import torch

from mrl.algorithms.advantages import GRPO
from mrl.algorithms.losses import CrossEntropy, LossInputs, PPOClip
from mrl.algorithms.reduce import token_weights

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 2.0])
GROUPS = np.array([7, 7, 7, 7, 3, 3, 3, 3, 5])


def test_grpo_normalises_within_each_group():
    found = GRPO(eps=1e-4)(REWARDS, GROUPS)
    expected = np.zeros(9)
    for group in set(GROUPS.tolist()):
        rows = np.flatnonzero(group == GROUPS)
        if len(rows) > 1:
            r = REWARDS[rows]
            expected[rows] = (r - r.mean()) / (r.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (found[4:] == 0).all()  # a group without variance, and a group of one


def test_grpo_without_std_only_centres():
    np.testing.assert_allclose(GRPO(normalize_std=False)(REWARDS, GROUPS)[:4], [0.5, -0.5, -0.5, 0.5])


def test_grpo_does_not_care_about_the_order_of_rows():
    order = np.random.default_rng(0).permutation(9)
    np.testing.assert_array_equal(GRPO()(REWARDS[order], GROUPS[order]), GRPO()(REWARDS, GROUPS)[order])


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 1.25, 2.0])
def test_ppo_clip_follows_equation_7(ratio, advantage):
    logprobs = torch.tensor([np.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, report = PPOClip(clip_low=0.2, clip_high=0.3)(LossInputs(logprobs, zero, torch.tensor([advantage]), zero))
    clipped = min(max(ratio, 0.8), 1.3)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage), rel=1e-6)
    assert report["loss/clip_fraction"].item() == float(clipped != ratio)
    loss.sum().backward()
    free = ratio * advantage <= clipped * advantage
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage if free else 0.0, rel=1e-6)


def test_on_policy_the_gradient_is_that_of_plain_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = PPOClip()(LossInputs(logprobs, logprobs.detach(), torch.tensor([2.0, -3.0]), torch.zeros(2)))
    loss.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]


def test_cross_entropy_is_negative_log_likelihood():
    loss, _ = CrossEntropy()(LossInputs(torch.tensor([-1.0, -0.5]), torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    assert loss.tolist() == [1.0, 0.5]


def test_token_weights_give_the_declared_means():
    lengths, losses = np.array([1, 3, 4]), [np.array([2.0]), np.arange(3.0), np.ones(4)]
    weigh = lambda how: sum((w * x).sum() for w, x in zip(token_weights(lengths, how), losses, strict=True))  # noqa: E731
    assert weigh("token_mean") == pytest.approx(np.concatenate(losses).mean())
    assert weigh("sequence_mean") == pytest.approx(np.mean([x.mean() for x in losses]))
    with pytest.raises(ValueError, match="expected one of token_mean"):
        token_weights(lengths, "mean")
