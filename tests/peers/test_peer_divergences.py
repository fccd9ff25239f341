"""Divergences between teacher and policy have the values and gradients of trl's GKDTrainer and DistillationTrainer, and of verl.

verl's forward_kl_topk has no term for the event "any other token". The tests show the consequences, and that nothing else
differs.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peer_divergences import (
    Found,
    Models,
    found,
    tensors,
    trl_chunked_divergence,
    trl_divergence,
    verl_forward_kl_topk,
)
from torch import Tensor

from parallel.distillation import divergence_of, linear_divergence, linear_top_k, linear_top_k_rest_logprobs
from parallel.trainer_config import Divergence

pytestmark = pytest.mark.extended
POSITIONS, VOCAB = 12, 23
SLOPES = np.linspace(-1.0, 2.0, POSITIONS)  # weights of the positions in the loss
ONE_PROCESS = SimpleNamespace(rank=lambda: 0, size=lambda: 1)  # stand-in for a process group
# mrl's divergence -> trl's beta
BETAS = {
    Divergence("forward_kl"): 0.0,
    Divergence("js", 0.1): 0.1,
    Divergence("js", 0.5): 0.5,
    Divergence("js", 0.9): 0.9,
    Divergence("reverse_kl"): 1.0,
}
each_divergence = pytest.mark.parametrize("divergence", BETAS, ids=lambda each: f"{each.kind} {each.beta}")
each_temperature = pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])


def make_models(seed: int = 0, scale: float = 0.8) -> Models:
    """Return random output layers and hidden states. The hidden sizes of policy and teacher differ."""
    rng = np.random.default_rng(seed)
    shapes = (POSITIONS, 8), (VOCAB, 8), (POSITIONS, 6), (VOCAB, 6)
    return Models(*(rng.normal(size=shape) * scale for shape in shapes))


def whole_vocabulary(
    models: Models, divergence: Divergence, temperature: float, dtype: torch.dtype = torch.float64, chunk: int = 6
) -> Found:
    hidden, weight, *teacher = tensors(models, dtype)
    values = linear_divergence(hidden, weight, *teacher, ONE_PROCESS, VOCAB, divergence, temperature, chunk)
    return found(values, SLOPES, hidden, weight)


def buckets(models: Models, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities [T, k + 1] of teacher and policy, the ids [T, k], and the policy's hidden states and weight."""
    hidden, weight, *teacher = tensors(models)
    log_t, ids = linear_top_k(*teacher, ONE_PROCESS, VOCAB, k, temperature, chunk_size=5)
    log_s = linear_top_k_rest_logprobs(hidden, weight, ids, ONE_PROCESS, VOCAB, temperature, chunk_size=5)
    return log_t, log_s, ids, hidden, weight


def check_equal(ours: Found, theirs: Found, rtol: float, atol: float) -> None:
    """Check values and gradients. `atol` is relative to the largest number of each array."""
    for name, mine, other in zip(Found._fields, ours, theirs, strict=True):
        size = np.abs(other).max()
        assert size > 1e-3, "arrays of zeros would prove nothing"
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol * size, err_msg=name)


@each_temperature
@each_divergence
def test_divergences_of_the_whole_vocabulary_are_those_of_the_gkd_trainer(peer, divergence, temperature):
    models = make_models()
    theirs = peer(trl_divergence, models, SLOPES, BETAS[divergence], temperature)
    for chunk in (2, 6, 100):
        ours = whole_vocabulary(models, divergence, temperature, chunk=chunk)
        check_equal(ours, theirs, rtol=1e-9, atol=1e-12)


@each_divergence
def test_divergences_of_hidden_states_are_those_of_the_distillation_trainer(peer, divergence):
    """trl computes the divergences in float32. mrl computes them in float32 and in float64 here."""
    models = make_models(seed=1)
    theirs = peer(trl_chunked_divergence, models, SLOPES, BETAS[divergence], 0.7)
    check_equal(whole_vocabulary(models, divergence, 0.7, torch.float32), theirs, rtol=1e-4, atol=1e-5)
    check_equal(whole_vocabulary(models, divergence, 0.7), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 20])
