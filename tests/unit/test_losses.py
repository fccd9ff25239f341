"""Losses equal the formulas of their papers, written as plain loops in float64. Gradients equal central differences."""

import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from loss_cases import clip, loss_and_gradient, loss_inputs, make_case, slopes

from mrl.algorithms.inputs import LossInputs, Responses
from mrl.algorithms.losses import (
    CISPO,
    DPPO,
    DRO,
    SAPO,
    ClipCov,
    CrossEntropy,
    KLCov,
    PolicyGradient,
    PPOClip,
    TopEntropy,
)
from mrl.algorithms.objective import AGGREGATIONS, TokenWeighting, fixed_length, sequence_mean
from mrl.algorithms.sequence_losses import GMPO, GSPO, OPMD, TOPR, VESPO, GSPOToken

# Each reference returns the loss of the token t of a response with the span `span`. `x` are the log-probabilities. `frozen` has
# the same values, and replaces `x` where the paper stops the gradient.


def ppo(case, x, frozen, t, span, dual=None):
    ratio, a = math.exp(x[t] - case.old[t]), case.advantages[t]
    objective = min(ratio * a, clip(ratio, 0.8, 1.3) * a)
    return -max(objective, dual * a) if dual and a < 0 else -objective


def gradient_only(case, x, frozen, t, span):
    return -case.advantages[t] * x[t]


def cispo(case, x, frozen, t, span):
    return -clip(math.exp(frozen[t] - case.old[t]), 0.0, 1.4) * case.advantages[t] * x[t]


def sapo(case, x, frozen, t, span):
    ratio, a = math.exp(x[t] - case.old[t]), case.advantages[t]
    tau = 1.0 if a > 0 else 1.5
    return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


def dppo(case, x, frozen, t, span):
    a, moved = case.advantages[t], math.exp(frozen[t]) - math.exp(case.old[t])
    inside = moved <= 0.15 if a > 0 else moved >= -0.1
    return -min(math.exp(frozen[t]) / math.exp(case.old[t]), 1.3) * a * x[t] * inside


def dppo_kl(case, x, frozen, t, span):
    a, new, old = case.advantages[t], math.exp(frozen[t]), math.exp(case.old[t])
    divergence = old * math.log(old / new) + (1 - old) * math.log((1 - old) / max(1 - new, 1e-8))
    outside = (new > old and divergence > 0.02) if a > 0 else (new < old and divergence > 0.01)
    return -min(new / old, 1.3) * a * x[t] * (not outside)


def dro(case, x, frozen, t, span):
    return -case.advantages[t] * x[t] + 0.4 / 2 * (x[t] - case.old[t]) ** 2


def cross_entropy(case, x, frozen, t, span):
    return -x[t]


def sequence_ratio(case, x, span):
    product = 1.0
    for t in range(span.start, span.stop):
        product *= math.exp(x[t]) / math.exp(case.old[t])
    return product


def gspo(case, x, frozen, t, span):
    s, a = sequence_ratio(case, x, span) ** (1 / (span.stop - span.start)), case.advantages[t]
    return -min(s * a, clip(s, 0.85, 1.1) * a)


def gspo_token(case, x, frozen, t, span):
    s = sequence_ratio(case, frozen, span) ** (1 / (span.stop - span.start))
    s, a = s * math.exp(x[t]) / math.exp(frozen[t]), case.advantages[t]
    return -min(s * a, clip(s, 0.85, 1.1) * a)


def gmpo(case, x, frozen, t, span):
    product = 1.0
    for u in range(span.start, span.stop):
        ratio, a = math.exp(x[u] - case.old[u]), case.advantages[u]
        product *= abs(min(ratio * a, clip(ratio, math.exp(-0.4), math.exp(0.3)) * a))
    sign = math.copysign(1.0, case.advantages[t])
    return -sign * product ** (1 / (span.stop - span.start))


def opmd(case, x, frozen, t, span):
    whole = sum(x[u] - case.old[u] for u in range(span.start, span.stop))
    return -case.advantages[t] * (x[t] - case.old[t]) + 0.7 / 2 * whole**2 / (span.stop - span.start)


def topr(case, x, frozen, t, span):
    a = case.advantages[t]
    weight = min(1.0, sequence_ratio(case, frozen, span)) if a < 0 else 1.0
    return -weight * a * x[t]


def vespo(case, x, frozen, t, span):
    w, a = sequence_ratio(case, frozen, span), case.advantages[t]
    k, scale = (2.0, 3.0) if a >= 0 else (1.5, 0.5)
    return -(w**k) * math.exp(scale * (1 - w)) * a * x[t]


def top_entropy(case, x, frozen, t, span, inner):
    return inner(case, x, frozen, t, span) if case.columns["top_entropy"][t] else 0.0


