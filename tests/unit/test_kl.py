"""KL estimates have the values of their formulas. Enumerating a small distribution gives their mean value and gradient."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case, slopes

from mrl.algorithms.kl import KL_ESTIMATORS, KLPenalty

FORMULAS = {
    "k1": lambda p, q: math.log(p / q),
    "k2": lambda p, q: math.log(p / q) ** 2 / 2,
    "k3": lambda p, q: q / p - 1 - math.log(q / p),
    "abs": lambda p, q: abs(math.log(p / q)),
}


def forward(p, q):
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def distributions(seed, number=3, size=6):
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.normal(size=size), requires_grad=True) for _ in range(number)]


def expected(kind, seed=0, on_policy=True):
    """Return the expected estimate, its gradient with respect to the policy's logits, and the three distributions."""
    logits, ref, other = distributions(seed)
    logp, logref = logits.log_softmax(0), ref.log_softmax(0).detach()
    old = (logits if on_policy else other).log_softmax(0).detach()
    case = make_case(0, lengths=(6,))
    case.old[:], case.columns["ref_logprobs"][:] = old.numpy(), logref.numpy()
    mean = (old.exp() * KLPenalty(kind=kind)(loss_inputs(case, logp))).sum()
    mean.backward()
    return mean.item(), logits.grad.numpy(), logp.exp().detach().numpy(), logref.exp().numpy(), old.exp().numpy()


@pytest.mark.parametrize("kind", KL_ESTIMATORS)
def test_values_follow_the_formulas(kind):
    case = make_case(2)
    ref, base = case.columns["ref_logprobs"], kind.rstrip("+") if kind != "unbiased" else "k3"
    by_hand = np.array([FORMULAS[base](math.exp(x), math.exp(y)) for x, y in zip(case.logprobs, ref, strict=True)])
    np.testing.assert_allclose(KLPenalty(kind=kind).values(case.logprobs, ref), by_hand, rtol=1e-9)
    in_loss = KLPenalty(kind=kind)(loss_inputs(case)).numpy()
    weights = np.exp(case.logprobs - case.old) if kind == "unbiased" else 1.0
    np.testing.assert_allclose(in_loss, weights * by_hand, rtol=1e-9)


def test_the_default_kind_is_k3_in_the_loss_and_k1_in_the_reward():
    case = make_case(2)
    ref, inputs = case.columns["ref_logprobs"], loss_inputs(case)
    np.testing.assert_array_equal(KLPenalty()(inputs).numpy(), KLPenalty(kind="k3")(inputs).numpy())
    np.testing.assert_array_equal(
        KLPenalty().values(case.logprobs, ref), KLPenalty(kind="k1").values(case.logprobs, ref)
    )


@pytest.mark.parametrize("kind", [k for k in KL_ESTIMATORS if k not in ("k2", "abs", "abs+")])
def test_all_estimates_except_k2_and_abs_have_the_right_mean(kind):
    mean, _, p, q, _ = expected(kind)
    assert mean == pytest.approx(forward(p, q), rel=1e-9)


def test_k2_has_another_mean():
    mean, _, p, q, _ = expected("k2")
    assert mean == pytest.approx(sum(x * math.log(x / y) ** 2 / 2 for x, y in zip(p, q, strict=True)))
    assert abs(mean - forward(p, q)) > 0.01


def slope_of_kl(p, q):
    """Return the gradient of KL(p || q) with respect to the logits of p."""
    kl = forward(p, q)
    return np.array([x * (math.log(x / y) - kl) for x, y in zip(p, q, strict=True)])


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+", "abs+", "unbiased"])
def test_gradient_on_average_is_that_of_kl_from_the_reference(kind):
    _, gradient, p, q, _ = expected(kind)
    np.testing.assert_allclose(gradient, slope_of_kl(p, q), rtol=1e-9, atol=1e-12)


def test_k1_has_no_gradient_on_average():
    np.testing.assert_allclose(expected("k1")[1], 0.0, atol=1e-14)


def test_k3_has_the_gradient_of_the_other_direction():
    _, gradient, p, q, _ = expected("k3")
    np.testing.assert_allclose(gradient, p - q, rtol=1e-9)  # gradient of KL(q || p) for the logits of p
    assert np.abs(gradient - slope_of_kl(p, q)).max() > 0.01


def test_abs_has_twice_the_gradient_of_the_total_variation_distance():
    """The expected gradient is a finite difference of sum |p - q| / 2, where p is the softmax of the policy's logits."""
    mean, gradient, p, q, _ = expected("abs")
    assert mean == pytest.approx(sum(x * abs(math.log(x / y)) for x, y in zip(p, q, strict=True)))

    def distance(logits):
        policy = np.exp(logits - logits.max())
        return np.abs(policy / policy.sum() - q).sum() / 2

    np.testing.assert_allclose(gradient, 2 * slopes(distance, np.log(p)), rtol=1e-6, atol=1e-9)
    assert expected("abs+")[0] == mean


def test_the_unbiased_kind_is_unbiased_for_samples_of_the_old_policy_too():
    mean, gradient, p, q, old = expected("unbiased", on_policy=False)
    assert np.abs(p - old).max() > 0.1
    assert mean == pytest.approx(forward(p, q), rel=1e-9)
    np.testing.assert_allclose(gradient, slope_of_kl(p, q), rtol=1e-9, atol=1e-12)
    for kind in ("k2", "k3+"):
        assert np.abs(expected(kind, on_policy=False)[1] - slope_of_kl(p, q)).max() > 0.01


def test_the_coefficient_follows_the_measured_kl_within_bounds():
    penalty = KLPenalty(coef=0.1, target=0.5, horizon=1000)
    assert penalty.next_coef(0.1, 0.5, 100) == 0.1
    assert penalty.next_coef(0.1, 0.55, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    assert penalty.next_coef(0.1, 5.0, 100) == pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))
    assert penalty.next_coef(0.1, 0.0, 100) == pytest.approx(0.1 * (1 - 0.2 * 100 / 1000))
    assert replace(penalty, target=None).next_coef(0.1, 5.0, 100) == 0.1


@pytest.mark.parametrize("samples", [4000, 5000, 100_000])
def test_the_coefficient_stays_positive_in_a_step_with_many_responses(samples):
    penalty = KLPenalty(coef=0.1, target=0.5, horizon=1000)
    assert penalty.next_coef(0.1, 0.0, samples) == pytest.approx(0.1 * 0.2)
    assert penalty.next_coef(0.1, 5.0, samples) == pytest.approx(0.1 * 1.8)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match=r"kind='k4': expected one of k1, k2, k3, abs, k1\+, k3\+, abs\+, unbiased"):
        KLPenalty(kind="k4")
    with pytest.raises(ValueError, match=r"target=0\.0: must be greater than 0"):
        KLPenalty(target=0.0)
    with pytest.raises(ValueError, match="horizon=0: must be greater than 0"):
        KLPenalty(target=0.1, horizon=0)