@each_temperature
@each_divergence
def test_divergences_of_k_tokens_are_those_of_the_gkd_trainer_for_k_plus_1_events(peer, divergence, temperature, k):
    models = make_models(seed=2)
    log_t, log_s, ids, *inputs = buckets(models, k, temperature)
    theirs = peer(trl_divergence, models, SLOPES, BETAS[divergence], temperature, ids.numpy())
    check_equal(found(divergence_of(divergence, log_t, log_s), SLOPES, *inputs), theirs, rtol=1e-8, atol=1e-11)


@each_divergence
def test_with_all_tokens_top_k_is_the_gkd_trainers_divergence_of_the_whole_vocabulary(peer, divergence):
    models = make_models(seed=3)
    log_t, log_s, _, *inputs = buckets(models, VOCAB)
    theirs = peer(trl_divergence, models, SLOPES, BETAS[divergence], 1.0)
    check_equal(found(divergence_of(divergence, log_t, log_s), SLOPES, *inputs), theirs, rtol=1e-8, atol=1e-11)


def term_of_any_other_token(log_t: Tensor, log_s: Tensor) -> Tensor:
    """Return the term [T] of forward_kl that verl does not have."""
    return log_t[:, -1].exp() * (log_t[:, -1] - log_s[:, -1])


@pytest.mark.parametrize("k", [1, 5, 20])
def test_forward_kl_of_k_tokens_is_that_of_verl_and_the_term_of_any_other_token(peer, k):
    """verl computes in float32. By default, it also raises log-probabilities below -10 to -10."""
    models = make_models(seed=4)
    log_t, log_s, ids, *inputs = buckets(models, k)
    theirs, teacher_mass, policy_mass = peer(verl_forward_kl_topk, models, SLOPES, ids.numpy())
    without = divergence_of(Divergence("forward_kl"), log_t, log_s) - term_of_any_other_token(log_t, log_s)
    check_equal(found(without, SLOPES, *inputs), theirs, rtol=1e-4, atol=1e-5)
    for logprobs, mass in ((log_t, teacher_mass), (log_s, policy_mass)):
        np.testing.assert_allclose(1 - logprobs[:, -1].detach().exp().numpy(), mass, rtol=1e-6)
    unbounded, *_ = peer(verl_forward_kl_topk, models, SLOPES, ids.numpy(), -100.0)
    np.testing.assert_array_equal(unbounded.values, theirs.values, "no log-probability is below -100")


def test_without_the_event_of_any_other_token_the_loss_of_a_sharper_policy_is_negative(peer):
    """In training, verl replaces a negative loss of a token by 0, so the token has no gradient."""
    models = make_models(seed=5)
    sharper = models._replace(hidden=2 * models.teacher_hidden, weight=models.teacher_weight)
    log_t, log_s, ids, *_ = buckets(sharper, 3)
    theirs, *_ = peer(verl_forward_kl_topk, sharper, SLOPES, ids.numpy())
    assert theirs.values.min() < -0.01
    assert divergence_of(Divergence("forward_kl"), log_t, log_s).min() > 0


def test_without_the_event_of_any_other_token_equal_models_have_a_gradient(peer):
    models = make_models(seed=6)
    equal = models._replace(teacher_hidden=models.hidden, teacher_weight=models.weight)
    log_t, log_s, ids, *inputs = buckets(equal, 3)
    ours = found(divergence_of(Divergence("forward_kl"), log_t, log_s), SLOPES, *inputs)
    theirs, mass, _ = peer(verl_forward_kl_topk, equal, SLOPES, ids.numpy())
    assert max(np.abs(array).max() for array in ours) < 1e-12
    assert np.abs(theirs.values).max() < 1e-6 and np.abs(theirs.d_hidden).max() > 0.01
    np.testing.assert_allclose(theirs.d_hidden, gradient_of_equal_models(equal, ids, mass), atol=1e-5)


def gradient_of_equal_models(models: Models, ids: Tensor, mass: NDArray) -> NDArray:
    """Return verl's gradient [T, H] of the hidden states if both models are equal.

    The gradient of the logit of token j is (mass - 1) s_j if the token is one of the k tokens, and mass s_j otherwise.
    """
    s = (torch.tensor(models.hidden) @ torch.tensor(models.weight).T).softmax(-1)
    is_chosen = torch.zeros_like(s).scatter(1, ids, 1.0)
    d_logits = (torch.tensor(mass)[:, None] - is_chosen) * s * torch.tensor(SLOPES)[:, None]
    return (d_logits @ torch.tensor(models.weight)).numpy()