def clip_cov(case, x, frozen, t, span):
    return 0.0 if case.columns["clip_cov"][t] else -math.exp(x[t] - case.old[t]) * case.advantages[t]


def clip_cov_of_the_authors(case, x, frozen, t, span):
    return 0.0 if case.columns["clip_cov"][t] else ppo(case, x, frozen, t, span)


def kl_cov(case, x, frozen, t, span, absolute=False):
    d = x[t] - case.old[t]
    kl = abs(d) if absolute else math.exp(d) - 1 - d
    return -math.exp(d) * case.advantages[t] + 2.0 * case.columns["kl_cov"][t] * kl


LOSSES = {
    "ppo": (PPOClip(0.2, 0.3), ppo),
    "ppo_dual": (PPOClip(0.2, 0.3, dual_clip=1.5), lambda *args: ppo(*args, dual=1.5)),
    "policy_gradient": (PolicyGradient(), gradient_only),
    "cispo": (CISPO(clip_low=1.0, clip_high=0.4), cispo),
    "sapo": (SAPO(1.0, 1.5), sapo),
    "dppo": (DPPO(0.1, 0.15, max_ratio=1.3), dppo),
    "dppo_kl": (DPPO(0.01, 0.02, max_ratio=1.3, divergence="kl"), dppo_kl),
    "dro": (DRO(beta=0.4), dro),
    "vespo": (VESPO(2.0, 3.0, 1.5, 0.5), vespo),
    "cross_entropy": (CrossEntropy(), cross_entropy),
    "gspo": (GSPO(0.15, 0.1), gspo),
    "gspo_token": (GSPOToken(0.15, 0.1), gspo_token),
    "gmpo": (GMPO(0.4, 0.3), gmpo),
    "opmd": (OPMD(tau=0.7), opmd),
    "topr": (TOPR(), topr),
    "clip_cov": (ClipCov(), clip_cov),
    "clip_cov_of_the_authors": (ClipCov(clip_low=0.2, clip_high=0.3), clip_cov_of_the_authors),
    "kl_cov": (KLCov(coef=2.0), kl_cov),
    "kl_cov_abs": (KLCov(coef=2.0, kl="abs"), lambda *args: kl_cov(*args, absolute=True)),
}
# Every loss can be restricted to the tokens with the largest entropy.
LOSSES |= {
    f"top_entropy_{name}": (TopEntropy(loss), lambda *args, inner=reference: top_entropy(*args, inner=inner))
    for name, (loss, reference) in LOSSES.items()
}
ONE_ADVANTAGE = ("gmpo", "top_entropy_gmpo")  # for responses whose tokens all have the same advantage
SPREAD_OUT = ("top_entropy_gspo", "top_entropy_gmpo")  # the loss of a token has gradients at all tokens of its response


def total(reference, case, x, frozen, weights):
    found = 0.0
    for span in case.spans():
        for t in range(span.start, span.stop):
            found += weights[t] * reference(case, x, frozen, t, span)
    return found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_are_those_of_the_paper(name, seed):
    loss, reference = LOSSES[name]
    case = make_case(seed, per_token=seed % 2 == 1 and name not in ONE_ADVANTAGE)
    weights = np.random.default_rng(seed).random(len(case.old))
    value, gradient = loss_and_gradient(loss, case, weights)
    assert value == pytest.approx(total(reference, case, case.logprobs, case.logprobs, weights), rel=1e-10)
    by_differences = slopes(lambda x: total(reference, case, x, case.logprobs, weights), case.logprobs)
    np.testing.assert_allclose(gradient, by_differences, rtol=1e-6, atol=1e-8)


def test_the_cases_reach_every_branch():
    cases = [make_case(seed) for seed in range(4)]
    for name in ("ppo", "cispo", "gspo", "gspo_token", "gmpo", "topr", "dppo", "dppo_kl"):
        clipped = torch.cat([LOSSES[name][0](loss_inputs(case))[1]["loss/clip_fraction"] for case in cases])
        assert 0 < clipped.mean() < 1, name
    dual = torch.cat([LOSSES["ppo_dual"][0](loss_inputs(case))[1]["loss/dual_clip_fraction"] for case in cases])
    assert 0 < dual.mean() < 1


@pytest.mark.extended_after(20)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up(name, aggregation):
    loss, case = LOSSES[name][0], make_case(7)
    by_row = TokenWeighting(AGGREGATIONS[aggregation], 9)(case.lengths, np.arange(len(case.lengths)))
    weights = by_row[case.rows]
    value, gradient = loss_and_gradient(loss, case, weights)
    parts, pieces = 0.0, np.full(len(weights), np.nan)
    for rows in ([4, 1], [2], [0, 3]):
        part = case.select(rows)
        index = np.concatenate([np.arange(len(weights))[case.spans()[r]] for r in rows])
        some, pieces[index] = loss_and_gradient(loss, part, weights[index])
        parts += some
    assert parts == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(pieces, gradient, rtol=1e-12, atol=1e-15)


