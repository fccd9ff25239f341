"""Losses that select tokens from the whole step: by the covariance of log-probability and advantage, and by the entropy."""

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case

from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.losses import ClipCov, KLCov, PPOClip, TopEntropy, covariances


def batch_of(size: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    old = (-rng.exponential(2.0, size)).astype(np.float32)
    lengths = np.array([size // 2, size - size // 2])
    return AdvantageInputs(np.zeros(size), np.array([0, 0]), lengths, {"old_logprobs": old}), rng.normal(
        size=size
    ).astype(np.float32)


def test_the_tokens_with_the_largest_entropy_of_the_whole_step_are_selected():
    batch, advantages = batch_of(500)
    entropies = np.random.default_rng(4).exponential(size=500).astype(np.float32)
    batch.columns["entropies"] = entropies
    rng = np.random.default_rng(0)

    def select(fraction):
        return TopEntropy(PPOClip(), fraction).precomputed_columns(batch, advantages, rng)["top_entropy"]

    chosen = select(0.2)
    assert set(np.flatnonzero(chosen)) == set(sorted(range(500), key=lambda t: -entropies[t])[:100])
    assert chosen.dtype == np.float32 and select(1.0).all() and select(0.0).sum() == 1
    equal = TopEntropy(PPOClip(), 0.2).precomputed_columns(
        AdvantageInputs(np.zeros(4), np.zeros(2, int), np.array([2, 2]), {"entropies": np.ones(4, np.float32)}),
        np.zeros(4, np.float32),
        rng,
    )
    assert equal["top_entropy"].all(), "all tokens with the entropy of the quantile are trained"
    for wrong in (20, 1.5, -0.1):
        with pytest.raises(ValueError, match=rf"fraction={wrong}: expected a number from 0 to 1"):
            TopEntropy(PPOClip(), wrong)


def test_the_restriction_to_the_largest_entropies_keeps_what_the_other_loss_declares():
    batch, advantages = batch_of(100)
    batch.columns["entropies"] = np.random.default_rng(4).exponential(size=100).astype(np.float32)
    both = TopEntropy(KLCov(fraction=0.1), 0.5).precomputed_columns(batch, advantages, np.random.default_rng(0))
    assert both.keys() == {"kl_cov", "top_entropy"} and both["kl_cov"].sum() == 10 and both["top_entropy"].sum() == 50
    assert TopEntropy(KLCov()).required_inputs == {"old_logprobs", "entropies"}
    assert not TopEntropy(KLCov()).zero_at_zero_advantage
    assert TopEntropy(PPOClip()).required_inputs == {"entropies"} and TopEntropy(PPOClip()).zero_at_zero_advantage
    _, metrics = TopEntropy(PPOClip())(loss_inputs(make_case(0)))
    assert metrics.keys() == PPOClip()(loss_inputs(make_case(0)))[1].keys()


def loop_covariances(advantages, logprobs):
    mean_a, mean_l = sum(map(float, advantages)) / len(advantages), sum(map(float, logprobs)) / len(logprobs)
    return [(float(a) - mean_a) * (float(b) - mean_l) for a, b in zip(advantages, logprobs, strict=True)]


def test_kl_cov_selects_the_largest_covariances_of_the_whole_rollout():
    batch, advantages = batch_of(500)
    cov = loop_covariances(advantages, batch.columns["old_logprobs"])
    np.testing.assert_allclose(covariances(advantages, batch.columns["old_logprobs"]), cov, rtol=1e-9, atol=1e-12)
    assert sum(cov) / len(cov) == pytest.approx(
        np.cov(advantages, batch.columns["old_logprobs"], ddof=0)[0, 1], rel=1e-4
    )
    column = KLCov(fraction=0.02).precomputed_columns(batch, advantages, np.random.default_rng(0))["kl_cov"]
    assert set(np.flatnonzero(column)) == set(sorted(range(500), key=lambda t: -cov[t])[:10])
    assert column.dtype == np.float32 and column.sum() == 10
    assert KLCov().precomputed_columns(batch, advantages, np.random.default_rng(0))["kl_cov"].sum() == 1  # at least one


def test_clip_cov_draws_from_the_covariances_between_its_bounds():
    batch, advantages = batch_of(500)
    cov = loop_covariances(advantages, batch.columns["old_logprobs"])
    candidates = {t for t in range(500) if 1.0 < cov[t] < 5.0}
    assert len(candidates) > 30

    def draw(seed, fraction):
        return ClipCov(fraction).precomputed_columns(batch, advantages, np.random.default_rng(seed))

    first, again, other = draw(1, 0.03)["clip_cov"], draw(1, 0.03)["clip_cov"], draw(2, 0.03)["clip_cov"]
    assert first.sum() == 15 and set(np.flatnonzero(first)) <= candidates
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(np.flatnonzero(draw(0, 1.0)["clip_cov"])) == candidates
    assert draw(0, 1e-9)["clip_cov"].sum() == 1
    none = ClipCov(low=1e6, high=1e7).precomputed_columns(batch, advantages, np.random.default_rng(0))
    assert none["clip_cov"].sum() == 0


@pytest.mark.parametrize("loss", [ClipCov(), KLCov(), TopEntropy(PPOClip())])
def test_selecting_from_no_tokens_selects_none(loss):
    nothing = np.zeros(0, np.float32)
    columns = {"old_logprobs": nothing, "entropies": nothing}
    empty = AdvantageInputs(np.zeros(0), np.zeros(0, int), np.zeros(0, int), columns)
    (column,) = loss.precomputed_columns(empty, np.zeros(0, np.float32), np.random.default_rng(0)).values()
    assert column.shape == (0,)


def test_kl_cov_knows_two_estimates():
    with pytest.raises(ValueError, match="kl='k9': expected k3 or abs"):
        KLCov(kl="k9")


def test_kl_cov_estimate_has_the_gradient_of_the_divergence_from_the_old_policy():
    """On average over samples of the old policy, r - 1 - log r has the value and the gradient of KL(old || pi)."""
    rng = np.random.default_rng(0)
    logits, old_logits = torch.tensor(rng.normal(size=5), requires_grad=True), torch.tensor(rng.normal(size=5))
    logp, old = logits.log_softmax(0), old_logits.log_softmax(0)
    case = make_case(0, lengths=(5,))
    case.old[:], case.advantages[:], case.columns["kl_cov"][:] = old.numpy(), 0.0, 1.0
    loss, _ = KLCov()(loss_inputs(case, logp))
    (old.exp() * loss).sum().backward()
    p, q = old.exp().numpy(), logp.exp().detach().numpy()
    assert (old.exp() * loss).sum().item() == pytest.approx(sum(p * (np.log(p) - np.log(q))), rel=1e-9)
    np.testing.assert_allclose(logits.grad.numpy(), q - p, rtol=1e-9)
