"""How coefficients of KL penalties (Ziegler et al. 2019, 2.2) and entropy bonuses (He et al. 2025) adapt during a run."""

import json

import pytest

from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.objective import EntropyBonus
from mrl.algorithms.parts import COEF_METRICS, TERM_METRICS, Coefficients
from mrl.core.metrics import check


def coefficients(**terms: KLPenalty | EntropyBonus) -> Coefficients:
    return Coefficients(terms)


def test_the_metrics_of_all_terms_are_declared():
    assert TERM_METRICS.keys() == COEF_METRICS.keys()
    check(dict.fromkeys([*TERM_METRICS.values(), *COEF_METRICS.values()], 1.0))


def test_a_constant_coefficient_does_not_change():
    coefs = coefficients(kl_reward=KLPenalty(0.3), entropy=EntropyBonus(0.01))
    for _ in range(2):
        assert coefs.current() == {"kl_reward": 0.3, "entropy": 0.01}
        assert coefs.metrics() == {"policy/kl_coef_reward": 0.3, "policy/entropy_coef": 0.01}
        coefs.adapt({"policy/kl_reward": 9.0, "policy/entropy_mean": 0.0}, samples=512)


@pytest.mark.parametrize("measured, factor", [(0.1, 1.0), (0.11, 1.01), (9.0, 1.02), (0.0, 0.98), (0.095, 0.995)])
def test_an_adaptive_penalty_follows_the_clipped_error(measured, factor):
    """The next coefficient is coef * (1 + clip(measured / target - 1, -0.2, 0.2) * samples / horizon)."""
    coefs = coefficients(kl_loss=KLPenalty(0.5, target=0.1, horizon=1000))
    coefs.adapt({"policy/kl_ref": measured}, samples=100)
    assert coefs.current() == {"kl_loss": pytest.approx(0.5 * factor)}


def test_each_penalty_has_its_own_coefficient():
    coefs = coefficients(
        kl_reward=KLPenalty(1.0, target=1.0, horizon=10), kl_loss=KLPenalty(2.0, target=1.0, horizon=10)
    )
    coefs.adapt({"policy/kl_reward": 2.0, "policy/kl_ref": 0.0}, samples=10)
    assert coefs.current() == {"kl_reward": pytest.approx(1.2), "kl_loss": pytest.approx(1.6)}


ENTROPIES = [0.5, 0.3, 0.2, 0.1, 0.05, 0.1, 0.4, 0.15, 0.3, 0.3, 0.3, 0.3, 0.1, 0.1]


def reference(target: float, step: float, highest: float, first: float) -> list[float]:
    """Return the coefficient of each step, by the recursion of the paper from the entropy of the previous step."""
    c, used, last = first, [], None
    for entropy in ENTROPIES:
        used.append(c if last is not None and last <= target else 0.0)
        c = min(max(c + (step if entropy <= target else -step), 0.0), highest)
        last = entropy
    return used


@pytest.mark.parametrize("first", [0.0, 0.02])
def test_the_entropy_bonus_grows_while_the_entropy_is_low_and_is_used_only_then(first):
    coefs, used = coefficients(entropy=EntropyBonus(first, target=0.2, step=0.01, max_coef=0.035)), []
    for entropy in ENTROPIES:
        used.append(coefs.current()["entropy"])
        assert coefs.metrics() == {"policy/entropy_coef": used[-1]}
        coefs.adapt({"policy/entropy_mean": entropy}, samples=8)
    expected = reference(0.2, 0.01, 0.035, first)
    assert used == pytest.approx(expected, abs=1e-12) and 0.035 in expected and used.count(0.0) > 5


@pytest.mark.parametrize("stop", range(len(ENTROPIES)))
def test_a_resumed_run_uses_the_same_coefficients(stop):
    """The state is written as JSON and read again, as in a checkpoint."""
    terms = dict(entropy=EntropyBonus(0.0, target=0.2, step=0.01), kl_loss=KLPenalty(1.0, target=0.2, horizon=10))
    whole, first = Coefficients(terms), Coefficients(terms)
    used = []
    for number, entropy in enumerate(ENTROPIES):
        metrics = {"policy/entropy_mean": entropy, "policy/kl_ref": entropy}
        if number == stop:
            resumed = Coefficients(terms)
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
            first = resumed
        used.append(whole.current())
        assert first.current() == used[-1]
        whole.adapt(metrics, samples=4)
        first.adapt(metrics, samples=4)
    assert len({repr(each) for each in used}) > 5


def test_constant_and_new_coefficients_come_from_the_config():
    before = coefficients(kl_reward=KLPenalty(1.0, target=1.0, horizon=10), kl_loss=KLPenalty(0.01))
    before.adapt({"policy/kl_reward": 5.0, "policy/kl_ref": 1.0}, samples=10)
    now = coefficients(kl_loss=KLPenalty(0.05))
    now.load_state_dict(before.state_dict())
    assert now.current() == {"kl_loss": 0.05} and now.state_dict()["measured"] == {}
    added = coefficients(
        kl_reward=KLPenalty(2.0, target=1.0, horizon=10), kl_loss=KLPenalty(0.3, target=1.0, horizon=10)
    )
    added.load_state_dict(before.state_dict())
    assert added.current() == {"kl_reward": pytest.approx(1.2), "kl_loss": 0.01}


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("target", [None, 0.1])
def test_a_step_that_measured_nothing_leaves_the_coefficients(value, target):
    coefs = coefficients(kl_loss=KLPenalty(0.5, target=target), entropy=EntropyBonus(0.02, target=target))
    coefs.adapt({"policy/kl_ref": 0.1, "policy/entropy_mean": 0.05}, samples=1)
    before = coefs.current()
    coefs.adapt({} if value is None else {"policy/kl_ref": value, "policy/entropy_mean": value}, samples=100)
    assert coefs.current() == before == {"kl_loss": 0.5, "entropy": 0.025 if target else 0.02}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(target=0.0), "target=0.0, step=0.005: both must be greater than 0"),
        (dict(target=0.2, step=0.0), "both must be greater than 0"),
        (
            dict(coef=2.0, target=0.2),
            "max_coef=1.0: the first coefficient, algorithm.entropy_coef=2.0, must be between 0",
        ),
        (dict(coef=-0.1, target=0.2), "algorithm.entropy_coef=-0.1, must be between 0"),
    ],
)
def test_an_impossible_adaptation_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EntropyBonus(**arguments)