class TwoRanks:
    """Sums tensors of two threads, as an all-reduce sums tensors of two ranks."""

    def __init__(self):
        self.barrier, self.slots = threading.Barrier(2, timeout=10), {}

    def reduce(self, rank):
        def add(values):
            self.slots[rank] = values
            self.barrier.wait()
            both = self.slots[0] + self.slots[1]
            self.barrier.wait()
            return both

        return add


@pytest.mark.parametrize("name", LOSSES)
def test_a_response_split_over_two_ranks_has_the_same_loss_and_gradient(name):
    loss, case = LOSSES[name][0], make_case(11, per_token=name not in ONE_ADVANTAGE)
    weights = np.random.default_rng(0).random(len(case.old))
    value, gradient = loss_and_gradient(loss, case, weights)
    ranks, logprobs, results = TwoRanks(), torch.tensor(case.logprobs, requires_grad=True), {}
    index = [np.flatnonzero(np.arange(len(weights)) % 3 != 0), np.flatnonzero(np.arange(len(weights)) % 3 == 0)]

    def run(rank):
        own = index[rank]
        inputs = loss_inputs(case.at(own), logprobs[own], case.rows[own], ranks.reduce(rank))
        results[rank] = (loss(inputs)[0] * torch.tensor(weights[own])).sum()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = results[0] + results[1]
    together.backward()
    assert together.item() == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_and_luspo_are_objectives_of_whole_responses(name, aggregation, seed):
    """Equation 5 of GSPO is the mean of min(s A, clip(s) A) over responses. LUSPO multiplies each term by the length."""
    case = make_case(seed)

    def objective(x):
        found = 0.0
        for span in case.spans():
            length, a = span.stop - span.start, case.advantages[span.start]
            s = sequence_ratio(case, x, span) ** (1 / length)
            scale = length if aggregation == "sequence_sum" else 1
            found -= scale * min(s * a, clip(s, 0.85, 1.1) * a) / len(case.lengths)
        return found

    weights = TokenWeighting(AGGREGATIONS[aggregation])(case.lengths, case.lengths)[case.rows]
    value, gradient = loss_and_gradient(LOSSES[name][0], case, weights)
    assert value == pytest.approx(objective(case.logprobs), rel=1e-10)
    np.testing.assert_allclose(gradient, slopes(objective, case.logprobs), rtol=1e-6, atol=1e-9)


