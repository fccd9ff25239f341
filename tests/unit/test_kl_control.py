"""Coefficients of KL penalties over a run (Ziegler et al. 2019, 2.2)."""

import pytest

from mrl.algorithms.kl import KLControl, KLPenalty


def control(**penalties: KLPenalty) -> KLControl:
    return KLControl(penalties)


def test_a_constant_coefficient_does_not_change():
    kl = control(reward=KLPenalty(0.3))
    assert kl.coef("reward") == 0.3 and kl.coef("loss") == 0.0
    kl.adapt({"policy/kl_reward": 9.0}, samples=512)
    assert kl.metrics() == {"policy/kl_coef_reward": 0.3}
    assert kl.coef("reward") == 0.3


@pytest.mark.parametrize("measured, factor", [(0.1, 1.0), (0.11, 1.01), (9.0, 1.02), (0.0, 0.98), (0.095, 0.995)])
def test_an_adaptive_penalty_follows_the_clipped_error(measured, factor):
    """coef * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon)."""
    kl = control(loss=KLPenalty(0.5, target=0.1, horizon=1000))
    kl.adapt({"policy/kl_ref": measured}, samples=100)
    assert kl.coef("loss") == pytest.approx(0.5 * factor)


def test_each_penalty_has_its_own_coefficient():
    kl = control(reward=KLPenalty(1.0, target=1.0, horizon=10), loss=KLPenalty(2.0, target=1.0, horizon=10))
    kl.adapt({"policy/kl_reward": 2.0, "policy/kl_ref": 0.0}, samples=10)
    assert (kl.coef("reward"), kl.coef("loss")) == (pytest.approx(1.2), pytest.approx(1.6))


def test_a_restored_control_continues_with_its_coefficients():
    first, second = (control(reward=KLPenalty(1.0, target=1.0, horizon=10)) for _ in range(2))
    first.adapt({"policy/kl_reward": 5.0}, samples=10)
    second.load_state_dict(first.state_dict())
    assert second.coef("reward") == first.coef("reward") == pytest.approx(1.2)


def test_constant_and_new_coefficients_come_from_the_config():
    before = control(reward=KLPenalty(1.0, target=1.0, horizon=10), loss=KLPenalty(0.01))
    before.adapt({"policy/kl_reward": 5.0, "policy/kl_ref": 1.0}, samples=10)
    now = control(loss=KLPenalty(0.05))
    now.load_state_dict(before.state_dict())
    assert now.coef("loss") == 0.05 and now.coefs == {"loss": 0.05}
    added = control(reward=KLPenalty(2.0, target=1.0, horizon=10), loss=KLPenalty(0.3, target=1.0, horizon=10))
    added.load_state_dict({"reward": 1.2})
    assert added.coefs == {"reward": 1.2, "loss": 0.3}


@pytest.mark.parametrize("metrics", [{}, {"policy/kl_ref": float("nan")}])
@pytest.mark.parametrize("target", [None, 0.1])
def test_a_step_that_measured_no_kl_leaves_the_coefficient(metrics, target):
    kl = control(loss=KLPenalty(0.5, target=target))
    kl.adapt(metrics, samples=100)
    assert kl.coef("loss") == 0.5
