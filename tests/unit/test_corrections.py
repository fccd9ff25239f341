"""Corrections equal plain loops, and pass no gradient through their weights. Also tests mismatch metrics."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from loss_cases import loss_inputs, make_case

from mrl.algorithms.corrections import (
    LEVELS,
    MODES,
    NUMERATORS,
    REJECTION_LEVELS,
    IcePop,
    ImportanceSampling,
    OffPolicyMask,
    Product,
    Rejection,
    compares_old_policy,
    mismatch_metrics,
    mismatch_sums,
)
from mrl.algorithms.inputs import AdvantageInputs
from mrl.algorithms.kl import KLPenalty
from mrl.algorithms.losses import KLCov, PolicyGradient, PPOClip
from mrl.algorithms.objective import EntropyBonus, Objective


def read_text(text):
    """Return an equal string that is another object, like the values that are read from a config file."""
    return "".join(text)


def reference(case, level, mode, low, high, veto=None, numerator="old"):
    """Return for each token its weight, whether this weight is truncated, and whether the token is rejected."""
    found, policy = [], case.old if numerator == "old" else case.logprobs
    for span in case.spans():
        ratios = [math.exp(policy[t]) / math.exp(case.rollout[t]) for t in range(span.start, span.stop)]
        whole = math.prod(ratios)
        vetoed = veto is not None and any(r < veto for r in ratios)
        for own in ratios:
            ratio = {"token": own, "sequence": whole, "geometric": whole ** (1 / len(ratios))}[level]
            outside = not low <= ratio <= high
            weight = {"truncate": min(max(ratio, low), high), "mask": ratio, "reject": 1.0}[mode]
            rejected = vetoed or (outside and mode != "truncate")
            found.append((0.0 if rejected else weight, outside and not rejected, rejected))
    return np.array(found, float).T


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("veto", [None, 0.4])
@pytest.mark.parametrize("numerator", NUMERATORS)
def test_weights_follow_the_definition(level, mode, veto, numerator):
    touched = np.zeros(3)
    for seed in range(5):
        case = make_case(seed)
        weights, numbers = ImportanceSampling(read_text(level), mode, 0.7, 1.3, veto, numerator)(loss_inputs(case))
        expected = reference(case, level, mode, 0.7, 1.3, veto, numerator)
        np.testing.assert_allclose(weights.numpy(), expected[0], rtol=1e-9)
        reported = [
            numbers[f"correction/{name}"].numpy() for name in ("weight_mean", "truncated_fraction", "rejected_fraction")
        ]
        np.testing.assert_allclose(reported, expected, rtol=1e-6)
        touched += expected.sum(1)
    assert (
        touched[0] > 0
        and (touched[1] > 0) == (mode == "truncate")
        and (touched[2] > 0) == bool(mode != "truncate" or veto)
    )


def loop_rejections(case, level, kind, high, policy):
    """Return for each token whether it is rejected."""
    found = []
    for span in case.spans():
        logs = [policy[t] - case.rollout[t] for t in range(span.start, span.stop)]
        own = [x * x / 2 if kind == "k2" else math.exp(x) - 1 - x for x in logs]
        whole = {"sum": sum(own), "mean": sum(own) / len(own), "max": max(own)}.get(level)
        found += [(x if whole is None else whole) > high for x in own]
    return np.array(found)


@pytest.mark.parametrize("level", REJECTION_LEVELS)
@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("numerator", NUMERATORS)
def test_rejections_follow_the_definition(level, kind, numerator):
    marked = []
    for seed in range(5):
        case = make_case(seed)
        weights, numbers = Rejection(0.15, read_text(level), kind, numerator)(loss_inputs(case))
        rejected = loop_rejections(case, level, kind, 0.15, case.old if numerator == "old" else case.logprobs)
        np.testing.assert_array_equal(weights.numpy(), 1.0 - rejected)
        np.testing.assert_array_equal(numbers["correction/rejected_fraction"].numpy(), rejected)
        assert not numbers["correction/truncated_fraction"].any()
        marked.append(rejected)
    assert 0 < np.concatenate(marked).mean() < 1


def batch_of(case):
    """Return the input of `precomputed_columns`: the responses of a case, with the columns of a step."""
    columns = {"old_logprobs": case.old.astype(np.float32), "rollout_logprobs": case.rollout.astype(np.float32)}
    return AdvantageInputs(np.zeros(len(case.old)), np.zeros(len(case.lengths), int), case.lengths, columns)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_batch_normalized_weights_have_the_mean_one_over_the_step(level, mode):
    """The mean over all tokens (or all responses) of the step is 1, however the step is divided into micro-batches."""
    case, correction = make_case(3), ImportanceSampling(level, mode, 0.7, 1.3, batch_normalize=True)
    plain = reference(case, level, mode, 0.7, 1.3)[0]
    np.testing.assert_allclose(correction.step_weights(batch_of(case)), plain, rtol=1e-6)
    each = plain if level == "token" else [plain[span.start] for span in case.spans()]
    mean = sum(each) / len(each)
    assert abs(mean - 1) > 1e-3
    column = correction.precomputed_columns(batch_of(case), np.zeros(15, np.float32), np.random.default_rng(0))
    case.columns.update(column)
    weights, numbers = correction(loss_inputs(case))
    np.testing.assert_allclose(weights.numpy(), plain / mean, rtol=1e-6)
    np.testing.assert_array_equal(numbers["correction/weight_mean"].numpy(), weights.numpy())
    for rows in ([4, 1], [2], [0, 3]):
        index = np.concatenate([np.arange(15)[case.spans()[row]] for row in rows])
        np.testing.assert_array_equal(correction(loss_inputs(case.select(rows)))[0].numpy(), weights.numpy()[index])


def test_tokens_without_a_log_probability_of_the_engine_do_not_count_in_the_mean_of_the_tokens():
    case = make_case(3)
    case.rollout[4] = math.nan
    tokens, responses = (ImportanceSampling(level, batch_normalize=True) for level in ("token", "sequence"))
    known = np.arange(15) != 4
    weights = np.minimum(np.exp(case.old - case.rollout), 2.0)

    def scale(correction):
        columns = correction.precomputed_columns(batch_of(case), np.zeros(15, np.float32), np.random.default_rng(0))
        return next(iter(columns.values()))

    np.testing.assert_allclose(scale(tokens), np.full(15, 1 / weights[known].mean()), rtol=1e-6)
    case.rollout[4] = case.old[4]  # in a product of ratios, the unknown ratio counts as 1
    with_ratio_one = scale(responses)
    case.rollout[4] = math.nan
    np.testing.assert_array_equal(scale(responses), with_ratio_one)


def test_weights_that_are_all_zero_are_not_normalized():
    case = make_case(0)
    case.rollout[:] = case.old - 3.0
    correction = ImportanceSampling("token", "mask", 0.5, 2.0, batch_normalize=True)
    rng = np.random.default_rng(0)
    (column,) = correction.precomputed_columns(batch_of(case), np.zeros(15, np.float32), rng).values()
    assert (column == 1).all()
    columns = {name: np.zeros(0, np.float32) for name in correction.required_inputs}
    nothing = AdvantageInputs(np.zeros(0), np.zeros(0, int), np.zeros(0, int), columns)
    assert all(len(c) == 0 for c in correction.precomputed_columns(nothing, np.zeros(0), rng).values())


def test_a_product_passes_on_what_its_corrections_need():
    case = make_case(3)
    first, second = ImportanceSampling(batch_normalize=True), ImportanceSampling("sequence", batch_normalize=True)
    both = Product([Rejection(0.5), first, second])
    assert both.required_inputs == {"old_logprobs", "rollout_logprobs"}
    assert Product([Rejection(0.5), OffPolicyMask()]).required_inputs == set()
    columns = both.precomputed_columns(batch_of(case), np.zeros(15, np.float32), np.random.default_rng(0))
    case.columns.update(columns)
    inputs = loss_inputs(case)
    expected = Rejection(0.5)(inputs)[0] * first(inputs)[0] * second(inputs)[0]
    assert len(columns) == 2
    torch.testing.assert_close(both(inputs)[0], expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("other", [IcePop(batch_normalize=True), IcePop(batch_normalize=True, veto=0.1)])
def test_a_product_refuses_two_normalized_corrections_whose_columns_would_have_the_same_name(nested, other):
    normalized = ImportanceSampling("token", "mask", 0.5, 5.0, batch_normalize=True)
    with pytest.raises(
        ValueError, match="two corrections with batch_normalize=True have the same level, mode, low and high"
    ):
        Product([normalized, Product([Rejection(0.5), other]) if nested else other])
    Product([normalized, replace(other, high=4.0), IcePop(), IcePop()])


def test_only_corrections_of_the_old_policy_have_nothing_to_correct_if_the_engine_gives_the_old_log_probabilities():
    old, current = ImportanceSampling(), ImportanceSampling(numerator="current")
    assert compares_old_policy(old) and compares_old_policy(Rejection(0.1)) and compares_old_policy(IcePop())
    assert not compares_old_policy(current) and not compares_old_policy(Rejection(0.1, numerator="current"))
    assert compares_old_policy(Product([current, old])) and not compares_old_policy(Product([current, OffPolicyMask()]))


def test_icepop_masks_tokens_on_both_sides():
    case = make_case(1, spread=1.5)
    expected = reference(case, "token", "mask", 0.5, 5.0)[0]
    np.testing.assert_allclose(IcePop()(loss_inputs(case))[0].numpy(), expected, rtol=1e-9)
    ratio = np.exp(case.old - case.rollout)
    assert (ratio < 0.5).any() and (ratio > 5.0).any()
    np.testing.assert_array_equal(expected == 0, (ratio < 0.5) | (ratio > 5.0))


def test_without_bounds_the_weight_is_that_of_decoupled_ppo():
    """The mean over samples of the behavior policy, weighted by pi_prox / pi_behave, is the mean of the proximal policy."""
    rng = np.random.default_rng(0)
    old, rollout = (torch.tensor(rng.normal(size=7)).log_softmax(0).numpy() for _ in range(2))
    case = replace(make_case(0, lengths=(7,)), old=old, rollout=rollout)
    weights, _ = ImportanceSampling(high=math.inf)(loss_inputs(case))
    values = rng.normal(size=7)
    assert (np.exp(rollout) * weights.numpy() * values).sum() == pytest.approx((np.exp(old) * values).sum())


@pytest.mark.parametrize(
    "correction",
    [
        ImportanceSampling(),
        ImportanceSampling("sequence"),
        ImportanceSampling(numerator="current"),
        Rejection(0.1, numerator="current"),
        OffPolicyMask(),
    ],
)
def test_no_gradient_flows_through_weights(correction):
    case = make_case(0)
    logprobs = torch.tensor(case.logprobs, requires_grad=True)
    # The worst case: the old log-probabilities require a gradient.
    inputs = replace(loss_inputs(case, logprobs), old_logprobs=logprobs)
    weights, _ = correction(inputs)
    assert not weights.requires_grad


def test_long_responses_do_not_overflow():
    case = make_case(0, lengths=(4000, 4000))
    case.rollout[:4000], case.rollout[4000:] = case.old[:4000] - 1.0, case.old[4000:] + 1.0
    weights, _ = ImportanceSampling("sequence", "truncate", high=2.0)(loss_inputs(case))
    assert (weights[:4000] == 2.0).all() and (weights[4000:] < 1e-8).all()
    assert (ImportanceSampling("sequence", "mask")(loss_inputs(case))[0] < 1e-8).all()


def test_the_off_policy_mask_rejects_bad_responses_that_drifted():
    case = make_case(3, lengths=(3,) * 12)
    for mask, delta in ((OffPolicyMask(0.1), 0.1), (OffPolicyMask(), 0.05)):
        weights, numbers = mask(loss_inputs(case))
        expected = []
        for span in case.spans():
            steps = range(span.start, span.stop)
            drift = sum(case.rollout[t] - case.logprobs[t] for t in steps) / len(steps)
            expected += [0.0 if case.advantages[t] < 0 and drift > delta else 1.0 for t in steps]
        assert weights.tolist() == expected and 0 < sum(expected) < len(expected)
        assert (numbers["correction/rejected_fraction"].numpy() == 1 - np.array(expected)).all()


def test_a_product_multiplies_weights_and_reports_either_cause():
    case = make_case(4)
    first, second = (
        ImportanceSampling("geometric", "reject", 0.8, 1.2),
        ImportanceSampling("token", "truncate", 0.0, 1.1),
    )
    weights, numbers = Product([first, second])(loss_inputs(case))
    a, b = reference(case, "geometric", "reject", 0.8, 1.2), reference(case, "token", "truncate", 0.0, 1.1)
    np.testing.assert_allclose(weights.numpy(), a[0] * b[0], rtol=1e-9)
    np.testing.assert_allclose(numbers["correction/weight_mean"].numpy(), a[0] * b[0], rtol=1e-9)
    np.testing.assert_array_equal(numbers["correction/rejected_fraction"].numpy(), np.maximum(a[2], b[2]))
    np.testing.assert_array_equal(numbers["correction/truncated_fraction"].numpy(), np.maximum(a[1], b[1]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "word"}, "level='word': expected one of token, sequence, geometric"),
        ({"mode": "cut"}, "mode='cut': expected one of truncate, mask, reject"),
        ({"low": 2.0, "high": 2.0}, "expected 0 <= low < high"),
        ({"low": -1.0}, "expected 0 <= low < high"),
        ({"numerator": "new"}, "numerator='new': expected one of old, current"),
        (
            {"mode": "reject", "batch_normalize": True},
            "batch_normalize needs mode=truncate or mode=mask, and numerator=old",
        ),
        ({"numerator": "current", "batch_normalize": True}, "and numerator=old"),
    ],
)
def test_invalid_arguments_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ImportanceSampling(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"level": "geometric"}, "level='geometric': expected one of token, sum, mean, max"),
        ({"kind": "k1"}, "kind='k1': expected one of k2, k3"),
        ({"numerator": "new"}, "numerator='new': expected one of old, current"),
        ({"high": 0.0}, "high=0.0: must be greater than 0"),
    ],
)
def test_invalid_arguments_of_a_rejection_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Rejection(**{"high": 0.1} | kwargs)


def test_the_objective_weighs_the_policy_loss_alone():
    case, entropy = make_case(2), np.random.default_rng(0).random(15)
    inputs = replace(loss_inputs(case), entropy=torch.tensor(entropy))
    kl = KLPenalty(coef=0.3, kind="k3")
    objective = Objective(PPOClip(), ImportanceSampling(), kl, EntropyBonus(0.01))
    loss, numbers = objective(inputs)
    weights = reference(case, "token", "truncate", 0.0, 2.0)[0]
    penalty = kl.values(case.logprobs, case.columns["ref_logprobs"])
    expected = PPOClip()(inputs)[0].numpy() * weights + 0.3 * penalty - 0.01 * entropy
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(numbers["policy/kl_ref"].numpy(), penalty, rtol=1e-9)
    assert {"loss/clip_fraction", "correction/weight_mean"} <= set(numbers)
    assert objective.required_inputs == {"ref_logprobs"}
    assert objective.uses_entropy and not objective.zero_at_zero_advantage
    changed = objective.with_coefs({"kl_loss": 0.0, "kl_reward": 7.0})
    assert objective.coefs == {"kl_loss": kl.coef, "entropy": 0.01} and changed.coefs == {
        "kl_loss": 0.0,
        "entropy": 0.01,
    }
    inactive = objective.with_coefs({"entropy": 0.0})
    assert not inactive.uses_entropy and not replace(inactive, kl=None).zero_at_zero_advantage
    assert Objective(PPOClip(), ImportanceSampling()).zero_at_zero_advantage


def test_mismatch_metrics_follow_their_definitions():
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(1.0, 400)
    old = rollout + rng.normal(scale=0.2, size=400)
    found = mismatch_metrics({k: v.item() for k, v in mismatch_sums(torch.tensor(old), torch.tensor(rollout)).items()})
    ratios = [math.exp(a) / math.exp(b) for a, b in zip(old, rollout, strict=True)]
    assert found["mismatch/kl"] == pytest.approx(sum(-math.log(r) for r in ratios) / 400)
    assert found["mismatch/k3"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 400)
    assert found["mismatch/chi2"] == pytest.approx(sum(r**2 for r in ratios) / 400 - 1)
    assert found["mismatch/ess_fraction"] == pytest.approx(sum(ratios) ** 2 / sum(r**2 for r in ratios) / 400)
    perplexity = lambda x: math.exp(-sum(x) / len(x))  # noqa: E731
    assert found["mismatch/ppl_ratio"] == pytest.approx(perplexity(old) / perplexity(rollout))


def test_mismatch_divergences_are_right_on_average():
    """Averaged with the probabilities of the engine, the sums equal the divergences."""
    rng = np.random.default_rng(1)
    q, p = (torch.tensor(rng.normal(size=6)).softmax(0).numpy() for _ in range(2))  # engine, trainer
    parts = [mismatch_sums(torch.tensor(np.log(p[k : k + 1])), torch.tensor(np.log(q[k : k + 1]))) for k in range(6)]
    found = mismatch_metrics({name: sum(q[k] * parts[k][name].item() for k in range(6)) for name in parts[0]})
    kl = sum(x * math.log(x / y) for x, y in zip(q, p, strict=True))
    chi2 = sum((y - x) ** 2 / x for x, y in zip(q, p, strict=True))
    assert found["mismatch/kl"] == pytest.approx(kl) and found["mismatch/k3"] == pytest.approx(kl)
    assert found["mismatch/chi2"] == pytest.approx(chi2)
    assert found["mismatch/ess_fraction"] == pytest.approx(1 / (1 + chi2))


def test_mismatch_sums_add_up_and_nothing_sampled_is_nan():
    old, rollout = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.9, -0.7])
    whole, a, b = mismatch_sums(old, rollout), mismatch_sums(old[:1], rollout[:1]), mismatch_sums(old[1:], rollout[1:])
    for name in whole:
        assert (a[name] + b[name]).item() == pytest.approx(whole[name].item(), rel=1e-12)
    same = mismatch_metrics({k: v.item() for k, v in mismatch_sums(old, old).items()})
    expected = dict(kl=0, k3=0, chi2=0, ess_fraction=1, ppl_ratio=1, nan_tokens=0)
    assert same == {f"mismatch/{k}": v for k, v in expected.items()}
    for nothing in (mismatch_sums(old, torch.full((3,), math.nan)), mismatch_sums(old[:0], old[:0])):
        found = mismatch_metrics({k: v.item() for k, v in nothing.items()})
        assert found.pop("mismatch/nan_tokens") in (3.0, 0.0) and all(map(math.isnan, found.values()))
    far = mismatch_metrics(
        {k: v.item() for k, v in mismatch_sums(torch.tensor([-900.0]), torch.tensor([-0.1])).items()}
    )
    assert far["mismatch/kl"] == pytest.approx(899.9) and far["mismatch/ppl_ratio"] == math.inf


@pytest.mark.parametrize(
    "objective",
    [
        Objective(PPOClip(), ImportanceSampling()),
        Objective(PPOClip(), ImportanceSampling("sequence", "mask")),
        Objective(PPOClip(), ImportanceSampling("geometric", "reject", veto=0.1)),
        Objective(PPOClip(), OffPolicyMask()),
        Objective(PPOClip(), Rejection(0.1, "max")),
        Objective(PolicyGradient(), ImportanceSampling(numerator="current"), rollout_logprobs_as_old=True),
        Objective(PPOClip(), rollout_logprobs_as_old=True),
    ],
)
def test_a_token_without_a_log_probability_of_the_engine_has_no_loss(objective):
    """Every other token has the same loss as if the unknown ratio were 1."""
    case = make_case(3)
    ratio_one = loss_inputs(case)
    same = ratio_one.logprobs if objective.rollout_logprobs_as_old else ratio_one.old_logprobs
    ratio_one.rollout_logprobs[4] = same[4]
    expected, _ = objective(ratio_one)
    unknown = loss_inputs(case)
    unknown.rollout_logprobs[4] = math.nan
    unknown.logprobs.requires_grad_()
    loss, metrics = objective(unknown)
    loss.sum().backward()
    assert loss[4] == 0 and unknown.logprobs.grad is not None and unknown.logprobs.grad[4] == 0
    assert torch.isfinite(unknown.logprobs.grad).all()
    others = torch.arange(len(loss)) != 4
    np.testing.assert_allclose(loss[others].detach(), expected[others])
    assert all(torch.isfinite(values).all() for values in metrics.values())


def test_the_mismatch_is_measured_over_the_tokens_that_the_engine_reported():
    old, rollout = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, math.nan, -0.7])
    found, reported = (
        mismatch_metrics({k: v.item() for k, v in mismatch_sums(old[rows], rollout[rows]).items()})
        for rows in ([0, 1, 2], [0, 2])
    )
    assert found.pop("mismatch/nan_tokens") == 1.0 and reported.pop("mismatch/nan_tokens") == 0.0
    assert found == reported and all(map(math.isfinite, found.values()))


def test_a_correction_without_bounds_stays_finite_in_float32():
    case = make_case(0)
    case.rollout[0] = case.old[0] - 200.0
    inputs = loss_inputs(case)
    inputs = replace(inputs, old_logprobs=inputs.old_logprobs.float(), rollout_logprobs=inputs.rollout_logprobs.float())
    weights, _ = ImportanceSampling(high=math.inf)(inputs)
    assert torch.isfinite(weights).all()


@dataclass(frozen=True)
class Likely:
    """Keeps the tokens whose rollout log-probability is above a quantile of all tokens of the step."""

    quantile: float = 0.5
    column: str = "likely"

    @property
    def required_inputs(self):
        return {"rollout_logprobs", "entropies"}

    def precomputed_columns(self, batch, advantages, rng):
        logprobs = batch.columns["rollout_logprobs"]
        return {self.column: (logprobs > np.nanquantile(logprobs, self.quantile)).astype(np.float32)}

    def __call__(self, inputs):
        return inputs.columns[self.column], {}


def test_needs_and_precomputed_columns_of_a_correction_are_those_of_the_objective():
    both = Product([ImportanceSampling(), Likely(), Product([Likely(0.2, "rather_likely")])])
    objective = Objective(KLCov(), both)
    assert objective.required_inputs == {"old_logprobs", "rollout_logprobs", "entropies"}
    assert objective.required_inputs == KLCov.required_inputs | both.required_inputs
    assert Objective(PPOClip(), ImportanceSampling()).required_inputs == frozenset()
    rollout = np.array([-1.0, -2.0, np.nan, -3.0, -4.0], np.float32)
    columns = {"rollout_logprobs": rollout, "old_logprobs": np.array([-1.0, -2.0, -1.0, -3.0, -4.0], np.float32)}
    batch = AdvantageInputs(np.zeros(5), np.zeros(2, int), np.array([3, 2]), columns)
    found = objective.precomputed_columns(batch, np.ones(5, np.float32), np.random.default_rng(0))
    assert set(found) == {"kl_cov", "likely", "rather_likely"}
    assert found["likely"].tolist() == [1, 1, 0, 0, 0] and found["rather_likely"].tolist() == [1, 1, 0, 1, 0]
    with pytest.raises(
        ValueError, match=r"precomputed_columns of Likely \(.*\) returned 'likely', but another column has this name"
    ):
        Product([Likely(), Likely(0.2)]).precomputed_columns(batch, np.ones(5, np.float32), np.random.default_rng(0))