def test_opmd_is_the_squared_error_of_whole_responses_but_for_a_constant():
    case, tau = make_case(3), 0.7

    def squares(x):
        found = 0.0
        for span in case.spans():
            whole = sum(x[u] - case.old[u] for u in range(span.start, span.stop))
            found += (case.advantages[span.start] - tau * whole) ** 2 / (2 * tau)
        return found / (len(case.lengths) * 9)

    weights = TokenWeighting(fixed_length, 9)(case.lengths, case.lengths)[case.rows]
    value, gradient = loss_and_gradient(OPMD(tau=tau), case, weights)
    firsts = [case.advantages[span.start] for span in case.spans()]
    constant = sum(a**2 for a in firsts) / (2 * tau) / (len(firsts) * 9)
    assert value + constant == pytest.approx(squares(case.logprobs), rel=1e-10)
    np.testing.assert_allclose(gradient, slopes(squares, case.logprobs), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_zero_without_advantage_is_declared_correctly(name):
    loss, zero = LOSSES[name][0], True
    for seed in range(3):
        case = make_case(seed)
        case.advantages[:] = 0.0
        value, gradient = loss_and_gradient(loss, case, np.ones(len(case.old)))
        zero = zero and value == 0 and not gradient.any()
    assert loss.zero_at_zero_advantage == zero


POLICY_GRADIENTS = [
    n for n in LOSSES if n not in SPREAD_OUT and not n.endswith("cross_entropy") and "clip_cov" not in n
]


@pytest.mark.parametrize("name", POLICY_GRADIENTS)
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(name):
    case = make_case(5)
    case.old[:] = case.logprobs
    weights = TokenWeighting(sequence_mean)(case.lengths, case.lengths)[case.rows]
    _, gradient = loss_and_gradient(LOSSES[name][0], case, weights)
    trained = case.columns["top_entropy"] if name.startswith("top_entropy") else 1.0
    np.testing.assert_allclose(gradient, -weights * case.advantages * trained, rtol=1e-9, atol=1e-12)


def test_a_response_without_tokens_changes_nothing():
    for name, (loss, _) in LOSSES.items():
        value, gradient = loss_and_gradient(loss, make_case(1, lengths=(2, 0, 3, 0)), np.ones(5))
        assert math.isfinite(value) and np.isfinite(gradient).all(), name


def test_token_weights_give_the_declared_means_and_sums():
    lengths, losses = np.array([1, 3, 0, 4]), [np.array([2.0]), np.arange(3.0), np.zeros(0), np.ones(4)]

    def weigh(how, limit=None):
        weights = TokenWeighting(AGGREGATIONS[how], limit)(lengths, np.zeros(4, int))
        return sum((w * x).sum() for w, x in zip(weights, losses, strict=True))

    assert weigh("token_mean") == pytest.approx(np.concatenate(losses).mean())
    assert weigh("sequence_mean") == pytest.approx((2.0 + 1.0 + 0.0 + 1.0) / 4)
    assert weigh("fixed_length", 10) == pytest.approx((2.0 + 3.0 + 0.0 + 4.0) / (4 * 10))
    assert weigh("token_sum") == 2.0 + 3.0 + 4.0
    assert weigh("sequence_sum") == (2.0 + 3.0 + 0.0 + 4.0) / 4
    with pytest.raises(ValueError, match="max_response_tokens=None"):
        weigh("fixed_length")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_token_weights_accept_batches_without_tokens(aggregation, lengths):
    lengths = np.array(lengths, np.int64)
    weights = TokenWeighting(AGGREGATIONS[aggregation], 4)(lengths, lengths)
    assert weights.shape == (len(lengths),) and np.isfinite(weights).all()


def wrong_weights(inputs, value=1.0, count=None):
    return np.full(len(inputs.lengths) if count is None else count, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(count=3), r"returned an array of shape \(3,\); expected one number for each of the 2 responses"),
        (dict(value="x"), "returned a ndarray of <U1; expected an array of numbers"),
        (dict(value=float("nan")), "returned nan at index 0, and 2 of 2 values are not finite"),
        (dict(value=-0.5), "returned the weight -0.5; expected numbers of 0 or more"),
    ],
)
def test_wrong_token_weights_are_refused(arguments, message):
    source = r"algorithm.aggregation: wrong_weights \(.*test_losses.py:\d+\)"
    with pytest.raises(ValueError, match=f"{source} {message}"):
        TokenWeighting(partial(wrong_weights, **arguments))(np.array([4, 2]), np.array([0, 0]))


FAR = [-100.0, -60.0, -0.1, 0.3, 60.0, 100.0]  # log-ratios; exp overflows in float32 above 88.7


def far_gradient(loss, sign: float) -> np.ndarray:
    """Return the float32 gradient of a loss for responses of one token with the log-ratios FAR. All values are finite."""
    total = len(FAR)
    logprobs = torch.full((total,), -1.0, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=-1.0 - torch.tensor(FAR),
        advantages=torch.full((total,), sign),
        entropy=torch.zeros(total),
        rollout_logprobs=torch.full((total,), -1.0),
        responses=Responses(torch.arange(total), torch.ones(total, dtype=torch.int64)),
        columns={"clip_cov": torch.zeros(total), "kl_cov": torch.ones(total), "top_entropy": torch.ones(total)},
    )
    values, metrics = loss(inputs)
    values.sum().backward()
    assert logprobs.grad is not None
    assert all(torch.isfinite(x).all() for x in (values, logprobs.grad, *metrics.values()))
    return logprobs.grad.double().numpy()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_far_log_ratios_give_finite_gradients_in_float32(name, sign):
    far_gradient(LOSSES[name][0], sign)


def test_beyond_the_clip_the_gradient_of_a_far_log_ratio_is_zero():
    """The references are float64, in which exp(100) does not overflow."""
    ratio = np.exp(np.array(FAR, np.float64))
    soft = 1 / (1 + np.exp(-np.minimum(ratio - 1, 700)))
    clipped = lambda high: np.where(ratio <= 1 + high, -ratio, 0.0)  # noqa: E731
    expected = {
        "ppo": clipped(0.3),
        "ppo_dual": clipped(0.3),
        "clip_cov_of_the_authors": clipped(0.3),
        "gspo": clipped(0.1),
        "gspo_token": clipped(0.1),
        "gmpo": np.where(np.array(FAR) <= 0.3, -ratio, 0.0),
        "sapo": -4 * soft * (1 - soft) * np.where(soft < 1, ratio, 0.0),
    }
    for name, gradient in expected.items():
        np.testing.assert_allclose(far_gradient(LOSSES[name][0], 1.0), gradient, rtol=1e-5, atol=1e-8, err_msg=name)
