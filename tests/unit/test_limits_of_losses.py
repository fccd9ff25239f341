"""What keeps policy and critic near their old state: clips, divergences, pulls and weights of single losses."""

import numpy as np
import pytest
import torch
from loss_cases import clip, loss_and_gradient, loss_inputs, make_case, slopes

from mrl.algorithms.losses import DPPO, DRO, ClipCov, PPOClip, ValueLoss, binary_kl
from mrl.algorithms.sequence_losses import GMPO, GSPO, TOPR, VESPO, GSPOToken


@pytest.mark.parametrize("seed", range(4))
def test_the_metric_clip_fraction_marks_the_tokens_whose_loss_the_clip_changes(seed):
    """As in verl's pg_clipfrac, a ratio above the upper bound counts if A > 0, a ratio below the lower bound if A < 0."""
    case = make_case(seed)
    ratio = np.exp(case.logprobs - case.old)
    sums = np.bincount(case.rows, case.logprobs - case.old, len(case.lengths))
    means = np.exp(sums / np.maximum(case.lengths, 1))[case.rows]
    up, down = case.advantages > 0, case.advantages < 0
    outside = lambda values, low, high: down & (values < 1 - low) | up & (values > 1 + high)  # noqa: E731
    expected = {
        PPOClip(clip_low=0.2, clip_high=0.3): outside(ratio, 0.2, 0.3),
        GSPO(clip_low=0.1, clip_high=0.2): outside(means, 0.1, 0.2),
        GSPOToken(clip_low=0.1, clip_high=0.2): outside(means, 0.1, 0.2),
        ClipCov(clip_low=0.2, clip_high=0.3): outside(ratio, 0.2, 0.3),
        GMPO(clip_low=0.1, clip_high=0.2): outside(ratio, 1 - np.exp(-0.1), np.exp(0.2) - 1),
        TOPR(): (case.advantages < 0) & (sums[case.rows] > 0),
    }
    for loss, marked in expected.items():
        found = loss(loss_inputs(case))[1]["loss/clip_fraction"]
        np.testing.assert_array_equal(found.numpy() > 0, marked, err_msg=type(loss).__name__)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    case = make_case(0, spread=3.0)
    loss, numbers = PPOClip(dual_clip=3.0)(loss_inputs(case))
    bad = case.advantages < 0
    assert (loss.numpy()[bad] <= -3.0 * case.advantages[bad] + 1e-12).all()
    free, _ = PPOClip()(loss_inputs(case))
    np.testing.assert_array_equal(numbers["loss/dual_clip_fraction"].numpy() > 0, free.numpy() != loss.numpy())
    with pytest.raises(ValueError, match=r"dual_clip=1.0: must be greater than 1"):
        PPOClip(dual_clip=1.0)


@pytest.mark.parametrize("clip_value", [0.0, 0.2])
def test_value_loss_is_half_the_larger_square(clip_value):
    rng = np.random.default_rng(0)
    old, returns = rng.normal(size=20), rng.normal(size=20)
    values = torch.tensor(old + rng.normal(scale=0.3, size=20), requires_grad=True)

    def reference(v):
        found = []
        for x, o, r in zip(v, old, returns, strict=True):
            kept = o + clip(x - o, -clip_value, clip_value) if clip_value else x
            found.append(max((x - r) ** 2, (kept - r) ** 2) / 2)
        return found

    loss = ValueLoss(clip_value)(values, torch.tensor(returns), torch.tensor(old))
    np.testing.assert_allclose(loss.detach().numpy(), reference(values.tolist()), rtol=1e-12)
    loss.sum().backward()
    by_differences = slopes(lambda v: sum(reference(v)), values.detach().numpy().copy())
    np.testing.assert_allclose(values.grad.numpy(), by_differences, rtol=1e-6, atol=1e-8)


def test_the_divergences_of_dppo_are_those_of_two_outcomes():
    """Total variation and KL of two Bernoulli distributions, also if the old or the new probability is 1."""
    probabilities = torch.tensor([[0.2, 0.3], [0.3, 0.2], [1 - 1e-6, 0.5], [0.5, 1 - 1e-6]], dtype=torch.float64)
    old, new = probabilities.log().unbind(1)
    both = torch.stack([probabilities, 1 - probabilities], 2)  # [4, (old, new), two outcomes]
    expected = (both[:, 0] * (both[:, 0] / both[:, 1]).log()).sum(1)
    torch.testing.assert_close(binary_kl(old, new), expected, rtol=1e-9, atol=0)
    certain = binary_kl(torch.tensor([0.0, 0.0, -50.0]), torch.tensor([0.0, -1.0, 0.0]))
    assert certain.isfinite().all() and certain[0] == 0 and certain[1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="divergence='js': expected tv or kl"):
        DPPO(divergence="js")


def test_dro_pulls_a_response_without_advantage_towards_the_old_policy():
    case = make_case(1)
    case.advantages[:] = 0.0
    _, gradient = loss_and_gradient(DRO(beta=0.3), case, np.ones(len(case.old)))
    np.testing.assert_allclose(gradient, 0.3 * (case.logprobs - case.old), rtol=1e-12)
    with pytest.raises(ValueError, match=r"beta=0\.0: must be greater than 0"):
        DRO(beta=0.0)


def test_the_weight_of_vespo_is_largest_near_the_old_policy():
    """phi(w) = w^k e^(lambda (1 - w)) is 1 at w = 1, has its maximum at w = k / lambda, and tends to 0 on both sides."""
    case = make_case(0, lengths=(1,) * 7)
    ratios = np.array([1e-8, 0.1, 2 / 3, 1.0, 1.5, 4.0, 1e9])
    case.logprobs[:], case.advantages[:] = case.old + np.log(ratios), 1.0
    phi = VESPO()(loss_inputs(case))[1]["loss/response_weight"].numpy()
    np.testing.assert_allclose(phi[:6], ratios[:6] ** 2 * np.exp(3 * (1 - ratios[:6])), rtol=1e-6)
    assert (
        phi[3] == 1
        and phi.argmax() == 2
        and phi[6] == 0
        and (np.diff(phi[:3]) > 0).all()
        and (np.diff(phi[2:]) < 0).all()
    )
    with pytest.raises(ValueError, match=r"lambda_negative=-1: must be 0 or more"):
        VESPO(lambda_negative=-1)
